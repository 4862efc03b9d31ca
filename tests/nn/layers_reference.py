"""Writes layers_reference.inc: the state_dict keys, shapes and results of PyTorch's layers.

    python3 layers_reference.py > layers_reference.inc

All computations use float64. Element i of entry number k of the state_dict is sin(0.37 i + k) for a parameter and
1 + sin(0.37 i + k) / 2 for a floating-point buffer. Element i of the input is cos(0.23 i). The table holds the shape of
the result in evaluation mode and a projection: the sum of result[i] * cos(0.11 i). A layer with buffers then runs twice
in training mode, with the input and with 2 * input + 1. For such a layer, the table also holds the projections of these
two results and of the floating-point buffers after both runs. layers_test.cpp computes the same numbers.
"""
import argparse

argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()

# Imported after the parsing, because --help must work without these packages.
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

LAYERS = {
    "conv3d": (nn.Conv3d(4, 6, (3, 2, 1), stride=(2, 1, 2), padding=(1, 0, 2), dilation=(1, 2, 1), groups=2), (2, 4, 5, 6, 7)),
    "conv2d": (nn.Conv2d(3, 2, 3, padding=1, bias=False), (1, 3, 4, 5)),
    "conv1d": (nn.Conv1d(2, 4, 2, stride=2), (3, 2, 9)),
    "conv_transpose3d": (nn.ConvTranspose3d(4, 6, (3, 4, 2), stride=(2, 3, 1), padding=(1, 0, 2), output_padding=(1, 2, 1),
                                            groups=2, dilation=(1, 1, 3)), (2, 4, 3, 2, 4)),
    "conv_transpose2d": (nn.ConvTranspose2d(3, 2, 4, stride=2, padding=1), (1, 3, 4, 5)),
    "conv_transpose1d": (nn.ConvTranspose1d(2, 4, 3, stride=2, bias=False), (3, 2, 5)),
    "group_norm": (nn.GroupNorm(2, 6, eps=1e-3), (2, 6, 3, 2)),
    "instance_norm3d": (nn.InstanceNorm3d(3), (2, 3, 2, 3, 4)),
    "instance_norm3d_affine": (nn.InstanceNorm3d(3, affine=True, eps=1e-2), (2, 3, 2, 3, 4)),
    "layer_norm": (nn.LayerNorm([3, 4]), (2, 3, 4)),
    "linear": (nn.Linear(5, 3), (4, 5)),
    "relu": (nn.ReLU(), (11,)),
    "leaky_relu": (nn.LeakyReLU(0.2), (11,)),
    "sigmoid": (nn.Sigmoid(), (11,)),
    "tanh": (nn.Tanh(), (11,)),
    "gelu": (nn.GELU(), (11,)),
    "silu": (nn.SiLU(), (11,)),
    "identity": (nn.Identity(), (11,)),
    "softmax": (nn.Softmax(1), (2, 3, 4)),
    "log_softmax": (nn.LogSoftmax(-1), (2, 3, 4)),
    "elu": (nn.ELU(0.7), (11,)),
    "selu": (nn.SELU(), (11,)),
    "mish": (nn.Mish(), (11,)),
    "hardsigmoid": (nn.Hardsigmoid(), (11,)),
    "hardswish": (nn.Hardswish(), (11,)),
    "prelu": (nn.PReLU(3), (2, 3, 4)),
    "batch_norm1d": (nn.BatchNorm1d(3, momentum=0.3), (4, 3)),
    "batch_norm1d_plain": (nn.BatchNorm1d(3, affine=False, track_running_stats=False), (4, 3, 5)),
    "batch_norm2d": (nn.BatchNorm2d(3, eps=1e-2, momentum=None), (2, 3, 4, 5)),
    "batch_norm3d": (nn.BatchNorm3d(3), (2, 3, 4, 2, 3)),
    "weight_norm_linear": (weight_norm(nn.Linear(5, 3)), (4, 5)),
    "weight_norm_linear_whole": (weight_norm(nn.Linear(5, 3), dim=None), (4, 5)),
    "weight_norm_conv_transpose": (weight_norm(nn.ConvTranspose2d(3, 2, 3), dim=1), (1, 3, 4, 5)),
    "spectral_norm_conv": (spectral_norm(nn.Conv3d(2, 3, 2), n_power_iterations=2), (1, 2, 3, 4, 3)),
    "spectral_norm_conv_transpose": (spectral_norm(nn.ConvTranspose1d(3, 2, 3)), (1, 3, 5)),
    "softplus": (nn.Softplus(beta=2, threshold=1), (11,)),
    "max_pool3d": (nn.MaxPool3d(3, stride=2, padding=1), (1, 2, 5, 6, 7)),
    "avg_pool3d": (nn.AvgPool3d(2, stride=1, padding=1, count_include_pad=False), (1, 2, 3, 4, 3)),
    "max_pool2d": (nn.MaxPool2d(2), (1, 2, 5, 6)),
    "max_pool1d": (nn.MaxPool1d(3, 2, 1), (1, 2, 7)),
    "avg_pool3d_ceil": (nn.AvgPool3d(2, ceil_mode=True), (1, 2, 3, 4, 3)),
    "avg_pool2d": (nn.AvgPool2d((2, 3), 1), (1, 2, 4, 5)),
    "adaptive_avg_pool3d": (nn.AdaptiveAvgPool3d((2, 1, 3)), (1, 2, 3, 4, 5)),
    "adaptive_max_pool3d": (nn.AdaptiveMaxPool3d(2), (1, 2, 3, 4, 5)),
    "reflection_pad3d": (nn.ReflectionPad3d((1, 2, 0, 1, 2, 0)), (1, 2, 3, 4, 5)),
    "replication_pad3d": (nn.ReplicationPad3d(2), (1, 2, 3, 4, 5)),
    "constant_pad3d": (nn.ConstantPad3d(1, -0.5), (1, 2, 3, 4, 5)),
    "upsample_bicubic": (nn.Upsample(scale_factor=2, mode="bicubic"), (1, 2, 3, 4)),
    "upsample": (nn.Upsample(scale_factor=2, mode="trilinear"), (1, 2, 3, 2, 4)),
    "flatten": (nn.Flatten(), (2, 3, 4)),
    "sequential": (nn.Sequential(nn.ConvTranspose3d(2, 4, 4, stride=2, padding=1), nn.ReLU(), nn.GroupNorm(2, 4)),
                   (1, 2, 2, 3, 2)),
}


