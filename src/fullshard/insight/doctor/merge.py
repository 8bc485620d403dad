"""Reports of one run put together: several are written when the network was cut, or when ranks end one by one. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...watcher.report import Status
from .evidence import WatcherReport

_APART = 600.0  # seconds between reports that tell of one incident, at most
_UNKNOWN = ("unreachable", "absent")  # states of a rank whose watcher did not answer, or was not there


@dataclass(frozen=True)
class Incident:
    """What all reports of one incident know.

    Attributes:
        statuses: the best that is known of each rank, in their order.
        halves: groups of ranks that reached each other and not the others, though these lived; empty if there are none.
        reports: those that were put together, oldest first.
        older: how many reports tell of other incidents, before.
    """

    statuses: tuple[Status, ...]
    halves: tuple[tuple[int, ...], ...]
    reports: tuple[WatcherReport, ...]
    older: int


def merged(reports: Sequence[WatcherReport]) -> Incident:
    """The newest incident. Reports belong to one if they are of the same processes and near in time."""
    newest_first = sorted(reports, key=lambda report: report.time, reverse=True)
    taken = [newest_first[0]]
    for report in newest_first[1:]:
        if taken[-1].time - report.time <= _APART and all([_one_run(report, other) for other in taken]):
            taken.append(report)
    taken.reverse()
    best: dict[int, Status] = {}
    for report in taken:  # what was known first is nearest to the cause: later ranks are gone because of it
        for status in report.ranks:
            known = best.get(status["rank"])
            if known is None or (known["state"] in _UNKNOWN and status["state"] not in _UNKNOWN):
                best[status["rank"]] = status
    statuses = tuple(best[rank] for rank in sorted(best))
    return Incident(statuses, _halves(taken, best), tuple(taken), len(reports) - len(taken))


def _one_run(one: WatcherReport, other: WatcherReport) -> bool:
    if len(one.ranks) != len(other.ranks):
        return False
    processes = {status["rank"]: (status["host"], status["pid"]) for status in one.ranks if status["pid"]}
    return all(
        [processes.get(s["rank"], (s["host"], s["pid"])) == (s["host"], s["pid"]) for s in other.ranks if s["pid"]]
    )


def _halves(reports: Sequence[WatcherReport], best: dict[int, Status]) -> tuple[tuple[int, ...], ...]:
    """Who reached whom, if somebody could not be reached by some and lived for others."""
    heard = {tuple(s["rank"] for s in report.ranks if s["state"] not in _UNKNOWN) for report in reports}
    lost = {s["rank"] for report in reports for s in report.ranks if s["state"] == "unreachable"}
    alive = [rank for rank in lost if best[rank]["state"] not in _UNKNOWN and best[rank]["gone"] is None]
    return tuple(sorted(heard)) if alive and len(heard) > 1 else ()
