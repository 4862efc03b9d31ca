"""Tests how calls of the library use PyTorch's settings, memory, threads and streams, and how they report errors."""

import gc
import threading
import weakref

import pytest
import torch
from support import DEVICES, FORMS, assert_near, in_form, run_python, same_bits
from test_operators import assert_equal_results, network, results_of

import voxgrad_torch as vt
from voxgrad_torch import _library, ops
from voxgrad_torch import functional as vF

needs_gpu = pytest.mark.skipif("cuda" not in DEVICES, reason="needs a GPU and a library with CUDA")


# ---- loading


def test_import_fails_if_the_library_is_missing():
    code = """
try:
    import voxgrad_torch
except OSError as error:
    print(error)
"""
    assert "/missing/libvoxgrad_c.so" in run_python(code, VOXGRAD_C_LIBRARY="/missing/libvoxgrad_c.so")


def test_library_is_loaded_before_and_after_numpy():
    for order in ("voxgrad_torch, numpy, torch", "torch, numpy, voxgrad_torch"):
        code = f"import {order}\nprint(voxgrad_torch.functional.conv3d(*[torch.ones(1, 1, 1, 1, 1)] * 2).item())"
        assert run_python(code) == "1.0\n"


# ---- errors


@pytest.mark.parametrize("call, message", [
    (lambda r: vF.conv3d(r(1, 3, 4, 4, 4), r(2, 4, 3, 3, 3)), "conv3d: weight expects 4 input channels, input has 3"),
    (lambda r: vF.conv3d(r(1, 3, 4, 4, 4), r(2, 3, 5, 3, 3)), "the result would have 0 elements along spatial axis 0"),
    (lambda r: vF.conv3d(r(1, 4, 4, 4, 4), r(3, 2, 1, 1, 1), groups=2), "groups does not divide the channels"),
    (lambda r: vF.conv3d(r(1, 3, 4, 4, 4), r(2, 3, 1, 1, 1), r(3)), r"bias must have shape \[2\], got \[3\]"),
    (lambda r: vF.conv3d(r(3, 4, 4), r(2, 3, 1, 1, 1)), "expected an input of 5 axes, or 4 without a batch"),
    (lambda r: vF.conv3d(r(1, 3, 4, 4, 4), r(2, 3, 1, 1, 1), stride=0), "stride, dilation or padding is out of range"),
    (lambda r: vF.conv3d(r(1, 3, 4, 4, 4), r(2, 3, 1, 1, 1), stride=(1, 2)), "stride must be an integer or have 3"),
    (lambda r: vF.conv3d(r(1, 3, 4, 4, 4), r(2, 3, 1, 1, 1).double()), "weight is torch.float64 on .*, input is"),
    (lambda r: vF.conv3d(r(1, 3, 4, 4, 4).int(), r(2, 3, 1, 1, 1).int()), "expected float32, .* got torch.int32"),
    (lambda r: vF.conv3d(r(1, 3, 4, 4, 4), r(2, 3, 1, 1, 1).to("meta")), "weight is .* on meta"),
    (lambda r: vF.conv_transpose3d(r(1, 3, 4, 4, 4), r(3, 2, 1, 1, 1), output_padding=1), "output_padding must be"),
    (lambda r: vF.group_norm(r(1, 3, 4, 4, 4), 2), "num_groups 2 does not divide the channels"),
    (lambda r: vF.group_norm(r(1, 4, 4, 4, 4), 2, r(3)), r"expected a weight of shape \[4\]"),
    (lambda r: vF.group_norm(r(1, 4, 4, 4, 4), 2, r(4).double()), "expected a weight of .* got .*float64"),
])
def test_wrong_arguments_raise_errors_at_every_call(call, message, device):
    for _ in range(2):  # a call that failed must not leave a plan
        with pytest.raises(RuntimeError, match=message):
            call(lambda *size: torch.zeros(size, device=device))


def test_single_values_cannot_be_normalized(device):
    for call in (lambda: vF.group_norm(torch.zeros(1, 2, 1, 1, 1, device=device), 2),
                 lambda: vF.instance_norm(torch.zeros(2, 2, 1, 1, device=device))):
        with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
            call()


def test_errors_of_the_library_have_its_message(device):
    x, weight = torch.zeros(1, 2, 4, 4, 4, device=device), torch.zeros(3, 2, 1, 1, 1, device=device)
    for dtype in (torch.float32, torch.float64):
        with pytest.raises(RuntimeError, match="voxgrad: conv_forward: y must have 1 to 4 elements along axis 4"):
            torch.ops.voxgrad.conv(x.to(dtype), weight.to(dtype), None, [4, 4, 5], [1] * 3, [0] * 3, [1] * 3, 1, False)
    with pytest.raises(RuntimeError, match="voxgrad: conv_forward: weight is f64 on .*, x is f32"):
        torch.ops.voxgrad.conv(x, weight.double(), None, [4, 4, 4], [1] * 3, [0] * 3, [1] * 3, 1, False)


