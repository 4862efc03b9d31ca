#!/usr/bin/env python3
"""Evaluates the models of this folder with KernelBench's own evaluation. Prints a Markdown table. Needs a GPU.

    evaluate.py KERNELBENCH [--problems 1/58 2/61 ...] [--precision fp32|fp16|bf16] [--no-tf32] [--trials 100]
                [--correct-trials 5] [--no-compile] [--no-backward] [--json FILE]

KERNELBENCH is a checkout of https://github.com/ScalingIntelligence/KernelBench. Its eval.py checks each model with
allclose and its own tolerance, and measures the mean time of --trials runs with a cold L2 cache. Its timing.py measures
the reference, which is KernelBench's model, eager and with torch.compile. The columns are:

  correct     whether eval.py accepts the model
  ms          time of a forward pass of the model
  eager, compiled  speed-up over the reference, eager and with torch.compile
  f+b         time of a forward and a backward pass of the model, measured with timing.py in --trials / 2 runs
  f+b eager   speed-up of the forward and backward pass over the eager reference
  error       relative error ||y - y64|| / ||y64|| of the model, where y64 is the result of the reference in float64
  reference   the same error of the reference
"""

import argparse
import contextlib
import glob
import importlib
import io
import json
import os
import re
import statistics
import sys
import types

HERE = os.path.dirname(os.path.abspath(__file__))


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernelbench", help="folder of the checkout of KernelBench")
    parser.add_argument("--problems", nargs="*", default=[], help="level/number, such as 2/61 (default: all)")
    parser.add_argument("--precision", default="fp32", choices=["fp32", "fp16", "bf16"],
                        help="dtype of the parameters and inputs (default: fp32)")
    parser.add_argument("--no-tf32", action="store_true", help="turn TF32 off for the model and the reference")
    parser.add_argument("--trials", type=int, default=100, help="timed runs")
    parser.add_argument("--correct-trials", type=int, default=5, help="runs that check the result")
    parser.add_argument("--no-compile", action="store_true", help="do not compile the reference")
    parser.add_argument("--no-backward", action="store_true", help="do not time the backward pass")
    parser.add_argument("--json", help="also write the results to this file")
    return parser.parse_args()


if __name__ == "__main__":
    OPTIONS = parse()  # before the imports of other packages, because --help must work without them

import torch


class _Record:
    """A stand-in for the classes of packages that are not installed. Stores its keyword arguments as members."""

    def __init__(self, *_, **members):
        self.__dict__.update(members)


