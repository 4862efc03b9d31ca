"""The operators, registered with torch.library as torch.ops.voxgrad.*.

All volumes are (N, C, D, H, W). The convolution, the transposed convolution and the weight gradient are linear in both
operands, and the gradients of each of the three are the other two. The operators are:

  conv         the convolution, or the transposed convolution (the gradient of its input) if `transposed`
  conv_weight  the gradient of the weight
  conv_bias    the gradient of the bias
  norm         a group norm between two activations
  norm_backward  the gradients of norm

Each operator has three parts: a function that calls the library, a function that returns results without data for
tracing, and a formula for its gradient. Outside of tracing and compilation, the functions of this module skip PyTorch's
dispatcher, which takes longer than a small convolution.
"""

import ctypes

import torch
from torch.autograd import forward_ad
from torch.nn.parameter import Parameter

from . import _library
from ._library import call, context, layout, library

NONE, RELU, LEAKY_RELU, GELU, SILU = range(5)

_geometries = {}
_norms = {}


def _is_channels_last(t):
    return t.shape[1] > 1 and t.stride(1) == 1 and not t.is_contiguous()


def _format(*tensors):
    """Returns the memory format of the result: channels-last if at least one operand is."""
    return torch.channels_last_3d if any(map(_is_channels_last, tensors)) else torch.contiguous_format


def _address(table, key, make):
    entry = table.get(key)
    if entry is None:
        entry = table[key] = make()
        entry.address = ctypes.addressof(entry)
    return entry.address


def _geometry(stride, padding, dilation, groups):
    key = (*stride, *padding, *dilation, groups)
    triple = ctypes.c_int64 * 3
    return _address(_geometries, key, lambda: _library.ConvGeometry(
        triple(*stride), triple(*padding), triple(*dilation), groups))


def _vector(t):
    return (0, 0) if t is None else (layout(t), t.data_ptr())


# ---- calls of the library


# The layouts and the geometry of recent calls of _conv, so that a repeated call needs one lookup.
_conv_calls = {}
_MAX_CACHED_CALLS = 4096


def _conv(x, weight, bias, size, stride, padding, dilation, groups, transposed):
    if type(size) is not tuple or type(stride) is not tuple:  # PyTorch's dispatcher passes lists
        size, stride, padding, dilation = map(tuple, (size, stride, padding, dilation))
    key = (x.shape, x.stride(), weight.shape, weight.stride(), size, stride, padding, dilation, groups, transposed,
           x.dtype, weight.dtype, x.get_device(), weight.get_device(),
           None if bias is None else (bias.shape, bias.stride(), bias.dtype, bias.get_device()))
    cached = _conv_calls.get(key)
    if cached is None:
        y = _conv_result(x, weight, bias, size, stride, padding, dilation, groups, transposed)
        function = library.voxgrad_conv_transpose if transposed else library.voxgrad_conv_forward
        layouts = [_library.make_layout(t) for t in (y, x, weight) + (() if bias is None else (bias,))]
        cached = (function, _geometry(stride, padding, dilation, groups), y.shape, y.stride(),
                  *(ctypes.addressof(entry) for entry in layouts), *(() if bias is not None else (0,)), layouts)
        if len(_conv_calls) >= _MAX_CACHED_CALLS:
            _conv_calls.clear()
        _conv_calls[key] = cached
    function, geometry, shape, y_stride, y_layout, x_layout, weight_layout, bias_layout, _ = cached
    y = torch.empty_strided(shape, y_stride, dtype=x.dtype, device=x.device)
    call(function, context(x), geometry, y_layout, y.data_ptr(), x_layout, x.data_ptr(), weight_layout,
         weight.data_ptr(), bias_layout, 0 if bias is None else bias.data_ptr())
    return y


def _conv_weight(x, y, kernel, channels_last, stride, padding, dilation, groups):
    weight = _conv_weight_result(x, y, kernel, channels_last, stride, padding, dilation, groups)
    call(library.voxgrad_conv_weight, context(x), _geometry(stride, padding, dilation, groups), layout(weight),
         weight.data_ptr(), layout(x), x.data_ptr(), layout(y), y.data_ptr())
    return weight


