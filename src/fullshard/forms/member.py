"""A bucket's parameters (members), and parameters that are about to enter one (drafts)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..layout import Part, Slot
from .place import Place
from .split import TensorParallel

NAME_KEY = "_fullshard_name"
"""Attribute of a parameter: its name, for errors."""
SUCCESSOR_KEY = "_fullshard_successor"
"""Attribute of a parameter that was replaced: its replacement."""
WHOLE_KEY = "_fullshard_whole"
"""Attribute of an unsharded parameter: its name."""
_GRAD_DTYPE_KEY = "_fullshard_grad_dtype"
PART_KEY = "_fullshard_part"
"""Attribute of a plain tensor that optimizers see, if it is not a whole parameter in its own shape: a description."""


@dataclass(eq=False, slots=True)
class Member:
    """A parameter of a bucket.

    Attributes:
        slot: where it lies in the bucket.
        part: this rank's part of it.
        places: where it is registered; several if it is tied.
        sharded: the sharded parameter.
        local: the view of the shard inside `sharded`, to detect replacements.
        split: how it is split over tensor-parallel ranks, if at all.
        unsharded: the unsharded parameter; None until the first gather.
        stand_in: shown on modules instead of `sharded`, if the form has stand-ins.
        trains: the `requires_grad` of `unsharded` when it was created, or last followed (`Bucket.follow_requires_grad`,
            `Bucket.take_requires_grad`); if it differs there, the user has set it since.
        qualified: its name relative to the root; None until the root is determined.
        birth: fingerprints of the whole value and of `local` at its creation, and the number of earlier writes to the
            original, to compare with other ranks.
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
        """The name relative to the root, or to the module that was sharded until the root is determined."""
        return self.qualified or self.slot.name

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole parameter, over all kinds of parallelism."""
        return self.slot.shape if self.split is None else tuple(self.split.shape)

    @property
    def shown(self) -> Any:
        """The object that modules show while the parameter is sharded."""
        return self.sharded if self.stand_in is None else self.stand_in

    def qualify(self, name: str) -> None:
        """Set the name relative to the root, which errors use from now on."""
        self.qualified = name
        self.sharded.__dict__[NAME_KEY] = name
        run = self.sharded.__dict__.get("_run")  # a FlatShard's errors take the name from its run
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
    """The attributes that users set on a parameter (`p.no_decay = True`), without Fullshard's and a subclass's own.

    Args:
        alike: the result of an operation of the parameter's class: its attributes are the class's own.
    """
    flatten = getattr(parameter, "__tensor_flatten__", None)
    inner = flatten()[0] if flatten is not None and type(parameter) is not nn.Parameter else ()
    own_keys = {"_local_tensor", "_run", *inner, *(alike.__dict__ if alike is not None else ())}
    return {k: v for k, v in parameter.__dict__.items() if k not in own_keys and not k.startswith("_fullshard")}


def identity_of(parameter: torch.Tensor) -> dict[str, Any]:
    """The attributes that a replacement of `parameter` must get: owner, name, and those that users set."""
    attributes = {k: v for k, v in parameter.__dict__.items() if k.startswith("_fullshard")}
    explicit, dtype = explicit_grad_dtype(parameter)
    if explicit:
        attributes[_GRAD_DTYPE_KEY] = dtype  # until `take_grad_dtype`
    return {**attributes_of(parameter), **attributes}


def explicit_grad_dtype(parameter: torch.Tensor) -> tuple[bool, torch.dtype | None]:
    """Whether the user set `grad_dtype`, and its value. Set to the parameter's own dtype it looks as if not set."""
    dtype = parameter.grad_dtype
    return dtype is not parameter.dtype, dtype


def take_grad_dtype(target: torch.Tensor, original: torch.Tensor | None = None) -> None:
    """Set `target`'s `grad_dtype` to the user's on `original`; None: to that in `target`'s `identity_of`."""
    noted = target.__dict__.pop(_GRAD_DTYPE_KEY, _GRAD_DTYPE_KEY)
    explicit, dtype = explicit_grad_dtype(original) if original is not None else (noted is not _GRAD_DTYPE_KEY, noted)
    if explicit and not explicit_grad_dtype(target)[0]:
        target.grad_dtype = dtype


def successor_of(parameter: torch.Tensor) -> torch.Tensor:
    """The last in the chain of replacements of `parameter`, or `parameter` itself."""
    while (successor := parameter.__dict__.get(SUCCESSOR_KEY)) is not None:
        parameter = successor
    return parameter


def hooks_onto(target: torch.Tensor, original: torch.Tensor) -> None:
    """Share the hooks that users registered on `original` with `target`, its replacement."""
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        hooks = getattr(original, name, None)
        if hooks and not getattr(target, name, None):
            setattr(target, name, hooks)
