"""The split of waits and the late rank, of events made by hand: exact; and files that are not a run's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fullshard.errors import ConfigError
from fullshard.insight.trace import analyse, chrome_trace, read
from fullshard.insight.trace.event_file import clock_offset
from fullshard.insight.trace.merge import COLUMNS, FORMAT, EventRow, RankTrace, RunTrace

BOTH = (0, 1)


def row(verb: str, unit: str, time: float, ranks: tuple[int, ...] = BOTH) -> EventRow:
    return EventRow(verb, unit, ranks if verb in ("gather", "reduce", "all_reduce") else (), 64, 8, time, -1)


def rank_trace(rank: int, events: list[EventRow], marks: tuple[float, ...] = (), end: float = 20.0) -> RankTrace:
    return RankTrace(rank, 0.0, end, list(marks), events, None, "host", 0.0)


def step_of(start: float, lost: float, ready: float, ranks: tuple[int, ...] = BOTH) -> list[EventRow]:
    """A step of units a and b; `lost` seconds within a, before b is gathered, whose gather is over at `ready`."""
    late = start + 2 + lost
    return [
        row("gather", "a", start, ranks), row("wait_gather", "a", start), row("gathered", "a", start + 1),
        row("gather", "b", late, ranks), row("wait_gather", "b", late), row("gathered", "b", ready),
        row("free", "a", ready), row("reduce", "b", ready + 1, ranks), row("free", "b", ready + 1),
        row("wait_reduce", "b", ready + 1), row("reduced", "b", ready + 1.5),
    ]  # fmt: skip


def run_of(first: list[EventRow], second: list[EventRow]) -> RunTrace:
    return RunTrace([rank_trace(0, first), rank_trace(1, second)], [])


def test_a_wait_is_late_until_the_last_rank_has_issued_and_transfer_after():
    """Rank 1 loses 3 s in unit a; b's gather takes 0.5 s once both have issued it."""
    analysis = analyse(run_of(step_of(0, 0, 5.5), step_of(0, 3, 5.5)))
    (wait,) = [wait for wait in analysis.waits if wait.rank == 0 and wait.unit == "b" and wait.kind == "gather"]
    assert (wait.begin, wait.end, wait.late, wait.transfer, wait.late_rank) == (2, 5.5, 3, 0.5, 1)
    (own,) = [wait for wait in analysis.waits if wait.rank == 1 and wait.unit == "b" and wait.kind == "gather"]
    assert (own.late, own.transfer, own.late_rank) == (0, 0.5, None)
    (late,) = analysis.late_ranks
    assert (late.rank, late.times, late.typical, late.worst, late.place) == (1, 1, 3, 3, "a")
    assert (late.longest, late.cost) == (3, 3)
    (step,) = analysis.steps
    assert (step.time, step.late) == (20, 1.5)  # means over ranks
    assert step.transfer == pytest.approx((2 * 1 + 2 * 0.5 + 2 * 0.5) / 2)
    assert step.compute == pytest.approx(20 - step.late - step.transfer)
    assert step.units[0] == ("b", pytest.approx((3.5 + 0.5 + 0.5 + 0.5) / 2), 1)
    words = "\n".join(analysis.in_words(RunTrace([], [])))
    assert "Rank 1 is late by up to 3000.0 ms, which it loses in unit a." in words
    assert "Another rank waits 3000.0 ms per step for it." in words


def test_what_a_rank_waits_is_not_the_sum_over_ranks():
    """Of three ranks, rank 1 is 3 s late in each of two steps. Rank 0 waits 3 s, and rank 2, which loses 1 s, 2 s."""
    ranks = (0, 1, 2)
    traces = [
        rank_trace(rank, step_of(0, lost, 5.5, ranks) + step_of(8, lost, 13.5, ranks))
        for rank, lost in enumerate((0, 3, 1))
    ]
    analysis = analyse(RunTrace(traces, []))
    (late,) = analysis.late_ranks
    assert (late.rank, late.longest, late.cost) == (1, 3, 5)
    assert "Another rank waits up to 3000.0 ms per step for it, all others together 5000.0 ms." in analysis.in_words(
        RunTrace(traces, [])
    )


