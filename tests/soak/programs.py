"""The programs that soak.py runs, and the comparison of their results."""
import array
import itertools
import json
import random
import struct
import subprocess

NAMES = ["superres", "segment", "ranks"]
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe"]


class Failure(Exception):
    """Raised if a program does not behave as docs/reliability.md promises."""


class Program:
    """A program, the files that must have the same bits after every run, and its checkpoint. Results are written to the
    folder of a run. `steps` is the length of a long run; a run of `short_steps` writes at least two checkpoints."""

    def __init__(self, name, command, steps, short_steps, checkpoint, results, ranks=0):
        self.name, self.command, self.results, self.ranks = name, command, results, ranks
        self.steps, self.short_steps, self.checkpoint = steps, short_steps, checkpoint

    def arguments(self, folder, resume=False, steps=None, prefix=()):
        """Returns the command of a run with results in `folder`. With `resume`, the run continues from a checkpoint if
        there is one. `prefix` precedes the program on rank 0."""
        steps = str(steps or self.steps)
        if self.ranks:  # the program resumes if the checkpoint exists
            command = [*self.command, "steps=" + steps, f"checkpoint={folder / self.checkpoint}",
                       f"out={folder / self.results[0]}"]
            return [*MPIRUN, "-n", "1", *prefix, *command, ":", "-n", str(self.ranks - 1), *command]
        resume = resume and (folder / self.checkpoint).exists()
        return [*prefix, *self.command, "--steps", steps, "--out", str(folder), *(["--resume"] if resume else [])]

    def run(self, folder, **options):
        """Runs the program to its end. Returns the exit status and the output."""
        if self.ranks:  # the other programs create the folder
            folder.mkdir(parents=True, exist_ok=True)
        try:
            done = subprocess.run(self.arguments(folder, **options), text=True, stdout=subprocess.PIPE,
                                  stderr=subprocess.STDOUT, errors="replace", timeout=300)
        except subprocess.TimeoutExpired as error:
            raise Failure(f"{self.name} did not end within {error.timeout} seconds") from error
        return done.returncode, done.stdout

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

    def expect_complete(self, folder, whole, fault):
        """Raises Failure unless each result is missing or has the bits of the whole run. A CSV file may end at an
        earlier checkpoint. `fault` describes the fault that occurred."""
        if self.ranks:
            if (folder / self.results[0]).exists() and self.bits(folder) != whole:
                raise Failure(f"{self.name}: {self.results[0]} is damaged after {fault}")
            return
        for name, expected in whole.items():
            file = folder / name
            found = file.read_bytes() if file.exists() else expected
            prefix = name.endswith(".csv") and found.endswith(b"\n") and expected.startswith(found)
            if found != expected and not prefix:
                raise Failure(f"{self.name}: {name} is damaged after {fault}")

    def expect_resumable(self, folder, whole, fault, steps=None):
        """Raises Failure unless a resumed run ends with the results of the whole run."""
        code, output = self.run(folder, resume=True, steps=steps)
        if code != 0:
            raise Failure(f"{self.name}: the resumed run ended with {code} after {fault}: {output[-2000:]}")
        if self.bits(folder) != whole:
            raise Failure(f"{self.name}: the results of the resumed run differ after {fault}")


def make_programs(build, scratch):
    """Returns the programs of a build folder. Writes the dataset of segment to `scratch`."""
    make_dataset(scratch / "balls")
    superres = [str(build / "examples/superres"), "--phantom", "--device", "cpu", "--batch", "1", "--patch", "8",
                "--channels", "4", "--layers", "1", "--workers", "1"]
    segment = [str(build / "examples/segment"), "--dataset", str(scratch / "balls"), "--device", "cpu", "--batch", "2",
               "--patch", "16", "--spacing", "1", "--channels", "4", "--workers", "1", "--validate-every", "4"]
    ranks = [str(build / "tests/distributed_program"), "every=1"]
    return [Program("superres", superres, 1200, 300, "checkpoint.safetensors", ["model.safetensors", "losses.csv"]),
            Program("segment", segment, 40, 10, "checkpoint.safetensors",
                    ["model/fold_0/checkpoint_final.safetensors", "history.csv"]),
            Program("ranks", ranks, 50, 12, "run", ["result.safetensors"], ranks=2)]


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
