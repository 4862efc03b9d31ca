"""KernelBench level 2, problem 15: ConvTranspose3d, BatchNorm3d, subtraction of the spatial mean."""

import torch

import voxgrad_torch


@torch.compile
def tail(x, batch_norm):
    x = batch_norm(x)
    return x - x.mean((2, 3, 4), keepdim=True)


class ModelNew(torch.nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, stride, padding, bias=True):
        super().__init__()
        self.conv_transpose = voxgrad_torch.ConvTranspose3d(in_channels, out_channels, kernel_size, stride, padding,
                                                            bias=bias)
        self.batch_norm = torch.nn.BatchNorm3d(out_channels)
        self.conv_transpose.to(memory_format=torch.channels_last_3d)

    def forward(self, x):
        return tail(self.conv_transpose(x), self.batch_norm)
