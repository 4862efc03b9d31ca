"""The operators, registered with torch.library as torch.ops.voxgrad.*.

All volumes are (N, C, D, H, W). The convolution, the transposed convolution and the weight gradient are linear in both
operands. Each of these three operators therefore computes its gradients with the other two. The operators are:

  conv         the convolution; if `transposed`, the transposed convolution
  conv_weight  the gradient of the weight
  conv_bias    the gradient of the bias
  norm         a group norm between two activations
  norm_backward  the gradients of norm

Each operator has three parts: a function that calls the library, a function for tracing that returns tensors without
data, and a formula for its gradient. Outside of tracing and compilation, the functions of this module skip PyTorch's
dispatcher, which takes longer than a small convolution.
"""

import ctypes

import torch
from torch.autograd import forward_ad
from torch.nn.parameter import Parameter

from . import _library
from ._library import call, context, library

NONE, RELU, LEAKY_RELU, GELU, SILU = range(5)


def _is_channels_last(t):
    return t.shape[1] > 1 and t.stride(1) == 1 and not t.is_contiguous()


def memory_format(*tensors):
    """Returns the memory format of the result: channels-last if at least one operand is."""
    return torch.channels_last_3d if any(map(_is_channels_last, tensors)) else torch.contiguous_format


def volume(t, axes=3, batched=True):
    """Returns a view (N, C, D, H, W) of t, which has `axes` (2 or 3) spatial axes, and a batch axis if `batched`."""
    t = t if batched else t.unsqueeze(0)
    return t if axes == 3 else t.unsqueeze(2)


def from_volume(t, axes=3, batched=True):
    """Inverts volume()."""
    t = t if axes == 3 else t.squeeze(2)
    return t if batched else t.squeeze(0)


def norm_volume(t):
    """Returns the input of a norm, which has at least 2 axes, as (N, C, D, H, W)."""
    if t.dim() == 5:
        return t
    return t.unsqueeze(2) if t.dim() == 4 else t.reshape(*t.shape[:2], 1, 1, t.shape[2:].numel())


def from_norm_volume(v, shape):
    """Inverts norm_volume() of a tensor of the given shape."""
    return v if len(shape) == 5 else v.squeeze(2) if len(shape) == 4 else v.reshape(shape)


# ---- plans
#
# A plan holds all parts of a call that follow from the options and the layouts of the operands, so that a repeated call
# needs one lookup.

_MAX_PLANS = 4096
_plans = {}


def layout_key(t):
    """Returns the part of a plan's key for an optional operand."""
    return None if t is None else (t.shape, t.stride(), t.dtype, t.get_device())


def keep(plans, key, plan):
    """Stores a plan in the cache `plans` and returns the plan."""
    if len(plans) >= _MAX_PLANS:
        plans.clear()
    plans[key] = plan
    return plan


