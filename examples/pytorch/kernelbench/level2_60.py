"""KernelBench level 2, problem 60: ConvTranspose3d, Swish, GroupNorm, hard swish."""

import torch
import torch.nn.functional as F

import voxgrad_torch


class ModelNew(torch.nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, stride, padding, groups, eps, bias=True):
        super().__init__()
        self.conv_transpose = voxgrad_torch.ConvTranspose3d(in_channels, out_channels, kernel_size, stride, padding,
                                                            bias=bias)
        self.group_norm = voxgrad_torch.GroupNorm(groups, out_channels, eps)
        self.swish = torch.nn.SiLU()

    def forward(self, x):
        x = voxgrad_torch.functional.conv_norm_activation(x, self.conv_transpose, self.group_norm, self.swish,
                                                          activation_first=True)
        return F.hardswish(x, inplace=not torch.is_grad_enabled())
