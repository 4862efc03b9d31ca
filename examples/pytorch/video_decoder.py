#!/usr/bin/env python3
"""Compares a block of a video decoder with and without replace_modules().

    video_decoder.py [--size 64] [--frames 9] [--channels 128] [--repeats 10]

The block is a stage of the decoder of a causal video autoencoder: two residual blocks of group norm, SiLU and a
3 x 3 x 3 convolution, then an upsampling by 2 along all axes. The convolutions are causal: a frame depends only on
itself and earlier frames.
"""

import argparse

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--size", type=int, help="height and width of the input (default: 64 on a GPU, 8 on the CPU)")
parser.add_argument("--frames", type=int, help="frames of the input (default: 9 on a GPU, 3 on the CPU)")
parser.add_argument("--channels", type=int, help="channels of the result (default: 128 on a GPU, 32 on the CPU)")
parser.add_argument("--repeats", type=int, default=10, help="measured calls")
options = parser.parse_args()

# Imported after the parsing, because --help must work without these packages.
import torch
from compare_modules import DEVICE, compare
from torch import nn


class CausalConv3d(nn.Module):
    """Prepends kernel_size - 1 copies of the first frame, pads H and W by replication, and computes a convolution."""

    def __init__(self, in_channels, out_channels, kernel_size):
        super().__init__()
        side = kernel_size // 2
        self.pad = (side, side, side, side, kernel_size - 1, 0)
        self.conv = nn.Conv3d(in_channels, out_channels, kernel_size)

    def forward(self, x):
        return self.conv(nn.functional.pad(x, self.pad, mode="replicate"))


class ResidualBlock(nn.Module):
    """Applies group norm, SiLU and a convolution twice, and adds the input."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        layers = []
        for channels in (in_channels, out_channels):
            layers += [nn.GroupNorm(32, channels, eps=1e-6), nn.SiLU(), CausalConv3d(channels, out_channels, 3)]
        self.layers = nn.Sequential(*layers)
        self.shortcut = nn.Conv3d(in_channels, out_channels, 1) if in_channels != out_channels else nn.Identity()

    def forward(self, x):
        return self.shortcut(x) + self.layers(x)


class Upsample(nn.Module):
    """Doubles H and W, turns T frames into 2 T - 1 (the first frame stays single), and computes a convolution."""

    def __init__(self, channels):
        super().__init__()
        self.conv = CausalConv3d(channels, channels, 3)

    def forward(self, x):
        first, rest = x[:, :, :1], x[:, :, 1:]
        first = nn.functional.interpolate(first, scale_factor=(1, 2, 2), mode="nearest")
        rest = nn.functional.interpolate(rest, scale_factor=2, mode="nearest")
        return self.conv(torch.cat([first, rest], 2))


gpu = DEVICE == "cuda"
channels, frames = options.channels or (128 if gpu else 32), options.frames or (9 if gpu else 3)
size = options.size or (64 if gpu else 8)
block = nn.Sequential(ResidualBlock(2 * channels, channels), ResidualBlock(channels, channels), Upsample(channels))
compare("Video decoder", block, (1, 2 * channels, frames, size, size), options.repeats)
