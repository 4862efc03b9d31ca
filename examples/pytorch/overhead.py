#!/usr/bin/env python3
"""Times calls of voxgrad_torch on tensors of 8 elements on the CPU, where the computation takes no time.

    overhead.py [--calls 5000] [--repeats 20]

Prints the shortest mean time of `--calls` calls, in microseconds: of the C function, called by ctypes with prepared
arguments, and of voxgrad_torch and PyTorch with and without gradients.
"""

import argparse
import ctypes
import timeit

import torch

import voxgrad_torch
from voxgrad_torch import _library


def c_call(y, x, weight, bias):
    """Returns a function that calls the C interface."""
    triple, five = ctypes.c_int64 * 3, ctypes.c_int64 * 5
    arguments = [_library.Context(threads=1), _library.ConvGeometry(triple(1, 1, 1), triple(), triple(1, 1, 1), 1)]
    for t in (y, x, weight, bias):
        arguments.append(_library.Layout(0, -1, t.dim(), 0, five(*t.shape), five(*t.stride())))
    context, geometry, *layouts = map(ctypes.addressof, arguments)
    pointers = [t.data_ptr() for t in (y, x, weight, bias)]
    flat = [value for pair in zip(layouts, pointers) for value in pair]
    function = _library.library.voxgrad_conv_forward

    def run(keep=arguments):
        _library.call(function, context, geometry, *flat)

    return run


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=5000)
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    x, y = torch.randn(1, 1, 2, 2, 2), torch.empty(1, 1, 2, 2, 2)

    def show(name, function):
        seconds = min(timeit.repeat(function, number=options.calls, repeat=options.repeats)) / options.calls
        print(f"{name:28} {1e6 * seconds:6.1f}")

    for grad in (False, True):
        weight, bias = torch.randn(1, 1, 1, 1, 1, requires_grad=grad), torch.randn(1, requires_grad=grad)
        if not grad:
            show("C function", c_call(y, x, weight, bias))
        for name, library in (("voxgrad_torch", voxgrad_torch), ("torch.nn", torch.nn)):
            functional = library.functional
            text = f"{name}, {'gradients' if grad else 'no gradients'}"
            with torch.set_grad_enabled(grad):
                show(f"{text}, conv3d", lambda: functional.conv3d(x, weight, bias))
                show(f"{text}, group_norm", lambda: functional.group_norm(x, 1, bias, bias))


if __name__ == "__main__":
    main()
