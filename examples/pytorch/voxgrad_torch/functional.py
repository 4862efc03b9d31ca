"""Functions with the arguments and the meaning of torch.nn.functional."""

import functools
import math

import torch

from . import ops

_ACTIVATIONS = {
    torch.nn.ReLU: lambda m: (ops.RELU, 0.0),
    torch.nn.LeakyReLU: lambda m: (ops.LEAKY_RELU, float(m.negative_slope)),
    torch.nn.GELU: lambda m: (ops.GELU, 0.0),
    torch.nn.SiLU: lambda m: (ops.SILU, 0.0),
}
_NO_ACTIVATION = (ops.NONE, 0.0)


def _values(name, value, axes):
    values = (value,) * axes if isinstance(value, int) else tuple(value)
    if len(values) == 1:
        values *= axes
    if len(values) != axes:
        raise RuntimeError(f"voxgrad_torch: {name} must be an integer or have {axes} values, got {value}")
    return values


def _triple(values, fill):
    return (fill,) * (3 - len(values)) + values


def _volume(x, axes):
    """Returns x (N, C, spatial...) as (N, C, D, H, W)."""
    return x if axes == 3 else x.unsqueeze(2)


def _cast(device, *tensors):
    """Converts the operands to the dtype of autocast."""
    dtype = torch.get_autocast_dtype(device)
    return tuple(t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in tensors)


