"""The parts `faults` and `allocations` of soak.py: failing system calls and failing allocations."""
import os
import random
import re
import shutil
import subprocess

from programs import Failure

CALLS = {"openat": "EMFILE", "mkdir": "ENOSPC", "write": "ENOSPC", "lseek": "EIO", "fsync": "EIO", "rename": "EACCES",
         "mmap": "ENOMEM"}


def check_faults(programs, scratch, options):
    """Runs part `faults`."""
    calls = {call: CALLS[call] for call in options.calls or CALLS}
    counts = dict.fromkeys(calls, 0)
    for program in programs:
        for call, error in calls.items():
            if program.ranks and call in ("mkdir", "mmap"):  # these calls are made by MPI, not by the program
                continue
            counts[call] += check_call(program, scratch, call, error)
    counts = ", ".join(f"{count} failures of {call}" for call, count in counts.items())
    return counts + ": no damaged file, same bits"


def check_call(program, scratch, call, error):
    """Makes each system call `call` of a program's main thread fail once. With ranks, these are the calls of rank 0 for
    files in the folder of the results. Returns their number."""
    steps, log = program.short_steps, scratch / "strace.log"
    whole, folder = scratch / f"{program.name}-{call}", scratch / "faults"
    trace = ["strace", "-f", "--seccomp-bpf", "-o", str(log)]
    if program.ranks:  # the names of the temporary files are always the same
        trace.remove("--seccomp-bpf")  # does not support -P
        names = [program.checkpoint, *program.results]
        paths = [folder, *(folder / name for name in names), *(folder / f".{name}.voxgrad-0.tmp" for name in names)]
        trace += [option for path in paths for option in ("-P", str(path))]
        whole = folder
    trace += ["-e", f"trace={call},mmap" if call == "openat" else f"trace={call}"]
    shutil.rmtree(folder, ignore_errors=True)
    program.expect_success(whole, steps=steps, prefix=trace)
    expected = program.bits(whole)
    lines = [line for line in log.read_text(errors="replace").splitlines() if "(" in line]
    main = lines[0].split()[0]
    lines = [line for line in lines if line.split()[0] == main]
    # Before main(), the dynamic loader maps libraries. It may crash if it gets no memory or no descriptor.
    loaded = max((i for i, line in enumerate(lines, 1) if "PROT_EXEC" in line), default=0)
    numbers = [number for number, (i, _) in enumerate(
        ((i, line) for i, line in enumerate(lines, 1) if f" {call}(" in line), 1) if i > loaded]
    for when in numbers:
        shutil.rmtree(folder, ignore_errors=True)
        inject = [*trace, "-e", f"inject={call}:error={error}:when={when}"]
        code, output = program.run(folder, prefix=inject, steps=steps)
        fault = f"{call} number {when} failed with {error}"
        check_end(program, folder, expected, (code, output), fault)
        program.expect_resumable(folder, expected, fault, steps)
    return len(numbers)


def check_end(program, folder, expected, end, fault):
    """Checks the exit status, the output and the files of a run with a fault."""
    code, output = end
    if code < 0 or code >= 128 or "terminate called" in output:
        raise Failure(f"{program.name} was ended by a signal ({code}) after {fault}: {output[-1000:]}")
    message = r": cannot " if program.ranks else rf"(?m)^{program.name}: \w|^standard output could not be written"
    if code != 0 and not re.search(message, output):
        raise Failure(f"{program.name} ended with {code} and without a message after {fault}: {output[-500:]}")
    if code == 0 and program.bits(folder) != expected:
        raise Failure(f"{program.name} reported success, but its results differ after {fault}")
    program.expect_complete(folder, expected, fault)


def choose_allocations(renames, first, number, chance):
    """Returns the numbers of allocations that should fail, from `first` to the last of `renames`: a third of them
    anywhere, a third early, and a third at most 400 allocations before a rename or 50 after it. `renames` lists the
    number of allocations before each rename."""
    last, chosen = renames[-1], set()
    for i in range(number):
        if i % 3 == 0:
            chosen.add(chance.randint(first, last))
        elif i % 3 == 1:
            chosen.add(first + round((last - first) ** chance.random()))
        else:
            chosen.add(min(last, max(first, chance.choice(renames) + chance.randint(-400, 50))))
    return sorted(chosen)


def check_allocations(programs, scratch, options):
    """Runs part `allocations`."""
    library, log = scratch / "failing_malloc.so", scratch / "allocations.log"
    source = os.path.join(os.path.dirname(__file__), "failing_malloc.c")
    subprocess.run([os.environ.get("CC", "cc"), "-O1", "-shared", "-fPIC", "-o", str(library), source], check=True)
    chance, counts = random.Random(options.seed), []
    for program in programs:
        if program.ranks:  # MPI does not handle failing allocations
            continue
        steps, whole, folder = program.short_steps, scratch / f"{program.name}-allocations", scratch / "allocations"
        preload = ["env", f"LD_PRELOAD={library}"]
        program.expect_success(whole, steps=steps, prefix=[*preload, f"VOXGRAD_ALLOCATIONS_LOG={log}"])
        expected, ended = program.bits(whole), 0
        # cairo and nlohmann::json may crash if memory runs out. The programs use cairo only after the last checkpoint.
        # segment uses nlohmann::json before its first file and after its last checkpoint.
        renames = [line.split() for line in log.read_text().splitlines()]
        count = max(i for i, (_, name) in enumerate(renames, 1) if name.endswith(program.checkpoint))
        renames = [int(number) for number, _ in renames[:count]]
        first = renames[0] + 1 if program.name == "segment" else 1
        runs, chosen = 0, choose_allocations(renames, first, options.allocations, chance)
        for number in chosen:
            # The destructor of nlohmann::json, which segment uses, allocates memory and ends the program without it.
            for later in ("", "+") if program.name == "superres" else ("",):
                shutil.rmtree(folder, ignore_errors=True)
                code, output = program.run(folder, prefix=[*preload, f"VOXGRAD_FAIL_ALLOCATION={number}{later}"],
                                           steps=steps)
                fault = f"allocation number {number}{' and all later ones' if later else ''} failed"
                check_end(program, folder, expected, (code, output), fault)
                ended += code != 0
                runs += 1
                program.expect_resumable(folder, expected, fault, steps)
        counts.append(f"{runs} runs of {program.name}, of which {ended} ended with an error")
    return "; ".join(counts) + ": no crash, no damaged file, same bits"
