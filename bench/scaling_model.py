#!/usr/bin/env python3
"""Predicts the time of a training step of nnU-Net's network on many GPUs from times measured on one and two GPUs.

    bench/scaling_model.py [--step-ms 17.3 ...] [--measured FILE] [--simulated FILE]

The model assumes weak scaling: each GPU has its own batch. A step on n GPUs takes
  max(input, alone + copies + exposed(n) + share * hidden(n) + jitter * E(n))
  alone       time of a step on one GPU without DataParallel
  copies      time to copy gradients into the buckets and to divide them by n
  exposed(n)  part of the time of the reductions that comes after the end of the backward pass. The reduction of bucket
              b starts when bucket b is full and bucket b - 1 is reduced. A reduction takes
              latency + 2 (n - 1) / n * bytes / bandwidth, computed for the faster of the ring and the tree algorithm.
  hidden(n)   part of the time of the reductions that overlaps with the backward pass
  share       fraction of the SMs that a reduction occupies, and that the backward pass therefore cannot use
  jitter      standard deviation of the time of a step
  E(n)        expected maximum of n standard normal variables
  input       time in which a host provides the next batch of each GPU; 0 if this is not a bottleneck

--measured reads JSON lines of bench/scaling. `scaling --what buckets` provides the sizes of the buckets and the times
at which they are full. `scaling --what step --schemes none` provides the time and the jitter of a step without
reductions. Without --measured, this program calculates the buckets: their sizes from the parameters, and their times
from the FLOP and bytes of the layers. --simulated reads JSON lines of `scaling --simulate` and compares them with
predictions for the same latency and bandwidth. --commands prints the `scaling --simulate` commands whose simulated
reductions take the times in the table.
"""

import argparse
import json
import math
import statistics

STAGES = (32, 64, 128, 256, 320, 320)
CLASSES, SIZE, BATCH = 3, 128, 2
MULTIPROCESSORS = 132
# Parameters of NCCL's cost model (graph/tuning.cc: NVLink, LL128). The first three numbers are latencies in
# microseconds: per collective, per hop within a host, per hop between hosts. The last two numbers are the fractions of
# the bandwidth that the algorithm uses within a host and between hosts.
ALGORITHMS = {"ring": (14.0, 1.9, 4.0, 1.0, 1.0), "tree": (14.0, 1.25, 8.5, 0.72, 0.86)}


def layers():
    """Returns a tuple for each layer, in the order of nn::UNet's parameters.

    The tuple contains the name, a list with the number of elements of each parameter, the FLOP of the backward pass,
    and the memory traffic of the backward pass in bytes.
    """
    def conv(name, level, cin, cout, taps, norm=True):
        voxels = BATCH * (SIZE >> level) ** 3
        flop = 4 * voxels * taps * cin * cout  # data gradient and weight gradient
        moved = 2 * voxels * (2 * cin + (6 if norm else 2) * cout)  # 2 bytes per element (bf16)
        return name, [taps * cin * cout, cout] + ([cout, cout] if norm else []), flop, moved

    up = STAGES[-2::-1]
    result = []
    for i, c in enumerate(STAGES):
        result += [conv(f"encoder.{i}.0", i, STAGES[i - 1] if i else 1, c, 27), conv(f"encoder.{i}.1", i, c, c, 27)]
    for i, c in enumerate(up):
        level = len(up) - 1 - i
        result += [conv(f"decoder.{i}.0", level, 2 * c, c, 27), conv(f"decoder.{i}.1", level, c, c, 27)]
    for i, c in enumerate(up):  # with kernel 2 and stride 2, an output voxel depends on 1 of the 8 taps of the weight
        result.append(conv(f"up.{i}", len(up) - 1 - i, STAGES[-1 - i], c, 1, norm=False))
        result[-1][1][0] *= 8
    heads = [conv(f"head.{i}", len(up) - 1 - i, c, CLASSES, 1, norm=False) for i, c in enumerate(up)]
    return result + heads[1:]  # the loss does not use the head of the lowest resolution


def backward_order():
    """Yields the names of the layers in the order in which the backward pass computes their gradients."""
    depth = len(STAGES) - 1
    for i in reversed(range(depth)):
        yield from ([f"head.{i}"] if i > 0 else [])
        yield from (f"decoder.{i}.1", f"decoder.{i}.0", f"up.{i}")
    for i in reversed(range(depth + 1)):
        yield from (f"encoder.{i}.1", f"encoder.{i}.0")


