"""Helpers of the tests: devices, tensors in unusual memory layouts, comparisons."""

import os
import subprocess
import sys

import torch

import voxgrad_torch

SEED = int(os.environ.get("VOXGRAD_TEST_SEED", "20261126"))
DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() and voxgrad_torch.has_cuda else [])
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
FORMS = ["contiguous", "channels_last", "half of contiguous", "half of channels_last", "sliced", "permuted",
         "expanded", "unaligned"]


def channels_last(axes):
    return torch.channels_last if axes == 2 else torch.channels_last_3d


def in_form(t, form):
    """Returns a tensor with the size of t in the memory layout `form`. "expanded" also changes the values."""
    if form == "channels_last" and t.dim() in (4, 5):
        return t.contiguous(memory_format=channels_last(t.dim() - 2))
    if form.startswith("half of") and t.dim() > 1:  # like the gradient of an operand of a concatenation
        return in_form(torch.cat([torch.full_like(t, float("nan")), t], 1), form[8:])[:, t.shape[1]:]
    if form == "sliced":
        outer = t.new_full([2 * n + 1 for n in t.shape], float("nan"))
        inner = outer[tuple(slice(1, 2 * n + 1, 2) for n in t.shape)]
        return inner.copy_(t)
    if form == "permuted":
        return t.transpose(-1, -2).contiguous().transpose(-1, -2)
    if form == "expanded":
        return t[..., :1].expand_as(t)
    if form == "unaligned":
        return t.new_empty(t.numel() + 1)[1:].view(t.shape).copy_(t)
    return t.contiguous()


def assert_near(got, expected, factor, text="", floor=1e-3):
    """Fails if `got` differs from the float64 tensor `expected` by more than `factor` rounding errors of the largest
    element of `expected`, or of `floor` if `floor` is larger."""
    assert got.shape == expected.shape, f"{text}: {list(got.shape)}, expected {list(expected.shape)}"
    if got.numel() == 0:
        return
    largest = max(expected.abs().max().item(), floor)
    error = (got.double() - expected).abs().max().item()
    tolerance = factor * torch.finfo(got.dtype).eps * largest
    assert error <= tolerance, f"{text}: error {error:.3g}, tolerance {tolerance:.3g}"


def same_bits(a, b):
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)


def run_python(code, *options, **environment):
    """Runs code in a new Python process and returns its output. Fails if the process fails."""
    result = subprocess.run([sys.executable, *options, "-c", code], capture_output=True, text=True, timeout=120,
                            env={**os.environ, **environment}, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout
