#!/usr/bin/env python3
"""Transposed convolution on one GPU, voxgrad against PyTorch with cuDNN, in one process, in turn, on the same buffers.

    bench/compare_gpu.py LIBRARY [--modes high highest bf16] [--shapes L1-70 ... | --set beyond] [--runs 15] [--alone] [--json FILE] [--markdown FILE]

LIBRARY is the built libconv_peers.so. Each figure is the median of CUDA-event times; the two sides take turns run by
run. The last timed results are compared: exits with 1 if they differ by more than rounding explains, or if a figure
is above what the hardware can do. --alone leaves PyTorch's timings out (its float64 result still checks ours).
Forward + backward is the sum of the three parts on both sides. Ours makes both gradients in one call, too, as autograd
does ("backward"): timed by itself, and it has to give the bits of the two alone.
"""

import argparse
import ctypes
import datetime
import json
import math
import statistics
import subprocess
import sys

import torch
import torch.nn.functional as F

# name: batch, Cin, Cout, size, kernel, stride, padding, output_padding, dilation, groups
SHAPES = {
    "L1-58": (16, 32, 16, (16, 32, 64), (3, 5, 7), 1, 0, 0, 1, 1),
    "L1-61": (8, 48, 48, (64, 64, 64), 3, 1, 0, 0, 1, 1),
    "L1-68": (16, 32, 64, (64, 64, 64), (3, 5, 5), 1, 0, 0, 1, 1),
    "L1-70": (8, 48, 24, (96, 96, 96), 3, 1, 0, 0, 1, 1),
    "L1-72": (8, 32, 32, (12, 24, 48), (3, 5, 7), 2, (1, 2, 3), 1, 1, 4),
    "L1-73": (4, 32, 32, (32, 64, 128), 3, 2, 1, 0, 1, 4),
    "L1-77": (16, 32, 64, (16, 32, 32), 3, 2, 1, 0, 2, 1),
    "L2-61": (16, 64, 128, (32, 32, 32), 3, 1, 0, 0, 1, 1),
    "L2-100": (16, 64, 128, (24, 48, 48), 3, 2, 1, 0, 1, 1),
    "L2-78": (16, 32, 64, (32, 32, 32), 5, 2, 2, 0, 1, 1),
    "L2-72": (64, 3, 16, (32, 32, 32), 3, 2, 1, 0, 1, 1),
    "dec256": (4, 256, 128, (16, 16, 16), 4, 2, 1, 0, 1, 1),
    "dec64": (4, 64, 32, (64, 64, 64), 4, 2, 1, 0, 1, 1),
}
# Beyond them: batch 1, powers of two, odd sizes and channels, few and many channels.
BEYOND = {
    "one48": (1, 48, 48, (64, 64, 64), 3, 1, 0, 0, 1, 1),
    "one-dec": (1, 128, 64, (32, 32, 32), 4, 2, 1, 0, 1, 1),
    "pow32": (8, 32, 32, (32, 32, 32), 3, 1, 1, 0, 1, 1),
    "pow64": (2, 64, 64, (64, 64, 64), 3, 1, 1, 0, 1, 1),
    "pow128": (1, 16, 16, (128, 128, 128), 3, 1, 1, 0, 1, 1),
    "odd33": (4, 33, 17, (31, 37, 41), 3, 1, 1, 0, 1, 1),
    "odd-s2": (2, 65, 31, (23, 29, 19), 5, 2, 2, 1, 1, 1),
    "odd-s3": (2, 24, 40, (17, 21, 25), 5, 3, 1, 2, 1, 1),
    "k1": (4, 128, 64, (48, 48, 48), 1, 1, 0, 0, 1, 1),
    "wide": (1, 256, 256, (24, 24, 24), 3, 1, 1, 0, 1, 1),
    "few": (4, 16, 3, (64, 64, 64), 3, 1, 1, 0, 1, 1),
    "depthwise": (4, 32, 32, (64, 64, 64), 3, 1, 1, 0, 1, 32),
    "few-s2": (2, 16, 16, (32, 64, 64), 4, 2, 1, 0, 1, 1),
}
# One axis grows: the time should with it.
SWEEP = {f"depth{d}": (2, 48, 48, (d, 48, 48), 3, 1, 1, 0, 1, 1) for d in (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)}
SETS = {"peers": SHAPES, "beyond": BEYOND, "sweep": SWEEP}
ALL = {name: shape for shapes in SETS.values() for name, shape in shapes.items()}
# dtype, its number for the library, float32 precision "high", what a relative error may be (forward and data
# gradient; weight gradient), TFLOP/s that no kernel can pass (measured wgmma rates of an H200, with a margin)
MODES = {
    "high": (torch.float32, 0, 1, 5e-4, 5e-4, 500.0),
    "highest": (torch.float32, 0, 0, 2e-6, 4e-6, 170.0),
    "bf16": (torch.bfloat16, 2, 0, 3e-3, 3e-3, 950.0),
    "f16": (torch.float16, 3, 0, 5e-4, 5e-4, 950.0),
}
PEAK = {"high": 402e12, "highest": 402e12 / 3, "bf16": 797e12, "f16": 797e12}  # the floor's arithmetic, FLOP/s
COPY = 4.23e12  # bytes a second, read + write
PARTS = ("forward", "data", "weight")
BACKWARD = "backward"  # data and weight gradient by one call: ours
PLAN = ("plain", "mma_sync", "narrow", "slide", "slots", "depth", "pairs", "sets", "width")  # of ConvChoice