def layout(wire_bytes, cap_mb, backward_ms):
    """Returns the bytes of each bucket, filled as in DataParallel, and the time in ms at which each bucket is full."""
    table = {name: row for name, *row in layers()}
    # Seconds of each layer, at 500 TFLOP/s and 3 TB/s.
    cost = {name: max(flop / 500e12, moved / 3e12) for name, (_, flop, moved) in table.items()}
    arrival, clock = {}, 0.0
    for name in backward_order():
        clock += cost[name]
        arrival[name] = clock
    sizes, ready = [], []
    for name, (tensors, _, _) in reversed(table.items()):
        for count in reversed(tensors):
            if not sizes or sizes[-1] + count * wire_bytes > cap_mb * 2**20:
                sizes.append(0)
                ready.append(0.0)
            sizes[-1] += count * wire_bytes
            ready[-1] = max(ready[-1], arrival[name] / clock * backward_ms)
    return sizes, ready


def reduction_ms(options, n, size):
    """Returns (milliseconds, name) of the faster algorithm for a reduction of `size` bytes over n GPUs."""
    hosts = math.ceil(n / options.gpus_per_host)
    local = min(n, options.gpus_per_host)
    between = options.nics * options.link * options.link_efficiency

    def time(name):
        base, hop, network, within, across = ALGORITHMS[name]
        if name == "ring":
            steps = 2 * (n - 1)
            crossings = 2 * hosts if hosts > 1 else 0
            latency = (steps - crossings) * hop + crossings * network
        else:
            latency = 2 * ((local - 1) * hop + math.ceil(math.log2(hosts)) * network)
        bandwidth = options.nvlink * within if hosts == 1 else min(options.nvlink, between) * across
        return (base + latency) * 1e-3 + 2 * (n - 1) / n * size / bandwidth * 1e-6

    return min((time(name), name) for name in ALGORITHMS)


def exposed_ms(ready, durations):
    """Returns the time from the end of the backward pass to the end of the last reduction.

    The model assumes that the backward pass ends when the last bucket is full.
    """
    end = 0.0
    for start, duration in zip(ready, durations):
        end = max(end, start) + duration
    return end - ready[-1]


def expected_largest(n):
    """Returns the expected maximum of n standard normal variables, by Blom's approximation."""
    return statistics.NormalDist().inv_cdf((n - 0.375) / (n + 0.25)) if n > 1 else 0.0


def rows_of(path):
    if path is None:
        return []
    with open(path) as file:
        return [json.loads(line) for line in file if line.startswith("{")]


def find(rows, **wanted):
    return next((row for row in rows if all(row.get(key) == value for key, value in wanted.items())), None)


def buckets_of(options, rows, wire):
    """Returns the bytes of the buckets, the times at which they are full, and whether these times were measured."""
    row = find(rows, what="buckets", mode=options.mode, wire=wire, bucket_mb=options.bucket_mb)
    if row and "ready_ms" in row:
        return row["bytes"], row["ready_ms"], True
    return *layout({"f32": 4, "bf16": 2}[wire], options.bucket_mb, options.backward_ms), False


def predict(options, alone, durations, ready, jitter):
    """Returns the predicted milliseconds of a step, and the milliseconds of the reductions after the backward pass."""
    exposed = exposed_ms(ready, durations)
    hidden = sum(durations) - exposed
    step = alone + options.copies_ms + exposed + options.blocks / MULTIPROCESSORS * hidden + jitter
    return max(step, options.input_ms), exposed


def print_predictions(options, rows):
    measured = find(rows, what="step", mode=options.mode, scheme="none", graph=options.graph)
    alone = measured["ms"] if measured else options.step_ms
    jitter = measured["jitter_ms"] if measured else options.jitter_ms
    print(f"step without reductions {alone:.2f} ms, jitter {jitter:.3f} ms ({'measured' if measured else 'as given'}); "
          f"{options.gpus_per_host} GPUs and {options.nics} links of {options.link:g} GB/s per host, "
          f"NVLink {options.nvlink:g} GB/s\n")
    print("| GPUs | gradients in | algorithm | reductions alone, ms | exposed, ms | wait for the slowest, ms | step, ms | "
          "efficiency | volumes/s |\n|---:|---|---|---:|---:|---:|---:|---:|---:|")
    commands = []
    for n in options.gpus:
        for wire in ("f32", "bf16"):
            sizes, ready, measured_buckets = buckets_of(options, rows, wire)
            times = [reduction_ms(options, n, size) for size in sizes]
            durations = [ms for ms, _ in times]
            wait = jitter * expected_largest(n)
            step, exposed = predict(options, alone, durations, ready, wait)
            print(f"| {n} | {wire}{'' if measured_buckets else ' (calculated buckets)'} | {'/'.join(sorted({a for _, a in times}))} | "
                  f"{sum(durations):.2f} | {exposed:.2f} | {wait:.2f} | {step:.2f} | {100 * alone / step:.1f} % | "
                  f"{n * BATCH / step * 1e3:.0f} |")
            # Choose the latency and the bandwidth so that the simulated tree algorithm takes the same times.
            largest = max(sizes)
            small, large = reduction_ms(options, n, 0)[0], reduction_ms(options, n, largest)[0]
            bandwidth = 2 * (n - 1) / n * largest / (large - small) * 1e-6
            commands.append(f"scaling --simulate {n} --wire {wire} --latency {small * 1e3 / 2 / math.ceil(math.log2(n)):.2f} "
                            f"--bandwidth {bandwidth:.0f} --blocks {options.blocks} --schemes ddp none")
    if options.commands:
        print("\n" + "\n".join(commands))


