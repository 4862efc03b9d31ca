#!/usr/bin/env python3
"""Compares networks in voxgrad and PyTorch on one GPU: the time and memory of a training step and of a forward pass.

    bench/compare_unet.py LIBRARY [--network six] [--modes bf16 high ...] [--sides voxgrad graph torch compile]
                          [--runs 10] [--steps 20] [--json FILE]

LIBRARY is the built libunet_peers.so. --network selects the network:
  six       nnU-Net v2's plain U-Net: six stages with 32, 64, 128, 256, 320 and 320 channels (31.2 M parameters) and
            deep supervision with weights 1, 1/2, 1/4, 1/8 and 0, scaled to a sum of 1. Each stage has two 3^3
            convolutions, each followed by InstanceNorm and LeakyReLU. The decoder upsamples by ConvTranspose3d with
            kernel and stride 2.
  four      the same with four stages (5.6 M parameters) and a loss at full resolution only
  resenc    nnU-Net's residual encoder with the stages of `six` (102.4 M parameters), 1, 3, 4, 6, 6 and 6 blocks per
            stage, one convolution per stage of the decoder, and a loss at full resolution only
  mednext3, mednext5  MedNeXt-B with 32 channels, depthwise convolutions of 3^3 (10.5 M parameters) or 5^3 (11.0 M
            parameters), and a loss at full resolution only
Training uses patches of 128^3 voxels, batch 2, Dice and cross-entropy loss, gradient clipping at 12, and SGD with
Nesterov momentum. For deep supervision, PyTorch receives downsampled label maps, as nnU-Net's loader provides them.
voxgrad receives the full label map and downsamples it in each step.

The modes are highest (float32), high (TF32), bf16 and f16 (autocast; f16 with a gradient scaler). The sides are
voxgrad (eager, and as a CUDA graph) and PyTorch (eager, and with torch.compile for the model and the loss). --layouts
selects the memory format of the input and the weights. All sides start from equal weights and take the same steps on
the same data. The sides alternate for --rounds rounds.

For each side, the program prints the largest difference of its losses from PyTorch's losses in float32, the median
times of a step and of a forward pass without gradients (measured by CUDA events), and the peak memory of a step and of
a forward pass. The peak memory of a CUDA graph does not include the memory that its capture allocated.
"""

import argparse
import ctypes
import datetime
import gc
import json
import os
import statistics
import sys

# Each value is a pair: whether float32 products use TF32 (1 or 0), and the dtype of autocast (0: no autocast, 2: bf16,
# 3: f16).
MODES = {"highest": (0, 0), "high": (1, 0), "bf16": (1, 2), "f16": (1, 3)}
NETWORKS = {"six": {"stages": 6, "deep": True}, "four": {"stages": 4}, "resenc": {"stages": 6, "residual": True},
            "mednext3": {"stages": 5, "mednext": 3}, "mednext5": {"stages": 5, "mednext": 5}}
BLOCKS = [1, 3, 4, 6, 6, 6]  # residual blocks per stage
MAX_CHANNELS = 320
SIDES = {"voxgrad": "voxgrad", "graph": "voxgrad, CUDA graph", "torch": "PyTorch", "compile": "torch.compile"}


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", help="path of libunet_peers.so")
    parser.add_argument("--network", choices=NETWORKS, default="six", help="see above (default: six)")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["bf16", "high"],
                        help="see above (default: bf16 high)")
    parser.add_argument("--layouts", nargs="+", choices=("contiguous", "channels_last"),
                        default=["contiguous", "channels_last"],
                        help="memory formats of the input and the weights (default: both)")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES), help="see above (default: all)")
    parser.add_argument("--runs", type=int, default=10, help="timed steps and timed forward passes (default: 10)")
    parser.add_argument("--steps", type=int, default=20, help="steps whose losses are compared (default: 20)")
    parser.add_argument("--rounds", type=int, default=2,
                        help="number of times that each side is measured; the fastest time counts")
    parser.add_argument("--stages", type=int, help="number of stages (default: that of --network)")
    parser.add_argument("--channels", type=int, default=32, help="channels of the first stage (default: 32)")
    parser.add_argument("--classes", type=int, default=3,
                        help="output channels of the network, at least 3; the labels are 0, 1 and 2 (default: 3)")
    parser.add_argument("--size", type=int, default=128, help="voxels along each side of a patch (default: 128)")
    parser.add_argument("--batch", type=int, default=2, help="patches per step (default: 2)")
    parser.add_argument("--recompute", action="store_true", help="voxgrad recomputes each stage in the backward pass")
    parser.add_argument("--profile", action="store_true", help="print the kernels of a step")
    parser.add_argument("--no-reference", action="store_true",
                        help="do not compute PyTorch's losses in float32, which takes too long for large patches")
    parser.add_argument("--json", metavar="FILE", help="write all results to this file")
    options = parser.parse_args()
    network = {"deep": False, "residual": False, "mednext": 0} | NETWORKS[options.network]
    options.stages = options.stages or network.pop("stages")
    vars(options).update({name: value for name, value in network.items() if name != "stages"})
    return options


