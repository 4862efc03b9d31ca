"""Writes pytorch_reference.inc: results and gradients of PyTorch functions.

    python3 pytorch_reference.py > pytorch_reference.inc

Element i of each float64 input is 2 cos(0.23 i). The projection of a tensor r is the sum of r[i] cos(0.11 i). The file
contains the shape of each result, the projection p of the result, and the projection of the gradient of p with respect
to the input. pytorch_test.cpp computes the same numbers with voxgrad and compares them.
"""
import argparse

argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()

# Imported after the parsing, because --help must work without these packages.
import torch
import torch.nn.functional as F


def pattern(shape, step):
    """Returns a tensor whose element i is cos(step * i)."""
    count = torch.Size(shape).numel()
    return torch.cos(torch.arange(count, dtype=torch.float64) * step).reshape(shape)


def projection(values):
    return (values.flatten() * pattern((values.numel(),), 0.11)).sum()


def rounded(x):
    """Rounds x to whole numbers. The derivative is 1, as for the identity."""
    return x.round().detach() + (x - x.detach())


VOLUME = (2, 4, 5, 6, 7)
IMAGE = (2, 4, 5, 6)
SIGNAL = (2, 4, 7)
GRID = (3, 4, 5)


def grid_of(x):
    return pattern((2, 3, 2, 4, 3), 0.17) * 1.9


unit = pattern(GRID, 0.31) * 0.5 + 0.5
classes = torch.arange(15).reshape(3, 5) % 4
weight = pattern((4,), 0.7)

