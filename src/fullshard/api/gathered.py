"""`keep_gathered` and `free`: control of gathered units, for both front-ends."""

from __future__ import annotations

from contextlib import AbstractContextManager, ContextDecorator
from types import TracebackType
from typing import Any

from torch import nn

from ..errors import PhaseError
from ..runtime import Phase, Runner
from ..shard import is_parked
from . import messages
from .preconditions import refuse_running, runners_of


def keep_gathered(module: nn.Module) -> AbstractContextManager[None]:
    """A context in which the units of `module` stay gathered after their first use; they are freed at its end.

        with keep_gathered(model.head):  # a loss in chunks: a single gather, not two for each chunk
            for part in parts:
                model.head(part).sum().backward()

    It spans any number of forwards and backwards; each backward reduces gradients as usual. If weights change inside
    (an optimizer step, `load_state_dict`), the ranks compare at the next forward from outside, and changed units are
    gathered again. Writing to gathered weights is an error, as elsewhere. Contexts may be nested, and a context may be
    entered any number of times, also within itself. Memory: all units of `module` at once, in their compute dtype.

    Every rank enters and leaves at the same place. On entry the ranks make one small comparison if the model has run
    before and no pass is running; before the first forward they compare in that forward.

    Args:
        module: a unit, or a module that contains units, when the context is entered.

    Raises, on entry or exit:
        ConfigError: `module` contains no unit (`owner_of` names the unit that it is part of).
        PhaseError: the unit's own forward or backward is running, or it shows whole parameters
            (`summon_full_params`); on exit, gathered weights were written to.
        DivergenceError: other ranks do something else.
    """
    return _KeepGathered(module)


class _KeepGathered(ContextDecorator, AbstractContextManager[None]):
    """The context of `keep_gathered`. Entered again within itself, it exits innermost first."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._open: list[list[Runner]] = []  # the units of each entry

    def __enter__(self) -> None:
        self._open.append(_hold(self._module))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for failure in _release(self._open.pop()):
            if error is None:
                raise failure
            error.add_note(f"The units could not be freed after this: {failure!r}")


def _hold(module: nn.Module) -> list[Runner]:
    """Enter a context: the units of `module`, which stay gathered from now on."""
    runners = runners_of(module, "keep_gathered")
    for runner in runners:
        runner.recover_if_broken()
        if runner.phase not in (Phase.IDLE, Phase.PARTLY) or runner.unit.showing.summoned:
            raise messages.entered_while_running(runner.unit.name, runner.unit.showing.summoned, runner.phase.name)
    _agree(runners)
    for runner in runners:
        runner.held += 1
    return runners


def _agree(runners: list[Runner]) -> None:
    """Compare with the other ranks which units stay gathered, once per root."""
    by_root: dict[int, tuple[Any, list[int]]] = {}
    for runner in runners:
        root = runner.root
        if root is not None and not runner.is_running:
            by_root.setdefault(id(root), (root, []))[1].append(runner.index)
    for root, indices in by_root.values():
        root.position.keep(min(indices), len(indices))


def _release(runners: list[Runner]) -> list[Exception]:
    """Exit a context: free units that no other context holds. Returns the errors of those that could not be freed."""
    failures: list[Exception] = []
    for runner in runners:
        runner.held -= 1
        runner.recover_if_broken()
        running = runner.phase in (Phase.FORWARD, Phase.RECOMPUTING, Phase.BACKWARD)
        if runner.held or running or runner.period.hides:  # freed when that ends
            continue
        try:
            runner.reshard()
        except Exception as error:
            failures.append(error)
    return failures


def free(model: nn.Module) -> None:
    """Free all gathered units of `model`, such as the root after a forward without a backward. No communication.

    The root stays gathered after a forward that builds a graph, since its backward comes first. If no backward follows
    (evaluation without `torch.no_grad()`, an exception before the backward), this releases its memory; a later backward
    gathers it again. Units inside `keep_gathered` stay.

    Args:
        model: a model sharded by either front-end, or a module in it.

    Raises:
        ConfigError: `model` contains no unit.
        PhaseError: a forward or backward through it is running; or gathered weights were written to (they are freed).
    """
    runners = runners_of(model, "free")
    refuse_running(runners, "free")
    first_error: Exception | None = None
    for runner in runners:
        if runner.held or runner.period.hides or is_parked(runner.unit):
            continue
        try:
            runner.reshard()
        except PhaseError as error:
            first_error = first_error or error
    if first_error is not None:
        raise first_error
