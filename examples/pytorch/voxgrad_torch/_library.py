"""Loads the shared library and declares its functions (capi/voxgrad_c.h)."""

import ctypes
import os
import threading

import torch

_INTERFACE_VERSION = 2
_DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}


class Layout(ctypes.Structure):
    _fields_ = [("dtype", ctypes.c_int32), ("device", ctypes.c_int32), ("rank", ctypes.c_int32),
                ("reserved", ctypes.c_int32), ("size", ctypes.c_int64 * 5), ("stride", ctypes.c_int64 * 5)]


_ALLOCATE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
_DEALLOCATE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)


class Context(ctypes.Structure):
    _fields_ = [("stream", ctypes.c_void_p), ("threads", ctypes.c_int32), ("tf32", ctypes.c_int32),
                ("allocate", _ALLOCATE), ("deallocate", _DEALLOCATE), ("user", ctypes.c_void_p)]


class ConvGeometry(ctypes.Structure):
    _fields_ = [("stride", ctypes.c_int64 * 3), ("padding", ctypes.c_int64 * 3), ("dilation", ctypes.c_int64 * 3),
                ("groups", ctypes.c_int64)]


class NormOptions(ctypes.Structure):
    _fields_ = [("groups", ctypes.c_int64), ("eps", ctypes.c_double), ("before", ctypes.c_int32),
                ("after", ctypes.c_int32), ("before_slope", ctypes.c_double), ("after_slope", ctypes.c_double)]


def _load(path):
    library = ctypes.CDLL(path)
    if library.voxgrad_c_version() != _INTERFACE_VERSION:
        raise ImportError(f"voxgrad_torch: {path} has version {library.voxgrad_c_version()} of the C interface, "
                          f"expected {_INTERFACE_VERSION}")
    if not library.voxgrad_supports_cpu():
        raise ImportError(f"voxgrad_torch: {path} was compiled for instructions that this processor does not have; "
                          "build voxgrad_torch on this machine instead")
    library.voxgrad_error.restype = library.voxgrad_version.restype = ctypes.c_char_p
    pointer = ctypes.c_void_p
    # Addresses are passed as integers, which is faster than objects of ctypes.
    for name, arguments in (("conv_forward", 10), ("conv_transpose", 10), ("conv_weight", 8), ("conv_bias", 5),
                            ("norm_forward", 10), ("norm_backward", 15)):
        getattr(library, "voxgrad_" + name).argtypes = [pointer] * arguments
    return library


class _ThreadState(threading.local):
    """The context of this thread, and the exception of its allocator callback, if any."""

    def __init__(self):
        self.error = None
        self.context = Context(allocate=_allocate, deallocate=_deallocate)
        self.address = ctypes.addressof(self.context)


@_ALLOCATE
def _allocate(_user, size, device, stream):
    try:
        return torch.cuda.caching_allocator_alloc(size, device, stream or 0)
    except BaseException as error:  # an exception cannot pass through the library
        _state.error = error
        return None


@_DEALLOCATE
def _deallocate(_user, data, _device, _stream):
    torch.cuda.caching_allocator_delete(data)


path = os.environ.get("VOXGRAD_C_LIBRARY") or os.path.join(os.path.dirname(__file__), "libvoxgrad_c.so")
library = _load(path)
has_cuda = bool(library.voxgrad_has_cuda())
version = library.voxgrad_version().decode()
_state = _ThreadState()


def make_layout(tensor, device):
    """Returns the Layout of a tensor with 1 or 5 axes. If `tensor` is a meta tensor, the layout is for `device`."""
    device = device if tensor.is_meta else tensor.device
    if tensor.dtype not in _DTYPES:
        raise RuntimeError(f"voxgrad_torch: expected float32, float64, bfloat16 or float16, got {tensor.dtype}")
    if device.type not in ("cpu", "cuda"):
        raise RuntimeError(f"voxgrad_torch: expected a tensor on cpu or cuda, got {device}")
    if device.type == "cuda" and not has_cuda:
        raise RuntimeError("voxgrad_torch was built without CUDA and cannot compute on a GPU")
    return Layout(_DTYPES[tensor.dtype], -1 if device.type == "cpu" else device.index, tensor.dim(), 0,
                  (ctypes.c_int64 * 5)(*tensor.shape), (ctypes.c_int64 * 5)(*tensor.stride()))


def _allows_tf32():
    """Returns whether PyTorch's convolutions use TF32."""
    return torch._C._get_fp32_precision_getter("cuda", "conv") == "tf32"


if not hasattr(torch._C, "_get_fp32_precision_getter"):  # before PyTorch 2.9
    def _allows_tf32():
        return torch.backends.cudnn.allow_tf32


def context(device):
    """Returns the address of this thread's Context, set to PyTorch's current settings.

    `device` is the index of the GPU, or -1 for the CPU.
    """
    context = _state.context
    if device < 0:
        context.threads = torch.get_num_threads()
    else:
        context.stream = torch._C._cuda_getCurrentRawStream(device)
        context.tf32 = _allows_tf32()
    return _state.address


def call(function, *arguments):
    """Calls a function of the library. If the function fails, raises the exception that PyTorch would raise."""
    code = function(*arguments)
    if code:
        _raise(code)


def _raise(code):
    error, _state.error = _state.error, None
    if error is not None:
        raise error
    message = "voxgrad: " + library.voxgrad_error().decode()
    raise torch.OutOfMemoryError(message) if code == 2 and "cuda" in message else RuntimeError(message)
