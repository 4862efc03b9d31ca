#!/usr/bin/env python3
"""Checks that Shape.parse() of bench/conv_shapes.py reads what Shape.describe() writes, and rejects other texts."""
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "bench"))
import conv_shapes  # noqa: E402

WRONG = ("", "C 2x3", "X 1x2>3 4 k3", "C 1x2>3 4", "C 1x2>3 4 k3 q1", "C 1x2>3 4,5 k3", "C 1x2>3 4 k3 s2,1")

for problems in (*conv_shapes.SETS.values(), *(conv_shapes.race(seed, 60) for seed in range(5))):
    for shape in problems.values():
        parsed = conv_shapes.Shape.parse(shape.describe())
        same = all(conv_shapes.text(a) == conv_shapes.text(b) for a, b in zip(parsed[3:9], shape[3:9]))
        if not same or parsed[:3] != shape[:3] or parsed[9:] != shape[9:]:
            sys.exit(f"{shape.describe()} is read as {parsed}, expected {shape}")
for description in WRONG:
    try:
        sys.exit(f"'{description}' is read as {conv_shapes.Shape.parse(description)}, expected ValueError")
    except ValueError:
        pass
