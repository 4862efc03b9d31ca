"""The part `power` of soak.py: the states of the disk that a loss of power may leave."""
import random
import re
import shutil
import subprocess

from programs import Failure
from simulated_disk import Disk, File, Folder

TRACED = ("openat,open,creat,mkdir,mkdirat,write,writev,pwrite64,lseek,ftruncate,fsync,fdatasync,rename,unlink,"
          "unlinkat,mmap")
# The model does not implement these calls.
UNSUPPORTED = ("rmdir,link,linkat,symlink,symlinkat,truncate,fallocate,copy_file_range,sendfile,splice,pwritev,"
               "pwritev2,renameat,renameat2")
CALL = re.compile(r"^(\d+) +(\w+)\((.*)\) += (-?\d+)(?:<(.*?)>)?")
TEMPORARY = re.compile(r"\..*\.voxgrad-\d+\.tmp")


def read_calls(log):
    """Yields (name, arguments, result, path of a returned descriptor) of the successful calls in a log of strace."""
    begun = {}  # process -> the first part of a call that was interrupted by a call of another process
    with open(log, encoding="latin-1") as lines:
        for line in lines:
            process = line.split(" ", 1)[0]
            if line.endswith("<unfinished ...>\n"):
                begun[process] = line[:-len("<unfinished ...>\n")]
                continue
            if resumed := re.match(r"\d+ +<\.\.\. \w+ resumed>(.*)", line):
                line = begun.pop(process) + resumed[1]
            match = CALL.match(line)
            if match and int(match[4]) >= 0:
                yield match[2], match[3], int(match[4]), decode(match[5] or "").decode()


def decode(text):
    """Returns the bytes of a string in the hexadecimal notation of strace -xx."""
    return bytes.fromhex(text.replace("\\x", ""))


class Recording:
    """Repeats the calls of a program on a simulated disk."""

    def __init__(self, root):
        self.root, self.disk = str(root), Disk()
        self.offsets = {}  # file -> position; a file has one writer at a time
        self.complete = {}  # path -> digests of the contents that were renamed to this path, from old to new
        self.promised = {}  # path -> number of these contents that must survive a loss of power
        self.renames = 0

    def path(self, text):
        """Returns a path relative to the root as a tuple, or None if it is outside."""
        if text == self.root:
            return ()
        return tuple(text[len(self.root) + 1:].split("/")) if text.startswith(self.root + "/") else None

    def keep_promises(self):
        """Called when the program has finished all writes so far: it creates its next file, or it ends."""
        self.promised = {path: len(versions) for path, versions in self.complete.items()}

    def apply(self, name, arguments, result, opened):
        """Applies a call. Returns whether the call has changed the disk."""
        texts = re.findall(r'"((?:\\x..)*)"', arguments)
        descriptor = re.match(r"(\d+)<((?:\\x..)*)>", arguments)
        target = decode(descriptor[2] if descriptor else texts[0] if texts else "").decode(errors="replace")
        path = self.path(opened or target)
        if path is None:
            return False
        if name in UNSUPPORTED.split(",") or (name == "mmap" and "MAP_SHARED" in arguments and "WRITE" in arguments):
            raise Failure(f"the simulated disk does not support {name} of {'/'.join(path)}")
        node = self.disk.find(path)
        if name in ("openat", "open", "creat"):
            return self.open(path, node, arguments)
        if name in ("mkdir", "mkdirat"):
            self.disk.link(path, Folder())
        elif name in ("unlink", "unlinkat"):
            self.disk.unlink(path)
        elif name == "rename":
            self.rename(path, self.path(decode(texts[1]).decode()))
        elif node is None:
            return False  # the file has no name any more
        elif name in ("fsync", "fdatasync"):
            node.sync()
        elif name == "ftruncate":
            node.truncate(int(arguments.rsplit(",", 1)[1]))
        elif name == "lseek":
            self.offsets[node] = result
            return False
        elif name == "pwrite64":
            node.write(int(arguments.rsplit(",", 1)[1]), decode(texts[0])[:result])
        elif name in ("write", "writev"):
            at = self.offsets[node]
            node.write(at, decode("".join(texts))[:result])
            self.offsets[node] = at + result
        else:
            return False
        return True

    def open(self, path, node, arguments):
        changed = False
        if node is None and "O_CREAT" in arguments:
            self.keep_promises()
            node = File()
            self.disk.link(path, node)
            changed = True
        if isinstance(node, File):
            if "O_TRUNC" in arguments:
                node.truncate(0)
                changed = True
            if "O_WRONLY" in arguments or "O_RDWR" in arguments:
                self.offsets[node] = len(node.live) if "O_APPEND" in arguments else 0
        return changed

    def rename(self, old, new):
        versions = self.complete.setdefault(new, [])
        digest = self.disk.find(old).digest("all")
        if digest not in versions[-1:]:
            versions.append(digest)
        self.disk.rename(old, new)
        self.renames += 1

    def visible(self, state):
        """Checks a state: each file must be complete and have its newest contents, or those before if the program has
        not returned from the last write. Returns the numbers of the contents by path, without temporary files."""
        versions = {}
        for path, file in state.files.items():
            if TEMPORARY.fullmatch(path[-1]):
                continue
            found = file.digest(state.kind)
            if found not in self.complete.get(path, []):
                raise Failure(f"{'/'.join(path)} is incomplete ({state.kind})")
            known = self.complete[path]
            versions[path] = len(known) - known[::-1].index(found)
        for path, promised in self.promised.items():
            if versions.get(path, 0) < promised:
                raise Failure(f"{'/'.join(path)} was lost although its write had ended")
        return frozenset(versions.items())


