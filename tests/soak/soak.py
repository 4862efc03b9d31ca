#!/usr/bin/env python3
"""Checks training programs: runs them for a long time, kills them, and makes their system calls and allocations fail.

    tests/soak/soak.py BUILD_FOLDER [memory kills faults allocations disk power] [--steps N] [--kills N]
                       [--allocations N] [--states N] [--programs NAME ...] [--calls NAME ...] [--seed N]

    memory       Trains superres for --steps steps. After the first tenth of the steps, the resident memory must not
                 grow by more than 2 % or 2 MB, whichever is larger.
    kills        Kills superres, segment and one of two MPI ranks at random moments, each --kills times, and resumes
                 them. The results must have the same bits as those of a run without a kill.
    faults       Makes each openat, mkdir, write, lseek, fsync, rename and mmap of superres and segment fail once, and
                 each openat, write, lseek, fsync and rename of an MPI rank that concerns its results. The program must
                 not crash and must not report success with wrong results, its files must be complete, and a resumed run
                 must give the same bits.
    allocations  Makes --allocations allocations of superres and segment fail, one in each run, until the last
                 checkpoint. For superres, repeats each run with all later allocations failing too. The same must hold.
    disk         Runs superres in file systems that are full from the start, become full, or are read-only. The program
                 must end with an error, and its files must be complete.
    power        Records the system calls of superres, segment and the ranks, and repeats them on a simulated disk with
                 a write cache. In each state that a loss of power may leave, all files must be complete and not older
                 than the last write that had ended. A run that resumes from --states of these states must give the same
                 bits.

Runs all parts unless parts are named. Prints one line per part. The exit status is 1 if a part fails. Needs strace, a C
compiler for `allocations`, and unshare for `disk`.
"""
import argparse
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from faults import CALLS, check_allocations, check_faults
from power import check_power
from programs import NAMES, Failure, make_programs


