"""Writes video_decoder.safetensors for video_test.cpp. Needs PyTorch and the safetensors package.

    python3 video_decoder.py

The file holds data of a small decoder of examples/video/model.h, which this script defines a second time in PyTorch:

    latent, condition  inputs
    state.*            the state_dict
    output             the output
    grad_output        a random gradient of the output
    grad.*             the resulting gradients of the inputs and parameters

Results are computed in float64 and stored in float32.
"""
import pathlib

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn


class CausalConv(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = nn.Conv3d(in_channels, out_channels, 3, padding=(0, 1, 1))

    def forward(self, x):
        return self.conv(F.pad(x, (0, 0, 0, 0, 2, 0)))


class Upsample(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = nn.ConvTranspose3d(in_channels, out_channels, 2, 2)

    def forward(self, x):
        return self.conv(x)[:, :, 1:]


class ConditionalConv(nn.Module):
    def __init__(self, in_channels, out_channels, conditions):
        super().__init__()
        self.affine = nn.Linear(conditions, 2 * in_channels)
        self.conv = CausalConv(in_channels, out_channels)

    def forward(self, x, condition):
        normal = torch.stack([F.group_norm(frame, 4) for frame in x.unbind(2)], 2)
        scale, shift = self.affine(condition)[..., None, None, None].chunk(2, 1)
        return self.conv(F.silu(normal * (1 + scale) + shift))


class ResidualBlock(nn.Module):
    def __init__(self, channels, conditions):
        super().__init__()
        self.conv1 = ConditionalConv(channels, channels, conditions)
        self.conv2 = ConditionalConv(channels, channels, conditions)

    def forward(self, x, condition):
        return x + self.conv2(self.conv1(x, condition), condition)


class Decoder(nn.Module):
    def __init__(self, latent, channels, conditions):
        super().__init__()
        half = channels // 2
        self.first = CausalConv(latent, channels)
        self.block1 = ResidualBlock(channels, conditions)
        self.up1 = Upsample(channels, half)
        self.block2 = ResidualBlock(half, conditions)
        self.up2 = Upsample(half, half)
        self.last = ConditionalConv(half, 1, conditions)

    def forward(self, latent, condition):
        x = self.up1(self.block1(self.first(latent), condition))
        return self.last(self.up2(self.block2(x, condition)), condition)


torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
decoder = Decoder(2, 8, 3)
# Round the inputs to float32, because the file stores float32 numbers.
for parameter in decoder.parameters():
    parameter.data = parameter.data.float().double()
latent = torch.randn(2, 2, 3, 3, 2).float().double().requires_grad_()
condition = torch.randn(2, 3).float().double().requires_grad_()
output = decoder(latent, condition)
grad_output = torch.randn_like(output).float().double()
output.backward(grad_output)

tensors = {"latent": latent, "condition": condition, "output": output, "grad_output": grad_output,
           "grad.latent": latent.grad, "grad.condition": condition.grad}
for name, parameter in decoder.named_parameters():
    tensors["state." + name] = parameter
    tensors["grad." + name] = parameter.grad
path = pathlib.Path(__file__).with_suffix(".safetensors")
save_file({name: tensor.detach().float().contiguous() for name, tensor in tensors.items()}, path)
