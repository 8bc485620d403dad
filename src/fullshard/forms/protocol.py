"""The form of a bucket's parameters: how they show while their unit is sharded."""

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
    """How the parameters of one bucket show while sharded. One object a bucket; a new form is one new file.

    A **local** is this rank's part of a member, in the shape of `member.part`, in any buffer laid out as the shard
    (the shard itself, a reduced gradient, optimizer state). What users see of it is **shown**.

    Attributes:
        plain: whether the shard is one plain 1-D tensor.
        keeps_originals: whether the original Parameter objects become the sharded ones.
        shows_kept: whether a parameter whose gradients were accumulated without sync shows a `.grad` of zeros: where
            users' parameters are plain, nothing else would tell that they gave those gradients up.
        counts: whether `version` is ever anything but 0.
        follows: whether `follow` does anything.
        gives_empty: whether a parameter of which this rank holds nothing gets an (empty) `.grad`.
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
        """The sharded parameter of a member over `member.local`, in place of `original`."""

    def view(self, member: Member, local: torch.Tensor) -> torch.Tensor:
        """A local as users see it (not a Parameter); shares memory."""

    def local(self, member: Member, shown: torch.Tensor) -> torch.Tensor:
        """The local inside what users see; shares memory."""

    def whole(self, member: Member, local: torch.Tensor) -> torch.Tensor:
        """The whole value of which every rank has a local, over all kinds of parallelism. Collective."""

    def cut(self, member: Member, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole value, as a local; shares memory with `whole` where it can."""

    def untouched(self, members: Sequence[Member], shard: torch.Tensor) -> Untouched:
        """That the sharded parameters, their storage and dtype are those that were made here."""

    def counters(self, members: Sequence[Member]) -> Sequence[torch.Tensor]:
        """What counts changes in place, besides the shard itself."""

    def reassigned(self, members: Sequence[Member], shard: torch.Tensor) -> bool:
        """Whether sharded parameters lie elsewhere than in `shard`. Asked where the form `counts`."""

    def adopt(self, members: Sequence[Member]) -> Sequence[torch.Tensor]:
        """Take what users put in the places of sharded parameters for these; returns the locals they hold now.

        Raises:
            ConfigError: something that is not this parameter's shard: other shape, mesh, placement or kind.
        """

    def point(self, members: Sequence[Member], shard: torch.Tensor) -> None:
        """Make the sharded parameters views of `shard`, whose values are right already."""

    def follow(self, members: Sequence[Member]) -> None:
        """Let `requires_grad` of the members follow what users set on what they see."""

    def succeed(self, old: Member, new: Member) -> None:
        """`new`, in this form, takes the place of `old` of another bucket: keep the object, or tell who follows it."""

    def full(self, members: Sequence[Member], device: torch.device, dtype: torch.dtype) -> Full:
        """What the bucket is gathered into."""

    def copied(self) -> Form:
        """A form for a copy of the bucket, with no state of this one's."""
