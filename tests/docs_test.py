#!/usr/bin/env python3
"""Checks that the C++ code in the documentation occurs in programs that the build compiles and the tests run. Also
checks that each test that docs/reliability.md names exists.

    tests/docs_test.py

Each ```cpp block of the PAGES must occur in one of the SOURCES, line by line. Only the indentation of the whole block
may differ. Prints the position of each block that does not occur, and each test that does not exist. The exit status is
1 if there is such a block or test, or if the pages have no blocks.
"""
import pathlib
import re
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


def missing_tests():
    """Returns the names of tests, such as Suite.Test, in docs/reliability.md that no file of tests/ defines."""
    page = (ROOT / "docs/reliability.md").read_text(encoding="utf-8")
    named = re.findall(r"`([A-Z]\w+)\.([A-Z]\w+)`", page)
    sources = "".join(path.read_text(encoding="utf-8") for path in ROOT.glob("tests/*/*.cpp"))
    defined = set(re.findall(r"^TEST\w*\((\w+), (\w+)\)", sources, re.MULTILINE))
    return [".".join(name) for name in named if name not in defined] if named else ["(the page names no test)"]


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
    print(f"blocks: {found}, not in the sources: {faults}")
    missing = missing_tests()
    for name in missing:
        print(f"docs/reliability.md: there is no test {name}")
    return 1 if faults or missing or not found else 0


sys.exit(main())
