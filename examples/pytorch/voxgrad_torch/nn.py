"""Modules with the constructors, parameters, initial values and state_dict keys of torch.nn."""

import torch
from torch.nn.functional import pad

from . import functional


class _Conv:
    """A mixin that computes torch.nn.Conv2d and Conv3d with voxgrad's kernels."""

    def _run(self, input, weight=None, bias=None, record_bias=True):
        weight, bias = (self.weight, self.bias) if weight is None else (weight, bias)
        axes = weight.dim() - 2
        padding = self.padding
        if self.padding_mode != "zeros" or padding == "same":
            around = self._reversed_padding_repeated_twice
            symmetric = around[0::2] == around[1::2]
            if self.padding_mode == "zeros" and symmetric:
                padding = tuple(reversed(around[0::2]))
            else:
                mode = "constant" if self.padding_mode == "zeros" else self.padding_mode
                input, padding = pad(input, around, mode=mode), 0
        elif padding == "valid":
            padding = 0
        return functional._run(f"conv{axes}d", input, weight, bias, axes, self.stride, padding, self.dilation,
                               self.groups, None, record_bias)

    def _conv_forward(self, input, weight, bias):
        return self._run(input, weight, bias)


class Conv2d(_Conv, torch.nn.Conv2d):
    """torch.nn.Conv2d on voxgrad's kernels."""


class Conv3d(_Conv, torch.nn.Conv3d):
    """torch.nn.Conv3d on voxgrad's kernels."""


class _ConvTranspose:
    """A mixin that computes torch.nn.ConvTranspose2d and ConvTranspose3d with voxgrad's kernels."""

    def _run(self, input, output_size=None, record_bias=True):
        axes = self.weight.dim() - 2
        output_padding = self._output_padding(input, output_size, self.stride, self.padding, self.kernel_size, axes,
                                              self.dilation)
        return functional._run(f"conv_transpose{axes}d", input, self.weight, self.bias, axes, self.stride,
                               self.padding, self.dilation, self.groups, tuple(output_padding), record_bias)

    def forward(self, input, output_size=None):
        return self._run(input, output_size)


class ConvTranspose2d(_ConvTranspose, torch.nn.ConvTranspose2d):
    """torch.nn.ConvTranspose2d on voxgrad's kernels."""


class ConvTranspose3d(_ConvTranspose, torch.nn.ConvTranspose3d):
    """torch.nn.ConvTranspose3d on voxgrad's kernels."""


class GroupNorm(torch.nn.GroupNorm):
    """torch.nn.GroupNorm on voxgrad's kernels."""

    def forward(self, input):
        return functional.group_norm(input, self.num_groups, self.weight, self.bias, self.eps)


class _InstanceNorm:
    """A mixin that computes torch.nn.InstanceNorm2d and InstanceNorm3d with voxgrad's kernels.

    With running statistics, PyTorch computes the result.
    """

    def _apply_instance_norm(self, input):
        if self.track_running_stats or self.running_mean is not None:
            return super()._apply_instance_norm(input)
        return functional.instance_norm(input, self.weight, self.bias, self.eps)


class InstanceNorm2d(_InstanceNorm, torch.nn.InstanceNorm2d):
    """torch.nn.InstanceNorm2d on voxgrad's kernels."""


class InstanceNorm3d(_InstanceNorm, torch.nn.InstanceNorm3d):
    """torch.nn.InstanceNorm3d on voxgrad's kernels."""


_CONVS = (Conv2d, Conv3d, ConvTranspose2d, ConvTranspose3d)


def _has_hooks(module):
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or
                module._backward_pre_hooks)


def _is_norm(module):
    return isinstance(module, GroupNorm) or (isinstance(module, (InstanceNorm2d, InstanceNorm3d)) and
                                             not module.track_running_stats)


def _fusible(modules):
    """Finds the longest sequence at the start of `modules` that can be fused.

    Returns (number of modules, norm, activation, activation_first), or None if no sequence can be fused. `activation`
    is None if the sequence has no activation. `activation_first` is true if the activation precedes the norm.
    """
    if not isinstance(modules[0], _CONVS) or any(map(_has_hooks, modules[:2])):
        return None
    after = modules[1:3]
    if after and _is_norm(after[0]):
        follows = len(after) > 1 and not _has_hooks(after[1]) and functional.activation_of(after[1]) is not None
        return (3, after[0], after[1], False) if follows else (2, after[0], None, False)
    if len(after) == 2 and functional.activation_of(after[0]) is not None and _is_norm(after[1]):
        return None if _has_hooks(after[1]) else (3, after[1], after[0], True)
    return None


class Sequential(torch.nn.Sequential):
    """torch.nn.Sequential that computes a convolution, a norm and an activation as one operation.

    Fuses Conv -> Norm, Conv -> Norm -> Activation and Conv -> Activation -> Norm if the convolution and the norm are
    modules of voxgrad_torch and none of the modules has hooks.
    """

    def forward(self, input):
        modules = list(self)
        while modules:
            fused = _fusible(modules) if _batched(modules[0], input) else None
            if fused is None:
                input = modules.pop(0)(input)
                continue
            count, norm, activation, first = fused
            input = functional.conv_norm_activation(input, modules[0], norm, activation, first)
            modules = modules[count:]  # PyTorch 2.6 cannot compile del modules[:count]
        return input


def _batched(conv, input):
    return isinstance(conv, _CONVS) and isinstance(input, torch.Tensor) and input.dim() == conv.weight.dim()
