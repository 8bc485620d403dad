"""Atomic replacement of files and folders: a reader sees either the old contents or all of the new."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from ..errors import CheckpointError

_INDEX = ".index.json"
_WEIGHTS = re.compile(r"(model|adapter_model)(\.[0-9a-f]{8})?(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


def write_synced(path: Path, data: bytes) -> None:
    """Write a new file and wait until it is on the disk."""
    with path.open("xb", buffering=0) as file:
        view = memoryview(data)
        while view:
            view = view[file.write(view) :]
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's entries, are on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def check_room(folder: Path, nbytes: int, path: Path) -> None:
    """Check that the disk of a folder has room for a new file or folder at `path`.

    Raises:
        CheckpointError: it has not.
    """
    free = shutil.disk_usage(folder).free
    if nbytes > free:
        raise CheckpointError(
            f"There is not enough disk space for {path}.", expected=f"{nbytes:,} bytes", got=f"{free:,}"
        )


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a new folder, which is renamed to `path` at the end of the `with`; if that raises, nothing is left of it.

    What killed processes left of the same folder is removed then, too.

    Raises:
        CheckpointError: there is something at `path` other than an empty folder.
    """
    path = path.absolute()
    _refuse_existing(path)
    fresh = path.with_name(f".{path.name}.saving-{secrets.token_hex(4)}")
    created: list[Path] = []
    try:
        for folder in reversed([folder for folder in (fresh, *fresh.parents) if not folder.exists()]):
            folder.mkdir()
            created.append(folder)
        with _locked(fresh):  # as long as its writer lives
            yield fresh
            _refuse_existing(path)
            put_in_place(fresh, path)
        for abandoned in path.parent.glob(f".{glob.escape(path.name)}.saving-????????"):
            with contextlib.suppress(OSError), _locked(abandoned) as is_locked:
                if is_locked:
                    shutil.rmtree(abandoned, ignore_errors=True)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        for folder in reversed(created):
            with contextlib.suppress(OSError):
                folder.rmdir()  # if it is empty
        raise


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Lock a folder; yields whether that was possible: not if another process has, nor on some file systems."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_locked = True
    except OSError:
        is_locked = False
    try:
        yield is_locked
    finally:
        os.close(fd)


def _refuse_existing(path: Path) -> None:
    empty = path.is_dir() and not any(path.iterdir())
    if path.is_symlink() or (path.exists() and not empty):
        raise CheckpointError(
            "The folder to write to already exists and is not empty.",
            got=str(path),
            remedy="choose a different folder, or remove it first: nothing is overwritten",
        )


@contextlib.contextmanager
def placed(fresh: Path, path: Path) -> Iterator[None]:
    """Rename a file or folder to a free path, and back if the body of the `with` raises.

    Raises:
        OSError: the rename failed, and was undone.
    """
    sync(fresh)
    fresh.rename(path)
    try:
        sync(path.parent)
        yield
    except BaseException:
        path.rename(fresh)
        raise


def put_in_place(fresh: Path, path: Path) -> None:
    """Rename a file or folder to a free path, durably; see `placed`."""
    with placed(fresh, path):
        pass


def replace_file(path: Path, data: bytes) -> None:
    """Write a file, replacing an existing one atomically; durable once its folder is synced."""
    fresh = path.with_name(f"{path.name}.new")
    fresh.unlink(missing_ok=True)  # left by an interrupted save, or planted by another user
    write_synced(fresh, data)
    fresh.replace(path)


def put_weights(fresh: Path, folder: Path) -> None:
    """Move a model's files from a folder into another, replacing the weights there; other files stay.

    Weights in several files come into use atomically, by the rename of their index: files whose names exist already get
    new names.
    """
    names = {path.name for path in fresh.iterdir()}
    for index in fresh.glob(f"*{_INDEX}"):
        content = json.loads(index.read_bytes())
        existing = {name for name in content["weight_map"].values() if (folder / name).exists()}
        mark = secrets.token_hex(4)
        new_names = {name: re.sub(r"(-\d{5}-of-)", rf".{mark}\1", name) for name in existing}
        for name, new_name in new_names.items():
            (fresh / name).rename(fresh / new_name)
        names = {new_names.get(name, name) for name in names}
        content["weight_map"] = {key: new_names.get(name, name) for key, name in content["weight_map"].items()}
        replace_file(index, f"{json.dumps(content, indent=2)}\n".encode())
    weights = sorted(name for name in names if _WEIGHTS.fullmatch(name))
    last = next((name for name in weights if name.endswith(_INDEX)), weights[0] if weights else "")
    for name in sorted(names, key=lambda name: name == last):
        if name == last:
            sync(folder)  # the files that it names must exist first
        (fresh / name).replace(folder / name)
    sync(folder)
    for old in list(folder.iterdir()):
        if _WEIGHTS.fullmatch(old.name) and old.name not in names:
            old.unlink()
    fresh.rmdir()
