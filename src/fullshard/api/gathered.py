"""What users ask of gathered units, the same for both front-ends: to stay for a block, and to be freed."""

from __future__ import annotations

from contextlib import AbstractContextManager, ContextDecorator
from types import TracebackType
from typing import Any

from torch import nn

from ..errors import PhaseError
from ..names import plain_class
from ..runtime import Phase, Runner, runner_of, runners_in
from ..shard import is_parked
from . import messages


def keep_gathered(module: nn.Module) -> AbstractContextManager[None]:
    """A context in which the units of `module` stay gathered from their first use on; they are freed at its end.

        with keep_gathered(model.head):  # a loss in chunks: one gather in place of one per chunk and direction
            for part in parts:
                model.head(part).sum().backward()

    Through any number of forwards and backwards; gradients are reduced in each backward as ever. Weights that were
    changed inside (an optimizer step, `load_state_dict`) are noticed as elsewhere: at the next forward from outside
    the ranks compare, and gather anew what changed. To write to gathered weights is refused, as elsewhere. Contexts may
    be nested, and one may be entered any number of times, within itself too. Memory: all units of `module` at once, in
    their compute dtype.

    Every rank enters and leaves at the same place. Nothing is sent at the beginning but one small comparison with the
    other ranks, where the model has run before and no pass runs; before its first forward the ranks compare at that.

    Args:
        module: a unit, or a module that contains units, when the context is entered.

    Raises, when it is entered or left:
        ConfigError: there is no unit in `module` (`owner_of` names the one that it is part of).
        PhaseError: the unit's own forward or backward runs, or it shows whole parameters (`summon_full_params`); at
            the end, gathered weights were written to.
        DivergenceError: other ranks do something else.
    """
    return _Kept(module)


class _Kept(ContextDecorator, AbstractContextManager[None]):
    """The blocks of one `keep_gathered`: open ones are left innermost first, as `with` has it."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._open: list[list[Runner]] = []  # what each open block holds

    def __enter__(self) -> None:
        self._open.append(_hold(self._module))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        found = _let_go(self._open.pop())
        if error is None:
            for wrong in found:
                raise wrong
        else:
            for wrong in found:
                error.add_note(f"The units could not be freed after this: {wrong!r}")


def _hold(module: nn.Module) -> list[Runner]:
    """The beginning of a block: its units, which stay gathered from now on. See `keep_gathered`."""
    runners = _units_in(module, "keep_gathered")
    for runner in runners:
        if runner.root is not None:
            runner.root.recover_if_broken()
        if runner.phase not in (Phase.IDLE, Phase.PARTLY) or runner.unit.showing.summoned:
            raise messages.entered_while_running(runner.unit.name, runner.unit.showing.summoned, runner.phase.name)
    _agree(runners)
    for runner in runners:
        runner.held += 1
    return runners


def _agree(runners: list[Runner]) -> None:
    """Ranks compare what is to stay, once a root."""
    asked: dict[int, tuple[Any, list[int]]] = {}
    for runner in runners:
        root = runner.root
        if root is not None and root.pass_top is None and not root.in_backward:
            asked.setdefault(id(root), (root, []))[1].append(runner.index)
    for root, indices in asked.values():
        root.position.keep(min(indices), len(indices))


def _let_go(runners: list[Runner]) -> list[Exception]:
    """The end of a block: free what no other keeps. Returns what was raised; the others are freed all the same."""
    wrong: list[Exception] = []
    for runner in runners:
        runner.held -= 1
        if runner.root is not None:
            runner.root.recover_if_broken()
        running = runner.phase in (Phase.FORWARD, Phase.RECOMPUTING, Phase.BACKWARD)
        if runner.held or running or runner.period.hides:  # else it is freed when that is over
            continue
        try:
            runner.reshard()
        except Exception as error:
            wrong.append(error)
    return wrong


def free(model: nn.Module) -> None:
    """Free whatever units of `model` are gathered: the root after a forward without a backward, say. No communication.

    The root stays gathered after a forward that builds a graph, since its backward comes first; where none will come
    (losses for evaluation without `torch.no_grad()`, an exception caught before the backward) this gives its memory
    back. A backward that comes after all gathers it again. Units that `keep_gathered` keeps stay.

    Args:
        model: sharded by either front-end, or a module in such a model.

    Raises:
        ConfigError: there is no unit in `model`.
        PhaseError: a forward or backward through it runs; or gathered weights were written to (they are freed).
    """
    runners = _units_in(model, "free")
    refuse_running(runners, "free")
    wrong: Exception | None = None
    for runner in runners:
        if runner.held or runner.period.hides or is_parked(runner.unit):
            continue
        try:
            runner.reshard()
        except PhaseError as error:
            wrong = wrong or error
    if wrong is not None:
        raise wrong


def refuse_running(runners: list[Runner], what: str) -> None:
    """Recover from exceptions, and raise if a forward or backward through any of these units runs.

    Args:
        runners: of the units.
        what: was called.

    Raises:
        PhaseError: names the unit.
    """
    for runner in runners:
        root = runner.root
        if root is None:
            continue
        root.recover_if_broken()
        if root.pass_top is not None or root.in_backward:
            raise messages.called_within_a_pass(what, runner.unit.name)


def _units_in(module: nn.Module, what: str) -> list[Runner]:
    if not isinstance(module, nn.Module):
        raise messages.takes_a_module(what, type(module).__name__)
    found = runners_in(module)
    if not found:
        inside = runner_of(module) is None and any(True for _ in module.parameters())
        raise messages.no_unit_inside(plain_class(module).__name__, inside)
    return found
