#!/usr/bin/env python3
"""Convolutions on one GPU, voxgrad against PyTorch with cuDNN, in one process, in turn, on the same buffers.

    bench/compare_gpu.py LIBRARY [--modes high highest bf16] [--set nnunet] [--shapes NAME ...] [--layout contiguous]
    bench/compare_gpu.py LIBRARY --set race --seed 7 --count 60 --unchecked --json race.json

LIBRARY is the built libconv_peers.so. Each figure is the median of CUDA-event times over runs that last --ms together;
the two sides take turns run by run. A run of a small problem is many calls one behind the other, on copies of the
buffers that together do not fit into L2: where launching takes longer than the kernels, that is what is measured, on
both sides ("h"). voxgrad's tensors have --layout; PyTorch is timed in both
layouts, and the better one counts. f+b is forward + both gradients by one call. Our parts have to agree with PyTorch
(float64 for one sample, for large problems float32 without TF32), and both gradients in one call have to be the bits
of the two alone: exits with 1 if not, if voxgrad fails, or if a figure is above what the hardware can do. What fails is
named in the table and ends nothing. --alone leaves PyTorch's timings out.
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

import torch

import conv_shapes

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
BACKWARD = "backward"  # data and weight gradient by one call
BOTH = ("forward", BACKWARD)  # what PyTorch is timed in
TORCH = {"torch": "contiguous", "torch_cl": "channels_last"}
FLOAT64_FLOP = 2e10  # problems with more are checked against float32, which may itself be wrong by
FLOAT32_ERROR = 1e-5
PLAN = ("plain", "mma_sync", "small_channel", "unsplit", "k_blocks", "m_tiles", "pairs", "width",
        "slide")  # of ConvChoice
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last_3d}
ROTATED, MOST_COPIES = 400e6, 64  # bytes of the copies of a problem's buffers: L2 has 50 MB
RUN_MS, MOST_CALLS = 2.0, 64  # of one timed run


class Case:
    """The buffers of a problem: for each layout copies of (input, weight, gradient of the output)."""

    def __init__(self, shape, dtype):
        self.shape = shape
        self.stride, self.padding, self.output_padding, self.dilation = (
            list(conv_shapes.triple(v)) for v in (shape.stride, shape.padding, shape.output_padding, shape.dilation))
        generator = torch.Generator(device="cuda").manual_seed(0)
        make = lambda *size: torch.randn(size, device="cuda", generator=generator)
        x, w = make(shape.batch, shape.cin, *conv_shapes.triple(shape.size)), make(*shape.weight_size())
        g = make(shape.batch, shape.cout, *shape.output_size())
        w /= math.sqrt(max(1, shape.flop() / (2 * g.numel())))  # products in an output
        tensors = [t.to(dtype) for t in (x, w, g)]
        self.bytes = sum(t.numel() * t.element_size() for t in tensors)
        self.copies = max(1, min(MOST_COPIES, math.ceil(ROTATED / self.bytes)))
        self.buffers = {layout: [[t.clone(memory_format=form) for t in tensors] for _ in range(self.copies)]
                        for layout, form in LAYOUTS.items()}

    def torch(self, part, x, w, g):
        """A function that runs the part."""
        options = (self.stride, self.padding, self.dilation, self.shape.transposed, self.output_padding,
                   self.shape.groups)
        if part == "forward":
            return partial(torch.ops.aten.convolution.default, x, w, None, *options)
        mask = [part != "weight", part != "data", False]
        return partial(torch.ops.aten.convolution_backward.default, g, x, w, None, *options, mask)


def raise_error(error, *_):
    if error:
        raise RuntimeError(error.decode())


class Ours:
    def __init__(self, path, plan):
        library = ctypes.CDLL(path)
        library.voxgrad_force_conv(*(plan.get(key, 0) for key in PLAN))
        self.function = library.voxgrad_conv
        self.function.restype, self.function.errcheck = ctypes.c_char_p, raise_error

    def part(self, case, mode, layout, part, copy, result):
        """A function that runs the part on a copy of the buffers."""
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
    """One side's functions, one for each copy of the buffers; milliseconds a call of its runs, and of the host."""

    def __init__(self, functions, options):
        self.functions, self.kept, self.next, self.calls = functions, [None] * len(functions), 0, 1
        self.times, self.host = [], []
        self.run()  # chooses algorithms
        self.calls = len(functions)
        self.run()  # makes all that is kept
        self.calls = 1
        self.run()
        once = max(self.times[-1], 1e-3)
        self.calls = max(1, min(MOST_CALLS, int(RUN_MS / once)))
        self.runs = max(3, min(options.runs, math.ceil(options.ms / (once * self.calls))))
        self.times, self.host = [], []

    def queue(self):
        began = time.perf_counter()
        for _ in range(self.calls):  # results are kept for a round: the allocator would give the same memory again
            self.kept[self.next] = self.functions[self.next]()
            self.next = (self.next + 1) % len(self.kept)
        self.host.append((time.perf_counter() - began) * 1e3 / self.calls)

    def run(self):
        self.times.append(timed(self.queue) / self.calls)


