"""Tests of the Python package voxgrad_torch (examples/pytorch).

To run them from the root of the repository, after building the target voxgrad_c in build/cpu:

    export VOXGRAD_C_LIBRARY=$PWD/build/cpu/examples/pytorch/libvoxgrad_c.so PYTHONPATH=examples/pytorch
    python -m pytest tests/pytorch

With an installed package, neither variable is needed. The tests need PyTorch and pytest. Tests on a GPU run if PyTorch
finds a GPU and the library was built with CUDA. Tests of the networks of nnU-Net and MONAI run if
dynamic_network_architectures and monai are installed. VOXGRAD_TEST_SEED selects other random problems; the seed is
printed in the first lines.
"""

import pytest
import torch

import voxgrad_torch
from support import DEVICES, SEED


def pytest_report_header(config):
    library = "with CUDA" if voxgrad_torch.has_cuda else "without CUDA"
    return (f"voxgrad_torch: {voxgrad_torch.__version__} {library}, PyTorch {torch.__version__}, devices {DEVICES}, "
            f"VOXGRAD_TEST_SEED={SEED}")


def pytest_generate_tests(metafunc):
    if "device" in metafunc.fixturenames:
        metafunc.parametrize("device", DEVICES)


@pytest.fixture(autouse=True)
def settings():
    """Makes every test independent of the settings and random numbers of other tests."""
    threads = torch.get_num_threads()
    tf32 = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(SEED)
    torch._dynamo.reset()
    yield
    torch.backends.cudnn.allow_tf32 = tf32
    torch.set_num_threads(threads)
