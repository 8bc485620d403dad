"""The calls by which this process changes files, counted and failed at will, and what of the files is on the disk.

    with Disk(folder) as disk:            the threads that are actors: `disk.acting("rank 0")`
        ...                               disk.calls: every call, in order
        disk.fault = Fault(...)           the n-th call of an actor fails, or is its last one

An actor that is killed changes nothing from that call on: each of its calls raises `Killed`, which nobody handles.

What a machine that is switched off may leave (`Disk.remains`): of a file the bytes at its last fsync; of a folder the
names at its last fsync, and any of the changes since. A rename within a folder is one change; else they may be lost in
any order (T. S. Pillai and others, "All File Systems Are Not Created Equal", OSDI 2014).
"""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import os
import stat
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

ACTOR = threading.local()
"""`.name` of whoever acts on this thread; calls on others are the test's own."""
BUFFER = 2048  # bytes of a file that go to the disk in one call: small, so that a file takes several
ERRORS = {"EIO": errno.EIO}

Tree = dict[str, bytes | None]
"""Contents by path below the folder; None for a folder."""


class Killed(BaseException):
    """In place of a signal."""


@dataclass
class Fault:
    """What is planted.

    Attributes:
        actor, number: at the actor's call of this number, from 1.
        kind: "kill", "torn" (killed within a write), "short" (half is written), "raise", or of `ERRORS`.
        call: at which it was, once it was.
    """

    actor: str
    number: int
    kind: str
    call: str | None = None


@dataclass
class Synced:
    """What is surely on the disk, by inode, and the changes of names since.

    Attributes:
        data: of files.
        names: of folders: inode by name.
        changes: of folders: (name that is gone, name that is new, inode), None where there is none.
    """

    data: dict[int, bytes]
    names: dict[int, dict[str, int]]
    changes: dict[int, list[tuple[str | None, str | None, int]]]


