#!/usr/bin/env python3
"""Compares `predict` with nnU-Net's command line: time, memory and labels.

    bench/compare_predict.py build/release/examples/predict
    bench/compare_predict.py PREDICT --device cuda --size 512 512 300 --classes 16 --network standard --rounds 1

The script needs the Python package nnunetv2, whose programs must be in PATH. It writes a model folder with random
weights, and a volume whose voxels are 2 mm wide. Both programs resample the volume to 1.8 mm. --network selects the
network:
  small     five stages with 16 to 160 channels, windows of 96^3 voxels
  standard  nnU-Net's six stages with 32 to 320 channels, windows of 128^3 voxels
With the default arguments, a prediction has 18 windows. The programs run alternately. For each program, the script
prints the median wall time of the whole command, and the maximum over the runs of the peak memory of the largest
process.
"""
import argparse
import json
import os
import pathlib
import statistics
import subprocess
import tempfile
import time

NETWORKS = {"small": ([16, 32, 64, 128, 160], 96), "standard": ([32, 64, 128, 256, 320, 320], 128)}


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("predict", help="path of the program predict")
    parser.add_argument("--size", type=int, nargs=3, default=[160, 160, 128], help="voxels along x, y and z")
    parser.add_argument("--classes", type=int, default=5, help="classes including the background (default: 5)")
    parser.add_argument("--network", default="small", choices=NETWORKS, help="see above (default: small)")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=3, help="runs of each program (default: 3)")
    return parser.parse_args()


if __name__ == "__main__":
    OPTIONS = parse()  # before the imports of other packages, because --help must work without them

import nibabel
import numpy as np
import torch
from dynamic_network_architectures.architectures.unet import PlainConvUNet


def write_model(folder, features, patch, classes):
    stages = len(features)
    settings = dict(n_stages=stages, features_per_stage=features, kernel_sizes=[[3] * 3] * stages,
                    strides=[[1] * 3] + [[2] * 3] * (stages - 1), n_conv_per_stage=[2] * stages,
                    n_conv_per_stage_decoder=[2] * (stages - 1), conv_bias=True, norm_op_kwargs={"eps": 1e-5, "affine":
                    True}, nonlin_kwargs={"inplace": True})
    torch.manual_seed(0)
    network = PlainConvUNet(1, num_classes=classes, conv_op=torch.nn.Conv3d, norm_op=torch.nn.InstanceNorm3d,
                            nonlin=torch.nn.LeakyReLU, deep_supervision=True, **settings)
    network.apply(network.initialize)
    (folder / "fold_0").mkdir(parents=True)
    torch.save({"network_weights": network.state_dict(), "trainer_name": "nnUNetTrainer",
                "init_args": {"configuration": "3d_fullres"}, "inference_allowed_mirroring_axes": (0, 1, 2)},
               folder / "fold_0/checkpoint_final.pth")
    resampling = {}
    for kind, order in (("data", 3), ("seg", 1), ("probabilities", 1)):
        resampling[f"resampling_fn_{kind}"] = "resample_data_or_seg_to_shape"
        resampling[f"resampling_fn_{kind}_kwargs"] = {"is_seg": kind == "seg", "order": order, "order_z": 0,
                                                      "force_separate_z": None}
    architecture = {
        "network_class_name": "dynamic_network_architectures.architectures.unet.PlainConvUNet",
        "arch_kwargs": {**settings, "conv_op": "torch.nn.modules.conv.Conv3d", "dropout_op": None,
                        "norm_op": "torch.nn.modules.instancenorm.InstanceNorm3d", "nonlin": "torch.nn.LeakyReLU",
                        "dropout_op_kwargs": None},
        "_kw_requires_import": ["conv_op", "norm_op", "dropout_op", "nonlin"]}
    configuration = {"data_identifier": "random", "preprocessor_name": "DefaultPreprocessor", "batch_size": 2,
                     "patch_size": [patch] * 3, "spacing": [1.8] * 3, "normalization_schemes": ["ZScoreNormalization"],
                     "use_mask_for_norm": [False], "architecture": architecture, **resampling}
    (folder / "plans.json").write_text(json.dumps({
        "dataset_name": "Dataset000_random", "plans_name": "nnUNetPlans", "image_reader_writer": "NibabelIO",
        "transpose_forward": [0, 1, 2], "transpose_backward": [0, 1, 2], "label_manager": "LabelManager",
        "configurations": {"3d_fullres": configuration}, "foreground_intensity_properties_per_channel": {"0": {}}}))
    (folder / "dataset.json").write_text(json.dumps({
        "channel_names": {"0": "MRI"}, "labels": {"background": 0, **{f"class {i}": i for i in range(1, classes)}},
        "numTraining": 1, "file_ending": ".nii.gz"}))


def write_volume(path, size):
    grid = np.meshgrid(*(np.linspace(0, 9, n) for n in size), indexing="ij", sparse=True)
    noise = np.random.default_rng(0).standard_normal(size, dtype=np.float32)
    values = (200 * np.sin(grid[2]) * np.cos(grid[1] + grid[0]) + 60 * noise).astype(np.int16)
    nibabel.save(nibabel.Nifti1Image(values, np.diag([2.0, 2.0, 2.0, 1.0])), path)


def measure(command):
    """Runs a command. Returns its time in seconds and the peak memory of its largest process in MB."""
    start = time.perf_counter()
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen([str(part) for part in command], stdout=log, stderr=log)
        _, status, usage = os.wait4(process.pid, 0)
        log.seek(0)
        if status:
            raise SystemExit(f"{log.read()[-2000:]}{command[0]} failed")
    return time.perf_counter() - start, usage.ru_maxrss / 1000


def main(options):
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        for variable in ("nnUNet_raw", "nnUNet_preprocessed", "nnUNet_results"):
            os.environ[variable] = name  # nnU-Net prints warnings if they are not set
        write_model(folder / "model", *NETWORKS[options.network], options.classes)
        (folder / "input").mkdir()
        write_volume(folder / "input/case_0000.nii.gz", options.size)
        commands = {
            "predict": [options.predict, folder / "model", folder / "input", folder / "predict", "--no-mirroring",
                        "--device", options.device],
            "nnU-Net": ["nnUNetv2_predict_from_modelfolder", "-i", folder / "input", "-o", folder / "nnU-Net", "-m",
                        folder / "model", "-f", "0", "--disable_tta", "-device", options.device]}
        runs = {side: [] for side in commands}
        for _ in range(options.rounds):
            for side, command in commands.items():
                runs[side].append(measure(command))
        for side, measured in runs.items():
            print(f"{side}: {statistics.median(t for t, _ in measured):.1f} s, "
                  f"{max(memory for _, memory in measured):.0f} MB")
        a, b = (np.asarray(nibabel.load(folder / side / "case.nii.gz").dataobj) for side in commands)
        print(f"{(a == b).mean():.6f} of the labels are equal")


if __name__ == "__main__":
    main(OPTIONS)
