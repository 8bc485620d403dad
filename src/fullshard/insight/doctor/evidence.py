"""Reads watchers' reports and the flight recorder's dumps from disk as plain values, and checks every field.

Files may be hostile: nothing in them is ever imported or called. A file with unexpected content raises `UnusableFile`,
with one line that says why; the diagnosis lists it as left out.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ...store.pickles import read_pickle
from ...watcher.judge import FORMAT, Status

_MAX_BYTES = 512 << 20  # of a file
_NAMES = re.compile(r"(\.json|\.pkl|\.pickle|\d)$")  # of files that may be reports or dumps

_NUMBER = (int, float)
_STATUS: dict[str, tuple[type, ...]] = {
    "rank": (int,), "host": (str,), "pid": (int,), "time": _NUMBER, "gone": (str, type(None)), "state": (str,),
    "raised": (str, type(None)), "idle": (bool,), "waited": (*_NUMBER, type(None)), "count": (int,), "steps": (int,),
    "call": (dict, type(None)), "waits_for": (dict, type(None)), "last": (dict, type(None)), "records": (list,),
    "stack": (str,),
}  # fmt: skip
_RECORD: dict[str, tuple[type, ...]] = {
    "number": (int,),
    "verb": (str,),
    "unit": (str,),
    "step": (int,),
    "turn": (int,),
    "root": (int,),
}
_ENTRY: dict[str, tuple[type, ...]] = {"collective_seq_id": (int,), "profiling_name": (str,), "state": (str,)}


class UnusableFile(ValueError):
    """A file that is not a valid report or dump; its text is one line."""


@dataclass(frozen=True)
class WatcherReport:
    """The report that one rank's watcher wrote when the ranks were stuck.

    Attributes:
        source: the file's name.
        time: seconds since the epoch.
        ranks: the status of each rank, in rank order.
    """

    source: str
    time: float
    ranks: tuple[Status, ...]


@dataclass(frozen=True)
class DumpedCollective:
    """One collective in a dump of the flight recorder.

    Attributes:
        group: name of the process group.
        number: its number in the group, from 1; the collectives of one coalesced call share a number.
        call: the operation, shapes if all ranks must agree on them, and dtypes.
        done: whether it had ended on this rank.
        time: when it was issued, seconds since the epoch.
        stack: the program's frames, innermost first.
    """

    group: str
    number: int
    call: str
    done: bool
    time: float
    stack: tuple[str, ...]


@dataclass(frozen=True)
class Dump:
    """One rank's dump of PyTorch's flight recorder.

    Attributes:
        names: group -> description, for groups that have one.
        members: group -> ranks, for groups whose ranks the dump contains.
    """

    rank: int
    entries: tuple[DumpedCollective, ...]
    names: dict[str, str]
    members: dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Evidence:
    """The contents of all usable files; `left_out`: one line for every other file, with its name."""

    reports: tuple[WatcherReport, ...]
    dumps: tuple[Dump, ...]
    left_out: tuple[str, ...]


def read(path: Path) -> Evidence:
    """Read all reports and dumps at `path`, a file or a folder.

    Raises:
        ConfigError: there is no such path, or it has no report or dump.
    """
    if not path.exists():
        raise ConfigError(f"there is no file or folder {path}")
    if path.is_file():
        candidates = [path]
    else:
        candidates = sorted(
            file for file in path.iterdir() if file.is_file() and file.name[0] != "." and _NAMES.search(file.name)
        )
    reports, dumps, left_out = [], [], []
    for file in candidates:
        try:
            content = _read_file(file)
        except UnusableFile as error:
            left_out.append(f"{file.name}: {error}")
        else:
            if isinstance(content, Dump):
                dumps.append(content)
            else:
                reports.append(content)
    if not reports and not dumps:
        if path.is_file():
            raise ConfigError(f"{path} cannot be read: {left_out[0].partition(': ')[2]}")
        reason = f" ({len(left_out)} could not be read; {left_out[0]})" if left_out else ""
        raise ConfigError(
            "there is neither a watcher's report (stuck-*.json) nor a flight recorder's dump (nccl_trace_rank_*) "
            f"in {path}{reason}"
        )
    return Evidence(tuple(reports), tuple(dumps), tuple(left_out))


def _read_file(path: Path) -> WatcherReport | Dump:
    number = re.search(r"(\d+)$", path.name if path.suffix[1:].isdecimal() else path.stem)
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise UnusableFile(f"it is larger than {_MAX_BYTES >> 20} MiB")
        data = path.read_bytes()
    except OSError as error:
        raise UnusableFile(str(error.strerror)) from error
    value = _unpickled(data) if data[:1] == b"\x80" else _parsed(data)
    if isinstance(value, dict) and "format" in value and "ranks" in value:
        return report_of(path.name, value)
    if isinstance(value, dict) and "entries" in value:
        return dump_of(int(number[1]) if number else None, value)
    raise UnusableFile("it is neither a watcher's report nor a flight recorder's dump")


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except UnicodeDecodeError as error:
        raise UnusableFile("it is neither JSON nor a pickle") from error
    except json.JSONDecodeError as error:
        if error.pos >= len(data.decode(errors="replace").rstrip()) or error.msg.startswith("Unterminated"):
            raise UnusableFile(f"it ends in the middle (JSON, line {error.lineno}): it was truncated") from error
        raise UnusableFile(f"it is not JSON (line {error.lineno}: {error.msg})") from error
    except RecursionError as error:
        raise UnusableFile("its JSON is nested too deeply") from error


def _unpickled(data: bytes) -> Any:
    try:
        return read_pickle(data, _named, _outside)
    except UnusableFile:
        raise
    except Exception as error:  # a broken pickle can raise any error in the unpickler
        raise UnusableFile(f"it is a broken or truncated pickle ({type(error).__name__})") from error


def _named(module: str, name: str) -> Any:
    """Refuse: a pickle that names a function could call it."""
    raise UnusableFile(
        f"it is a pickle that asks for {module}.{name}, which no flight recorder's dump does; it was not loaded"
    )


def _outside(pid: Any) -> Any:
    """Refuse persistent IDs."""
    raise UnusableFile("it is a pickle that refers to something outside itself; it was not loaded")


def report_of(source: str, value: Any) -> WatcherReport:
    """A watcher's report from parsed JSON."""
    version = value["format"]
    if not isinstance(version, int) or version < 1:
        raise UnusableFile(f"its format is {version!r}, which no version has written")
    if version > FORMAT:
        raise UnusableFile(f"its format is {version}; this version reads formats up to {FORMAT}: update fullshard")
    _check(value, {"time": _NUMBER, "ranks": (list,)}, "a watcher's report")
    for status in value["ranks"]:
        _check(status, _STATUS, "the status of a rank")
        if status["raised"] is not None and not [1 for line in status["raised"].splitlines() if line[:1].strip()]:
            raise UnusableFile(f"the error of rank {status['rank']} has no headline")
        for record in [status["waits_for"], status["last"], *status["records"]]:
            if record is not None:
                _check(record, _RECORD, f"a record of rank {status['rank']}")
        if status["call"] is not None:
            _check(
                status["call"], {"did": (str,), "at": (str,), "waits": (bool,)}, f"the call of rank {status['rank']}"
            )
        if status["last"] is not None:
            _check(status["last"], {"time": _NUMBER}, f"the last record of rank {status['rank']}")
    if not value["ranks"]:
        raise UnusableFile("it has no ranks")
    return WatcherReport(source, value["time"], tuple(sorted(value["ranks"], key=lambda status: status["rank"])))


