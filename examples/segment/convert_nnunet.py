#!/usr/bin/env python3
"""Weights of nnU-Net v2 as a safetensors file that nn::UNet loads.

    convert_nnunet.py checkpoint_final.pth weights.safetensors [--trust]

Takes a checkpoint of nnU-Net's trainer (its "network_weights") or a state_dict of PlainConvUNet or ResidualEncoderUNet.
Needs PyTorch and the safetensors package. A checkpoint is read without running code from it; --trust allows that, for
files that hold more than tensors and numbers. The names are explained in docs/nnunet-weights.md.
"""
import argparse
import re
import sys

import torch
from safetensors.torch import save_file

WRAPPERS = ("module.", "_orig_mod.")  # of DistributedDataParallel and torch.compile
DUPLICATE = re.compile(r"decoder\.encoder\.|.*\.all_modules\.")  # second names of the same tensors
CONV_NORM = r"(conv|norm)\.(weight|bias)"
KNOWN = re.compile(rf"encoder\.stages\.\d+\.0\.convs\.\d+\.{CONV_NORM}|encoder\.stem\.convs\.0\.{CONV_NORM}|"
                   rf"encoder\.stages\.\d+\.blocks\.\d+\.(conv1|conv2|skip\.[01])\.{CONV_NORM}|"
                   rf"decoder\.stages\.\d+\.convs\.\d+\.{CONV_NORM}|"
                   r"decoder\.(transpconvs|seg_layers)\.\d+\.(weight|bias)")


def convert(state):
    """The tensors that nn::UNet has, under its names."""
    result = {}
    for name, value in state.items():
        while prefix := next((p for p in WRAPPERS if name.startswith(p)), None):
            name = name[len(prefix):]
        if DUPLICATE.match(name):
            continue
        if not KNOWN.fullmatch(name):
            raise ValueError(f"{name} is no part of a PlainConvUNet or ResidualEncoderUNet with InstanceNorm3d")
        if value.dim() not in (1, 5):
            raise ValueError(f"{name} has shape {list(value.shape)}: the network is not one of volumes")
        result[name] = value.detach().float().contiguous().clone()
    return result


def load(path, trust=False):
    """The state_dict in a file of torch.save."""
    import numpy
    scalars = [getattr(numpy, "_core", None) or numpy.core]
    harmless = [scalars[0].multiarray.scalar, numpy.dtype, type(numpy.dtype("f4")), type(numpy.dtype("f8")),
                type(numpy.dtype("i8"))]  # as the logs of nnU-Net hold
    with torch.serialization.safe_globals(harmless):
        checkpoint = torch.load(path, map_location="cpu", weights_only=not trust)
    return checkpoint.get("network_weights", checkpoint)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("output")
    parser.add_argument("--trust", action="store_true", help="run what the pickle in the checkpoint asks for")
    options = parser.parse_args()
    try:
        weights = convert(load(options.checkpoint, options.trust))
    except Exception as error:  # what unpickling throws has many types
        sys.exit(f"convert_nnunet: '{options.checkpoint}': {error}")
    save_file(weights, options.output, {"format": "pt"})
    print(f"{options.output}: {len(weights)} tensors, {sum(w.numel() for w in weights.values())} parameters")


if __name__ == "__main__":
    main()
