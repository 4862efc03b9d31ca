"""KernelBench level 2, problem 96: ConvTranspose3d, scaling, MaxPool3d, mean over the voxels, clamp."""

import torch
import torch.nn.functional as F

import voxgrad_torch


@torch.compile
def tail(x, scale, pool):
    return F.max_pool3d(x * scale, pool).mean((2, 3, 4), keepdim=True).clamp(0, 1)


class ModelNew(torch.nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, stride, padding, scale, maxpool_kernel_size):
        super().__init__()
        self.conv_transpose = voxgrad_torch.ConvTranspose3d(in_channels, out_channels, kernel_size, stride, padding)
        self.scale, self.pool = scale, maxpool_kernel_size
        self.conv_transpose.to(memory_format=torch.channels_last_3d)

    def forward(self, x):
        return tail(self.conv_transpose(x), self.scale, self.pool)
