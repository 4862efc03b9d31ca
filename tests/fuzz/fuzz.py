#!/usr/bin/env python3
"""Runs the fuzz targets of a build with -DVOXGRAD_FUZZ=ON. `./run fuzz` creates such a build in build/fuzz.

    tests/fuzz/fuzz.py [--build FOLDER] [SECONDS | --inputs N] [--jobs N] [--keep] [TARGET ...]

Runs each TARGET (default: all) for SECONDS (default: 60) or on N inputs. Each run starts from tests/fuzz/corpus and
from the inputs that earlier runs have found, which are in FOLDER/fuzz/corpus. Prints a line per target; the last column
is the number of inputs of all runs in FOLDER. The exit status is 1 if a target finds a fault. In this case, prints the
path of the input that reproduces the fault and the end of the log. To reproduce the fault:

    FOLDER/tests/fuzz_targets/TARGET PATH

--keep replaces the inputs that earlier runs with --keep have added to tests/fuzz/corpus. libFuzzer merges all found
inputs into a smaller set that reaches the same code, and --keep adds a sample of this set.
"""
import argparse
import concurrent.futures
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
CORPUS = ROOT / "tests/fuzz/corpus"
# Largest inputs in bytes. The JSON files and checkpoints of the corpus are larger than 4096 bytes.
MAX_BYTES = {"checkpoint": 16384, "dataset_json": 16384, "plans_json": 16384, "pth": 16384}
KEPT_BYTES, KEPT_FILES = 15_000, 40  # limits per target of the inputs that --keep adds
# An input may allocate at most 64 MB at once and 1 GB in total. The largest legal allocation is that of a .nii.gz file
# of 4 KB: gzip expands the file by a factor of at most 1032, and each voxel grows from one byte to an f32.
LIMITS = ["-malloc_limit_mb=64", "-rss_limit_mb=1024", "-timeout=30"]
ENVIRONMENT = {"VOXGRAD_NUM_THREADS": "1", "ASAN_OPTIONS": "quarantine_size_mb=16"}


class Run:
    """The folders of a target, and the results of a run."""

    def __init__(self, build, target):
        self.target = target
        self.program = build / "tests/fuzz_targets" / target
        self.found = build / "fuzz/corpus" / target
        self.faults = build / "fuzz/faults" / target
        self.log = build / "fuzz" / f"{target}.log"
        self.inputs = self.seconds = 0
        self.fault = None

    def call(self, *arguments):
        """Runs libFuzzer. Returns whether it succeeded."""
        for folder in (self.found, self.faults):
            folder.mkdir(parents=True, exist_ok=True)
        with self.log.open("w") as log:
            return subprocess.run([self.program, *arguments], stdout=log, stderr=log, check=False,
                                  env={**os.environ, **ENVIRONMENT}).returncode == 0

    def run(self, limit):
        start = time.time()
        succeeded = self.call(limit, f"-max_len={MAX_BYTES.get(self.target, 4096)}", *LIMITS, "-print_final_stats=1",
                              "-close_fd_mask=3", f"-artifact_prefix={self.faults}/", "-reload=0", self.found,
                              CORPUS / self.target)
        self.seconds = time.time() - start
        text = self.log.read_text(errors="replace")
        counts = re.findall(r"stat::number_of_executed_units: (\d+)", text) or re.findall(r"^#(\d+)\t", text, re.M)
        self.inputs = int(counts[-1]) if counts else 0
        if not succeeded:
            paths = re.findall(r"Test unit written to (\S+)", text)
            self.fault = f"{paths[-1] if paths else 'no input written'}\n" + "\n".join(text.splitlines()[-40:])
        return self

    def keep(self):
        """Replaces the found inputs in the kept corpus. The files of make_corpus.py have other names and remain."""
        kept, merged = CORPUS / self.target, self.found.parent / f"{self.target}.merged"
        shutil.rmtree(merged, ignore_errors=True)
        merged.mkdir()
        own = [path for path in kept.iterdir() if not re.fullmatch("[0-9a-f]{40}", path.name)]
        for path in kept.iterdir():
            if path not in own:
                shutil.move(path, self.found / path.name)
        if not self.call("-merge=1", *LIMITS, merged, kept, self.found):
            sys.exit(f"fuzz.py: the merge failed: {self.log}")
        seeds = {path.read_bytes() for path in own}
        new = [path for path in merged.iterdir() if path.read_bytes() not in seeds]
        new.sort(key=lambda path: (path.stat().st_size, path.name))
        total = 0
        for path in new[:: len(new) // KEPT_FILES + 1]:  # every n-th file; the files are sorted by size
            total += path.stat().st_size
            if total <= KEPT_BYTES:
                shutil.copy(path, kept / path.name)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build/fuzz", help="default: build/fuzz")
    parser.add_argument("--inputs", type=int, help="inputs of each target, instead of SECONDS")
    parser.add_argument("--jobs", type=int, default=1, help="targets that run at the same time (default: 1)")
    parser.add_argument("--keep", action="store_true", help="add the found inputs to tests/fuzz/corpus")
    parser.add_argument("arguments", nargs="*", metavar="SECONDS | TARGET")
    options = parser.parse_intermixed_args()
    build = options.build.resolve()
    known = sorted(path.name for path in (build / "tests/fuzz_targets").glob("*"))
    if not known:
        parser.error(f"{build} has no fuzz targets; ./run fuzz builds them")
    seconds = [int(argument) for argument in options.arguments if argument.isdigit()]
    targets = [argument for argument in options.arguments if not argument.isdigit()] or known
    if unknown := set(targets) - set(known):
        parser.error(f"unknown targets: {', '.join(sorted(unknown))}; the targets are {', '.join(known)}")
    if len(seconds) + (options.inputs is not None) > 1:
        parser.error("expected either SECONDS or --inputs")
    limit = f"-max_total_time={seconds[0] if seconds else 60}" if options.inputs is None else f"-runs={options.inputs}"

    totals_path = build / "fuzz/totals.json"
    totals_path.parent.mkdir(exist_ok=True)
    totals = json.loads(totals_path.read_text()) if totals_path.exists() else {}
    print(f"{'target':14} {'inputs':>12} {'seconds':>8} {'findings':>8} {'inputs of all runs':>18}", flush=True)
    faults = []
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        runs = [pool.submit(Run(build, target).run, limit) for target in targets]
        for finished in concurrent.futures.as_completed(runs):
            run = finished.result()
            totals[run.target] = totals.get(run.target, 0) + run.inputs
            temporary = totals_path.with_suffix(".new")
            temporary.write_text(json.dumps(totals, indent=1))
            temporary.replace(totals_path)
            print(f"{run.target:14} {run.inputs:12,} {run.seconds:8.0f} {int(run.fault is not None):8} "
                  f"{totals[run.target]:18,}", flush=True)
            if run.fault:
                faults.append(run)
    for run in faults:
        print(f"\n{run.target} has found a fault: {run.fault}")
    if options.keep:
        for target in targets:
            Run(build, target).keep()
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
