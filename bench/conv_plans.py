#!/usr/bin/env python3
"""Times all plans of convolutions on one GPU, and compares the planner's choices with the fastest plans.

    bench/conv_plans.py LIBRARY --set families --modes bf16 high --json plans.json
    bench/conv_plans.py LIBRARY --set race --seed 7 --count 60 --families
    bench/conv_plans.py LIBRARY --times plans.json

LIBRARY is the built libconv_peers.so. For each pass of each problem (forward, data gradient, weight gradient), the
program times the planner's choice and each other plan that an override can select: the best plan of each kernel family
and, unless --families is given, each compiled tile of the families with wgmma. A time is the minimum over --rounds
rounds. In each round, all plans of a pass run one after another for about --ms milliseconds each, on changing copies of
the buffers, which together do not fit into the L2 cache. Plans that took more than twice as long as the fastest one run
in the first round only. Host time is not excluded: times below about 25 microseconds may be the time of a launch.

The program prints, for each mode and pass, the geometric mean of (time of the planner's choice / time of the fastest
plan), then the choices with the largest ratios. For each kernel family, it prints how many choices use the family and
how much longer these passes would take without it. Passes shorter than --min-us microseconds are omitted.

--times reads times that --json wrote before, instead of measuring. The options that select problems then have no effect.
LIBRARY may have other planners, and no GPU is needed. Choices without a time are counted.
"""

import argparse
import ctypes
import json
import math
import sys

import conv_shapes

# The following values are also in compare_gpu.py, which needs PyTorch.
MODES = {"high": (0, 1), "highest": (0, 0), "bf16": (2, 0), "f16": (3, 0)}  # dtype, TF32, for the C interface
PARTS = ("forward", "data", "weight")
LAYOUTS = ("contiguous", "channels_last")
OVERRIDES = 10  # arguments of voxgrad_force_conv()
FAMILIES = ("any", "plain", "mma_sync", "multistage_wgrad", "small_channel", "few_inputs", "few_outputs", "pointwise",
            "depthwise", "fprop_dgrad", "wgrad")  # the values of voxgrad::cuda::ConvKernel


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", help="path of libconv_peers.so")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["bf16", "high"],
                        help="bf16, f16, high (TF32), highest (float32) (default: bf16 high)")
    conv_shapes.add_options(parser, "families")
    parser.add_argument("--layout", choices=LAYOUTS, default="channels_last", help="memory format of the tensors")
    parser.add_argument("--passes", nargs="+", choices=PARTS, default=PARTS, help="passes to time (default: all)")
    parser.add_argument("--families", action="store_true", help="time one plan of each family")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of which the shortest time counts")
    parser.add_argument("--ms", type=float, default=1, help="milliseconds of a plan in a round")
    parser.add_argument("--min-us", type=float, default=25, help="omit passes that are shorter (microseconds)")
    parser.add_argument("--worst", type=int, default=20, help="number of choices to print")
    parser.add_argument("--json", metavar="FILE", help="write all times to this file")
    parser.add_argument("--times", metavar="FILE", help="read times from this file instead of measuring")
    options = parser.parse_args()
    options.shapes = conv_shapes.selected(parser, options)
    return options


class Library:
    def __init__(self, path):
        self.library = ctypes.CDLL(path)
        self.library.voxgrad_conv_plans.restype = self.library.voxgrad_conv.restype = ctypes.c_char_p

    def plans(self, shape, mode, layout, part):
        """Returns the description of the planner's choice, and all plans as (override, clocks, description)."""
        plans = []
        callback = ctypes.CFUNCTYPE(None, ctypes.POINTER(ctypes.c_int), ctypes.c_double, ctypes.c_char_p)
        add = callback(lambda choice, clocks, text: plans.append((choice[:OVERRIDES], clocks,
                                                           text.decode().split("; on ")[0])))
        longs = lambda v: (ctypes.c_int64 * len(v))(*v)
        error = self.library.voxgrad_conv_plans(
            int(shape.transposed), PARTS.index(part), *MODES[mode], LAYOUTS.index(layout),
            longs((shape.batch, shape.cin, *conv_shapes.triple(shape.size))), longs(shape.weight_size()),
            longs((shape.batch, shape.cout, *shape.output_size())),
            *(longs(conv_shapes.triple(v)) for v in (shape.stride, shape.padding, shape.dilation)),
            ctypes.c_int64(shape.groups), add)
        if error:
            raise RuntimeError(f"{shape.describe()}: {error.decode()}")
        return plans[0][2], plans[1:]


