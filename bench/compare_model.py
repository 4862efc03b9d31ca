#!/usr/bin/env python3
"""Compares a model in voxgrad and PyTorch (cuDNN) on one GPU, alternately in one process on the same buffers.

    bench/compare_model.py LIBRARY [--runs 15] [--json FILE] [--markdown FILE]

The model is KernelBench's level 2 problem 61: ConvTranspose3d(64, 128, 3), ReLU, GroupNorm(8, 128) on an input of shape
(16, 64, 32, 32, 32), in TF32. LIBRARY is the built libconv_peers.so. The five sides of the comparison are voxgrad and
four variants of PyTorch: eager and with torch.compile, each in the memory formats contiguous and channels_last_3d.

"forward" runs without recording gradients. "forward + backward" is a training step without the optimizer: it computes
the gradients of the input and of all parameters from a given gradient of the output. Times are medians, measured by
CUDA events; the sides take turns after each run. "peak" is the peak memory of tensors and workspaces in a step, without
the input, the parameters and the given gradient. Ratios are relative to voxgrad. The program compares voxgrad's results
of the last run with PyTorch's results in float64, and exits with 1 if a relative error is too large.
"""

import argparse
import copy
import ctypes
import datetime
import json
import os
import statistics
import sys


BATCH, CIN, COUT, SIZE, KERNEL, GROUPS = 16, 64, 128, 32, 3, 8
RESULTS = ("output", "gradient of the input", "gradient of the convolution's weight", "gradient of GroupNorm's weight",
           "gradient of GroupNorm's bias")
LIMIT = 2e-3  # maximum relative error
PARTS = ("forward", "step")


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", help="path of libconv_peers.so")
    parser.add_argument("--runs", type=int, default=15, help="number of runs for each median (default: 15)")
    parser.add_argument("--json", metavar="FILE", help="write all results to this file")
    parser.add_argument("--markdown", metavar="FILE", help="write the table to this file")
    return parser.parse_args()


if __name__ == "__main__":
    OPTIONS = parse()  # before the imports of other packages, because --help must work without them

import torch
from torch import nn

from compare_gpu import gpu, timed


class Voxgrad:
    """The model in voxgrad. It uses the memory of the PyTorch model's parameters, input and output gradient."""

    def __init__(self, path, model, x, g):
        try:
            self.library = ctypes.CDLL(os.path.abspath(path))
        except OSError as error:
            sys.exit(f"compare_model: {error}")
        self.like = [g, x, *model.parameters()]
        self.x = (ctypes.c_void_p(x.data_ptr()), (ctypes.c_int64 * 5)(*x.shape))
        self.g = ctypes.c_void_p(g.data_ptr())
        self.call("make", *map(ctypes.c_int64, (CIN, COUT, KERNEL, GROUPS)),
                  *(ctypes.c_void_p(p.data_ptr()) for p in model.parameters()))

    def call(self, name, *arguments):
        function = getattr(self.library, "voxgrad_model_" + name)
        function.restype = ctypes.c_char_p
        error = function(*arguments)
        if error:
            sys.exit("voxgrad: " + error.decode())

    def forward(self):
        self.call("run", *self.x, None)

    def step(self):
        self.call("run", *self.x, self.g)

    def peak(self):
        peak = ctypes.c_int64()
        self.call("peak", *self.x, self.g, ctypes.byref(peak))
        return peak.value

    def result(self, which):
        """Returns a copy of the result RESULTS[which] of the last run."""
        copied = torch.full_like(self.like[which], float("nan"))
        self.call("result", which, ctypes.c_void_p(copied.data_ptr()))
        return copied


class Torch:
    """A PyTorch model with its input and output gradient."""

    def __init__(self, model, x, g):
        self.model = model
        self.x = x.detach().requires_grad_()
        y = model(self.x)
        # The output gradient must have the memory format of the output.
        self.g = g if y.stride() == g.stride() else torch.empty_like(y).copy_(g)

    def forward(self):
        with torch.no_grad():
            self.model(self.x)

    def step(self):
        self.drop_gradients()
        self.model(self.x).backward(self.g)

    def peak(self):
        self.drop_gradients()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.step()
        return torch.cuda.max_memory_allocated() - before

    def drop_gradients(self):
        for leaf in (self.x, *self.model.parameters()):
            leaf.grad = None


def warm_up(side):
    for part in PARTS:
        for _ in range(3):
            getattr(side, part)()


