#!/usr/bin/env python3
"""What a step of nnU-Net's network takes on many GPUs, on paper, from times measured on one and two.

    bench/scaling_model.py [--step-ms 17.3 ...] [--measured FILE] [--simulated FILE]

Weak scaling: each GPU has its own batch. The step on n GPUs takes
  max(input, alone + copies + exposed(n) + share * hidden(n) + jitter * E(n))
  alone       the step on one GPU without DataParallel
  copies      gradients into the buckets and their division by n
  exposed(n)  of the reductions, what is left when the backward pass is over: bucket b starts when it is full and b - 1 is
              reduced, and takes r(b) = min over ring and tree of latency + 2 (n - 1) / n * bytes / bandwidth
  hidden(n)   the rest of them, during which they hold `share` of the multiprocessors
  jitter E(n) the standard deviation of a step, times the expected largest of n standard normals
  input       what a host needs to make each GPU's next batch ready; 0 if it is not what limits

--measured takes the JSON lines of bench/scaling: of `buckets` their sizes and the times at which they are full, of `step`
(--schemes none) the step alone and its jitter. Without, the buckets are laid out here, and their times follow from the
FLOP and bytes of the layers. --simulated takes those of `scaling --simulate` and prints prediction beside simulation,
with the latency and bandwidth that were simulated. --commands prints the simulations of the table's reductions.
"""

import argparse
import json
import math
import statistics

STAGES = (32, 64, 128, 256, 320, 320)
CLASSES, SIZE, BATCH = 3, 128, 2
MULTIPROCESSORS = 132
# Microseconds: of a collective, of a hop within a host, of one between hosts; and what is left of the bandwidth within a
# host and between hosts. As NCCL's own cost model counts them (graph/tuning.cc: NVLink, LL128).
ALGORITHMS = {"ring": (14.0, 1.9, 4.0, 1.0, 1.0), "tree": (14.0, 1.25, 8.5, 0.72, 0.86)}


def layers():
    """(name, parameters of each tensor, FLOP of the backward pass, bytes it moves), as nn::UNet declares them."""
    def conv(name, level, cin, cout, taps, norm=True):
        voxels = BATCH * (SIZE >> level) ** 3
        flop = 4 * voxels * taps * cin * cout  # of both gradients
        moved = 2 * voxels * (2 * cin + (6 if norm else 2) * cout)  # bf16
        return name, [taps * cin * cout, cout] + ([cout, cout] if norm else []), flop, moved

    up = STAGES[-2::-1]
    result = []
    for i, c in enumerate(STAGES):
        result += [conv(f"encoder.{i}.0", i, STAGES[i - 1] if i else 1, c, 27), conv(f"encoder.{i}.1", i, c, c, 27)]
    for i, c in enumerate(up):
        level = len(up) - 1 - i
        result += [conv(f"decoder.{i}.0", level, 2 * c, c, 27), conv(f"decoder.{i}.1", level, c, c, 27)]
    for i, c in enumerate(up):  # each tap meets an eighth of the larger volume
        result.append(conv(f"up.{i}", len(up) - 1 - i, STAGES[-1 - i], c, 1, norm=False))
        result[-1][1][0] *= 8
    heads = [conv(f"head.{i}", len(up) - 1 - i, c, CLASSES, 1, norm=False) for i, c in enumerate(up)]
    return result + heads[1:]  # the lowest has no weight in the loss


def backward_order():
    depth = len(STAGES) - 1
    for i in reversed(range(depth)):
        yield from ([f"head.{i}"] if i > 0 else [])
        yield from (f"decoder.{i}.1", f"decoder.{i}.0", f"up.{i}")
    for i in reversed(range(depth + 1)):
        yield from (f"encoder.{i}.1", f"encoder.{i}.0")


def layout(wire_bytes, cap_mb, backward_ms):
    """The buckets' bytes, as DataParallel fills them, and when each of them is full."""
    table = {name: row for name, *row in layers()}
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
    """The quicker algorithm's time, and its name."""
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
    """What the reductions take beyond the backward pass, which ends when the last bucket is full."""
    end = 0.0
    for start, duration in zip(ready, durations):
        end = max(end, start) + duration
    return end - ready[-1]


def expected_largest(n):
    """Of n standard normals, by Blom's approximation."""
    return statistics.NormalDist().inv_cdf((n - 0.375) / (n + 0.25)) if n > 1 else 0.0


def rows_of(path):
    if path is None:
        return []
    with open(path) as file:
        return [json.loads(line) for line in file if line.startswith("{")]


