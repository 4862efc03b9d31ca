#!/usr/bin/env python3
"""Writes a checkpoint for nnU-Net into a model folder that `segment` wrote.

    to_nnunet.py out/segment/model

The program reads fold_0/checkpoint_final.safetensors and writes fold_0/checkpoint_final.pth next to it. nnU-Net v2 can
then predict with the folder: nnUNetv2_predict_from_modelfolder -m out/segment/model -f 0 ... This program itself needs
only PyTorch.
"""
import argparse
import json
import pathlib
import re
import struct


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path, help="the model folder")
    return parser.parse_args()


if __name__ == "__main__":
    OPTIONS = parse()  # before the imports of other packages, because --help must work without them

import torch


def load_safetensors(path):
    """Returns the f32 tensors and the metadata of a safetensors file."""
    data = path.read_bytes()
    (size,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8:8 + size])
    metadata = header.pop("__metadata__", {})
    tensors = {}
    for name, entry in header.items():
        if entry["dtype"] != "F32":
            raise SystemExit(f"to_nnunet: '{path}': {name} has dtype {entry['dtype']}, expected F32")
        begin, end = (8 + size + offset for offset in entry["data_offsets"])
        tensors[name] = torch.frombuffer(bytearray(data[begin:end]), dtype=torch.float32).reshape(entry["shape"])
    return tensors, metadata


def all_names(name):
    """Returns the names of a tensor in nnU-Net's state_dict.

    nnU-Net's modules refer to each other, so most tensors have several names.
    """
    names = [name]
    if match := re.fullmatch(r"(.*)\.(conv|norm)\.(weight|bias)", name):
        block, part, kind = match.groups()
        names.append(f"{block}.all_modules.{0 if part == 'conv' else 1}.{kind}")
    if name.startswith("encoder."):
        names += ["decoder." + each for each in names]
    return names


def main(options):
    folder = options.model / "fold_0"
    tensors, metadata = load_safetensors(folder / "checkpoint_final.safetensors")
    checkpoint = {
        "network_weights": {name: tensor for key, tensor in tensors.items() for name in all_names(key)},
        "trainer_name": "nnUNetTrainer",
        "init_args": {"configuration": metadata["configuration"], "fold": 0},
        "inference_allowed_mirroring_axes": tuple(int(axis) for axis in metadata["mirror_axes"]) or None,
    }
    torch.save(checkpoint, folder / "checkpoint_final.pth")
    print(folder / "checkpoint_final.pth")


if __name__ == "__main__":
    main(OPTIONS)
