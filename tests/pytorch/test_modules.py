"""Tests the modules: constructors, initial values, state_dict, fusion, copies, pickling and distributed training."""

import copy
import inspect
import io
import pickle
import sys

import pytest
import torch
from support import assert_near, channels_last, same_bits
from test_operators import assert_equal_results, network, results_of

import voxgrad_torch as vt

MODULES = [  # class, arguments, options, size of an input
    ("Conv3d", (4, 6, 3), {"padding": 1}, (2, 4, 5, 6, 7)),
    ("Conv3d", (4, 6, (1, 2, 3)), {"stride": (1, 2, 1), "dilation": 2, "groups": 2, "bias": False}, (2, 4, 7, 6, 7)),
    ("Conv3d", (4, 4, (3, 2, 4)), {"padding": "same", "groups": 4}, (4, 5, 6, 7)),
    ("Conv3d", (4, 6, 3), {"padding": "valid", "dtype": torch.float64}, (2, 4, 5, 6, 7)),
    ("Conv3d", (4, 6, 3), {"padding": (1, 2, 0), "padding_mode": "reflect"}, (2, 4, 5, 6, 7)),
    ("Conv3d", (4, 6, 3), {"padding": "same", "padding_mode": "circular"}, (2, 4, 5, 6, 7)),
    ("Conv2d", (4, 6, 3), {"padding": 1, "padding_mode": "replicate"}, (2, 4, 6, 7)),
    ("Conv2d", (4, 6, 3, 2, 1, 1, 2, False), {}, (2, 4, 6, 7)),
    ("ConvTranspose3d", (4, 6, 2, 2), {}, (2, 4, 3, 2, 4)),
    ("ConvTranspose3d", (4, 6, 3), {"stride": 2, "padding": 1, "output_padding": (1, 0, 1), "groups": 2},
     (2, 4, 3, 2, 4)),
    ("ConvTranspose3d", (4, 6, 3), {"bias": False, "dilation": 2}, (4, 3, 2, 4)),
    ("ConvTranspose2d", (4, 6, 3), {"stride": (3, 2)}, (2, 4, 3, 2)),
    ("GroupNorm", (2, 4), {"eps": 1e-3}, (2, 4, 5, 6, 7)),
    ("GroupNorm", (2, 4), {"affine": False}, (2, 4, 9)),
    ("InstanceNorm3d", (4,), {}, (2, 4, 5, 6, 7)),
    ("InstanceNorm3d", (4,), {"affine": True, "eps": 1e-3}, (4, 5, 6, 7)),
    ("InstanceNorm3d", (4,), {"affine": True, "track_running_stats": True}, (2, 4, 5, 6, 7)),
    ("InstanceNorm2d", (4,), {"affine": True}, (2, 4, 5, 6)),
]


def pair(name, arguments, options, device):
    """Returns a module of PyTorch and one of voxgrad_torch, created with the same random numbers."""
    modules = []
    for library in (torch.nn, vt):
        torch.manual_seed(1)
        modules.append(getattr(library, name)(*arguments, **options, device=device))
    return modules


@pytest.mark.parametrize("case", MODULES, ids=lambda case: f"{case[0]} {case[1]} {case[2]}")
def test_modules_equal_those_of_torch(case, device):
    """Compares signatures, texts and initial values. Then compares results and gradients before and after a
    load_state_dict()."""
    name, arguments, options, size = case
    reference, module = pair(name, arguments, options, device)
    assert inspect.signature(type(module)) == inspect.signature(type(reference))
    assert isinstance(module, type(reference)) and repr(module) == repr(reference)
    assert list(module.state_dict()) == list(reference.state_dict())
    assert all(map(same_bits, module.state_dict().values(), reference.state_dict().values()))
    dtype = options.get("dtype", torch.float32)
    for _ in range(2):
        x = torch.randn(size, dtype=dtype, device=device)
        assert_equal_results(results_of(module, x), results_of(reference, x))
        for p in reference.parameters():
            p.data.normal_()
        module.load_state_dict(reference.state_dict())
    module.eval(), reference.eval()
    assert_equal_results(results_of(module, x), results_of(reference, x))


def test_conv_transpose_accepts_output_size(device):
    reference, module = pair("ConvTranspose3d", (3, 2, 3), {"stride": 2}, device)
    x = torch.randn(1, 3, 4, 5, 2, device=device)
    for size in ((9, 12, 5), (10, 11, 6), (1, 2, 9, 11, 5)):
        assert_near(module(x, size).detach(), reference(x, output_size=size).detach().double(), 64)
    with pytest.raises(ValueError, match="requested an output size"):
        module(x, (20, 11, 5))


@pytest.mark.parametrize("name", ["Conv3d", "Conv2d", "ConvTranspose3d", "ConvTranspose2d", "GroupNorm",
                                  "InstanceNorm3d", "InstanceNorm2d"])
@pytest.mark.parametrize("weight_only", [False, True])
def test_channels_last_is_kept(weight_only, name, device):
    """A result is channels-last if the input or the weight is. Each gradient has the format of its tensor."""
    axes = 2 if "2d" in name else 3
    form = channels_last(axes)
    if weight_only and "Conv" not in name:
        pytest.skip("the weights of norms have no memory format")
    module = getattr(vt, name)(*{"C": (4, 6, 3), "G": (2, 4), "I": (4,)}[name[0]]).to(device)
    x = torch.randn(2, 4, *[5, 6, 7][:axes], device=device)
    if weight_only:
        module.to(memory_format=form)
    else:
        x = x.to(memory_format=form)
    x.requires_grad_()
    y = module(x)
    assert y.is_contiguous(memory_format=form)
    y.square().sum().backward()
    assert x.grad.is_contiguous(memory_format=torch.contiguous_format if weight_only else form)
    if "Conv" in name:
        assert module.weight.grad.is_contiguous(memory_format=form if weight_only else torch.contiguous_format)


