"""Applies PyTorch's checks of operators, and compares eager results with those of PyTorch's transformations."""

import io
import shutil
import warnings

import pytest
import torch
from support import DTYPES, FORMS, assert_near, channels_last, in_form, same_bits
from test_values import Conv, Norm, problems
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradcheck, gradgradcheck

import voxgrad_torch as vt
from voxgrad_torch import functional as vF
from voxgrad_torch import ops

ops_voxgrad = torch.ops.voxgrad
ACTIVATIONS = {ops.NONE: 0.0, ops.RELU: 0.0, ops.LEAKY_RELU: 0.1, ops.GELU: 0.0, ops.SILU: 0.0}


def random(*size, device, dtype=torch.float64, form="contiguous", grad=True):
    return in_form(torch.randn(size, dtype=dtype, device=device), form).requires_grad_(grad)


def options(stride=(1, 1, 1), padding=(0, 0, 0), dilation=(1, 1, 1), groups=1):
    return list(stride), list(padding), list(dilation), groups


def operator_calls(device):
    """Yields a name, an operator and its arguments for each kind of call."""
    for form in FORMS:
        r = lambda *size, form=form, **rest: random(*size, device=device, form=form, **rest)
        geometry = options((2, 1, 1), (1, 0, 1), (1, 2, 1), 2)
        x, weight, bias = r(2, 4, 5, 6, 3), r(6, 2, 3, 2, 1), r(6, form="contiguous")
        y = r(2, 6, 3, 4, 5)
        yield f"conv {form}", ops_voxgrad.conv, (x, weight, bias, [3, 4, 5], *geometry, False)
        yield f"conv without bias {form}", ops_voxgrad.conv, (x, weight, None, [3, 4, 5], *geometry, False)
        yield f"conv transposed {form}", ops_voxgrad.conv, (
            y, weight, r(4, form="contiguous"), [5, 6, 3], *geometry, True)
        yield f"conv_weight {form}", ops_voxgrad.conv_weight, (x, y, [3, 2, 1], form == "channels_last", *geometry)
        yield f"conv_bias {form}", ops_voxgrad.conv_bias, (y,)
    for form in FORMS:
        for dtype in (torch.float64, torch.bfloat16):
            r = lambda *size, form=form, dtype=dtype: random(*size, device=device, form=form, dtype=dtype)
            wide = torch.float64 if dtype == torch.float64 else torch.float32
            x, dy = r(2, 4, 3, 2, 5), r(2, 4, 3, 2, 5)
            weight, bias = (r(4, form="contiguous", dtype=wide) for _ in range(2))
            added = r(4, form="contiguous")
            settings = (2, 1e-5, ops.RELU, 0.0, ops.SILU, 0.0)
            yield f"norm {form} {dtype}", ops_voxgrad.norm, (x, weight, bias, added, *settings)
            yield f"norm without parameters {form} {dtype}", ops_voxgrad.norm, (x, None, None, None, *settings)
            statistics = ops_voxgrad.norm(x, weight, bias, None, *settings)[1].detach()
            for mask in ([True, True, True], [False, True, False], [False, False, False]):
                yield f"norm_backward {mask} {form} {dtype}", ops_voxgrad.norm_backward, (
                    dy, x, statistics, weight, bias, added, *settings, mask)
            yield f"norm_backward without parameters {form} {dtype}", ops_voxgrad.norm_backward, (
                dy, x, statistics, None, None, None, *settings, [False] * 3)


@pytest.mark.parametrize("operator", ["conv", "conv_weight", "conv_bias", "norm", "norm_backward"])
def test_operators_pass_opcheck(operator, device):
    calls = [c for c in operator_calls(device) if c[1] is getattr(ops_voxgrad, operator)]
    assert calls
    for name, function, arguments in calls:
        # Compiling the second derivatives of norms takes seconds.
        is_compiled = operator != "norm_backward" or name == "norm_backward [True, True, True] sliced torch.float64"
        checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
        checks += ["test_aot_dispatch_dynamic"] if is_compiled else []
        failures = torch.library.opcheck(function, arguments, test_utils=checks, raise_exception=False)
        assert all(v == "SUCCESS" for v in failures.values()), f"{name}: {failures}"


