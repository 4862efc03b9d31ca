#!/usr/bin/env python3
"""Writes the first inputs of the fuzz targets: small valid files, states and messages, and values at the limits.

    tests/fuzz/make_corpus.py [FOLDER]

FOLDER is tests/fuzz/corpus by default. The files depend only on this script, tests/core/data and tests/examples/nnunet.
Other files in FOLDER remain; tests/fuzz/fuzz.py --keep adds inputs that it has found.
"""
import argparse
import gzip
import json
import pathlib
import pickle
import struct

TESTS = pathlib.Path(__file__).resolve().parent.parent
HELLO, CALLS = 0, 3  # kinds of frames, as in nn/distributed/detail/connection.h
FORMATS = {"F32": "f", "F64": "d", "I64": "q", "I32": "i", "U8": "B", "BOOL": "?", "F16": "e"}


def safetensors(tensors, metadata=None):
    """Returns a safetensors file. `tensors` maps each name to (dtype, shape, list of elements)."""
    header, data = {}, b""
    if metadata:
        header["__metadata__"] = metadata
    for name, (dtype, shape, values) in tensors.items():
        item = struct.pack(f"<{len(values)}{FORMATS[dtype]}", *values)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(item)]}
        data += item
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def scalars(**values):
    kinds = {bool: "BOOL", int: "I64", float: "F64"}
    return {name: (kinds[type(value)], [], [value]) for name, value in values.items()}


def prefixed(prefix, tensors):
    return {prefix + name: tensor for name, tensor in tensors.items()}


def npy(descr, shape, data, fortran=False, version=1):
    text = f"{{'descr': '{descr}', 'fortran_order': {fortran}, 'shape': {shape!r}, }}\n".encode()
    length = struct.pack("<H" if version == 1 else "<I", len(text))
    return b"\x93NUMPY" + bytes([version, 0]) + length + text + data


def nifti(dims, code, bits, data, order="<", sform=0, qform=0, slope=1.0, offset=352):
    header = bytearray(352)
    put = lambda at, form, *values: struct.pack_into(order + form, header, at, *values)
    put(0, "i", 348)
    put(40, "8h", len(dims), *(dims + [1] * (7 - len(dims))))
    put(70, "2h", code, bits)
    put(76, "8f", 1, 1.5, 2, 3, 1, 1, 1, 1)
    put(108, "3f", offset, slope, 0.5)
    header[123] = 2
    put(252, "2h", qform, sform)
    put(256, "6f", 0.5, 0.5, 0.5, -10, 20, 30)
    put(280, "12f", 1, 0, 0, 5, 0, 2, 0, 6, 0, 0, 3, 7)
    header[344:348] = b"n+1\0"
    return bytes(header) + data


def loader_state(name, epoch, batch, seed, batch_size, samples, drop_last):
    return {"sampler": ("U8", [len(name)], list(name.encode())),
            **scalars(epoch=epoch, batch=batch, seed=seed, batch_size=batch_size, samples=samples, drop_last=drop_last)}


def scaler_state(scale=65536.0, growth=2.0, backoff=0.5, interval=2000, tracker=0):
    return {"class.GradScaler": ("I64", [], [1]),
            **scalars(scale=scale, growth_factor=growth, backoff_factor=backoff, growth_interval=interval,
                      growth_tracker=tracker)}


def checkpoint_state(steps, lr=0.1, epoch=0):
    model = {"0.weight": ("F32", [2, 2], [0.1, 0.2, 0.3, 0.4]), "0.bias": ("F32", [2], [0, 1]),
             "1.weight": ("F32", [2], [1, 1]), "1.bias": ("F32", [2], [0, 0])}
    buffers = {"1.running_mean": ("F32", [2], [0, 0]), "1.running_var": ("F32", [2], [1, 1]),
               "1.num_batches_tracked": ("I64", [], [steps])}
    adam = {"class.Adam": ("I64", [], [1]), "param_groups.0.params": ("I64", [4], [0, 1, 2, 3]),
            **prefixed("param_groups.0.", scalars(lr=lr, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0,
                                                  amsgrad=False, maximize=False))}
    for i, (dtype, shape, values) in enumerate(model.values()):
        if steps > 0:
            adam.update(prefixed(f"state.{i}.", {"step": ("I64", [], [steps]), "exp_avg": (dtype, shape, values),
                                                 "exp_avg_sq": (dtype, shape, [1] * len(values))}))
    average = {"class.ExponentialMovingAverage": ("I64", [], [1]), **prefixed("values.", model | buffers),
               **scalars(updates=steps, decay=0.999, warmup=0.0)}
    schedule = {"class.CosineAnnealingLR": ("I64", [], [1]), "initial_lr.0": ("F64", [], [lr]), **scalars(steps=steps)}
    return {**prefixed("model.", model | buffers), **prefixed("optimizer.", adam), **prefixed("schedule.", schedule),
            **prefixed("loader.", loader_state("RandomSampler(seed 0)", epoch, 1, 0, 4, 10, False)),
            **prefixed("generator.", scalars(seed=5, offset=steps)), **prefixed("scaler.", scaler_state()),
            **prefixed("average.", average), **scalars(step=steps)}


def frame(kind, number, text):
    return struct.pack("<qqq", 0x766F7867726164 + kind, number, len(text)) + text


def call(signature, description):
    return struct.pack("<QQ", *signature) + description + b"\n"


