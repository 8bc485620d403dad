"""What users ask of a unit: `unshard()` and `reshard()`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..shard import State, Unit, refuse_meta, refuse_parked, settle
from ..watcher import GATHER
from .phases import Happening
from .settings import UnitSettings


class Asked:
    """The part of a `Runner` that users call."""

    unit: Unit
    settings: UnitSettings
    root: Any
    is_top: bool
    kept: bool
    index: int
    happens: Callable[[Happening], None]
    post_optim_event: torch.Event | None
    _ran: set[int]

    def unshard(self) -> None:
        """Start gathering (if it is sharded) on the user's behalf."""
        self.happens(Happening.UNSHARD)

    def gather_for_user(self) -> None:
        """See `unshard`."""
        unit = self.unit
        if self.root is not None:
            self.root.recover_if_broken()
        if unit.state is not State.SHARDED and unit.changed_since_gather():
            unit.reshard()
        if unit.state is State.SHARDED:
            unit.refresh()
            refuse_meta([unit])
            refuse_parked([unit])
            root, alone = self.root, self.root is None or self.root.pass_top is None
            if root is not None:
                (root.position.tell if alone else root.position.issue)(GATHER, self.index)
            unit.issue_gather(self.settings.comm, apart=alone)
        self.kept = True

    def wait_unshard(self) -> None:
        """Finish what `unshard` started, and show the unsharded parameters."""
        if self.unit.state is State.GATHERING:
            self.unit.finish_gather()
            settle([bucket.home for bucket in self.unit.buckets])
        if self.unit.state is State.GATHERED:
            self.unit.show_unsharded()

    def reshard(self) -> None:
        """Free the unit and show the sharded parameters."""
        self.happens(Happening.RESHARD)

    def free_for_user(self) -> None:
        """See `reshard`."""
        self.kept = False
        self._ran.clear()
        written = self.unit.written()
        self.unit.drop_kept()
        self.unit.reshard()
        settle([bucket.home for bucket in self.unit.buckets])
        if written:
            raise self.unit.written_error(written)

    def before_pass(self) -> None:
        """A pass begins at this unit."""
        if self.post_optim_event is not None:
            event, self.post_optim_event = self.post_optim_event, None
            event.wait()

    def set(self, **changes: Any) -> None:
        """Replace settings; those of `reduce` and `prefetch` are named `reduce_x` and `prefetch_x`."""
        self.settings = self.settings.with_changes(changes)