@pytest.mark.parametrize(
    ("events", "marks", "which"),
    [
        ([], (1.0, 2.0), "any step"),
        (step_of(0, 0, 3) + step_of(8, 0, 11), (6.0, 7.0, 7.5, 20.0), "2 of 4 steps"),
        (step_of(0, 0, 3) + step_of(8, 0, 11), (6.0, 20.0), None),
    ],
    ids=["all", "some", "none"],
)
def test_steps_without_an_event_are_told(events, marks, which):
    run = RunTrace([rank_trace(0, events, marks), rank_trace(1, events, marks)], [])
    lines = analyse(run).in_words(run)
    told = [line for line in lines if line.startswith("No event was recorded")]
    assert [f"No event was recorded in {which}: " in line for line in told] == ([True] if which else [])
    assert any(line.startswith("A step takes") for line in lines) is (which != "any step")


def test_no_more_than_the_wait_is_late():
    """Clocks are not exact: the last rank may seem to have issued when the wait was over."""
    analysis = analyse(run_of(step_of(0, 0, 4), step_of(0, 3, 5.5)))
    (wait,) = [wait for wait in analysis.waits if wait.rank == 0 and wait.unit == "b" and wait.kind == "gather"]
    assert (wait.begin, wait.end, wait.late, wait.transfer) == (2, 4, 2, 0)


def test_the_place_is_where_the_late_rank_took_longer_than_others_did():
    """Both take 5 s in unit a, shortly before; rank 1 takes 4 s in b, and rank 0 one."""

    def events(lost: float) -> list[EventRow]:
        times = [("gather", "a", 0), ("wait_gather", "a", 0), ("gathered", "a", 1), ("gather", "b", 6)]
        times += [("wait_gather", "b", 6), ("gathered", "b", 6.1), ("gather", "c", 7.1 + lost)]
        times += [("wait_gather", "c", 7.1 + lost), ("gathered", "c", 10.5)]
        return [row(*event) for event in times]

    (late,) = analyse(run_of(events(0), events(3))).late_ranks
    assert (late.rank, late.place) == (1, "b") and late.worst == pytest.approx(3)


def test_no_rank_is_late_where_all_issue_at_once():
    analysis = analyse(run_of(step_of(0, 1, 4), step_of(0, 1, 4)))
    assert not analysis.late_ranks and not any(wait.late for wait in analysis.waits)


def test_collectives_are_matched_in_their_group_by_their_number():
    """Two groups of two; the second group's ranks are 4 s behind the first group's, in step: nobody is late."""
    traces = [rank_trace(r, step_of(0, 0, 3, (0, 1)) + step_of(6, 0, 9, (0, 1))) for r in (0, 1)]
    traces += [rank_trace(r, step_of(4, 0, 7, (2, 3)) + step_of(10, 0, 13, (2, 3))) for r in (2, 3)]
    analysis = analyse(RunTrace(traces, []))
    assert len(analysis.steps) == 2 and not analysis.late_ranks
    assert len(analysis.issues) == 2 * 2 * 3 and all(len(times) == 2 for times in analysis.issues.values())


def test_a_wait_for_replicas_is_matched_among_replicas():
    """The first wait of a reduction is for the shard axis, the second for the replicate axis: rank 2 is 2 s late."""

    def events(ranks: tuple[int, ...], issue: float) -> list[EventRow]:
        return [
            row("reduce", "a", 1, ranks), row("wait_reduce", "a", 1), row("all_reduce", "a", issue, (0, 2)),
            row("wait_reduce", "a", issue), row("reduced", "a", 5.25),
        ]  # fmt: skip

    analysis = analyse(RunTrace([rank_trace(0, events((0, 1), 3)), rank_trace(2, events((2, 3), 5))], [1, 3]))
    waits = {(wait.rank, wait.kind): (wait.late, wait.transfer, wait.late_rank) for wait in analysis.waits}
    assert waits == {
        (0, "reduce"): (0, 2, None), (0, "all_reduce"): (2, 0.25, 2),
        (2, "reduce"): (0, 4, None), (2, "all_reduce"): (0, 0.25, None),
    }  # fmt: skip


