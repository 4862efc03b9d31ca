#!/usr/bin/env python3
"""Checks training programs: runs them for a long time, kills them, and makes their system calls fail.

    tests/soak.py BUILD_FOLDER [memory kills faults disk power] [--steps N] [--kills N] [--programs NAME ...]
                  [--calls NAME ...] [--seed N]

    memory   Trains superres for --steps steps. After the first tenth of the steps, the resident memory must not grow
             by more than 2 % or 2 MB, whichever is larger.
    kills    Kills superres, segment and one of two MPI ranks at random moments, --kills times in total, and resumes
             them. The results must have the same bits as those of a run without a kill.
    faults   Makes each write, fsync, rename and mmap of superres and segment fail once. The program must not crash and
             must not report success with wrong results, its files must be complete, and a resumed run must give the
             same bits.
    disk     Runs superres in file systems that are full from the start, become full, or are read-only. The program must
             end with an error, and its files must be complete.
    power    Records the system calls of superres, segment and the ranks. At every moment of the run, a loss of power
             must leave complete files: the contents of a file must be on the disk before the file is renamed.

Runs all parts unless parts are named. Prints one line per part. The exit status is 1 if a part fails. Needs strace, and
unshare for `disk`.
"""
import argparse
import array
import itertools
import json
import os
import pathlib
import random
import re
import signal
import struct
import subprocess
import sys
import tempfile
import time

SUPERRES = ["examples/superres", "--phantom", "--device", "cpu", "--batch", "1", "--patch", "8", "--channels", "4",
            "--layers", "1", "--workers", "1"]
SEGMENT = ["examples/segment", "--dataset", "balls", "--device", "cpu", "--batch", "2", "--patch", "16", "--spacing",
           "1", "--channels", "4", "--workers", "1", "--validate-every", "4"]
RANKS = ["tests/distributed_program", "every=1", "checkpoint=run"]


class Failure(Exception):
    """Raised if a program does not behave as docs/reliability.md promises."""


class Program:
    """A program of the build folder, its arguments, and the files that must have the same bits after every run."""

    def __init__(self, name, build, arguments, steps, results, ranks=0):
        self.name, self.results, self.ranks = name, results, ranks
        self.command = [str(build / arguments[0]), *arguments[1:]]
        self.steps = steps

    def arguments(self, folder, resume=False, steps=None):
        """Returns the command of a run with results in `folder`. With `resume`, the run continues from a checkpoint."""
        steps = str(steps or self.steps)
        if self.ranks:  # resumes if the checkpoint exists
            launch = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(self.ranks)]
            return [*launch, *self.command, "steps=" + steps, "out=" + str(folder / self.results[0])]
        resume = resume and (folder / "checkpoint.safetensors").exists()
        return [*self.command, "--steps", steps, "--out", str(folder), *(["--resume"] if resume else [])]

    def run(self, folder, prefix=(), **options):
        """Runs the program to its end. Returns the exit status and the output."""
        folder.mkdir(parents=True, exist_ok=True)
        done = subprocess.run([*prefix, *self.arguments(folder, **options)], cwd=self.work(folder), text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace", timeout=600)
        return done.returncode, done.stdout

    def work(self, folder):
        """Returns the working folder of a run with results in `folder`."""
        return folder if self.ranks else folder.parent

    def expect_success(self, folder, **options):
        code, output = self.run(folder, **options)
        if code != 0:
            raise Failure(f"{self.name} ended with {code}: {output[-2000:]}")

    def bits(self, folder):
        """Returns the results of a run by name. Omits the losses and samples of ranks, because those of a resumed run
        begin at the checkpoint."""
        files = {name: (folder / name).read_bytes() for name in self.results}
        if not self.ranks:
            return files
        data = files[self.results[0]]
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8:8 + length])
        return {name: data[8 + length:][slice(*entry["data_offsets"])] for name, entry in header.items()
                if name not in ("losses", "samples", "__metadata__")}