def find(rows, **wanted):
    return next((row for row in rows if all(row.get(key) == value for key, value in wanted.items())), None)


def buckets_of(options, rows, wire):
    """Bytes and times; and whether they were measured."""
    row = find(rows, what="buckets", mode=options.mode, wire=wire, bucket_mb=options.bucket_mb)
    if row and "ready_ms" in row:
        return row["bytes"], row["ready_ms"], True
    return *layout({"f32": 4, "bf16": 2}[wire], options.bucket_mb, options.backward_ms), False


def predict(options, alone, durations, ready, jitter):
    exposed = exposed_ms(ready, durations)
    hidden = sum(durations) - exposed
    step = alone + options.copies_ms + exposed + options.blocks / MULTIPROCESSORS * hidden + jitter
    return max(step, options.input_ms), exposed


def print_predictions(options, rows):
    measured = find(rows, what="step", mode=options.mode, scheme="none", graph=options.graph)
    alone = measured["ms"] if measured else options.step_ms
    jitter = measured["jitter_ms"] if measured else options.jitter_ms
    print(f"step alone {alone:.2f} ms, jitter {jitter:.3f} ms ({'measured' if measured else 'as given'}); "
          f"{options.gpus_per_host} GPUs and {options.nics} links of {options.link:g} GB/s a host, NVLink {options.nvlink:g} GB/s\n")
    print("| GPUs | gradients in | algorithm | reductions alone, ms | not hidden, ms | for the slowest, ms | step, ms | "
          "efficiency | volumes/s |\n|---:|---|---|---:|---:|---:|---:|---:|---:|")
    commands = []
    for n in options.gpus:
        for wire in ("f32", "bf16"):
            sizes, ready, known = buckets_of(options, rows, wire)
            times = [reduction_ms(options, n, size) for size in sizes]
            durations = [ms for ms, _ in times]
            wait = jitter * expected_largest(n)
            step, exposed = predict(options, alone, durations, ready, wait)
            print(f"| {n} | {wire}{'' if known else ' (buckets on paper)'} | {'/'.join(sorted({a for _, a in times}))} | "
                  f"{sum(durations):.2f} | {exposed:.2f} | {wait:.2f} | {step:.2f} | {100 * alone / step:.1f} % | "
                  f"{n * BATCH / step * 1e3:.0f} |")
            largest = max(sizes)  # latency and bandwidth that give a simulated tree these times
            small, large = reduction_ms(options, n, 0)[0], reduction_ms(options, n, largest)[0]
            bandwidth = 2 * (n - 1) / n * largest / (large - small) * 1e-6
            commands.append(f"scaling --simulate {n} --wire {wire} --latency {small * 1e3 / 2 / math.ceil(math.log2(n)):.2f} "
                            f"--bandwidth {bandwidth:.0f} --blocks {options.blocks} --schemes ddp none")
    if options.commands:
        print("\n" + "\n".join(commands))


def print_buckets(options, rows):
    for wire in ("f32", "bf16"):
        sizes, ready, known = buckets_of(options, rows, wire)
        text = ", ".join(f"{size / 2**20:.1f} MiB at {ms:.1f} ms" for size, ms in zip(sizes, ready))
        print(f"buckets in {wire}{'' if known else ', on paper'}: {text}")


def print_simulations(options, measured):
    """Beside what was simulated, with its own constants; one GPU waits for nobody."""
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
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 64, 1024])
    parser.add_argument("--mode", default="bf16")
    parser.add_argument("--graph", action="store_true", help="of measured steps, take those as a CUDA graph")
    number("--step-ms", 17.3, "the step on one GPU")
    number("--backward-ms", 11.3, "of it the backward pass")
    number("--copies-ms", 0.12, "gradients into the buckets, and their division")
    number("--jitter-ms", 0.05, "standard deviation of a step")
    number("--input-ms", 0, "a host's time to make each GPU's next batch ready")
    number("--bucket-mb", 25, "MiB of a bucket")
    number("--nvlink", 361, "bus bandwidth within a host, GB/s")
    number("--link", 50, "a network link of a host, GB/s: 400 Gbit/s")
    number("--link-efficiency", 0.95, "what NCCL reaches of it")
    parser.add_argument("--nics", type=int, default=8, help="network links of a host (default: 8)")
    parser.add_argument("--gpus-per-host", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=16, help="multiprocessors that a reduction holds (default: 16)")
    parser.add_argument("--measured", metavar="FILE")
    parser.add_argument("--simulated", metavar="FILE")
    parser.add_argument("--commands", action="store_true")
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
