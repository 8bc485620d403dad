"""What is gathered ahead follows from the log of passes (`agreement/log.py`): which units, in which order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fullshard
from fullshard import fully_shard
from fullshard.agreement.log import Log
from fullshard.runtime import runner_of
from fullshard.runtime.trace import Period, Traces
from fullshard.watcher import BACKWARD, FORWARD, GATHER, REDUCE, REGATHER, VERB_BITS

BLOCKS = 4


class Model(nn.Module):
    """Blocks that run in an order, some of them in one reentrant checkpoint each time."""

    def __init__(self, together: int = 0) -> None:
        super().__init__()
        self.inp = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(BLOCKS))
        self.order, self.together = list(range(BLOCKS)), together

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        if not self.together:
            return self.run(x, self.order)
        for first in range(0, BLOCKS, self.together):
            x = checkpoint(self.run, x, self.order[first : first + self.together], use_reentrant=True)
        return x

    def run(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
        for index in order:
            x = self.blocks[index](x)
        return x


def sharded(together: int = 0, **settings: Any) -> Any:
    model = Model(together)
    for block in model.blocks:
        fully_shard(block, **settings)
    return fully_shard(model, **settings)


def step(model: Any) -> None:
    model(torch.ones(2, 4)).sum().backward()


def gathers(model: Any, act: Any = None) -> list[tuple[str, bool]]:
    """Of what a step gathers, in order: the unit, and whether it is gathered ahead."""
    root, early = runner_of(model).root, set()

    def noting(prefetch: Any) -> Any:
        def prefetches(*args: Any) -> None:
            before = len(events)
            prefetch(*args)
            early.update(range(before, len(events)))

        return prefetches

    with fullshard.record_events() as events:
        root.prefetch, root.prefetch_back = noting(root.prefetch), noting(root.prefetch_back)
        (act or step)(model)
        del root.prefetch, root.prefetch_back
    return [(event.unit, at in early) for at, event in enumerate(events) if event.verb == "gather"]


def ahead(model: Any) -> int:
    return sum(early for _, early in gathers(model))


def token(verb: int, unit: int) -> int:
    return verb | unit << VERB_BITS


def counted(model: Any, compared: list[int]) -> None:
    """Count what ranks compare before something new is issued."""
    position = runner_of(model).root.position
    compare = position._compare

    def counts(token: int) -> None:
        compared.append(token)
        compare(token)

    position._compare = counts


def alternating_passes(how: str) -> list[tuple[int, int, int]]:
    """Six micro-batches, of which some begin with units gathered: gathers, those ahead, and comparisons of each."""
    model, compared, found = sharded(), [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model)
    counted(model, compared)
    for micro in range(18):
        last = micro % 6 == 5
        if "accumulated" in how:
            model.set_reshard_after_backward(last and how == "accumulated")
            model.set_requires_gradient_sync(last)
        elif how == "asked for" and micro % 2:
            model.blocks[2].unshard()
        elif how == "kept by forward":
            model.set_reshard_after_forward(micro % 2 == 0)
        compared.clear()
        issued = gathers(model)
        if last or "accumulated" not in how:
            optimizer.step()
            optimizer.zero_grad()
        found.append((len(issued), sum(early for _, early in issued), len(compared)))
    return found[-6:]


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        (
            "accumulated",
            [(9, 8, 0), *[(4, 4, 0)] * 5],
        ),  # that of the backward; the root stays gathered from its forward
        ("accumulated, and kept over the optimizer's step", [(9, 8, 0), *[(4, 4, 0)] * 5]),  # stale in the first
        ("asked for", [(9, 8, 0), (8, 7, 0)] * 3),
        ("kept by forward", [(10, 8, 0), (5, 4, 0)] * 3),
    ],
)
def test_passes_that_begin_with_other_units_gathered_are_each_known(run_ranks, how, expected):
    """They gather ahead and compare nothing, though each issues something else than the one before it."""
    for found in run_ranks(alternating_passes, how):
        assert found == expected


@pytest.mark.parametrize("prefetch", [1, 2, 3])
def test_a_unit_that_moves_is_not_passed_over(fake_world, prefetch):
    """Its model's own code may change it until it is opened; what ranks gather stays in one order."""
    fake_world(2)
    model = sharded(prefetch=prefetch)
    for _ in range(3):
        step(model)
    runner_of(model.blocks[2]).unit.moving = True
    found = gathers(model)[: BLOCKS + 1]
    assert [unit for unit, _ in found] == ["(root)", "blocks.0", "blocks.1", "blocks.2", "blocks.3"]
    assert dict(found)["blocks.1"] and not dict(found)["blocks.2"] and dict(found)["blocks.3"]


