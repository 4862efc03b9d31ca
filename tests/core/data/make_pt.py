"""Writes the checkpoints that pt_test.cpp reads:

    python3 make_pt.py

The script needs PyTorch and NumPy. dtypes.pt has a tensor of each dtype of voxgrad. unsupported.pt has tensors
that voxgrad cannot load. views.pt has tensors that share storages, empty tensors and scalars. values_2.pt to values_5.pt
have values of all kinds, written with pickle protocols 2 to 5. module.pt is a whole module. cycle.pt is a list that
contains itself. legacy.pt has the format of PyTorch before version 1.6. script.pt has the files of a TorchScript
archive.
"""
import collections
import pathlib
import zipfile

import numpy
import torch

FOLDER = pathlib.Path(__file__).parent


def save(name, value, **options):
    torch.save(value, FOLDER / name, **options)


def save_dtypes():
    dtypes = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8]
    values = {str(dtype)[6:]: torch.tensor([[0, 1, 2], [3, 100, 5]]).to(dtype) for dtype in dtypes}
    values["bool"] = torch.tensor([[True, False, True], [False, False, True]])
    save("dtypes.pt", values)
    save("unsupported.pt", {
        "int16": torch.ones(2, dtype=torch.int16),
        "complex64": torch.ones(2, dtype=torch.complex64),
        "uint16": torch.ones(2, dtype=torch.uint16),
        "float8": torch.ones(2).to(torch.float8_e4m3fn),
        "negated": torch.ones(2, dtype=torch.complex64).conj().imag,
        "axes": torch.ones(1, 1, 1, 1, 1, 1, 1, 1, 2),
        "float32": torch.ones(2),
    })


def save_views():
    base = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4)
    parameter = torch.nn.Parameter(torch.tensor([1.5, 2.5]))
    save("views.pt", {
        "base": base,
        "same": base,
        "transposed": base.transpose(0, 2),
        "part": base[1, 1:, ::2],
        "expanded": base[0, 0, :1].expand(3, 4),
        "channels_last": torch.arange(16, dtype=torch.float32).reshape(1, 2, 2, 2, 2).to(
            memory_format=torch.channels_last_3d),
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 3),
        "parameter": parameter,
        "list": [parameter, (base[0], torch.ones(1))],
    })


def save_values():
    shared = [1, "two"]
    values = collections.OrderedDict([
        ("none", None),
        ("bools", [True, False]),
        ("integers", [0, 255, 65535, -1, 2**31, -2**63, 2**63 - 1, 2**63]),
        ("numbers", (0.1, float("inf"), -1e300)),
        ("text", "r\u00e9sum\u00e9 \U0001f600"),
        ("long text", "x" * 300),
        ("bytes", b"\x00\x7f\x80\xff"),
        ("nested", {"a": [{"b": (torch.ones(1), [])}, {}], 3: torch.zeros(2), (1, 2): "tuple key"}),
        ("shared", [shared, shared]),
        ("size", torch.Size([2, 3])),
        ("device", torch.device("cuda:1")),
        ("cpu", torch.device("cpu")),
        ("dtype", torch.float16),
        ("numpy", [numpy.float64(0.25), numpy.float32(0.5), numpy.float16(1.5), numpy.int64(-5), numpy.int8(-7),
                   numpy.uint8(200), numpy.uint64(2**64 - 1), numpy.bool_(True), numpy.str_("text")]),
        ("array", numpy.arange(3)),
        ("set", {1, 2}),
        ("object", pathlib.PurePosixPath("a/b")),
        ("state", torch.nn.Linear(2, 1).state_dict()),
    ])
    for protocol in range(2, 6):
        save(f"values_{protocol}.pt", values, pickle_protocol=protocol)


def save_others():
    save("module.pt", torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU()))
    cycle = [torch.ones(2)]
    cycle.append(cycle)
    save("cycle.pt", cycle)
    save("legacy.pt", {"x": torch.ones(2)}, _use_new_zipfile_serialization=False)
    with zipfile.ZipFile(FOLDER / "script.pt", "w") as archive:
        archive.writestr("script/data.pkl", b"\x80\x02N.")
        archive.writestr("script/constants.pkl", b"\x80\x02N.")


torch.manual_seed(0)
save_dtypes()
save_views()
save_values()
save_others()
