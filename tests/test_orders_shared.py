"""The pure parts of agreement between ranks: the log, orders that ranks share, and what a watcher concludes."""

from __future__ import annotations

import doctest
import importlib
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fullshard.agreement import SharedOrder, shared_order
from fullshard.agreement.log import ENTER, LEAVE, VERB, Log, following
from fullshard.agreement.shared_order import Merging, completed, parents_of
from fullshard.errors import DivergenceError
from fullshard.watcher.issued import (
    BACKWARD,
    COMPARE,
    FORWARD,
    GATHER,
    LENGTH,
    REGATHER,
    ROOT,
    TURN,
    VERB_BITS,
    VERBS,
    Record,
    records_of,
    step_word,
    word,
)
from fullshard.watcher.judge import ranks_of, stuck
from fullshard.watcher.messages import first_difference, report
from fullshard.watcher.rank import Rank

PURE = ["agreement.log", "agreement.shared_order", "runtime.trace", "watcher.judge"]
NAMES = ["", "a", "a.x", "a.y", "b", "c", "c.z"]
PARENTS = parents_of(NAMES)


@pytest.mark.parametrize("name", PURE)
def test_examples_in_docstrings(name):
    found = doctest.testmod(importlib.import_module(f"fullshard.{name}"))
    assert found.attempted and not found.failed


def taken(draw: st.DrawFn) -> list[int]:
    """What one rank runs: some units in module order, each inside its parent, each once."""
    runs = {0} | {unit for unit in range(1, len(NAMES)) if draw(st.booleans())}
    runs = {unit for unit in runs if PARENTS[unit] in runs or unit == 0}

    def tokens(unit: int) -> list[int]:
        inside = [token for child in sorted(runs) if PARENTS[child] == unit for token in tokens(child)]
        return [word(ENTER, unit), *inside, word(LEAVE, unit)]

    return tokens(0)


@st.composite
def ranks_that_run(draw: st.DrawFn) -> list[list[int]]:
    return [taken(draw) for _ in range(draw(st.integers(1, 4)))]


def merge(ranks: list[list[int]]) -> list[int]:
    """As the ranks do it: each says what it wants until that is chosen."""
    merging, at = Merging(len(ranks)), [0] * len(ranks)
    while any(i < len(rank) for i, rank in zip(at, ranks, strict=True)):
        chosen = merging.chosen([rank[i] for i, rank in zip(at, ranks, strict=True)])
        at = [i + (rank[i] == chosen) for i, rank in zip(at, ranks, strict=True)]
    return merging.tokens


def is_nested(tokens: list[int]) -> bool:
    stack: list[int] = []
    for token in tokens:
        if token & VERB == ENTER:
            stack.append(token >> VERB_BITS)
        elif not stack or stack.pop() != token >> VERB_BITS:
            return False
    return not stack


def of_one_rank(gone: list[int], always: bool = False) -> SharedOrder:
    """Of a rank that talks to nobody: what it wants is what all want. What it passes over is added to `gone`."""
    axes = mock.Mock(spanning=(), world=1, device=torch.device("cpu"))
    return SharedOrder(axes, NAMES, mock.Mock(), always, lambda *token: gone.append(word(*token)), mock.Mock())


def go_through(order: SharedOrder, tokens: list[int], gone: list[int] | None = None) -> None:
    """A pass in which the rank runs these."""
    order.begin(0, False)
    for token in tokens:
        assert order.active
        if token & VERB == ENTER:
            order.enter(token >> VERB_BITS)
        else:
            order.written(token >> VERB_BITS, False)
        if gone is not None:
            gone.append(token)
    order.end()


@given(ranks_that_run(), ranks_that_run())
@settings(max_examples=200, deadline=None)
def test_every_ranks_own_order_is_part_of_the_one_they_share(first, later):
    merged = merge(first)
    assert is_nested(merged)
    for rank in first:
        assert [token for token in merged if token in rank] == rank
    gone: list[int] = []
    along = of_one_rank(gone)
    go_through(along, merged)
    known = completed(merged, PARENTS)
    assert is_nested(known) and {token >> VERB_BITS for token in known} == set(range(len(NAMES)))
    for rank in later:  # whatever units a later pass runs: all go through the same
        gone.clear()
        go_through(along, rank, gone)
        assert gone == known