@pytest.mark.parametrize("order", [[1, 0, 2, 3], [0, 3, 1, 2], [3, 2, 1, 0], [0, 1, 3, 2]])
@pytest.mark.parametrize("prefetch", [1, 2])
@pytest.mark.parametrize("together", [0, 2])
def test_an_order_that_changes_is_learned_anew(fake_world, order, prefetch, together):
    fake_world(2)
    model = sharded(together, prefetch=prefetch)
    for _ in range(3):
        step(model)
    before = ahead(model)
    model.order = order
    for _ in range(4):
        step(model)
    found = gathers(model)
    assert found == gathers(model) and sum(early for _, early in found) >= before
    if prefetch == 1:  # else those that are gathered together may stay in their order
        assert [unit for unit, _ in found][1 : BLOCKS + 1] == [f"blocks.{index}" for index in order]


def test_a_unit_that_the_program_gathers_itself_does_not_count_as_waiting(fake_world):
    """The log knows its gather from then on, at the same place, and the others go on ahead."""
    fake_world(2)
    model = sharded()
    model.inp.register_forward_hook(lambda *_: model.blocks[3].unshard())
    for _ in range(3):
        step(model)
    with torch.no_grad():
        model(torch.ones(2, 4))
        found = gathers(model, lambda model: model(torch.ones(2, 4)))
    assert sum(early for _, early in found) >= BLOCKS - 2


def test_what_strayed_is_not_how_passes_of_its_kind_go():
    log = Log()
    for tokens in ((1, 2, 3), (1, 2, 3)):
        log.begin(FORWARD)
        for each in tokens:
            log.next(each)
        log.end()
    log.begin(FORWARD)
    log.next(1)
    log.stray(2, 3)
    assert not log.next(3) and log.left == (2, 3) and log.taken() == [1, 3]
    assert log.end() == (FORWARD, 2, 3)
    log.begin(FORWARD)
    assert not log.previous
    for each in (1, 2):
        log.next(each)
    log.end()
    log.begin(FORWARD)
    for each in (1, 2):  # all was gathered ahead, and the one that comes is another
        log.next(each)
    log.stray(2, 3)
    assert log.left == (2, 3) and log.taken() == [1, 2]


def test_passes_in_other_states_are_each_known():
    log = Log()
    for _ in range(2):
        for state in ("", "x"):
            log.begin(FORWARD, state)
            found = [log.next(each) for each in ([1, 2] if state else [1, 2, 3])]
            log.end()
    assert found == [True, True]
    log.begin(FORWARD)  # and no state is one of its own
    assert not log.next(9)
    log.turn("x")
    assert log.expected == 1 and log.taken() == [] and log.kind == (FORWARD, "x")


def test_a_pass_goes_on_where_it_was_once_one_within_it_is_over():
    log = Log()
    for known in (False, True, True):
        log.begin(1)
        found = [log.next(4)]
        log.begin(2)
        found += [log.next(token) for token in (5, 6)]
        log.end()
        found.append(log.next(7))
        log.end()
        assert found == [known] * 4


def test_few_kinds_of_passes_are_known():
    log = Log()
    for state in [*range(200), 150]:
        log.begin(FORWARD, state)
        log.next(state)
        log.end()
    assert 1 < len(log._tokens) < 100 and (FORWARD, 150) in log._tokens


def test_the_next_gathers_of_a_backward_are_those_beyond_its_reductions():
    known = [token(REGATHER, 2), token(REDUCE, 2), token(GATHER, 1), token(REDUCE, 1), token(REGATHER, 0)]
    follows, leaves, differs, strays = Log(), Log(), Log(), Log()
    for log in (follows, leaves, differs, strays):
        for _ in range(2):
            log.begin(BACKWARD)
            for each in known:
                log.next(each)
            log.end()
        log.begin(BACKWARD)
    assert follows.next_gathers(2) == [2, 1] and follows.next_gathers(0) == follows.next_gathers(-1) == []
    for each in (token(REGATHER, 2), token(REGATHER, 1)):  # ahead of a reduction
        leaves.next(each)
    assert leaves.next_gathers(3) == [0]
    for each in (token(REGATHER, 2), token(REGATHER, 0)):
        differs.next(each)
    assert differs.next_gathers(3) == []
    strays.stray(2, 1)
    assert strays.next_gathers(1) == []


def test_a_backward_that_comes_back_to_an_earlier_pass_gathers_that_ones_units_ahead():
    traces, passes = Traces(), []
    for unit in (0, 2):
        traces.begin(lambda: None)
        periods = [Period.of(unit, traces.current), Period.of(unit + 1, traces.current)]
        for period in periods:
            traces.current.entered(period)
            traces.current.left(period)
        passes.append(periods)
    (first, second), (third, fourth) = passes
    for period, upcoming in ((fourth, [2]), (second, [0]), (third, [])):
        assert not [*traces.back_to(period, True)]
        traces.back_to(period, False)
        assert traces.reached is period.trace and traces.reached.upcoming(1) == upcoming
    assert traces.ahead == {first.unit: 1, second.unit: 0, third.unit: 0, fourth.unit: 0}
