"""Compares a model with and without replace_modules(). The demos in this folder use this file."""

import contextlib
import statistics
import time

import torch

import voxgrad_torch

DEVICE = "cuda" if torch.cuda.is_available() and voxgrad_torch.has_cuda else "cpu"


def _run(model, x, autocast, train):
    """Returns the result and, if `train` is true, the gradients of the input and the parameters."""
    with torch.set_grad_enabled(train), torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
        y = model(x)
    if not train:
        return [y]
    return [y, *torch.autograd.grad(y.float().square().mean(), [x, *model.parameters()], materialize_grads=True)]


def _milliseconds(function, repeats):
    """Returns the median time of a call after two calls for warming up."""
    times = []
    for i in range(repeats + 2):
        start = time.perf_counter()
        function()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        times += [1000 * (time.perf_counter() - start)] if i >= 2 else []
    return statistics.median(times)


def compare(name, model, size, repeats):
    """Prints the replaced modules, and the largest differences and the median times for each mode.

    The differences are relative to the largest element of the result, or of all gradients. Modes: float32 (on a GPU,
    PyTorch and voxgrad may use TF32) and autocast to bfloat16.
    """
    torch.manual_seed(0)
    model = model.to(DEVICE)
    x = torch.randn(size, device=DEVICE, requires_grad=True)
    with voxgrad_torch.replaced_modules(model) as report:
        print(f"## {name}, input {list(size)}\n\n{report}\n")
    print("| mode | result differs by | gradients differ by | inference ms, torch.nn | voxgrad_torch | training ms, "
          "torch.nn | voxgrad_torch |\n|" + "---|" * 7, flush=True)
    for mode, autocast in (("float32", False), ("bfloat16", True)):
        found, times = [], []
        for replace in (False, True):
            with voxgrad_torch.replaced_modules(model) if replace else contextlib.nullcontext():
                found.append(_run(model, x, autocast, True))
                times.append([_milliseconds(lambda train=train: _run(model, x, autocast, train), repeats)
                              for train in (False, True)])
        errors = []
        for part in (slice(0, 1), slice(1, None)):
            largest = max(t.abs().max().item() for t in found[0][part])
            errors.append(max((a - b).abs().max().item() for a, b in zip(found[0][part], found[1][part])) / largest)
        print(f"| {mode} | {errors[0]:.1e} | {errors[1]:.1e} | " +
              " | ".join(f"{times[r][t]:.1f}" for t in range(2) for r in range(2)) + " |", flush=True)
    print(flush=True)
