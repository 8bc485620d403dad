"""Reads the files of all ranks into a `RunTrace`, with times on rank 0's clock since the first rank's start."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from .messages import no_files, not_a_trace, same_rank, two_runs

FORMAT = "fullshard trace 2"
COLUMNS = ("verb", "unit", "group", "bytes", "live", "time", "allocated")
"""The columns of an event's row; `allocated`: bytes according to the accelerator's allocator, -1 if not sampled."""


class EventRow(NamedTuple):
    """An event, as `fullshard.Event`; `time` in seconds since the start of the run, `allocated` in bytes or -1.

    Attributes:
        unit: its name, and where several models were recorded, also its model's: `blocks.1 (Net)`.
        model: "" before the model's first forward.
    """

    verb: str
    unit: str
    ranks: tuple[int, ...]
    nbytes: int
    live: int
    time: float
    allocated: int
    model: str = ""


@dataclass(frozen=True)
class RankTrace:
    """The recording of a rank. Times in seconds since the start of the run.

    Attributes:
        begin, end: start and end of the recording.
        marks: the ends of steps, if the program marked them.
        raised: the error that ended the recording, if any.
        clock: "host", or the type of the device whose stream gave the times.
        offset_error: the largest error of the clock's offset from rank 0's, in seconds.
    """

    rank: int
    begin: float
    end: float
    marks: list[float]
    events: list[EventRow]
    raised: str | None
    clock: str
    offset_error: float


@dataclass(frozen=True)
class RunTrace:
    """All ranks with a file, in order, and the ranks without one (`missing`)."""

    ranks: list[RankTrace]
    missing: list[int]

    @property
    def error(self) -> float:
        """The most by which the clocks of two ranks may differ, in seconds: shorter lateness cannot be detected."""
        return sum(sorted((trace.offset_error for trace in self.ranks), reverse=True)[:2])


def read(paths: list[Path]) -> RunTrace:
    """Read the files of a run.

    Args:
        paths: folders of `fullshard.trace`, files in them, or both.

    Raises:
        ConfigError: no files, a file that is not a trace, or files of several runs.
    """
    files = [file for path in paths for file in (sorted(path.glob("rank-*.json")) if path.is_dir() else [path])]
    if not files:
        raise no_files(paths)
    run: Any = None
    traces: dict[int, tuple[Path, RankTrace]] = {}
    for file in dict.fromkeys(files):
        content = _content(file)
        run_of_file = content["run"], content["world"]
        run = run or run_of_file
        if run_of_file != run:
            raise two_runs(files[0], file)
        try:
            trace = _trace(content)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise not_a_trace(file, f"{type(error).__name__}: {error}") from error
        if trace.rank in traces:
            raise same_rank(traces[trace.rank][0], file)
        traces[trace.rank] = file, trace
    ranks = [traces[rank][1] for rank in sorted(traces)]
    start = min(rank.begin for rank in ranks)
    several = len({row.model for trace in ranks for row in trace.events} - {""}) > 1
    return RunTrace(
        [_shifted(rank, -start, several) for rank in ranks], [rank for rank in range(run[1]) if rank not in traces]
    )


def _content(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except OSError as error:
        raise not_a_trace(file, error.strerror or str(error)) from error
    except ValueError as error:
        raise not_a_trace(file, "not JSON, or truncated") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise not_a_trace(file, f"its format is not {FORMAT!r}")
    rank, world = content.get("rank"), content.get("world")
    if not isinstance(world, int) or not isinstance(rank, int) or "run" not in content:
        raise not_a_trace(file, "it does not name its run")
    if not 0 <= rank < world:
        raise not_a_trace(file, f"rank {rank} of {world}")
    if content.get("columns") != list(COLUMNS):
        raise not_a_trace(file, f"columns are {content.get('columns')}")
    return content


def _trace(content: dict[str, Any]) -> RankTrace:
    verbs, units, models = content["verbs"], content["units"], content["models"]
    groups = [tuple(ranks) for ranks in content["groups"]]
    events = [
        EventRow(verbs[verb], units[unit], groups[group], nbytes, live, time, allocated, models[unit])
        for verb, unit, group, nbytes, live, time, allocated in content["events"]
    ]
    header = (content["rank"], content["begin"], content["end"], content["steps"], events)
    trace = RankTrace(*header, content["raised"], content["clock"], float(content["offset_error"]))
    return _shifted(trace, float(content["offset"]))


def _shifted(trace: RankTrace, by: float, names_models: bool = False) -> RankTrace:
    """`trace` with `by` seconds added to all times, and models added to the names of units if `names_models`."""
    return replace(
        trace,
        begin=trace.begin + by,
        end=trace.end + by,
        marks=[mark + by for mark in trace.marks],
        events=[
            row._replace(
                time=row.time + by, unit=f"{row.unit} ({row.model})" if names_models and row.model else row.unit
            )
            for row in trace.events
        ],
    )