def test_exception_of_the_allocator_is_raised(monkeypatch):
    """Calls the allocator as the library does."""
    monkeypatch.setattr(torch.cuda, "caching_allocator_alloc", lambda *_: 1 / 0)
    fails = lambda: 0 if _library._allocate(None, 8, 0, None) else 2
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            _library.call(fails)
    with pytest.raises(RuntimeError, match="voxgrad"):  # the exception is not raised again
        _library.call(lambda: 1)
    assert not isinstance(pytest.raises(RuntimeError, _library.call, lambda: 2).value, ZeroDivisionError)


@needs_gpu
def test_exceptions_of_the_allocator_pass_through_the_library(monkeypatch):
    class Interrupt(BaseException):
        pass

    def interrupt(*_):
        raise Interrupt

    x = torch.randn(2, 4, 5, 6, 7, device="cuda", requires_grad=True)
    expected = results_of(vt.GroupNorm(2, 4).cuda(), x)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "caching_allocator_alloc", interrupt)
        with pytest.raises(Interrupt):
            vF.group_norm(x, 2)
    assert all(map(same_bits, results_of(vt.GroupNorm(2, 4).cuda(), x), expected))


@needs_gpu
def test_calls_succeed_after_running_out_of_memory(monkeypatch):
    """The first call requests more memory than a GPU has. The second call must succeed."""
    x = torch.randn(2, 4, 5, 6, 7, device="cuda")
    expected = vF.group_norm(x, 2)
    original = torch.cuda.caching_allocator_alloc
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "caching_allocator_alloc", lambda size, *rest: original(1 << 50, *rest))
        with pytest.raises(torch.OutOfMemoryError):
            vF.group_norm(x, 2)
    assert same_bits(vF.group_norm(x, 2), expected)


# ---- settings


@needs_gpu
@pytest.mark.parametrize("allowed", [False, True])
def test_allow_tf32_selects_the_precision(allowed):
    torch.backends.cudnn.allow_tf32 = allowed
    x, weight = torch.randn(1, 64, 12, 12, 12, device="cuda"), torch.randn(64, 64, 3, 3, 3, device="cuda")
    expected = torch.nn.functional.conv3d(x.double(), weight.double(), padding=1)
    error = (vF.conv3d(x, weight, padding=1).double() - expected).abs().max() / expected.abs().max()
    assert 2e-5 < error < 2e-3 if allowed else error < 2e-6


def test_allow_tf32_is_read_at_every_call():
    for allowed in (True, False, True):
        torch.backends.cudnn.allow_tf32 = allowed
        assert bool(_library._allows_tf32()) == allowed


def test_library_uses_as_many_threads_as_torch():
    """The library computes with as many threads as PyTorch, and the results do not depend on this number."""
    code = """
import os, torch, voxgrad_torch as vt
torch.set_num_threads(1)
torch.manual_seed(0)
x, model = torch.randn(2, 16, 16, 16, 16), vt.Conv3d(16, 16, 3)
def run(threads):
    torch.set_num_threads(threads)
    y = model(x)
    grads = torch.autograd.grad(y.square().sum(), model.parameters())
    return [y, *grads]
with torch.no_grad():
    before = len(os.listdir("/proc/self/task"))
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        y = model(x)
        print(len(os.listdir("/proc/self/task")) - before, end=" ")
torch.set_num_threads(1)
results = [run(threads) for threads in (1, 4)]
print(all(map(torch.equal, *results)))
"""
    assert run_python(code).split() == ["0", "1", "3", "True"]


def test_deterministic_mode_does_not_change_results(device):
    """In deterministic mode, PyTorch fills results with NaN before the library writes them."""
    model = vt.Sequential(vt.Conv3d(2, 4, 3), vt.GroupNorm(2, 4), torch.nn.GELU(), vt.ConvTranspose3d(4, 3, 2, 2),
                          vt.InstanceNorm3d(3)).to(device)
    x = torch.randn(2, 2, 6, 5, 4, device=device)
    expected = results_of(model, x)
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(3):
            assert all(map(same_bits, results_of(model, x), expected))
        for form in FORMS:
            y = vF.group_norm(vF.conv3d(in_form(x, form), torch.ones(4, 2, 2, 2, 2, device=device), stride=2), 2)
            assert torch.isfinite(y).all()
    finally:
        torch.use_deterministic_algorithms(False)


def test_inference_mode_does_not_change_results(device):
    model = network(device)
    x = torch.randn(2, 2, 6, 5, 4, device=device)
    expected = model(x)
    with torch.inference_mode():
        y = model(x)
    assert y.is_inference() and same_bits(y, expected)


# ---- memory


def test_graph_keeps_only_what_the_backward_pass_needs(device):
    x = torch.randn(1, 2, 4, 4, 4, device=device)
    weight = torch.randn(2, 2, 1, 1, 1, device=device)
    for x_needs, weight_needs in ((True, False), (False, True)):
        operands = [t.clone().requires_grad_(n) for t, n in ((x, x_needs), (weight, weight_needs))]
        y = vF.conv3d(operands[0] * 1, operands[1] * 1)  # saved tensors, not leaves
        saved = [t is not None for t in y.grad_fn.saved_tensors]
        assert saved == [weight_needs, x_needs]
        y.sum().backward()
        assert operands[0 if x_needs else 1].grad is not None