def inputs():
    """Returns a dict that maps each target to a dict from the names of its inputs to their bytes."""
    f32 = ("F32", [2, 3], [1, 2, 3, 4, 5, 6])
    floats = struct.pack("<6f", 1, 2, 3, 4, 5, 6)
    image = nifti([2, 3, 4], 4, 16, struct.pack("<24h", *range(24)))
    models = sorted((TESTS / "examples/nnunet").glob("*/model"))
    large = 1 << 62
    return {
        "safetensors": {
            "dtypes": safetensors({"f": f32, "d": ("F64", [1], [2]), "l": ("I64", [2], [3, 4]), "i": ("I32", [], [5]),
                                   "h": ("F16", [2], [6, 7]), "u": ("U8", [3], [8, 9, 10]),
                                   "b": ("BOOL", [2], [True, False])}, {"key": "value", "\u00fc": "\n"}),
            "empty": safetensors({}), "none": safetensors({"n": ("F32", [0, 4], [])}),
            "large_number": b"\x17\0\0\0\0\0\0\0" + b'{"a":{"shape":[1E9999]}}',
            "deep": struct.pack("<Q", 150) + b'{"a":' + b"[" * 144 + b"}"},
        "npy": {
            "f4": npy("<f4", (2, 3), floats), "fortran": npy("<f4", (3, 2), floats, True),
            "big_endian": npy(">i8", (2,), bytes(16)), "u1": npy("|u1", (2, 2, 2), bytes(8), version=2),
            "b1": npy("|b1", (3,), b"\0\1\1", version=3), "scalar": npy("<f8", (), bytes(8)),
            "f2": npy("<f2", (0, 5), b""), "huge": npy("<f4", (large, 4), b"")},
        "nifti": {
            "i16": image, "packed": gzip.compress(image, mtime=0),
            "f32": nifti([3, 2], 16, 32, floats, sform=1), "u8": nifti([2, 2, 1, 2], 2, 8, bytes(8), qform=1),
            "big_endian": nifti([2], 64, 64, struct.pack(">2d", 1, 2), order=">", slope=2.0),
            "i64": nifti([2], 1024, 64, struct.pack("<2q", 1, -1))},
        "gzip": {
            "text": gzip.compress(b"voxgrad " * 20, mtime=0), "empty": gzip.compress(b"", mtime=0),
            "stored": gzip.compress(bytes(range(100)), 0, mtime=0), "plain": b"not packed",
            "two": gzip.compress(b"one", mtime=0) + gzip.compress(b"two", mtime=0)},
        "pth": {
            **{path.name: path.read_bytes() for path in sorted((TESTS / "core/data").glob("values_[25].pt"))},
            **{f"pickle_{protocol}": pickle.dumps({"a": [1, 2.5, None, True, b"x", (1 << 70)], 3: {"b": ("c", -4)}},
                                                  protocol) for protocol in (1, 2, 4, 5)}},
        "dataset_json": {path.parent.name: (path / "dataset.json").read_bytes() for path in models} | {
            "large_number": b'{"labels": {"a": 1E999}}', "deep": b"[" * 100, "twice": b'{"a": 1, "a": 2}'},
        "plans_json": {path.parent.name: json.dumps(json.loads((path / "plans.json").read_text()),
                                                    separators=(",", ":")).encode() for path in models},
        "checkpoint": {
            "new": safetensors(checkpoint_state(0)), "trained": safetensors(checkpoint_state(7)),
            "limits": safetensors(checkpoint_state(large, 1e308, large)),
            "above": safetensors(checkpoint_state((1 << 63) - 1, float("nan"), -1))},
        "loader": {
            "random": safetensors(loader_state("RandomSampler(seed 3)", 2, 1, 3, 3, 10, False)),
            "sequential": safetensors(
                loader_state("SequentialSampler", large, (1 << 52) // 3 - 2, 0, 3, 1 << 52, True)),
            "distributed": safetensors(
                loader_state("DistributedSampler(RandomSampler(seed 3), batch 4)", 0, 3, 0, 4, 12, False)),
            "above": safetensors(loader_state("RandomSampler(seed 3)", (1 << 63) - 1, -1, 3, 3, 10, False))},
        "scaler": {
            "new": safetensors(scaler_state()), "tracker": safetensors(scaler_state(interval=5, tracker=4)),
            "limits": safetensors(scaler_state(2.0**126, 1e300, 1e-300, large, large - 1)),
            "above": safetensors(scaler_state(float("nan"), -1.0, 2.0, -1, (1 << 63) - 1))},
        "hello": {
            "rank": frame(HELLO, 1 << 32 | 2, b"token\nhost"), "no_token": frame(HELLO, 3 << 32 | 4, b"\nhost"),
            "negative": frame(HELLO, -1, b"token"), "escapes": frame(HELLO, 1 << 32 | 2, b"t\n\x1b[2J\xff\r"),
            "other": frame(CALLS, 0, b""), "two": 2 * frame(HELLO, 1 << 32 | 2, b"token\nhost")},
        "calls": {
            "same": 2 * frame(CALLS, 2, call((1, 0), b"all_reduce (sum) of [3] f32") + call((2, 0), b"broadcast")),
            "differ": frame(CALLS, 1, call((1, 0), b"all_reduce (sum) of [3] f32"))
                      + frame(CALLS, 1, call((2, 0), b"all_reduce (max) of [3] f32")),
            "messages": frame(CALLS, 1, call((1, 5), b"send_receive"))
                        + frame(CALLS, 1, call((1, (1 << 64) - 5), b"x")),
            "truncated": frame(CALLS, 1, call((1, 0), b"all_gather of [4]")[:-5]), "empty": frame(CALLS, 0, b"")},
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=pathlib.Path, default=TESTS / "fuzz/corpus")
    folder = parser.parse_args().folder
    for target, files in inputs().items():
        (folder / target).mkdir(parents=True, exist_ok=True)
        for name, contents in files.items():
            (folder / target / name).write_bytes(contents)


if __name__ == "__main__":
    main()
