"""KernelBench level 2, problem 58: ConvTranspose3d, logsumexp over channels, x * sigmoid(x + 3) / 6, subtraction,
clamp."""

import torch

import voxgrad_torch


@torch.compile
def tail(x, bias):
    x = torch.logsumexp(x, 1, keepdim=True)
    return (x * torch.sigmoid(x + 3) / 6 - bias).clamp(-1, 1)


class ModelNew(torch.nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, stride, padding, bias_shape):
        super().__init__()
        self.conv_transpose = voxgrad_torch.ConvTranspose3d(in_channels, out_channels, kernel_size, stride, padding)
        self.bias = torch.nn.Parameter(torch.randn(1, 1, 1, 1))
        self.conv_transpose.to(memory_format=torch.channels_last_3d)

    def forward(self, x):
        return tail(self.conv_transpose(x), self.bias)