def test_results_are_freed(device):
    model, x = network(device), torch.randn(2, 2, 6, 5, 4, device=device)
    y = model(x)
    references = [weakref.ref(y), weakref.ref(y.grad_fn)]
    y.sum().backward()
    del y
    gc.collect()
    assert all(r() is None for r in references)


def test_cache_of_plans_is_bounded(monkeypatch, device):
    monkeypatch.setattr(ops, "_MAX_PLANS", 8)
    weight = torch.randn(2, 2, 1, 1, 1, device=device, requires_grad=True)
    for n in range(1, 40):
        x = torch.randn(1, 2, n, 1, 2, device=device)
        y = vF.group_norm(vF.conv3d(x, weight), 1)
        y.sum().backward()
        assert len(ops._plans) <= 8 and len(vF._plans) <= 8


def test_results_may_change_in_place(device):
    """nnU-Net applies an activation in place after the norm. Changing a saved tensor is an error, as in PyTorch."""
    x = torch.randn(1, 2, 4, 4, 4, device=device, requires_grad=True)
    torch.nn.functional.leaky_relu_(vF.group_norm(x * 1, 2)).sum().backward()
    z = x * 1
    y = vF.group_norm(z, 2)
    z.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_saved_tensors_hooks_receive_the_saved_tensors(device):
    model = network(device)
    x = torch.randn(2, 2, 6, 5, 4, device=device)
    expected = results_of(model, x)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.shape) or t.cpu(), lambda t: t.to(device)):
        assert all(map(same_bits, results_of(model, x), expected))
    assert packed


# ---- threads, streams and graphs


def test_two_threads_do_not_disturb_each_other(device):
    """Each thread has its own settings, plans and errors."""
    model = network(device)
    inputs = [torch.randn(n, 2, 6, 5, 4, device=device) for n in (1, 2, 3)]
    expected = [results_of(model, x) for x in inputs]
    failures = []

    def work(number):
        try:
            for i in range(20):
                n = (i + number) % 3
                assert all(map(same_bits, results_of(model, inputs[n]), expected[n]))
                with pytest.raises(RuntimeError, match=f"along axis {2 + number}"):
                    size = [5 if axis == number else 4 for axis in range(3)]
                    torch.ops.voxgrad.conv(torch.zeros(1, 1, 4, 4, 4, device=device), torch.ones(
                        1, 1, 1, 1, 1, device=device), None, size, [1] * 3, [0] * 3, [1] * 3, 1, False)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures, failures


@needs_gpu
def test_two_streams_do_not_disturb_each_other():
    """Work on different streams overlaps in time, and scratch memory of one stream is not reused by the other."""
    model = network("cuda")
    inputs = [torch.randn(4, 2, 24, 24, 24, device="cuda") for _ in range(2)]
    expected = [results_of(model, x) for x in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    found = [[], []]
    for _ in range(10):
        for n, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found[n].append(results_of(model, inputs[n]))
    torch.cuda.synchronize()
    for n in range(2):
        for results in found[n]:
            assert all(map(same_bits, results, expected[n]))


@needs_gpu
def test_calls_run_on_the_current_stream():
    x, weight = torch.ones(1, 1, 64, 64, 64, device="cuda"), torch.ones(1, 1, 1, 1, 1, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        x.fill_(2)
        y = vF.conv3d(x, weight)
        assert not stream.query()  # the call did not wait
    torch.cuda.current_stream().wait_stream(stream)
    assert (y == 2).all()


@needs_gpu
@pytest.mark.parametrize("autocast", [False, True])
def test_replays_of_a_cuda_graph_equal_eager_calls(autocast):
    """Captures a forward and a backward pass, and replays them with different inputs."""
    model = network("cuda")
    static = torch.randn(2, 2, 6, 5, 4, device="cuda")

    def step():
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast, cache_enabled=False):
            return results_of(model, static)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(3):
        static.normal_()
        graph.replay()
        assert all(map(same_bits, captured, step()))


@needs_gpu
def test_make_graphed_callables_accepts_networks():
    model, x = network("cuda"), torch.randn(2, 2, 6, 5, 4, device="cuda", requires_grad=True)
    expected = results_of(model, x)
    graphed = torch.cuda.make_graphed_callables(model, (x,))
    assert_equal_results(results_of(graphed, x), expected)


@pytest.mark.skipif(len(DEVICES) < 2 or torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_networks_run_on_the_second_gpu():
    model = network("cuda:1")
    x = torch.randn(2, 2, 6, 5, 4)
    with torch.no_grad():
        assert_near(model(x.to("cuda:1")).cpu(), network("cpu").double()(x.double()), 64)
    with pytest.raises(RuntimeError, match="weight is .* on cuda:1, input is .* on cuda:0"):
        model(x.cuda())
