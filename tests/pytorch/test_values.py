"""Compares values and gradients with PyTorch in float64 on random problems."""

import random

import pytest
import torch
import torch.nn.functional as F
from support import DTYPES, FORMS, SEED, assert_near, in_form

import voxgrad_torch
from voxgrad_torch import functional as vF

PROBLEMS = 200  # per kind and dtype
ACTIVATIONS = [torch.nn.ReLU(), torch.nn.LeakyReLU(0.01), torch.nn.GELU(), torch.nn.SiLU(), None]
# The largest permitted error, as a multiple of the dtype's epsilon:
FACTORS = {torch.float32: 32, torch.float64: 1000, torch.bfloat16: 4, torch.float16: 4}
CHANGES_VALUES = "expanded"  # in this form, in_form() repeats one slice of the tensor, so the values change


class Conv:
    """A random convolution: sizes, options and memory layouts."""

    def __init__(self, draw, transposed, channels_multiple=1):
        self.axes = axes = draw.choice([2, 3])
        self.transposed = transposed
        per_axis = lambda values: [draw.choice(values) for _ in range(axes)]
        self.groups = draw.choice([1, 1, 1, 2, 3])
        cin, cout = (self.groups * draw.choice([1, 2, 3, 8, 16, 32]) for _ in range(2))
        cout *= channels_multiple
        self.batch = draw.choice([None, 0, 1, 2, 3, 2, 3])
        self.kernel, self.stride = per_axis([1, 2, 3, 3, 5]), per_axis([1, 1, 2, 3])
        self.padding, self.dilation = per_axis([0, 1, 2]), per_axis([1, 1, 2, 3])
        reach = [d * (k - 1) + 1 for d, k in zip(self.dilation, self.kernel)]
        self.output_padding = [draw.randrange(max(s, d)) for s, d in zip(self.stride, self.dilation)]
        if transposed:
            self.padding = [min(p, (r - 1) // 2) for p, r in zip(self.padding, reach)]
            self.size = per_axis([2, 3, 4, 6])
            self.weight = [cin, cout // self.groups, *self.kernel]
        else:
            self.size = [max(r - 2 * p, 1) + draw.choice([1, 3, 4, 7]) for r, p in zip(reach, self.padding)]
            self.weight = [cout, cin // self.groups, *self.kernel]
        self.x = ([] if self.batch is None else [self.batch]) + [cin, *self.size]
        self.cout = cout
        self.has_bias = draw.random() < 0.7
        self.forms = [draw.choice(FORMS) for _ in range(3)]

    def __str__(self):
        return ", ".join(f"{k} {v}" for k, v in vars(self).items())

    def __call__(self, library, x, weight, bias):
        options = {"stride": self.stride, "padding": self.padding, "dilation": self.dilation, "groups": self.groups}
        if self.transposed:
            options["output_padding"] = self.output_padding
        name = f"conv_transpose{self.axes}d" if self.transposed else f"conv{self.axes}d"
        return getattr(library, name)(x, weight, bias, **options)

    def operands(self, dtype, device):
        scale = (2 / max(1, torch.Size(self.weight[1:]).numel())) ** 0.5
        weight = torch.randn(self.weight, dtype=dtype, device=device) * scale
        bias = torch.randn(self.cout, dtype=dtype, device=device) if self.has_bias else None
        x = torch.randn(self.x, dtype=dtype, device=device)
        return [in_form(x, self.forms[0]), in_form(weight, self.forms[1]), bias]


class Norm:
    """A random group norm or instance norm."""

    def __init__(self, draw, instance):
        self.instance = instance
        self.axes = draw.choice([1, 2, 3] if not instance else [2, 3])
        self.groups = draw.choice([1, 2, 4, 5])
        channels = self.groups * (1 if instance else draw.choice([1, 2, 8]))
        self.x = [draw.choice([1, 2, 3]), channels, *(draw.choice([3, 4, 9]) for _ in range(self.axes))]
        self.has_weight, self.has_bias = draw.random() < 0.8, draw.random() < 0.8
        self.wide = draw.random() < 0.5  # weight and bias are float32 even if the input is not
        self.eps = draw.choice([1e-5, 1e-3])
        self.forms = [draw.choice([f for f in FORMS if f != CHANGES_VALUES]), "contiguous", draw.choice(FORMS)]

    def __str__(self):
        return ", ".join(f"{k} {v}" for k, v in vars(self).items())

    def __call__(self, library, x, weight, bias):
        if library is F and weight is None:  # PyTorch 2.11 computes wrong gradients of a bias without a weight
            weight = torch.ones(self.x[1], dtype=x.dtype, device=x.device)
        if self.instance:
            options = {} if library is vF else {"use_input_stats": True}
            return library.instance_norm(x, weight=weight, bias=bias, eps=self.eps, **options)
        return library.group_norm(x, self.groups, weight, bias, self.eps)

    def operands(self, dtype, device):
        wide = torch.float32 if self.wide and dtype in (torch.bfloat16, torch.float16) else dtype
        x = torch.randn(self.x, device=device).add(0.5).to(dtype)
        weight = torch.randn(self.x[1], dtype=wide, device=device) if self.has_weight else None
        bias = torch.randn(self.x[1], dtype=wide, device=device) if self.has_bias else None
        return [in_form(x, self.forms[0]), weight, bias]


def gradients(function, operands, dy):
    """Returns the result and the gradients of the operands."""
    leaves = [t if t is None else t.detach().requires_grad_() for t in operands]
    y = function(*leaves)
    y.backward(dy(y) if callable(dy) else dy)
    return [y.detach(), *(t.grad for t in leaves if t is not None)]


def compare(problem, function, reference, operands, factor):
    """Compares `function` with `reference`, which computes in float64."""
    dtype, form = operands[0].dtype, problem.forms[2]
    random_dy = lambda y: in_form(torch.randn_like(y, memory_format=torch.contiguous_format), form)
    grads = []

    def keep(y):
        assert y.dtype == dtype
        grads.append(random_dy(y))
        return grads[0]

    got = gradients(function, operands, keep)
    expected = gradients(reference, [t if t is None else t.double().contiguous() for t in operands],
                         grads[0].double().contiguous())  # F.instance_norm has wrong gradients in other formats
    # If the terms of a gradient cancel, its error is proportional to the terms, not to their sum. The tolerance is
    # therefore at least `factor` rounding errors of the largest element of dy, which estimates the terms.
    floor = grads[0].abs().max().item() if grads[0].numel() else 0
    names = ["y", "dx"] + [n for n, t in zip(["dweight", "dbias", "dgamma", "dbeta"], operands[1:]) if t is not None]
    for name, g, e in zip(names, got, expected):
        # float32 gradients of the parameters of a half-precision operation have the tolerance of float32
        assert_near(g, e, factor if g.dtype == dtype else FACTORS[g.dtype], f"{name} of {problem}", floor)


def problems(kind, dtype):
    return random.Random(f"{SEED} {kind} {dtype}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["conv", "conv_transpose", "group_norm", "instance_norm"])
def test_values_and_gradients_match_float64(kind, dtype, device):
    draw = problems(kind, dtype)
    for _ in range(PROBLEMS):
        problem = Conv(draw, kind == "conv_transpose") if "conv" in kind else Norm(draw, kind == "instance_norm")
        compare(problem, lambda *t: problem(vF, *t), lambda *t: problem(F, *t), problem.operands(dtype, device),
                FACTORS[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("order", ["conv norm activation", "transposed activation norm"])
def test_fused_values_and_gradients_match_float64(order, dtype, device):
    """Compares a fused operation with separate operations in float64.

    As in the fused operation, the result of the convolution is rounded to `dtype`.
    """
    draw = problems(order, dtype)
    transposed = order.startswith("transposed")
    for _ in range(PROBLEMS):
        groups = draw.choice([1, 2, 4, None])  # None: instance norm
        p = Conv(draw, transposed, groups or 1)
        p.batch, p.x = 2, [2, *p.x[-p.axes - 1:]]
        p.forms = ["contiguous" if f == CHANGES_VALUES else f for f in p.forms]
        p.size = p.x[2:] = [n + 2 for n in p.x[2:]]
        activation = torch.nn.ReLU() if transposed else draw.choice(ACTIVATIONS)
        conv = getattr(voxgrad_torch, f"Conv{'Transpose' if transposed else ''}{p.axes}d")(
            p.x[1], p.cout, p.kernel, p.stride, p.padding, dilation=p.dilation, groups=p.groups, bias=p.has_bias,
            **({"output_padding": p.output_padding} if transposed else {})).to(device, dtype)
        norm = voxgrad_torch.GroupNorm(groups, p.cout) if groups else getattr(
            voxgrad_torch, f"InstanceNorm{p.axes}d")(p.cout, affine=True)
        norm = norm.to(device, dtype)
        norm.eps = draw.choice([1e-2, 1e-1])  # a smaller eps can magnify the rounding errors of the convolution
        x, weight, bias = p.operands(dtype, device)
        operands = [x, weight, bias, torch.randn_like(norm.weight), torch.randn_like(norm.bias)]

        def fused(x, weight, bias, gamma, beta):
            del conv.weight, conv.bias, norm.weight, norm.bias
            conv.weight, conv.bias, norm.weight, norm.bias = weight, bias, gamma, beta
            return vF.conv_norm_activation(x, conv, norm, activation, activation_first=transposed)

        def reference(x, weight, bias, gamma, beta):
            y = p(F, x, weight, bias)
            y = y + (y.to(dtype).double() - y).detach()  # rounded like the result of the convolution
            steps = [lambda y: F.group_norm(y, groups or p.cout, gamma, beta, norm.eps)]
            if activation is not None:
                steps.insert(0 if transposed else 1, activation)
            for step in steps:
                y = step(y)
            return y

        p.forms[1] = f"{p.forms[1]}, groups {groups}, {activation}"
        compare(p, fused, reference, operands, 4 * FACTORS[dtype])