FUNCTIONS = {
    "nearest_size": (VOLUME, lambda x: F.interpolate(x, size=(7, 3, 10))),
    "nearest_scale": (VOLUME, lambda x: F.interpolate(x, scale_factor=1.7)),
    "trilinear_size": (VOLUME, lambda x: F.interpolate(x, size=(7, 3, 10), mode="trilinear")),
    "trilinear_scale": (VOLUME, lambda x: F.interpolate(x, scale_factor=1.7, mode="trilinear")),
    "nearest_scales": (VOLUME, lambda x: F.interpolate(x, scale_factor=(2, 1, 1.7))),
    "trilinear_scales": (VOLUME, lambda x: F.interpolate(x, scale_factor=(1, 2.5, 1.3), mode="trilinear")),
    "trilinear_same_size": (VOLUME, lambda x: F.interpolate(x, scale_factor=1.1, mode="trilinear")),
    "trilinear_aligned": (VOLUME, lambda x: F.interpolate(x, size=(7, 1, 10), mode="trilinear", align_corners=True)),
    "nearest_exact_size": (VOLUME, lambda x: F.interpolate(x, size=(7, 3, 10), mode="nearest-exact")),
    "nearest_exact_scale": (VOLUME, lambda x: F.interpolate(x, scale_factor=1.7, mode="nearest-exact")),
    "linear": (SIGNAL, lambda x: F.interpolate(x, size=11, mode="linear")),
    "bilinear": (IMAGE, lambda x: F.interpolate(x, scale_factor=(1.7, 0.6), mode="bilinear")),
    "bicubic_size": (IMAGE, lambda x: F.interpolate(x, size=(7, 3), mode="bicubic")),
    "bicubic_scale": (IMAGE, lambda x: F.interpolate(x, scale_factor=(1.1, 2.3), mode="bicubic")),
    "bicubic_aligned": (IMAGE, lambda x: F.interpolate(x, size=(9, 4), mode="bicubic", align_corners=True)),
    "max_pool2d": (IMAGE, lambda x: F.max_pool2d(x, 3, 2, 1)),
    "avg_pool1d": (SIGNAL, lambda x: F.avg_pool1d(x, 3, 2, 1, True)),
    "adaptive_avg": (VOLUME, lambda x: F.adaptive_avg_pool3d(x, (3, 4, 9))),
    "adaptive_max": (VOLUME, lambda x: F.adaptive_max_pool3d(x, (3, 4, 9))),
    "pad_reflect": (VOLUME, lambda x: F.pad(x, (3, 1, 0, 2, 4, 1), mode="reflect")),
    "pad_replicate": (VOLUME, lambda x: F.pad(x, (3, 1, 0, 2, 9, 1), mode="replicate")),
    "pad_circular": (VOLUME, lambda x: F.pad(x, (3, 1, 0, 2, 5, 1), mode="circular")),
    "pixel_shuffle": (IMAGE, lambda x: F.pixel_shuffle(x, 2)),
    **{f"grid_sample_{padding}{'_aligned' if aligned else ''}_{mode}": (
        VOLUME, lambda x, p=padding, a=aligned, m=mode: F.grid_sample(x, grid_of(x), m, p, a))
       for padding in ("zeros", "border", "reflection") for aligned in (False, True) for mode in ("bilinear", "nearest")},
    **{f"grid_of_{padding}{'_aligned' if aligned else ''}": (
        (2, 3, 2, 4, 3), lambda g, p=padding, a=aligned: F.grid_sample(pattern(VOLUME, 0.3), g * 0.8, "bilinear", p, a))
       for padding in ("zeros", "border", "reflection") for aligned in (False, True)},
    "affine_grid": ((2, 3, 4), lambda x: F.affine_grid(x, (2, 3, 3, 1, 4), False)),
    "affine_grid_aligned": ((2, 2, 3), lambda x: F.affine_grid(x, (2, 3, 3, 4), True)),
    "max_pool": (VOLUME, lambda x: F.max_pool3d(x, (3, 2, 2), (2, 1, 3), (1, 0, 1), (1, 2, 1), True)),
    "avg_pool": (VOLUME, lambda x: F.avg_pool3d(x, (3, 2, 2), (2, 3, 3), (1, 0, 1), True)),
    "avg_pool_inside": (VOLUME, lambda x: F.avg_pool3d(x, (3, 2, 2), (2, 3, 3), (1, 0, 1), True, False)),
    "avg_pool_divisor": (VOLUME, lambda x: F.avg_pool3d(x, (3, 2, 2), (2, 3, 3), (1, 0, 1), True, True, 5)),
    "group_norm": (VOLUME, lambda x: F.group_norm(x, 2, weight, weight * 0.3, 1e-3)),
    "layer_norm": (GRID, lambda x: F.layer_norm(x, (4, 5))),
    "softmax": (GRID, lambda x: F.softmax(x, 1)),
    "log_softmax": (GRID, lambda x: F.log_softmax(x, -1)),
    "mse_loss": (GRID, lambda x: F.mse_loss(x, unit)),
    "l1_loss": (GRID, lambda x: F.l1_loss(x, unit, reduction="sum")),
    "smooth_l1_loss": (GRID, lambda x: F.smooth_l1_loss(x, unit, beta=0.6)),
    "bce_with_logits": (GRID, lambda x: F.binary_cross_entropy_with_logits(x * 40, unit, reduction="none")),
    "cross_entropy": (GRID, lambda x: F.cross_entropy(x, classes)),
    "cross_entropy_options": (GRID, lambda x: F.cross_entropy(x, classes, unit[0, :, 0], ignore_index=2, label_smoothing=0.2)),
    "cross_entropy_none": (GRID, lambda x: F.cross_entropy(x, classes, unit[0, :, 0], ignore_index=2, label_smoothing=0.2,
                                                           reduction="none")),
    "cross_entropy_soft": (GRID, lambda x: F.cross_entropy(x, unit, unit[0, :, 0], label_smoothing=0.2)),
    "nll_loss": (GRID, lambda x: F.nll_loss(x, classes, unit[0, :, 0], ignore_index=1)),
    "kl_div": (GRID, lambda x: F.kl_div(x, unit, reduction="batchmean")),
    "kl_div_log_target": (GRID, lambda x: F.kl_div(x, unit, log_target=True)),
    "batch_norm": (VOLUME, lambda x: F.batch_norm(x, None, None, weight, weight * 0.3, True, eps=1e-3)),
    "batch_norm_eval": (VOLUME, lambda x: F.batch_norm(x, weight, weight + 1, weight, weight * 0.3)),
    "var": (GRID, lambda x: x.var((0, 2), unbiased=True)),
    "std": (GRID, lambda x: x.std((0, 2))),
    "prod": (GRID, lambda x: (x * (x > -1.5)).prod(1)),
    "logsumexp": (GRID, lambda x: x.logsumexp((0, 2))),
    "cumsum": (GRID, lambda x: x.cumsum(1)),
    "norm_1": (GRID, lambda x: (x * (x > 0)).norm(1, (0, 2))),
    "norm_2": (GRID, lambda x: (x * (x > 1.5)).norm(2, 1)),
    "norm_3": (GRID, lambda x: (x * (x > 1.5)).norm(3, 1)),
    "norm_half": (GRID, lambda x: (x * (x > 0)).norm(0.5, (1, 2), True)),
    "norm_inf": (GRID, lambda x: (x * (x > 1.5)).norm(float("inf"), 1)),
    "max": (GRID, lambda x: rounded(x).max(1).values),
    "max_indices": (GRID, lambda x: rounded(x).max(1).indices + 0 * x.sum()),
    "argmin": (GRID, lambda x: rounded(x).argmin() + 0 * x.sum()),
    "sort": (GRID, lambda x: rounded(x).sort(dim=1, descending=True, stable=True).values),
    "topk": (GRID, lambda x: x.topk(3, 0, largest=False).values),
    "prelu": (GRID, lambda x: F.prelu(x.reshape(3, 4, 5), weight)),
}

print("// Written by pytorch_reference.py; do not edit. clang-format off")
print("const std::map<std::string, Known> kKnown = {")
for name, (shape, function) in FUNCTIONS.items():
    x = (2 * pattern(shape, 0.23)).requires_grad_()
    y = function(x)
    value = projection(y)
    (gradient,) = torch.autograd.grad(value, x)
    sizes = ", ".join(str(v) for v in y.shape)
    print(f'    {{"{name}", {{{{{sizes}}}, {value.item()!r}, {projection(gradient).item()!r}}}}},')
print("};")
