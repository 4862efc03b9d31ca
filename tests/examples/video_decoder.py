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
import argparse
import pathlib

argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()

# Imported after the parsing, because --help must work without these packages.
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn


def causal_conv(in_channels, out_channels):
    pad = nn.ConstantPad3d((0, 0, 0, 0, 2, 0), 0)
    return nn.Sequential(pad, nn.Conv3d(in_channels, out_channels, 3, padding=(0, 1, 1)))


def upsample(in_channels, out_channels):
    crop = nn.ConstantPad3d((0, 0, 0, 0, -1, 0), 0)
    return nn.Sequential(nn.ConvTranspose3d(in_channels, out_channels, 2, 2), crop)


class ConditionalConv(nn.Module):
    def __init__(self, in_channels, out_channels, conditions):
        super().__init__()
        self.affine = nn.Linear(conditions, 2 * in_channels)
        self.conv = causal_conv(in_channels, out_channels)

    def forward(self, x, condition):
        normal = torch.stack([F.group_norm(frame, 4) for frame in x.unbind(2)], 2)
        scale, shift = self.affine(condition)[..., None, None, None].chunk(2, 1)
        return self.conv(F.silu(normal * (1 + scale) + shift))


class Decoder(nn.Module):
    def __init__(self, latent, channels, conditions):
        super().__init__()
        half = channels // 2
        self.first = causal_conv(latent, channels)
        self.conv1 = ConditionalConv(channels, channels, conditions)
        self.conv2 = ConditionalConv(channels, channels, conditions)
        self.up1 = upsample(channels, half)
        self.conv3 = ConditionalConv(half, half, conditions)
        self.conv4 = ConditionalConv(half, half, conditions)
        self.up2 = upsample(half, half)
        self.last = ConditionalConv(half, 1, conditions)

    def forward(self, latent, condition):
        x = self.first(latent)
        x = self.up1(x + self.conv2(self.conv1(x, condition), condition))
        x = self.up2(x + self.conv4(self.conv3(x, condition), condition))
        return self.last(x, condition)


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
