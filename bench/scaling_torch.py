#!/usr/bin/env python3
"""Benchmark of training with PyTorch's DistributedDataParallel, for comparison with bench/scaling.

The benchmark has the same network, batch and training step as bench/scaling, and one process per GPU of this host.

    bench/scaling_torch.py --gpus 2 [--what step allreduce] [--modes bf16 high] [--sides torch compile]

Immediately after each measurement, the script prints a line of JSON with the same fields as bench/scaling. "ms" is the
time of the slowest rank in milliseconds per step (median over the rounds). The network, the loss and the step are those
of compare_unet.py, in channels_last_3d. With a single GPU, DistributedDataParallel is not used. --sides torch runs
PyTorch eagerly; --sides compile applies torch.compile to the network, including DistributedDataParallel, and to the
loss.
"""

import argparse
import json
import os
import socket
import statistics
import time
from types import SimpleNamespace

MODES = ("bf16", "high", "highest")


def report(options, rank, row):
    if rank == 0:
        print(json.dumps({"program": "torch", "what": row.pop("what"), "ranks": options.gpus, **row}), flush=True)


def time_rounds(options, device, calls, call):
    """Returns the milliseconds per call of the slowest rank and of the fastest rank (medians over the rounds)."""
    import torch
    from torch import distributed

    rounds = []
    for _ in range(options.rounds):
        torch.cuda.synchronize()
        distributed.barrier()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
        elapsed = torch.tensor([(time.perf_counter() - begin) / calls * 1e3], dtype=torch.float64, device=device)
        times = [torch.empty_like(elapsed) for _ in range(options.gpus)]
        distributed.all_gather(times, elapsed)
        rounds.append([ms.item() for ms in times])
    return statistics.median(map(max, rounds)), statistics.median(map(min, rounds))


def make_side(options, rank, mode, compiled):
    import torch
    from torch.nn.parallel import DistributedDataParallel

    import compare_unet

    network = SimpleNamespace(stages=6, channels=32, classes=3, deep=True, batch=options.batch, size=options.size)
    x, target, model = compare_unet.data(network, torch.device("cuda", rank))
    side = compare_unet.Torch(network, mode, "channels_last", model, x, target, compiled)
    run = side.model
    run.decoder.seg_layers[0].requires_grad_(False)  # no loss uses this layer, so its bucket would never be full
    if options.gpus > 1:
        run = DistributedDataParallel(run, device_ids=[rank], gradient_as_bucket_view=True)
    side.run = torch.compile(run) if compiled else run
    return side


def measure_step(options, rank, mode, name):
    import torch

    device = torch.device("cuda", rank)
    side = make_side(options, rank, mode, name == "compile")
    for _ in range(options.warmup):
        side.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    slowest, fastest = time_rounds(options, device, options.steps, side.step)
    report(options, rank, {
        "what": "step", "mode": mode, "scheme": "ddp", "side": name, "batch": options.batch, "size": options.size,
        "ms": slowest, "ms_fastest_rank": fastest, "volumes_per_s": options.gpus * options.batch / slowest * 1e3,
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9, "loss": side.loss()})
    side.drop()
    torch.cuda.empty_cache()


def measure_all_reduce(options, rank):
    import torch
    from torch import distributed

    if options.gpus == 1:
        return
    for dtype, name in ((torch.float32, "f32"), (torch.bfloat16, "bf16")):
        size = torch.empty((), dtype=dtype).element_size()
        # The first count is the number of elements that voxgrad reduces: all parameters, and a flag per parameter
        # tensor.
        for count in (31195542, (25 << 20) // size, (1 << 30) // size):
            values = torch.zeros(count, dtype=dtype, device="cuda")
            call = lambda: distributed.all_reduce(values)
            call()
            ms, _ = time_rounds(options, values.device, 20, call)
            n, size_bytes = options.gpus, count * size
            report(options, rank, {"what": "allreduce", "dtype": name, "bytes": size_bytes, "ms": ms,
                                   "alg_gb_s": size_bytes / ms * 1e-6, "bus_gb_s": 2 * (n - 1) / n * size_bytes / ms * 1e-6})


def work(rank, options, port):
    import torch
    from torch import distributed

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.cuda.set_device(rank)
    distributed.init_process_group("nccl", rank=rank, world_size=options.gpus)
    torch.backends.cudnn.benchmark = options.cudnn_benchmark
    if "step" in options.what:
        for name in options.sides:
            for mode in options.modes:
                measure_step(options, rank, mode, name)
    if "allreduce" in options.what:
        measure_all_reduce(options, rank)
    distributed.destroy_process_group()


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=1, help="use the first N GPUs (default: 1)", metavar="N")
    parser.add_argument("--what", nargs="+", choices=("step", "allreduce"), default=["step"],
                        help="measurements to run (default: step)")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["bf16"],
                        help="bf16 (autocast), high (TF32), highest (float32) (default: bf16)")
    parser.add_argument("--sides", nargs="+", choices=("torch", "compile"), default=["torch"],
                        help="torch (eager), compile (torch.compile) (default: torch)")
    parser.add_argument("--batch", type=int, default=2, help="patches per step on each GPU")
    parser.add_argument("--size", type=int, default=128, help="voxels along each side of a patch (default: 128)")
    parser.add_argument("--warmup", type=int, default=3, help="steps before each measurement (default: 3)")
    parser.add_argument("--rounds", type=int, default=3,
                        help="rounds of each measurement; the median is reported (default: 3)")
    parser.add_argument("--steps", type=int, default=20, help="steps per round (default: 20)")
    parser.add_argument("--cudnn-benchmark", action="store_true",
                        help="set torch.backends.cudnn.benchmark, as nnU-Net does")
    return parser.parse_args()


def main():
    options = parse()
    import torch

    if torch.cuda.device_count() < options.gpus:
        raise SystemExit(f"scaling_torch: --gpus is {options.gpus}, but the number of GPUs that PyTorch finds is "
                         f"{torch.cuda.device_count()}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(work, (options, port), options.gpus)


if __name__ == "__main__":
    main()