def attempt(row, what, function):
    """What the function returns; an exception goes into the row."""
    try:
        return function()
    except RuntimeError as error:
        row["failed"][what] = str(error).strip().split("\n")[0][:300]


def time_sides(functions, options, row, part):
    """Medians of all sides, in turn, into the row; a side that fails is left out."""
    sides = {name: attempt(row, f"{part}_{name}", partial(Side, functions[name], options)) for name in functions}
    running = lambda: [name for name in sides if sides[name] and f"{part}_{name}" not in row["failed"]]
    for i in range(max((sides[name].runs for name in running()), default=0)):
        for name in running():
            if i < sides[name].runs:
                attempt(row, f"{part}_{name}", sides[name].run)
    for name in running():
        row[f"{part}_{name}"] = statistics.median(sides[name].times)
        row[f"{part}_{name}_host"] = statistics.median(sides[name].host)
    if "ours" in running():
        row[f"{part}_of_floor"] = 100 * row["floor"] / row[f"{part}_ours"]


def set_torch(tf32, benchmark):
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = bool(tf32)
    torch.backends.cudnn.benchmark = benchmark


def reference_error(case, part, result):
    """Relative error of a part of the result against PyTorch, and the reference's dtype. Of the gradients of the weight
    all samples count, of the rest the first."""
    dtype = torch.float64 if case.shape.flop() < FLOAT64_FLOP else torch.float32
    x, w, g = case.buffers["contiguous"][0]
    exact = 0
    for i in range(x.shape[0] if part == "weight" else 1):  # sample by sample: workspaces are large, sums long
        value = case.torch(part, *(t.to(dtype) for t in (x[i:i + 1], w, g[i:i + 1])))()
        exact = exact + (value if part == "forward" else value[PARTS.index(part) - 1]).double()
    got = (result if part == "weight" else result[:1]).double()
    return ((got - exact).norm() / exact.norm()).item(), dtype


def check(row, case, mode, results, options):
    """What is wrong with our figures and results, into the row."""
    _, _, _, limit, weight_limit, ceiling = MODES[mode]
    ran = [part for part in results if f"{part}_ours" in row]
    for part in ran:
        rate = case.shape.flop() * (2 if part == BACKWARD else 1) / row[f"{part}_ours"] / 1e9
        bandwidth = case.bytes / row[f"{part}_ours"] / 1e6
        if rate > ceiling or bandwidth > 4900:
            row["wrong"].append(f"{part}: {rate:.0f} TFLOP/s, {bandwidth:.0f} GB/s are more than the hardware can do")
    if len(ran) == len(results):
        if not all(map(torch.equal, results[BACKWARD], results["data"] + results["weight"])):
            row["wrong"].append("both gradients in one call differ from those alone")
    if options.unchecked:
        return
    set_torch(tf32=False, benchmark=False)
    for part in (part for part in ran if part in PARTS):
        error, dtype = reference_error(case, part, results[part][0])
        row[f"{part}_error"] = error
        allowed = (weight_limit if part == "weight" else limit) + (FLOAT32_ERROR if dtype == torch.float32 else 0)
        if not error < allowed:
            row["wrong"].append(f"{part}: error {error:.1e}")


def measure(ours, shape, mode, options, row):
    set_torch(tf32=MODES[mode][2], benchmark=True)
    case = Case(shape, MODES[mode][0])
    row.update(flop=shape.flop(), bytes=case.bytes, floor=max(shape.flop() / PEAK[mode], case.bytes / COPY) * 1e3)
    x, w, g = case.buffers[options.layout][0]
    results = {}
    for part, like in {"forward": (g,), "data": (x,), "weight": (w,), BACKWARD: (x, w)}.items():
        made = [[torch.full_like(t, math.nan) for t in like] for _ in range(case.copies)]
        results[part] = made[0]
        sides = {"ours": [ours.part(case, mode, options.layout, part, i, result if part == BACKWARD else result[0])
                          for i, result in enumerate(made)]}
        for side, layout in {} if options.alone or part not in BOTH else TORCH.items():
            sides[side] = [case.torch(part, *buffers) for buffers in case.buffers[layout]]
        time_sides(sides, options, row, part)
    attempt(row, "check", partial(check, row, case, mode, results, options))


def best(row, parts, sides):
    """Milliseconds of the parts by the best of the sides that ran them, and "h" where the host was busy as long."""
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
    return (f"{title}: geometric mean {mean:.2f} of {len(ratios)}, least {min(ratios.values()):.2f}, "
            f"{len(below)} below 1.0, {far} below 0.8{': ' * bool(below)}{names}")


