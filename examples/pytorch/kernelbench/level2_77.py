"""KernelBench level 2, problem 77: ConvTranspose3d, scaling, BatchNorm3d, mean over the voxels."""

import torch

import voxgrad_torch


@torch.compile
def tail(x, scale, batch_norm):
    return batch_norm(x * scale).mean((2, 3, 4), keepdim=True)


class ModelNew(torch.nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, scale_factor, eps=1e-5, momentum=0.1):
        super().__init__()
        self.conv_transpose = voxgrad_torch.ConvTranspose3d(in_channels, out_channels, kernel_size)
        self.scale_factor = scale_factor
        self.batch_norm = torch.nn.BatchNorm3d(out_channels, eps=eps, momentum=momentum)
        self.conv_transpose.to(memory_format=torch.channels_last_3d)

    def forward(self, x):
        return tail(self.conv_transpose(x), self.scale_factor, self.batch_norm)