def test_a_unit_in_another_order_has_no_place():
    gone: list[int] = []
    along = of_one_rank(gone)
    go_through(along, [word(ENTER, 0), word(ENTER, 1), word(LEAVE, 1), word(LEAVE, 0)])
    with pytest.raises(DivergenceError, match="'a' runs at a different point"):
        go_through(along, [word(ENTER, 0), word(ENTER, 4), word(LEAVE, 4), word(ENTER, 1)], gone)
    assert not along.active and gone[-1] == word(LEAVE, 4)


@pytest.mark.parametrize(("always", "times"), [(False, 1), (True, 0)])
def test_an_order_is_completed_for_passes_that_follow_it(always, times):
    along = of_one_rank([], always)
    with mock.patch.object(shared_order, "completed", wraps=completed) as made:
        for _ in range(3):
            go_through(along, [word(ENTER, 0), word(LEAVE, 0)])
    assert made.call_count == times


def test_backwards_in_step_go_back_over_the_order_in_which_forwards_began():
    along, others, took_part = of_one_rank([], always=True), [], []
    along._take_part = lambda *token: took_part.append(token)

    def come_to(verb: int, unit: int, *wishes: int) -> list[tuple[int, int]]:
        """What this rank takes part in before its own, where another one wants these, one by one."""
        took_part.clear()
        others[:] = wishes
        with mock.patch.object(along, "_wanted", lambda token: [token, others.pop(0)]):
            along.come_to(verb, unit)
        return [*took_part]

    go_through(
        along, [word(ENTER, 0), *[word(verb, unit) for unit in (2, 1) for verb in (ENTER, LEAVE)], word(LEAVE, 0)]
    )
    first_of_another, mine = word(REGATHER, 1), word(REGATHER, 2)  # unit 1 began after unit 2
    assert come_to(REGATHER, 2, first_of_another, mine) == [(REGATHER, 1)]
    assert along.in_step is along
    along.forget()  # of units whose forwards nobody knows the last one by index is first
    assert come_to(REGATHER, 2, first_of_another) == []


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.integers(3, 6))
def test_what_repeats_is_foreseen(period, times):
    history = "".join(map(str, period * times))
    assert following(history[::-1]) == history[0] or len(set(period)) < len(period)


