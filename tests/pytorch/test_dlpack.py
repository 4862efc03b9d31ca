"""Shares memory between voxgrad, NumPy and PyTorch through DLPack capsules, in both directions.

To run this file from the root of the repository, after building the target dlpack_library in build/cpu:

    export DLPACK_LIBRARY=$PWD/build/cpu/tests/libdlpack_library.so
    python -m pytest --noconftest tests/pytorch/test_dlpack.py

The tests need NumPy 2.1 or newer. Tests of PyTorch run if PyTorch is installed. Tests on a GPU run if PyTorch finds a
GPU and the library was built with CUDA.
"""

import ctypes
import gc
import inspect
import os
import sys

import pytest

np = pytest.importorskip("numpy", "2.1")
try:
    import torch
except ImportError:
    torch = None

if "DLPACK_LIBRARY" not in os.environ:
    pytest.skip("DLPACK_LIBRARY is not set", allow_module_level=True)

needs_torch = pytest.mark.skipif(torch is None, reason="PyTorch is not installed")


def _load():
    library = ctypes.CDLL(os.environ["DLPACK_LIBRARY"])
    pointer, text, number = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int
    for name, result, arguments in (
            ("last_error", text, []), ("has_cuda", number, []), ("live_bytes", ctypes.c_int64, [number]),
            ("create", pointer, [text, number, number, pointer]), ("transpose", pointer, [pointer]),
            ("destroy", None, [pointer]), ("require_grad", None, [pointer]), ("describe", text, [pointer]),
            ("get", ctypes.c_double, [pointer, pointer]), ("set", None, [pointer, pointer, ctypes.c_double]),
            ("synchronize", None, [pointer]), ("export_versioned", pointer, [pointer]),
            ("export_unversioned", pointer, [pointer]), ("import_versioned", pointer, [pointer]),
            ("import_unversioned", pointer, [pointer])):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


lib = _load()
_api = ctypes.pythonapi
_api.PyCapsule_New.restype = ctypes.py_object
_api.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_api.PyCapsule_GetPointer.restype = ctypes.c_void_p
_api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_api.PyCapsule_IsValid.argtypes = [ctypes.py_object, ctypes.c_char_p]
_api.PyCapsule_SetName.argtypes = [ctypes.py_object, ctypes.c_char_p]


def numbers(values):
    return (ctypes.c_int64 * len(values))(*values)


def checked(result):
    if not result:
        raise BufferError(lib.last_error().decode())
    return result


class Tensor:
    """A tensor of voxgrad with the methods that the array API standard requires of a producer of DLPack capsules."""

    def __init__(self, address):
        self.address = checked(address)

    def __del__(self):
        if hasattr(self, "address"):
            lib.destroy(self.address)

    @staticmethod
    def create(dtype, shape, cuda=False):
        return Tensor(lib.create(dtype.encode(), cuda, len(shape), numbers(shape)))

    @staticmethod
    def from_dlpack(producer, **options):
        """Returns a tensor that shares the memory of an array or tensor, as numpy.from_dlpack does."""
        capsule = producer.__dlpack__(**options)
        versioned = _api.PyCapsule_IsValid(capsule, b"dltensor_versioned")
        name = b"dltensor_versioned" if versioned else b"dltensor"
        managed = _api.PyCapsule_GetPointer(capsule, name)
        _api.PyCapsule_SetName(capsule, _USED[name])  # from here on, voxgrad owns `managed`
        return Tensor(lib.import_versioned(managed) if versioned else lib.import_unversioned(managed))

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        del stream, dl_device, copy
        if max_version is not None and max_version[0] >= 1:
            return _api.PyCapsule_New(checked(lib.export_versioned(self.address)), b"dltensor_versioned", None)
        return _api.PyCapsule_New(checked(lib.export_unversioned(self.address)), b"dltensor", None)

    def __dlpack_device__(self):
        return (2, 0) if "cuda" in str(self) else (1, 0)

    def transpose(self):
        return Tensor(lib.transpose(self.address))

    def __getitem__(self, index):
        return lib.get(self.address, numbers(index))

    def __setitem__(self, index, value):
        lib.set(self.address, numbers(index), value)

    def __str__(self):
        return lib.describe(self.address).decode()


_USED = {b"dltensor": b"used_dltensor", b"dltensor_versioned": b"used_dltensor_versioned"}


class Unversioned:
    """A producer that supports only capsules without a version, like libraries before DLPack 1.0."""

    def __init__(self, producer):
        self.producer = producer

    def __dlpack__(self, *, stream=None):
        return self.producer.__dlpack__() if stream is None else self.producer.__dlpack__(stream=stream)

    def __dlpack_device__(self):
        return self.producer.__dlpack_device__()