def time_plans(library, calls, plans, options):
    """Returns the microseconds of each plan. `calls` are functions that run the pass on different buffers."""
    from compare_gpu import timed

    times, number, at = [math.inf] * len(plans), [0] * len(plans), 0

    def run(count):
        nonlocal at
        for _ in range(count):
            calls[at]()
            at = (at + 1) % len(calls)

    for _ in range(options.rounds):
        slow = 2 * min(times, default=0)
        for i, (choice, _, text) in enumerate(plans):
            if slow < times[i] < math.inf:
                continue
            library.voxgrad_force_conv(*choice)
            try:
                if not number[i]:
                    run(1)
                    number[i] = max(2, min(64, math.ceil(options.ms / max(timed(lambda: run(1)), 1e-3))))
                times[i] = min(times[i], timed(lambda: run(number[i])) / number[i] * 1e3)
            except RuntimeError as error:
                print(f"{text}: {error}", file=sys.stderr)
    library.voxgrad_force_conv(*[0] * OVERRIDES)
    return times


def measure(library, options, rows):
    """Times the plans of all passes. Appends a row for each pass: its plans, their estimated clocks, and their times."""
    import torch

    import compare_gpu

    if not torch.cuda.is_available():
        sys.exit("conv_plans: PyTorch finds no GPU; only --times works without one")
    voxgrad = compare_gpu.Voxgrad(options.library, {})
    for mode, shape in ((mode, shape) for mode in options.modes for shape in options.shapes.values()):
        case = compare_gpu.Case(shape, getattr(torch, compare_gpu.MODES[mode][0]))
        case.buffers = {options.layout: case.buffers[options.layout]}
        for part in options.passes:
            x, w, g = case.buffers[options.layout][0]
            result = torch.empty_like({"forward": g, "data": x, "weight": w}[part])
            calls = [voxgrad.part(case, mode, options.layout, part, i, result) for i in range(case.copies)]
            chosen, plans = library.plans(shape, mode, options.layout, part)
            plans = [plan for plan in plans if not options.families or plan[0][5] == 0]
            times = time_plans(library.library, calls, plans, options)
            rows.append({"shape": shape.describe(), "mode": mode, "layout": options.layout, "pass": part,
                         "choices": [plan[0] for plan in plans], "clocks": [plan[1] for plan in plans],
                         "plans": [plan[2] for plan in plans], "us": times})
            shown = [us for us, plan in zip(times, plans) if plan[2] == chosen] + [min(times, default=math.inf)]
            print(mode, shape.describe(), part, *map("{:.1f}".format, shown), file=sys.stderr, flush=True)
        del case, calls, x, w, g, result
        torch.cuda.empty_cache()


def family(choice):
    """Returns the family of kernels of an override."""
    return "copies" if choice[8] in (1, 2) else FAMILIES[choice[0]]


def geometric_mean(values):
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def report(rows, options):
    ratios, without = {}, {}
    for row in rows:
        best = min(row["us"])
        if not options.min_us <= best < math.inf:
            continue
        ratio = row["chosen_us"] / best
        ratios.setdefault((row["mode"], row["pass"]), []).append((ratio, row))
        chosen = row["chosen_family"]
        others = [us for us, choice in zip(row["us"], row["choices"]) if family(choice) != chosen]
        without.setdefault(chosen, []).append((min(others, default=math.inf) / row["chosen_us"], row))
    for (mode, part), found in ratios.items():
        print(f"{mode} {part}: {geometric_mean([r for r, _ in found]):.3f} of {len(found)} passes")
    everything = sorted((item for found in ratios.values() for item in found), key=lambda item: -item[0])
    print(f"all: {geometric_mean([r for r, _ in everything]):.3f}\n\nchosen / best:")
    for ratio, row in everything[:options.worst]:
        fastest = row["us"].index(min(row["us"]))
        print(f"{ratio:.2f} {row['mode']} {row['pass']} {row['shape']}: {row['chosen_us']:.1f} us, {row['chosen']}\n"
              f"     best: {row['us'][fastest]:.1f} us, {row['plans'][fastest]}, {row['choices'][fastest]}")
    print("\nwithout a family:")
    for name, found in sorted(without.items()):
        known = [ratio for ratio, _ in found if ratio < math.inf]
        text = f"{geometric_mean(known):.2f}, at most {max(known):.2f}" if known else "no other plan"
        print(f"{name}: {len(found)} choices, time without it: {text}")


def main(options):
    library, rows = Library(options.library), []
    if options.times:
        try:
            with open(options.times, encoding="utf-8") as file:
                rows = json.load(file)
        except (OSError, ValueError) as error:
            sys.exit(f"conv_plans: --times: {options.times}: {error}")
    else:
        try:
            measure(library, options, rows)
        finally:  # an aborted run keeps its times
            if options.json:
                with open(options.json, "w", encoding="utf-8") as file:
                    json.dump(rows, file)
    missing = []
    for row in rows:
        chosen = library.plans(conv_shapes.Shape.parse(row["shape"]), row["mode"], row["layout"], row["pass"])[0]
        i = row["plans"].index(chosen) if chosen in row["plans"] else None
        if i is not None and row["us"][i] < math.inf:
            row.update(chosen=chosen, chosen_us=row["us"][i], chosen_family=family(row["choices"][i]))
        else:
            missing.append(row)
    report([row for row in rows if "chosen" in row], options)
    print(f"{len(missing)} choices have no time" if missing else "")


if __name__ == "__main__":
    main(parse())
