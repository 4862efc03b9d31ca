"""Reads a safetensors file with Python's standard library and prints its metadata and tensors, one per line.

    python3 read_safetensors.py FILE

Fails if the file violates the format or its recommendations, such as aligned elements.
"""
import argparse
import json
import math
import struct

SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "U8": 1, "BOOL": 1}
CODES = {"F64": "d", "F32": "f", "F16": "e", "I64": "q", "I32": "i", "U8": "B", "BOOL": "B"}


def unique(pairs):
    assert len(dict(pairs)) == len(pairs), "a key is repeated"
    return dict(pairs)


def elements(dtype, data):
    if dtype == "BF16":  # bf16 is the upper half of a float32
        data = b"".join(b"\0\0" + data[i : i + 2] for i in range(0, len(data), 2))
        dtype = "F32"
    return struct.unpack(f"<{len(data) // SIZES[dtype]}{CODES[dtype]}", data)


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("file")
with open(parser.parse_args().file, "rb") as file:
    content = file.read()
(length,) = struct.unpack("<Q", content[:8])
assert 2 <= length <= min(100_000_000, len(content) - 8), f"the header length {length} is invalid"
assert length % 8 == 0, "the elements are not aligned"
text = content[8 : 8 + length].decode("utf-8")
assert text[0] == "{" and text.rstrip(" ")[-1] == "}", "the header is not an object padded with spaces"
header = json.loads(text, object_pairs_hook=unique)
data = content[8 + length :]

for key, value in sorted(header.pop("__metadata__", {}).items()):
    assert isinstance(value, str), "metadata must be strings"
    print(f"{key}={value}")
at = 0
for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
    assert set(entry) == {"dtype", "shape", "data_offsets"}, f"{name} has the keys {set(entry)}"
    begin, end = entry["data_offsets"]
    assert begin == at, f"{name} begins at {begin}, the previous tensor ends at {at}"
    assert end - begin == SIZES[entry["dtype"]] * math.prod(entry["shape"]), f"{name} has {end - begin} bytes"
    assert begin % SIZES[entry["dtype"]] == 0, f"{name} is not aligned"
    at = end
assert at == len(data), f"{len(data) - at} bytes follow the last tensor"
for name, entry in sorted(header.items()):
    begin, end = entry["data_offsets"]
    values = " ".join("%.9g" % value for value in elements(entry["dtype"], data[begin:end]))
    print(name, entry["dtype"], entry["shape"], values)