if __name__ == "__main__":
    OPTIONS = parse()  # before the imports of other packages, because --help must work without them

import torch
from torch import nn
from torch.nn import functional as F

from compare_gpu import gpu, timed


class ConvNorm(nn.Module):
    def __init__(self, in_channels, out_channels, stride=1, kernel=3, bias=True, activated=True):
        super().__init__()
        self.conv = nn.Conv3d(in_channels, out_channels, kernel, stride, kernel // 2, bias=bias)
        self.norm = nn.InstanceNorm3d(out_channels, affine=True)
        self.activated = activated

    def forward(self, x):
        x = self.norm(self.conv(x))
        return F.leaky_relu(x, 0.01, inplace=True) if self.activated else x


class ResidualBlock(nn.Module):
    def __init__(self, in_channels, out_channels, stride=1):
        super().__init__()
        self.conv1 = ConvNorm(in_channels, out_channels, stride)
        self.conv2 = ConvNorm(out_channels, out_channels, activated=False)
        self.skip = nn.Sequential()
        if stride != 1:
            self.skip.append(nn.AvgPool3d(stride, stride))
        if in_channels != out_channels:
            self.skip.append(ConvNorm(in_channels, out_channels, kernel=1, bias=False, activated=False))

    def forward(self, x):
        return F.leaky_relu(self.conv2(self.conv1(x)) + self.skip(x), 0.01, inplace=True)


class Stack(nn.Module):
    """A stage: an nn.Sequential with the name `name` of `count` modules, which `part` creates.

    Only the first module has the stride `stride`.
    """

    def __init__(self, name, part, count, in_channels, out_channels, stride=1):
        super().__init__()
        self.name = name
        self.add_module(name, nn.Sequential(part(in_channels, out_channels, stride),
                                            *(part(out_channels, out_channels) for _ in range(count - 1))))

    def forward(self, x):
        return getattr(self, self.name)(x)


class Encoder(nn.Module):
    def __init__(self, channels, residual):
        super().__init__()
        if residual:
            self.stem = Stack("convs", ConvNorm, 1, 1, channels[0])
        inputs = [channels[0] if residual else 1] + channels
        sizes = [(*pair, 2 if i else 1) for i, pair in enumerate(zip(inputs, channels))]
        self.stages = nn.ModuleList(
            Stack("blocks", ResidualBlock, BLOCKS[i], *size) if residual else
            nn.Sequential(Stack("convs", ConvNorm, 2, *size)) for i, size in enumerate(sizes))
        self.residual = residual

    def forward(self, x):
        skips = []
        if self.residual:
            x = self.stem(x)
        for stage in self.stages:
            skips.append(x := stage(x))
        return skips


class Decoder(nn.Module):
    def __init__(self, channels, classes, convs):
        super().__init__()
        up = channels[-2::-1]
        self.stages = nn.ModuleList(Stack("convs", ConvNorm, convs, 2 * c, c) for c in up)
        self.transpconvs = nn.ModuleList(nn.ConvTranspose3d(channels[-1 - i], c, 2, 2) for i, c in enumerate(up))
        self.seg_layers = nn.ModuleList(nn.Conv3d(c, classes, 1) for c in up)

    def forward(self, skips, deep):
        x, logits = skips[-1], []
        for i, (stage, up, head) in enumerate(zip(self.stages, self.transpconvs, self.seg_layers)):
            x = stage(torch.cat([up(x), skips[-2 - i]], 1))
            if deep or i == len(self.stages) - 1:
                logits.insert(0, head(x))
        return logits


class UNet(nn.Module):
    """A U-Net. Its parameters have the same names as in nnU-Net's networks and in nn::UNet."""

    def __init__(self, options):
        super().__init__()
        channels = [min(options.channels << i, MAX_CHANNELS) for i in range(options.stages)]
        self.encoder = Encoder(channels, options.residual)
        self.decoder = Decoder(channels, options.classes, 1 if options.residual else 2)
        for module in self.modules():
            if isinstance(module, (nn.Conv3d, nn.ConvTranspose3d)):
                nn.init.kaiming_normal_(module.weight, 0.01)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, x, deep=False):
        """Returns a list with the logits of all levels, starting with full resolution.

        If `deep` is False, the list contains only the logits at full resolution.
        """
        return self.decoder(self.encoder(x), deep)


