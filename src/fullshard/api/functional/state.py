"""`fully_shard.state(module)`: the state that PyTorch's pipeline stages and libraries read from a unit.

A pipeline stage keeps gradients through the backwards of all micro-batches, then asks each unit of its module in turn
to reduce its own, and the root to wait for them (`torch.distributed.pipelining.stage`). Here the root does both.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import nn

from ...runtime import Runner, runner_of
from ...runtime.reduce_kept import reduce_kept
from ..messages import method_of_root


class UnitState:
    """A stateless view of a unit, with the attribute names of PyTorch's module state."""

    __slots__ = ("_runner",)

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    @property
    def _fsdp_param_groups(self) -> tuple[()]:
        """Empty: the root reduces everything itself, in `_root_post_backward_final_callback`."""
        return ()

    @property
    def _is_root(self) -> bool | None:
        """Whether the unit's forward is called from outside; None until the first forward decides."""
        return None if self._runner.root is None else self._runner.is_top

    @property
    def _state_ctx(self) -> Any:
        """The state that all units below a root share: `all_states`."""
        return SimpleNamespace(
            all_states=[UnitState(unit) for unit in self._runner.rooted().units if isinstance(unit, Runner)]
        )

    @property
    def _comm_ctx(self) -> object:
        """The communication context: the same object for roots that `share_comm_ctx` joined."""
        root, in_flight = self._runner.root, self._runner.settings.in_flight
        return root.reducer.in_flight if root is not None else self._runner if in_flight is None else in_flight

    def _lazy_init(self) -> None:
        """Determine the root, as the first forward does. Collective."""
        self._runner.rooted()

    def _root_post_backward_final_callback(self) -> None:
        """Reduce the gradients that the units below the root accumulated without sync. Collective.

        Raises:
            PhaseError: the unit is not the root, or is running.
        """
        root = self._runner.rooted()
        if not self._runner.is_top:
            raise method_of_root("reduction of accumulated gradients", self._runner.unit.name)
        reduce_kept(root)


def state_of(module: nn.Module) -> UnitState | None:
    """The state of a unit's module; None for other modules."""
    runner = runner_of(module)
    return None if runner is None else UnitState(runner)
