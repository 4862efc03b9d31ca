#!/usr/bin/env python3
"""Compares convolutions of voxgrad and PyTorch (cuDNN) on one GPU, alternately in one process on the same buffers.

    bench/compare_gpu.py LIBRARY [--modes high highest bf16] [--set nnunet] [--shapes NAME ...] [--layout contiguous]
    bench/compare_gpu.py LIBRARY --set race --seed 7 --count 60 --unchecked --json race.json
    bench/compare_gpu.py LIBRARY --modes bf16 --shapes 'C 4x256>512 24 k3 s2 p1' --plan cluster=1

LIBRARY is the built libconv_peers.so. voxgrad and PyTorch take turns after each run. Each time is the median over the
runs, measured by CUDA events; the runs together take about --ms milliseconds. A run of a small problem consists of many
consecutive calls. Consecutive calls use different copies of the buffers; all copies together do not fit into the L2
cache. A time is marked "h" if the host needed more than 90 % of it to launch the calls: the kernels may then be faster.
voxgrad's tensors have the layout --layout. PyTorch is timed in both layouts, and the faster layout counts.

In the table, "f+b" is the time of the forward pass plus the time of one call that computes both gradients. "efficiency
f/d/w" is the floor as a percentage of voxgrad's time, for the forward pass, the data gradient and the weight gradient.
The floor is an estimate of the time that an H200 needs to compute the FLOP or to move the bytes of the problem,
whichever is longer. docs/performance.md explains how the efficiency can exceed 100 %.

voxgrad's results must agree with PyTorch's results in float64 (for large problems, in float32 without TF32). One call
for both gradients must give the same bits as two separate calls. The program exits with 1 if a result is wrong, if
voxgrad fails, or if a time is shorter than the hardware permits. It reports failures below the table and continues with
the next problem. The times of each pass alone are printed to stderr.
"""

import argparse
import ctypes
import datetime
import json
import math
import statistics
import subprocess
import sys
import time
from functools import partial

import conv_shapes

# The columns: PyTorch's dtype; the number of voxgrad's DType; 1 for float32 precision "high", otherwise 0; the maximum
# relative error of the forward pass and of the data gradient; the maximum relative error of the weight gradient; the
# maximum plausible TFLOP/s (the rate of wgmma measured on an H200, plus a margin).
MODES = {
    "high": ("float32", 0, 1, 5e-4, 5e-4, 500.0),
    "highest": ("float32", 0, 0, 2e-6, 4e-6, 170.0),
    "bf16": ("bfloat16", 2, 0, 3e-3, 3e-3, 950.0),
    "f16": ("float16", 3, 0, 5e-4, 5e-4, 950.0),
}
# Rates of an H200 for the floor: FLOP/s by mode, and bytes per second of a copy (bytes read plus bytes written).
PEAK = {"high": 402e12, "highest": 402e12 / 3, "bf16": 797e12, "f16": 797e12}
DEPTHWISE_PEAK = 61e12  # float32 on CUDA cores, in all modes
COPY = 4.23e12
PARTS = ("forward", "data", "weight")  # the forward pass, the data gradient, the weight gradient
BACKWARD = "backward"  # both gradients in one call
TIMED_IN_TORCH = ("forward", BACKWARD)
TORCH = {"torch": "contiguous", "torch_cl": "channels_last"}  # name of a PyTorch side: its memory format
FLOAT64_FLOP = 2e10  # larger problems are checked in float32
FLOAT32_ERROR = 1e-5  # maximum error of the float32 reference
# The members of voxgrad::cuda::ConvChoice, and the values of ConvKernel.
PLAN = ("kernel", "unsplit", "k_blocks", "m_tiles", "pairs", "width", "slide", "cluster", "copies", "columns")
KERNELS = ("any", "plain", "mma_sync", "multistage_wgrad", "small_channel", "few_inputs", "few_outputs", "pointwise",
           "depthwise", "fprop_dgrad", "wgrad")
