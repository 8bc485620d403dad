"""A folder of checkpoints, shared by all ranks. A checkpoint in it is complete or does not exist.

    ROOT/
      step-000000100/                    a complete checkpoint: rank-0.safetensors, ..., manifest.json
      step-000000100.2/                  a second checkpoint of the same step, saved later
      step-000000200.saving-1f3a/        being written, or left by an interrupted save; never read
      latest                             the name of the newest complete checkpoint
      lock                               locked by the process that is saving

A save syncs every file, renames the folder, syncs its parent, then replaces `latest` (rename(2)). The process may be
killed, or the machine lose power, between any two of these steps.

Checkpoints are ordered by the time in their manifests, never by file times, which copying changes. A save uses a time
later than that of every existing checkpoint, so the order is that of the saves even if clocks are wrong.
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
from .in_place import placed, replace_file, sync, write_synced
from .manifest import time_in
from .storage import MANIFEST, METADATA, LocalStorage, Storage, open_file

LATEST = "latest"
LOCK = "lock"
_NAME = re.compile(r"step-(\d{9,})(?:\.(\d+))?")
_LEFTOVER = re.compile(r"step-\d{9,}(?:\.\d+)?\.(?:saving|deleting)-[0-9a-f]+")
_POLL = 0.1  # seconds between two attempts to take the lock
START = 1024  # bytes: the beginning of a manifest, with step, world and time; longer than `latest`


class Folder:
    """See the module's docstring.

    Args:
        path: ROOT.
    """

    on_disk = True
    """Whether it is a file system, where other processes see files at once and renames are atomic."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path: Any = Path(path).absolute()

    def __str__(self) -> str:
        return str(self.path)

    def at(self, name: str) -> Any:
        """The path of a checkpoint; "" is the folder itself."""
        return self.path / name

    # Reading.

    @property
    def exists(self) -> bool:
        """Whether the folder exists, with or without checkpoints."""
        return bool(self.path.is_dir())

    @property
    def is_checkpoint(self) -> bool:
        """Whether the folder itself contains a checkpoint's manifest or metadata."""
        return any((self.path / name).is_file() for name in (MANIFEST, METADATA))

    def has(self, name: str) -> bool:
        """Whether a checkpoint of this name exists; "" is the folder itself."""
        return name in self.names() if name else self.is_checkpoint

    def step_of(self, name: str) -> int | None:
        """The step in a checkpoint's name."""
        key = step_and_turn(name)
        return None if key is None else key[0]

    def names(self) -> list[str]:
        """The checkpoints that have a manifest, in the order in which they were saved."""
        return [name for _, _, name in sorted(self._times())]

    def time_of_next(self, now: float) -> float:
        """The time of a new checkpoint: `now`, or just after the last checkpoint if the clock is behind it."""
        return max([now, *(math.nextafter(time, math.inf) for time, _, _ in self._times())])

    def _times(self) -> list[tuple[float, tuple[int, int], str]]:
        """For each checkpoint that has a manifest: when it was saved, its step and turn, and its name.

        A damaged manifest counts as saved right after the checkpoints of earlier steps. If it is the newest checkpoint,
        its damage is thus reported, and it is not mistaken for an old one.
        """
        dated: list[tuple[float, tuple[int, int], str]] = []
        undated: list[tuple[tuple[int, int], str]] = []
        for name in self._entries():
            key = step_and_turn(name)
            start = None if key is None else self._start_of(f"{name}/{MANIFEST}")
            if key is None or start is None:
                continue
            time = time_in(start)
            if time is None:
                undated.append((key, name))
            else:
                dated.append((time, key, name))
        for key, name in sorted(undated):
            dated.append((max((time for time, other, _ in dated if other < key), default=-math.inf), key, name))
        return dated

    def _entries(self) -> Iterable[str]:
        """The names of all files and folders in it; empty if it does not exist."""
        return os.listdir(self.path) if self.path.is_dir() else ()

    def _start_of(self, name: str) -> bytes | None:
        """The first bytes of a file in the folder; None if it does not exist. Never follows a link."""
        path = self.path / name
        try:
            if path.parent.is_symlink() and path.parent != self.path:
                return None
            if not stat.S_ISREG(path.lstat().st_mode):
                return None
        except OSError:
            return None
        with contextlib.suppress(OSError, DamagedCheckpointError), open_file(path) as file:
            return file.read(START)
        return b""  # reading all of it later reports the error

    def latest(self) -> str | None:
        """The name in `latest`; None if the file does not exist.

        Raises:
            DamagedCheckpointError: it does not name a checkpoint in this folder.
        """
        if LATEST not in self._entries():
            return None
        text = (self._start_of(LATEST) or b"").decode(errors="replace").strip()
        if step_and_turn(text) is None or self._start_of(f"{text}/{MANIFEST}") is None:
            raise DamagedCheckpointError(
                "The file 'latest' does not name a complete checkpoint.",
                expected="the name of a folder beside it, such as step-000000100",
                got=repr(text),
                remedy=f"complete checkpoints here: {', '.join(self.names()) or 'none'}; name one, or pass "
                "fall_back=True",
            )
        return text

    def newest(self) -> str | None:
        """The default checkpoint: the last one saved here; "" if the folder itself is one; None if there is none.

        Raises:
            DamagedCheckpointError: see `latest`.
        """
        names = self.names()
        newest = self.latest() or (names[-1] if names else None)
        if not self.is_checkpoint:
            return newest
        if newest is None:
            return ""
        warnings.warn(
            message(
                "A folder of checkpoints also contains checkpoint files itself; they are not read.",
                got=f"{MANIFEST} or .metadata in {self}",
                expected=f"such files only in its subfolders: {newest} is read",
                remedy="move the files where they belong; and save a run's checkpoints to a folder that is not itself "
                "a checkpoint",
            ),
            stacklevel=3,
        )
        return newest

    def storage(self, name: str) -> Storage:
        """The files of one checkpoint."""
        return LocalStorage(self.path / name)

    # Writing.

    def create(self, name: str, file: str) -> IO[bytes]:
        """Create a file in the folder that `begin` created, to be written sequentially."""
        return (self.path / name / file).open("xb")

    def sees(self, name: str) -> bool:
        """Whether this process sees the folder that another process created by `begin`."""
        return (self.path / name).is_dir()

    def begin(self, step: int) -> str:
        """Create a folder to write a checkpoint into; returns its name."""
        name = f"{self._free_name(step)}.saving-{secrets.token_hex(4)}"
        (self.path / name).mkdir(parents=True)
        return name

    def _free_name(self, step: int) -> str:
        """The name of the next checkpoint of a step."""
        entries, name, turn = set(self._entries()), f"step-{step:09d}", 1
        while name in entries:
            turn += 1
            name = f"step-{step:09d}.{turn}"
        return name

    def publish(self, name: str, files: dict[str, bytes]) -> str:
        """Finish the checkpoint that `begin` began: write the last files, give it its name, update `latest`.

        Args:
            files: contents by name, written in this order.

        Returns:
            The checkpoint's name.
        """
        here = self.path / name
        for file, data in files.items():
            write_synced(here / file, data)
        final = name.rpartition(".saving-")[0]
        with placed(here, self.path / final):  # undone unless `latest` names it
            replace_file(self.path / LATEST, f"{final}\n".encode())
        sync(self.path)
        return final

    def discard(self, name: str) -> None:
        """Remove the folder that `begin` created, as far as possible; `clean` removes the rest."""
        with contextlib.suppress(OSError):
            self.remove(name)

    def clean(self) -> None:
        """Remove what interrupted saves left. Requires the lock."""
        for path in self.path.iterdir():
            if _LEFTOVER.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)

    def prune(self, keep_last: int | None, keep_every: int | None) -> list[str]:
        """Remove old checkpoints; returns their names.

        Args:
            keep_last: how many of the newest to keep; None: all.
            keep_every: also keep every checkpoint whose step is a multiple of it.
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
            except OSError as error:  # the new checkpoint is complete nevertheless
                warnings.warn(
                    message(f"An old checkpoint could not be removed: {self.at(name)}: {error}"),
                    stacklevel=2,
                )
            else:
                removed.append(name)
        return removed

    def remove(self, name: str) -> None:
        """Remove a checkpoint. The first step, a rename, takes it out of use at once and keeps writers out of it."""
        doomed = self.path / f"{name.partition('.saving-')[0]}.deleting-{secrets.token_hex(4)}"
        (self.path / name).rename(doomed)
        sync(self.path)  # otherwise a crash might leave the old name with files missing
        shutil.rmtree(doomed, ignore_errors=True)

    def refuse_file(self) -> None:
        """Check that no file is in the folder's path.

        Raises:
            CheckpointError: the folder's path, or one above it, is a file.
        """
        for path in (self.path, *self.path.parents) if self.on_disk else ():
            if path.exists() and not path.is_dir():
                raise CheckpointError(
                    f"{path} is a file; fullshard.save and fullshard.load use a folder.",
                    expected=f"a folder or no entry at {self.path}",
                    got=f"the file {path}",
                    remedy="pass a folder, such as runs/a; fullshard convert reads files of torch.save and safetensors",
                )

    @contextlib.contextmanager
    def locked(self, patience: float) -> Iterator[int]:
        """Hold the lock that excludes other saves into this folder; yields its file descriptor.

        It is a lock of the operating system (flock), which releases it when the processes that hold it end.

        Args:
            patience: seconds to wait for another process.

        Raises:
            CheckpointError: another process still holds it.
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
                            remedy="use a separate folder for each run, or wait for the other save",
                        ) from None
                    time.sleep(_POLL)
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"process {os.getpid()} on {os.uname().nodename}\n".encode(), 0)
            yield fd
        finally:
            os.close(fd)

    def _open_lock(self) -> int:
        """Open the lock's file; returns its descriptor.

        Raises:
            CheckpointError: it is not a regular file, but a link planted by another user, say.
        """
        path = self.path / LOCK
        reason = "not a regular file"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
            if stat.S_ISREG(os.fstat(fd).st_mode):
                return fd
            os.close(fd)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                raise
            reason = str(error)
        raise CheckpointError(
            "The lock of a folder of checkpoints cannot be opened: it is not a regular file.",
            expected=f"a file or no entry at {path}",
            got=reason,
            remedy="remove it, and check who can write to the folder",
        )


def step_and_turn(name: str) -> tuple[int, int] | None:
    """The step in a checkpoint's name, and its number among those of that step; None if it is not such a name."""
    match = _NAME.fullmatch(name)
    return None if match is None else (int(match[1]), int(match[2] or 1))