def producers(source):
    """Returns the producer itself, which creates versioned capsules, and a producer of unversioned capsules."""
    return [source, Unversioned(source)]


NUMPY_DTYPES = {"f32": "float32", "f64": "float64", "f16": "float16", "i64": "int64", "i32": "int32", "u8": "uint8",
                "bool": "bool"}
TORCH_DTYPES = {**NUMPY_DTYPES, "bf16": "bfloat16"}
NEW = {"max_version": (1, 0)}  # requests a versioned capsule


# ---- from voxgrad to NumPy and PyTorch


@pytest.mark.parametrize("name", NUMPY_DTYPES)
def test_numpy_shares_memory_of_voxgrad(name):
    x = Tensor.create(name, [2, 3])
    for producer in producers(x):
        a = np.from_dlpack(producer)
        assert a.dtype == NUMPY_DTYPES[name] and a.shape == (2, 3)
        assert a.tolist() == np.arange(6).reshape(2, 3).astype(a.dtype).tolist()
        x[1, 2] = 1
        x[0, 0] = 0
        assert a[1, 2] == 1 and a[0, 0] == 0
        if a.flags.writeable:  # NumPy makes arrays of unversioned capsules read-only
            a[0, 0] = 1
            assert x[0, 0] == 1
        x[1, 2] = 5
        x[0, 0] = 0
    assert np.from_dlpack(x).flags.writeable


@needs_torch
@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_torch_shares_memory_of_voxgrad(name):
    x = Tensor.create(name, [2, 3])
    for producer in producers(x):
        t = torch.from_dlpack(producer)
        assert t.dtype == getattr(torch, TORCH_DTYPES[name]) and t.shape == (2, 3)
        assert torch.equal(t, torch.arange(6).reshape(2, 3).to(t.dtype))
        x[1, 2] = 0
        assert t[1, 2] == 0
        t[0, 0] = 1
        assert x[0, 0] == 1
        x[1, 2] = 5
        x[0, 0] = 0


@pytest.mark.parametrize("shape", [[], [0], [2, 0, 3], [1], [1, 2, 1, 2, 1, 2, 1, 2]])
def test_scalars_empty_tensors_and_8_axes_are_shared(shape):
    x = Tensor.create("f32", shape)
    for producer in producers(x):
        a = np.from_dlpack(producer)
        assert a.shape == tuple(shape) and a.ravel().tolist() == list(range(a.size))
        if torch is not None:
            t = torch.from_dlpack(producer)
            assert list(t.shape) == shape and t.flatten().tolist() == list(range(a.size))


def test_strided_views_of_voxgrad_keep_their_strides():
    x = Tensor.create("i32", [2, 3, 4])
    view = x.transpose()
    a = np.from_dlpack(view)
    assert a.shape == (3, 2, 4) and a.strides == (16, 48, 4)
    assert (a == np.arange(24).reshape(2, 3, 4).transpose(1, 0, 2)).all()
    a[2, 1, 3] = 100
    assert x[1, 2, 3] == view[2, 1, 3] == 100
    if torch is not None:
        assert torch.from_dlpack(view).stride() == (4, 12, 1)


def test_arrays_keep_memory_of_voxgrad_alive():
    before = lib.live_bytes(0)
    x = Tensor.create("f64", [1000])
    assert lib.live_bytes(0) >= before + 8000
    arrays = [np.from_dlpack(p) for p in producers(x)]
    if torch is not None:
        arrays += [torch.from_dlpack(p) for p in producers(x)]
    del x
    while arrays:
        assert arrays[-1][999] == 999
        assert lib.live_bytes(0) >= before + 8000
        arrays.pop()
        gc.collect()
    assert lib.live_bytes(0) == before


def test_voxgrad_rejects_tensors_that_require_a_gradient():
    x = Tensor.create("f32", [2])
    lib.require_grad(x.address)
    for producer in producers(x):
        with pytest.raises(BufferError, match="requires a gradient; export x.detach"):
            np.from_dlpack(producer)


# ---- from NumPy and PyTorch to voxgrad


@pytest.mark.parametrize("options", [{}, NEW], ids=["unversioned", "versioned"])
@pytest.mark.parametrize("name", NUMPY_DTYPES)
def test_voxgrad_shares_memory_of_numpy(name, options):
    a = np.arange(6).reshape(2, 3).astype(NUMPY_DTYPES[name])
    x = Tensor.from_dlpack(a, **options)
    assert str(x) == f"[2, 3] {name} on cpu strides [3, 1]"
    assert [x[i, j] for i in range(2) for j in range(3)] == a.astype(float).ravel().tolist()
    x[1, 2] = 0
    assert a[1, 2] == 0
    a[0, 0] = 1
    assert x[0, 0] == 1


