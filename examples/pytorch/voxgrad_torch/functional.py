"""Functions with the arguments and the meaning of torch.nn.functional, and conv_norm_activation()."""

import math

import torch

from . import ops

_ACTIVATIONS = {
    torch.nn.ReLU: lambda m: (ops.RELU, 0.0),
    torch.nn.LeakyReLU: lambda m: (ops.LEAKY_RELU, float(m.negative_slope)),
    torch.nn.GELU: lambda m: (ops.GELU, 0.0) if m.approximate == "none" else None,
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


def _cast(device, *tensors):
    """Converts the operands, except float64 tensors, to the dtype of autocast."""
    dtype = torch.get_autocast_dtype(device)
    return tuple(t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in tensors)


def _prepare(op, x, weight, bias, axes, stride, padding, dilation, groups, output_padding):
    """Checks a convolution. Returns the spatial size of the result and the geometry for ops.conv."""
    transposed = output_padding is not None
    for name, t in (("weight", weight), ("bias", bias)):
        if t is not None and (t.dtype != x.dtype or t.device != x.device):
            raise RuntimeError(f"voxgrad_torch.{op}: {name} is {t.dtype} on {t.device}, input is {x.dtype} on "
                               f"{x.device}")
    x, weight, bias = x.shape, weight.shape, None if bias is None else bias.shape

    def fail(text):
        raise RuntimeError(f"voxgrad_torch.{op}: {text} (input {list(x)}, weight {list(weight)}, groups {groups}, "
                           f"stride {stride}, padding {padding}, dilation {dilation}, output_padding {output_padding})")

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


_plans = {}


def _run(op, x, weight, bias, axes, stride, padding, dilation, groups, output_padding=None, record_bias=True):
    if torch.is_autocast_enabled("cuda" if x.is_cuda else "cpu") and not x.is_meta:
        x, weight, bias = _cast(x.device.type, x, weight, bias)
    if not ops.is_plain(x, weight, bias):
        prepared = _prepare(op, x, weight, bias, axes, stride, padding, dilation, groups, output_padding)
        batched = x.dim() == axes + 2
        bias = bias if bias is None or record_bias else bias.detach()
        y = ops.conv(ops.volume(x, axes, batched), ops.volume(weight, axes), bias, *prepared)
        return ops.from_volume(y, axes, batched)
    key = (op, x.shape, x.stride(), x.dtype, x.get_device(), weight.shape, weight.stride(), weight.dtype,
           weight.get_device(), ops.layout_key(bias), stride, padding, dilation, groups, output_padding, record_bias)
    try:
        plan = _plans.get(key)
    except TypeError:  # lists cannot be keys
        options = (tuple(o) if type(o) is list else o for o in (stride, padding, dilation))
        output_padding = tuple(output_padding) if type(output_padding) is list else output_padding
        return _run(op, x, weight, bias, axes, *options, groups, output_padding, record_bias)
    if plan is None:
        prepared = _prepare(op, x, weight, bias, axes, stride, padding, dilation, groups, output_padding)
        plan = ops.keep(_plans, key, ops.ConvPlan(x, weight, bias, *prepared, axes, x.dim() == axes + 2, record_bias))
    return plan(x, weight, bias)


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


def _check_norm(op, x, groups, weight, bias):
    if x.dim() < 2 or groups < 1 or x.shape[1] == 0 or x.shape[1] % groups:
        raise RuntimeError(f"voxgrad_torch.{op}: num_groups {groups} does not divide the channels of input "
                           f"{list(x.shape)}")
    for name, t in (("weight", weight), ("bias", bias)):
        if t is not None and (tuple(t.shape) != (x.shape[1],) or t.device != x.device or
                              t.dtype not in (x.dtype, torch.float32)):
            raise RuntimeError(f"voxgrad_torch.{op}: expected a {name} of shape [{x.shape[1]}], {x.dtype} or float32, "
                               f"on {x.device}, got {list(t.shape)}, {t.dtype}, on {t.device}")
    if x.numel() == groups and x.shape[0] == 1 or op == "instance_norm" and x.shape[2:].numel() == 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {list(x.shape)}")


def _norm(op, x, groups, weight, bias, eps, before=_NO_ACTIVATION, after=_NO_ACTIVATION, added=None):
    if not ops.is_plain(x, weight, bias, added):
        _check_norm(op, x, groups, weight, bias)
        y = ops.norm(ops.norm_volume(x), weight, bias, added, groups, eps, *before, *after)
        return ops.from_norm_volume(y, x.shape)
    key = (op, x.shape, x.stride(), x.dtype, x.get_device(), ops.layout_key(weight), ops.layout_key(bias), groups, eps,
           before, after)
    plan = _plans.get(key)
    if plan is None:
        _check_norm(op, x, groups, weight, bias)
        plan = ops.keep(_plans, key, ops.NormPlan(x, weight, bias, groups, eps, *before, *after))
    if not plan.is_dense:
        v = ops.norm_volume(x)
        v = v.contiguous(memory_format=ops.memory_format(v))
        return ops.from_norm_volume(_norm(op, v, groups, weight, bias, eps, before, after, added), x.shape)
    return plan(x, weight, bias, added)


def group_norm(input, num_groups, weight=None, bias=None, eps=1e-5):
    """Computes torch.nn.functional.group_norm. Under autocast on a GPU, the result is float32, as in PyTorch."""
    if input.is_cuda and torch.is_autocast_enabled("cuda") and input.dtype in (torch.bfloat16, torch.float16):
        input = input.float()
    return _norm("group_norm", input, num_groups, weight, bias, eps)


def instance_norm(input, weight=None, bias=None, eps=1e-5):
    """Computes torch.nn.functional.instance_norm without running statistics."""
    return _norm("instance_norm", input, input.shape[1], weight, bias, eps)


def activation_of(module):
    """Returns the kind and slope of an activation module that can be fused, or None."""
    make = _ACTIVATIONS.get(type(module))
    return make and make(module)


def conv_norm_activation(input, conv, norm, activation=None, activation_first=False):
    """Computes activation(norm(conv(input))) or, if activation_first is true, norm(activation(conv(input))).

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
