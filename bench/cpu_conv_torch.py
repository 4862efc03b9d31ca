#!/usr/bin/env python3
"""Runs convolutions in PyTorch for bench/compare_cpu.py.

The script reads one problem per line from standard input: batch size, input channels, output channels, then size,
kernel, stride, padding, output_padding and dilation (three numbers each), groups, and 1 for a transposed convolution,
otherwise 0. It first prints a line of JSON with the versions. For each problem, it then prints a line of JSON: the
median seconds of the forward pass and of forward + backward, and checksums of the results.
"""

import argparse
import json
import os
import statistics
import sys
import time


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--busy", action="store_true",
                        help="use one thread, and print the minimum CPU time instead of the median time")
    return parser.parse_args()


if __name__ == "__main__":
    OPTIONS = parse()  # before the imports of other packages, because --help must work without them

import torch
import torch.nn.functional as F


def integers(shape, factor, modulus):
    count = torch.Size(shape).numel()
    return ((torch.arange(count) * factor) % modulus - modulus // 2).float().reshape(shape)


def checksum(t):
    weights = (torch.arange(t.numel()) % 29 - 14).double()
    return torch.dot(t.detach().contiguous().double().flatten(), weights).item()


def median_seconds(work, min_total=0.3):
    """Calls `work` once to warm up, then at least three times and for at least `min_total` seconds in total.

    Returns the median time or, with --busy, the minimum CPU time.
    """
    clock = time.process_time if OPTIONS.busy else time.perf_counter
    work()
    seconds = []
    while sum(seconds) < min_total or len(seconds) < 3:
        start = clock()
        work()
        seconds.append(clock() - start)
    return min(seconds) if OPTIONS.busy else statistics.median(seconds)


def measure(numbers):
    batch, cin, cout = numbers[:3]
    size, kernel, stride, padding, output_padding, dilation = (tuple(numbers[i : i + 3]) for i in range(3, 21, 3))
    groups, transposed = numbers[21:]
    x = integers((batch, cin) + size, 7, 17)
    w = integers(((cin, cout // groups) if transposed else (cout, cin // groups)) + kernel, 5, 13)

    def forward():
        if not transposed:
            return F.conv3d(x, w, None, stride, padding, dilation, groups)
        return F.conv_transpose3d(x, w, None, stride, padding, output_padding, groups, dilation)

    with torch.no_grad():
        y = forward()
        seconds_forward = median_seconds(forward)
    g = integers(tuple(y.shape), 3, 11)
    x.requires_grad_()
    w.requires_grad_()

    def both():
        return torch.autograd.grad(forward(), (x, w), g)

    grads = both()
    return {
        "forward": seconds_forward,
        "forward_backward": median_seconds(both),
        "checksum_forward": checksum(y),
        "checksum_backward": checksum(grads[0]) + checksum(grads[1]),
    }


def blas_library():
    with open("/proc/self/maps") as maps:
        names = {os.path.realpath(line.split()[-1]) for line in maps if "blas" in line}
    return ", ".join(sorted(os.path.basename(name) for name in names)) or "unknown BLAS"


def main(options):
    torch.set_num_threads(1 if options.busy else len(os.sched_getaffinity(0)))
    torch.ones(64, 64) @ torch.ones(64, 64)
    versions = f"PyTorch {torch.__version__} ({blas_library()}), {torch.get_num_threads()} threads"
    print(json.dumps({"versions": versions}), flush=True)
    for line in sys.stdin:
        print(json.dumps(measure([int(number) for number in line.split()])), flush=True)


if __name__ == "__main__":
    main(OPTIONS)