def _conv_bias(y):
    bias = y.new_empty(y.shape[1])
    call(library.voxgrad_conv_bias, context(y), layout(bias), bias.data_ptr(), layout(y), y.data_ptr())
    return bias


def _norm_options(groups, eps, before, before_slope, after, after_slope):
    key = (groups, eps, before, before_slope, after, after_slope)
    return _address(_norms, key, lambda: _library.NormOptions(groups, eps, before, after, before_slope, after_slope))


def _norm(x, weight, bias, added, groups, eps, before, before_slope, after, after_slope):
    y, statistics = _norm_result(x, weight, bias, added, groups, eps, before, before_slope, after, after_slope)
    x = x.contiguous(memory_format=_format(x))
    call(library.voxgrad_norm_forward, context(x), _norm_options(groups, eps, before, before_slope, after, after_slope),
         layout(x), y.data_ptr(), x.data_ptr(), statistics.data_ptr(), *_vector(weight), *_vector(bias))
    return y, statistics


def _norm_backward(dy, x, statistics, weight, bias, added, groups, eps, before, before_slope, after, after_slope, mask):
    dx, dweight, dbias, dadded = _norm_gradients(x, weight, bias, added, groups, before, mask)
    form = _format(x)
    x, dy = x.contiguous(memory_format=form), dy.contiguous(memory_format=form)
    # The library writes each gradient with the stride of its parameter.
    weight, bias = (t if t is None else t.contiguous() for t in (weight, bias))
    dw, db, da = (t.data_ptr() if t.numel() else 0 for t in (dweight, dbias, dadded))
    if not _added_matters(x, groups, before):
        dadded.zero_()
        da = 0
    call(library.voxgrad_norm_backward, context(x),
         _norm_options(groups, eps, before, before_slope, after, after_slope), layout(x), dx.data_ptr(), dw, db, da,
         dy.data_ptr(), x.data_ptr(), statistics.data_ptr(), *_vector(weight), *_vector(bias))
    return dx, dweight, dbias, dadded if added is None else dadded.to(added.dtype)


def _added_matters(x, groups, before):
    """Returns False if the norm subtracts a bias that was added to its input, so that the gradient of the bias is 0."""
    return groups != x.shape[1] or before != NONE


# ---- results without data


def _conv_result(x, weight, bias, size, stride, padding, dilation, groups, transposed):
    channels = weight.shape[1] * groups if transposed else weight.shape[0]
    return torch.empty((x.shape[0], channels, *size), dtype=x.dtype, device=x.device,
                       memory_format=_format(x, weight))


