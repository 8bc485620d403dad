"""The table of phases against a naive model of a unit, and traces: whatever ranks use, they go the same way back."""

from __future__ import annotations

from dataclasses import dataclass, replace
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullshard import PhaseError
from fullshard.runtime.phases import ACTS, REFUSED, Happening, Phase, row
from fullshard.runtime.runner import ROWS, Runner
from fullshard.runtime.trace import Period, Trace

H = Happening


@dataclass(frozen=True)
class Facts:
    """A unit without phases: what is true of it, told one fact at a time."""

    forward: bool = False  # its forward runs, in a pass
    others_to_come: bool = False  # some of its modules have run in this pass, others have not
    again: bool = False  # its forward runs within a backward
    backward_next: bool = False  # it was recomputed for the backward that comes
    backward: bool = False  # between its output's gradient and its input's
    kept_graph: bool = False  # a backward of it is over that will be differentiated


def naive(facts: Facts, event: Happening) -> tuple[str, Facts] | None:
    """What is to be done, by rules read one after the other; None: it cannot happen."""
    running = facts.forward or facts.again
    if event is H.RESET:
        return "reset", Facts()
    if event is H.UNSHARD:
        return ("gather_for_user" if facts == Facts() else ""), facts
    if event is H.RESHARD:
        return None if running or facts.backward else ("free_for_user", Facts())
    if event in (H.ENTER, H.REENTER):
        if running or facts.backward:
            return "", facts
        if facts.others_to_come:
            return "", Facts(forward=True)
        return ("open_forward", Facts(forward=True)) if event is H.ENTER else ("open_recompute", Facts(again=True))
    if event in (H.LEAVE, H.LEAVE_PARTLY):
        if facts.again:
            return "close_recompute", Facts(backward_next=True)
        if facts.backward:
            return "", facts
        if not facts.forward:
            return None
        return ("close_forward", Facts()) if event is H.LEAVE else ("", Facts(others_to_come=True))
    if event is H.BROKEN:
        if facts.again:
            return "close_recompute", Facts(backward_next=True)
        return ("", facts) if facts.backward else ("break_forward", Facts())
    if event is H.PASS_END:
        if facts.others_to_come:
            return "close_forward", Facts()
        if facts.again:
            return None
        return ("settle" if facts == Facts() else ""), facts
    if event is H.OUTPUT_GRAD:
        return ("", facts) if running or facts.backward else ("open_backward", Facts(backward=True))
    if event is H.INPUT_GRAD:
        return ("close_backward", Facts()) if facts.backward else ("", facts)
    if event is H.INPUT_GRAD_KEPT:
        return ("", Facts(kept_graph=True)) if facts.backward else ("", facts)
    if event is H.OVERTAKEN:
        return ("release", Facts()) if facts.backward_next else ("", facts)
    assert event is H.END
    if running or facts.others_to_come:
        return "", facts
    return ("hide" if facts.kept_graph else "finish"), Facts()


FACTS = {
    Phase.IDLE: Facts(),
    Phase.FORWARD: Facts(forward=True),
    Phase.PARTLY: Facts(others_to_come=True),
    Phase.RECOMPUTING: Facts(again=True),
    Phase.RECOMPUTED: Facts(backward_next=True),
    Phase.BACKWARD: Facts(backward=True),
    Phase.BETWEEN: Facts(kept_graph=True),
}


@given(st.lists(st.sampled_from(Happening), max_size=60))
def test_the_table_does_what_a_naive_unit_does(events: list[Happening]) -> None:
    phase, facts = Phase.IDLE, Facts()
    for event in events:
        found, expected = row(phase, event), naive(facts, event)
        if expected is None or found is None:
            # What cannot happen raises, and is no part of the sequence. A table may be stricter than the model only
            # where the model has nothing to do.
            assert found is None and (expected is None or expected[0] == ""), (phase, event)
            continue
        assert found == (expected[0], next(p for p, f in FACTS.items() if f == expected[1])), (phase, event)
        phase, facts = found[1], replace(expected[1])