LAYOUTS = {"contiguous": "contiguous_format", "channels_last": "channels_last_3d"}  # PyTorch's names
ROTATED_BYTES = 400e6  # minimum size of all copies of a problem's buffers together; the L2 cache has 50 MB
MAX_COPIES = 64
RUN_MS = 2.0  # intended duration of a run
MAX_CALLS = 64  # maximum number of calls in a run


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", help="path of libconv_peers.so")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["high", "highest", "bf16"],
                        help="high (TF32), highest (float32), bf16, f16 (default: high highest bf16)")
    conv_shapes.add_options(parser, "peers")
    parser.add_argument("--layout", choices=LAYOUTS, default="channels_last", help="memory format of voxgrad's tensors")
    parser.add_argument("--runs", type=int, default=15, help="maximum number of runs for each median, at least 3")
    parser.add_argument("--ms", type=float, default=40, help="milliseconds of GPU time for each median")
    parser.add_argument("--alone", action="store_true", help="do not time PyTorch")
    parser.add_argument("--unchecked", action="store_true", help="do not compare results with PyTorch")
    parser.add_argument("--plan", nargs="+", default=[], metavar="KEY=N",
                        help=f"override choices of the planner; KEY is one of {', '.join(PLAN)}, and the value of "
                             f"kernel is one of {', '.join(KERNELS)}")
    parser.add_argument("--json", metavar="FILE", help="write all results to this file")
    parser.add_argument("--markdown", metavar="FILE", help="write the tables to this file")
    parser.add_argument("--list", action="store_true", help="print the problems without running them")
    options = parser.parse_args()
    options.shapes = conv_shapes.selected(parser, options)
    return options


if __name__ == "__main__":
    OPTIONS = parse()  # before the imports of other packages, because --help must work without them

import torch


class Case:
    """The buffers of a problem: for each layout, copies of (input, weight, output gradient)."""

    def __init__(self, shape, dtype):
        self.shape = shape
        self.stride, self.padding, self.output_padding, self.dilation = (
            list(conv_shapes.triple(v)) for v in (shape.stride, shape.padding, shape.output_padding, shape.dilation))
        generator = torch.Generator(device="cuda").manual_seed(0)
        make = lambda *size: torch.randn(size, device="cuda", generator=generator)
        x, w = make(shape.batch, shape.cin, *conv_shapes.triple(shape.size)), make(*shape.weight_size())
        g = make(shape.batch, shape.cout, *shape.output_size())
        w /= math.sqrt(max(1, shape.flop() / (2 * g.numel())))  # so that outputs have a variance of about 1
        tensors = [t.to(dtype) for t in (x, w, g)]
        self.bytes = sum(t.numel() * t.element_size() for t in tensors)
        self.copies = max(1, min(MAX_COPIES, math.ceil(ROTATED_BYTES / self.bytes)))
        self.buffers = {layout: [[t.clone(memory_format=getattr(torch, form)) for t in tensors] for _ in range(self.copies)]
                        for layout, form in LAYOUTS.items()}

    def torch(self, part, x, w, g):
        """Returns a function that runs a part of PARTS, or BACKWARD, in PyTorch."""
        options = (self.stride, self.padding, self.dilation, self.shape.transposed, self.output_padding,
                   self.shape.groups)
        if part == "forward":
            return partial(torch.ops.aten.convolution.default, x, w, None, *options)
        mask = [part != "weight", part != "data", False]
        return partial(torch.ops.aten.convolution_backward.default, g, x, w, None, *options, mask)


def raise_error(error, *_):
    if error:
        raise RuntimeError(error.decode())


class Voxgrad:
    """voxgrad's convolutions. `plan` contains members of ConvChoice, which override choices of the planner."""

    def __init__(self, path, plan):
        library = ctypes.CDLL(path)
        library.voxgrad_force_conv(*(plan.get(key, 0) for key in PLAN))
        self.function = library.voxgrad_conv
        self.function.restype, self.function.errcheck = ctypes.c_char_p, raise_error

    def part(self, case, mode, layout, part, copy, result):
        """Returns a function that runs a part in voxgrad. `copy` is the number of the copy of the buffers."""
        _, dtype, high, *_ = MODES[mode]
        x, w, g = case.buffers[layout][copy]
        operands = {"forward": (x, w, result), "data": (result, w, g), "weight": (x, result, g)}.get(part, (x, w, g))
        gradients = result if part == BACKWARD else ()
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in (*operands, *gradients)] + [None] * (2 - len(gradients))
        longs = lambda v: (ctypes.c_int64 * len(v))(*v)
        return partial(self.function, int(case.shape.transposed), (*PARTS, BACKWARD).index(part), dtype, high,
                       int(layout == "channels_last"), *pointers, *(longs(t.shape) for t in operands),
                       longs(case.stride), longs(case.padding), longs(case.dilation),
                       ctypes.c_int64(case.shape.groups))