# ---- gradients in float64


def check_gradients(function, inputs):
    # Sums on a GPU may differ in the last bits between two runs.
    assert gradcheck(function, inputs, nondet_tol=1e-9)
    assert gradgradcheck(function, inputs, nondet_tol=1e-9)


@pytest.mark.parametrize("form", ["contiguous", "channels_last", "sliced"])
@pytest.mark.parametrize("axes", [2, 3])
@pytest.mark.parametrize("transposed", [False, True])
def test_convolutions_pass_gradcheck(transposed, axes, form, device):
    settings = {"stride": 2, "padding": 1, "dilation": [1, 2, 1][:axes], "groups": 2}
    name = f"conv_transpose{axes}d" if transposed else f"conv{axes}d"
    function = lambda x, weight, bias: getattr(vF, name)(x, weight, bias, **settings)
    r = lambda *size, form=form: random(*size, device=device, form=form)
    x, weight = r(2, 4 if transposed else 2, *[3, 4, 2][:axes]), r(4, 1, *[2, 3, 2][:axes])
    check_gradients(function, (x, weight, r(2 if transposed else 4, form="contiguous")))


def test_convolutions_without_bias_and_batch_pass_gradcheck(device):
    x, weight = random(2, 3, 2, 3, device=device), random(1, 2, 2, 1, 2, device=device)
    check_gradients(vF.conv3d, (x, weight))
    check_gradients(vF.conv_transpose3d, (x, random(2, 1, 1, 2, 1, device=device)))


def test_conv_weight_and_conv_bias_pass_gradcheck(device):
    x, y = random(2, 2, 3, 4, 2, device=device), random(2, 4, 2, 2, 2, device=device)
    geometry = options((1, 2, 1), (0, 1, 0), groups=2)
    check_gradients(lambda x, y: ops.conv_weight(x, y, (2, 3, 1), False, *map(tuple, geometry[:3]), 2), (x, y))
    check_gradients(ops.conv_bias, (y,))


@pytest.mark.parametrize("size", [(2, 4, 3, 2, 2), (2, 4, 3, 3), (3, 4, 5)], ids=str)
@pytest.mark.parametrize("parameters", ["weight and bias", "weight", "bias", "none"])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_norms_pass_gradcheck(groups, parameters, size, device):
    x = random(*size, device=device)
    weight = random(8, device=device)[::2].detach().requires_grad_() if "weight" in parameters else None
    bias = random(4, device=device) if "bias" in parameters else None
    check_gradients(lambda *t: vF.group_norm(t[0], groups, *t[1:], eps=1e-2), (x, weight, bias))
    if groups == 4:
        check_gradients(lambda *t: vF.instance_norm(*t, eps=1e-2), (x, weight, bias))


@pytest.mark.parametrize("after", ACTIVATIONS)
@pytest.mark.parametrize("before", ACTIVATIONS)
def test_norms_with_activations_pass_gradcheck(before, after, device):
    settings = (2, 1e-2, before, ACTIVATIONS[before], after, ACTIVATIONS[after])
    x = random(2, 4, 2, 1, 3, device=device, form="channels_last")
    function = lambda x, weight, bias: ops.norm(x, weight, bias, None, *settings)
    check_gradients(function, (x, random(4, device=device), random(4, device=device)))