def test_every_action_is_one_of_the_runners() -> None:
    for phase, acts in ACTS.items():
        for event, (action, following) in acts.items():
            assert not action or callable(getattr(Runner, action)), (phase, event, action)
            assert action or following is not phase, "it changes nothing: what is listed nowhere does not either"
            assert event not in REFUSED[phase], (phase, event)


def test_an_impossible_pair_names_the_unit() -> None:
    refuse, following = ROWS[Phase.FORWARD][Happening.RESHARD]
    runner = mock.Mock()
    runner.unit.name = "blocks.3"
    with pytest.raises(
        PhaseError, match=r"reshard\(\) is not allowed for unit 'blocks\.3'[\s\S]*RESHARD while FORWARD"
    ):
        refuse(runner)
    assert following is Phase.FORWARD
    refuse, _ = ROWS[Phase.IDLE][Happening.LEAVE]  # nobody asks for that one
    with pytest.raises(AssertionError, match=r"'blocks\.3' met LEAVE in IDLE"):
        refuse(runner)


# Traces.


@st.composite
def passes(draw: st.DrawFn) -> list[tuple[int, bool]]:
    """The steps of a forward over nested units, some of which run several times."""
    steps: list[tuple[int, bool]] = []

    def run(depth: int) -> None:
        for _ in range(draw(st.integers(0, 3))):
            unit = draw(st.integers(0, 6))
            if (unit, False) in [step for step in steps if steps.count((unit, True)) < steps.count((unit, False))]:
                continue  # it is open already
            steps.append((unit, False))
            if depth:
                run(depth - 1)
            steps.append((unit, True))

    run(2)
    return steps


def backward(steps: list[tuple[int, bool]], used: list[bool]) -> list[int]:
    """The positions of all steps that a rank goes through, if only `used` steps tell it of gradients."""
    trace, open_now, at = Trace(), {}, {}
    told = []
    for position, (unit, leaves) in enumerate(steps):
        if leaves:
            period = open_now.pop(unit)
            trace.left(period)
        else:
            period = open_now[unit] = Period.of(unit)
            trace.entered(period)
        at[id(period), leaves] = position
        told.append((period, leaves))
    gone: list[int] = []
    for (period, begins), arrives in zip(reversed(told), used, strict=True):
        if arrives and at[id(period), begins] not in gone:
            gone += [at[id(p), b] for p, b in trace.back_to(period, begins)] + [at[id(period), begins]]
    return gone + [at[id(p), b] for p, b in trace.rest()]


@given(passes(), st.data())
def test_ranks_go_the_same_way_back_whatever_they_use(steps: list[tuple[int, bool]], data: st.DataObject) -> None:
    ranks = [
        data.draw(st.lists(st.booleans(), min_size=len(steps), max_size=len(steps)), label=f"rank {rank} is told")
        for rank in range(3)
    ]
    for used in ranks:
        assert backward(steps, used) == list(reversed(range(len(steps))))


def test_what_leads_nowhere_leaves_no_trace() -> None:
    trace, outer, inner = Trace(), Period.of(0), Period.of(1)
    trace.entered(outer)
    trace.entered(inner)
    trace.left(inner, goes_back=False)
    trace.left(outer)
    assert list(trace.rest()) == [(outer, True), (outer, False)]


def test_a_step_that_was_gone_over_is_not_found_in_another_period() -> None:
    """A unit that runs twice: what is told of the second run again says nothing of the first."""
    trace, first, second = Trace(), Period.of(0), Period.of(0)
    for period in (first, second):
        trace.entered(period)
        trace.left(period)
    assert list(trace.back_to(second, False)) == [(second, True)]
    assert list(trace.back_to(second, False)) == [] and trace.ahead[0]


@pytest.mark.parametrize("depth", [0, 1, 2, 5])
def test_what_comes_next_is_what_was_left_last(depth: int) -> None:
    trace = Trace()
    for unit in range(4):
        period = Period.of(unit)
        trace.entered(period)
        trace.left(period)
    assert trace.upcoming(depth) == [3, 2, 1, 0][:depth]
