"""KernelBench level 1, problem 73: ConvTranspose3d, cubic kernel with stride and padding.

The reference ignores its argument output_padding. The problem passes the number of groups as this argument, so the
layer has one group and no output padding.
"""

import torch

import voxgrad_torch


class ModelNew(torch.nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, stride=1, padding=0, output_padding=0, groups=1,
                 bias=False):
        super().__init__()
        self.conv_transpose3d = voxgrad_torch.ConvTranspose3d(in_channels, out_channels, kernel_size, stride,
                                                              padding, 0, groups, bias)
        self.conv_transpose3d.to(memory_format=torch.channels_last_3d)

    def forward(self, x):
        return self.conv_transpose3d(x)
