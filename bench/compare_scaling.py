#!/usr/bin/env python3
"""Measures the weak scaling of training on 1, 2, 4 and 8 GPUs of this host, with voxgrad and with PyTorch's
DistributedDataParallel. For voxgrad, also measures training on one volume that is divided among all GPUs.

    bench/compare_scaling.py [--build build/release] [--gpus 1 2] [--minutes 9] [--json FILE] [--quick] [--dry-run]

The script runs bench/scaling, bench/scaling_torch.py and examples/superres for at most --minutes, starting with the
most important measurements. It prints each result immediately, and tables at the end. The efficiency on n GPUs is the
speed divided by n times the speed of one GPU. If a program fails or takes too long, a line of the output describes the
error. superres and the bf16 step of bench/scaling run twice on each number of GPUs, and the table of steps shows
whether the parameters have the same bits after both runs. By default, voxgrad and PyTorch do not reduce in NVLink's
switches (NVLS); set the environment variable NCCL_NVLS_ENABLE to change this.
"""

import argparse
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time

HERE = os.path.dirname(os.path.abspath(__file__))


class Runner:
    """Runs child processes one after another until the time limit is reached, and collects the rows that they print.

    A row is a dict with the fields of one line of JSON.
    """

    def __init__(self, options):
        self.options, self.rows = options, []
        self.deadline = time.monotonic() + 60 * options.minutes
        self.environment = {"NCCL_NVLS_ENABLE": "0", **os.environ}
        self.json = open(options.json, "w") if options.json else None

    def keep(self, row):
        self.rows.append(row)
        line = json.dumps(row)
        print(line, flush=True)
        if self.json:
            print(line, file=self.json, flush=True)

    def run(self, label, command, seconds, take=None):
        """Runs a command and keeps each line of JSON that it prints. Calls `take()` if the command succeeds."""
        if self.options.dry_run:
            print(f"{label}, at most {seconds} s:\n  " + " ".join(command))
            return
        seconds = min(seconds, self.deadline - time.monotonic())
        if seconds < 10:
            return self.keep({"label": label, "error": "no time left"})
        begin = time.monotonic()
        error = self.child(command, seconds, lambda row: self.keep({"label": label, **row}))
        if error is None and take:
            try:
                take()
            except (OSError, ValueError) as problem:
                error = str(problem)
        print(f"# {label}: {time.monotonic() - begin:.0f} s", flush=True)
        if error:
            self.keep({"label": label, "error": error})

    def child(self, command, seconds, each_row):
        """Runs a command for at most `seconds`. Calls each_row(row) for each line of JSON that it prints. Returns None
        on success, otherwise a description of the error."""
        late = threading.Event()
        with tempfile.TemporaryFile("w+") as errors:
            try:
                process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=os.path.dirname(HERE),
                                           env=self.environment, start_new_session=True)
            except OSError as problem:
                return str(problem)

            def stop():
                late.set()
                try:
                    os.killpg(process.pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass

            timer = threading.Timer(seconds, stop)
            timer.start()
            try:
                for line in process.stdout:
                    if line.startswith("{"):
                        each_row(json.loads(line))
                process.wait()
            finally:
                timer.cancel()
            if process.returncode == 0:
                return None
            errors.seek(0)
            last = " ".join(errors.read().split())[-300:]
            return f"took more than {seconds:.0f} s" if late.is_set() else f"exit status {process.returncode}: {last}"


def scaling(runner, gpus, label, *arguments, seconds=120):
    program = os.path.join(runner.options.build, "bench", "scaling")
    runner.run(label, [program, "--gpus", str(gpus), *arguments], seconds)


def torch_side(runner, gpus, label, *arguments, seconds=150):
    runner.run(label, [sys.executable, os.path.join(HERE, "scaling_torch.py"), "--gpus", str(gpus), *arguments], seconds)


def superres(runner, gpus, times):
    steps, batch = runner.options.superres_steps, 32 * gpus
    for number in range(times):
        with tempfile.TemporaryDirectory() as out:
            def take():
                with open(os.path.join(out, "report.md")) as file:
                    found = re.search(r"patches of .* in ([\d.]+) s on", file.read())
                if not found:
                    raise ValueError("the report of superres contains no training time")
                with open(os.path.join(out, "model.safetensors"), "rb") as file:
                    bits = hashlib.sha256(file.read()).hexdigest()[:16]
                taken = float(found.group(1))
                runner.keep({"label": "superres", "program": "superres", "what": "superres", "ranks": gpus, "seconds": taken,
                             "ms": taken / steps * 1e3, "volumes_per_s": steps * batch / taken, "checksum": bits})

            program = os.path.join(runner.options.build, "examples", "superres")
            runner.run(f"superres {gpus}, run {number + 1}",
                       [program, "--phantom", "--gpus", str(gpus), "--batch", str(batch), "--steps", str(steps),
                        "--precision", "bf16", "--out", out], 90, take)


def measure(runner):
    options = runner.options
    modes = ["bf16"] if options.quick else ["bf16", "high"]
    for n in options.gpus:
        scaling(runner, n, f"step, {n}", "--what", "step", "--modes", *modes, "--graph")
    for n in options.gpus[1:]:
        scaling(runner, n, f"collectives, {n}", "--what", "allreduce", "overlap", "--graph")
    if not options.no_torch:
        for n in options.gpus:
            torch_side(runner, n, f"PyTorch, {n}", "--what", "step", "allreduce", "--modes", *modes)
    for n in options.gpus:
        scaling(runner, n, f"again, {n}", "--what", "step", "--schemes", *(["ddp", "zero", "none"] if n > 1 else ["ddp"]))
    for n in options.gpus[1:]:
        for size in [256] if options.quick else [256, 384]:
            scaling(runner, n, f"spatial, {n}", "--what", "spatial", "--size", str(size), "--batch", "1", "--steps", "5",
                    "--graph")
    for n in options.gpus:
        superres(runner, n, 2)
    if not options.quick and not options.no_torch:
        for n in (options.gpus[0], options.gpus[-1]):
            torch_side(runner, n, f"torch.compile, {n}", "--sides", "compile", seconds=240)


def name_of(row):
    if row["what"] == "superres":
        return "superres, bf16, 32 patches per GPU"
    if row.get("program") == "torch":
        return f"{'torch.compile' if row['side'] == 'compile' else 'PyTorch'}, {row['mode']}"
    scheme = {"ddp": "DataParallel", "zero": "ZeroRedundancy", "none": "independent GPUs"}[row["scheme"]]
    return f"voxgrad, {row['mode']}, {scheme}{', CUDA graph' if row['graph'] else ''}"


def bits_of(row, steps):
    """Compares the bits of a run's final parameters with the parameters of a reference run.

    The reference is a second run of the same program with the same mode and number of GPUs, eager and with
    DataParallel. Returns "yes" if the bits are equal, otherwise "no". Returns "ranks differ" if the ranks of this run
    have different parameters, and "" if there is no reference.
    """
    if "checksum" not in row or (row.get("scheme") == "none" and row["ranks"] > 1):
        return ""
    if row.get("same_on_all_ranks") is False:
        return "ranks differ"
    like = [other for other in steps if "checksum" in other and other is not row
            and all(other.get(key) == row.get(key) for key in ("what", "ranks", "mode"))
            and other.get("scheme") in ("ddp", None) and not other.get("graph")]
    return "" if not like else "yes" if like[0]["checksum"] == row["checksum"] else "no"


def report_steps(rows):
    steps = [row for row in rows if row.get("what") in ("step", "superres")]
    table = {}
    for row in steps:
        table.setdefault(name_of(row), {}).setdefault(row["ranks"], []).append(row)
    print("| | GPUs | ms per step | patches/s | efficiency | same bits | peak GB |\n|---|---:|---:|---:|---:|---|---:|")
    for name, by_gpus in table.items():
        for n, found in sorted(by_gpus.items()):
            plain = name.replace("ZeroRedundancy", "DataParallel").replace("independent GPUs", "DataParallel")
            one = by_gpus.get(1) or table.get(plain, {}).get(1)
            best = max(row["volumes_per_s"] for row in found)
            efficiency = f"{100 * best / n / max(row['volumes_per_s'] for row in one):.1f} %" if one else ""
            bits = {bits_of(row, steps) for row in found} - {""}
            peak = f"{found[0]['peak_gb']:.2f}" if "peak_gb" in found[0] else ""
            print(f"| {name} | {n} | {min(row['ms'] for row in found):.2f} | {best:.0f} | {efficiency} | "
                  f"{', '.join(sorted(bits))} | {peak} |")


def report_spatial(rows):
    shared = [row for row in rows if row.get("what") == "spatial" and row.get("shared") and "ms" in row]
    if shared:
        print("\n| one volume on all GPUs | GPUs | ms per step | one GPU | efficiency | peak GB | one GPU |\n"
              "|---|---:|---:|---:|---:|---:|---:|")
    for row in shared:
        one = next((other for other in rows if other.get("what") == "spatial" and not other.get("shared") and "ms" in other
                    and all(other[key] == row[key] for key in ("size", "mode", "graph"))), None)
        ms, efficiency, peak = ("", "", "") if one is None else (
            f"{one['ms']:.1f}", f"{100 * one['ms'] / row['ms'] / row['ranks']:.1f} %", f"{one['peak_gb']:.1f}")
        print(f"| {row['size']}^3, {row['mode']}{', CUDA graph' if row['graph'] else ''} | {row['ranks']} | {row['ms']:.1f} | "
              f"{ms} | {efficiency} | {row['peak_gb']:.1f} | {peak} |")


def report_collectives(rows):
    reductions = [row for row in rows if row.get("what") == "allreduce" and "bytes" in row]
    if reductions:
        print("\n| all-reduce | GPUs | MB | GB/s | NCCL alone, in place | out of place | ratio |\n|---|---:|---:|---:|---:|---:|---:|")
    for row in reductions:
        side = "PyTorch" if row.get("program") == "torch" else "voxgrad"
        others = " | ".join(f"{row[key]:.{digits}f}" if key in row else ""
                            for key, digits in (("raw_bus_gb_s", 0), ("raw_out_of_place_bus_gb_s", 0), ("ratio", 2)))
        print(f"| {side}, {row['dtype']} | {row['ranks']} | {row['bytes'] / 1e6:.1f} | {row['bus_gb_s']:.0f} | {others} |")
    for row in rows:
        if row.get("what") == "overlap" and "hidden" in row:
            print(f"\n{row['ranks']} GPUs, {row['mode']}{', CUDA graph' if row['graph'] else ''}: a step takes "
                  f"{row['ms_with']:.2f} ms, without reductions {row['ms_without']:.2f} ms, the reductions alone {row['ms_buckets_alone']:.2f} ms: "
                  f"{100 * row['hidden']:.0f} % hidden")
    for row in rows:
        if "error" in row:
            print(f"\n{row['label']}: {row['error']}")


def count_gpus():
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default=os.path.join(HERE, "..", "build", "release"),
                        help="build folder (default: build/release)")
    parser.add_argument("--gpus", type=int, nargs="+",
                        help="numbers of GPUs (default: those of 1, 2, 4 and 8 that this host has)")
    parser.add_argument("--minutes", type=float, default=9,
                        help="time limit in minutes; a program that is running at this time is stopped")
    parser.add_argument("--superres-steps", type=int, default=600, help="training steps of superres (default: 600)")
    parser.add_argument("--json", help="write all rows to this file")
    parser.add_argument("--quick", action="store_true",
                        help="measure only bf16; skip torch.compile and 384^3 volumes (four minutes on two GPUs)")
    parser.add_argument("--no-torch", action="store_true", help="do not measure PyTorch")
    parser.add_argument("--dry-run", action="store_true", help="only print the commands")
    options = parser.parse_args()
    available = count_gpus()
    options.build = os.path.abspath(options.build)
    options.gpus = sorted(options.gpus or [n for n in (1, 2, 4, 8) if options.dry_run or n <= available])
    if not options.dry_run and (not options.gpus or options.gpus[-1] > available):
        parser.error(f"--gpus must be at most {available}, the number of GPUs of this host" if available else
                     "this host has no GPU")
    return options


def main():
    runner = Runner(parse())
    measure(runner)
    if not runner.options.dry_run:
        report_steps(runner.rows)
        report_spatial(runner.rows)
        report_collectives(runner.rows)


if __name__ == "__main__":
    main()