def timed(function):
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


class Side:
    """A side of the comparison: voxgrad, or PyTorch in one memory format.

    Times functions that do the same work on different copies of the buffers. Each run appends two numbers: to `times`,
    the milliseconds of a call on the GPU, and to `host`, the milliseconds in which the host queued a call.
    """

    def __init__(self, functions, options):
        self.functions, self.kept, self.next, self.calls = functions, [None] * len(functions), 0, 1
        self.times, self.host = [], []
        self.run()  # a warm-up, in which cuDNN selects its algorithms
        self.calls = len(functions)
        self.run()  # allocates a result for each copy of the buffers
        self.calls = 1
        self.run()
        once = max(self.times[-1], 1e-3)
        self.calls = max(1, min(MAX_CALLS, int(RUN_MS / once)))
        self.runs = max(3, min(options.runs, math.ceil(options.ms / (once * self.calls))))
        self.times, self.host = [], []

    def queue(self):
        began = time.perf_counter()
        for _ in range(self.calls):  # keep the results; otherwise, the allocator would reuse their memory
            self.kept[self.next] = self.functions[self.next]()
            self.next = (self.next + 1) % len(self.kept)
        self.host.append((time.perf_counter() - began) * 1e3 / self.calls)

    def run(self):
        self.times.append(timed(self.queue) / self.calls)


def attempt(row, name, function):
    """Returns the result of the function.

    If the function raises a RuntimeError, stores the message in row["failed"][name] and returns None.
    """
    try:
        return function()
    except RuntimeError as error:
        row["failed"][name] = str(error).strip().split("\n")[0][:300]


def time_sides(functions, options, row, part):
    """Times all sides alternately and records the medians in the row. Skips a side after a failure."""
    sides = {name: attempt(row, f"{part}_{name}", partial(Side, functions[name], options)) for name in functions}
    running = lambda: [name for name in sides if sides[name] and f"{part}_{name}" not in row["failed"]]
    for i in range(max((sides[name].runs for name in running()), default=0)):
        for name in running():
            if i < sides[name].runs:
                attempt(row, f"{part}_{name}", sides[name].run)
    for name in running():
        row[f"{part}_{name}"] = statistics.median(sides[name].times)
        row[f"{part}_{name}_host"] = statistics.median(sides[name].host)
    if "voxgrad" in running():
        row[f"{part}_of_floor"] = 100 * row["floor"] / row[f"{part}_voxgrad"]


def set_torch(tf32, benchmark):
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = bool(tf32)
    torch.backends.cudnn.benchmark = benchmark


def reference_error(case, part, result):
    """Returns the relative error of a result and the dtype of PyTorch's reference.

    A weight gradient, which is a sum over all samples, is compared as a whole. For other parts, only the first sample
    is compared.
    """
    dtype = torch.float64 if case.shape.flop() < FLOAT64_FLOP else torch.float32
    x, w, g = case.buffers["contiguous"][0]
    exact = 0
    # Process one sample at a time, to save workspace and to keep float32 sums short.
    for i in range(x.shape[0] if part == "weight" else 1):
        value = case.torch(part, *(t.to(dtype) for t in (x[i:i + 1], w, g[i:i + 1])))()
        exact = exact + (value if part == "forward" else value[PARTS.index(part) - 1]).double()
    got = (result if part == "weight" else result[:1]).double()
    return ((got - exact).norm() / exact.norm()).item(), dtype