@needs_torch
@pytest.mark.parametrize("options", [{}, NEW], ids=["unversioned", "versioned"])
@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_voxgrad_shares_memory_of_torch(name, options):
    if options and "max_version" not in inspect.signature(torch.Tensor.__dlpack__).parameters:
        pytest.skip("this version of PyTorch has no versioned capsules")
    t = torch.arange(6).reshape(2, 3).to(getattr(torch, TORCH_DTYPES[name]))
    x = Tensor.from_dlpack(t, **options)
    assert str(x) == f"[2, 3] {name} on cpu strides [3, 1]"
    assert [x[i, j] for i in range(2) for j in range(3)] == t.double().flatten().tolist()
    x[1, 2] = 0
    assert t[1, 2] == 0
    t[0, 0] = 1
    assert x[0, 0] == 1


def test_views_of_numpy_keep_their_strides():
    whole = np.arange(24, dtype="f4").reshape(4, 6)
    x = Tensor.from_dlpack(whole[1:3, ::2].T, **NEW)
    assert str(x) == "[3, 2] f32 on cpu strides [2, 6]"
    x[2, 1] = -1
    assert whole[2, 4] == -1
    assert str(Tensor.from_dlpack(np.array(3.0), **NEW)) == "[] f64 on cpu strides []"
    assert str(Tensor.from_dlpack(np.zeros((2, 0)), **NEW)).startswith("[2, 0] f64 on cpu")
    assert Tensor.from_dlpack(np.full((1, 2), 3.0)[::-1], **NEW)[0, 1] == 3


@needs_torch
def test_channels_last_of_torch_is_kept():
    t = torch.rand(2, 3, 4, 5, 6).contiguous(memory_format=torch.channels_last_3d)
    x = Tensor.from_dlpack(t)
    assert str(x) == "[2, 3, 4, 5, 6] f32 on cpu strides [360, 1, 90, 18, 3]"
    assert x[1, 2, 3, 4, 5] == t[1, 2, 3, 4, 5].item()
    back = torch.from_dlpack(x)
    assert back.data_ptr() == t.data_ptr() and back.stride() == t.stride()


def test_voxgrad_keeps_arrays_alive_and_releases_them():
    a = np.arange(6.0)
    references = sys.getrefcount(a)
    for options in ({}, NEW):
        x = Tensor.from_dlpack(a, **options)
        assert sys.getrefcount(a) == references + 1
        del x
        assert sys.getrefcount(a) == references
    x = Tensor.from_dlpack(np.arange(1000.0), **NEW)
    assert x[(999,)] == 999
    b = np.from_dlpack(x)
    del x
    assert b[999] == 999


@pytest.mark.parametrize("options", [{}, NEW], ids=["unversioned", "versioned"])
@pytest.mark.parametrize("array, message", [
    (np.zeros(2, "i2"), "dtype with code = 0, bits = 16 and lanes = 1 is not supported"),
    (np.zeros(2, "c8"), "dtype with code = 5, bits = 64 and lanes = 1 is not supported"),
    (np.arange(4.0)[::-1], "axis 0 of shape .4. has stride -1; expected 0 to"),
    (np.zeros([1] * 9), "expected 0 to 8 axes, got 9"),
])
def test_voxgrad_releases_arrays_that_it_rejects(array, message, options):
    references = sys.getrefcount(array)
    with pytest.raises(BufferError, match=message):
        Tensor.from_dlpack(array, **options)
    assert sys.getrefcount(array) == references


def test_voxgrad_rejects_read_only_arrays():
    for array in (np.broadcast_to(np.zeros(1), (4,)), np.frombuffer(b"1234", np.uint8)):
        references = sys.getrefcount(array)
        with pytest.raises(BufferError, match="the memory is read-only; pass a copy"):
            Tensor.from_dlpack(array, **NEW)
        assert sys.getrefcount(array) == references


# ---- GPUs


@needs_torch
@pytest.mark.skipif(torch is None or not torch.cuda.is_available() or not lib.has_cuda(), reason="needs a GPU")
def test_memory_of_a_gpu_is_shared_both_ways():
    t = torch.arange(6.0, device="cuda").reshape(2, 3)
    torch.cuda.synchronize()
    x = Tensor.from_dlpack(t)
    assert str(x) == "[2, 3] f32 on cuda:0 strides [3, 1]"
    x[1, 2] = -1
    lib.synchronize(x.address)
    assert t[1, 2] == -1

    y = Tensor.create("bf16", [2, 3], cuda=True)
    lib.synchronize(y.address)
    u = torch.from_dlpack(y)
    assert u.device == torch.device("cuda", 0) and u.dtype == torch.bfloat16
    u[0, 1] = 7
    torch.cuda.synchronize()
    assert y[0, 1] == 7
