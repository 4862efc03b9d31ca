#!/usr/bin/env python3
"""Times calls on tensors of 8 elements on the CPU, so that the time is mostly the overhead of a call.

Prints a table with the processor time of a forward call in microseconds. The columns are the function of the C
interface with prepared arguments, the function of voxgrad_torch without and with recording for the backward pass, and
the function of PyTorch with recording.
"""

import argparse
import ctypes
import time
import timeit

argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()

# Imported after the parsing, because --help must work without these packages.
import torch
import torch.nn.functional as F
from voxgrad_torch import _library, ops
from voxgrad_torch import functional as vF

CALLS = 3000


def microseconds(function):
    """Returns the processor time of a call in microseconds: the smallest of 30 means over CALLS calls."""
    return min(timeit.repeat(function, number=CALLS, repeat=30, timer=time.process_time)) / CALLS * 1e6


def main():
    torch.set_num_threads(1)
    x, weight, vector = torch.randn(1, 1, 2, 2, 2), torch.randn(1, 1, 1, 1, 1), torch.randn(1)
    y, statistics = torch.empty_like(x), torch.empty(2, dtype=torch.float64)
    layouts = [_library.make_layout(t, t.device) for t in (x, weight, vector)]
    x_layout, weight_layout, vector_layout = map(ctypes.addressof, layouts)
    conv, norm = ops._geometry((1, 1, 1), (0, 0, 0), (1, 1, 1), 1), _library.NormOptions(1, 1e-5, 0, 0, 0, 0)
    conv_arguments = (_library.context(-1), ctypes.addressof(conv), x_layout, y.data_ptr(), x_layout, x.data_ptr(),
                      weight_layout, weight.data_ptr(), vector_layout, vector.data_ptr())
    norm_arguments = (_library.context(-1), ctypes.addressof(norm), x_layout, y.data_ptr(), x.data_ptr(),
                      statistics.data_ptr(), *[vector_layout, vector.data_ptr()] * 2)
    weight.requires_grad_()
    vector.requires_grad_()
    print("| operation | C interface | without gradient | with gradient | PyTorch |\n|---|---|---|---|---|")
    for name, raw, arguments, call in (
            ("conv3d", _library.library.voxgrad_conv_forward, conv_arguments,
             lambda library: library.conv3d(x, weight, vector)),
            ("group_norm", _library.library.voxgrad_norm_forward, norm_arguments,
             lambda library: library.group_norm(x, 1, vector, vector))):
        times = [microseconds(lambda: raw(*arguments))]
        with torch.no_grad():
            times.append(microseconds(lambda: call(vF)))
        times += [microseconds(lambda library=library: call(library)) for library in (vF, F)]
        print(f"| {name} | " + " | ".join(f"{t:.1f}" for t in times) + " |")


if __name__ == "__main__":
    main()
