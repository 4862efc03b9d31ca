"""KernelBench level 2, problem 89: ConvTranspose3d, MaxPool3d, softmax, subtraction, Swish, maximum over channels."""

import torch
import torch.nn.functional as F

import voxgrad_torch


@torch.compile
def tail(x, pool, subtract):
    x = torch.softmax(F.max_pool3d(x, *pool), 1) - subtract.view(1, -1, 1, 1, 1)
    return F.silu(x).amax(1)


class ModelNew(torch.nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, stride, padding, output_padding, pool_kernel_size,
                 pool_stride,
                 pool_padding):
        super().__init__()
        self.conv_transpose = voxgrad_torch.ConvTranspose3d(in_channels, out_channels, kernel_size, stride, padding,
                                                            output_padding)
        self.pool = pool_kernel_size, pool_stride, pool_padding
        self.subtract = torch.nn.Parameter(torch.randn(out_channels))

    def forward(self, x):
        return tail(self.conv_transpose(x), self.pool, self.subtract)