def triple(v):
    return (v,) * 3 if isinstance(v, int) else tuple(v)


class Case:
    def __init__(self, name, dtype):
        batch, cin, cout, size, k, s, p, op, dil, self.groups = ALL[name]
        self.kernel, self.stride, self.padding, self.dilation = map(triple, (k, s, p, dil))
        self.output_padding = triple(op)
        out = [(size[a] - 1) * self.stride[a] - 2 * self.padding[a] + self.dilation[a] * (self.kernel[a] - 1)
               + self.output_padding[a] + 1 for a in range(3)]
        generator = torch.Generator(device="cuda").manual_seed(0)
        make = lambda *shape: torch.randn(shape, device="cuda", generator=generator).to(dtype)
        self.x = make(batch, cin, *size)
        self.w = make(cin, cout // self.groups, *self.kernel) / math.sqrt(cin * math.prod(self.kernel) / math.prod(self.stride))
        self.w = self.w.to(dtype)
        self.g = make(batch, cout, *out)
        self.flop = 2 * batch * cin * math.prod(size) * (cout // self.groups) * math.prod(self.kernel)
        self.bytes = self.x.element_size() * (self.x.numel() + self.g.numel() + self.w.numel())

    def torch_forward(self, x, w):
        return F.conv_transpose3d(x, w, None, self.stride, self.padding, self.output_padding, self.groups, self.dilation)

    def torch_part(self, part, x, w, g):
        if part == "forward":
            return self.torch_forward(x, w)
        mask = [part == "data", part == "weight", False]
        return torch.ops.aten.convolution_backward(g, x, w, None, list(self.stride), list(self.padding),
                                                   list(self.dilation), True, list(self.output_padding), self.groups,
                                                   mask)[PARTS.index(part) - 1]


class Ours:
    def __init__(self, path, plan):
        library = ctypes.CDLL(path)
        library.voxgrad_force_conv(*(plan.get(key, 0) for key in PLAN))
        self.call = library.voxgrad_conv_transpose
        self.call.restype = ctypes.c_char_p

    def run(self, case, mode, part, result):
        _, dtype, high, *_ = MODES[mode]
        x, w, g = case.x, case.w, case.g
        operands = {"forward": (x, w, result), "data": (result, w, g), "weight": (x, result, g)}.get(part, (x, w, g))
        gradients = [t.data_ptr() for t in result] if part == BACKWARD else (None, None)
        longs = lambda v: (ctypes.c_int64 * len(v))(*v)
        error = self.call((*PARTS, BACKWARD).index(part), dtype, high, 0,
                          *(ctypes.c_void_p(t.data_ptr()) for t in operands), *map(ctypes.c_void_p, gradients),
                          *(longs(t.shape) for t in operands), longs(case.stride), longs(case.padding),
                          longs(case.dilation), ctypes.c_int64(case.groups))
        if error:
            sys.exit("voxgrad: " + error.decode())


def timed(function):
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def reference_error(case, part, result):
    """Relative error of a part of the result against float64."""
    n = min(case.x.shape[0], 1) if part != "weight" else case.x.shape[0]
    step = 1
    x, w, g = (t.double() for t in (case.x[:n], case.w, case.g[:n]))
    if part == "weight":  # sample by sample: float64 workspaces are large
        exact = sum(case.torch_part(part, x[i:i + step], w, g[i:i + step]) for i in range(0, n, step))
        got = result.double()
    else:
        exact = case.torch_part(part, x, w, g)
        got = result[:n].double()
    return ((got - exact).norm() / exact.norm()).item()


def measure(ours, name, mode, options):
    dtype, _, high, limit, weight_limit, ceiling = MODES[mode]
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = bool(high)
    case = Case(name, dtype)
    row = {"shape": name, "mode": mode, "flop": case.flop, "bytes": case.bytes,
           "floor": max(case.flop / PEAK[mode], case.bytes / COPY) * 1e3}
    if not options.alone:
        last = [t.to(memory_format=torch.channels_last_3d) for t in (case.x, case.w, case.g)]
    poisoned = lambda t: torch.full_like(t, float("nan"))
    results = {"forward": poisoned(case.g), "data": poisoned(case.x), "weight": poisoned(case.w),
               BACKWARD: (poisoned(case.x), poisoned(case.w))}
    for part, result in results.items():
        sides = {"ours": lambda: ours.run(case, mode, part, result)}
        if part != BACKWARD and not options.alone:
            sides["torch"] = lambda: case.torch_part(part, case.x, case.w, case.g)
            sides["torch_cl"] = lambda: case.torch_part(part, *last)
        times = {side: [] for side in sides}
        for function in sides.values():
            for _ in range(2):
                function()
        torch.cuda.synchronize()
        for _ in range(options.runs):
            for side, function in sides.items():
                times[side].append(timed(function))
        for side in sides:
            row[f"{part}_{side}"] = statistics.median(times[side])
        achieved = case.flop * (2 if part == BACKWARD else 1) / row[f"{part}_ours"] / 1e9
        if achieved > ceiling or case.bytes / row[f"{part}_ours"] / 1e6 > 4900:
            sys.exit(f"{name} {mode} {part}: {achieved:.0f} TFLOP/s is more than the hardware can do")
        if part == BACKWARD:
            if not all(torch.equal(t, results[alone]) for t, alone in zip(result, ("data", "weight"))):
                row["wrong"] = True
        elif not options.unchecked:
            row[f"{part}_error"] = error = reference_error(case, part, result)
            if not error < (weight_limit if part == "weight" else limit):
                row["wrong"] = True
    return row


def table(rows, mode, alone):
    total = lambda r, side: sum(r[f"{p}_{side}"] for p in PARTS)
    lines = [f"### {mode}", ""]
    lines.append("| shape | floor fwd | ours fwd | data | weight | % of floor f/d/w | TFLOP/s f/d/w | error f/d/w" +
                 ("" if alone else " | PyTorch fwd | cl | ratio fwd | ours f+b | PyTorch | cl | ratio f+b") + " |")
    lines.append("|" + "---|" * (8 if alone else 15))
    ratios, both = [], []
    for r in rows:
        tflops = "/".join(f"{r['flop'] / r[p + '_ours'] / 1e9:.0f}" for p in PARTS)
        errors = "/".join(f"{r.get(p + '_error', math.nan):.1e}" for p in PARTS)
        of_floor = "/".join(f"{100 * r['floor'] / r[p + '_ours']:.0f}" for p in PARTS)
        line = (f"| {r['shape']} | {r['floor']:.3f} | {r['forward_ours']:.3f} | {r['data_ours']:.3f} | "
                f"{r['weight_ours']:.3f} | {of_floor} | {tflops} | {errors}{' WRONG' if r.get('wrong') else ''}")
        if not alone:
            fwd = min(r["forward_torch"], r["forward_torch_cl"]) / r["forward_ours"]
            fb = min(total(r, "torch"), total(r, "torch_cl")) / total(r, "ours")
            ratios.append(fwd)
            both.append(fb)
            line += (f" | {r['forward_torch']:.3f} | {r['forward_torch_cl']:.3f} | {fwd:.2f} | {total(r, 'ours'):.2f} | "
                     f"{total(r, 'torch'):.2f} | {total(r, 'torch_cl'):.2f} | {fb:.2f}")
        lines.append(line + " |")
    if ratios:
        mean = lambda v: math.exp(sum(map(math.log, v)) / len(v))
        lines += ["", f"Against the better of PyTorch's two layouts: forward {mean(ratios):.2f}x (least {min(ratios):.2f}), "
                      f"forward + backward {mean(both):.2f}x (least {min(both):.2f})."]
    return "\n".join(lines)


def write(options, head, rows):
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"head": head, "rows": rows}, file, indent=1)
    if options.markdown:
        modes = dict.fromkeys(row["mode"] for row in rows)
        tables = [table([row for row in rows if row["mode"] == mode], mode, options.alone) for mode in modes]
        with open(options.markdown, "w") as file:
            file.write(head + "\n\n" + "\n\n".join(tables) + "\n")


