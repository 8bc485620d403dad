"""Checkpoints behind an address that fsspec knows, such as `s3://bucket/run`.

    ROOT/step-000000100/    a checkpoint: whole if manifest.json is in it, which is written last
                saving      while it is written: when that began
    ROOT/latest             the name of the newest whole one

Object stores rename nothing and lock nothing. A checkpoint is whole by its manifest alone; what a broken-off save left
is removed by the first save a day later; and two runs that save into one address are not kept apart.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import IO, Any

from ..errors import ConfigError
from . import manifest
from .folder import LATEST, START, Folder, step_and_turn
from .storage import RemoteStorage, Storage, file_system, is_remote, without_scheme

_SAVING = "saving"
_OLD = 24 * 3600.0  # seconds after which a save is taken for broken off


class RemoteFolder(Folder):
    """See the module's docstring, and `Folder`.

    Args:
        url: ROOT.

    Raises:
        ConfigError: fsspec, or what it needs for this kind of address, is not installed.
    """

    on_disk = False

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.path = ""
        file_system(self.url)

    def __str__(self) -> str:
        return self.url

    def _here(self, name: str = "") -> tuple[Any, str]:
        fs, path = file_system(self.url)
        return fs, f"{path}/{name}" if name else path

    def at(self, name: str) -> str:
        return f"{self.url}/{name}" if name else self.url

    @property
    def exists(self) -> bool:
        fs, path = self._here()
        return bool(fs.isdir(path))

    @property
    def is_checkpoint(self) -> bool:
        fs, path = self._here()
        return any(fs.isfile(f"{path}/{name}") for name in (manifest.NAME, ".metadata"))

    def _entries(self) -> Iterable[str]:
        fs, path = self._here()
        fs.invalidate_cache()  # other processes save here, too
        return [one.rstrip("/").rpartition("/")[2] for one in fs.ls(path, detail=False)] if fs.isdir(path) else ()

    def _start_of(self, name: str) -> bytes | None:
        fs, path = self._here(name)
        if not fs.isfile(path):
            return None
        try:
            return bytes(fs.cat_file(path, start=0, end=START))
        except OSError:  # of an empty object no bytes can be asked for
            return b""

    def storage(self, name: str) -> Storage:
        return RemoteStorage(self.at(name))

    def create(self, name: str, file: str) -> IO[bytes]:
        fs, path = self._here(f"{name}/{file}")
        return fs.open(path, "wb")

    def sees(self, name: str) -> bool:
        fs, path = self._here(name)
        fs.invalidate_cache()
        return bool(fs.isfile(f"{path}/{_SAVING}"))

    def begin(self, step: int) -> str:
        fs, _ = self._here()
        name = again = f"step-{step:09d}"
        turn = 1
        while fs.exists(self._here(again)[1]):
            turn += 1
            again = f"{name}.{turn}"
        path = self._here(again)[1]
        fs.makedirs(path, exist_ok=True)
        fs.pipe_file(f"{path}/{_SAVING}", str(time.time()).encode())
        return again

    def publish(self, name: str, files: dict[str, bytes]) -> str:
        fs, path = self._here(name)
        for file, data in files.items():
            fs.pipe_file(f"{path}/{file}", data)
        fs.rm_file(f"{path}/{_SAVING}")
        fs.pipe_file(self._here(LATEST)[1], f"{name}\n".encode())
        return name

    def discard(self, name: str) -> None:
        fs, path = self._here(name)
        if fs.exists(path):
            fs.rm(path, recursive=True)

    def clean(self) -> None:
        fs, _ = self._here()
        for name in self._entries():
            path = self._here(f"{name}/{_SAVING}")[1]
            if step_and_turn(name) is None or not fs.isfile(path):
                continue
            if self._start_of(f"{name}/{manifest.NAME}") is not None:  # whole: the save ended before this line of it
                fs.rm_file(path)
                continue
            began = _time_in(self._start_of(f"{name}/{_SAVING}") or b"")
            if began is None:  # it may be of a save that is just beginning
                fs.pipe_file(path, str(time.time()).encode())
            elif time.time() - began > _OLD:
                fs.rm(self._here(name)[1], recursive=True)

    def remove(self, name: str) -> None:
        fs, path = self._here(name)
        fs.rm_file(f"{path}/{manifest.NAME}")  # no longer whole, before anything else goes
        fs.rm(path, recursive=True)

    @contextmanager
    def locked(self, patience: float) -> Iterator[int]:
        yield -1


def _time_in(marker: bytes) -> float | None:
    """When a save began, by what it wrote; None if that does not say."""
    try:
        began = float(marker)
    except ValueError:
        return None
    return began if math.isfinite(began) else None


def folder_at(path: str | os.PathLike[str] | Folder) -> Folder:
    """The folder at a path or an address.

    Raises:
        ConfigError: it is neither.
    """
    if isinstance(path, Folder):
        return path
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
        raise ConfigError(
            "Checkpoints are kept in a folder.",
            expected="a path or an address",
            got=repr(path) if isinstance(path, str) else f"an object of class {type(path).__name__}",
            remedy='pass the folder first: save("runs/mine", model, ...)',
        )
    return RemoteFolder(os.fspath(path)) if is_remote(path) else Folder(without_scheme(path))