def _prepare(op, x, weight, bias, axes, stride, padding, dilation, groups, output_padding):
    """Checks a convolution of shapes. Returns the spatial size of the result and the geometry for ops.conv."""
    transposed = output_padding is not None

    def fail(text):
        raise RuntimeError(f"voxgrad_torch.{op}: {text} (input {list(x)}, weight {list(weight)}, groups {groups}, stride "
                           f"{stride}, padding {padding}, dilation {dilation}, output_padding {output_padding})")

    if len(x) not in (axes + 1, axes + 2) or len(weight) != axes + 2:
        fail(f"expected an input of {axes + 2} axes, or {axes + 1} without a batch, and a weight of {axes + 2} axes")
    channels = x[-axes - 1]
    expected = weight[0] if transposed else weight[1] * groups
    if groups < 1 or channels != expected:
        fail(f"weight expects {expected} input channels, input has {channels}")
    if weight[0] % groups:
        fail("groups does not divide the channels")
    outputs = weight[1] * groups if transposed else weight[0]
    if bias is not None and tuple(bias) != (outputs,):
        fail(f"bias must have shape [{outputs}], got {list(bias)}")
    stride, padding = _values("stride", stride, axes), _values("padding", padding, axes)
    dilation = _values("dilation", dilation, axes)
    if min(stride) < 1 or min(dilation) < 1 or min(padding) < 0:
        fail("stride, dilation or padding is out of range")
    size = []
    for i in range(axes):
        reach, length = dilation[i] * (weight[i + 2] - 1) + 1, x[i - axes]
        if transposed:
            extra = _values("output_padding", output_padding, axes)[i]
            if not 0 <= extra < max(stride[i], dilation[i]):
                fail("output_padding must be smaller than stride or dilation")
            size.append((length - 1) * stride[i] - 2 * padding[i] + reach + extra)
        else:
            size.append((length + 2 * padding[i] - reach) // stride[i] + 1)
        if size[i] < 1:
            fail(f"the result would have {size[i]} elements along spatial axis {i}")
    return (_triple(tuple(size), 1), _triple(stride, 1), _triple(padding, 0), _triple(dilation, 1), groups, transposed)


_prepare_cached = functools.lru_cache(4096)(_prepare)


def _run(op, x, weight, bias, axes, stride, padding, dilation, groups, output_padding=None, record_bias=True):
    if not x.is_meta and torch.is_autocast_enabled(x.device.type):
        x, weight, bias = _cast(x.device.type, x, weight, bias)
    for name, t in (("weight", weight), ("bias", bias)):
        if t is not None and (t.dtype != x.dtype or t.device != x.device):
            raise RuntimeError(f"voxgrad_torch.{op}: {name} is {t.dtype} on {t.device}, input is {x.dtype} on "
                               f"{x.device}")
    arguments = (op, x.shape, weight.shape, None if bias is None else bias.shape, axes, _hashable(stride),
                 _hashable(padding), _hashable(dilation), groups, _hashable(output_padding))
    is_traced = torch.compiler.is_compiling() or not ops.is_plain(x)
    prepared = _prepare(*arguments) if is_traced else _prepare_cached(*arguments)
    if bias is not None and not record_bias:
        bias = bias.detach()
    if axes == 3 and x.dim() == 5:
        return ops.conv(x, weight, bias, *prepared)
    batched = x.dim() == axes + 2
    if not batched:
        x = x.unsqueeze(0)
    y = ops.conv(_volume(x, axes), _volume(weight, axes), bias, *prepared)
    if axes == 2:
        y = y.squeeze(2)
    return y if batched else y.squeeze(0)


def _hashable(value):
    return tuple(value) if type(value) is list else value


def conv3d(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
    """Computes torch.nn.functional.conv3d. `padding` is a number or three numbers."""
    return _run("conv3d", input, weight, bias, 3, stride, padding, dilation, groups)


def conv2d(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
    """Computes torch.nn.functional.conv2d. `padding` is a number or two numbers."""
    return _run("conv2d", input, weight, bias, 2, stride, padding, dilation, groups)


def conv_transpose3d(input, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1):
    """Computes torch.nn.functional.conv_transpose3d."""
    return _run("conv_transpose3d", input, weight, bias, 3, stride, padding, dilation, groups, output_padding)


def conv_transpose2d(input, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1):
    """Computes torch.nn.functional.conv_transpose2d."""
    return _run("conv_transpose2d", input, weight, bias, 2, stride, padding, dilation, groups, output_padding)


def _norm(op, x, groups, weight, bias, eps, before=_NO_ACTIVATION, after=_NO_ACTIVATION, added=None):
    if x.dim() < 2 or groups < 1 or x.shape[1] == 0 or x.shape[1] % groups:
        raise RuntimeError(f"voxgrad_torch.{op}: num_groups {groups} does not divide the channels of input "
                           f"{list(x.shape)}")
    for name, t in (("weight", weight), ("bias", bias)):
        if t is not None and (tuple(t.shape) != (x.shape[1],) or t.device != x.device or
                              t.dtype not in (x.dtype, torch.float32)):
            raise RuntimeError(f"voxgrad_torch.{op}: expected a {name} of shape [{x.shape[1]}], {x.dtype} or float32, "
                               f"on {x.device}, got {list(t.shape)}, {t.dtype}, on {t.device}")
    shape = x.shape
    if x.numel() == groups and shape[0] == 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {list(shape)}")
    if x.dim() != 5:
        x = x.unsqueeze(2) if x.dim() == 4 else x.reshape(shape[0], shape[1], 1, 1, math.prod(shape[2:]))
    y = ops.norm(x, weight, bias, added, groups, eps, *before, *after)
    return y.squeeze(2) if len(shape) == 4 else y.reshape(shape) if len(shape) != 5 else y


def group_norm(input, num_groups, weight=None, bias=None, eps=1e-5):
    """Computes torch.nn.functional.group_norm. Under autocast on a GPU, the result is float32, as in PyTorch."""
    if input.is_cuda and torch.is_autocast_enabled("cuda") and input.dtype in (torch.bfloat16, torch.float16):
        input = input.float()
    return _norm("group_norm", input, num_groups, weight, bias, eps)


def instance_norm(input, weight=None, bias=None, eps=1e-5):
    """Computes torch.nn.functional.instance_norm without running statistics."""
    if math.prod(input.shape[2:]) == 1:
        raise ValueError(f"Expected more than 1 spatial element when training, got input size {list(input.shape)}")
    return _norm("instance_norm", input, input.shape[1], weight, bias, eps)


def activation_of(module):
    """Returns the kind and slope of an activation module that can be fused, or None."""
    make = _ACTIVATIONS.get(type(module))
    if make is None or getattr(module, "approximate", "none") != "none":
        return None
    return make(module)


def conv_norm_activation(input, conv, norm, activation=None, activation_first=False):
    """Computes activation(norm(conv(input))), or norm(activation(conv(input))) if activation_first.

    conv, norm and activation are modules: Conv2d, Conv3d, ConvTranspose2d or ConvTranspose3d, GroupNorm or
    InstanceNorm, and ReLU, LeakyReLU, GELU, SiLU or None. The values and gradients are those of the separate modules up
    to rounding. The norm and the activation need one pass over memory, and only the result of the convolution is kept
    for the backward pass. Under autocast, the result has the dtype of autocast.
    """
    kind = _NO_ACTIVATION if activation is None else activation_of(activation)
    if kind is None:
        raise TypeError(f"voxgrad_torch.conv_norm_activation: cannot fuse {type(activation).__name__}")
    added = conv.bias
    y = conv._run(input, record_bias=False)
    groups = norm.num_groups if isinstance(norm, torch.nn.GroupNorm) else y.shape[1]
    before, after = (kind, _NO_ACTIVATION) if activation_first else (_NO_ACTIVATION, kind)
    return _norm("conv_norm_activation", y, groups, norm.weight, norm.bias, norm.eps, before, after, added)