def resident(process):
    """Returns the resident memory of a process in bytes."""
    with open(f"/proc/{process.pid}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def check_memory(programs, scratch, options):
    """Runs part `memory`. Returns a summary, as all parts do."""
    command = programs[0].arguments(scratch / "memory", steps=options.steps)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        samples, step = [], 0
        for line in process.stdout:
            match = re.search(r"step (\d+)/", line)
            if match and int(match[1]) > step:
                step = int(match[1])
                samples.append((step, resident(process)))
    if process.returncode != 0:
        raise Failure(f"superres ended with {process.returncode}")
    warm = [used for at, used in samples if at >= options.steps / 10]
    growth = warm[-1] - warm[0]
    text = f"{options.steps} steps, {warm[0] / 1e6:.1f} MB after a tenth, {warm[-1] / 1e6:.1f} MB at the end"
    if growth > max(0.02 * warm[0], 2e6):
        raise Failure("the memory has grown: " + text)
    return text


def descendants(pid):
    """Returns the descendants of a process that have no children, or the process itself if it has no children."""
    children = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    return [leaf for child in children for leaf in descendants(int(child))] or [pid]


def check_kills(programs, scratch, options):
    """Runs part `kills`."""
    chance, counts = random.Random(options.seed), []
    for program in programs:
        whole = scratch / f"{program.name}-whole"
        start = time.monotonic()
        program.expect_success(whole)
        duration, expected = time.monotonic() - start, program.bits(whole)
        kills = runs = 0
        while kills < options.kills:
            runs += 1
            folder = scratch / f"{program.name}-kills"
            folder.mkdir()
            while not finish_or_kill(program, folder, chance, duration):
                kills += 1
            if program.bits(folder) != expected:
                raise Failure(f"{program.name}: the results after a kill differ (seed {options.seed}, run {runs})")
            shutil.rmtree(folder)
        counts.append(f"{kills} kills in {runs} runs of {program.name}")
    return ", ".join(counts) + ": same bits"


def finish_or_kill(program, folder, chance, duration):
    """Runs or resumes a program, and kills it at a random moment unless it ends before. Returns whether it has ended
    with success. Raises Failure if it ended with an error without a kill."""
    killed = False
    with subprocess.Popen(program.arguments(folder, resume=True), text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT) as process:
        try:
            output, _ = process.communicate(timeout=chance.uniform(0, 1.2 * duration))
        except subprocess.TimeoutExpired:
            try:
                os.kill(chance.choice(descendants(process.pid)), signal.SIGKILL)
                killed = True
            except (ProcessLookupError, FileNotFoundError):
                pass
            output, _ = process.communicate()
    if process.returncode != 0 and not killed:
        raise Failure(f"{program.name} ended with {process.returncode} without a kill: {output[-2000:]}")
    return process.returncode == 0


def check_disk(programs, scratch, _):
    """Runs part `disk`."""
    program = programs[0]
    whole = scratch / "disk-whole"
    program.expect_success(whole)
    expected, mount = program.bits(whole), scratch / "mount"
    mount.mkdir()
    size = sum(file.stat().st_size for file in whole.iterdir())
    cases = 0
    for bytes_free in (4096, *(size * part // 8 for part in range(1, 8))):
        script = (f"mount -t tmpfs -o size={bytes_free} none {mount} && shift && \"$@\"; code=$?; "
                  f"cp -r {mount}/out {scratch}/left; exit $code")
        subprocess.run(["rm", "-rf", scratch / "left"], check=True)
        done = subprocess.run(["unshare", "--map-root-user", "--mount", "sh", "-c", script, "sh", "sh",
                               *program.arguments(mount / "out")], text=True, errors="replace",
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        if done.returncode != 1 or "No space left on device" not in done.stdout:
            raise Failure(f"{bytes_free} bytes: superres ended with {done.returncode}: {done.stdout[-500:]}")
        program.expect_complete(scratch / "left", expected, f"a file system of {bytes_free} bytes was full")
        cases += 1
    script = f"mount -t tmpfs none {mount} && mount -o remount,ro {mount} && shift && \"$@\""
    done = subprocess.run(["unshare", "--map-root-user", "--mount", "sh", "-c", script, "sh", "sh",
                           *program.arguments(mount / "out")], text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT)
    if done.returncode != 1 or "Read-only file system" not in done.stdout:
        raise Failure(f"read-only: superres ended with {done.returncode}: {done.stdout[-500:]}")
    return f"{cases} sizes of a full file system and a read-only one: exit status 1, no damaged file"


PARTS = {"memory": check_memory, "kills": check_kills, "faults": check_faults, "allocations": check_allocations,
         "disk": check_disk, "power": check_power}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=lambda text: pathlib.Path(text).resolve(), help="build folder")
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[*PARTS])
    parser.add_argument("--steps", type=int, default=10000, help="steps of the part memory (default: 10000)")
    parser.add_argument("--kills", type=int, default=200, help="kills of each program in the part kills (default: 200)")
    parser.add_argument("--allocations", type=int, default=200,
                        help="allocations of each program that fail in the part allocations (default: 200)")
    parser.add_argument("--states", type=int, default=60,
                        help="states from which each program resumes in the part power (default: 60)")
    parser.add_argument("--programs", nargs="+", choices=NAMES, default=NAMES, help="(default: all)")
    parser.add_argument("--calls", nargs="+", choices=[*CALLS], help="system calls of the part faults (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random choices (default: 0)")
    options = parser.parse_args()
    failed = False
    for part in options.parts:
        with tempfile.TemporaryDirectory(prefix="voxgrad-soak-") as name:
            scratch = pathlib.Path(name).resolve()
            programs = make_programs(options.build, scratch)
            programs = [program for program in programs if program.name in options.programs]
            start = time.monotonic()
            try:
                text = PARTS[part](programs, scratch, options)
            except Failure as failure:
                text, failed = f"FAILED: {failure}", True
            print(f"{part:8} {text} ({time.monotonic() - start:.0f} s)", flush=True)
    return 1 if failed else 0


sys.exit(main())
