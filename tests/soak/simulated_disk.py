"""A model of a file system with a write cache. It returns the states that a loss of power may leave on the disk.

The model assumes only what POSIX promises. fsync of a file makes its contents durable, but not its name. fsync of a
folder makes its entries durable, but not the name of the folder in its parent. A rename is atomic. Changes that were
not flushed may reach the disk in any order, or not at all.
"""
import dataclasses
import hashlib
import itertools

# The bytes of a file after a loss of power: nothing, everything, or part of the changes since the last fsync.
CONTENTS = ("lost", "all", "zeros", "short", "first half", "second half")


class File:
    """The contents of a file: `live` for programs, `durable` on the disk."""

    def __init__(self):
        self.live, self.durable = bytearray(), b""
        self.writes = []  # (offset, bytes) of the writes since the last fsync
        self.is_dirty = False
        self._digests = {}

    def write(self, offset, data):
        self.live.extend(bytes(max(0, offset + len(data) - len(self.live))))
        self.live[offset:offset + len(data)] = data
        self.writes.append((offset, data))
        self._change(True)

    def truncate(self, length):
        self.live = self.live[:length] + bytes(max(0, length - len(self.live)))
        self._change(True)

    def sync(self):
        self.durable, self.writes = bytes(self.live), []
        self._change(False)

    def _change(self, dirty):
        self.is_dirty, self._digests = dirty, {}

    def contents(self, kind):
        """Returns one of the possible contents after a loss of power; `kind` is one of CONTENTS."""
        if kind == "all" or not self.is_dirty:
            return bytes(self.live)
        if kind == "lost":
            return self.durable
        if kind == "short":
            return bytes(self.live[:(len(self.durable) + len(self.live)) // 2])
        # The new length has reached the disk, but only part of the bytes.
        found = bytearray(self.durable[:len(self.live)].ljust(len(self.live), b"\0"))
        total = sum(len(data) for _, data in self.writes)
        begin, end = {"zeros": (0, 0), "first half": (0, total // 2), "second half": (total // 2, total)}[kind]
        position = 0
        for offset, data in self.writes:
            low, high = max(begin - position, 0), min(end - position, len(data))
            if kind == "zeros":
                found[offset:offset + len(data)] = bytes(len(data))
            elif low < high:
                found[offset + low:offset + high] = data[low:high]
            position += len(data)
        return bytes(found[:len(self.live)])

    def digest(self, kind):
        if kind not in self._digests:
            self._digests[kind] = hashlib.blake2b(self.contents(kind), digest_size=8).digest()
        return self._digests[kind]


class Folder:
    """The entries of a folder: `live` for programs, `durable` on the disk."""

    def __init__(self):
        self.live, self.durable = {}, {}
        self.changes = []  # changes since the last fsync: name -> entry, or None if the name is removed

    def change(self, entries):
        self.changes.append(entries)
        self.live = merge(self.live, [entries])

    def sync(self):
        self.durable, self.changes = dict(self.live), []

    def variants(self):
        """Returns the possible entries: each number of first changes, all but one change, and only one change."""
        count = len(self.changes)
        chosen = [range(n) for n in range(count + 1)]
        for one in range(count):
            chosen += [[i for i in range(count) if i != one], [one]]
        return [merge(self.durable, [self.changes[i] for i in numbers])
                for numbers in {tuple(numbers) for numbers in chosen}]


def merge(entries, changes):
    """Returns the entries of a folder after some changes."""
    merged = dict(entries)
    for change in changes:
        merged.update(change)
    return {name: entry for name, entry in merged.items() if entry is not None}


@dataclasses.dataclass
class State:
    """The state of the disk after a loss of power."""
    folders: list  # paths relative to the root
    files: dict  # path relative to the root -> File
    kind: str  # contents of the files, one of CONTENTS

    def key(self):
        return frozenset([*self.folders, *((path, file.digest(self.kind)) for path, file in self.files.items())])

    def snapshot(self):
        """Returns (folders, bytes of the files by path)."""
        return self.folders, {path: file.contents(self.kind) for path, file in self.files.items()}


class Disk:
    """A file system that begins as an empty folder. Paths are tuples of names, relative to this folder."""

    def __init__(self):
        self.root = Folder()

    def find(self, path):
        """Returns the file or folder at a path, or None."""
        node = self.root
        for name in path:
            node = node.live.get(name) if isinstance(node, Folder) else None
        return node

    def link(self, path, node):
        self.find(path[:-1]).change({path[-1]: node})

    def unlink(self, path):
        self.link(path, None)

    def rename(self, old, new):
        if old[:-1] != new[:-1]:
            raise NotImplementedError("a rename between two folders")
        self.find(old[:-1]).change({old[-1]: None, new[-1]: self.find(old)})

    def states(self):
        """Yields the states that a loss of power may leave now. One folder has any variant of its entries, while the
        other folders have lost or kept all of their changes."""
        changed = [folder for folder in self._folders(self.root) if folder.changes]
        for one in changed or [self.root]:
            others = [folder for folder in changed if folder is not one]
            for entries, *kept in itertools.product(one.variants(), *[("durable", "live")] * len(others)):
                chosen = {id(one): entries, **{id(f): getattr(f, name) for f, name in zip(others, kept)}}
                folders, files = [], {}
                self._collect(self.root, (), chosen, folders, files)
                dirty = any(file.is_dirty for file in files.values())
                for kind in CONTENTS if dirty else ("all",):
                    yield State(folders, files, kind)

    def _folders(self, folder):
        found = [folder]
        for entries in (folder.live, folder.durable, *folder.changes):
            for node in entries.values():
                if isinstance(node, Folder):
                    found += [inner for inner in self._folders(node) if all(inner is not other for other in found)]
        return found

    def _collect(self, folder, path, chosen, folders, files):
        for name, node in chosen.get(id(folder), folder.live).items():
            if isinstance(node, Folder):
                folders.append((*path, name))
                self._collect(node, (*path, name), chosen, folders, files)
            else:
                files[(*path, name)] = node
