"""KernelBench level 2, problem 61: ConvTranspose3d, ReLU, GroupNorm."""

import torch

import voxgrad_torch


class ModelNew(torch.nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, groups, bias=False):
        super().__init__()
        self.conv_transpose = voxgrad_torch.ConvTranspose3d(in_channels, out_channels, kernel_size, bias=bias)
        self.relu = torch.nn.ReLU()
        self.group_norm = voxgrad_torch.GroupNorm(groups, out_channels)
        self.conv_transpose.to(memory_format=torch.channels_last_3d)

    def forward(self, x):
        return voxgrad_torch.functional.conv_norm_activation(x, self.conv_transpose, self.group_norm, self.relu,
                                                             activation_first=True)
