#!/usr/bin/env python3
"""Compares convolutions of voxgrad and PyTorch on the CPU. Prints a Markdown table.

    bench/compare_cpu.py [PROGRAM] [--rounds 3] [--python /usr/bin/python3] [--busy]

PROGRAM is the built cpu_conv (default: build/release/bench/cpu_conv). voxgrad and PyTorch run alternately on the same
inputs. Each value in the table is the median over the rounds; with --busy, GFLOP/s and ratios are computed from the
minimum times instead. The program exits with 1 if the results of voxgrad and PyTorch differ.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))


def names_of(program):
    listed = subprocess.run([program, "--benchmark_list_tests"], check=True, capture_output=True, text=True).stdout
    return list(dict.fromkeys(line.rsplit("/", 2)[0] for line in listed.split("\n") if line))


def escaped(name):
    return "".join("\\" + c if c in "()^" else c for c in name)


def run_voxgrad(program, name, busy):
    command = [program, f"--benchmark_filter=^{escaped(name)}/", "--benchmark_format=json", "--benchmark_min_time=0.3"]
    environment = dict(os.environ, VOXGRAD_NUM_THREADS="1") if busy else None
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                            env=environment).stdout
    runs = {run["name"].split("/")[-2]: run for run in json.loads(result)["benchmarks"]}
    for run in runs.values():
        run["gflop"] = run["GFLOP/s"] * run["real_time"] * 1e-3
        run["real_time"] = run["cpu_ms"] if busy else run["real_time"]
    return runs


class Torch:
    """The process cpu_conv_torch.py, which runs problems in PyTorch."""

    def __init__(self, python, busy):
        command = [python, os.path.join(HERE, "cpu_conv_torch.py")] + ["--busy"] * busy
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.versions = self.answer()["versions"]

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            sys.exit("compare_cpu: cpu_conv_torch.py failed; is PyTorch installed for the Python of --python?")
        return json.loads(line)

    def run(self, numbers):
        self.process.stdin.write(numbers + "\n")
        self.process.stdin.flush()
        return self.answer()


def median(values):
    return statistics.median(list(values))


def compare(program, torch, name, rounds, busy):
    """Returns a row of the table and whether the results agree."""
    voxgrad_runs, torch_runs = [], []
    for _ in range(rounds):
        voxgrad_runs.append(run_voxgrad(program, name, busy))
        torch_runs.append(torch.run(voxgrad_runs[-1]["forward"]["label"]))
    agree = (
        voxgrad_runs[0]["forward"]["checksum"] == torch_runs[0]["checksum_forward"]
        and voxgrad_runs[0]["forward_backward"]["checksum"] == torch_runs[0]["checksum_backward"]
    )
    gflop = voxgrad_runs[0]["forward"]["gflop"]
    pick = min if busy else median
    # voxgrad reports milliseconds, PyTorch reports seconds.
    seconds = {key: pick(run[key]["real_time"] for run in voxgrad_runs) * 1e-3 for key in voxgrad_runs[0]}
    torch_seconds = {key: pick(run[key] for run in torch_runs) for key in ("forward", "forward_backward")}
    backward = [run["data_gradient"]["real_time"] + run["weight_gradient"]["real_time"] for run in voxgrad_runs]
    row = {
        "name": name,
        "voxgrad": (gflop / seconds["forward"], 3 * gflop / seconds["forward_backward"]),
        "torch": (gflop / torch_seconds["forward"], 3 * gflop / torch_seconds["forward_backward"]),
        "ratio": tuple(
            torch_seconds[key] / seconds[key] if busy
            else median(t[key] * 1e3 / v[key]["real_time"] for v, t in zip(voxgrad_runs, torch_runs))
            for key in ("forward", "forward_backward")
        ),
        "gemm": (
            median(100 * gflop / (run["forward"]["real_time"] * 1e-3) / run["forward"]["gemm"] for run in voxgrad_runs),
            median(
                100 * 2 * gflop / (b * 1e-3) / statistics.mean((r["data_gradient"]["gemm"], r["weight_gradient"]["gemm"]))
                for r, b in zip(voxgrad_runs, backward)
            ),
        ),
        "gemm_rate": median(run[key]["gemm"] for run in voxgrad_runs for key in run),
    }
    return row, agree


def pair(values, digits=1):
    return " / ".join(f"{value:.{digits}f}" for value in values)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", nargs="?", default=os.path.join(HERE, "..", "build", "release", "bench", "cpu_conv"))
    parser.add_argument("--rounds", type=int, default=3, help="runs of each problem by each library (default: 3)")
    parser.add_argument("--python", default="/usr/bin/python3", help="Python interpreter that can import PyTorch")
    parser.add_argument("--busy", action="store_true",
                        help="for a machine that runs other programs: use one thread, report the minimum CPU time")
    arguments = parser.parse_args()
    if not os.path.isfile(arguments.program):
        parser.error(f"{arguments.program} does not exist; build the target cpu_conv")
    torch = Torch(arguments.python, arguments.busy)
    print("| shape | voxgrad fwd / fwd+bwd, GFLOP/s | PyTorch fwd / fwd+bwd, GFLOP/s | ratio fwd / fwd+bwd "
          "| % of Eigen's gemm fwd / bwd |")
    print("|---|---:|---:|---:|---:|", flush=True)
    rows, wrong = [], []
    for name in names_of(arguments.program):
        row, agree = compare(arguments.program, torch, name, arguments.rounds, arguments.busy)
        rows.append(row)
        if not agree:
            wrong.append(name)
        print(f"| {name} | {pair(row['voxgrad'])} | {pair(row['torch'])} | {pair(row['ratio'])} | {pair(row['gemm'], 0)} |",
              flush=True)
    faster = sum(min(row["ratio"]) > 1 for row in rows)
    means = [statistics.geometric_mean(row["ratio"][i] for row in rows) for i in (0, 1)]
    print(f"\nFaster than PyTorch on {faster} of {len(rows)} shapes in both forward and forward + backward. Ratios: "
          f"geometric means {pair(means, 2)}, minimum {min(min(row['ratio']) for row in rows):.2f}. "
          f"Eigen's 1024^3 gemm: {median(row['gemm_rate'] for row in rows):.0f} GFLOP/s (median). {torch.versions}; "
          f"{arguments.rounds} rounds; load {os.getloadavg()[0]:.1f}.")
    if wrong:
        sys.exit("compare_cpu: the results differ on " + "; ".join(wrong))


if __name__ == "__main__":
    main()
