#!/usr/bin/env python3
"""Draws a bar chart of stored results as an SVG file.

    bench/chart.py [CSV [SVG]]

CSV (default: docs/data/unet-step.csv) has lines "label,milliseconds" below a header; lines that begin with "#" are
comments. SVG is docs/img/unet-step.svg by default. Bars whose label begins with "voxgrad" are highlighted.
"""
import csv
import pathlib
import sys
from xml.sax.saxutils import escape

ROOT = pathlib.Path(__file__).resolve().parent.parent
TITLE = "Training step of nnU-Net's U-Net, milliseconds (less is better)"
WIDTH = 720
LABELS = 180  # width of the column of labels
TOP, BAR, GAP = 44, 26, 12


def read(path):
    """Returns [(label, milliseconds)]."""
    with open(path, encoding="utf-8", newline="") as file:
        rows = csv.DictReader(line for line in file if line.strip() and not line.startswith("#"))
        return [(row["label"], float(row["milliseconds"])) for row in rows]


def draw(results):
    """Returns the SVG text."""
    height = TOP + len(results) * (BAR + GAP) + 8
    scale = (WIDTH - LABELS - 80) / max(value for _, value in results)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
        ' font-family="Helvetica, Arial, sans-serif" font-size="14" fill="#22262b">',
        f"<title>{escape(TITLE)}</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="{LABELS}" y="24" font-weight="bold">{escape(TITLE)}</text>',
    ]
    for i, (label, value) in enumerate(results):
        y = TOP + i * (BAR + GAP)
        middle = y + BAR / 2 + 5
        color = "#3a78b5" if label.startswith("voxgrad") else "#b4bac1"
        width = value * scale
        lines += [
            f'<text x="{LABELS - 12}" y="{middle:g}" text-anchor="end">{escape(label)}</text>',
            f'<rect x="{LABELS}" y="{y}" width="{width:.1f}" height="{BAR}" rx="3" fill="{color}"/>',
            f'<text x="{LABELS + width + 8:.1f}" y="{middle:g}">{value:g}</text>',
        ]
    return "\n".join(lines + ["</svg>"]) + "\n"


def main():
    source = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs/data/unet-step.csv"
    target = pathlib.Path(sys.argv[2]) if len(sys.argv) > 2 else ROOT / "docs/img/unet-step.svg"
    results = read(source)
    if not results:
        sys.exit(f"chart.py: {source} contains no results")
    target.write_text(draw(results), encoding="utf-8")


main()
