"""What gradients are made of: how a sum becomes a mean, the reduced slice that is kept, and optimizers' views of it."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..errors import message
from ..layout import Piece
from ..torch_private.holders import holders
from .bucket import Bucket
from .member import Member
from .parameter import read_grad, write_grad


@dataclass(frozen=True)
class Scaling:
    """How a sum over ranks becomes the gradient.

    Attributes:
        mean: the collective itself averages, on every axis.
        before: factor applied to the buffer before the reduction.
        after: factor applied to the reduced slice.
    """

    mean: bool
    before: float = 1.0
    after: float = 1.0

    @classmethod
    def choose(cls, world: int, dtype: torch.dtype, factor: float | None, force_sum: bool) -> Scaling:
        """The average over `world` ranks, or the sum divided by `factor` if one is given.

        In float16 a sum over many ranks overflows and a division by all of them first underflows, so the division
        is split: by a power of two near the square root before, the rest after (as PyTorch's FSDP documents).
        """
        divide = float(world if factor is None else factor)
        if dtype == torch.float16:
            before = 1.0
            while world % (before * 2) == 0 and world / (before * 2) > before:
                before *= 2
            return cls(False, 1.0 / before, before / divide)
        if factor is None and not force_sum:
            return cls(True)
        return cls(False, 1.0, 1.0 / divide)


@dataclass(eq=False)
class GradientSet:
    """One reduced slice and the tensors that show it, kept from step to step.

    Ownership: made by `Gradients`, handed to users as `.grad`. It is written again only when every `.grad` was set to
    None and nobody else holds one of the tensors or their memory; else a new set is made and this one left to them.

    Attributes:
        flat: [shard_numel], storage dtype.
        parts: per member, its gradient as users see it.
        views: per optimizer view of the bucket, the plain 1-D tensor over `flat`.
        held: what `holders` said when nobody else held them.
    """

    flat: torch.Tensor
    parts: list[torch.Tensor]
    views: list[torch.Tensor]
    held: tuple[int, int] = (-1, -1)

    def __post_init__(self) -> None:
        self.storage = self.flat.untyped_storage()
        self.nbytes = self.storage.nbytes()
        self.held = self.holders()

    def holders(self) -> tuple[int, int]:
        return holders(self.storage, [*self.parts, *self.views])

    def reusable(self) -> bool:
        """Whether only the engine holds it (all `.grad` must be None for this to be true)."""
        return self.held[0] > 0 and self.holders() == self.held


def adopt_gradient(bucket: Bucket, view: OptimizerView, grad: torch.Tensor) -> None:
    """Make a gradient that the user gave an optimizer view that of its parameters."""
    for index in view.members:
        member = bucket.members[index]
        part = bucket.layout.part(member.slot, bucket.axes.shard.rank)
        at = grad.storage_offset() + (part.offset - view.offset if part.numel else 0)
        write_grad(member.sharded, bucket.tensor_of(grad.as_strided(part.shape, part.stride, at), member.slot))


class OptimizerView:
    """A plain tensor over a run of the shard that an optimizer updates in place of sharded parameters.

    The optimizer owns the tensor; when it is gone, so is the view.

    Args:
        tensor: [length], a Parameter over `shard[offset : offset + length]`.
        offset, length: in elements of the shard.
        members: indices of the parameters that lie in the run.

    Class attributes:
        alone: whether users see the view only, so that its gradient is the one that counts.
    """

    alone = False

    def __init__(self, tensor: nn.Parameter, offset: int, length: int, members: Sequence[int]) -> None:
        self._tensor = weakref.ref(tensor)
        self.offset, self.length, self.members = offset, length, list(members)

    @property
    def tensor(self) -> nn.Parameter | None:
        return self._tensor()

    @property
    def has_gradient(self) -> bool:
        """Whether it is alive and has a `.grad`."""
        tensor = self.tensor
        return tensor is not None and tensor.grad is not None


class FlatView(OptimizerView):
    """The `FlatParameter` of a bucket, whichever object that is now: a user may have put another in its place."""

    alone = True

    def __init__(self, bucket: Any) -> None:
        super().__init__(bucket.flat, 0, bucket.layout.shard_numel, range(len(bucket.members)))
        self._bucket = bucket

    @property
    def tensor(self) -> nn.Parameter | None:
        found: nn.Parameter = self._bucket.flat
        return found


def cut_gradient(grad: torch.Tensor, member: Member, pieces: Sequence[Piece]) -> list[torch.Tensor]:
    """The pieces of a whole gradient, as views; a copy first where its memory format differs from the parameter's."""
    slot = member.slot
    if grad.stride() != slot.stride:
        grad = torch.empty_strided(slot.shape, slot.stride, dtype=grad.dtype, device=grad.device).copy_(grad)
    at = grad.storage_offset()
    return [grad.as_strided(p.sizes, p.parameter_strides, at + p.parameter_offset) for p in pieces]


def allow_any_dtype(bucket: Bucket, views: Sequence[OptimizerView]) -> None:
    """Let `.grad` of the bucket's sharded parameters, and of views over them, have another dtype than they have."""
    for tensor in (*(member.sharded for member in bucket.members), *(view.tensor for view in views)):
        if tensor is not None:
            tensor.grad_dtype = None


def warn_of_zero_gradients(bucket: Bucket, views: Sequence[OptimizerView]) -> bool:
    """Say which parameter has no gradient although the optimizer's view of it and its neighbours has one.

    Returns:
        Whether there is one.
    """
    rank = bucket.axes.shard.rank
    for view in views:
        if view.alone or not view.has_gradient:
            continue
        for member in (bucket.members[i] for i in view.members):
            if read_grad(member.sharded) is None and bucket.layout.part(member.slot, rank).numel:
                warnings.warn(
                    message(
                        "A parameter got no gradient in this step, but others in its optimizer view did: to the "
                        "optimizer it is zero, so that weight decay and momentum still move the parameter.",
                        parameter=member.name,
                        remedy="if they must not, leave it out (optimizer_view(model, params=...)), or give the "
                        "optimizer model.parameters(); said once per unit",
                    ),
                    stacklevel=2,
                )
                return True
    return False