class Plan:
    """The structures that a call passes to the library, and the layout of the result."""

    def __init__(self, structure, operands, result):
        """Creates the layouts of the operands. `result` provides only the shape, the strides and the dtype of the
        result, so it may be a meta tensor.

        The layout of an operand that is None is 0. The call runs on the device of the last operand that is not None.
        """
        present = [t for t in operands if t is not None]
        self.device = present[-1].device
        self.owned = [_library.make_layout(t, self.device) for t in present]
        addresses = map(ctypes.addressof, self.owned)
        self.layouts = [0 if t is None else next(addresses) for t in operands]
        self.index = self.owned[-1].device
        self.structure = 0
        if structure is not None:
            self.owned.append(structure)
            self.structure = ctypes.addressof(structure)
        self.shape, self.stride, self.dtype = result.shape, result.stride(), result.dtype

    def empty(self):
        """Returns a tensor for the result."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


def _plan(name, operands, options, make):
    """Returns the plan of a call of `name`. make() returns the arguments of Plan."""
    key = (name, options, *map(layout_key, operands))
    return _plans.get(key) or keep(_plans, key, Plan(*make()))


# ---- calls of the library


def _pointer(t):
    return 0 if t is None else t.data_ptr()


def _needs_gradient(t):
    return t is not None and t.requires_grad


def _geometry(stride, padding, dilation, groups):
    triple = ctypes.c_int64 * 3
    return _library.ConvGeometry(triple(*stride), triple(*padding), triple(*dilation), groups)


class ConvPlan(Plan):
    """A convolution of tensors with `axes` spatial axes, with or without a batch."""

    def __init__(self, x, weight, bias, size, stride, padding, dilation, groups, transposed, axes=3, batched=True,
                 has_bias_gradient=True):
        x, weight = volume(x, axes, batched), volume(weight, axes)
        y = _conv_result(x, weight, bias, size, stride, padding, dilation, groups, transposed, "meta")
        super().__init__(_geometry(stride, padding, dilation, groups), (y, bias, weight, x),
                         from_volume(y, axes, batched))
        self.function = library.voxgrad_conv_transpose if transposed else library.voxgrad_conv_forward
        self.x_size, self.kernel, self.channels_last = x.shape[2:], weight.shape[2:], _is_channels_last(weight)
        self.geometry, self.transposed = (stride, padding, dilation, groups), transposed
        self.axes, self.form = axes, (axes, batched)
        self.has_bias_gradient = has_bias_gradient

    def run(self, x, weight, bias):
        """Returns the result, without recording the operation."""
        y = self.empty()
        y_layout, bias_layout, weight_layout, x_layout = self.layouts
        call(self.function, context(self.index), self.structure, y_layout, y.data_ptr(), x_layout, x.data_ptr(),
             weight_layout, weight.data_ptr(), bias_layout, _pointer(bias))
        return y

    def __call__(self, x, weight, bias):
        if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad or _needs_gradient(bias)):
            return _PlannedConv.apply(x, weight, bias, self)
        return self.run(x, weight, bias)


def _conv(x, weight, bias, *options):
    if type(options[1]) is list:  # PyTorch's dispatcher passes lists, and the key needs tuples
        options = (*map(tuple, options[:4]), *options[4:])
    key = ("conv", options, layout_key(x), layout_key(weight), layout_key(bias))
    plan = _plans.get(key) or keep(_plans, key, ConvPlan(x, weight, bias, *options))
    return plan.run(x, weight, bias)


def _conv_weight(x, y, kernel, channels_last, *geometry):
    def make():
        weight = _conv_weight_result(x, y, kernel, channels_last, *geometry, "meta")
        return _geometry(*geometry), (weight, x, y), weight

    geometry = (*map(tuple, geometry[:3]), geometry[3])
    plan = _plan("conv_weight", (x, y), (tuple(kernel), channels_last, geometry), make)
    weight, (weight_layout, x_layout, y_layout) = plan.empty(), plan.layouts
    call(library.voxgrad_conv_weight, context(plan.index), plan.structure, weight_layout, weight.data_ptr(), x_layout,
         x.data_ptr(), y_layout, y.data_ptr())
    return weight


def _conv_bias(y):
    bias = y.new_empty(y.shape[1])
    plan = _plan("conv_bias", (bias, y), None, lambda: (None, (bias, y), bias))
    bias_layout, y_layout = plan.layouts
    call(library.voxgrad_conv_bias, context(plan.index), bias_layout, bias.data_ptr(), y_layout, y.data_ptr())
    return bias


class NormPlan(Plan):
    """A norm of a dense tensor. The parameters after `bias` are those of the operator `norm`."""

    def __init__(self, x, weight, bias, groups, eps, before, before_slope, after, after_slope):
        v = norm_volume(x)
        y = torch.empty_like(v, device="meta", memory_format=memory_format(v))
        super().__init__(_library.NormOptions(groups, eps, before, after, before_slope, after_slope),
                         (weight, bias, v), from_norm_volume(y, x.shape))
        self.options = (groups, eps, before, before_slope, after, after_slope)
        self.is_dense = v.is_contiguous(memory_format=memory_format(v)) and (x.dim() in (4, 5) or x.is_contiguous())
        self.statistics = (x.shape[0], groups, 2)

    def run(self, x, weight, bias):
        """Returns the result and the statistics, without recording the operation."""
        y = self.empty()
        statistics = torch.empty(self.statistics, dtype=torch.float64, device=self.device)
        weight_layout, bias_layout, x_layout = self.layouts
        call(library.voxgrad_norm_forward, context(self.index), self.structure, x_layout, y.data_ptr(), x.data_ptr(),
             statistics.data_ptr(), weight_layout, _pointer(weight), bias_layout, _pointer(bias))
        return y, statistics

    def __call__(self, x, weight, bias, added):
        if torch.is_grad_enabled() and (x.requires_grad or _needs_gradient(weight) or _needs_gradient(bias) or
                                        _needs_gradient(added)):
            return _PlannedNorm.apply(x, weight, bias, added, self)
        return self.run(x, weight, bias)[0]


def _norm(x, weight, bias, added, *options):
    x = x.contiguous(memory_format=memory_format(x))
    key = ("norm", options, layout_key(x), layout_key(weight), layout_key(bias))
    plan = _plans.get(key) or keep(_plans, key, NormPlan(x, weight, bias, *options))
    return plan.run(x, weight, bias)


def _norm_backward(dy, x, statistics, weight, bias, added, groups, eps, before, before_slope, after, after_slope, mask):
    dx, dweight, dbias, dadded = _norm_gradients(x, weight, bias, added, groups, before, mask)
    x = x.contiguous(memory_format=memory_format(x))
    # The library writes each gradient with the stride of its parameter.
    weight, bias = (t if t is None else t.contiguous() for t in (weight, bias))
    dw, db, da = (t.data_ptr() if t.numel() else 0 for t in (dweight, dbias, dadded))
    if not _added_matters(x, groups, before):
        dadded.zero_()
        da = 0
    options = (groups, eps, before, after, before_slope, after_slope)
    plan = _plan("norm_backward", (weight, bias, dy, x), options,
                 lambda: (_library.NormOptions(*options), (weight, bias, dy, x), x))
    weight_layout, bias_layout, dy_layout, x_layout = plan.layouts
    call(library.voxgrad_norm_backward, context(plan.index), plan.structure, x_layout, dx.data_ptr(), dw, db, da,
         dy_layout, dy.data_ptr(), x.data_ptr(), statistics.data_ptr(), weight_layout, _pointer(weight), bias_layout,
         _pointer(bias))
    return dx, dweight, dbias, dadded if added is None else dadded.to(added.dtype)


def _added_matters(x, groups, before):
    """Returns False if a bias that was added to x does not change the norm, so that the gradient of the bias is 0.

    With one channel per group and no activation before the norm, subtracting the mean cancels the bias.
    """
    return groups != x.shape[1] or before != NONE


# ---- results without data


def _conv_result(x, weight, bias, size, stride, padding, dilation, groups, transposed, device=None):
    channels = weight.shape[1] * groups if transposed else weight.shape[0]
    return torch.empty((x.shape[0], channels, *size), dtype=x.dtype, device=device or x.device,
                       memory_format=memory_format(x, weight))


def _conv_weight_result(x, y, kernel, channels_last, stride, padding, dilation, groups, device=None):
    form = torch.channels_last_3d if channels_last else torch.contiguous_format
    return torch.empty((y.shape[1], x.shape[1] // groups, *kernel), dtype=x.dtype, device=device or x.device,
                       memory_format=form)


def _norm_result(x, weight, bias, added, groups, eps, before, before_slope, after, after_slope):
    return (torch.empty_like(x, memory_format=memory_format(x)),
            torch.empty((x.shape[0], groups, 2), dtype=torch.float64, device=x.device))


def _norm_gradients(x, weight, bias, added, groups, before, mask):
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    vector = lambda wanted, dtype: x.new_empty(x.shape[1] if wanted else 0, dtype=dtype)
    return (torch.empty_like(x, memory_format=memory_format(x)),
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


class _PlannedConv(torch.autograd.Function):
    """Records a convolution of ordinary tensors. This function is faster than the operator."""

    @staticmethod
    def forward(ctx, x, weight, bias, plan):
        ctx.save_for_backward(x if weight.requires_grad else None, weight if x.requires_grad else None)
        ctx.plan = plan
        return plan.run(x, weight, bias)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        plan, needs = ctx.plan, ctx.needs_input_grad
        dx = dw = db = None
        dy = volume(dy, *plan.form)
        if needs[0]:
            dx = from_volume(conv(dy, volume(weight, plan.axes), None, plan.x_size, *plan.geometry,
                                  not plan.transposed), *plan.form)
        if needs[1]:
            x = volume(x, *plan.form)
            operands = (dy, x) if plan.transposed else (x, dy)
            dw = from_volume(conv_weight(*operands, plan.kernel, plan.channels_last, *plan.geometry), plan.axes)
        if needs[2] and plan.has_bias_gradient:
            db = conv_bias(dy)
        return dx, dw, db, None


class _PlannedNorm(torch.autograd.Function):
    """Records a norm of ordinary tensors. This function is faster than the operator."""

    @staticmethod
    def forward(ctx, x, weight, bias, added, plan):
        y, statistics = plan.run(x, weight, bias)
        ctx.save_for_backward(x, weight, bias, added, statistics)
        ctx.plan = plan
        return y

    @staticmethod
    def backward(ctx, dy):
        x, weight, bias, added, statistics = ctx.saved_tensors
        needs = ctx.needs_input_grad
        dx, *gradients = norm_backward(norm_volume(dy), norm_volume(x), statistics, weight, bias, added,
                                       *ctx.plan.options, list(needs[1:4]))
        gradients = [g if n else None for g, n in zip(gradients, needs[1:4])]
        return from_norm_volume(dx, dy.shape) if needs[0] else None, *gradients, None


def _activation(kind, slope, x):
    if kind == RELU:
        return torch.relu(x)
    if kind == LEAKY_RELU:
        return torch.nn.functional.leaky_relu(x, slope)
    if kind == GELU:
        return torch.nn.functional.gelu(x)
    return torch.nn.functional.silu(x) if kind == SILU else x


def _composed_norm(x, weight, bias, added, groups, eps, before, before_slope, after, after_slope):
    """Computes the norm with operators of PyTorch. _norm_backward_gradient differentiates this function twice."""
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
        if not is_plain(x, *arguments[:tensors - 1]):
            if not torch.compiler.is_compiling() and forward_ad._current_level >= 0:
                # apply() raises an error if an operand has a tangent. The operator would ignore the tangent.
                return function.apply(x, *arguments)
            return operator(x, *arguments)  # the dispatcher also replaces negative views by their values
        if torch.is_grad_enabled():
            return function.apply(x, *arguments)
        return kernel(x, *arguments)

    return front


_PLAIN_TYPES = {torch.Tensor, Parameter, type(None)}


def is_plain(*operands):
    """Returns True if the operands are None or ordinary tensors with data, and nothing intercepts operator calls."""
    if torch.compiler.is_compiling():
        return False
    for t in operands:
        if type(t) not in _PLAIN_TYPES or (t is not None and (t.is_meta or t.is_neg())):
            return False
    return (torch._C._len_torch_dispatch_stack() == 0 and torch._C._len_torch_function_stack() == 0 and
            not torch._C._are_functorch_transforms_active() and torch._C._get_tracing_state() is None and
            forward_ad._current_level < 0)


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
