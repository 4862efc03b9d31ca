#!/usr/bin/env python3
"""Converts the weights of an nnU-Net v2 network to a safetensors file that nn::UNet loads.

    convert_nnunet.py checkpoint_final.pth weights.safetensors [--trust]

The input is a checkpoint of nnU-Net's trainer (its "network_weights") or a state_dict of PlainConvUNet or
ResidualEncoderUNet. Needs PyTorch and the safetensors package. By default, the program loads only tensors and numbers,
and executes no code from the checkpoint. --trust loads all objects, which may execute code. docs/nnunet-weights.md
describes the names of the tensors.
"""
import argparse
import re
import sys

import torch
from safetensors.torch import save_file

WRAPPERS = ("module.", "_orig_mod.")  # prefixes that DistributedDataParallel and torch.compile add to names
DUPLICATE = re.compile(r"decoder\.encoder\.|.*\.all_modules\.")  # second names of tensors that also have another name
CONV_NORM = r"(conv|norm)\.(weight|bias)"
KNOWN = re.compile(rf"encoder\.stages\.\d+\.0\.convs\.\d+\.{CONV_NORM}|encoder\.stem\.convs\.0\.{CONV_NORM}|"
                   rf"encoder\.stages\.\d+\.blocks\.\d+\.(conv1|conv2|skip\.[01])\.{CONV_NORM}|"
                   rf"decoder\.stages\.\d+\.convs\.\d+\.{CONV_NORM}|"
                   r"decoder\.(transpconvs|seg_layers)\.\d+\.(weight|bias)")


def convert(state):
    """Returns the tensors in float32, under the names that nn::UNet uses. Raises ValueError for an unknown name or
    shape."""
    result = {}
    for name, value in state.items():
        while prefix := next((p for p in WRAPPERS if name.startswith(p)), None):
            name = name[len(prefix):]
        if DUPLICATE.match(name):
            continue
        if not KNOWN.fullmatch(name):
            raise ValueError(f"{name} is not a parameter of a PlainConvUNet or ResidualEncoderUNet with InstanceNorm3d")
        if value.dim() not in (1, 5):
            raise ValueError(f"{name} has shape {list(value.shape)}: the network is not three-dimensional")
        result[name] = value.detach().float().contiguous().clone()
    return result


def load(path, trust=False):
    """Returns the state_dict of a file that torch.save wrote."""
    import numpy
    scalars = [getattr(numpy, "_core", None) or numpy.core]
    allowed = [scalars[0].multiarray.scalar, numpy.dtype, type(numpy.dtype("f4")), type(numpy.dtype("f8")),
               type(numpy.dtype("i8"))]  # types in the logs that nnU-Net stores in its checkpoints
    with torch.serialization.safe_globals(allowed):
        checkpoint = torch.load(path, map_location="cpu", weights_only=not trust)
    return checkpoint.get("network_weights", checkpoint)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("output")
    parser.add_argument("--trust", action="store_true", help="load all objects, which may execute code from the checkpoint")
    options = parser.parse_args()
    try:
        weights = convert(load(options.checkpoint, options.trust))
    except Exception as error:  # unpickling can raise exceptions of many types
        sys.exit(f"convert_nnunet: '{options.checkpoint}': {error}")
    save_file(weights, options.output, {"format": "pt"})
    print(f"{options.output}: {len(weights)} tensors, {sum(w.numel() for w in weights.values())} parameters")


if __name__ == "__main__":
    main()
