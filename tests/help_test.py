#!/usr/bin/env python3
"""Checks that the scripts in bench, docs, examples and tests print their help without PyTorch, NumPy and other packages.

    tests/help_test.py

Runs each script that uses argparse with --help and with Python's option -S, which hides all installed packages. Prints
the output of each script that fails. The exit status is then 1.
"""
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "examples/pytorch/voxgrad_torch"  # a Python package that imports PyTorch

scripts = [path for folder in ("bench", "docs", "examples", "tests") for path in sorted((ROOT / folder).rglob("*.py"))
           if "argparse" in path.read_text(encoding="utf-8") and PACKAGE not in path.parents]
scripts.remove(pathlib.Path(__file__).resolve())
failed = 0
for script in scripts:
    run = subprocess.run([sys.executable, "-S", "-B", script, "--help"], cwd="/", stdin=subprocess.DEVNULL, text=True,
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=30)
    if run.returncode or "usage: " not in run.stdout:
        failed += 1
        print(f"{script} --help exited with {run.returncode}:\n{run.stdout}")
print(f"scripts: {len(scripts)}, failed: {failed}")
sys.exit(failed > 0 or not scripts)