def write_state(folder, snapshot):
    """Writes a state of the disk into a new folder."""
    folders, files = snapshot
    folder.mkdir()
    for path in folders:
        folder.joinpath(*path).mkdir()
    for path, data in files.items():
        folder.joinpath(*path).write_bytes(data)


def collect_states(recording, log, chance, limit):
    """Repeats a log. Returns the number of moments, the number of distinct states, and a sample of the states: one for
    each set of visible files, and others at random up to `limit`. The states of a set differ in temporary files."""
    seen, groups, others = set(), {}, []
    moments = 0
    for call in [None, *read_calls(log), "end"]:
        if call == "end":
            recording.keep_promises()
        elif call and not recording.apply(*call):
            continue
        moments += 1
        for state in recording.disk.states():
            group, key = recording.visible(state), hash(state.key())
            if key in seen:
                continue
            seen.add(key)
            count, representative = groups.get(group, (0, None))
            if chance.randrange(count + 1) == 0:  # each state of the group is chosen with the same probability
                representative = state.snapshot()
            groups[group] = count + 1, representative
            if len(others) < limit:
                others.append(state.snapshot())
            elif (place := chance.randrange(len(seen))) < limit:
                others[place] = state.snapshot()
    chosen = [representative for _, representative in groups.values()]
    return moments, len(seen), len(groups), chosen + others[:max(0, limit - len(chosen))]


def check_power(programs, scratch, options):
    """Runs part `power`. Records each program, checks all states, and resumes from a sample of them."""
    texts = []
    for program in programs:
        chance, log = random.Random(options.seed), scratch / "power.log"
        root = scratch / f"{program.name}-power"
        root.mkdir()
        # The programs other than ranks create this folder and its parent.
        inner = ("new", "out") if not program.ranks else ()
        steps = program.short_steps
        done = subprocess.run(["strace", "-f", "-y", "-xx", "-s", "1000000000", "-o", str(log), "-e",
                               f"trace={TRACED},{UNSUPPORTED}",
                               *program.arguments(root.joinpath(*inner), steps=steps)], text=True, check=False,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        if done.returncode != 0:
            raise Failure(f"{program.name} ended with {done.returncode}: {done.stdout[-2000:]}")
        expected, recording = program.bits(root.joinpath(*inner)), Recording(root)
        try:
            moments, count, groups, chosen = collect_states(recording, log, chance, options.states)
        except Failure as failure:
            raise Failure(f"{program.name}: after a loss of power, {failure}") from failure
        if recording.renames == 0:
            raise Failure(f"{program.name}: strace has recorded no rename")
        for number, snapshot in enumerate(chosen):
            folder = scratch / "state"
            write_state(folder, snapshot)
            program.expect_resumable(folder.joinpath(*inner), expected, f"a loss of power (state {number})", steps)
            shutil.rmtree(folder)
        texts.append(f"{program.name}: {recording.renames} renames, {moments} moments, {count} states that differ in "
                     f"{groups} ways outside temporary files, resumed from {len(chosen)}")
    return "; ".join(texts) + ": complete files, same bits"
