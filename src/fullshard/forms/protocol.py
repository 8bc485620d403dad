"""The form of a bucket's parameters: how they appear while their unit is sharded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from ..layout import Part, Slot
from .changes import Untouched
from .full import Full
from .member import Member


class Form(Protocol):
    """How the parameters of a bucket appear while sharded. One object per bucket; a new form is a new file.

    A **local** is this rank's part of a member, in the shape of `member.part`, in any buffer laid out as the shard
    (the shard itself, a reduced gradient, optimizer state). The tensor that users see for it is **shown**.

    Attributes:
        plain: whether the shard is a plain 1-D tensor.
        keeps_originals: whether the original Parameter objects become the sharded parameters.
        shows_kept: whether a parameter whose gradients were accumulated without sync gets a `.grad` of zeros: plain
            parameters offer no other way to notice that the user discarded those gradients.
        counts: whether `counters` and `reassigned` detect changes that the shard's own version counter does not count.
        follows: whether `follow` does anything.
        gives_empty: whether a parameter of which this rank has no elements gets an (empty) `.grad`.
    """

    plain: bool
    keeps_originals: bool
    counts: bool
    follows: bool
    gives_empty: bool
    shows_kept: bool

    def take(self, slot: Slot, part: Part, original: torch.Tensor, local: torch.Tensor) -> None:
        """Copy this rank's `part` of the original's values into `local`."""

    def make(self, member: Member, original: nn.Parameter) -> nn.Parameter:
        """Create a member's sharded parameter over `member.local`, which replaces `original`."""

    def view(self, member: Member, local: torch.Tensor) -> torch.Tensor:
        """The shown tensor (not a Parameter) of a local; shares memory."""

    def local(self, member: Member, shown: torch.Tensor) -> torch.Tensor:
        """The local inside a shown tensor; shares memory."""

    def whole(self, member: Member, local: torch.Tensor) -> torch.Tensor:
        """The whole value from every rank's local, over all kinds of parallelism. Collective."""

    def cut(self, member: Member, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole value, as a local; shares memory with `whole` where possible."""

    def untouched(self, members: Sequence[Member], shard: torch.Tensor) -> Untouched:
        """A check that the sharded parameters, their storage and dtype are still those that this form created."""

    def counters(self, members: Sequence[Member]) -> Sequence[torch.Tensor]:
        """Tensors whose version counters count in-place changes, besides the shard itself."""

    def reassigned(self, members: Sequence[Member], shard: torch.Tensor) -> bool:
        """Whether sharded parameters have memory outside of `shard`. Called only if the form `counts`."""

    def adopt(self, members: Sequence[Member]) -> Sequence[torch.Tensor]:
        """Adopt the objects with which users replaced sharded parameters; returns the current locals.

        Raises:
            ConfigError: a replacement that is not this parameter's shard: wrong shape, mesh, placement or type.
        """

    def point(self, members: Sequence[Member], shard: torch.Tensor) -> None:
        """Make the sharded parameters views of `shard`, which has the right values already."""

    def follow(self, members: Sequence[Member]) -> None:
        """Copy the `requires_grad` that users set on shown tensors to the members."""

    def succeed(self, old: Member, new: Member) -> None:
        """Let `new`, of this form, replace `old` of a different bucket: keep the object, or record its successor."""

    def full(self, members: Sequence[Member], device: torch.device, dtype: torch.dtype) -> Full:
        """The bucket's full buffers."""

    def copied(self) -> Form:
        """A form for a copy of the bucket, without this form's state."""
