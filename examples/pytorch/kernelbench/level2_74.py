"""KernelBench level 2, problem 74: ConvTranspose3d, LeakyReLU, multiplication, LeakyReLU, MaxPool3d."""

import torch
import torch.nn.functional as F

import voxgrad_torch


@torch.compile
def tail(x, multiplier):
    return F.max_pool3d(F.leaky_relu(F.leaky_relu(x, 0.2) * multiplier, 0.2), 2)


class ModelNew(torch.nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, stride, padding, output_padding, multiplier_shape):
        super().__init__()
        self.conv_transpose = voxgrad_torch.ConvTranspose3d(in_channels, out_channels, kernel_size, stride, padding,
                                                            output_padding)
        self.multiplier = torch.nn.Parameter(torch.randn(multiplier_shape))
        self.conv_transpose.to(memory_format=torch.channels_last_3d)

    def forward(self, x):
        return tail(self.conv_transpose(x), self.multiplier)