def dump_of(rank: int | None, value: Any) -> Dump:
    """A flight recorder's dump from a dictionary; `rank` is the number at the end of the file's name."""
    rank = value.get("rank", rank)
    if not isinstance(rank, int):
        raise UnusableFile("it is a flight recorder's dump whose name does not end in the rank, like nccl_trace_rank_3")
    _check(value, {"entries": (list,)}, "a flight recorder's dump")
    members: dict[str, tuple[int, ...]] = {}
    groups = value.get("pg_config")
    for name, group in groups.items() if isinstance(groups, dict) else ():
        _check(group, {"ranks": (str,)}, "a process group")
        numbers = group["ranks"].strip("[]").split(",")
        if not all([number.strip().isdecimal() for number in numbers]):
            raise UnusableFile(f"the ranks of its group {name!r} are invalid: {group['ranks'][:40]!r}")
        members[str(name) or "0"] = tuple(int(number) for number in numbers)  # the default group may have an empty name
    entries, names = [], {}
    for entry in value["entries"]:
        _check(entry, _ENTRY, "an entry of the flight recorder")
        if entry.get("is_p2p"):
            continue  # point-to-point calls are numbered per pair of ranks, and a dump covers only one of the two
        pair = entry.get("process_group")
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            pair = (entry.get("pg_id", 0), "")
        names[str(pair[0])] = str(pair[1])
        entries.append(_entry(str(pair[0]), entry))
    return Dump(rank, tuple(entries), {name: text for name, text in names.items() if text}, members)


_SAME_SHAPES = (
    "all_reduce",
    "_all_gather_base",
    "all_gather_into_tensor",
    "_reduce_scatter_base",
    "reduce_scatter_tensor",
)
_LIBRARIES = ("/torch/", "/fullshard/")


def _entry(group: str, entry: dict[str, Any]) -> DumpedCollective:
    call = entry["profiling_name"].rpartition(":")[2]
    if call.startswith(_SAME_SHAPES):
        call += f" {entry.get('input_sizes')}"
    dtypes = entry.get("input_dtypes")
    if isinstance(dtypes, list) and dtypes:
        call += f" {', '.join(sorted(set(map(str, dtypes))))}"
    frames = entry.get("frames")
    stack = [
        f'File "{frame.get("filename")}", line {frame.get("line")} in {frame.get("name")}'
        for frame in (frames if isinstance(frames, list) else ())
        if isinstance(frame, dict)
    ]
    program_stack = [frame for frame in stack if not any([library in frame for library in _LIBRARIES])]
    created = entry.get("time_created_ns")
    return DumpedCollective(
        group=group,
        number=entry["collective_seq_id"],
        call=call,
        done=bool(entry.get("retired")) or entry["state"] == "completed",
        time=created / 1e9 if isinstance(created, _NUMBER) else 0.0,
        stack=tuple(program_stack or stack),
    )


def _check(value: Any, fields: dict[str, tuple[type, ...]], title: str) -> None:
    """Raise unless `value`, which errors call `title`, is a dictionary with fields of these types."""
    if not isinstance(value, dict):
        raise UnusableFile(f"{title} should be a dictionary, and is {type(value).__name__}")
    for name, types in fields.items():
        if name not in value:
            raise UnusableFile(f"{title} has no {name!r}")
        if not isinstance(value[name], types):
            raise UnusableFile(f"{name!r} of {title} is {type(value[name]).__name__}")