# ---- fusion


def test_sequential_equals_separate_modules(device):
    x = torch.randn(2, 2, 6, 5, 4, device=device, dtype=torch.float64)
    models = [network(device, library).double() for library in (torch.nn, vt)]
    assert [type(m) for m in models[1].modules()] != [type(m) for m in models[0].modules()]
    assert_equal_results(*(results_of(model, x) for model in models), factor=1000)


def count_fused_calls(monkeypatch, model, x):
    calls = []
    original = vt.functional.conv_norm_activation
    monkeypatch.setattr(vt.functional, "conv_norm_activation", lambda *a: calls.append(a) or original(*a))
    model(x)
    return len(calls)


def test_sequential_fuses_only_supported_chains(device, monkeypatch):
    conv, norm, x = vt.Conv3d(2, 4, 3), vt.GroupNorm(2, 4), torch.randn(1, 2, 4, 4, 4, device=device)
    relu, count = torch.nn.ReLU(), lambda *m: count_fused_calls(monkeypatch, vt.Sequential(*m).to(device), x)
    assert count(conv, norm) == count(conv, norm, relu) == count(conv, relu, norm) == 1
    assert count(conv, norm, relu, vt.ConvTranspose3d(4, 2, 2), vt.InstanceNorm3d(2), torch.nn.GELU()) == 2
    assert count(conv) == count(conv, relu) == count(conv, torch.nn.PReLU(), norm) == 0
    assert count(conv, torch.nn.GroupNorm(2, 4)) == count(torch.nn.Conv3d(2, 4, 3), norm) == 0
    assert count(conv, vt.InstanceNorm3d(4, track_running_stats=True)) == 0
    assert count(conv, torch.nn.GELU(approximate="tanh"), norm) == 0


@pytest.mark.parametrize("index", [0, 1, 2])
def test_hooks_of_fusible_modules_run(index, device):
    model = vt.Sequential(vt.Conv3d(2, 4, 3), vt.GroupNorm(2, 4), torch.nn.ReLU()).to(device)
    x = torch.randn(1, 2, 4, 4, 4, device=device)
    expected = model(x)
    seen = []
    handle = model[index].register_forward_hook(lambda module, args, y: seen.append(y.shape))
    assert_near(model(x).detach(), expected.detach().double(), 64)
    assert seen == [expected.shape]
    handle.remove()
    assert same_bits(model(x), expected) and len(seen) == 1


# ---- copies


def clones(model):
    yield copy.deepcopy(model)
    yield pickle.loads(pickle.dumps(model))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    yield torch.load(file, weights_only=False)


def test_copies_give_equal_results_and_share_no_memory(device):
    model = network(device)
    x = torch.randn(2, 2, 6, 5, 4, device=device)
    expected = results_of(model, x)
    for clone in clones(model):
        assert [type(m) for m in clone.modules()] == [type(m) for m in model.modules()]
        assert all(map(same_bits, results_of(clone, x), expected))
        assert not {p.data_ptr() for p in clone.parameters()} & {p.data_ptr() for p in model.parameters()}


def test_training_with_an_optimizer_equals_torch(device):
    losses = []
    size = network(device)(torch.randn(2, 2, 6, 5, 4, device=device)).shape
    for library in (torch.nn, vt):
        model = network(device, library).double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        torch.manual_seed(2)
        x, target = (torch.randn(s, device=device, dtype=torch.float64) for s in ((2, 2, 6, 5, 4), size))
        losses.append([])
        for _ in range(10):
            optimizer.zero_grad()
            loss = (model(x) - target).square().mean()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-9) and losses[0][-1] < losses[0][0]


# ---- several processes


def train_replica(rank, folder, backend, library):
    """Trains a replica on one half of the batch, and saves its parameters and their gradients."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=2)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    model = network(device, sys.modules[library]).double()
    replica = torch.nn.parallel.DistributedDataParallel(model, device_ids=[rank] if backend == "nccl" else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(3)
    x = torch.randn(4, 2, 6, 5, 4, dtype=torch.float64)[2 * rank:2 * rank + 2].to(device)
    for _ in range(2):
        optimizer.zero_grad()
        replica(x).square().mean().backward()
        optimizer.step()
    torch.save([t.detach().cpu() for p in model.parameters() for t in (p, p.grad)], f"{folder}/{rank}")
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_distributed_data_parallel_equals_torch(backend, tmp_path):
    if not torch.distributed.is_available():
        pytest.skip("PyTorch was built without torch.distributed")
    if backend == "nccl" and (torch.cuda.device_count() < 2 or not vt.has_cuda):
        pytest.skip("needs two GPUs")
    found = []
    for library in ("torch.nn", "voxgrad_torch"):
        folder = tmp_path / library
        folder.mkdir()
        torch.multiprocessing.spawn(train_replica, (str(folder), backend, library), nprocs=2)
        found += [torch.load(folder / str(rank)) for rank in range(2)]
    assert all(map(same_bits, found[2], found[3]))  # the replicas agree
    assert_equal_results(found[2], found[0], factor=1000)
