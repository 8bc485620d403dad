"""The timeline and the tables of a run for programs and for browsers: JSON, an HTML page, Chrome's trace format."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from .analyse import ENDS, Analysis
from .merge import RankTrace, RunTrace

PAGE = Path(__file__).with_name("page.html")
THREADS = ("compute", "wait", "gather", "reduce")


def report(run: RunTrace, analysis: Analysis) -> dict[str, Any]:
    """The report for programs: the summary and all tables. Times in seconds."""
    return {
        "answer": analysis.in_words(run),
        "ranks": [trace.rank for trace in run.ranks],
        "missing": run.missing,
        "clock_error": run.error,
        "steps": [{**dataclasses.asdict(step), "compute": step.compute} for step in analysis.steps],
        "unit_waits": [dataclasses.asdict(row) for row in analysis.unit_waits],
        "waits": [{**dataclasses.asdict(wait), "transfer": wait.transfer} for wait in analysis.waits],
        "late_ranks": [dataclasses.asdict(late) for late in analysis.late_ranks],
    }


def html_page(run: RunTrace, analysis: Analysis) -> str:
    """A page that needs no network (`page.html` with the data inside): summary, timeline of all ranks, tables."""
    data = report(run, analysis) | {
        "timeline": [_timeline(trace, run, analysis) for trace in run.ranks],
        "bounds": analysis.bounds[run.ranks[0].rank],
    }
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")  # a unit's name may contain a closing tag
    return PAGE.read_text(encoding="utf-8").replace('"DATA"', text)


def _timeline(trace: RankTrace, run: RunTrace, analysis: Analysis) -> dict[str, Any]:
    """A rank's spans, rounded to 0.1 us, and its bytes over time."""
    rank = trace.rank

    def rounded(spans: list[tuple[float, float, str]]) -> list[tuple[float, float, str]]:
        return [(round(begin, 7), round(end, 7), unit) for begin, end, unit in spans]

    return {
        "rank": rank,
        "compute": rounded(spans_of_work(analysis, rank)),
        "gather": rounded(spans_of_transfer(run, analysis, rank, "gather")),
        "reduce": rounded(spans_of_transfer(run, analysis, rank, "reduce")),
        "live": [(round(row.time, 7), row.live) for row in trace.events],
        "allocated": [(round(row.time, 7), row.allocated) for row in trace.events if row.allocated >= 0],
    }


def chrome_trace(run: RunTrace, analysis: Analysis) -> dict[str, Any]:
    """The timeline for Perfetto, for `json.dump`: a process for each rank, with threads and memory counters.

    The format: Google, "Trace Event Format" (complete events "X", counters "C", metadata "M"; microseconds).
    """
    events: list[dict[str, Any]] = []
    for trace in run.ranks:
        rank = trace.rank
        events.append(_event("M", "process_name", rank, 0, args={"name": f"rank {rank}"}))
        events += [_event("M", "thread_name", rank, t, args={"name": name}) for t, name in enumerate(THREADS)]
        for begin, end, unit in spans_of_work(analysis, rank):
            events.append(_slice(unit, rank, "compute", begin, end))
        for wait in analysis.waits:
            if wait.rank == rank and wait.late:
                name = f"{wait.unit}: rank {wait.late_rank} late"
                events.append(_slice(name, rank, "wait", wait.begin, wait.begin + wait.late))
            if wait.rank == rank and wait.transfer:
                events.append(_slice(f"{wait.unit}: {wait.kind}", rank, "wait", wait.begin + wait.late, wait.end))
        for thread in ("gather", "reduce"):
            for begin, end, unit in spans_of_transfer(run, analysis, rank, thread):
                events.append(_slice(unit, rank, thread, begin, end))
        for row in trace.events:
            memory = {"gathered and reducing": row.live}
            events.append(_event("C", "live bytes", rank, 0, ts=row.time * 1e6, args=memory))
            if row.allocated >= 0:
                memory = {"allocated": row.allocated}
                events.append(_event("C", "allocated bytes", rank, 0, ts=row.time * 1e6, args=memory))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def spans_of_work(analysis: Analysis, rank: int) -> list[tuple[float, float, str]]:
    """Start, end and unit of a rank's work; adjacent spans in the same unit are joined."""
    spans: list[tuple[float, float, str]] = []
    for work in analysis.works[rank]:
        if spans and spans[-1][2] == work.place and spans[-1][1] == work.begin:
            spans[-1] = (spans[-1][0], work.end, work.place)
        elif work.end > work.begin:
            spans.append((work.begin, work.end, work.place))
    return spans


def spans_of_transfer(run: RunTrace, analysis: Analysis, rank: int, thread: str) -> list[tuple[float, float, str]]:
    """Start, end and unit of a rank's collectives: from when the last rank issued it until its result was used.

    A span begins no earlier than the previous one ends: collectives take turns, and spans of a thread must not overlap.
    """
    kinds = ("gather",) if thread == "gather" else ("reduce", "all_reduce")
    begins = {
        (collective.kind, collective.unit, times[rank]): max(times.values())
        for collective, times in analysis.issues.items()
        if rank in times and collective.kind in kinds and len(collective.ranks) != 1
    }
    ends = ENDS[f"wait_{thread}"]
    events = next(trace.events for trace in run.ranks if trace.rank == rank)
    issued: dict[str, float] = {}
    spans: list[tuple[float, float, str]] = []
    for row in events:
        if row.verb in ends and row.unit in issued:
            begin = max(issued.pop(row.unit), spans[-1][1] if spans else 0.0)
            if row.time > begin:
                spans.append((begin, row.time, row.unit))
        if (begun := begins.get((row.verb, row.unit, row.time))) is not None:
            issued[row.unit] = begun
    return spans


def _slice(name: str, rank: int, thread: str, begin: float, end: float) -> dict[str, Any]:
    return _event("X", name, rank, THREADS.index(thread), ts=begin * 1e6, dur=(end - begin) * 1e6)


def _event(phase: str, name: str, rank: int, thread: int, **more: Any) -> dict[str, Any]:
    return {"ph": phase, "name": name, "pid": rank, "tid": thread, **more}