def table(rows, mode, options):
    ratios = {"fwd": {}, "f+b": {}}
    lines, notes = [], []
    for row in rows:
        each = lambda kind, form: "/".join(format(row.get(part + kind, math.nan), form) for part in PARTS)
        cells = {"problem": f"{row['shape']}: {row['problem']}", "% of floor f/d/w": each("_of_floor", ".0f")}
        for name, parts in zip(ratios, (PARTS[:1], BOTH)):
            ours, theirs = best(row, parts, ["ours"]), best(row, parts, TORCH)
            cells[f"ours {name}"] = f"{ours[0]:.3g}{ours[1]}"
            if not options.alone:
                ratios[name][row["shape"]] = ratio = theirs[0] / ours[0]
                cells.update({f"PyTorch {name}": f"{theirs[0]:.3g}{theirs[1]}", f"ratio {name}": f"{ratio:.2f}"})
        if not options.unchecked:
            cells["error f/d/w"] = each("_error", ".1e")
        lines = lines or [f"| {' | '.join(cells)} |", "|" + "---|" * len(cells)]
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
    """Name, driver, and the clock now and at most."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,clocks.sm,clocks.max.sm", "--format=csv,noheader", "--id=0"]
    try:
        name, driver, now, most = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split(", ")
        return f"{name}, driver {driver}, {now} of {most.strip()}"
    except (OSError, subprocess.CalledProcessError, ValueError):
        return torch.cuda.get_device_name()


def parsed():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["high", "highest", "bf16"])
    parser.add_argument("--set", choices=[*conv_shapes.SETS, "race"], default="peers")
    parser.add_argument("--seed", type=int, default=0, help="of the race's draw")
    parser.add_argument("--count", type=int, default=60, help="problems of the race")
    parser.add_argument("--shapes", nargs="+", metavar="NAME", help="default: all of the set")
    parser.add_argument("--layout", choices=LAYOUTS, default="channels_last", help="of voxgrad's tensors")
    parser.add_argument("--runs", type=int, default=15, help="at most, at least 3")
    parser.add_argument("--ms", type=float, default=40, help="GPU time for each median")
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--unchecked", action="store_true", help="leave the comparison of results with PyTorch out")
    parser.add_argument("--plan", nargs="+", default=[], metavar="KEY=N",
                        help=f"force the planner's choice: {', '.join(PLAN)}")
    parser.add_argument("--json")
    parser.add_argument("--markdown")
    parser.add_argument("--list", action="store_true", help="print the problems, run nothing")
    options = parser.parse_args()
    shapes = conv_shapes.race(options.seed, options.count) if options.set == "race" else conv_shapes.SETS[options.set]
    known = {name: shape for each in (*conv_shapes.SETS.values(), shapes) for name, shape in each.items()}
    unknown = [name for name in options.shapes or () if name not in known]
    if unknown:
        parser.error(f"no such shapes: {', '.join(unknown)}; known: {', '.join(known)}")
    return options, {name: known[name] for name in options.shapes or shapes}


def main():
    options, shapes = parsed()
    if options.list:
        for name, shape in shapes.items():
            print(f"{name}: {shape.describe()}  {shape.flop() / 1e9:.1f} GFLOP, {4 * shape.elements() / 1e6:.0f} MB")
        return
    ours = Ours(options.library, {key: int(n) for key, n in (item.split("=") for item in options.plan)})
    rows = []
    head = (f"{gpu()}, PyTorch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}, CUDA {torch.version.cuda}, "
            f"{datetime.date.today()}, set {options.set}{f', seed {options.seed}' if options.set == 'race' else ''}, "
            f"medians of up to {options.runs} runs, milliseconds")
    print(head, flush=True)
    for mode in options.modes:
        began = len(rows)
        for name, shape in shapes.items():
            row = {"shape": name, "problem": shape.describe(), "arguments": shape._asdict(), "mode": mode,
                   "layout": options.layout, "wrong": [], "failed": {}}
            rows.append(row)
            attempt(row, "case", partial(measure, ours, shape, mode, options, row))
            attempt(row, "case", torch.cuda.empty_cache)
            write(options, head, rows)  # a run that is ended keeps what it has measured
            print(mode, name, *(f"{key}={row[key]:.3f}" for key in row if key.endswith(("_ours", "_torch", "_cl"))),
                  *row["wrong"], *row["failed"].items(), file=sys.stderr, flush=True)
        print(table(rows[began:], mode, options), flush=True)
    ours_failed = lambda row: any(what.endswith(("_ours", "check", "case")) for what in row["failed"])
    sys.exit(any(row["wrong"] or ours_failed(row) for row in rows))


if __name__ == "__main__":
    main()