@given(st.text("abc", max_size=12))
def test_the_longest_stretch_that_came_before_tells_what_follows(history):
    """Told by trying all of them, up to half of what there is."""
    ends = [(length, at) for at in range(1, len(history)) for length in range(1, min(at, len(history) // 2) + 1)]
    alike = [(length, at) for length, at in ends if history[at - length : at] == history[-length:]]
    assert following(history[::-1]) == (history[max(alike)[1]] if alike else None)


@pytest.mark.parametrize("micro_batches", [2, 9, 100])
def test_the_last_of_many_micro_batches_is_foreseen(micro_batches):
    """Kinds of passes: a forward, a backward that is not reduced, and one that is."""
    log, foreseen = Log(), []
    step = [1, 2] * (micro_batches - 1) + [1, 3]
    for kind in step * 3:
        foreseen.append(log.expects(kind))
        log.begin(kind)
        log.end()
    assert all(foreseen[2 * len(step) :])


def test_a_new_kind_of_pass_in_every_step_leaves_nothing_behind():
    """As where parameters are frozen at random. Kinds of forwards that were complete stay so."""
    log, rank, sizes = Log(), Log(), []
    for step in range(3000):
        for each in (log, rank):
            for kind in (word(FORWARD, 3), word(BACKWARD, step)):
                each.begin(kind)
                each.next(step)
                each.end()
        assert log.expects(word(FORWARD, 3)) is rank.expects(word(FORWARD, 3))
        sizes.append(len(log._letters) + len(log.complete) + len(log._tokens) + len(log._history))
        assert word(FORWARD, 3) in log.complete
    assert max(sizes[2000:]) <= max(sizes[:2000])


def test_what_is_left_is_new_until_it_was_taken_again():
    log = Log()
    for _ in range(3):
        log.begin(FORWARD)
        known = [log.next(token) for token in (1, 2, 3)]
        log.end()
    assert known == [True] * 3
    log.begin(FORWARD)
    assert [log.next(token) for token in (1, 3)] == [True, False]
    log.forget()
    assert log.next(9) and not log.expects(FORWARD) and not log.complete


PASSES = st.lists(st.tuples(st.integers(0, 1), st.lists(st.integers(0, 2), max_size=4)), max_size=8)


@given(PASSES)
def test_passes_are_known_as_they_went_last(passes):
    log, last = Log(), {}
    for kind, tokens in passes:
        log.begin(kind)
        known, taken = [], []
        for token in tokens:
            known.append(log.next(token))
            taken.append([*log.taken()])
        assert taken == [tokens[: at + 1] for at in range(len(tokens))]
        before = last.get(kind, [])
        alike = [a == b for a, b in zip(tokens, before, strict=False)]
        follows = alike.index(False) if False in alike else len(alike)
        assert known == [at < follows for at in range(len(tokens))]
        pair = [each[follows] if follows < len(each) else -1 for each in (before, tokens)]
        assert log.end() == ((kind, *pair) if before and before != tokens else None)
        last[kind] = tokens


@given(PASSES, PASSES, st.booleans())
def test_ranks_that_issue_the_same_have_one_fingerprint_and_others_have_not(passes, others, nested):
    """Whatever a rank knows of earlier passes."""

    def fingerprint(log: Log, passes: list[tuple[int, list[int]]]) -> int:
        for kind, tokens in passes:
            log.begin(kind)
            for token in tokens:
                log.next(token)
            if not nested:
                log.end()
        found = log.fingerprint()
        log.lose()
        return found

    new, knows = Log(), Log()
    fingerprint(knows, passes)
    knows.fingerprint()
    assert fingerprint(knows, passes) == fingerprint(new, passes)
    flat = [[token for _, tokens in each for token in tokens] for each in (passes, others)]
    assert nested or flat[0] == flat[1] or fingerprint(Log(), passes) != fingerprint(Log(), others)


def test_whatever_was_issued_since_the_last_fingerprint_is_in_the_next():
    places = ["outside", "before the one within", "within, and over", "within"]

    def fingerprints(at: str | None) -> list[int]:
        log, found = Log(), []
        for turn in range(2):
            for place in places:
                if place == "before the one within":
                    log.begin(1)
                elif place.startswith("within"):
                    log.begin(2)
                log.next(9 if turn == 0 and place == at else 8)
                if "over" in place:
                    log.end()
            found.append(log.fingerprint())
            log.lose()
            log.fingerprint()
        return found

    first, second = zip(*map(fingerprints, [None, *places]), strict=True)
    assert len(set(first)) == len(places) + 1 and len(set(second)) == 1


def test_a_pass_that_was_broken_off_counts_as_it_does_where_nothing_was_raised():
    """A rank that raises after its last token, and one that does not, foresee the same."""
    raises, ends = Log(), Log()
    foreseen = []
    for log in (raises, ends):
        found = []
        for step in range(8):
            found.append(log.expects(1))
            log.begin(1)
            found += [log.next(token) for token in ((1, 2, 3) if step % 3 else (4, 1, 2, 3))]
            if log is raises and step in (2, 5):
                log.lose()
            else:
                log.end()
            if step not in (2, 5):  # left out on all ranks
                found.append(log.expects(2))
                log.begin(2)
                log.end()
        foreseen.append([*found, log.fingerprint()])
    assert foreseen[0] == foreseen[1]
    assert True in foreseen[0][-4:-1]


def test_only_a_pass_that_came_to_its_end_is_complete():
    log = Log()
    log.begin(1)
    log.begin(2)  # within it
    log.end()
    assert log.complete == {2} and log.kind == (1, None)
    log.lose()
    assert log.complete == {2} and log.kind is None
    assert log.end() is None and log.complete == {2}


def status(rank: int, **facts: Any) -> dict[str, Any]:
    known = {"gone": None, "state": "S", "raised": None, "waited": None, "waits_for": None, "last": None, "idle": False,
             "count": 5, "steps": 1, "cpu": 0.0, "io": 0, "children": 0.0, "records": [], "stack": "here", "clock": 0.0,
             "samples": ["here"]}  # fmt: skip
    return {"rank": rank, **known, **facts}


def record(number: int, verb: int, unit: str) -> dict[str, Any]:
    return {"number": number, "turn": number, "root": 1, "verb": VERBS[verb], "unit": unit, "step": 3}


WAITS = {"waited": 6.0, "waits_for": record(5, GATHER, "a"), "last": record(5, GATHER, "a")}
BEHIND = status(1, **{**WAITS, "last": record(4, GATHER, "b"), "count": 4})


@pytest.mark.parametrize(
    ("others", "before", "expected"),
    [
        ([status(1, gone="killed")], [], True),
        ([status(1, state="T")], [], True),
        ([status(1, state="unreachable")], [], False),  # no answer is no proof
        ([status(1, state="unreachable")], [status(1, state="unreachable")], True),
        ([status(1, raised="ValueError: x")], [], True),
        ([status(1)], [], False),  # busy, and seen for the first time
        ([status(1)], [status(1)], True),
        ([status(1)], [status(1, samples=["elsewhere"])], False),
        ([status(1)], [status(1, children=-1.0)], False),
        ([status(1)], [status(1, count=4)], False),
        ([status(1, steps=0, cpu=3.0)], [status(1, steps=0, cpu=1.0)], False),  # its first step: it computes
        ([status(1, steps=0)], [status(1, steps=0)], False),  # its first step: it may sleep
        ([status(1, steps=0), status(2, **{**WAITS, "waited": 25.0})], [status(1, steps=0)], True),
        ([status(1, state="absent")], [status(1, state="absent")], False),  # builds its model
        ([status(1, **WAITS)], [], False),  # all at one point: slow
        ([BEHIND], [], False),  # seen for the first time
        ([BEHIND], [status(0, **WAITS), BEHIND], True),
    ],
)
def test_who_is_stuck(others, before, expected):
    assert stuck([status(0, **WAITS), *others], before, limit=5.0, hard=100.0) is expected


def test_patience_has_an_end_and_a_beginning():
    all_slow = [status(0, **WAITS), status(1, **WAITS)]
    assert stuck(all_slow, [], 5.0, hard=5.5) and not stuck(all_slow, [], 5.0, hard=7.0)
    early = {**WAITS, "waited": 1.5}
    assert not stuck([status(0, **early), status(1)], [status(1)], 5.0, 100.0)
    compares = {"waited": 3.0, "waits_for": record(5, COMPARE, "b"), "last": record(5, COMPARE, "b")}
    assert stuck([status(0, **{**WAITS, "waited": 3.0}), status(1, **compares)], [], 300.0, 1000.0)


def test_a_report_fits_a_screen_for_a_thousand_ranks():
    many = [status(rank, **WAITS, records=[record(5, GATHER, "a")]) for rank in range(1000) if rank != 7]
    text = report([*many, status(7, gone="killed by signal 9 (SIGKILL)", records=[record(4, GATHER, "b")], count=4)])
    assert len(text.splitlines()) < 20 and "rank 7 is gone: killed by signal 9" in text and "ranks 0-6, 8-999" in text
    assert "event 5: rank 7: nothing yet" in (
        first_difference([*many[:2], status(7, count=4, records=[record(4, 1, "b")])])
    )
    assert ranks_of([3]) == "rank 3"


def test_what_a_rank_recorded_is_read_back():
    rank = Rank()
    rank.steps = 7
    for number in range(1, 2501):
        if number == 2000:
            rank.record(step_word(ROOT, 2))
        elif number == 2001:
            rank.record(step_word(2 * ROOT, 1 << 32 | 5))
        else:
            rank.record(word(GATHER, ROOT + number % 3) + number * TURN)
    seen = records_of(rank.log, rank.steps)
    there = [number for number in range(2501 - LENGTH, 2501) if number not in (2000, 2001)]
    assert [record.turn for record in seen] == there
    words = {number: word(GATHER, ROOT + number % 3) + number * TURN for number in there}
    assert seen == [
        Record(words[number], number, 7 if number < 2000 else 2, ROOT + number % 3, GATHER) for number in there
    ]
    gather = seen[-1].named({1: ["", "x", "y"]}, {1: [5, 6, 7]})
    assert (gather["unit"], gather["verb"], gather["bytes"], gather["turn"]) == ("x", "gather", 6, 2500)
    rank.record(word(COMPARE, ROOT + 2) + (1 << 32) * TURN - TURN)  # the largest word
    rank.record(word(COMPARE, 2 * ROOT))
    seen = records_of(rank.log, rank.steps)
    assert seen[-1].step == 5
    assert seen[-2].named({1: ["", "x", "y"]}, {1: [5, 6, 7]})["bytes"] == 0


def test_a_rank_that_is_condemned_raises_when_it_issues_something():
    rank = Rank()
    rank.condemn("Ranks are stuck: planted")
    with pytest.raises(DivergenceError, match="planted"):
        rank.record(word(GATHER, ROOT))
    with pytest.raises(DivergenceError, match="planted"):
        rank.talks("texts")
    rank.begin(60.0)  # process groups are made anew
    rank.record(word(GATHER, ROOT))
    assert rank.verdict is None and not rank.leaves