def print_buckets(options, rows):
    for wire in ("f32", "bf16"):
        sizes, ready, measured = buckets_of(options, rows, wire)
        text = ", ".join(f"{size / 2**20:.1f} MiB at {ms:.1f} ms" for size, ms in zip(sizes, ready))
        print(f"buckets in {wire}{'' if measured else ', calculated'}: {text}")


def print_simulations(options, measured):
    """Prints simulated step times and predictions for the same latency and bandwidth.

    The predictions have no jitter, because a simulation runs on a single GPU, which never waits for other GPUs.
    """
    rows = [row for row in rows_of(options.simulated) if row["what"] == "step" and row.get("simulated")]
    both = rows + measured
    print("\n| ranks | wire | algorithm | latency, us | GB/s | graph | alone, ms | simulated, ms | predicted, ms |\n"
          "|---:|---|---|---:|---:|---|---:|---:|---:|")
    for row in rows:
        if row["scheme"] != "ddp" or row["mode"] != options.mode:
            continue
        n = row["ranks"]
        same = {"what": "step", "mode": row["mode"], "scheme": "none", "graph": row["graph"]}
        reference = find(rows, ranks=n, **same) or find(both, **same)
        alone = reference["ms"] if reference else options.step_ms
        steps = 2 * (n - 1) if row["algorithm"] == "ring" else 2 * math.ceil(math.log2(n))
        sizes, ready, _ = buckets_of(options, measured, row["wire"])
        durations = [steps * row["latency_us"] * 1e-3 + 2 * (n - 1) / n * size / row["bandwidth"] * 1e-6 for size in sizes]
        predicted, _ = predict(options, alone, durations, ready, 0)
        print(f"| {n} | {row['wire']} | {row['algorithm']} | {row['latency_us']:g} | {row['bandwidth']:g} | "
              f"{'yes' if row['graph'] else 'no'} | {alone:.2f} | {row['ms']:.2f} | {predicted:.2f} |")


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    number = lambda name, default, text: parser.add_argument(name, type=float, default=default, help=f"{text} (default: {default:g})")
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 64, 1024],
                        help="numbers of GPUs to predict (default: 8 64 1024)")
    parser.add_argument("--mode", default="bf16", help="mode of the measured steps (default: bf16)")
    parser.add_argument("--graph", action="store_true", help="use measured steps that ran as a CUDA graph")
    number("--step-ms", 17.3, "milliseconds of a step on one GPU")
    number("--backward-ms", 11.3, "milliseconds of the backward pass of this step")
    number("--copies-ms", 0.12, "milliseconds to copy the gradients into the buckets and to divide them")
    number("--jitter-ms", 0.05, "standard deviation of the time of a step, in milliseconds")
    number("--input-ms", 0, "milliseconds in which a host provides the next batch of each GPU")
    number("--bucket-mb", 25, "size of a bucket in MiB")
    number("--nvlink", 361, "bus bandwidth within a host, GB/s")
    number("--link", 50, "bandwidth of a network link of a host, GB/s")
    number("--link-efficiency", 0.95, "fraction of the link bandwidth that NCCL reaches")
    parser.add_argument("--nics", type=int, default=8, help="network links of a host (default: 8)")
    parser.add_argument("--gpus-per-host", type=int, default=8, help="GPUs of a host (default: 8)")
    parser.add_argument("--blocks", type=int, default=16, help="SMs that a reduction occupies (default: 16)")
    parser.add_argument("--measured", metavar="FILE", help="JSON lines of bench/scaling")
    parser.add_argument("--simulated", metavar="FILE", help="JSON lines of bench/scaling --simulate")
    parser.add_argument("--commands", action="store_true", help="print commands that simulate the predicted reductions")
    return parser.parse_args()


def main():
    options = parse()
    rows = rows_of(options.measured)
    print_buckets(options, rows)
    print_predictions(options, rows)
    if options.simulated:
        print_simulations(options, rows)


if __name__ == "__main__":
    main()
