"""Functions with the arguments and the meaning of torch.nn.functional."""

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
    """Converts the operands to the dtype of autocast, if it is active."""
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in tensors)


def _check(op, x, weight, bias, axes, transposed, groups):
    def fail(text):
        shapes = f"input {list(x.shape)}, weight {list(weight.shape)}, groups {groups}"
        raise RuntimeError(f"voxgrad_torch.{op}: {text} ({shapes})")

    if x.dim() not in (axes + 1, axes + 2) or weight.dim() != axes + 2:
        fail(f"expected an input of {axes + 2} axes, or {axes + 1} without a batch, and a weight of {axes + 2} axes")
    for name, t in (("weight", weight), ("bias", bias)):
        if t is not None and (t.dtype != x.dtype or t.device != x.device):
            fail(f"{name} is {t.dtype} on {t.device}, input is {x.dtype} on {x.device}")
    channels = x.shape[x.dim() - axes - 1]
    expected = weight.shape[0] if transposed else weight.shape[1] * groups
    if groups < 1 or channels != expected:
        fail(f"weight expects {expected} input channels, input has {channels}")
    if (channels if transposed else weight.shape[0]) % groups:
        fail("groups does not divide the channels")
    outputs = weight.shape[1] * groups if transposed else weight.shape[0]
    if bias is not None and tuple(bias.shape) != (outputs,):
        fail(f"bias must have shape [{outputs}], got {list(bias.shape)}")


def _run(op, x, weight, bias, axes, stride, padding, dilation, groups, output_padding=None, record_bias=True):
    transposed = output_padding is not None
    x, weight, bias = _cast(x.device.type, x, weight, bias)
    _check(op, x, weight, bias, axes, transposed, groups)
    stride, dilation = _values("stride", stride, axes), _values("dilation", dilation, axes)
    padding = _values("padding", padding, axes)
    if min(stride) < 1 or min(dilation) < 1 or min(padding) < 0:
        raise RuntimeError(f"voxgrad_torch.{op}: stride {stride}, dilation {dilation} or padding {padding} is out of "
                           "range")
    batched = x.dim() == axes + 2
    if not batched:
        x = x.unsqueeze(0)
    size = []
    for i in range(axes):
        reach, in_size = dilation[i] * (weight.shape[i + 2] - 1) + 1, x.shape[i + 2]
        if transposed:
            extra = _values("output_padding", output_padding, axes)[i]
            if not 0 <= extra < max(stride[i], dilation[i]):
                raise RuntimeError(f"voxgrad_torch.{op}: output_padding {extra} must be smaller than stride or dilation")
            size.append((in_size - 1) * stride[i] - 2 * padding[i] + reach + extra)
        else:
            size.append((in_size + 2 * padding[i] - reach) // stride[i] + 1)
        if size[i] < 1:
            raise RuntimeError(f"voxgrad_torch.{op}: the result would have {size[i]} elements along axis {i} (input "
                               f"{list(x.shape)}, weight {list(weight.shape)}, stride {stride}, padding {padding}, "
                               f"dilation {dilation})")
    fill = 3 - axes
    if bias is not None and not record_bias:
        bias = bias.detach()
    y = ops.conv(_volume(x, axes), _volume(weight, axes), bias, (1,) * fill + tuple(size), _triple(stride, 1),
                 _triple(padding, 0), _triple(dilation, 1), groups, transposed)
    if axes == 2:
        y = y.squeeze(2)
    return y if batched else y.squeeze(0)


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
        x = x.unsqueeze(2) if x.dim() == 4 else x.reshape(shape[0], shape[1], 1, 1, -1)
    y = ops.norm(x, weight, bias, added, groups, eps, *before, *after)
    return y.squeeze(2) if len(shape) == 4 else y.reshape(shape) if len(shape) != 5 else y


def group_norm(input, num_groups, weight=None, bias=None, eps=1e-5):
    """Computes torch.nn.functional.group_norm. Under autocast, the result is float32, as in PyTorch."""
    if torch.is_autocast_enabled(input.device.type) and input.dtype in (torch.bfloat16, torch.float16):
        input = input.float()
    return _norm("group_norm", input, num_groups, weight, bias, eps)


def instance_norm(input, weight=None, bias=None, eps=1e-5):
    """Computes torch.nn.functional.instance_norm without running statistics."""
    if input.dim() > 2 and input[0, 0].numel() == 1:
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