def test_steps_are_those_marked_or_begin_at_the_first_unit():
    events = step_of(0, 0, 3) + step_of(6, 0, 9)
    assert analyse(RunTrace([rank_trace(0, events)], [])).bounds[0] == [0, 6, 20]
    assert analyse(RunTrace([rank_trace(0, events, (5.0, 12.0))], [])).bounds[0] == [0, 5, 12]
    again = [row("gather", "a", 5), *[e for e in events if e.time > 3]]  # gathered for backward, before it is reduced
    assert len(analyse(RunTrace([rank_trace(0, step_of(0, 0, 3)[:7] + again)], [])).steps) == 2
    verbs = [("gather", "a"), ("reduce", "b"), ("reduce", "c"), ("reduced", "b"), ("gather", "a"), ("reduced", "c")]
    within = [row(verb, unit, time) for time, (verb, unit) in enumerate(verbs)]  # a is gathered while c is reduced
    assert len(analyse(RunTrace([rank_trace(0, within)], [])).steps) == 1
    assert analyse(RunTrace([rank_trace(0, [])], [])).steps == []


def test_a_clock_is_bounded_by_both_ends_of_each_round():
    """This rank's clock is 100 s behind; an all-reduce is left after all have entered it."""
    first = [(101.0, 102.0), (103.0, 103.5)]  # by rank 0's clock
    own = [(0.5, 2.5), (3.1, 3.6)]
    offset, error = clock_offset(own, first)
    assert abs(offset - 100) <= error and error == pytest.approx(0.5)
    assert clock_offset(first, first) == (0, 0)


def test_spans_of_a_thread_do_not_overlap():
    """Perfetto drops spans that do."""
    ahead = [row("gather", "b", 16.1), row("wait_gather", "a", 16.2), row("gathered", "a", 17)]  # b before a is there
    ahead = [row("gather", "a", 16), *ahead, row("wait_gather", "b", 17.1), row("gathered", "b", 18)]
    run = run_of(step_of(0, 0, 5.5) + step_of(8, 0, 11) + ahead, step_of(0, 3, 5.5) + step_of(8, 0, 11) + ahead)
    events = chrome_trace(run, analyse(run))["traceEvents"]
    for rank in BOTH:
        for thread in range(4):
            spans = [(e["ts"], e["dur"]) for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (rank, thread)]
            assert spans
            ends = 0.0
            for begin, length in sorted(spans):
                assert begin >= ends - 1e-6 and length > 0
                ends = begin + length
    assert {e["name"] for e in events if e["ph"] == "M"} == {"process_name", "thread_name"}
    (late,) = [e for e in events if e["name"] == "b: rank 1 late"]
    assert (late["ts"], late["dur"]) == (2e6, 3e6)


def content(rank: int, run: int = 7, world: int = 2) -> dict[str, object]:
    header = {"format": FORMAT, "run": run, "rank": rank, "world": world, "offset": 5.0 * rank, "offset_error": 1e-5}
    times = {"begin": 1.0 - 5 * rank, "end": 9.0 - 5 * rank, "steps": [], "raised": None, "clock": "host"}
    names = {"verbs": ["gather"], "units": ["a"], "models": ["Net"], "groups": [[0, 1]], "columns": COLUMNS}
    return {**header, **times, **names, "events": [[0, 0, 0, 64, 8, 2.0 - 5 * rank, -1]]}


def test_clocks_are_put_on_that_of_rank_0(tmp_path: Path):
    for rank in BOTH:
        (tmp_path / f"rank-{rank}.json").write_text(json.dumps(content(rank)))
    run = read([tmp_path])
    assert [(trace.begin, trace.end, trace.events[0].time) for trace in run.ranks] == [(0, 8, 1), (0, 8, 1)]
    assert run.missing == [] and run.error == pytest.approx(2e-5)
    assert read([tmp_path / "rank-1.json"]).missing == [0]


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "has rank-\\*.json files"),
        ({"rank-0.json": "{"}, "not JSON"),
        ({"rank-0.json": "[1]"}, "its format is not"),
        ({"rank-0.json": json.dumps({"format": FORMAT})}, "does not name its run"),
        ({"rank-0.json": json.dumps({**content(0), "rank": -7})}, "rank -7 of"),
        ({"rank-0.json": json.dumps({**content(0), "events": [[9, 9, 9]]})}, "not a file of fullshard.trace"),
        ({"rank-0.json": json.dumps({**content(0), "offset_error": None})}, "not a file of fullshard.trace"),
        ({"rank-0.json": json.dumps(content(0)), "rank-1.json": json.dumps(content(1, run=8))}, "a different run"),
        ({"rank-0.json": json.dumps(content(0)), "rank-00.json": json.dumps(content(0))}, "the same rank"),
    ],
)
def test_files_that_are_not_a_runs_are_refused(files: dict[str, str], words: str, tmp_path: Path):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=words):
        read([tmp_path])
