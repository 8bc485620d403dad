"""Checkpoints at an fsspec address, such as `s3://bucket/run`.

    ROOT/step-000000100/    a checkpoint: complete once it contains manifest.json, which is written last
                saving      exists during the save: the time it began
    ROOT/latest             the name of the newest complete checkpoint

Object stores have neither renames nor locks. The manifest alone makes a checkpoint complete; what an interrupted save
left is removed by the first save a day later; and two runs must not save to the same address.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import IO, Any

from ..errors import ConfigError
from .folder import LATEST, START, Folder, step_and_turn
from .storage import MANIFEST, METADATA, RemoteStorage, Storage, file_system

_SAVING = "saving"
_OLD = 24 * 3600.0  # seconds after which a save counts as interrupted


class RemoteFolder(Folder):
    """See the module's docstring, and `Folder`.

    Args:
        url: ROOT.

    Raises:
        ConfigError: fsspec or its package for this kind of address is not installed.
    """

    on_disk = False

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        file_system(self.url)

    def __str__(self) -> str:
        return self.url

    def _resolve(self, name: str = "") -> tuple[Any, str]:
        fs, path = file_system(self.url)
        return fs, f"{path}/{name}" if name else path

    def at(self, name: str) -> str:
        return f"{self.url}/{name}" if name else self.url

    @property
    def exists(self) -> bool:
        fs, path = self._resolve()
        return bool(fs.isdir(path))

    @property
    def is_checkpoint(self) -> bool:
        fs, path = self._resolve()
        return any(fs.isfile(f"{path}/{name}") for name in (MANIFEST, METADATA))

    def _entries(self) -> Iterable[str]:
        fs, path = self._resolve()
        fs.invalidate_cache()  # other processes may have saved
        return [entry.rstrip("/").rpartition("/")[2] for entry in fs.ls(path, detail=False)] if fs.isdir(path) else ()

    def _start_of(self, name: str) -> bytes | None:
        fs, path = self._resolve(name)
        if not fs.isfile(path):
            return None
        try:
            return bytes(fs.cat_file(path, start=0, end=START))
        except OSError:  # a range of an empty object
            return b""

    def storage(self, name: str) -> Storage:
        return RemoteStorage(self.at(name))

    def create(self, name: str, file: str) -> IO[bytes]:
        fs, path = self._resolve(f"{name}/{file}")
        return fs.open(path, "wb")

    def sees(self, name: str) -> bool:
        fs, path = self._resolve(name)
        fs.invalidate_cache()
        return bool(fs.isfile(f"{path}/{_SAVING}"))

    def begin(self, step: int) -> str:
        name = self._free_name(step)
        fs, path = self._resolve(name)
        fs.makedirs(path, exist_ok=True)
        fs.pipe_file(f"{path}/{_SAVING}", str(time.time()).encode())
        return name

    def publish(self, name: str, files: dict[str, bytes]) -> str:
        fs, path = self._resolve(name)
        for file, data in files.items():
            fs.pipe_file(f"{path}/{file}", data)
        fs.rm_file(f"{path}/{_SAVING}")
        fs.pipe_file(self._resolve(LATEST)[1], f"{name}\n".encode())
        return name

    def discard(self, name: str) -> None:
        fs, path = self._resolve(name)
        if fs.exists(path):
            fs.rm(path, recursive=True)

    def clean(self) -> None:
        fs, _ = self._resolve()
        for name in self._entries():
            path = self._resolve(f"{name}/{_SAVING}")[1]
            if step_and_turn(name) is None or not fs.isfile(path):
                continue
            if self._start_of(f"{name}/{MANIFEST}") is not None:  # complete: only the marker was not removed
                fs.rm_file(path)
                continue
            began = _time_in(self._start_of(f"{name}/{_SAVING}") or b"")
            if began is None:  # perhaps a save is just beginning
                fs.pipe_file(path, str(time.time()).encode())
            elif time.time() - began > _OLD:
                fs.rm(self._resolve(name)[1], recursive=True)

    def remove(self, name: str) -> None:
        fs, path = self._resolve(name)
        fs.rm_file(f"{path}/{MANIFEST}")  # first, so that it is never complete with files missing
        fs.rm(path, recursive=True)

    @contextmanager
    def locked(self, patience: float) -> Iterator[int]:
        yield -1


def _time_in(marker: bytes) -> float | None:
    """When a save began, according to its marker; None if the marker has no valid time."""
    try:
        began = float(marker)
    except ValueError:
        return None
    return began if math.isfinite(began) else None


def folder_at(path: str | os.PathLike[str] | Folder) -> Folder:
    """The folder at a path or an address.

    Raises:
        ConfigError: `path` is neither.
    """
    if isinstance(path, Folder):
        return path
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
        raise ConfigError(
            "The folder of checkpoints must be a path or an address.",
            expected="a path or an address",
            got=repr(path) if isinstance(path, str) else f"an object of class {type(path).__name__}",
            remedy='pass the folder first: save("runs/mine", model, ...)',
        )
    scheme, separator, rest = os.fspath(path).partition("://")
    if separator and scheme not in ("file", "local"):
        return RemoteFolder(os.fspath(path))
    return Folder(rest if separator else path)
