"""KernelBench level 2, problem 20: ConvTranspose3d with result y, then (y + bias + y) * y + y."""

import torch

import voxgrad_torch


@torch.compile
def tail(x, bias):
    original = x.detach()
    return (x + bias + original) * original + original


class ModelNew(torch.nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, stride, padding, output_padding, bias_shape):
        super().__init__()
        self.conv_transpose = voxgrad_torch.ConvTranspose3d(in_channels, out_channels, kernel_size, stride, padding,
                                                            output_padding)
        self.bias = torch.nn.Parameter(torch.randn(bias_shape))
        self.conv_transpose.to(memory_format=torch.channels_last_3d)

    def forward(self, x):
        return tail(self.conv_transpose(x), self.bias)