def pattern(shape, step, phase, function):
    count = torch.Size(shape).numel()
    return function(torch.arange(count, dtype=torch.float64) * step + phase).reshape(shape)


def projection(values):
    return (values.flatten() * pattern((values.numel(),), 0.11, 0, torch.cos)).sum().item()


def braces(values):
    return "{" + ", ".join(str(v) for v in values) + "}"


print("// Written by layers_reference.py; do not edit. clang-format off")
print("const std::map<std::string, LayerReference> kLayerReference = {")
for name, (layer, input_shape) in LAYERS.items():
    layer = layer.double()
    buffers = dict(layer.named_buffers())
    state = layer.state_dict()
    for k, (key, value) in enumerate(state.items()):
        if value.is_floating_point():
            values = pattern(value.shape, 0.37, k, torch.sin)
            state[key] = 1 + values / 2 if key in buffers else values
    layer.load_state_dict(state)
    x = pattern(input_shape, 0.23, 0, torch.cos)
    result = layer.eval()(x).detach()
    sums = [projection(result)]
    if buffers:
        layer.train()
        sums += [projection(layer(x).detach()), projection(layer(2 * x + 1).detach())]
        sums += [projection(buffer) for buffer in layer.buffers() if buffer.is_floating_point()]
    keys = ", ".join(f'{{"{k}", {braces(v.shape)}}}' for k, v in state.items())
    print(f'    {{"{name}", {{{braces(input_shape)}, {{{keys}}}, {braces(result.shape)}, {braces(sums)}}}}},')
print("};")