@pytest.mark.parametrize("activation_first", [False, True])
@pytest.mark.parametrize("norm", ["GroupNorm", "InstanceNorm3d"])
def test_fused_operations_pass_gradcheck(norm, activation_first, device):
    conv = vt.Conv3d(2, 4, 2)
    norm = vt.GroupNorm(2, 4, eps=1e-2) if norm == "GroupNorm" else vt.InstanceNorm3d(4, affine=True, eps=1e-2)
    names = ["0.weight", "0.bias", "1.weight", "1.bias"]
    modules = torch.nn.ModuleList([conv, norm]).to(device, torch.float64)

    class Fused(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.modules_ = modules

        def forward(self, x):
            return vF.conv_norm_activation(x, *self.modules_, torch.nn.SiLU(), activation_first)

    fused = Fused()
    function = lambda x, *parameters: torch.func.functional_call(
        fused, {f"modules_.{name}": p for name, p in zip(names, parameters)}, (x,))
    x = random(2, 2, 3, 2, 3, device=device)
    check_gradients(function, (x, *(torch.randn_like(p).requires_grad_() for p in modules.parameters())))


def test_gradient_penalty_equals_torch(device):
    """Compares the gradients of a gradient's norm, as in the loss of a Wasserstein GAN."""
    results = []
    for library in (torch.nn, vt):
        torch.manual_seed(0)
        model = library.Sequential(library.Conv3d(1, 4, 3, padding=1), library.InstanceNorm3d(4, affine=True),
                                   torch.nn.LeakyReLU(0.2), library.ConvTranspose3d(4, 2, 2, stride=2),
                                   library.GroupNorm(2, 2), torch.nn.SiLU()).to(device, torch.float64)
        x = torch.randn(2, 1, 4, 5, 3, device=device, dtype=torch.float64, requires_grad=True)
        slope, = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        (slope.norm() - 1).square().backward()
        results.append([x.grad, *(p.grad for p in model.parameters())])
    for got, expected in zip(results[1], results[0]):
        assert_near(got, expected, 1e5, floor=max(g.abs().max().item() for g in results[0]))


# ---- tensors without data


def gradients_with_metadata(problem, operands):
    """Returns shape, strides, dtype and device of the result and of the gradients of the operands."""
    leaves = [t for t in operands if t is not None]
    y = problem(vF, *operands)
    found = [y, *torch.autograd.grad(y, leaves, torch.ones_like(y))]
    return [(t.shape, t.stride(), t.dtype, t.device.type) for t in found]


@pytest.mark.parametrize("mode", ["fake", "meta"])
def test_tensors_without_data_have_the_same_metadata(mode, device):
    for dtype in DTYPES:
        draw = problems(mode, dtype)
        for i in range(25):
            problem = Conv(draw, i % 2 == 0) if i % 3 else Norm(draw, i % 2 == 0)
            operands = [t if t is None else t.detach().requires_grad_() for t in problem.operands(dtype, device)]
            expected = gradients_with_metadata(problem, operands)
            if mode == "fake":
                with FakeTensorMode() as fake:
                    got = gradients_with_metadata(problem, [t if t is None else fake.from_tensor(t) for t in operands])
            else:
                expected = [(*e[:3], "meta") for e in expected]
                got = gradients_with_metadata(problem, [
                    t if t is None else torch.empty_strided(t.shape, t.stride(), dtype=dtype if t is operands[0] else
                                                            t.dtype, device="meta", requires_grad=True)
                    for t in operands])
            assert got == expected, f"{problem}"


# ---- autocast


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_gives_the_dtypes_and_values_of_torch(dtype, device):
    """Compares the dtypes of results and gradients with those of torch.nn, and the values with float64."""
    make = [lambda library: library.Conv3d(3, 4, 3, padding=1), lambda library: library.Conv2d(3, 4, 3, bias=False),
            lambda library: library.ConvTranspose3d(3, 4, 2), lambda library: library.ConvTranspose2d(3, 4, 2),
            lambda library: library.GroupNorm(3, 3), lambda library: library.InstanceNorm3d(3, affine=True),
            lambda library: library.InstanceNorm2d(3)]
    for maker in make:
        results = []
        for library in (torch.nn, vt):
            torch.manual_seed(0)
            module = maker(library).to(device)
            axes = 2 if "2d" in type(module).__name__ else 3
            for input_dtype in (torch.float32, dtype):
                x = torch.randn(2, 3, *[4, 6, 5][:axes], device=device).to(input_dtype).requires_grad_()
                with torch.autocast(device, dtype):
                    y = module(x)
                y.float().square().sum().backward()
                results.append([y, x.grad, *(p.grad for p in module.parameters())])
        for expected, got in zip(results[:2], results[2:]):
            for e, g in zip(expected, got):
                assert (g.dtype, g.shape) == (e.dtype, e.shape), type(module).__name__
                scale = max(t.abs().max().item() for t in expected)
                assert (g.float() - e.float()).abs().max() <= 4 * torch.finfo(dtype).eps * scale, type(module).__name__


def test_autocast_does_not_convert_float64(device):
    x, weight = (random(*size, device=device) for size in ((1, 2, 3, 3, 3), (2, 2, 3, 3, 3)))
    with torch.autocast(device, torch.bfloat16):
        y = vF.conv3d(x, weight)
    assert same_bits(y, vF.conv3d(x, weight))


def test_autocast_converts_fused_operations(device):
    model = network(device)
    x = torch.randn(2, 2, 6, 5, 4, device=device)
    with torch.autocast(device, torch.bfloat16):
        y = model(x)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    assert_near(y, network(device).double()(x.double()).detach(), 8)


# ---- compilation, export, transforms


def network(device, library=vt):
    """Returns a small network that uses every module, with and without fusion."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        library.Sequential(library.Conv3d(2, 4, 3, padding=1), library.InstanceNorm3d(4, affine=True),
                           torch.nn.LeakyReLU(0.1)),
        library.Sequential(library.ConvTranspose3d(4, 4, 2, stride=2), torch.nn.SiLU(), library.GroupNorm(2, 4)),
        library.Conv3d(4, 4, (1, 3, 3), stride=2, padding="valid", padding_mode="reflect", groups=2),
        torch.nn.Flatten(2, 3),
        library.InstanceNorm2d(4),
        library.Conv2d(4, 4, 3, padding="same", bias=False),
        library.ConvTranspose2d(4, 3, 3, padding=1),
    ).to(device)


def results_of(model, x):
    """Returns the result and the gradients of the input and the parameters."""
    x = x.detach().requires_grad_()
    parameters = list(model.parameters())
    y = model(x)
    return [y.detach(), *torch.autograd.grad(y.square().mean(), [x, *parameters], materialize_grads=True)]


def assert_equal_results(got, expected, factor=64):
    """Fails if tensors differ by more than `factor` rounding errors, relative to the largest element of all tensors."""
    largest = max(e.abs().max().item() for e in expected)
    for g, e in zip(got, expected, strict=True):
        assert_near(g, e.double(), factor, floor=largest)


@pytest.mark.parametrize("form", ["contiguous", "channels_last"])
def test_compiled_networks_equal_eager_networks(form, device):
    model = network(device)
    if form == "channels_last":
        for module in model.modules():
            if isinstance(module, (torch.nn.Conv3d, torch.nn.ConvTranspose3d)):
                module.to(memory_format=torch.channels_last_3d)
    x = in_form(torch.randn(2, 2, 6, 5, 4, device=device), form)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_equal_results(results_of(compiled, x), results_of(model, x))
    with torch.no_grad():
        assert_near(compiled(x), model(x).double(), 64)
    with torch.autocast(device, torch.bfloat16):
        assert_equal_results(results_of(compiled, x), results_of(model, x))


def test_compiled_networks_support_dynamic_sizes(device):
    model = network(device)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter, dynamic=True)
    counts = set()
    for size in ((3, 2, 6, 5, 4), (4, 2, 7, 9, 8), (5, 2, 10, 6, 7)):
        x = torch.randn(size, device=device)
        assert_equal_results(results_of(compiled, x), results_of(model, x))
        counts.add(counter.frame_count)
    assert len(counts) == 1, "a new size compiled the model again"


def test_compiled_functions_equal_eager_functions(device):
    """Compiles calls whose weights and options are arguments."""

    @torch.compile(fullgraph=True, backend="aot_eager")
    def function(x, weight, stride):
        y = vF.conv3d(x, weight, stride=stride, padding=(1, 0, 1))
        return vF.group_norm(vF.conv_transpose3d(y, weight, output_padding=0), 2)

    x, weight = random(1, 4, 6, 6, 6, device=device), random(4, 4, 3, 3, 3, device=device)
    for stride in (1, 2):
        y = vF.conv3d(x, weight, stride=stride, padding=(1, 0, 1))
        expected = vF.group_norm(vF.conv_transpose3d(y, weight), 2)
        assert_near(function(x, weight, stride).detach(), expected.detach(), 64)


def test_inductor_compiles_networks(device):
    if device == "cpu" and not shutil.which("g++"):
        pytest.skip("inductor needs g++ to compile for the CPU")
    model = vt.Sequential(vt.Conv3d(2, 4, 3, padding=1), vt.InstanceNorm3d(4, affine=True), torch.nn.LeakyReLU())
    model = model.to(device)
    x = torch.randn(1, 2, 6, 5, 4, device=device)
    assert_equal_results(results_of(torch.compile(model, fullgraph=True), x), results_of(model, x))


def test_exported_networks_can_be_saved_and_loaded(device):
    model = network(device)
    x = torch.randn(2, 2, 6, 5, 4, device=device)
    batch = torch.export.Dim("batch", min=1, max=16)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: batch},))
    targets = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert {"voxgrad.conv.default", "voxgrad.norm.default"} <= targets
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for n in (2, 3):
        x = torch.randn(n, 2, 6, 5, 4, device=device)
        with torch.no_grad():
            assert_near(loaded(x), model(x).double(), 64)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_does_not_change_results(use_reentrant, device):
    model = network(device)
    checkpointed = lambda x: torch.utils.checkpoint.checkpoint_sequential(model, 2, x, use_reentrant=use_reentrant)
    checkpointed.parameters = model.parameters
    x = torch.randn(2, 2, 6, 5, 4, device=device)
    found = []
    for function in (checkpointed, model):
        model.zero_grad()
        leaf = x.clone().requires_grad_()
        y = function(leaf)
        y.square().mean().backward()
        found.append([y, leaf.grad, *(p.grad for p in model.parameters())])
    assert all(map(same_bits, *found))


def test_functional_call_uses_the_given_parameters(device):
    model, other = network(device), network(device)
    with torch.no_grad():
        for p in other.parameters():
            p.normal_()
    x = torch.randn(1, 2, 6, 5, 4, device=device)
    y = torch.func.functional_call(model, dict(other.named_parameters()), (x,))
    assert same_bits(y, other(x))


def test_vmap_equals_a_loop_over_samples(device):
    weight = torch.randn(3, 2, 3, 3, 3, device=device)
    x = torch.randn(4, 2, 2, 5, 5, 5, device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns that vmap computes one slice after another
        y = torch.func.vmap(lambda x: vF.conv3d(x, weight))(x)
    for got, sample in zip(y, x):
        assert same_bits(got, vF.conv3d(sample, weight))


@pytest.mark.parametrize("grad_enabled", [False, True])
def test_forward_mode_differentiation_is_rejected(grad_enabled, device):
    """Without the check, the tangents would be lost silently."""
    x, weight = torch.randn(1, 2, 3, 3, 3, device=device), torch.randn(2, 2, 1, 1, 1, device=device)
    for function in (lambda x: vF.conv3d(x, weight), lambda x: vF.group_norm(x, 1), vF.instance_norm):
        with torch.set_grad_enabled(grad_enabled), torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
            with pytest.raises(NotImplementedError, match="jvp"):
                function(dual)
            assert function(x).shape == x.shape
        with pytest.raises(RuntimeError, match="functorch transforms"):
            torch.func.jvp(function, (x,), (x,))


def test_negative_views_are_resolved(device):
    """Uses the imaginary part of a conjugated tensor: the memory of such a tensor holds the negated values."""
    r = lambda *size: torch.randn(size, dtype=torch.complex64, device=device).conj().imag
    x, weight, bias = r(1, 2, 4, 4, 4), r(2, 2, 3, 3, 3), r(2)
    assert x.is_neg()
    plain = [t.resolve_neg() for t in (x, weight, bias)]
    for i in range(3):
        operands = [t if i == j else p for j, (t, p) in enumerate(zip((x, weight, bias), plain))]
        assert same_bits(vF.conv3d(*operands), vF.conv3d(*plain))
        assert same_bits(vF.group_norm(operands[0], 1, *r_like(operands[1:])), vF.group_norm(plain[0], 1, *r_like(
            plain[1:])))


def r_like(operands):
    """Returns the first elements of the weight, and the bias, as parameters of a norm with two channels."""
    return operands[0][:, 0, 0, 0, 0], operands[1]
