#!/usr/bin/env python3
"""Compares sliding-window inference of voxgrad with a plain PyTorch implementation of nnU-Net's scheme.

    bench/compare_sliding.py [PROGRAM] [--size 96] [--window 48] [--mirror 3] [--runs 5]
    bench/compare_sliding.py [PROGRAM] --size 512 --window 128 --device cuda --accumulate cuda --precision bf16 --monai

PROGRAM is the built sliding_window (default: build/release/bench/sliding_window). The model consists of two 3x3x3
convolutions with a ReLU between them: the first maps 1 channel to --channels, the second maps these to 4. With
--channels 0, the model is only a ReLU, so that extracting and blending windows takes most of the time. The volume is on
the CPU and the model on --device. The result is accumulated in float32 on --accumulate. Both implementations use the
same windows, parameters, blending weights and mirrored copies, and run alternately. Prints the median time of each
implementation, the ratio of these times, and the largest difference between the results. --monai also times MONAI's
sliding_window_inference with an overlap of 0.5 and Gaussian weights. MONAI does not mirror, so --monai excludes
--mirror.
"""

import argparse
import itertools
import os
import statistics
import subprocess
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", nargs="?", default=os.path.join(HERE, "..", "build", "release", "bench", "sliding_window"))
    parser.add_argument("--size", type=int, default=96, help="voxels along each side of the volume (default: 96)")
    parser.add_argument("--window", type=int, default=48, help="voxels along each side of a window (default: 48)")
    parser.add_argument("--channels", type=int, default=16, help="channels between the convolutions (default: 16)")
    parser.add_argument("--batch", type=int, default=1, help="windows per call of the model (default: 1)")
    parser.add_argument("--mirror", type=int, default=0, choices=range(4),
                        help="number of axes to mirror along (default: 0)")
    parser.add_argument("--runs", type=int, default=5, help="runs of each implementation (default: 5)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)),
                        help="CPU threads (default: all CPUs)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="device of the model (default: cpu)")
    parser.add_argument("--accumulate", choices=["cpu", "cuda"], default="cpu",
                        help="device of the result (default: cpu)")
    parser.add_argument("--precision", choices=["f32", "bf16"], default="f32",
                        help="f32, or bf16 (autocast) (default: f32)")
    parser.add_argument("--monai", action="store_true", help="also time MONAI's sliding_window_inference")
    o = parser.parse_args()
    if o.monai and o.mirror:
        parser.error("--monai excludes --mirror")
    if not os.path.isfile(o.program):
        parser.error(f"{o.program} does not exist; build the target sliding_window")
    return o


if __name__ == "__main__":
    OPTIONS = parse()  # before the imports of other packages, because --help must work without them

import numpy
import torch
from torch.nn import functional as F


def starts(size, window):
    """Returns the first voxels of the windows along an axis.

    Neighboring windows overlap by at least half a window, up to rounding.
    """
    last, step = size - window, window / 2
    count = int(numpy.ceil(last / step)) + 1
    return [round(last * i / max(1, count - 1)) for i in range(count)]


def weights(window):
    """Returns the Gaussian blending weights of a window."""
    line = torch.exp(-0.5 * ((torch.arange(window, dtype=torch.float64) - window // 2) / (window / 8)) ** 2)
    cube = line[:, None, None] * line[:, None] * line
    return cube.clamp_min(2.0**-24 / 10).float()


def predict(model, x, mirror):
    """Returns the mean prediction over all mirrored copies of x, mirrored along the first `mirror` axes."""
    total = model(x)
    for count in range(1, mirror + 1):
        for axes in itertools.combinations(range(2, 2 + mirror), count):
            total += torch.flip(model(torch.flip(x, axes)), axes)
    return total / 2**mirror


@torch.inference_mode()
def sliding_window(volume, model, window, batch, mirror, device, accumulate):
    _, _, *size = volume.shape
    positions = list(itertools.product(*(starts(n, window) for n in size)))
    cube = weights(window).to(accumulate)
    total, total_weights = None, torch.zeros(size, device=accumulate)
    for first in range(0, len(positions), batch):
        parts = [tuple(slice(b, b + window) for b in position) for position in positions[first : first + batch]]
        x = torch.cat([volume[(slice(None), slice(None)) + part] for part in parts]).to(device)
        y = predict(model, x, mirror).to(accumulate)
        if total is None:
            total = torch.zeros((1, y.shape[1], *size), device=accumulate)
        for prediction, part in zip(y, parts):
            total[(0, slice(None)) + part] += prediction * cube
            total_weights[part] += cube
    total /= total_weights
    if total.is_cuda:
        torch.cuda.synchronize()
    return total


def run_monai(volume, model, window, batch, device, accumulate):
    from monai.inferers import sliding_window_inference
    with torch.inference_mode():
        result = sliding_window_inference(volume, (window,) * 3, batch, model, overlap=0.5, mode="gaussian",
                                          sw_device=device, device=accumulate)
    if result.is_cuda:
        torch.cuda.synchronize()
    return result


def seconds_of(function, *arguments):
    """Returns the result of the second call, and its time. The first call is a warm-up."""
    function(*arguments)
    start = time.perf_counter()
    result = function(*arguments)
    return result, time.perf_counter() - start


def main(o):
    torch.set_num_threads(o.threads)
    torch.manual_seed(0)
    tensors = {"volume": torch.randn(1, 1, o.size, o.size, o.size), "first": torch.randn(o.channels, 1, 3, 3, 3) / 5,
               "second": torch.randn(4, o.channels, 3, 3, 3) / 5}

    first, second = tensors["first"].to(o.device), tensors["second"].to(o.device)

    def model(x):
        if o.channels == 0:
            return F.relu(x)
        with torch.autocast(o.device, torch.bfloat16, enabled=o.precision == "bf16"):
            return F.conv3d(F.relu(F.conv3d(x, first, padding=1)), second, padding=1)

    with tempfile.TemporaryDirectory() as folder:
        for name, tensor in tensors.items():
            numpy.save(os.path.join(folder, name + ".npy"), tensor.numpy())
        call = [o.program, folder, str(o.window), str(o.batch), str(o.mirror), "2", str(o.threads), o.device, o.accumulate,
                o.precision]
        voxgrad_seconds, torch_seconds, monai_seconds = [], [], []
        for _ in range(o.runs):
            voxgrad_seconds.append(float(subprocess.run(call, check=True, capture_output=True, text=True).stdout.split()[-1]))
            result, seconds = seconds_of(sliding_window, tensors["volume"], model, o.window, o.batch, o.mirror, o.device,
                                         o.accumulate)
            torch_seconds.append(seconds)
            if o.monai:
                _, seconds = seconds_of(run_monai, tensors["volume"], model, o.window, o.batch, o.device, o.accumulate)
                monai_seconds.append(seconds)
        voxgrad_result = numpy.load(os.path.join(folder, "result.npy"))
    difference = numpy.abs(voxgrad_result - result.cpu().numpy()).max()
    voxgrad, pytorch = statistics.median(voxgrad_seconds), statistics.median(torch_seconds)
    monai = f", MONAI {statistics.median(monai_seconds) * 1e3:.0f} ms" if o.monai else ""
    print(f"volume {o.size}^3, windows {o.window}^3, {o.channels} channels, batch {o.batch}, mirrored along {o.mirror} "
          f"axes, {o.precision} on {o.device}, accumulated on {o.accumulate}, {o.threads} threads: voxgrad "
          f"{voxgrad * 1e3:.0f} ms, PyTorch {torch.__version__} {pytorch * 1e3:.0f} ms, ratio {pytorch / voxgrad:.2f}{monai}; largest difference "
          f"{difference:.1e}, largest value {numpy.abs(voxgrad_result).max():.1f}")


if __name__ == "__main__":
    main(OPTIONS)
