"""Writes the reference data of nnU-Net for unet_test.cpp and plan_test.cpp:

    python3 nnunet_models.py

The script needs PyTorch, safetensors, dynamic-network-architectures and nnunetv2 (install the last two with
pip install --no-deps).

nnunet_models.safetensors holds data of a small PlainConvUNet ("plain.*") and a small ResidualEncoderUNet
("residual.*"). The weights are "plain.model.*". The other tensors are an input, a label map, the logits of all levels
("plain.logits.0" has the full resolution), nnU-Net's loss with deep supervision for two and for three levels, and the
gradient of the loss for three levels with respect to the input.
nnunet_plans.inc is a table of the stages that nnU-Net plans for a patch size and a voxel spacing.
"""
import argparse
import pathlib
import random
import re

argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()

# Imported after the parsing, because --help must work without these packages.
import numpy as np
import torch
from dynamic_network_architectures.architectures.unet import PlainConvUNet, ResidualEncoderUNet
from nnunetv2.experiment_planning.experiment_planners.network_topology import get_pool_and_conv_props
from nnunetv2.training.loss.compound_losses import DC_and_CE_loss
from nnunetv2.training.loss.deep_supervision import DeepSupervisionWrapper
from nnunetv2.training.loss.dice import MemoryEfficientSoftDiceLoss
from safetensors.torch import save_file
from torch import nn

FOLDER = pathlib.Path(__file__).parent
COMMON = dict(n_stages=3, features_per_stage=[4, 6, 8], conv_op=nn.Conv3d, kernel_sizes=[[1, 3, 3], [3, 3, 3], [3, 3, 3]],
              strides=[[1, 1, 1], [1, 2, 2], [2, 2, 2]], num_classes=3, conv_bias=True, norm_op=nn.InstanceNorm3d,
              norm_op_kwargs={"eps": 1e-5, "affine": True}, nonlin=nn.LeakyReLU, nonlin_kwargs={"inplace": True},
              deep_supervision=True)
MODELS = {
    "plain": lambda: PlainConvUNet(2, n_conv_per_stage=[2, 1, 2], n_conv_per_stage_decoder=[2, 1], **COMMON),
    "residual": lambda: ResidualEncoderUNet(2, n_blocks_per_stage=[1, 2, 2], n_conv_per_stage_decoder=[1, 1], **COMMON),
}


def unique(state):
    """Returns the tensors of a state_dict under the names that nn::UNet uses. Each tensor appears once."""
    duplicate = re.compile(r"decoder\.encoder\.|.*\.all_modules\.")
    return {name: tensor.contiguous().clone() for name, tensor in state.items() if not duplicate.match(name)}


def reference(make):
    model = make()
    model.initialize(model)
    for parameter in model.parameters():  # norms and biases start as ones and zeros, which would hide errors
        if parameter.dim() == 1:
            nn.init.normal_(parameter, 0.5)
    x = torch.randn(2, 2, 4, 8, 12, requires_grad=True)
    target = torch.randint(0, 3, (2, 1, 4, 8, 12)).float()
    logits = model(x)
    # nnUNetTrainer and DownsampleSegForDSTransform compute the loss and the targets in this way.
    loss = DeepSupervisionWrapper(
        DC_and_CE_loss({"batch_dice": True, "smooth": 1e-5, "do_bg": False, "ddp": False}, {},
                       dice_class=MemoryEfficientSoftDiceLoss), np.array([1.0, 0.0]))
    scaled = DeepSupervisionWrapper(loss.loss, np.array([4, 2, 0]) / 6)
    sizes = [tuple(l.shape[2:]) for l in logits]
    targets = [nn.functional.interpolate(target, size, mode="nearest-exact") for size in sizes]
    third = nn.functional.interpolate(target, (2, 4, 6), mode="nearest-exact")
    extra = nn.functional.avg_pool3d(logits[0], 2)  # the last level has weight 0, so a third level is added
    value = scaled([*logits, extra], [*targets, third])
    value.backward()
    results = {"input": x, "target": target[:, 0].to(torch.uint8), "loss": value, "grad": x.grad,
               "single_loss": loss(logits, targets)}
    return (results | {f"logits.{i}": l for i, l in enumerate(logits)} |
            {f"model.{name}": weight for name, weight in unique(model.state_dict()).items()})


def plan_rows():
    random.seed(1)
    cases = [((128, 128, 128), (1, 1, 1)), ((64, 192, 160), (2.5, 0.8, 0.8)), ((20, 320, 256), (5, 0.5, 0.5)),
             ((28, 256, 256), (3.3, 0.31, 0.31)), ((8, 8, 8), (1, 1, 1)), ((48, 224, 224), (2, 1, 1)),
             ((12, 11, 8), (1, 1, 1.999)), ((7, 11, 7), (1, 1, 1)), ((7, 12, 7), (1, 1, 1)), ((100, 17, 31), (0.7, 3, 0.9)),
             ((5, 64, 64), (50, 1, 1)), ((64, 64, 64), (1, 1, 100))]
    cases += [(tuple(random.randint(8, 300) for _ in range(3)),
               tuple(round(random.choice([0.5, 1, 2, 5]) * random.uniform(0.6, 1.7), 3) for _ in range(3)))
              for _ in range(30)]
    for patch, spacing in cases:
        _, strides, kernels, padded, _ = get_pool_and_conv_props(spacing, patch, 4, 999999)
        lists = [", ".join("{" + ", ".join(str(int(v)) for v in row) + "}" for row in rows) for rows in (kernels, strides)]
        yield (f"    {{{{{', '.join(map(str, patch))}}}, {{{', '.join(map(str, spacing))}}}, {{{lists[0]}}}, {{{lists[1]}}}, "
               f"{{{', '.join(str(int(v)) for v in padded)}}}}},")


torch.manual_seed(0)
tensors = {}
for kind, make in MODELS.items():
    tensors |= {f"{kind}.{name}": value.detach().contiguous() for name, value in reference(make).items()}
save_file(tensors, FOLDER / "nnunet_models.safetensors", {"format": "pt"})
(FOLDER / "../examples/nnunet_plans.inc").write_text(
    "// Written by nnunet_models.py; do not edit. clang-format off\n"
    "// Patch size, spacing, kernel sizes, strides, padded patch size.\n"
    "const PlanReference kPlanReference[] = {\n" + "\n".join(plan_rows()) + "\n};\n")
