"""What a bucket is made of: its parameters (members), and parameters about to enter it (drafts)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..layout import Part, Slot
from .place import Place
from .split import TensorParallel

NAME_KEY = "_fullshard_name"
"""Where a parameter keeps its name, for errors."""
SUCCESSOR_KEY = "_fullshard_successor"
"""Where a parameter that was replaced keeps the one that took its place."""
WHOLE_KEY = "_fullshard_whole"
"""Where a parameter that is shown while its unit is gathered keeps its name."""
_GRAD_DTYPE_KEY = "_fullshard_grad_dtype"
PART_KEY = "_fullshard_part"
"""Where a plain tensor that optimizers see keeps what it is, if it is not a whole parameter in its own shape."""


@dataclass(eq=False, slots=True)
class Member:
    """One parameter of a bucket.

    Attributes:
        slot: where it lies in the bucket.
        part: what this rank holds of it.
        places: where it is registered; several if it is tied.
        sharded: what optimizers and checkpoints see.
        local: the view of the shard inside `sharded`, to tell whether somebody replaced it.
        split: how it is split over tensor-parallel ranks, if it is.
        unsharded: what the module computes with; None until the first gather.
        stand_in: what modules show in place of `sharded` while sharded, if anything.
        trains: the `requires_grad` that `unsharded` was given; another one there was set by the user.
        qualified: its name from the root, once that is known.
        birth: fingerprints of the whole value and of `local` when it was made, and how often the original had been
            written to, to compare with other ranks'.
    """

    slot: Slot
    part: Part
    places: list[Place]
    sharded: nn.Parameter
    local: torch.Tensor
    split: TensorParallel | None = None
    unsharded: nn.Parameter | None = None
    stand_in: Any = None
    trains: bool = True
    qualified: str | None = None
    birth: tuple[torch.Tensor, torch.Tensor, int] | None = None

    @property
    def name(self) -> str:
        """From the root if that is known, else from the module that was sharded."""
        return self.qualified or self.slot.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole parameter, over all kinds of parallelism."""
        return self.slot.shape if self.split is None else tuple(self.split.shape)

    def qualify(self, name: str) -> None:
        """Learn the name from the root; errors speak it from now on."""
        self.qualified = name
        self.sharded.__dict__[NAME_KEY] = name
        run = self.sharded.__dict__.get("_run")  # of a FlatShard, whose errors speak the name too
        if run is not None:
            self.sharded.__dict__["_run"] = replace(run, name=name)


@dataclass(frozen=True)
class Draft:
    """A parameter about to enter a bucket: its name, the original, where it is registered, and how it is split."""

    name: str
    original: nn.Parameter
    places: list[Place]
    split: TensorParallel | None = None


def attributes_of(parameter: torch.Tensor, alike: torch.Tensor | None = None) -> dict[str, Any]:
    """What users set on a parameter (`p.no_decay = True`): not what Fullshard keeps there, nor a subclass's own data.

    Args:
        alike: a tensor that an operation of the parameter's class made: what it has as attributes is the class's data.
    """
    flatten = getattr(parameter, "__tensor_flatten__", None)
    inner = flatten()[0] if flatten is not None and type(parameter) is not nn.Parameter else ()
    ours = {"_local_tensor", "_run", *inner, *(alike.__dict__ if alike is not None else ())}
    return {k: v for k, v in parameter.__dict__.items() if k not in ours and not k.startswith("_fullshard")}


def identity_of(parameter: torch.Tensor) -> dict[str, Any]:
    """What a tensor that takes `parameter`'s place must be given: its owner, its name, and what users set on it."""
    kept = {k: v for k, v in parameter.__dict__.items() if k.startswith("_fullshard")}
    explicit, dtype = explicit_grad_dtype(parameter)
    if explicit:
        kept[_GRAD_DTYPE_KEY] = dtype  # until `take_grad_dtype`
    return {**attributes_of(parameter), **kept}


def explicit_grad_dtype(parameter: torch.Tensor) -> tuple[bool, torch.dtype | None]:
    """Whether the user set `grad_dtype`, and to what. The parameter's own dtype cannot be told from one not set."""
    dtype = parameter.grad_dtype
    return dtype is not parameter.dtype, dtype


def take_grad_dtype(target: torch.Tensor, original: torch.Tensor | None = None) -> None:
    """Give `target` the `grad_dtype` that the user set on `original`; None: on what its identity was taken from."""
    kept = target.__dict__.pop(_GRAD_DTYPE_KEY, _GRAD_DTYPE_KEY)
    explicit, dtype = explicit_grad_dtype(original) if original is not None else (kept is not _GRAD_DTYPE_KEY, kept)
    if explicit and not explicit_grad_dtype(target)[0]:
        target.grad_dtype = dtype


def successor_of(parameter: torch.Tensor) -> torch.Tensor:
    """The parameter that took `parameter`'s place (or that of the one which did), or `parameter` itself."""
    while (successor := parameter.__dict__.get(SUCCESSOR_KEY)) is not None:
        parameter = successor
    return parameter


def hooks_onto(target: torch.Tensor, original: torch.Tensor) -> None:
    """Let hooks that users put on `original` serve `target`, which takes its place."""
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        hooks = getattr(original, name, None)
        if hooks and not getattr(target, name, None):
            setattr(target, name, hooks)
