#!/usr/bin/env python3
"""Times nnU-Net's network with and without replace_modules() on a GPU.

    nnunet_step.py [--network plain|residual] [--size 128] [--batch 2] [--steps 20] [--compile] [--layouts ...]

The network is nnU-Net's PlainConvUNet or ResidualEncoderUNet (dynamic-network-architectures from PyPI) with six stages,
3 classes and deep supervision, under autocast to bfloat16. A training step is a forward pass, cross entropy and Dice
loss, a backward pass and a step of SGD with Nesterov momentum. Prints a Markdown table with a row for each combination
of modules, mode and layout. The combinations run one after another in this process. For each mode, also prints the
ratio of the best times of torch.nn and voxgrad_torch. The columns are:

  modules    torch.nn, or voxgrad_torch after replace_modules()
  mode       eager, or compiled with torch.compile
  layout     memory format of the input and the weights
  step, inference  median times in ms; inference is a forward pass without gradients
  memory     peak of the memory that PyTorch allocated in a step, in GB
  loss       the loss of the first and of the tenth step. All combinations start with the same weights and batch.
"""

import argparse
import statistics


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="plain", choices=["plain", "residual"],
                        help="PlainConvUNet or ResidualEncoderUNet (default: plain)")
    parser.add_argument("--size", type=int, default=128, help="voxels along each axis")
    parser.add_argument("--batch", type=int, default=2, help="samples of the input")
    parser.add_argument("--steps", type=int, default=20, help="timed steps")
    parser.add_argument("--compile", action="store_true", help="also measure with torch.compile")
    parser.add_argument("--layouts", nargs="*", default=["contiguous", "channels_last"],
                        help="memory formats of the input and the weights (default: contiguous channels_last)")
    return parser.parse_args()


if __name__ == "__main__":
    OPTIONS = parse()  # before the imports of other packages, because --help must work without them

import torch
from dynamic_network_architectures.architectures.unet import PlainConvUNet, ResidualEncoderUNet

import voxgrad_torch


def make_network(kind):
    torch.manual_seed(0)
    common = dict(
        input_channels=1, n_stages=6, features_per_stage=[32, 64, 128, 256, 320, 320], conv_op=torch.nn.Conv3d,
        kernel_sizes=3, strides=[1, 2, 2, 2, 2, 2], num_classes=3, conv_bias=True, norm_op=torch.nn.InstanceNorm3d,
        norm_op_kwargs={"eps": 1e-5, "affine": True}, nonlin=torch.nn.LeakyReLU, nonlin_kwargs={"inplace": True},
        deep_supervision=True)
    if kind == "plain":
        return PlainConvUNet(n_conv_per_stage=2, n_conv_per_stage_decoder=2, **common)
    return ResidualEncoderUNet(n_blocks_per_stage=[1, 3, 4, 6, 6, 6], n_conv_per_stage_decoder=1, **common)


def loss_of(outputs, target):
    """Returns the cross entropy plus the Dice loss, averaged over the resolutions with the weights 1, 1/2, 1/4, ..."""
    total, weights = 0.0, [0.5**i for i in range(len(outputs))]
    for weight, logits in zip(weights, outputs):
        step = target.shape[-1] // logits.shape[-1]
        classes = target[:, ::step, ::step, ::step]
        logits = logits.float()
        p = torch.softmax(logits, 1)
        t = torch.nn.functional.one_hot(classes, logits.shape[1]).movedim(-1, 1).float()
        dice = (2 * (p * t).sum((0, 2, 3, 4)) + 1e-5) / ((p + t).sum((0, 2, 3, 4)) + 1e-5)
        total = total + weight * (torch.nn.functional.cross_entropy(logits, classes) - dice[1:].mean())
    return total / sum(weights)


def median_ms(function, steps):
    times = []
    for _ in range(steps):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def measure(options, layout, replace, compiled):
    torch._dynamo.reset()
    torch.cuda.empty_cache()
    form = torch.channels_last_3d if layout == "channels_last" else torch.contiguous_format
    network = make_network(options.network).cuda().to(memory_format=form)
    if replace:
        voxgrad_torch.replace_modules(network)
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-2, momentum=0.99, nesterov=True)
    torch.manual_seed(1)
    shape = (options.batch, 1, *[options.size] * 3)
    x = torch.randn(shape, device="cuda").to(memory_format=form)
    target = torch.randint(0, 3, (options.batch, *shape[2:]), device="cuda")
    run = torch.compile(network) if compiled else network
    losses = []

    def step():
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            outputs = run(x)
        loss = loss_of(outputs, target)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())

    def infer():
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            run(x)

    for _ in range(10):
        step()
    torch.cuda.reset_peak_memory_stats()
    training = median_ms(step, options.steps)
    memory = torch.cuda.max_memory_allocated() / 1e9
    network.decoder.deep_supervision = False
    for _ in range(3):
        infer()
    return training, median_ms(infer, options.steps), memory, losses[0].item(), losses[9].item()


def main(options):
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, voxgrad {voxgrad_torch.__version__}\n")
    print("| modules | mode | layout | step ms | inference ms | memory GB | first loss | tenth loss |")
    print("|" + "---|" * 8, flush=True)
    best = {}
    for compiled in (False, True) if options.compile else (False,):
        for layout in options.layouts:
            for replace in (False, True):
                name = "voxgrad_torch" if replace else "torch.nn"
                mode = "compiled" if compiled else "eager"
                training, inference, memory, first, tenth = measure(options, layout, replace, compiled)
                print(f"| {name} | {mode} | {layout} | {training:.1f} | {inference:.1f} | {memory:.2f} | {first:.4f} | "
                      f"{tenth:.4f} |", flush=True)
                key = (mode, name)
                best[key] = tuple(map(min, best.get(key, (training, inference)), (training, inference)))
    for mode in ("eager", "compiled"):
        if (mode, "torch.nn") in best:
            ratios = [a / b for a, b in zip(best[mode, "torch.nn"], best[mode, "voxgrad_torch"])]
            print(f"\n{mode}, each with its best layout: time of torch.nn / time of voxgrad_torch is {ratios[0]:.2f} "
                  f"for a step, {ratios[1]:.2f} for inference")


if __name__ == "__main__":
    main(OPTIONS)
