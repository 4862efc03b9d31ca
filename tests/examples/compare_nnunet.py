#!/usr/bin/env python3
"""Checks that nnU-Net and `predict` compute the same labels with a model that `segment` trained.

    python3 tests/examples/compare_nnunet.py build/release/examples

Needs nnunetv2. For a plain and a residual network, the script trains on three synthetic volumes, converts the
checkpoint with examples/segment/to_nnunet.py, and predicts a volume with both programs. The tests in predict_test.cpp
cover the other direction: `predict` with models that nnU-Net trained.
"""
import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

FOLDER = pathlib.Path(__file__).resolve().parent.parent.parent
LIMIT = 0.9999  # smallest fraction of equal labels


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", type=pathlib.Path, help="folder of the programs segment and predict")
    return parser.parse_args()


if __name__ == "__main__":
    OPTIONS = parse()  # before the imports of other packages, because --help must work without them

import numpy as np
import SimpleITK as sitk


def run(*command):
    subprocess.run([str(part) for part in command], check=True)


def make_dataset(folder):
    """Writes three noisy volumes with a bright ball each, in nnU-Net's folder layout."""
    random = np.random.default_rng(0)
    for part in ("imagesTr", "labelsTr"):
        (folder / part).mkdir(parents=True)
    for name in "abc":
        grid = np.stack(np.meshgrid(*(np.arange(n) for n in (40, 36, 44)), indexing="ij"), -1)
        label = (((grid - random.integers(12, 24, 3))**2).sum(-1) < 80).astype(np.uint8)
        for part, data in (("imagesTr", (1 + label + random.normal(0, 0.4, label.shape)).astype(np.float32)),
                           ("labelsTr", label)):
            image = sitk.GetImageFromArray(data)
            image.SetSpacing((1.1, 0.9, 1.0))
            sitk.WriteImage(image, str(folder / part / f"{name}{'_0000' * (part == 'imagesTr')}.nii.gz"))
    (folder / "dataset.json").write_text(json.dumps({
        "channel_names": {"0": "MRI"}, "labels": {"background": 0, "ball": 1}, "numTraining": 3,
        "file_ending": ".nii.gz"}))


def main(options):
    programs = options.programs.resolve()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        for variable in ("nnUNet_raw", "nnUNet_preprocessed", "nnUNet_results"):
            os.environ[variable] = name  # nnU-Net prints a warning for each variable that is not set
        make_dataset(folder / "balls")
        (folder / "input").mkdir()
        (folder / "input/a_0000.nii.gz").write_bytes((folder / "balls/imagesTr/a_0000.nii.gz").read_bytes())
        for network in ([], ["--network", "resenc-m"]):
            out = folder / f"out-{'-'.join(network)}"
            run(programs / "segment", "--dataset", folder / "balls", "--device", "cpu", "--steps", 40, "--patch", 24,
                "--channels", 4, "--spacing", 1, "--out", out, *network)
            run(sys.executable, FOLDER / "examples/segment/to_nnunet.py", out / "model")
            run(programs / "predict", out / "model", folder / "input", out / "voxgrad")
            run("nnUNetv2_predict_from_modelfolder", "-i", folder / "input", "-o", out / "nnunet", "-m", out / "model",
                "-f", 0, "-device", "cpu", "-npp", 1, "-nps", 1)
            a, b = (sitk.GetArrayFromImage(sitk.ReadImage(str(out / side / "a.nii.gz"))) for side in
                    ("voxgrad", "nnunet"))
            equal = (a == b).mean()
            print(f"{' '.join(network) or 'plain'}: {equal:.6f} of the labels are equal, {a.sum()} voxels of the ball")
            assert equal >= LIMIT and a.sum() > 100


if __name__ == "__main__":
    main(OPTIONS)
