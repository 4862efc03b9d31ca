#!/usr/bin/env python3
"""A U-Net's training step on one GPU, voxgrad against its twin in PyTorch, in one process, in alternating runs.

    bench/compare_unet.py LIBRARY [--modes bf16 high ...] [--runs 10] [--steps 20] [--json FILE]

LIBRARY is the built libunet_peers.so. The model is nnU-Net's plain convolutional U-Net with four levels: two 3^3
convolutions a level with InstanceNorm and LeakyReLU, 32 channels at first, ConvTranspose3d k2 s2 up, three classes;
patches of 128^3, batch 2; Dice + cross-entropy, clipping at 12, SGD with Nesterov momentum.

Modes: highest (float32), high (TF32), bf16 and f16 (autocast; f16 with a gradient scaler). In the layout channels_last
input and weights are, on both sides. Both start from equal weights, take the same steps on the same data, and print the
largest difference of their losses, and of voxgrad's to its own in float32. Then they are timed in turn: medians of
CUDA-event times of whole steps, the most memory that is allocated at once, and ratios to voxgrad's.
"""

import argparse
import ctypes
import datetime
import gc
import json
import os
import statistics
import sys

import torch
from torch import nn
from torch.nn import functional as F

from compare_gpu import gpu, timed

MODES = {"highest": (0, 0), "high": (1, 0), "bf16": (1, 2), "f16": (1, 3)}  # TF32, autocast's dtype


def block(in_channels, out_channels, stride):
    layers = []
    for i in range(2):
        layers += [nn.Conv3d(out_channels if i else in_channels, out_channels, 3, 1 if i else stride, 1),
                   nn.InstanceNorm3d(out_channels, affine=True), nn.LeakyReLU(0.01)]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    def __init__(self, levels, channels, classes):
        super().__init__()
        wide = [channels << i for i in range(levels)]
        self.down = nn.ModuleList(block(wide[i - 1] if i else 1, wide[i], 2 if i else 1) for i in range(levels))
        self.up = nn.ModuleList(nn.ConvTranspose3d(2 * c, c, 2, 2) for c in wide[-2::-1])
        self.join = nn.ModuleList(block(2 * c, c, 1) for c in wide[-2::-1])
        self.head = nn.Conv3d(channels, classes, 1)

    def forward(self, x):
        skips = []
        for stage in self.down:
            skips.append(x := stage(x))
        for i, (up, join) in enumerate(zip(self.up, self.join)):
            x = join(torch.cat([up(x), skips[-2 - i]], 1))
        return self.head(x)


def dice_ce(logits, target):
    """Of all samples together, without the background class, and the cross-entropy, in float32."""
    logits = logits.float()
    p = logits.softmax(1)[:, 1:]
    t = F.one_hot(target, logits.shape[1]).movedim(-1, 1)[:, 1:].to(p.dtype)
    axes = (0, 2, 3, 4)
    dice = (2 * (p * t).sum(axes) + 1e-5) / (p.sum(axes) + t.sum(axes) + 1e-5)
    return (1 - dice).mean() + F.cross_entropy(logits, target)


class Ours:
    def __init__(self, library, options, mode, layout, model, x, target):
        self.library = library
        high, low = MODES[mode]
        parameters = [p.detach().contiguous() for p in model.parameters()]
        pointers = (ctypes.c_void_p * len(parameters))(*(p.data_ptr() for p in parameters))
        self.keep = (x, target)
        torch.cuda.synchronize()
        i64 = ctypes.c_int64
        self.call("make", i64(options.levels), i64(options.channels), i64(options.classes), high, low,
                  int(layout == "channels_last"), pointers, i64(len(parameters)), ctypes.c_void_p(x.data_ptr()),
                  ctypes.c_void_p(target.data_ptr()), i64(x.shape[0]), i64(x.shape[-1]))
        self.replays = False

    def call(self, name, *arguments):
        function = getattr(self.library, "voxgrad_unet_" + name)
        function.restype = ctypes.c_char_p
        if error := function(*arguments):
            raise RuntimeError("voxgrad: " + error.decode())

    def step(self):
        self.call("replay" if self.replays else "step")

    def loss(self):
        loss = ctypes.c_double()
        self.call("loss", ctypes.byref(loss))
        return loss.value

    def peak(self):
        """Of steps until now; counts from here on."""
        peak = ctypes.c_int64()
        self.call("peak", ctypes.byref(peak))
        return peak.value

    def capture(self):
        self.call("capture")
        self.replays = True

    def drop(self):
        self.call("drop")


class Theirs:
    def __init__(self, options, mode, layout, model, x, target, compiled):
        high, low = MODES[mode]
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = bool(high)
        last = layout == "channels_last"
        self.model = UNet(options.levels, options.channels, options.classes).cuda()
        self.model.load_state_dict(model.state_dict())
        if last:
            self.model = self.model.to(memory_format=torch.channels_last_3d)
        self.run = torch.compile(self.model) if compiled else self.model
        self.x = x.contiguous(memory_format=torch.channels_last_3d) if last else x
        self.target = target
        self.low = {0: None, 2: torch.bfloat16, 3: torch.float16}[low]
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01, 0.99, weight_decay=3e-5, nesterov=True)
        self.scaler = torch.amp.GradScaler("cuda", enabled=self.low == torch.float16)

    def step(self):
        self.optimizer.zero_grad()
        with torch.autocast("cuda", self.low, enabled=self.low is not None):
            logits = self.run(self.x)
        self.result = dice_ce(logits, self.target)
        self.scaler.scale(self.result).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 12)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.result = self.result.detach()

    def loss(self):
        return self.result.item()

    def peak(self):
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return peak

    def drop(self):
        self.__dict__.clear()


