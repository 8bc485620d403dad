"""Which files a path or the name of a package means. Nothing is imported, so nothing of what is found is run."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from ..errors import ConfigError

LEFT_OUT = {"__pycache__", "node_modules", "build", "dist"}


@dataclass(frozen=True, slots=True)
class Place:
    """A package on disk: its name, its folder or only file, and its Python files by their paths in the package.

    `around` is the dotted name of the package that it lies in, "" if it lies in none.
    """

    name: str
    root: Path
    files: dict[str, Path]
    around: str = ""


def find(given: str) -> Place:
    """The package that a path or a name means.

    Args:
        given: a folder, a Python file, or the name of a package that this Python could import (`rich`, `os.path`).

    Raises:
        ConfigError: there is no such path and no such package, or no Python file in it.
    """
    path = Path(given)
    try:
        there = path.exists()
    except (OSError, ValueError):  # a name too long for a path, a null byte
        there = False
    if not there:
        path = _installed(given)
    path = path.resolve()
    if path.is_file():
        if path.suffix != ".py":
            raise ConfigError(
                f"{str(path)!r} is not Python source.",
                expected="a folder, a .py file, or the name of a package",
                code="C226",
            )
        return Place(path.stem, path, {path.name: path}, _around(path))
    files = {f"{path.name}/{one.relative_to(path).as_posix()}": one for one in sources(path)}
    if not files:
        raise ConfigError(f"There is no Python file in {str(path)!r}.", expected="a folder with .py files", code="C225")
    return Place(path.name, path, files, _around(path))


def _around(path: Path) -> str:
    """The dotted name of the package that a path lies in, by which its own files import each other."""
    names: list[str] = []
    while (path := path.parent).joinpath("__init__.py").is_file():
        names.insert(0, path.name)
    return ".".join(names)


def sources(folder: Path) -> list[Path]:
    """Its Python files and those of folders in it, in order; hidden and built ones and links to folders left out."""
    found = []
    for at, folders, names in os.walk(folder):
        folders[:] = sorted(one for one in folders if one not in LEFT_OUT and not one.startswith("."))
        found += [Path(at, name) for name in sorted(names) if name.endswith(".py") and not name.startswith(".")]
    return found


def _installed(name: str) -> Path:
    """Where a package or module lies, by the path on which Python looks for it; parents are not imported."""
    where: list[str] | None = None
    place: Path | None = None
    if all(part.isidentifier() for part in name.split(".")):
        for part in name.split("."):
            found = PathFinder.find_spec(part, [*sys.path] if where is None else where)
            if found is None:
                place = None
                break
            where = list(found.submodule_search_locations or [])
            origin = found.origin if found.has_location else None
            place = Path(where[0]) if where else Path(origin) if origin else None
    if place is None:
        raise ConfigError(
            f"{name!r} is neither a path nor a package that is installed here.",
            expected="a folder, a .py file, or the name of an installed package",
            got=f"the working folder is {os.getcwd()}",
            remedy="check the spelling; a package must be installed for the Python that runs this",
            code="C224",
        )
    return place
