"""What a bucket is made of: its parameters' places and forms, and parameters about to enter it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..layout import Slot
from .flat_shard import FlatShard
from .tensor_parallel import TensorParallel

Place = tuple[dict[str, Any], str]  # a module's `_parameters` and the name in it


@dataclass(eq=False, slots=True)
class Member:
    """One parameter of a bucket.

    Attributes:
        slot: where it lies.
        places: every (module parameters, attribute name) where it is registered; several if it is tied.
        sharded: what optimizers and checkpoints see.
        unsharded: what the module computes with; None until the first gather.
        local: the view of the shard inside `sharded`, to tell whether somebody replaced it.
        got_grad: whether it received a gradient since the last reduction.
        trains: the `requires_grad` that `unsharded` was given; another one there was set by the user.
    """

    slot: Slot
    places: list[Place]
    sharded: nn.Parameter
    local: torch.Tensor
    unsharded: nn.Parameter | None = None
    got_grad: bool = False
    trains: bool = True
    hidden: Any = None  # what modules show in place of `sharded` while sharded, if anything
    qualified: str | None = None  # its name from the root, once that is known

    @property
    def name(self) -> str:
        return self.qualified or self.slot.name

    def qualify(self, name: str) -> None:
        """Learn the name from the root; errors speak it from now on."""
        self.qualified = name
        self.sharded.__dict__["_fullshard_name"] = name
        if isinstance(self.sharded, FlatShard):
            self.sharded._run = replace(self.sharded._run, name=name)


@dataclass(frozen=True)
class Draft:
    """A parameter about to enter a bucket: its name, the original, and where it is registered."""

    name: str
    original: nn.Parameter
    places: list[Place]
    parallel: TensorParallel | None = None  # if the original is a DTensor already
    module: Callable[[], nn.Module | None] | None = None  # the first that has it
