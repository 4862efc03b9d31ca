"""KernelBench level 2, problem 49: ConvTranspose3d, softmax over channels, sigmoid."""

import torch

import voxgrad_torch


@torch.compile
def tail(x):
    return torch.sigmoid(torch.softmax(x, 1))


class ModelNew(torch.nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, stride, padding, output_padding, bias=True):
        super().__init__()
        self.conv_transpose = voxgrad_torch.ConvTranspose3d(in_channels, out_channels, kernel_size, stride, padding,
                                                            output_padding, bias=bias)
        self.conv_transpose.to(memory_format=torch.channels_last_3d)

    def forward(self, x):
        return tail(self.conv_transpose(x))
