#!/usr/bin/env python3
"""Measures MONAI's SegResNet and UNet with PyTorch's modules, and after voxgrad_torch.replace_modules().

    monai_networks.py [--size 96] [--batch 1] [--repeats 10]

Needs `pip install monai`. Runs on a GPU if both PyTorch and voxgrad_torch can use one.
"""

import argparse

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--size", type=int, help="voxels along each axis (default: 96 on a GPU, 32 on the CPU)")
parser.add_argument("--batch", type=int, default=1, help="samples of the input")
parser.add_argument("--repeats", type=int, default=10, help="measured calls")
options = parser.parse_args()

# Imported after the parsing, because --help must work without these packages.
from compare_modules import DEVICE, compare
from monai.networks.nets import SegResNet, UNet

size = (options.batch, 1, *[options.size or (96 if DEVICE == "cuda" else 32)] * 3)
compare("SegResNet", SegResNet(3, 16, in_channels=1, out_channels=3), size, options.repeats)
compare("UNet", UNet(3, 1, 3, (16, 32, 64, 128), (2, 2, 2), num_res_units=2), size, options.repeats)
