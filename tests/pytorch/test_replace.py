"""Tests replace_modules() on small models and on the networks of nnU-Net and MONAI."""

import pytest
import torch
from support import same_bits
from test_operators import assert_equal_results, results_of

import voxgrad_torch as vt

TORCH_TYPES = {getattr(torch.nn, name): getattr(vt, name) for name in vt.__all__ if hasattr(torch.nn, name)}


def plain_conv_unet():
    unet = pytest.importorskip("dynamic_network_architectures.architectures.unet")
    return unet.PlainConvUNet(
        1, 3, [4, 8, 8], torch.nn.Conv3d, 3, [1, 2, (1, 2, 2)], 2, 3, 2, True, torch.nn.InstanceNorm3d,
        {"eps": 1e-2, "affine": True}, nonlin=torch.nn.LeakyReLU, nonlin_kwargs={"inplace": True},
        deep_supervision=False), (2, 1, 8, 8, 12)


def residual_encoder_unet():
    unet = pytest.importorskip("dynamic_network_architectures.architectures.unet")
    return unet.ResidualEncoderUNet(
        1, 3, [4, 8, 8], torch.nn.Conv2d, 3, [1, 2, 2], 2, 3, 1, True, torch.nn.InstanceNorm2d,
        {"eps": 1e-2, "affine": True}, nonlin=torch.nn.LeakyReLU, nonlin_kwargs={"inplace": True},
        deep_supervision=False), (2, 1, 8, 12)


def monai_unet():
    nets = pytest.importorskip("monai.networks.nets")
    return nets.UNet(3, 1, 2, (4, 8, 8), (2, 2), num_res_units=2), (2, 1, 8, 8, 12)


def monai_seg_res_net():
    nets = pytest.importorskip("monai.networks.nets")
    return nets.SegResNet(3, 8, 1, 2, blocks_down=(1, 2), blocks_up=(1,)), (2, 1, 8, 8, 12)


@pytest.mark.parametrize("make", [plain_conv_unet, residual_encoder_unet, monai_unet, monai_seg_res_net])
def test_networks_keep_their_results_and_state(make, device):
    """Compares a network before and after its modules are replaced, and after the replacement is reverted."""
    torch.manual_seed(0)
    model, size = make()
    model = model.to(device, torch.float64)
    x = torch.randn(size, device=device, dtype=torch.float64)
    expected, state, types = results_of(model, x), list(model.state_dict()), list(map(type, model.modules()))
    with vt.replaced_modules(model) as report:
        assert not report.left
        assert report.replaced == {n: type(m).__name__ for n, m in model.named_modules() if type(m) in
                                   TORCH_TYPES.values()}
        assert not any(type(m) in TORCH_TYPES for m in model.modules())
        assert list(model.state_dict()) == state
        assert_equal_results(results_of(model, x), expected, factor=1e5)
        compiled = torch.compile(model, backend="aot_eager")
        with torch.no_grad():
            assert_equal_results([compiled(x)], expected[:1], factor=1e5)
        with torch.autocast(device, torch.bfloat16):
            results_of(model.float(), x.float())
        model.double()
    assert list(map(type, model.modules())) == types
    assert all(map(same_bits, results_of(model, x), expected)) or device == "cuda"


class Subclass(torch.nn.Conv3d):
    pass


def example():
    model = torch.nn.ModuleDict({
        "conv": torch.nn.Conv3d(2, 2, 3), "flat": torch.nn.Conv1d(2, 2, 3), "subclass": Subclass(2, 2, 3),
        "batch": torch.nn.BatchNorm3d(2), "running": torch.nn.InstanceNorm3d(2, track_running_stats=True),
        "patched": torch.nn.GroupNorm(1, 2), "complex": torch.nn.Conv3d(2, 2, 1, dtype=torch.complex64),
        "chain": torch.nn.Sequential(torch.nn.ConvTranspose2d(2, 2, 2), torch.nn.InstanceNorm2d(2)),
        "linear": torch.nn.Linear(2, 2)})
    model["patched"].forward = lambda x: x
    return model


def test_report_names_the_modules_left_and_the_reasons():
    model = example()
    report = vt.replace_modules(model)
    assert report.replaced == {"conv": "Conv3d", "chain": "Sequential", "chain.0": "ConvTranspose2d",
                               "chain.1": "InstanceNorm2d"}
    assert report.left == {
        "flat": "Conv1d has no replacement", "subclass": "Subclass has no replacement",
        "batch": "BatchNorm3d has no replacement", "running": "it has running statistics",
        "patched": "its forward was replaced", "complex": "its parameters are torch.complex64"}
    assert str(report).splitlines()[0] == "replaced 4 modules, left 6"
    assert "  flat: Conv1d has no replacement" in str(report).splitlines()
    again = vt.replace_modules(model)
    assert not again.replaced and again.left == report.left


def test_modules_keep_their_identity():
    model = example()
    modules, parameters = list(model.modules()), list(model.parameters())
    seen = []
    handle = model["conv"].register_forward_hook(lambda *_: seen.append(1))
    vt.replace_modules(model)
    assert all(a is b for a, b in zip(model.modules(), modules, strict=True))
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    model["conv"](torch.randn(1, 2, 3, 3, 3))
    handle.remove()
    assert seen == [1]


def test_restore_modules_reverts_the_types():
    model = example()
    types = list(map(type, model.modules()))
    vt.replace_modules(model)
    vt.restore_modules(model)
    assert list(map(type, model.modules())) == types


def test_replaced_modules_reverts_after_an_exception_and_keeps_earlier_replacements():
    model = example()
    vt.replace_modules(model["chain"])
    types = list(map(type, model.modules()))
    with pytest.raises(KeyError), vt.replaced_modules(model) as report:
        assert report.replaced == {"conv": "Conv3d"} and type(model["conv"]) is vt.Conv3d
        raise KeyError
    assert list(map(type, model.modules())) == types and type(model["chain"][0]) is vt.ConvTranspose2d


def test_the_root_module_can_be_replaced(device):
    model = torch.nn.Conv3d(2, 3, 3).to(device)
    x = torch.randn(1, 2, 4, 4, 4, device=device)
    expected = results_of(model, x)
    assert vt.replace_modules(model).replaced == {"": "Conv3d"}
    assert type(model) is vt.Conv3d
    assert_equal_results(results_of(model, x), expected)