def check(row, case, mode, results, options):
    """Records implausible times and wrong results of voxgrad in the row."""
    _, _, _, limit, weight_limit, ceiling = MODES[mode]
    ran = [part for part in results if f"{part}_voxgrad" in row]
    for part in ran:
        rate = case.shape.flop() * (2 if part == BACKWARD else 1) / row[f"{part}_voxgrad"] / 1e9
        bandwidth = case.bytes / row[f"{part}_voxgrad"] / 1e6
        halves = mode == "high" and part in ("weight", BACKWARD)  # weight gradients are computed as scaled f16
        if rate > (MODES["f16"][5] if halves else ceiling) or bandwidth > 4900:
            row["wrong"].append(f"{part}: {rate:.0f} TFLOP/s or {bandwidth:.0f} GB/s exceeds the limit of the hardware")
    if len(ran) == len(results):
        if not all(map(torch.equal, results[BACKWARD], results["data"] + results["weight"])):
            row["wrong"].append("both gradients in one call differ from separate calls")
    if options.unchecked:
        return
    set_torch(tf32=False, benchmark=False)
    for part in (part for part in ran if part in PARTS):
        error, dtype = reference_error(case, part, results[part][0])
        row[f"{part}_error"] = error
        allowed = (weight_limit if part == "weight" else limit) + (FLOAT32_ERROR if dtype == torch.float32 else 0)
        if not error < allowed:
            row["wrong"].append(f"{part}: error {error:.1e}")


def measure(voxgrad, shape, mode, options, row):
    """Times all parts of a problem and checks voxgrad's results. Records everything in the row."""
    set_torch(tf32=MODES[mode][2], benchmark=True)
    case = Case(shape, getattr(torch, MODES[mode][0]))
    peak = DEPTHWISE_PEAK if shape.groups == shape.cin == shape.cout else PEAK[mode]
    row.update(flop=shape.flop(), bytes=case.bytes, floor=max(shape.flop() / peak, case.bytes / COPY) * 1e3)
    x, w, g = case.buffers[options.layout][0]
    results = {}
    for part, like in {"forward": (g,), "data": (x,), "weight": (w,), BACKWARD: (x, w)}.items():
        made = [[torch.full_like(t, math.nan) for t in like] for _ in range(case.copies)]
        results[part] = made[0]
        own = [voxgrad.part(case, mode, options.layout, part, i, result if part == BACKWARD else result[0])
               for i, result in enumerate(made)]
        sides = {"voxgrad": own}
        for side, layout in {} if options.alone or part not in TIMED_IN_TORCH else TORCH.items():
            sides[side] = [case.torch(part, *buffers) for buffers in case.buffers[layout]]
        time_sides(sides, options, row, part)
    attempt(row, "check", partial(check, row, case, mode, results, options))


def best(row, parts, sides):
    """Returns (milliseconds, mark): the time that the parts take together on the fastest side.

    The mark is "h" if the host needed more than 90 % of this time to launch the calls, otherwise "".
    """
    figures = []
    for side in sides:
        if all(f"{part}_{side}" in row for part in parts):
            total = lambda end: sum(row[f"{part}_{side}{end}"] for part in parts)
            figures.append((total(""), "h" if total("_host") > 0.9 * total("") else ""))
    return min(figures, default=(math.nan, ""))


def summary(title, ratios):
    ratios = {name: ratio for name, ratio in ratios.items() if not math.isnan(ratio)}
    if not ratios:
        return f"{title}: nothing to compare."
    mean = math.exp(sum(map(math.log, ratios.values())) / len(ratios))
    below = sorted((name for name in ratios if ratios[name] < 1.0), key=ratios.get)
    far = sum(ratio < 0.8 for ratio in ratios.values())
    names = ", ".join(f"{name} {ratios[name]:.2f}" for name in below)
    return (f"{title}: geometric mean {mean:.2f} of {len(ratios)}, minimum {min(ratios.values()):.2f}, "
            f"{len(below)} below 1.0, {far} below 0.8{': ' * bool(below)}{names}")