class Block(nn.Module):
    """A block of MedNeXt. `scale` is 1 to keep the resolution, 2 to halve it, or -2 to double it."""

    def __init__(self, in_channels, out_channels, expansion, kernel, scale=1):
        super().__init__()
        c, k, wide = in_channels, kernel, expansion * in_channels
        self.skip = nn.Sequential()
        if scale == -2:
            self.depthwise = nn.Sequential(nn.ConvTranspose3d(c, c, k, 2, k // 2, 1, groups=c))
            self.skip.append(nn.ConvTranspose3d(c, out_channels, 1, 2, 0, 1))
        else:
            self.depthwise = nn.Sequential(nn.Conv3d(c, c, k, scale, k // 2, groups=c))
            if scale == 2:
                self.skip.append(nn.Conv3d(c, out_channels, 1, 2))
        self.norm = nn.GroupNorm(c, c)
        self.expand, self.compress = nn.Conv3d(c, wide, 1), nn.Conv3d(wide, out_channels, 1)

    def forward(self, x):
        return self.skip(x) + self.compress(F.gelu(self.expand(self.norm(self.depthwise(x)))))


class MedNeXt(nn.Module):
    """MedNeXt-B. Its parameters have the same names as in examples/nnunet/mednext.h."""

    LEVELS, EXPANSION = 5, [2, 3, 4, 4, 4, 4, 4, 3, 2]

    def __init__(self, options):
        super().__init__()
        last, kernel = self.LEVELS - 1, options.mednext
        # The channels of each part: the levels of the encoder, the bottleneck, and the levels of the decoder.
        channels = [options.channels << min(i, 2 * last - i) for i in range(2 * last + 1)]
        def block(i, o, part, *scale):
            return Block(channels[i], channels[o], self.EXPANSION[part], kernel, *scale)
        self.stem = nn.Conv3d(1, channels[0], 1)
        self.blocks = nn.ModuleList(nn.Sequential(*(block(i, i, i) for _ in range(2))) for i in range(2 * last + 1))
        self.down = nn.ModuleList(block(i, i + 1, i + 1, 2) for i in range(last))
        self.up = nn.ModuleList(block(i, i + 1, i + 1, -2) for i in range(last, 2 * last))
        self.heads = nn.ModuleList(nn.Conv3d(c, options.classes, 1) for c in channels[:last + 1])

    def forward(self, x, deep=False):
        """Returns a list with the logits at full resolution. There is no deep supervision."""
        skips, x = [], self.stem(x)
        for blocks, down in zip(self.blocks, self.down):
            skips.append(blocks(x))
            x = down(skips[-1])
        x = self.blocks[len(skips)](x)
        for blocks, up in zip(self.blocks[len(skips) + 1:], self.up):
            x = blocks(skips.pop() + up(x))
        return [self.heads[0](x)]


def make_model(options):
    return (MedNeXt if options.mednext else UNet)(options)


def dice_ce(logits, target):
    """Returns the sum of the Dice loss and the cross-entropy in float32.

    The Dice loss treats the batch as one sample and ignores the background class.
    """
    logits = logits.float()
    p = logits.softmax(1)[:, 1:]
    t = F.one_hot(target, logits.shape[1]).movedim(-1, 1)[:, 1:].to(p.dtype)
    axes = (0, 2, 3, 4)
    dice = (2 * (p * t).sum(axes) + 1e-5) / (p.sum(axes) + t.sum(axes) + 1e-5)
    return (1 - dice).mean() + F.cross_entropy(logits, target)


def deep_loss(levels, targets):
    weights = [0.5 ** i for i in range(max(1, len(levels) - 1))]
    return sum(w / sum(weights) * dice_ce(*pair) for w, pair in zip(weights, zip(levels, targets)))


def downsampled(target, deep, stages):
    """Returns a label map for each level that the loss uses, like nnU-Net's DownsampleSegForDSTransform."""
    levels = max(1, stages - 2) if deep else 1
    sizes = [[n >> i for n in target.shape[1:]] for i in range(levels)]
    return [target if i == 0 else F.interpolate(target[:, None].float(), size, mode="nearest-exact")[:, 0].long()
            for i, size in enumerate(sizes)]


class NetworkArguments(ctypes.Structure):
    """The struct NetworkArguments of unet_peers.cpp."""

    _fields_ = [(name, ctypes.c_int64) for name in ("stages", "channels", "max_channels", "classes", "mednext_kernel")]
    _fields_ += [(name, ctypes.c_int) for name in ("residual", "recompute")]


class Voxgrad:
    """A training run of voxgrad, eager or as a CUDA graph. An operation is "step" or "forward"."""

    def __init__(self, library, options, mode, layout, model, x, target, graph):
        self.library, self.graph, self.captured = library, graph, set()
        tf32, autocast_dtype = MODES[mode]
        state = {name: p.detach().contiguous() for name, p in model.named_parameters()}
        names = (ctypes.c_char_p * len(state))(*(name.encode() for name in state))
        pointers = (ctypes.c_void_p * len(state))(*(p.data_ptr() for p in state.values()))
        self.keep = (x, target)
        torch.cuda.synchronize()
        i64 = ctypes.c_int64
        network = NetworkArguments(options.stages, options.channels, MAX_CHANNELS, options.classes, options.mednext,
                                   options.residual, options.recompute)
        self.call("make", ctypes.byref(network), int(options.deep), tf32, autocast_dtype,
                  int(layout == "channels_last"), names, pointers, i64(len(state)), ctypes.c_void_p(x.data_ptr()),
                  ctypes.c_void_p(target.data_ptr()), i64(x.shape[0]), i64(x.shape[-1]))

    def call(self, name, *arguments):
        function = getattr(self.library, "voxgrad_unet_" + name)
        function.restype = ctypes.c_char_p
        if error := function(*arguments):
            raise RuntimeError("voxgrad: " + error.decode())

    def run(self, operation):
        self.call(("replay_" if operation in self.captured else "") + operation)

    def step(self):
        self.run("step")

    def forward(self):
        self.run("forward")

    def warm_up(self, operation):
        """Runs an operation once. For a CUDA graph, also captures the operation and replays it once."""
        self.run(operation)
        if self.graph:
            self.call("capture_" + operation)
            self.captured.add(operation)
            self.run(operation)

    def loss(self):
        loss = ctypes.c_double()
        self.call("loss", ctypes.byref(loss))
        return loss.value

    def peak(self):
        """Returns the peak memory since the last call in bytes, and starts a new measurement."""
        peak = ctypes.c_int64()
        self.call("peak", ctypes.byref(peak))
        return peak.value

    def drop(self):
        self.call("drop")


class Torch:
    """A training run of PyTorch, eager or with torch.compile."""

    def __init__(self, options, mode, layout, model, x, target, compiled):
        tf32, autocast_dtype = MODES[mode]
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = bool(tf32)
        last = layout == "channels_last"
        self.model = make_model(options).to(x.device)
        self.model.load_state_dict(model.state_dict())
        if last:
            self.model = self.model.to(memory_format=torch.channels_last_3d)
        self.run, self.criterion = self.model, deep_loss
        if compiled:
            torch.compiler.reset()  # each mode compiles again, and torch.compile limits the number of compilations
            self.run, self.criterion = torch.compile(self.model), torch.compile(deep_loss)
        self.x = x.contiguous(memory_format=torch.channels_last_3d) if last else x
        self.deep, self.targets = options.deep, downsampled(target, options.deep, options.stages)
        self.autocast_dtype = {0: None, 2: torch.bfloat16, 3: torch.float16}[autocast_dtype]
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01, 0.99, weight_decay=3e-5, nesterov=True)
        self.scaler = torch.amp.GradScaler(x.device.type, enabled=self.autocast_dtype == torch.float16)

    def autocast(self):
        return torch.autocast(self.x.device.type, self.autocast_dtype or torch.bfloat16,
                              enabled=self.autocast_dtype is not None)

    def step(self):
        self.optimizer.zero_grad()
        with self.autocast():
            levels = self.run(self.x, self.deep)
            self.result = self.criterion(levels, self.targets)
        self.scaler.scale(self.result).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 12)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.result = self.result.detach()

    def forward(self):
        with torch.no_grad(), self.autocast():
            self.logits = self.run(self.x)[0]

    def warm_up(self, operation):
        getattr(self, operation)()

    def loss(self):
        return self.result.item()

    def peak(self):
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return peak

    def drop(self):
        self.__dict__.clear()


def data(options, device="cuda"):
    """Returns a random input, its labels 0, 1 and 2, and a model with random parameters."""
    torch.manual_seed(0)
    shape = (options.batch, *(3 * [options.size]))
    coarse = torch.randn(options.batch, 1, *(3 * [options.size // 8]), device=device)
    smooth = F.interpolate(coarse, size=shape[1:], mode="trilinear")
    target = (smooth[:, 0] > 0.5).long() + (smooth[:, 0] > 1).long()
    return smooth + 0.5 * torch.randn_like(smooth), target, make_model(options).to(device)


def losses(side, steps):
    """Runs the steps. Returns the loss of each step."""
    values = []
    for _ in range(steps):
        side.step()
        values.append(side.loss())
    return values


def profile(side):
    """Prints the kernels of a step, sorted by time."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        side.step()
        torch.cuda.synchronize()
    rows = sorted(profiler.key_averages(), key=lambda row: -row.device_time_total)
    total = sum(row.device_time_total for row in rows)
    print(f"  {total / 1e3:.2f} ms in {sum(row.count for row in rows)} kernels and copies")
    for row in rows[:40]:
        print(f"  {row.device_time_total / 1e3:8.3f} ms {row.count:5d}  {row.key[:150]}")


def measure_operation(side, operation, runs):
    """Returns the median milliseconds and the peak memory in bytes of the operation "step" or "forward"."""
    side.warm_up(operation)
    side.peak()
    getattr(side, operation)()
    peak = side.peak()
    return statistics.median(timed(getattr(side, operation)) for _ in range(runs)), peak


def measure(make, options, exact):
    """Returns a row with the losses of the first steps, the times and the peak memory.

    `exact` contains PyTorch's losses in float32. If an exception is raised, the row contains only the message.
    """
    gc.collect()
    torch.cuda.empty_cache()
    side = None
    try:
        side = make()
        got = losses(side, options.steps)
        ms, peak = measure_operation(side, "step", options.runs)
        if options.profile:
            profile(side)
        forward, forward_peak = measure_operation(side, "forward", options.runs)
        row = {"ms": ms, "peak": peak, "forward": forward, "forward_peak": forward_peak, "losses": got,
               "difference": max(abs(a - b) for a, b in zip(got, exact or got))}
        print(f"  {ms:.2f} ms, forward {forward:.2f}", flush=True)
    except Exception as error:  # PyTorch and torch.compile can raise exceptions of many types
        row = {"error": " ".join(str(error).split())[:200]}
        print("  " + row["error"], flush=True)
    if side is not None:
        side.drop()
    return row


def report(table):
    print("| | ms per step | peak GB | ms forward | peak GB | largest difference of a loss from float32 |\n"
          "|---|---:|---:|---:|---:|---:|")
    for name, rows in table.items():
        good = [row for row in rows if "ms" in row]
        if good:
            step, forward = (min(row[key] for row in good) for key in ("ms", "forward"))
            print(f"| {name} | {step:.2f} | {good[0]['peak'] / 1e9:.2f} | {forward:.2f} | "
                  f"{good[0]['forward_peak'] / 1e9:.2f} | {good[0]['difference']:.1e} |")
        else:
            print(f"| {name} | {rows[0]['error']} | | | | |")


def main(options):
    if not torch.cuda.is_available():
        sys.exit("compare_unet: PyTorch finds no CUDA GPU")
    torch.backends.cudnn.benchmark = True
    library = ctypes.CDLL(os.path.abspath(options.library))
    x, target, model = data(options)
    head = (f"{gpu()}, PyTorch {torch.__version__}, {datetime.date.today()}, {options.network}, {options.stages} stages, "
            f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters, medians of {options.runs} runs")
    print(head)

    def make(side, mode, layout):
        if side in ("voxgrad", "graph"):
            return Voxgrad(library, options, mode, layout, model, x, target, side == "graph")
        return Torch(options, mode, layout, model, x, target, side == "compile")

    table, exact = {}, {"losses": None}
    if not options.no_reference:
        exact = measure(lambda: make("torch", "highest", "contiguous"), options, None)
        if "error" in exact:
            sys.exit(exact["error"])
        table["highest, PyTorch, contiguous"] = [exact]
    for mode in options.modes:
        for _ in range(options.rounds):
            for layout in options.layouts:
                for side in options.sides:
                    name = f"{mode}, {SIDES[side]}, {layout}"
                    print(name, flush=True)
                    table.setdefault(name, []).append(
                        measure(lambda: make(side, mode, layout), options, exact["losses"]))
    report(table)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"head": head, "table": table}, file, indent=1)


if __name__ == "__main__":
    main(OPTIONS)