class _EmptyModule(types.ModuleType):
    """A stand-in for a package that is not installed. Each of its members is _Record."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Record


def import_kernelbench(folder):
    """Returns KernelBench's modules eval and timing.

    Stand-ins replace packages that are not installed and that the evaluation does not use, such as clients of language
    models.
    """
    sys.path.insert(0, os.path.join(folder, "src"))
    for name in ("dotenv", "openai", "litellm", "pydantic", "requests", "tqdm", "datasets"):
        try:
            importlib.import_module(name)
        except ImportError:
            sys.modules[name] = _EmptyModule(name)
    from kernelbench import eval as evaluation
    from kernelbench import timing
    return evaluation, timing


def read(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def problems(folder, chosen):
    """Yields (level, number, source of the reference, source of the model)."""
    for path in glob.glob(os.path.join(HERE, "level*_*.py")):
        level, number = map(int, re.fullmatch(r"level(\d+)_(\d+)\.py", os.path.basename(path)).groups())
        if chosen and f"{level}/{number}" not in chosen:
            continue
        reference, = glob.glob(os.path.join(folder, "KernelBench", f"level{level}", f"{number}_*.py"))
        yield level, number, read(reference), read(path)


class Problem:
    """The reference and the model of one problem, created as eval.py creates them."""

    def __init__(self, evaluation, reference_source, model_source, dtype):
        self.evaluation, self.dtype = evaluation, dtype
        self.classes = {}
        exec(compile(reference_source, "<reference>", "exec"), self.classes)
        self.ours = evaluation.load_custom_model(model_source, {}, None)

    def make(self, kind, dtype=None):
        self.evaluation.set_seed(42)
        arguments = self.classes["get_init_inputs"]()
        self.evaluation.set_seed(42)
        return kind(*arguments).to("cuda", dtype or self.dtype)

    def reference(self, dtype=None):
        return self.make(self.classes["Model"], dtype)

    def model(self):
        return self.make(self.ours)

    def inputs(self):
        self.evaluation.set_seed(42)
        return [x.to("cuda", self.dtype) for x in self.classes["get_inputs"]()]


def errors(problem):
    """Returns the relative errors of the model and of the reference on two samples."""
    inputs = [x[:2].contiguous() for x in problem.inputs()]
    with torch.no_grad():
        exact = problem.reference(torch.float64)(*(x.double() for x in inputs))
        return tuple(((m(*inputs).double() - exact).norm() / exact.norm()).item()
                     for m in (problem.model(), problem.reference()))


def time_backward(timing, module, inputs, trials):
    """Returns the mean time in ms of a forward and a backward pass, with gradients of all parameters and inputs."""
    inputs = [x.requires_grad_() for x in inputs]
    gradient = torch.ones_like(module(*inputs))

    def step(*arguments):
        for t in (*arguments, *module.parameters()):
            t.grad = None
        module(*arguments).backward(gradient)

    return statistics.fmean(timing.time_execution_with_cuda_event(step, inputs, num_trials=trials, verbose=False))


def evaluate(evaluation, timing, source, model_source, options):
    dtype = evaluation.get_torch_dtype_from_string(options.precision)
    row = {}
    result = evaluation.eval_kernel_against_ref(
        source, model_source, num_correct_trials=options.correct_trials, num_perf_trials=options.trials,
        measure_performance=True, device=torch.device("cuda:0"), precision=dtype, check_for_excessive_speedup=False)
    row["correct"] = bool(result.correctness)
    row["reason"] = str({k: v for k, v in result.metadata.items() if k not in ("hardware", "device")})[:400]
    for name, compiled in (("eager", False), ("compiled", True)):
        if compiled and options.no_compile:
            continue
        stats = timing.measure_ref_program_time("reference", source, num_trials=options.trials, precision=dtype,
                                                use_torch_compile=compiled)
        row[name] = stats["mean"]
    problem = Problem(evaluation, source, model_source, dtype)
    with torch.no_grad():  # eval.py times only models that it accepts
        row["ours"] = statistics.fmean(timing.time_execution_with_cuda_event(
            problem.model(), problem.inputs(), num_trials=options.trials, verbose=False))
    if not options.no_backward:
        for name, module in (("ours_backward", problem.model()), ("eager_backward", problem.reference())):
            row[name] = time_backward(timing, module, problem.inputs(), options.trials // 2)
            torch.cuda.empty_cache()
    row["error"], row["reference_error"] = errors(problem)
    return row


def format_row(level, number, row):
    ours = row["ours"]
    backward = row.get("ours_backward")
    cells = [f"L{level}-{number}", "yes" if row["correct"] else "no", f"{ours:.3f}", f"{row['eager'] / ours:.2f}",
             f"{row['compiled'] / ours:.2f}" if "compiled" in row else "", f"{backward:.3f}" if backward else "",
             f"{row['eager_backward'] / backward:.2f}" if backward else "", f"{row['error']:.1e}",
             f"{row['reference_error']:.1e}"]
    return "| " + " | ".join(cells) + " |"


def main(options):
    torch.backends.cudnn.allow_tf32 = not options.no_tf32
    evaluation, timing = import_kernelbench(options.kernelbench)
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, {options.precision}"
          f"{', TF32 off' if options.no_tf32 else ''}\n")
    print("| problem | correct | ms | eager | compiled | f+b ms | f+b eager | error | reference |")
    print("|" + "---|" * 9, flush=True)
    rows = {}
    for level, number, source, model_source in sorted(problems(options.kernelbench, options.problems)):
        log = io.StringIO()
        try:
            with contextlib.redirect_stdout(log):
                row = evaluate(evaluation, timing, source, model_source, options)
        except Exception as error:
            print(f"| L{level}-{number} | {type(error).__name__}: {str(error)[:200]} |", flush=True)
            continue
        finally:
            torch._dynamo.reset()
            torch.cuda.empty_cache()
        rows[f"{level}/{number}"] = row
        print(format_row(level, number, row), flush=True)
        if not row["correct"]:
            print(f"L{level}-{number}: {row['reason']}", file=sys.stderr, flush=True)
        if options.json:
            with open(options.json, "w", encoding="utf-8") as file:
                json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main(OPTIONS)
