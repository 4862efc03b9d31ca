#!/usr/bin/env python3
"""Prints how much of each collective overlaps with other kernels, from a trace of bench/scaling.

    bench/scaling --gpus 2 --what step --steps 5 --rounds 1 --trace trace.json
    bench/scaling_trace.py trace.json

For each collective of each GPU, prints the start and the duration in microseconds, and the percentage of the duration
during which an operator ran on another stream of the same GPU. The trace contains the times of CUDA events before and
after the kernels of each operator. The trace may be compressed by gzip.
"""

import argparse
import collections
import gzip
import json

COLLECTIVES = {"all_reduce", "broadcast", "all_gather", "send_receive"}


def covered(event, others):
    """Returns the fraction of an event's duration during which at least one event of `others` ran.

    `others` must be sorted by start time.
    """
    begin, end, total = event["ts"], event["ts"] + event["dur"], 0.0
    for other in others:
        start, stop = max(begin, other["ts"]), min(end, other["ts"] + other["dur"])
        if stop > start:
            total, begin = total + stop - start, stop
    return total / event["dur"] if event["dur"] > 0 else 0.0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace")
    path = parser.parse_args().trace
    with (gzip.open if path.endswith(".gz") else open)(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    streams = collections.defaultdict(list)
    for event in events:
        if event["ph"] == "X" and names.get(event["pid"], "").startswith("cuda"):
            streams[event["pid"], event["tid"]].append(event)
    print("| GPU | collective | start, us | duration, us | overlap with other kernels |\n|---|---|---:|---:|---:|")
    for (gpu, stream), own_events in sorted(streams.items()):
        others = sorted((e for key, some in streams.items() if key[0] == gpu and key[1] != stream for e in some),
                        key=lambda e: e["ts"])
        for event in own_events:
            if event["name"] in COLLECTIVES:
                print(f"| {names[gpu]} | {event['name']} | {event['ts']:.0f} | {event['dur']:.0f} | "
                      f"{100 * covered(event, others):.0f} % |")


if __name__ == "__main__":
    main()