def make_dataset(folder):
    """Writes a dataset in nnU-Net's layout: three volumes with one ball each."""
    for name in ("imagesTr", "labelsTr"):
        (folder / name).mkdir(parents=True)
    noise = random.Random(1)
    sizes = (20, 18, 16)
    for number, name in enumerate("abc"):
        middle = (8 + number, 9, 7)
        inside = [sum((a - b) ** 2 for a, b in zip(at, middle)) < 20 for at in itertools.product(*map(range, sizes))]
        image = array.array("f", (1 + 3 * ball + noise.random() for ball in inside))
        for path, data, code in ((f"imagesTr/{name}_0000", image, 16), (f"labelsTr/{name}", bytes(inside), 2)):
            header = bytearray(352)  # https://nifti.nimh.nih.gov/pub/dist/src/niftilib/nifti1.h
            struct.pack_into("<i", header, 0, 348)
            struct.pack_into("<8h", header, 40, 3, *reversed(sizes), 1, 1, 1, 1)
            struct.pack_into("<2h", header, 70, code, 32 if code == 16 else 8)
            struct.pack_into("<9f", header, 76, *[1] * 8, 352)
            struct.pack_into("<h", header, 254, 1)
            struct.pack_into("<12f", header, 280, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0)
            header[344:348] = b"n+1\0"
            (folder / f"{path}.nii").write_bytes(bytes(header) + bytes(data))
    (folder / "dataset.json").write_text('{"channel_names": {"0": "T1"}, "labels": {"background": 0, "ball": 1}, '
                                         '"numTraining": 3, "file_ending": ".nii"}', encoding="utf-8")


