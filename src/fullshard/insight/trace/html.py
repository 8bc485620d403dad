"""The report as data for programs, and as an HTML page that needs no network (`page.html` with the data inside)."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from .analyse import Analysis
from .chrome import spans_of_transfer, spans_of_work
from .merge import RankTrace, Run

PAGE = Path(__file__).with_name("page.html")


def report(run: Run, analysis: Analysis) -> dict[str, Any]:
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


def html_page(run: Run, analysis: Analysis) -> str:
    """The page: the summary, the timeline of all ranks, and the tables."""
    data = report(run, analysis) | {
        "timeline": [_timeline(trace, run, analysis) for trace in run.ranks],
        "bounds": analysis.bounds[run.ranks[0].rank],
    }
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")  # a unit's name may contain a closing tag
    return PAGE.read_text(encoding="utf-8").replace('"DATA"', text)


def _timeline(trace: RankTrace, run: Run, analysis: Analysis) -> dict[str, Any]:
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