def table(rows, mode, options):
    ratios = {"fwd": {}, "f+b": {}}
    lines, notes = [], []
    for row in rows:
        each = lambda kind, form: "/".join(format(row.get(part + kind, math.nan), form) for part in PARTS)
        cells = {"problem": f"{row['shape']}: {row['problem']}", "efficiency f/d/w": each("_of_floor", ".0f")}
        for name, parts in zip(ratios, (PARTS[:1], TIMED_IN_TORCH)):
            voxgrad, pytorch = best(row, parts, ["voxgrad"]), best(row, parts, TORCH)
            cells[f"voxgrad {name}"] = f"{voxgrad[0]:.3g}{voxgrad[1]}"
            if not options.alone:
                ratios[name][row["shape"]] = ratio = pytorch[0] / voxgrad[0]
                cells.update({f"PyTorch {name}": f"{pytorch[0]:.3g}{pytorch[1]}", f"ratio {name}": f"{ratio:.2f}"})
        if not options.unchecked:
            cells["error f/d/w"] = each("_error", ".1e")
        lines = lines or [f"| {' | '.join(cells)} |", "|---|" + "---:|" * (len(cells) - 1)]
        lines.append(f"| {' | '.join(cells.values())} |")
        notes += [f"{row['shape']}: WRONG: {wrong}" for wrong in row["wrong"]]
        notes += [f"{row['shape']}: FAILED: {where}: {why}" for where, why in row["failed"].items()]
    notes += [] if options.alone else [summary(*item) for item in ratios.items()]
    return "\n".join([f"### {mode}, {options.layout}", "", *lines, "", *notes])


def write(options, head, rows):
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"head": head, "options": vars(options), "rows": rows}, file, indent=1)
    if options.markdown:
        modes = dict.fromkeys(row["mode"] for row in rows)
        tables = [table([row for row in rows if row["mode"] == mode], mode, options) for mode in modes]
        with open(options.markdown, "w") as file:
            file.write(head + "\n\n" + "\n\n".join(tables) + "\n")


def gpu():
    """Returns the name of the GPU, its driver, its current clock and its maximum clock."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,clocks.sm,clocks.max.sm", "--format=csv,noheader", "--id=0"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, check=True).stdout
        name, driver, clock, max_clock = output.split(", ")
        return f"{name}, driver {driver}, {clock} of {max_clock.strip()}"
    except (OSError, subprocess.CalledProcessError, ValueError):
        return torch.cuda.get_device_name()


def main(options):
    if options.list:
        for name, shape in options.shapes.items():
            print(f"{name}: {shape.describe()}  {shape.flop() / 1e9:.1f} GFLOP, {4 * shape.elements() / 1e6:.0f} MB")
        return
    plan = dict(item.split("=") for item in options.plan)
    number = lambda value: KERNELS.index(value) if value in KERNELS else int(value)
    voxgrad = Voxgrad(options.library, {key: number(value) for key, value in plan.items()})
    rows = []
    head = (f"{gpu()}, PyTorch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}, CUDA {torch.version.cuda}, "
            f"{datetime.date.today()}, set {options.set}{f', seed {options.seed}' if options.set == 'race' else ''}, "
            f"medians of up to {options.runs} runs, milliseconds")
    print(head, flush=True)
    for mode in options.modes:
        began = len(rows)
        for name, shape in options.shapes.items():
            row = {"shape": name, "problem": shape.describe(), "arguments": shape._asdict(), "mode": mode,
                   "layout": options.layout, "wrong": [], "failed": {}}
            rows.append(row)
            attempt(row, "case", partial(measure, voxgrad, shape, mode, options, row))
            attempt(row, "case", torch.cuda.empty_cache)
            write(options, head, rows)  # write after each problem, so that an aborted run keeps its results
            print(mode, name, *(f"{key}={row[key]:.3f}" for key in row if key.endswith(("_voxgrad", "_torch", "_cl"))),
                  *row["wrong"], *row["failed"].items(), file=sys.stderr, flush=True)
        print(table(rows[began:], mode, options), flush=True)
    voxgrad_failed = lambda row: any(name.endswith(("_voxgrad", "check", "case")) for name in row["failed"])
    sys.exit(any(row["wrong"] or voxgrad_failed(row) for row in rows))


if __name__ == "__main__":
    main(OPTIONS)