class Disk:
    """See the module's docstring.

    Args:
        folder: only what happens below it counts.
        observe: called with all that may remain, before each call and at the end.

    Attributes:
        calls: actor and call, in order.
    """

    def __init__(self, folder: Path, observe: Callable[[Disk], None] | None = None) -> None:
        self.folder, self.observe = folder, observe
        self.calls: list[tuple[str, str]] = []
        self.fault: Fault | None = None
        self.dead: set[str] = set()
        self._counts: Counter[str] = Counter()
        self._lock = threading.RLock()
        self._held: dict[int, int] = {}  # descriptors, by inode: no number is used again
        self._closing = contextlib.ExitStack()

    def __enter__(self) -> Disk:
        for name in ("mkdir", "rename", "replace", "unlink", "rmdir", "fsync", "ftruncate", "pwrite"):
            self._closing.enter_context(mock.patch.object(os, name, self._wrapped(name)))
        self._closing.enter_context(mock.patch.object(os, "open", self._wrapped_open()))
        self._closing.enter_context(mock.patch.object(io, "open", self._wrapped_io_open()))
        if self.observe is not None:
            data, names = self._now()
            self.synced = Synced(data, names, {number: [] for number in names})
        return self

    def __exit__(self, *exc: object) -> None:
        self._closing.close()
        if self.observe is not None and exc[0] is None:
            self.observe(self)
        for fd in self._held.values():
            os.close(fd)

    @contextlib.contextmanager
    def acting(self, actor: str) -> Iterator[None]:
        """Within, this thread is the actor."""
        ACTOR.name = actor
        try:
            yield
        finally:
            ACTOR.name = None

    # Calls.

    def _call(self, call: str, path: Path, inner: Callable[[], Any], change: Callable[[], None] | None = None) -> Any:
        """Do a call, or what is planted in its place."""
        actor = getattr(ACTOR, "name", None)
        if actor is None or not path.is_relative_to(self.folder):
            return inner()
        with self._lock:
            if actor in self.dead:
                raise Killed
            if self.observe is not None:
                self.observe(self)
            self.calls.append((actor, f"{call} {path.relative_to(self.folder)}"))
            self._counts[actor] += 1
            fault = self.fault
            if fault is not None and (actor, self._counts[actor]) == (fault.actor, fault.number):
                fault.call = self.calls[-1][1]
                if fault.kind == "kill":
                    self.dead.add(actor)
                    raise Killed
                if fault.kind == "raise":
                    raise ValueError("planted")
                if fault.kind in ERRORS:
                    raise OSError(ERRORS[fault.kind], os.strerror(ERRORS[fault.kind]))
            result = inner()
            if self.observe is not None and change is not None:
                change()
            return result

    def write(self, path: Path, data: memoryview, inner: Callable[[Any], int]) -> int:
        """One write(2) to a file."""
        if getattr(ACTOR, "name", None) in self.dead:
            return len(data)  # a file that is closed, and empties its buffer
        fault = self.fault

        def wrote() -> int:
            if fault is None or fault.call is None or fault.kind not in ("short", "torn"):
                return inner(data)
            if self.calls[-1] != (fault.actor, fault.call) or self._counts[fault.actor] != fault.number:
                return inner(data)
            half = inner(data[: max(1, len(data) // 2)])
            if fault.kind == "torn":
                self.dead.add(fault.actor)
                raise Killed
            return half

        return int(self._call("write", path, wrote))

    def _wrapped(self, name: str) -> Callable[..., Any]:
        inner = getattr(os, name) if name != "fsync" else lambda number: None  # nobody switches this machine off

        def call(what: Any, *args: Any, **options: Any) -> Any:
            path = path_of(what, options.get("dir_fd"))
            return self._call(name, path, lambda: inner(what, *args, **options), self._change(name, path, args))

        return call

    def _wrapped_open(self) -> Callable[..., int]:
        inner = os.open

        def call(what: Any, flags: int, *args: Any, **options: Any) -> int:
            path = path_of(what, options.get("dir_fd"))
            if not flags & os.O_CREAT:
                return inner(what, flags, *args, **options)
            number: int = self._call("open", path, lambda: inner(what, flags, *args, **options), self._created(path))
            return number

        return call

    def _wrapped_io_open(self) -> Callable[..., Any]:
        inner, disk = io.open, self

        class Raw(io.FileIO):
            def write(self, data: Any) -> int:
                return disk.write(Path(self.name), memoryview(data), super().write)

        def call(what: Any, mode: str = "r", buffering: int = -1, *args: Any, **options: Any) -> Any:
            if isinstance(what, int) or not set(mode) & set("wax+") or getattr(ACTOR, "name", None) is None:
                return inner(what, mode, buffering, *args, **options)
            path = path_of(what, None)
            bare = mode.replace("b", "").replace("t", "")
            raw = self._call("open", path, lambda: Raw(what, bare), self._created(path))
            if buffering == 0:
                return raw
            file = io.BufferedWriter(raw, BUFFER)
            return file if "b" in mode else io.TextIOWrapper(file, *args, **options)

        return call

    # What is on the disk.

    def _now(self) -> tuple[dict[int, bytes], dict[int, dict[str, int]]]:
        """Of files their bytes, of folders their names, by inode."""
        data: dict[int, bytes] = {}
        names: dict[int, dict[str, int]] = {}
        for folder, below, files in os.walk(self.folder):
            here = names.setdefault(self._number(Path(folder)), {})
            for name in [*below, *files]:
                here[name] = self._number(Path(folder, name))
            for name in files:
                data[here[name]] = Path(folder, name).read_bytes()
        return data, names

    def _number(self, path: Path) -> int:
        """The inode of a file; it stays its own until the end."""
        number = path.stat().st_ino
        if number not in self._held:
            self._held[number] = os.open(path, os.O_RDONLY)
        return number

    def _change(self, name: str, path: Path, args: tuple[Any, ...]) -> Callable[[], None] | None:
        """What is to be noted after a call."""
        if self.observe is None or name in ("ftruncate", "pwrite"):
            return None
        if name == "fsync":
            return lambda: self._sync(path)
        if name == "mkdir":
            return self._created(path)
        number = path.stat(follow_symlinks=False).st_ino if path.exists() else 0
        changes = self.synced.changes.setdefault(path.parent.stat().st_ino, []) if number else []
        if name in ("unlink", "rmdir"):
            return lambda: changes.append((path.name, None, number))
        to = Path(args[0])
        if to.parent == path.parent:
            return lambda: changes.append((path.name, to.name, number))
        there = self.synced.changes.setdefault(to.parent.stat().st_ino, [])
        return lambda: (changes.append((path.name, None, number)), there.append((None, to.name, number)))[0]

    def _created(self, path: Path) -> Callable[[], None] | None:
        """What is to be noted after a call that makes a file or a folder, if it is not there."""
        if self.observe is None or path.exists():
            return None

        def change() -> None:
            number, folder = self._number(path), path.parent.stat().st_ino
            self.synced.changes.setdefault(folder, []).append((None, path.name, number))
            if path.is_dir():
                self.synced.names[number] = {}
            else:
                self.synced.data[number] = b""

        return change

    def _sync(self, path: Path) -> None:
        number = path.stat().st_ino
        if stat.S_ISDIR(path.stat().st_mode):
            _, names = self._now()
            self.synced.names[number], self.synced.changes[number] = names[number], []
        else:
            self.synced.data[number] = path.read_bytes()

    def remains(self) -> Iterator[Tree]:
        """What may be left if the machine is switched off now; first what is left if only the processes end."""
        data, names = self._now()
        top = self.folder.stat().st_ino
        yield tree_of(top, data, names)
        synced = self.synced
        unsynced = [number for number in data if data[number] != synced.data.get(number, b"")]
        of_data = [
            {number: synced.data.get(number, b"") if lost in (None, number) else data[number] for number in unsynced}
            for lost in (None, *unsynced)
        ] + [{number: data[number] for number in unsynced}]
        changed = [folder for folder, changes in synced.changes.items() if changes]
        of_names = [[applied(synced.names.get(f, {}), some) for some in parts(synced.changes[f])] for f in changed]
        for choice in itertools.product(*of_names):
            listed = {**synced.names, **dict(zip(changed, choice, strict=True))}
            for contents in of_data:
                yield tree_of(top, {**synced.data, **contents}, listed)


def parts(changes: list[Any]) -> list[list[Any]]:
    """None of them, all, each one alone, all but each one, and all up to each one."""
    found = [[], changes]
    for i in range(len(changes)):
        found += [changes[i : i + 1], changes[:i] + changes[i + 1 :], changes[:i]]
    return [some for i, some in enumerate(found) if some not in found[:i]]


def applied(names: dict[str, int], changes: list[tuple[str | None, str | None, int]]) -> dict[str, int]:
    """A folder's names after changes; one of a name that is not there changes nothing."""
    made = dict(names)
    for gone, new, number in changes:
        if gone is not None and made.get(gone) != number:
            continue
        if gone is not None:
            del made[gone]
        if new is not None:
            made[new] = number
    return made


def tree_of(top: int, data: dict[int, bytes], names: dict[int, dict[str, int]]) -> Tree:
    tree: Tree = {}

    def add(number: int, path: str) -> None:
        for name, below in names.get(number, {}).items():
            tree[path + name] = None if below in names else data.get(below, b"")
            if below in names:
                add(below, f"{path}{name}/")

    add(top, "")
    return tree


def put(tree: Tree, folder: Path) -> None:
    """Make a folder of it."""
    folder.mkdir(parents=True)
    for name, content in sorted(tree.items()):
        if content is None:
            (folder / name).mkdir()
        else:
            (folder / name).write_bytes(content)


def path_of(what: Any, dir_fd: int | None) -> Path:
    """Of a file that a call is given."""
    if isinstance(what, int):
        return Path(os.readlink(f"/proc/self/fd/{what}"))
    above = Path.cwd() if dir_fd is None else Path(os.readlink(f"/proc/self/fd/{dir_fd}"))
    return above / os.fspath(what)
