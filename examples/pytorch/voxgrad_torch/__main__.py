"""Checks the installed package, or prints its paths (python -m voxgrad_torch --help)."""

import argparse
import os
import sys

import torch

from . import __version__, functional, has_cuda
from ._library import path


def check(device):
    """Compares a convolution, its gradient and a norm with PyTorch. Raises AssertionError if they differ."""
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(size, device=device, requires_grad=True)
                       for size in ((2, 8, 12, 12, 12), (16, 8, 3, 3, 3), (16,)))
    results = []
    for library in (functional, torch.nn.functional):
        y = library.conv3d(x, weight, bias, stride=2, padding=1)
        y = library.group_norm(y, 4)
        results.append((y, *torch.autograd.grad(y.sigmoid().sum(), (x, weight, bias))))
    for got, expected in zip(*results):
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


parser = argparse.ArgumentParser(
    prog="python -m voxgrad_torch",
    description="Without options, compares a few operations with PyTorch on every device and prints the versions.")
group = parser.add_mutually_exclusive_group()
group.add_argument("--cmake-dir", action="store_true", help="print the folder for CMAKE_PREFIX_PATH or voxgrad_DIR")
group.add_argument("--include-dir", action="store_true", help="print the folder of voxgrad.h")
group.add_argument("--version", action="store_true", help="print the version of voxgrad")
options = parser.parse_args()

if options.version:
    print(__version__)
elif options.cmake_dir or options.include_dir:
    package = os.path.dirname(os.path.abspath(__file__))
    folder = os.path.join(package, *(("lib", "cmake", "voxgrad") if options.cmake_dir else ("include",)))
    if not os.path.isdir(folder):
        sys.exit(f"voxgrad_torch: this installation has no {folder}")
    print(folder)
else:
    torch.backends.cudnn.allow_tf32 = False  # with TF32, rounding differences would exceed the tolerance of the check
    print(f"voxgrad {__version__} {'with' if has_cuda else 'without'} CUDA, PyTorch {torch.__version__}: {path}")
    for device in ["cpu"] + ["cuda"] * (has_cuda and torch.cuda.is_available()):
        check(device)
        print(f"{device}: a convolution, a norm and their gradients equal PyTorch's up to rounding")