def gpu():
    """Name, driver, and the clock now and at most."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,clocks.sm,clocks.max.sm", "--format=csv,noheader", "--id=0"]
    try:
        name, driver, now, most = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split(", ")
        return f"{name}, driver {driver}, {now} of {most.strip()}"
    except (OSError, subprocess.CalledProcessError, ValueError):
        return torch.cuda.get_device_name()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["high", "highest", "bf16"])
    parser.add_argument("--shapes", nargs="+", choices=ALL, help="default: all of the set")
    parser.add_argument("--set", choices=SETS, default="peers")
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--unchecked", action="store_true", help="leave the comparison with float64 out")
    parser.add_argument("--plan", nargs="+", default=[], metavar="KEY=N",
                        help=f"force the planner's choice: {', '.join(PLAN)}")
    parser.add_argument("--json")
    parser.add_argument("--markdown")
    options = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    ours = Ours(options.library, {key: int(n) for key, n in (item.split("=") for item in options.plan)})
    rows = []
    head = (f"{gpu()}, PyTorch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}, "
            f"CUDA {torch.version.cuda}, {datetime.date.today()}, medians of {options.runs} runs, milliseconds")
    print(head, flush=True)
    for mode in options.modes:
        of_mode = []
        for name in options.shapes or SETS[options.set]:
            of_mode.append(measure(ours, name, mode, options))
            torch.cuda.empty_cache()
            rows.append(of_mode[-1])
            write(options, head, rows)  # a run that is ended keeps what it has measured
            print(mode, name, *(f"{key}={rows[-1][key]:.3f}" for key in rows[-1] if key.endswith(("_ours", "_torch", "_cl"))),
                  file=sys.stderr, flush=True)
        print(table(of_mode, mode, options.alone), flush=True)
    sys.exit(any(r.get("wrong") for r in rows))


if __name__ == "__main__":
    main()