def sides_of(path, model, x, g, notes):
    """Returns the sides by name, after a warm-up. If torch.compile fails, adds the reason to `notes`."""
    last = torch.channels_last_3d
    layouts = {"contiguous": (model, x),
               "channels_last_3d": (copy.deepcopy(model).to(memory_format=last), x.to(memory_format=last))}
    sides = {"voxgrad": Voxgrad(path, model, x, g)}
    for layout, (module, data) in layouts.items():
        sides[f"PyTorch, {layout}"] = Torch(module, data, g)
    for side in sides.values():
        warm_up(side)
    for layout, (module, data) in layouts.items():
        try:
            compiled = Torch(torch.compile(module, dynamic=False), data, g)
            warm_up(compiled)
            sides[f"torch.compile, {layout}"] = compiled
        except Exception as error:  # torch.compile can raise exceptions of many types
            notes.append(f"torch.compile, {layout}, failed: " + " ".join(str(error).split("\n")[:2]))
    return sides


def reference(model, x, g, output):
    """Returns all results in float64. Processes one sample at a time, because float64 workspaces are large.

    Rounding can move an input of ReLU across zero and thereby change the gradient. To avoid this, the gradients of the
    reference use the mask of voxgrad's ReLU, which is derived from voxgrad's `output`. GroupNorm's weights are
    positive, so ReLU returned 0 exactly where `output` has the minimum of its sample and channel.
    """
    exact = copy.deepcopy(model).double()
    conv, relu, norm = exact
    outputs, gradients = [], []
    for i in range(len(x)):
        sample, result = x[i:i + 1].double().requires_grad_(), output[i:i + 1]
        convolved = conv(sample)
        norm(convolved * (result > result.amin((2, 3, 4), keepdim=True))).backward(g[i:i + 1].double())
        gradients.append(sample.grad)
        with torch.no_grad():
            outputs.append(norm(relu(convolved)))
    return [torch.cat(outputs), torch.cat(gradients), *(p.grad for p in exact.parameters())]


def check(results, unrecorded, exact):
    """Returns the relative errors by name. Exits if an error is too large."""
    pairs = dict(zip(RESULTS, zip(results, exact)))
    pairs["output of the forward pass alone"] = (unrecorded, exact[0])
    errors = {name: ((got - right).norm() / right.norm()).item() for name, (got, right) in pairs.items()}
    wrong = [f"{name} {error:.1e}" for name, error in errors.items() if not error < LIMIT]
    if wrong:
        sys.exit(f"compare_model: voxgrad's relative error is above {LIMIT}: {', '.join(wrong)}")
    return errors


def table(rows, notes):
    lines = ["| | forward | ratio | forward + backward | ratio | peak MB | ratio |", "|---|" + "---:|" * 6]
    for row in rows:
        cells = (f"{row[key] / scale:.{digits}f} | {row[key] / rows[0][key]:.2f}"
                 for key, scale, digits in (("forward", 1, 3), ("step", 1, 3), ("peak", 1e6, 0)))
        lines.append(f"| {row['side']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "".join(f"\n\n{note}" for note in notes)


def main(options):
    if not torch.cuda.is_available():
        sys.exit("compare_model: PyTorch finds no CUDA GPU")
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True

    torch.manual_seed(0)
    model = nn.Sequential(nn.ConvTranspose3d(CIN, COUT, KERNEL, bias=False), nn.ReLU(), nn.GroupNorm(GROUPS, COUT))
    nn.init.uniform_(model[2].weight, 0.5, 1.5)
    nn.init.normal_(model[2].bias)
    model.cuda()
    x = torch.randn(BATCH, CIN, SIZE, SIZE, SIZE, device="cuda")
    g = torch.randn(BATCH, COUT, *(3 * [SIZE + KERNEL - 1]), device="cuda")

    head = (f"{gpu()}, PyTorch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}, "
            f"CUDA {torch.version.cuda}, {datetime.date.today()}, medians of {options.runs} runs, milliseconds")
    print(head, flush=True)
    notes = []
    sides = sides_of(options.library, model, x, g, notes)
    voxgrad = sides["voxgrad"]
    times = {(name, part): [] for name in sides for part in PARTS}
    for part in PARTS:
        for _ in range(options.runs):
            for name, side in sides.items():
                times[name, part].append(timed(getattr(side, part)))
        if part == "forward":
            unrecorded = voxgrad.result(0)
    results = [voxgrad.result(which) for which in range(len(RESULTS))]
    rows = [{"side": name, **{part: statistics.median(times[name, part]) for part in PARTS}, "peak": side.peak()}
            for name, side in sides.items()]

    errors = check(results, unrecorded, reference(model, x, g, results[0]))
    notes.append("voxgrad's relative errors: " + ", ".join(f"{name} {error:.1e}" for name, error in errors.items()))
    print(table(rows, notes))
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"head": head, "rows": rows, "errors": errors, "notes": notes}, file, indent=1)
    if options.markdown:
        with open(options.markdown, "w") as file:
            file.write(f"{head}\n\n{table(rows, notes)}\n")


if __name__ == "__main__":
    main(OPTIONS)
