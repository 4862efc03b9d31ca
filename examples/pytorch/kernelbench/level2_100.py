"""KernelBench level 2, problem 100: ConvTranspose3d, clamp, division."""

import torch

import voxgrad_torch


@torch.compile
def tail(x, min_value, divisor):
    return x.clamp(min=min_value) / divisor


class ModelNew(torch.nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, stride, padding, min_value, divisor):
        super().__init__()
        self.conv_transpose = voxgrad_torch.ConvTranspose3d(in_channels, out_channels, kernel_size, stride, padding)
        self.min_value, self.divisor = min_value, divisor
        self.conv_transpose.to(memory_format=torch.channels_last_3d)

    def forward(self, x):
        return tail(self.conv_transpose(x), self.min_value, self.divisor)
