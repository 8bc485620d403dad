"""Files and folders that take the place of others at once: whoever looks sees what was there, or what is new, whole."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

_EXCHANGE = 2  # RENAME_EXCHANGE of renameat2(2)
_HERE = -100  # AT_FDCWD
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


def make_folders(path: Path) -> list[Path]:
    """Make a folder, and those above that are missing; the ones that were made, innermost first."""
    new: list[Path] = []
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        for folder in reversed(missing):
            folder.mkdir()
            new.insert(0, folder)
    except BaseException:
        remove_empty(new)
        raise
    return new


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove folders that are empty, in this order."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


@contextlib.contextmanager
def placed(fresh: Path, path: Path) -> Iterator[None]:
    """Give a file or folder its name, where none is, while what is done here ends well; else it is put back.

    Raises:
        OSError: it could not be done; everything is where it was.
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
    """Give a file or folder its name, where none is, for good; see `placed`."""
    with placed(fresh, path):
        pass


def replace_file(path: Path, data: bytes) -> None:
    """Write a file in the place of one that may be there; for good when its folder is synced."""
    fresh = path.with_name(f"{path.name}.new")
    fresh.unlink(missing_ok=True)  # of a save that was broken off, or put there by another user
    write_synced(fresh, data)
    fresh.replace(path)


def replace_folder(fresh: Path, path: Path) -> None:
    """Put a folder, whose files are on the disk, in the place of `path`, beside it; what was there is removed.

    Where the file system cannot exchange two names, a kill between two renames leaves what was there as `.NAME.old`:
    `recover_folder` puts it back.
    """
    old = _old(path)
    recover_folder(path)
    remove(old)
    sync(fresh)
    if path.exists() and _exchanged(fresh, path):
        sync(path.parent)
        fresh.rename(old)
    else:
        if path.exists():
            path.rename(old)
        fresh.rename(path)
    sync(path.parent)
    remove(old)


def recover_folder(path: Path) -> None:
    """Put back what `replace_folder` had moved away when it was killed."""
    if not path.exists() and _old(path).exists():
        _old(path).rename(path)


def _old(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")


def _exchanged(one: Path, other: Path) -> bool:
    """Exchange two names in one step, as Linux can on most file systems; whether it was done."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    return rename is not None and rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0


def remove(path: Path) -> None:
    """Remove a folder or a file, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def put_weights(fresh: Path, folder: Path) -> None:
    """Move a model's files out of a folder into another, in the place of weights that are there; other files stay.

    Weights in several files come into use when their index does, which is one rename: files that would take the place
    of others before that get names of their own.
    """
    names = {path.name for path in fresh.iterdir()}
    for index in fresh.glob(f"*{_INDEX}"):
        said = json.loads(index.read_bytes())
        taken = {name for name in said["weight_map"].values() if (folder / name).exists()}
        mark = secrets.token_hex(4)
        new_name = {name: re.sub(r"(-\d{5}-of-)", rf".{mark}\1", name) for name in taken}
        for name, new in new_name.items():
            (fresh / name).rename(fresh / new)
        names = {new_name.get(name, name) for name in names}
        said["weight_map"] = {key: new_name.get(name, name) for key, name in said["weight_map"].items()}
        replace_file(index, f"{json.dumps(said, indent=2)}\n".encode())
    weights = sorted(name for name in names if _WEIGHTS.fullmatch(name))
    decides = next((name for name in weights if name.endswith(_INDEX)), weights[0] if weights else "")
    for name in sorted(names, key=lambda name: name == decides):
        if name == decides:
            sync(folder)  # the files that it names are there before it is
        (fresh / name).replace(folder / name)
    sync(folder)
    for old in list(folder.iterdir()):
        if _WEIGHTS.fullmatch(old.name) and old.name not in names:
            old.unlink()
    fresh.rmdir()