def resident(process):
    """Returns the resident memory of a process in bytes."""
    with open(f"/proc/{process.pid}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def check_memory(programs, scratch, options):
    """Runs part `memory`. Returns a summary, as all parts do."""
    command = programs[0].arguments(scratch / "memory", steps=options.steps)
    with subprocess.Popen(command, cwd=scratch, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
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
    chance, counts = random.Random(options.seed), {}
    for program in programs:
        whole = scratch / f"{program.name}-whole"
        start = time.monotonic()
        program.expect_success(whole)
        duration, expected = time.monotonic() - start, program.bits(whole)
        kills = runs = 0
        while kills < options.kills // len(programs):
            runs += 1
            folder = scratch / f"{program.name}-{runs}"
            folder.mkdir()
            while True:
                with subprocess.Popen(program.arguments(folder, resume=True), cwd=program.work(folder),
                                      stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
                    try:
                        process.wait(chance.uniform(0, 1.2 * duration))
                    except subprocess.TimeoutExpired:
                        try:
                            os.kill(chance.choice(descendants(process.pid)), signal.SIGKILL)
                        except (ProcessLookupError, FileNotFoundError):
                            pass
                if process.returncode == 0:
                    break
                kills += 1
            if program.bits(folder) != expected:
                raise Failure(f"{program.name}: the results after a kill differ (seed {options.seed}, run {runs})")
        counts[program.name] = f"{kills} kills in {runs} runs of {program.name}"
    return ", ".join(counts.values()) + ": same bits"


def expect_complete(program, folder, whole, fault):
    """Raises Failure unless each result is missing or has the bits of the whole run. A CSV file may end at an earlier
    checkpoint. `fault` describes the fault that occurred."""
    for name, expected in whole.items():
        file = folder / name
        found = file.read_bytes() if file.exists() else expected
        if found != expected and not (name.endswith(".csv") and found.endswith(b"\n") and expected.startswith(found)):
            raise Failure(f"{program.name}: {name} is damaged after {fault}")


def check_faults(programs, scratch, options):
    """Runs part `faults`."""
    calls = {"write": "ENOSPC", "fsync": "EIO", "rename": "EACCES", "mmap": "ENOMEM"}
    calls = {call: calls[call] for call in options.calls or calls}
    counts = dict.fromkeys(calls, 0)
    for program in programs:
        if program.ranks:
            continue
        steps, log = program.steps // 4, scratch / "strace.log"
        whole, folder = scratch / f"{program.name}-faults", scratch / "faults"
        for call, error in calls.items():
            subprocess.run(["rm", "-rf", whole], check=True)
            trace = ("strace", "-f", "--seccomp-bpf", "-e", "trace=" + call, "-o", str(log))
            program.expect_success(whole, steps=steps, prefix=trace)
            expected = program.bits(whole)
            lines = log.read_text(errors="replace").splitlines()
            main = lines[0].split()[0]
            lines = [line for line in lines if line.split()[0] == main and f" {call}(" in line]
            # Before main(), the dynamic loader maps libraries. It may crash if it gets no memory.
            first = max((i for i, line in enumerate(lines, 1) if "PROT_EXEC" in line), default=0) + 1
            for when in range(first, len(lines) + 1):
                subprocess.run(["rm", "-rf", folder], check=True)
                inject = (*trace, "-e", f"inject={call}:error={error}:when={when}")
                code, output = program.run(folder, prefix=inject, steps=steps)
                fault = f"{call} number {when} failed with {error}"
                if code < 0 or code >= 128:
                    raise Failure(f"{program.name} was ended by a signal after {fault}: {output[-500:]}")
                if code == 0 and program.bits(folder) != expected:
                    raise Failure(f"{program.name} reported success, but its results differ after {fault}")
                expect_complete(program, folder, expected, fault)
                program.expect_success(folder, steps=steps, resume=True)
                if program.bits(folder) != expected:
                    raise Failure(f"{program.name}: the results of the resumed run differ after {fault}")
                counts[call] += 1
    return ", ".join(f"{count} failures of {call}" for call, count in counts.items()) + ": no damaged file, same bits"


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
                               *program.arguments(mount / "out")], cwd=scratch, text=True, errors="replace",
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        if done.returncode != 1 or "No space left on device" not in done.stdout:
            raise Failure(f"{bytes_free} bytes: superres ended with {done.returncode}: {done.stdout[-500:]}")
        expect_complete(program, scratch / "left", expected, f"a file system of {bytes_free} bytes was full")
        cases += 1
    script = f"mount -t tmpfs none {mount} && mount -o remount,ro {mount} && shift && \"$@\""
    done = subprocess.run(["unshare", "--map-root-user", "--mount", "sh", "-c", script, "sh", "sh",
                           *program.arguments(mount / "out")], cwd=scratch, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT)
    if done.returncode != 1 or "Read-only file system" not in done.stdout:
        raise Failure(f"read-only: superres ended with {done.returncode}: {done.stdout[-500:]}")
    return f"{cases} sizes of a full file system and a read-only one: exit status 1, no damaged file"


CALL = re.compile(r"^(\d+) +(\w+)\((.*)\) += (-?\d+)")


def check_power(programs, scratch, _):
    """Runs part `power`."""
    renames = moments = 0
    for program in programs:
        folder, log = scratch / f"{program.name}-power", scratch / "power.log"
        program.expect_success(folder, prefix=("strace", "-f", "-y", "-o", str(log), "-e",
                                               "trace=write,pwrite64,ftruncate,fsync,rename"))
        unsynced = set()  # files whose contents may not be on the disk yet
        undurable = set()  # folders in which a rename may not be on the disk yet
        for line in log.read_text(errors="replace").splitlines():
            match = CALL.match(line)
            if not match or match[4].startswith("-"):
                continue
            moments += 1
            _, call, arguments, _ = match.groups()
            path = (re.match(r"\d+<([^>]*)>", arguments) or [None, None])[1]
            if call in ("write", "pwrite64", "ftruncate"):
                unsynced.add(path)
            elif call == "fsync":
                unsynced.discard(path)
                undurable.discard(path)
            elif call == "rename":
                old, new = re.findall(r'"([^"]*)"', arguments)
                base = program.work(folder)
                old, new = base / old, base / new
                if str(old) in unsynced:
                    raise Failure(f"{program.name}: {new} was renamed before its contents were on the disk")
                if str(new.parent) in undurable:
                    raise Failure(f"{program.name}: the folder of {new} was not flushed after an earlier rename")
                undurable.add(str(new.parent))
                renames += 1
        if undurable:
            raise Failure(f"{program.name}: {undurable} was not flushed after a rename")
    return f"{renames} renames, {moments} moments: all renamed files are complete"


PARTS = {"memory": check_memory, "kills": check_kills, "faults": check_faults, "disk": check_disk, "power": check_power}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=lambda text: pathlib.Path(text).resolve(), help="build folder")
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[*PARTS])
    parser.add_argument("--steps", type=int, default=10000, help="steps of the part memory (default: 10000)")
    parser.add_argument("--kills", type=int, default=200, help="kills of the part kills (default: 200)")
    parser.add_argument("--programs", nargs="+", choices=["superres", "segment", "ranks"], help="(default: all)")
    parser.add_argument("--calls", nargs="+", choices=["write", "fsync", "rename", "mmap"],
                        help="system calls of the part faults (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments of the kills (default: 0)")
    options = parser.parse_args()
    programs = [Program("superres", options.build, SUPERRES, 1200, ["model.safetensors", "losses.csv"]),
                Program("segment", options.build, SEGMENT, 40,
                        ["model/fold_0/checkpoint_final.safetensors", "history.csv"]),
                Program("ranks", options.build, RANKS, 50, ["result.safetensors"], ranks=2)]
    programs = [program for program in programs if not options.programs or program.name in options.programs]
    failed = False
    for part in options.parts:
        with tempfile.TemporaryDirectory(prefix="voxgrad-soak-") as name:
            scratch = pathlib.Path(name).resolve()
            make_dataset(scratch / "balls")
            start = time.monotonic()
            try:
                text = PARTS[part](programs, scratch, options)
            except Failure as failure:
                text, failed = f"FAILED: {failure}", True
            print(f"{part:8} {text} ({time.monotonic() - start:.0f} s)", flush=True)
    return 1 if failed else 0


sys.exit(main())
