"""From a path to evidence. Files are hostile until shown otherwise: nothing in them is ever imported or called."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ...store.pickles import read_pickle
from .evidence import Dump, Evidence, Foreign, WatcherReport, dump_of, report_of

_MOST = 512 << 20  # bytes of a file
_NAMES = re.compile(r"(\.json|\.pkl|\.pickle|\d)$")  # of files in a folder that may be evidence


def _named(module: str, name: str) -> Any:
    """Refuse: a pickle that names anything could run it."""
    raise Foreign(
        f"it is a pickle that asks for {module}.{name}, which a flight recorder's dump never does; not loaded"
    )


def _outside(pid: Any) -> Any:
    """Refuse likewise."""
    raise Foreign("it is a pickle that refers to something outside itself; not loaded")


def read(path: Path) -> Evidence:
    """Everything of use at `path`, a file or a folder.

    Raises:
        ConfigError: there is no such path, or nothing of use at it.
    """
    if not path.exists():
        raise ConfigError(f"there is no file or folder {path}", code="C104")
    if path.is_file():
        candidates = [path]
    else:
        candidates = sorted(
            each for each in path.iterdir() if each.is_file() and each.name[0] != "." and _NAMES.search(each.name)
        )
    reports, dumps, left_out = [], [], []
    for each in candidates:
        try:
            found = _read_one(each)
        except Foreign as error:
            left_out.append(f"{each.name}: {error}")
        else:
            if isinstance(found, Dump):
                dumps.append(found)
            else:
                reports.append(found)
    if not reports and not dumps:
        if path.is_file():
            raise ConfigError(f"{path} cannot be read: {left_out[0].partition(': ')[2]}", code="C105")
        why = f" ({len(left_out)} could not be read; {left_out[0]})" if left_out else ""
        raise ConfigError(
            f"there is neither a watcher's report (stuck-*.json) nor a flight recorder's dump (nccl_trace_rank_*) "
            f"in {path}{why}",
            code="C106",
        )
    return Evidence(tuple(reports), tuple(dumps), tuple(left_out))


def _read_one(path: Path) -> WatcherReport | Dump:
    number = re.search(r"(\d+)$", path.name if path.suffix[1:].isdecimal() else path.stem)
    try:
        if path.stat().st_size > _MOST:
            raise Foreign(f"it has more than {_MOST >> 20} MiB")
        with path.open("rb") as file:
            data = file.read()
        value = _unpickled(data) if data[:1] == b"\x80" else _parsed(data)
    except OSError as error:
        raise Foreign(f"the system says: {error.strerror}") from error
    if not isinstance(value, dict):
        raise Foreign("it is neither a watcher's report nor a flight recorder's dump")
    if "format" in value and "ranks" in value:
        return report_of(path.name, value)
    if "entries" in value:
        return dump_of(int(number[1]) if number else None, value)
    raise Foreign("it is neither a watcher's report nor a flight recorder's dump")


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except UnicodeDecodeError as error:
        raise Foreign("it is neither JSON nor a pickle") from error
    except json.JSONDecodeError as error:
        if error.pos >= len(data.decode(errors="replace").rstrip()) or error.msg.startswith("Unterminated"):
            raise Foreign(
                f"it ends in the middle (JSON, line {error.lineno}): it was not written to its end"
            ) from error
        raise Foreign(f"it is not JSON (line {error.lineno}: {error.msg})") from error
    except RecursionError as error:
        raise Foreign("its JSON is nested too deep") from error


def _unpickled(data: bytes) -> Any:
    try:
        return read_pickle(data, _named, _outside)
    except Foreign:
        raise
    except Exception as error:  # whatever a broken pickle makes of the machine that reads it
        raise Foreign(f"it is a broken or truncated pickle ({type(error).__name__})") from error