def data(options):
    torch.manual_seed(0)
    shape = (options.batch, *(3 * [options.size]))
    coarse = torch.randn(options.batch, 1, *(3 * [options.size // 8]), device="cuda")
    smooth = F.interpolate(coarse, size=shape[1:], mode="trilinear")
    target = (smooth[:, 0] > 0.5).long() + (smooth[:, 0] > 1).long()
    return smooth + 0.5 * torch.randn_like(smooth), target, UNet(options.levels, options.channels, options.classes).cuda()


def losses(side, steps):
    values = []
    for _ in range(steps):
        side.step()
        values.append(side.loss())
    return values


def profile(side):
    """Kernels of a step, by time."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        side.step()
        torch.cuda.synchronize()
    rows = sorted(profiler.key_averages(), key=lambda row: -row.device_time_total)
    total = sum(row.device_time_total for row in rows)
    print(f"  {total / 1e3:.2f} ms in {sum(row.count for row in rows)} kernels and copies")
    for row in rows[:40]:
        print(f"  {row.device_time_total / 1e3:8.3f} ms {row.count:5d}  {row.key[:150]}")


def measure(make, options, exact):
    """Losses of the first steps, then the median time and the peak of a step; or what went wrong."""
    gc.collect()
    torch.cuda.empty_cache()
    side = None
    try:
        side = make()
        got = losses(side, options.steps)
        side.peak()
        side.step()
        peak = side.peak()
        if isinstance(side, Ours) and options.graph:
            side.capture()
        side.step()
        if options.profile:
            profile(side)
        times = [timed(side.step) for _ in range(options.runs)]
        row = {"ms": statistics.median(times), "peak": peak, "losses": got,
               "difference": max(abs(a - b) for a, b in zip(got, exact or got))}
        print(f"  {row['ms']:.2f} ms", flush=True)
    except Exception as error:  # of the many things that may fail, each has its own
        row = {"error": " ".join(str(error).split())[:200]}
        print("  " + row["error"], flush=True)
    if side is not None:
        side.drop()
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["bf16", "high"])
    parser.add_argument("--layouts", nargs="+", choices=("contiguous", "channels_last"),
                        default=["contiguous", "channels_last"])
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=2, help="how often the sides take turns")
    parser.add_argument("--levels", type=int, default=4)
    parser.add_argument("--channels", type=int, default=32)
    parser.add_argument("--classes", type=int, default=3)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--graph", action="store_true", help="voxgrad's timed steps are replays of a CUDA graph")
    parser.add_argument("--ours", action="store_true", help="voxgrad alone")
    parser.add_argument("--profile", action="store_true", help="list the kernels of a step")
    parser.add_argument("--uncompiled", action="store_true", help="leave torch.compile out")
    parser.add_argument("--json")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("compare_unet: PyTorch finds no CUDA GPU")
    torch.backends.cudnn.benchmark = True
    library = ctypes.CDLL(os.path.abspath(options.library))
    x, target, model = data(options)
    head = f"{gpu()}, PyTorch {torch.__version__}, {datetime.date.today()}, medians of {options.runs} steps"
    print(head)
    exact = measure(lambda: Ours(library, options, "highest", "contiguous", model, x, target), options, None)
    if "error" in exact:
        sys.exit(exact["error"])
    table = {"highest, voxgrad, contiguous": [exact]}
    for mode in options.modes:
        for _ in range(options.rounds):
            for layout in options.layouts:
                sides = {f"{mode}, voxgrad, {layout}": lambda: Ours(library, options, mode, layout, model, x, target)}
                if not options.ours:
                    for compiled in (False, True)[:1 if options.uncompiled else 2]:
                        name = "torch.compile" if compiled else "PyTorch"
                        sides[f"{mode}, {name}, {layout}"] = (
                            lambda compiled=compiled: Theirs(options, mode, layout, model, x, target, compiled))
                for name, make in sides.items():
                    print(name, flush=True)
                    table.setdefault(name, []).append(measure(make, options, exact["losses"]))
    print("| | ms a step | peak GB | largest difference of a loss to float32 |\n|---|---:|---:|---:|")
    for name, rows in table.items():
        good = [row for row in rows if "ms" in row]
        if good:
            print(f"| {name} | {min(r['ms'] for r in good):.2f} | {good[0]['peak'] / 1e9:.2f} | "
                  f"{good[0]['difference']:.1e} |")
        else:
            print(f"| {name} | {rows[0]['error']} | | |")
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"head": head, "table": table}, file, indent=1)


if __name__ == "__main__":
    main()
