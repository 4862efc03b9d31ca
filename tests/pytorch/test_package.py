"""Checks the installed package: symbols of its library, order of imports, command line, and use from CMake.

These tests are skipped if voxgrad_torch is not installed. ./run test-pytorch builds and installs it.
"""

import importlib.metadata
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support import run_python

import voxgrad_torch
from voxgrad_torch import _library

try:
    DISTRIBUTION = importlib.metadata.distribution("voxgrad_torch")
except importlib.metadata.PackageNotFoundError:
    pytest.skip("voxgrad_torch is not installed", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = _library.path

LOAD = f"import ctypes; ctypes.CDLL({LIBRARY!r})"
USE = """
import ctypes
import torch
import voxgrad_torch
from voxgrad_torch._library import Context, Layout, call, library

x, weight = torch.randn(2, 3, 5, 6, 7), torch.randn(4, 3, 3, 3, 3)
torch.testing.assert_close(voxgrad_torch.functional.conv3d(x, weight), torch.nn.functional.conv3d(x, weight),
                           rtol=1e-4, atol=1e-4)
# Both libraries print the numbers in their messages by iostreams, which fails if their copies of libstdc++ mix.
table = Layout(dtype=0, device=-1, rank=2)
try:
    call(library.voxgrad_conv_bias, ctypes.addressof(Context()), *(ctypes.addressof(table), 0) * 2)
except RuntimeError as error:
    print(error)
try:
    torch.zeros(17).expand(2, 19)
except RuntimeError as error:
    print(error)
print(torch.__config__.show())
"""


def output(*command, **options):
    """Returns the output of a command. Fails if the command fails."""
    result = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=300, check=False,
                            **options)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def needs(program):
    return pytest.mark.skipif(shutil.which(program) is None, reason=f"{program} was not found")


@needs("nm")
def test_library_exports_only_the_c_interface():
    symbols = {line.split()[-1] for line in output("nm", "-D", "--defined-only", LIBRARY).splitlines()}
    header = (ROOT / "examples/pytorch/capi/voxgrad_c.h").read_text(encoding="utf-8")
    assert symbols == set(re.findall(r"^VOXGRAD_API .*?(voxgrad_\w+)\(", header, re.MULTILINE))


@needs("readelf")
def test_library_needs_only_glibc():
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", output("readelf", "-d", LIBRARY))
    glibc = {"libc", "libm", "libdl", "libpthread", "librt", "ld"}
    assert needed and {re.sub(r"[-.].*", "", name) for name in needed} <= glibc


@pytest.mark.parametrize("first", ["import torch", LOAD], ids=["torch", "voxgrad"])
def test_torch_and_voxgrad_can_be_imported_in_either_order(first):
    text = run_python(first + "\n" + USE)
    assert "must have 1 or 5 axes, got 2" in text, text
    assert "(19) must match the existing size (17)" in text, text
    assert "PyTorch built with" in text, text


def test_metadata_names_the_version_of_the_project():
    project = (ROOT / "CMakeLists.txt").read_text(encoding="utf-8")
    version = re.search(r"^project\(voxgrad VERSION ([0-9.]+)", project, re.MULTILINE)[1]
    assert DISTRIBUTION.version == voxgrad_torch.__version__ == version
    tags = re.findall(r"^Tag: (.*)", DISTRIBUTION.read_text("WHEEL"), re.MULTILINE)
    assert tags and all(re.fullmatch(r"py3-none-(many)?linux\w*", tag) for tag in tags), tags


def test_command_line_checks_the_package_and_prints_paths(tmp_path):
    module = (sys.executable, "-m", "voxgrad_torch")
    assert "cpu: a convolution" in output(*module, cwd=tmp_path)
    assert output(*module, "--version", cwd=tmp_path).strip() == voxgrad_torch.__version__
    include = Path(output(*module, "--include-dir", cwd=tmp_path).strip())
    assert (include / "voxgrad.h").is_file()
    assert not list(include.rglob("detail"))


@needs("cmake")
@pytest.mark.parametrize("variable", ["CMAKE_PREFIX_PATH", "voxgrad_DIR"])
def test_cmake_finds_the_package_and_builds_a_consumer(variable, tmp_path):
    folder = output(sys.executable, "-m", "voxgrad_torch", "--cmake-dir", cwd=tmp_path).strip()
    output("cmake", "-S", ROOT / "tests/consumer", "-B", tmp_path, f"-D{variable}={folder}")
    cache = (tmp_path / "CMakeCache.txt").read_text(encoding="utf-8")
    assert re.search(r"^voxgrad_DIR:\w+=(.*)", cache, re.MULTILINE)[1] == folder
    if variable == "voxgrad_DIR":  # both variables select the same folder, so one build is enough
        output("cmake", "--build", tmp_path, "--target", "consumer")
        assert f"voxgrad {voxgrad_torch.__version__}, loss" in output(tmp_path / "consumer", cwd=tmp_path)
