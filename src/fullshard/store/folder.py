"""Where checkpoints are kept: a folder that all ranks see, in which each is whole or not there.

    ROOT/
      step-000000100/                    a whole checkpoint: rank-0.safetensors, ..., manifest.json
      step-000000100.2/                  another one of the same step, saved after it
      step-000000200.saving-1f3a/        being written, or left by a save that was broken off; never read
      latest                             the name of the newest whole one
      lock                               locked by the process that writes

Every file is synced, then the folder renamed, then its parent synced, then `latest` replaced (rename(2)): a process
may be killed, and the machine switched off, between any two of these.

Checkpoints are ordered by the time in their manifests, never by the times of files, which copies change. A save takes
a time after all that are there, so this is the order of the saves whatever the clocks say.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
import secrets
import shutil
import stat
import time
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from ..errors import CheckpointError, DamagedCheckpointError, message
from . import manifest
from .in_place import placed, replace_file, sync, write_synced
from .storage import LocalStorage, Storage

LATEST = "latest"
LOCK = "lock"
_NAME = re.compile(r"step-(\d{9,})(?:\.(\d+))?")
_LEFT_OVER = re.compile(r"step-\d{9,}(?:\.\d+)?\.(?:saving|deleting)-[0-9a-f]+")
_POLL = 0.1  # seconds between two looks at a lock
START = 1024  # bytes of a manifest that step, world and time are in; and more than all of `latest`


class Folder:
    """See the module's docstring.

    Args:
        path: ROOT.
    """

    on_disk = True
    """Whether processes meet in it: files appear at once, and are renamed in one step."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path: Any = Path(path).absolute()

    def __str__(self) -> str:
        return str(self.path)

    def at(self, name: str) -> Any:
        """Where one checkpoint is; the folder itself for ""."""
        return self.path / name

    # Reading.

    @property
    def exists(self) -> bool:
        """Whether there is a folder, with or without checkpoints."""
        return bool(self.path.is_dir())

    @property
    def is_checkpoint(self) -> bool:
        """Whether files of a checkpoint lie in the folder itself: it is one, or something was moved here."""
        return any((self.path / name).is_file() for name in (manifest.NAME, ".metadata"))

    def has(self, name: str) -> bool:
        """Whether a checkpoint of this name is here; "" is the folder itself."""
        return name in self.names() if name else self.is_checkpoint

    def step_of(self, name: str) -> int | None:
        """The step in a checkpoint's name."""
        key = step_and_turn(name)
        return None if key is None else key[0]

    def names(self) -> list[str]:
        """The checkpoints that have a manifest, in the order in which they were saved."""
        return [name for _, _, name in sorted(self._times())]

    def time_of_next(self, now: float) -> float:
        """The time for the manifest of a new checkpoint: now, or just after the last one where the clock is behind."""
        return max([now, *(math.nextafter(time, math.inf) for time, _, _ in self._times())])

    def _times(self) -> list[tuple[float, tuple[int, int], str]]:
        """Of each checkpoint that has a manifest: the time it was saved, step and turn, and its name.

        One whose manifest is damaged counts as saved right after those of the steps before it: its damage is reported
        when it is the newest, and does not pass for an old checkpoint.
        """
        dated: list[tuple[float, tuple[int, int], str]] = []
        undated: list[tuple[tuple[int, int], str]] = []
        for name in self._entries():
            key = step_and_turn(name)
            start = None if key is None else self._start_of(f"{name}/{manifest.NAME}")
            if key is None or start is None:
                continue
            time = manifest.time_in(start)
            if time is None:
                undated.append((key, name))
            else:
                dated.append((time, key, name))
        for key, name in sorted(undated):
            dated.append((max((time for time, other, _ in dated if other < key), default=-math.inf), key, name))
        return dated

    def _entries(self) -> Iterable[str]:
        """The names of what is in the folder; nothing if there is none."""
        return os.listdir(self.path) if self.path.is_dir() else ()

    def _start_of(self, name: str) -> bytes | None:
        """The first bytes of a file in the folder; None if there is no such file. Links are not followed: they lead
        out of the folder."""
        path = self.path / name
        try:
            if path.parent.is_symlink() and path.parent != self.path:
                return None
            if not stat.S_ISREG(path.lstat().st_mode):
                return None
        except OSError:
            return None
        with contextlib.suppress(OSError):  # it is there, and reading it for more than its start will say what is wrong
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                return os.read(fd, START)
            finally:
                os.close(fd)
        return b""

    def latest(self) -> str | None:
        """The name in `latest`; None if there is none.

        Raises:
            CheckpointError: `latest` names no checkpoint that is here.
        """
        if LATEST not in self._entries():
            return None
        text = (self._start_of(LATEST) or b"").decode(errors="replace").strip()
        if step_and_turn(text) is None or self._start_of(f"{text}/{manifest.NAME}") is None:
            raise self.names_nothing(text)
        return text

    def newest(self) -> str | None:
        """The checkpoint that is meant where none is named: the last one saved here; "" if the folder itself is one,
        as other programs save them; None if there is none.

        Raises:
            CheckpointError: `latest` names no checkpoint that is here.
        """
        names = self.names()
        newest = self.latest() or (names[-1] if names else None)
        if not self.is_checkpoint:
            return newest
        if newest is None:
            return ""
        warnings.warn(
            message(
                "A folder of checkpoints has files of a checkpoint of its own, which are not read.",
                got=f"{manifest.NAME} or .metadata in {self}",
                expected=f"these only in the folders below: {newest} is read",
                remedy="move the files where they belong; and save a run's checkpoints to a folder that is not itself "
                "a checkpoint",
            ),
            stacklevel=3,
        )
        return newest

    def names_nothing(self, text: str) -> CheckpointError:
        """What to raise for what `latest` says."""
        return DamagedCheckpointError(
            "The file 'latest' does not name a complete checkpoint.",
            expected="the name of a folder beside it, such as step-000000100",
            got=repr(text),
            remedy=f"whole ones here: {', '.join(self.names()) or 'none'}; name one, or pass fall_back=True",
        )

    def storage(self, name: str) -> Storage:
        """The files of one checkpoint."""
        return LocalStorage(self.path / name)

    # Writing.

    def create(self, name: str, file: str) -> IO[bytes]:
        """A new file in what `begin` made, to be written from front to back."""
        return (self.path / name / file).open("xb")

    def sees(self, name: str) -> bool:
        """Whether this process sees what another one made by `begin`."""
        return (self.path / name).is_dir()

    def begin(self, step: int) -> str:
        """Make a folder to write into; returns its name."""
        name = f"step-{step:09d}"
        again = 1
        while (self.path / name).exists():
            again += 1
            name = f"step-{step:09d}.{again}"
        name = f"{name}.saving-{secrets.token_hex(4)}"
        (self.path / name).mkdir(parents=True)
        return name

    def publish(self, name: str, files: dict[str, bytes]) -> str:
        """Write the last files into what `begin` made, put it in its place, and let `latest` name it; its final name.

        Args:
            files: contents by name, written in this order.
        """
        here = self.path / name
        for file, data in files.items():
            write_synced(here / file, data)
        final = name.rpartition(".saving-")[0]
        with placed(here, self.path / final):  # until something names it, nothing shall be left of it
            replace_file(self.path / LATEST, f"{final}\n".encode())
        sync(self.path)
        return final

    def discard(self, name: str) -> None:
        """Remove what `begin` made, as far as the disk lets it; `clean` does the rest."""
        with contextlib.suppress(OSError):
            self.remove(name)

    def clean(self) -> None:
        """Remove what broken-off saves left. Only while the lock is held."""
        for path in self.path.iterdir():
            if _LEFT_OVER.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)

    def prune(self, keep_last: int | None, keep_every: int | None) -> list[str]:
        """Remove old checkpoints; returns their names.

        Args:
            keep_last: keep as many of the newest; None: all.
            keep_every: keep all whose step is a multiple of it, too.
        """
        if keep_last is None:
            return []
        removed = []
        for name in self.names()[:-keep_last]:
            step = self.step_of(name)
            if name == self.latest() or (keep_every is not None and step is not None and step % keep_every == 0):
                continue
            try:
                self.remove(name)
            except OSError as error:  # the new checkpoint is whole all the same
                warnings.warn(
                    message(f"An old checkpoint could not be removed: {self.at(name)}: {error}"),
                    stacklevel=2,
                )
            else:
                removed.append(name)
        return removed

    def remove(self, name: str) -> None:
        """Remove a checkpoint, which is not there from the first moment on: nobody writes into it any more."""
        doomed = self.path / f"{name.partition('.saving-')[0]}.deleting-{secrets.token_hex(4)}"
        (self.path / name).rename(doomed)
        sync(self.path)  # else files may be gone from it after a crash, and the name be there
        shutil.rmtree(doomed, ignore_errors=True)

    def refuse_file(self) -> None:
        """Raise where a file is in the way.

        Raises:
            CheckpointError: the folder's path, or one above it, is a file.
        """
        for path in (self.path, *self.path.parents) if self.on_disk else ():
            if path.exists() and not path.is_dir():
                raise CheckpointError(
                    f"{path} is a file; fullshard.save and fullshard.load use a folder.",
                    expected=f"a folder, or nothing yet, at {self.path}",
                    got=f"the file {path}",
                    remedy="pass a folder, such as runs/a; fullshard convert reads files of torch.save and safetensors",
                )

    @contextlib.contextmanager
    def locked(self, patience: float) -> Iterator[int]:
        """Hold the lock that excludes other saves into this folder; gives its file descriptor.

        The lock is the operating system's (flock): it goes with the processes that hold it, however they end.

        Args:
            patience: seconds to wait for another process.

        Raises:
            CheckpointError: another process holds it for longer.
        """
        import fcntl

        self.refuse_file()
        missing = [path for path in (self.path, *self.path.parents) if not path.exists()]
        self.path.mkdir(parents=True, exist_ok=True)
        for path in missing:
            sync(path.parent)
        fd = self._open_lock()
        try:
            deadline = time.monotonic() + patience
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= deadline:
                        holder = os.pread(fd, 100, 0).decode(errors="replace").strip()
                        raise CheckpointError(
                            "Another process is saving into the same folder.",
                            expected=f"the lock within {patience:g} s",
                            got=f"{self.path / LOCK} held by {holder or 'an unknown process'}",
                            remedy="give every run a folder of its own, or let the other save end",
                        ) from None
                    time.sleep(_POLL)
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"process {os.getpid()} on {os.uname().nodename}\n".encode(), 0)
            yield fd
        finally:
            os.close(fd)

    def _open_lock(self) -> int:
        """File descriptor of the lock's file.

        Raises:
            CheckpointError: something else is in its place, such as a link that another user of the folder prepared.
        """
        path = self.path / LOCK
        fd, error = -1, "not a regular file"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
            if stat.S_ISREG(os.fstat(fd).st_mode):
                return fd
        except OSError as failed:
            if failed.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                raise
            error = str(failed)
        if fd >= 0:
            os.close(fd)
        raise CheckpointError(
            "The file that locks a folder of checkpoints cannot be opened: something else is in its place.",
            expected=f"a file, or nothing yet, at {path}",
            got=error,
            remedy="remove it, and see who may write into the folder",
        )


def step_and_turn(name: str) -> tuple[int, int] | None:
    """The step in a checkpoint's name, and which of that step it is; None if it is no checkpoint's."""
    match = _NAME.fullmatch(name)
    return None if match is None else (int(match[1]), int(match[2] or 1))
