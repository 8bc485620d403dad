"""What was found on disk, as plain values: watchers' reports and the flight recorder's dumps, checked field by field.

Files are hostile until shown otherwise: nothing in them is ever imported or called. What is not as expected raises
`Foreign`, with one line that says what; it is left out, and told.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...store.pickles import read_pickle
from ...watcher.judge import Status
from . import messages

_MOST = 512 << 20  # bytes of a file
_NAMES = re.compile(r"(\.json|\.pkl|\.pickle|\d)$")  # of files in a folder that may be evidence
FORMAT = 1
"""The newest format of a watcher's report that is known here."""

_NUMBER = (int, float)
_STATUS: dict[str, tuple[type, ...]] = {
    "rank": (int,), "host": (str,), "pid": (int,), "time": _NUMBER, "gone": (str, type(None)), "state": (str,),
    "raised": (str, type(None)), "idle": (bool,), "waited": (*_NUMBER, type(None)), "count": (int,), "steps": (int,),
    "waits_for": (dict, type(None)), "last": (dict, type(None)), "records": (list,), "stack": (str,),
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


class Foreign(ValueError):
    """A file that is not what it should be; its text is one line."""


@dataclass(frozen=True)
class WatcherReport:
    """What one rank's watcher wrote when it found the ranks stuck.

    Attributes:
        source: the file's name.
        time: seconds since the epoch.
        ranks: what was known of each, in their order.
    """

    source: str
    time: float
    ranks: tuple[Status, ...]


@dataclass(frozen=True)
class Entry:
    """One collective in a dump of the flight recorder.

    Attributes:
        group: name of the process group.
        number: of the group's collectives, from 1; those of one coalesced call share it.
        what: operation, shapes where all ranks have to agree on them, and dtypes.
        done: whether it had ended on this rank.
        time: when it was issued, seconds since the epoch.
        stack: the program's own frames, innermost first.
    """

    group: str
    number: int
    what: str
    done: bool
    time: float
    stack: tuple[str, ...] = ()


@dataclass(frozen=True)
class Dump:
    """One rank's dump of PyTorch's flight recorder.

    Attributes:
        names: descriptions of groups that have one.
        members: ranks of groups, where the dump tells them.
    """

    rank: int
    entries: tuple[Entry, ...]
    names: dict[str, str] = field(default_factory=dict)
    members: dict[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Evidence:
    """All that was found; `left_out`: files that could not be read, a line each."""

    reports: tuple[WatcherReport, ...] = ()
    dumps: tuple[Dump, ...] = ()
    left_out: tuple[str, ...] = ()


def read(path: Path) -> Evidence:
    """Everything of use at `path`, a file or a folder.

    Raises:
        ConfigError: there is no such path, or nothing of use at it.
    """
    if not path.exists():
        raise messages.no_such_path(path)
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
        raise messages.unreadable(path, left_out[0]) if path.is_file() else messages.no_evidence(path, left_out)
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


def _named(module: str, name: str) -> Any:
    """Refuse: a pickle that names anything could run it."""
    raise Foreign(
        f"it is a pickle that asks for {module}.{name}, which a flight recorder's dump never does; not loaded"
    )


def _outside(pid: Any) -> Any:
    """Refuse likewise."""
    raise Foreign("it is a pickle that refers to something outside itself; not loaded")


def report_of(source: str, value: Any) -> WatcherReport:
    """A watcher's report from parsed JSON."""
    known = value["format"]
    if not isinstance(known, int) or known < 1:
        raise Foreign(f"its format is {known!r}, which no version has written")
    if known > FORMAT:
        raise Foreign(f"its format is {known}, newer than {FORMAT}, the last that this version reads: update fullshard")
    _check(value, {"time": _NUMBER, "ranks": (list,)}, "a watcher's report")
    for status in value["ranks"]:
        _check(status, _STATUS, "what it tells of a rank")
        if status["raised"] is not None and not [1 for line in status["raised"].splitlines() if line[:1].strip()]:
            raise Foreign(f"what rank {status['rank']} raised has no headline")
        for record in [status["waits_for"], status["last"], *status["records"]]:
            if record is not None:
                _check(record, _RECORD, f"a record of rank {status['rank']}")
        if status["last"] is not None:
            _check(status["last"], {"time": _NUMBER}, f"the last record of rank {status['rank']}")
    if not value["ranks"]:
        raise Foreign("it tells of no rank")
    return WatcherReport(source, value["time"], tuple(sorted(value["ranks"], key=lambda status: status["rank"])))


def dump_of(rank: int | None, value: Any) -> Dump:
    """A flight recorder's dump from parsed JSON or an unpickled dictionary; `rank` is the file name's last number."""
    rank = value.get("rank", rank)
    if not isinstance(rank, int):
        raise Foreign(
            "it is a flight recorder's dump, and its name does not end in the rank, as nccl_trace_rank_3 does"
        )
    _check(value, {"entries": (list,)}, "a flight recorder's dump")
    members: dict[str, tuple[int, ...]] = {}
    groups = value.get("pg_config")
    for name, group in groups.items() if isinstance(groups, dict) else ():
        _check(group, {"ranks": (str,)}, "a process group")
        numbers = group["ranks"].strip("[]").split(",")
        if not all([number.strip().isdecimal() for number in numbers]):
            raise Foreign(f"the ranks of its group {name!r} are {group['ranks'][:40]!r}")
        members[str(name) or "0"] = tuple(int(number) for number in numbers)  # the default group may have no name
    entries, names = [], {}
    for entry in value["entries"]:
        _check(entry, _ENTRY, "an entry of the flight recorder")
        if entry.get("is_p2p"):
            continue  # numbered by pairs of ranks, of which a dump tells one
        named = entry.get("process_group")
        pair = named if isinstance(named, (list, tuple)) and len(named) == 2 else (entry.get("pg_id", 0), "")
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
_NOT_THE_PROGRAMS = ("/torch/", "/fullshard/")


def _entry(group: str, entry: dict[str, Any]) -> Entry:
    what = entry["profiling_name"].rpartition(":")[2]
    if what.startswith(_SAME_SHAPES):
        what += f" {entry.get('input_sizes')}"
    dtypes = entry.get("input_dtypes")
    if isinstance(dtypes, list) and dtypes:
        what += f" {', '.join(sorted(set(map(str, dtypes))))}"
    frames = entry.get("frames")
    texts = [
        f'File "{frame.get("filename")}", line {frame.get("line")} in {frame.get("name")}'
        for frame in (frames if isinstance(frames, list) else ())
        if isinstance(frame, dict)
    ]
    own = [text for text in texts if not any([part in text for part in _NOT_THE_PROGRAMS])]
    created = entry.get("time_created_ns")
    return Entry(
        group=group,
        number=entry["collective_seq_id"],
        what=what,
        done=bool(entry.get("retired")) or entry["state"] == "completed",
        time=created / 1e9 if isinstance(created, _NUMBER) else 0.0,
        stack=tuple(own or texts),
    )


def _check(value: Any, kinds: dict[str, tuple[type, ...]], what: str) -> None:
    """Raise unless `value` is a dictionary with these fields, of these types."""
    if not isinstance(value, dict):
        raise Foreign(f"{what} should be a dictionary, and is {type(value).__name__}")
    for name, allowed in kinds.items():
        if name not in value:
            raise Foreign(f"{what} has no {name!r}")
        if not isinstance(value[name], allowed):
            raise Foreign(f"{name!r} of {what} is {type(value[name]).__name__}")
