"""Writes kernelbench_models.safetensors for kernelbench_models_test.cpp. Needs PyTorch and the safetensors package.

    python3 kernelbench_models.py

The file holds data of the models of KernelBench's level 2 that contain a ConvTranspose3d. Their sizes are reduced. For
model number N:

    N.input, N.add_input  inputs
    N.state.*             the state_dict
    N.output              the output
    N.grad_output         a random gradient of the output
    N.grad.*              the resulting gradients of the inputs and parameters
    N.after.*             the buffers after the forward pass

Results are computed in float64 and stored in float32.
"""
import argparse
import itertools
import pathlib

argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()

# Imported after the parsing, because --help must work without these packages.
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

UP = {"kernel_size": 3, "stride": 2, "padding": 1}


class Model(nn.Module):
    """A transposed convolution followed by the function `then`. Each keyword argument in `parts` becomes an attribute:
    a layer, or a parameter whose shape is the given tuple."""

    def __init__(self, conv, then, **parts):
        super().__init__()
        self.conv_transpose = nn.ConvTranspose3d(4, 8, **conv)
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(torch.randn(part)) if isinstance(part, tuple) else part)
        self.then = then

    def forward(self, x, *more):
        return self.then(self, self.conv_transpose(x), *more)


def residual(m, x):
    original = x.clone().detach()
    return ((x + m.bias) + original) * original + original


def minus_mean(x):
    return x - x.mean((2, 3, 4), keepdim=True)


def gated(x, bias):
    return torch.clamp(x * torch.sigmoid(x + 3) / 6 - bias, -1, 1)


def swish(x):
    return x * torch.sigmoid(x)


MODELS = {
    3: lambda: Model(UP | {"output_padding": 1}, lambda m, x: F.gelu(F.avg_pool3d(m.norm(x + m.sum_weight), 2)),
                     sum_weight=(), norm=nn.LayerNorm(8)),
    13: lambda: Model(UP, lambda m, x: torch.tanh(torch.softmax(x.mean(1, keepdim=True) + m.bias, 1)) * 2,
                      bias=(1, 1, 1, 1, 1)),
    15: lambda: Model(UP, lambda m, x: minus_mean(m.batch_norm(x)),
                      batch_norm=nn.BatchNorm3d(8)),
    20: lambda: Model(UP | {"output_padding": 1}, residual, bias=(8, 1, 1, 1)),
    26: lambda: Model(UP | {"output_padding": 1}, lambda m, x, more: (x + more) * F.hardswish(x + more),
                      bias=(8, 1, 1, 1, 1)),  # the benchmark's model does not use its bias
    34: lambda: Model(UP | {"kernel_size": 4}, lambda m, x: F.gelu(m.layer_norm(x)) * 1.0, layer_norm=nn.LayerNorm(8)),
    38: lambda: Model(UP | {"output_padding": 1},
                      lambda m, x: torch.softmax(torch.clamp(F.avg_pool3d(x, 2), 0, 1), 1) * 2),
    49: lambda: nn.Sequential(nn.ConvTranspose3d(4, 8, **UP, output_padding=1), nn.Softmax(1), nn.Sigmoid()),
    50: lambda: Model(UP, lambda m, x: (F.avg_pool3d(x * m.scale1, 2) + m.bias) * m.scale2,
                      scale1=(), bias=(8, 1, 1, 1), scale2=()),
    58: lambda: Model(UP, lambda m, x: gated(torch.logsumexp(x, 1, keepdim=True), m.bias), bias=(1, 1, 1, 1)),
    60: lambda: nn.Sequential(nn.ConvTranspose3d(4, 8, **UP), nn.SiLU(), nn.GroupNorm(4, 8), nn.Hardswish()),
    61: lambda: nn.Sequential(nn.ConvTranspose3d(4, 8, 3, bias=False), nn.ReLU(), nn.GroupNorm(4, 8)),
    72: lambda: nn.Sequential(nn.ConvTranspose3d(4, 8, **UP), nn.BatchNorm3d(8), nn.AvgPool3d(2), nn.AvgPool3d(2)),
    74: lambda: Model(UP | {"output_padding": 1},
                      lambda m, x: F.max_pool3d(F.leaky_relu(F.leaky_relu(x, 0.2) * m.multiplier, 0.2), 2),
                      multiplier=(8, 1, 1, 1)),
    77: lambda: Model({"kernel_size": 5}, lambda m, x: m.batch_norm(x * 2).mean((2, 3, 4), keepdim=True),
                      batch_norm=nn.BatchNorm3d(8)),
    78: lambda: Model({"kernel_size": 5, "stride": 2, "padding": 2},
                      lambda m, x: F.max_pool3d(F.max_pool3d(x, 2), 3).sum(1, keepdim=True)),
    89: lambda: Model(UP | {"output_padding": 1},
                      lambda m, x: swish(torch.softmax(F.max_pool3d(x, 2), 1) - m.subtract).max(1)[0],
                      subtract=(1, 8, 1, 1, 1)),
    96: lambda: Model(UP, lambda m, x: F.max_pool3d(x * 0.5, 2).mean((2, 3, 4), keepdim=True).clamp(0, 1)),
    100: lambda: Model(UP, lambda m, x: torch.clamp(x, min=-1) / 2),
}


def results(model, inputs, grad_output):
    """Runs a forward and a backward pass and returns the results by name. Restores the model afterwards."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.zero_grad()
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    y = model(*inputs)
    y.backward(grad_output)
    found = {"output": y} | {f"grad.{name}": x.grad for name, x in zip(("input", "add_input"), inputs)}
    found |= {f"grad.{name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    found |= {f"after.{name}": value.clone() for name, value in model.named_buffers()}
    model.load_state_dict(before)
    return {name: value.detach() for name, value in found.items()}


def away_from_kinks(model, inputs, grad_output, found):
    """Returns whether input changes of 1e-5, which exceed float32's rounding, change the results only slightly."""
    for _ in range(6):
        moved = results(model, [x + 1e-5 * torch.randn_like(x) for x in inputs], grad_output)
        if any((moved[name] - value).abs().max() > 3e-4 * value.abs().max() + 1e-9 for name, value in found.items()):
            return False
    return True


def case(number):
    for seed in itertools.count(number):
        torch.manual_seed(seed)  # all random numbers are drawn in float32
        model = MODELS[number]()
        for parameter in model.parameters():  # includes affine parameters, which start as ones and zeros
            nn.init.normal_(parameter, 0, 0.4)
        inputs = [torch.randn((2, 4, 7, 7, 8) if number in (72, 78) else (2, 4, 3, 4, 4))]
        if number == 26:
            inputs.append(torch.randn(2, 8, 6, 8, 8))
        with torch.no_grad():
            grad_output = torch.randn(model.eval()(*inputs).shape).double()
        model.train().double()
        inputs = [x.double() for x in inputs]
        found = results(model, inputs, grad_output)
        if away_from_kinks(model, inputs, grad_output, found):
            break
    print(number, "seed", seed, tuple(found["output"].shape))
    found |= {"grad_output": grad_output} | dict(zip(("input", "add_input"), inputs))
    found |= {f"state.{name}": value for name, value in model.state_dict().items()}
    return {f"{number}.{name}": (v.float() if v.is_floating_point() else v).contiguous() for name, v in found.items()}


if __name__ == "__main__":
    recorded = {}
    for each in MODELS:
        recorded |= case(each)
    save_file(recorded, pathlib.Path(__file__).with_suffix(".safetensors"))
