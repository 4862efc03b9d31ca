#!/usr/bin/env python3
"""Draws a bar chart of stored results as an SVG file.

    bench/chart.py [NAME ...]

Draws docs/img/NAME.svg from docs/data/NAME.csv (default: from each CSV file in docs/data). The first line of a CSV file
is "# " and the title of the chart. Other lines that begin with "#" are comments. The remaining lines are CSV: a header
with the columns "label" and "milliseconds", and one row per bar. Bars whose label begins with "voxgrad" are highlighted.
"""
import argparse
import csv
import pathlib
from xml.sax.saxutils import escape

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Lengths in pixels:
WIDTH = 560
LABELS = 200  # width of the column of labels
TOP = 44  # height of the title
BAR = 26  # height of a bar
GAP = 12  # distance between bars


def read(path):
    """Returns the title and a list of (label, milliseconds)."""
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = csv.DictReader(line for line in lines if line.strip() and not line.startswith("#"))
    return lines[0].lstrip("# "), [(row["label"], float(row["milliseconds"])) for row in rows]


def draw(title, results):
    """Returns the SVG text."""
    height = TOP + len(results) * (BAR + GAP) + 8
    scale = (WIDTH - LABELS - 64) / max(value for _, value in results)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
        ' font-family="Helvetica, Arial, sans-serif" font-size="16" fill="#22262b">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="8" y="24" font-weight="bold">{escape(title)}</text>',
    ]
    for i, (label, value) in enumerate(results):
        y = TOP + i * (BAR + GAP)
        middle = y + BAR / 2 + 6
        color = "#3a78b5" if label.startswith("voxgrad") else "#b4bac1"
        width = value * scale
        lines += [
            f'<text x="{LABELS - 12}" y="{middle:g}" text-anchor="end">{escape(label)}</text>',
            f'<rect x="{LABELS}" y="{y}" width="{width:.1f}" height="{BAR}" rx="3" fill="{color}"/>',
            f'<text x="{LABELS + width + 8:.1f}" y="{middle:g}">{value:g}</text>',
        ]
    return "\n".join(lines + ["</svg>"]) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    for name in parser.parse_args().names or sorted(path.stem for path in (ROOT / "docs/data").glob("*.csv")):
        title, results = read(ROOT / "docs/data" / f"{name}.csv")
        if not results:
            raise SystemExit(f"chart.py: docs/data/{name}.csv contains no results")
        (ROOT / "docs/img" / f"{name}.svg").write_text(draw(title, results), encoding="utf-8")


main()
