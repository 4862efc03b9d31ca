#!/usr/bin/env python3
"""Prints the registers, spills and static shared memory that ptxas reports for CUDA kernels on sm_90a. Needs no GPU.

    bench/kernel_resources.py BUILD [--files PATTERN] [--jobs N] [--max-spilled BYTES]

BUILD is a build folder with compile_commands.json. The script compiles the sources that match the regular expression
PATTERN (default: the convolutions) and discards the output. If an object in BUILD has not changed since the last call,
the script repeats the results that it stored in BUILD/kernel_resources.json. It exits with 1 if a kernel spills more
than BYTES (default: 64), or if ptxas serializes the wgmma instructions of a kernel.
"""

import argparse
import concurrent.futures
import hashlib
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

SERIALIZED = re.compile(r"\(C75\d\d\) Potential Performance Loss: wgmma.*?for the function '(\w+)'", re.S)
KERNEL = re.compile(r"Compiling entry function '(\w+)' for 'sm_90a?'\n(.*?)Used (\d+) registers([^\n]*)", re.S)


def command_of(entry):
    """Returns the compiler command of an entry of compile_commands.json.

    The command is changed so that it compiles only for sm_90a, prints ptxas's statistics and discards the output.
    """
    words, call = iter(shlex.split(entry["command"])), []
    for word in words:
        if word in ("-o", "-MF", "-MT"):
            next(words)
        elif word not in ("-MD", "-c", "-x", "cu") and not word.startswith(("--generate-code", "-gencode", "-arch")):
            call.append(word)
    while "nvcc" not in os.path.basename(call[0]):  # skip a compiler launcher such as ccache
        call.pop(0)
    return call + ["-gencode", "arch=compute_90a,code=sm_90a", "-Xptxas", "-v", "-cubin", "-o", os.devnull]


def readable(name):
    """Returns a short form of the demangled name of a kernel."""
    text = subprocess.run(["c++filt", name], capture_output=True, text=True, check=True).stdout.strip()
    text = re.sub(r"voxgrad::(cuda::)?|\(anonymous namespace\)::|^void |\(int\)|\([^()]*\)$", "", text)
    return re.sub(r"OneProduct<(\w+)>", r"\1", text)


def kernels_of(entry):
    """Compiles a source file and yields a tuple for each kernel.

    The tuple contains the name, the registers per thread, the spilled bytes, the bytes of static shared memory, and
    whether ptxas serializes the wgmma instructions of the kernel.
    """
    done = subprocess.run(command_of(entry), cwd=entry["directory"], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{entry['file']}:\n{done.stderr}")
    serialized = set(SERIALIZED.findall(done.stderr))
    for name, properties, registers, rest in KERNEL.findall(done.stderr):
        spilled = re.search(r"(\d+) bytes spill stores", properties)
        shared = re.search(r"(\d+) bytes smem", rest)
        yield (readable(name), int(registers), int(spilled.group(1)) if spilled else 0,
               int(shared.group(1)) if shared else 0, name in serialized)


def results_of(entry, known):
    """Returns (key, kernels) of a source. `known` has the results of previous calls. The key identifies the object."""
    built = pathlib.Path(entry["directory"], re.search(r" -o (\S+)", entry["command"])[1])
    key = hashlib.sha256(built.read_bytes()).hexdigest() if built.is_file() else None
    return key, known[key] if key in known else list(kernels_of(entry))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=pathlib.Path, metavar="BUILD", help="build folder")
    parser.add_argument("--files", default=r"cuda/conv/.*\.cu$", metavar="PATTERN",
                        help="regular expression for the paths of the sources (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), metavar="N",
                        help="number of compilers that run at the same time (default: number of CPUs)")
    parser.add_argument("--max-spilled", type=int, default=64, metavar="BYTES",
                        help="maximum bytes that a kernel may spill (default: %(default)s)")
    options = parser.parse_args()
    entries = [e for e in json.loads((options.build / "compile_commands.json").read_text())
               if re.search(options.files, e["file"])]
    if not entries:
        sys.exit(f"no source matches {options.files} in {options.build}/compile_commands.json")
    stored = options.build / "kernel_resources.json"
    known = json.loads(stored.read_text()) if stored.exists() else {}
    print("registers  spilled  shared (static)  kernel")
    bad = 0
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for key, kernels in pool.map(lambda entry: results_of(entry, known), entries):
            if key:
                known[key] = kernels
            for name, registers, spilled, shared, serialized in kernels:
                spills = spilled > options.max_spilled
                bad += serialized or spills
                print(f"{registers:9}  {spilled:7}  {shared:15}  {name}"
                      f"{'  SERIALIZED' if serialized else ''}{'  SPILLS' if spills else ''}", flush=True)
    stored.write_text(json.dumps(known))
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