def _conv_weight_result(x, y, kernel, channels_last, stride, padding, dilation, groups):
    form = torch.channels_last_3d if channels_last else torch.contiguous_format
    return torch.empty((y.shape[1], x.shape[1] // groups, *kernel), dtype=x.dtype, device=x.device, memory_format=form)


def _norm_result(x, weight, bias, added, groups, eps, before, before_slope, after, after_slope):
    return (torch.empty_like(x, memory_format=_format(x)),
            torch.empty((x.shape[0], groups, 2), dtype=torch.float64, device=x.device))


def _norm_gradients(x, weight, bias, added, groups, before, mask):
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    vector = lambda wanted, dtype: x.new_empty(x.shape[1] if wanted else 0, dtype=dtype)
    return (torch.empty_like(x, memory_format=_format(x)),
            vector(mask[0] and weight is not None, x.dtype if weight is None else weight.dtype),
            vector(mask[1] and bias is not None, x.dtype if bias is None else bias.dtype),
            vector(mask[2] and added is not None, wide))


def _norm_backward_result(dy, x, statistics, weight, bias, added, groups, eps, before, before_slope, after,
                          after_slope, mask):
    dx, dweight, dbias, dadded = _norm_gradients(x, weight, bias, added, groups, before, mask)
    return dx, dweight, dbias, dadded if added is None else dadded.to(added.dtype)


# ---- gradients


def _save_conv(ctx, inputs, output):
    x, weight, bias, size, *ctx.geometry, ctx.transposed = inputs
    needs = ctx.needs_input_grad
    ctx.save_for_backward(x if needs[1] else None, weight if needs[0] else None)
    ctx.x_size, ctx.kernel, ctx.channels_last = x.shape[2:], weight.shape[2:], _is_channels_last(weight)


def _conv_backward(ctx, dy):
    x, weight = ctx.saved_tensors
    needs = ctx.needs_input_grad
    dx = dw = db = None
    if needs[0]:
        dx = conv(dy, weight, None, ctx.x_size, *ctx.geometry, not ctx.transposed)
    if needs[1]:
        operands = (dy, x) if ctx.transposed else (x, dy)
        dw = conv_weight(*operands, ctx.kernel, ctx.channels_last, *ctx.geometry)
    if needs[2]:
        db = conv_bias(dy)
    return dx, dw, db, None, None, None, None, None, None


def _save_conv_weight(ctx, inputs, output):
    x, y, kernel, channels_last, *ctx.geometry = inputs
    ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, y if ctx.needs_input_grad[0] else None)
    ctx.x_size, ctx.y_size = x.shape[2:], y.shape[2:]


def _conv_weight_backward(ctx, dw):
    x, y = ctx.saved_tensors
    dx = dy = None
    if ctx.needs_input_grad[0]:
        dx = conv(y, dw, None, ctx.x_size, *ctx.geometry, True)
    if ctx.needs_input_grad[1]:
        dy = conv(x, dw, None, ctx.y_size, *ctx.geometry, False)
    return dx, dy, None, None, None, None, None, None


def _save_conv_bias(ctx, inputs, output):
    ctx.shape = inputs[0].shape


def _conv_bias_backward(ctx, db):
    return db.reshape(1, -1, 1, 1, 1).expand(ctx.shape)


def _save_norm(ctx, inputs, output):
    x, weight, bias, added, *ctx.options = inputs
    _, statistics = output
    ctx.mark_non_differentiable(statistics)
    ctx.save_for_backward(x, weight, bias, added, statistics)


def _norm_gradient(ctx, dy, _):
    x, weight, bias, added, statistics = ctx.saved_tensors
    needs = ctx.needs_input_grad
    gradients = norm_backward(dy, x, statistics, weight, bias, added, *ctx.options, list(needs[1:4]))
    return (*(g if n else None for g, n in zip(gradients, needs)), *[None] * 6)


def _activation(kind, slope, x):
    if kind == RELU:
        return torch.relu(x)
    if kind == LEAKY_RELU:
        return torch.nn.functional.leaky_relu(x, slope)
    if kind == GELU:
        return torch.nn.functional.gelu(x)
    return torch.nn.functional.silu(x) if kind == SILU else x


def _composed_norm(x, weight, bias, added, groups, eps, before, before_slope, after, after_slope):
    """Computes the norm with operators of PyTorch. Used to differentiate norm_backward."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    per_channel = lambda t: t.to(wide).reshape(1, -1, *[1] * (x.dim() - 2))
    v = x.to(wide)
    if added is not None:
        v = v + (per_channel(added) - per_channel(added.detach()))
    v = _activation(before, before_slope, v).reshape(x.shape[0], groups, -1)
    centered = v - v.mean(-1, keepdim=True)
    v = (centered * torch.rsqrt(centered.square().mean(-1, keepdim=True) + eps)).reshape(x.shape)
    if weight is not None:
        v = v * per_channel(weight)
    if bias is not None:
        v = v + per_channel(bias)
    return _activation(after, after_slope, v).to(x.dtype)


def _save_norm_backward(ctx, inputs, output):
    dy, x, _, weight, bias, added, *ctx.options, ctx.mask = inputs
    ctx.save_for_backward(dy, x, weight, bias, added)


def _norm_backward_gradient(ctx, *grads):
    """Differentiates the gradients of the composed norm."""
    again = torch.is_grad_enabled()
    saved = ctx.saved_tensors
    with torch.enable_grad():
        dy, x, weight, bias, added = (t if t is None else t.view_as(t) if again else t.detach().requires_grad_()
                                      for t in saved)
        inputs = [x, weight, bias, added]
        if again:
            inputs = [t if t is None or t.requires_grad else t.detach().requires_grad_() for t in inputs]
        y = _composed_norm(*inputs, *ctx.options)
        wanted = [True, *ctx.mask]
        pairs = [(t, g) for t, g, w in zip(inputs, grads, wanted) if w and t is not None and g is not None]
        firsts = torch.autograd.grad(y, [t for t, _ in pairs], dy, create_graph=True, allow_unused=True)
        terms = [(f, g) for f, (_, g) in zip(firsts, pairs) if f is not None and f.requires_grad]
        sources = [t for t in (dy, *inputs) if t is not None and t.requires_grad]
        results = torch.autograd.grad([f for f, _ in terms], sources, [g.to(f.dtype) for f, g in terms],
                                      create_graph=again, allow_unused=True) if terms else [None] * len(sources)
    found = {id(t): r for t, r in zip(sources, results)}
    ddy, dx, dweight, dbias, dadded = (found.get(id(t)) for t in (dy, *inputs))
    return ddy, dx, None, dweight, dbias, dadded, *[None] * 7


# ---- registration

_GEOMETRY = "int[3] stride, int[3] padding, int[3] dilation, int groups"
_OPTIONS = "int groups, float eps, int before, float before_slope, int after, float after_slope"
_library_fragment = torch.library.Library("voxgrad", "DEF")
_functions = {}


def _register(name, schema, kernel, result, backward, save):
    _library_fragment.define(name + schema)
    for device in ("CPU", "CUDA"):
        _library_fragment.impl(name, kernel, device)
    torch.library.register_fake("voxgrad::" + name, result, lib=_library_fragment)
    torch.library.register_autograd("voxgrad::" + name, backward, setup_context=save, lib=_library_fragment)
    operator = getattr(torch.ops.voxgrad, name).default

    # A forward function that saves its inputs itself is called much faster than one with setup_context().
    def forward(ctx, *inputs):
        output = kernel(*inputs)
        save(ctx, inputs, output)
        return output

    function = type(name, (torch.autograd.Function,), {
        "forward": staticmethod(forward), "backward": staticmethod(backward)})

    tensors = schema.split(") ->")[0].count("Tensor")

    def front(x, *arguments):
        if torch.compiler.is_compiling():
            return operator(x, *arguments)
        if forward_ad._current_level >= 0:
            return function.apply(x, *arguments)  # throws if an operand has a tangent, which the operator would ignore
        if not is_plain(x) or x.is_neg() or any(t is not None and t.is_neg() for t in arguments[:tensors - 1]):
            return operator(x, *arguments)  # the dispatcher replaces negative views by their values
        if torch.is_grad_enabled():
            return function.apply(x, *arguments)
        return kernel(x, *arguments)

    return front


def is_plain(x):
    """Returns True if x is an ordinary tensor with data and nothing intercepts calls of operators."""
    return (type(x) in (torch.Tensor, Parameter) and not x.is_meta and torch._C._len_torch_dispatch_stack() == 0 and
            torch._C._len_torch_function_stack() == 0 and not torch._C._are_functorch_transforms_active() and
            torch._C._get_tracing_state() is None)


conv = _register(
    "conv", f"(Tensor x, Tensor weight, Tensor? bias, SymInt[3] size, {_GEOMETRY}, bool transposed) -> Tensor",
    _conv, _conv_result, _conv_backward, _save_conv)
conv_weight = _register(
    "conv_weight", f"(Tensor x, Tensor y, SymInt[3] kernel, bool channels_last, {_GEOMETRY}) -> Tensor",
    _conv_weight, _conv_weight_result, _conv_weight_backward, _save_conv_weight)
conv_bias = _register(
    "conv_bias", "(Tensor y) -> Tensor",
    _conv_bias, lambda y: y.new_empty(y.shape[1]), _conv_bias_backward, _save_conv_bias)
_norm_front = _register(
    "norm", f"(Tensor x, Tensor? weight, Tensor? bias, Tensor? added, {_OPTIONS}) -> (Tensor, Tensor)",
    _norm, _norm_result, _norm_gradient, _save_norm)
norm_backward = _register(
    "norm_backward", "(Tensor dy, Tensor x, Tensor statistics, Tensor? weight, Tensor? bias, Tensor? added, "
    f"{_OPTIONS}, bool[] mask) -> (Tensor, Tensor, Tensor, Tensor)",
    _norm_backward, _norm_backward_result, _norm_backward_gradient, _save_norm_backward)


def norm(x, weight, bias, added, *options):
    return _norm_front(x, weight, bias, added, *options)[0]
