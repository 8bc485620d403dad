"""Writing pages into a folder: only files that an earlier run wrote are ever replaced or removed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from ..errors import ConfigError

LIST = ".fullshard-docs.json"
"""The file in which a run notes what it wrote."""


def write(folder: Path, texts: Iterable[tuple[str, str]]) -> list[str]:
    """Write texts by their names; remove what an earlier run wrote and this one does not.

    The list of files is written before the first of them, so that a run that is broken off leaves nothing unknown.

    Args:
        folder: made if it is not there. One that holds something must hold an earlier run's list.
        texts: names with `/`, from the folder, and texts.

    Returns:
        The names, in order.

    Raises:
        ConfigError: the folder holds something else, is a file, or cannot be written.
    """
    made = dict(texts)
    try:
        old = listed(folder)
        for name in made:
            check(folder, name, old)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / LIST).write_text(json.dumps(sorted({*made, *old}), indent=0))
        for name, text in made.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(text.encode("utf-8", "replace"))
        for name in sorted(old - set(made), reverse=True):
            remove(folder, name)
        (folder / LIST).write_text(json.dumps(sorted(made), indent=0))
    except OSError as error:
        raise ConfigError(
            f"{str(folder)!r} cannot be written.",
            got=f"{type(error).__name__}: {error.strerror}: {error.filename}",
            code="C231",
        ) from error
    return sorted(made)


def listed(folder: Path) -> set[str]:
    """What an earlier run wrote; nothing where the folder is empty or not there."""
    if not os.path.lexists(folder):
        return set()
    if not folder.is_dir():
        raise ConfigError(
            f"{str(folder)!r} is not a folder.", remedy="name a folder that is empty or not there", code="C230"
        )
    names = [one.name for one in folder.iterdir()]
    if not names:
        return set()
    try:
        found = json.loads((folder / LIST).read_text())
    except FileNotFoundError:
        raise ConfigError(
            f"{str(folder)!r} holds files that this command did not write, which it leaves alone.",
            expected="a folder that is empty, not there, or was written by this command",
            got=f"{len(names)} files and folders, {sorted(names)[0]!r} among them",
            remedy="name another folder",
            code="C229",
        ) from None
    except ValueError:
        found = None
    if not isinstance(found, list) or not all(isinstance(one, str) and plain(one) for one in found):
        raise ConfigError(
            f"{str(folder / LIST)!r} is not a list of files as this command writes it.",
            remedy="name another folder, or empty this one",
            code="C228",
        )
    return set(found)


def plain(name: str) -> bool:
    """Whether a name stays within its folder."""
    parts = PurePosixPath(name).parts
    return bool(parts) and not PurePosixPath(name).is_absolute() and ".." not in parts


def check(folder: Path, name: str, old: set[str]) -> None:
    """Refuse to write over a file that no earlier run wrote, and through a link."""
    path = folder / name
    foreign = os.path.lexists(path) and name not in old
    links = [one for one in (path, *path.parents) if one.is_relative_to(folder) and one != folder and one.is_symlink()]
    if foreign or links:
        raise ConfigError(
            f"{str(links[0] if links else path)!r} would be written over, and this command did not make it.",
            remedy="name another folder, or move that file",
            code="C227",
        )


def remove(folder: Path, name: str) -> None:
    """Remove a file of an earlier run, and its folders as far as they are empty then."""
    path = folder / name
    if path.is_symlink() or not path.is_file():
        return
    path.unlink()
    for parent in path.parents:
        if parent == folder or any(parent.iterdir()):
            return
        parent.rmdir()
