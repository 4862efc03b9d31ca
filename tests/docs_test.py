#!/usr/bin/env python3
"""Checks that the C++ code in the documentation occurs in programs that the build compiles and the tests run.

    tests/docs_test.py

Each ```cpp block of the PAGES must occur in one of the SOURCES, line by line. Only the indentation of the whole block
may differ. Prints the position of each block that does not occur. The exit status is 1 if there is such a block, or if
the pages have no blocks.
"""
import pathlib
import sys
import textwrap

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = ("README.md", "docs/tutorial.md", "docs/pitfalls.md", "docs/distributed.md")
SOURCES = ("examples/quickstart.cpp", "examples/tutorial/*.cpp")


def blocks(page):
    """Yields (line number, lines) for each ```cpp block of a page."""
    start, lines = 0, []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if start and line.strip() == "```":
            yield start, lines
            start = 0
        elif start:
            lines.append(line.rstrip())
        elif line.strip() == "```cpp":
            start, lines = number, []


def dedented(lines):
    """Removes the indentation that all lines share."""
    return textwrap.dedent("\n".join(lines)).splitlines()


def occurs(block, source):
    """Returns true if consecutive lines of the source equal the lines of the block, up to a common indentation."""
    wanted = dedented(block)
    return any(dedented(source[i:i + len(wanted)]) == wanted for i in range(len(source) - len(wanted) + 1))


def main():
    paths = [path for pattern in SOURCES for path in sorted(ROOT.glob(pattern))]
    sources = [[line.rstrip() for line in path.read_text(encoding="utf-8").splitlines()] for path in paths]
    found, faults = 0, 0
    for name in PAGES:
        for number, block in blocks(ROOT / name):
            found += 1
            if not block or not any(occurs(block, source) for source in sources):
                print(f"{name}:{number}: this block does not occur in {', '.join(SOURCES)}")
                faults += 1
    print(f"{found} blocks, {faults} of them do not occur in the sources")
    return 1 if faults or not found else 0


sys.exit(main())
