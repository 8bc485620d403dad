"""Gradients that were accumulated without sync: what stands for them in `.grad`, and whether users gave them up.

They wait, unsharded, for the next reduction. Unsharded training would have them in `.grad`, where `zero_grad()` finds
and drops them; here a sharded `.grad` of zeros stands for them, so that torch's own `zero_grad()`, of an optimizer or a
module, finds something to set to None or to zero. The zeros are taken back before the reduction.

    form                             zeros are shown              users who set None, or zero in place, are noticed
    a class of ours (`owns_grad`)    when `.grad` is read         at once: by the property, and by the operation
    plain parameters and views       after the backward           before the gradients are used: None, or all bits zero

The zeros of plain tensors are negative ones. Scaling them (clipping) leaves the sign, `zero_()` does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..dtypes import as_bits
from ..forms import Member, mark_gradient
from ..torch_private.local_tensor import plain_access, read_device, read_dtype, read_grad, read_version, write_grad
from .bucket import Bucket
from .optimizer_view import OptimizerView


@dataclass(slots=True)
class _Shown:
    """What stood for gradients when they were accumulated.

    Attributes:
        holder: whose `.grad` it is: a parameter, or an optimizer view's tensor; None if that is gone.
        grad: the `.grad` that was there, or was put there.
        version: how often it had been written to then.
        ours: whether it is zeros that the engine put there.
        members: indices of the parameters whose gradients it stands for.
    """

    holder: Callable[[], torch.Tensor | None]
    grad: torch.Tensor
    version: int
    ours: bool
    members: set[int]


class Kept:
    """See the module's docstring. Owns the zeros.

    Args:
        bucket: whose gradients these are.
    """

    __slots__ = ("_bucket", "shown")

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self.shown: dict[int, _Shown] = {}  # by the id of the member, the view, or the bucket of a `FlatParameter`

    def __bool__(self) -> bool:
        return bool(self.shown)

    # Showing.

    def show(self, got: Sequence[bool], views: Sequence[OptimizerView]) -> None:
        """Gradients were accumulated.

        Args:
            got: by member, whether there are some for it.
            views: optimizer views over the bucket's shard.
        """
        bucket = self._bucket
        members = {index for index, some in enumerate(got) if some}
        with plain_access(), torch.no_grad():
            if bucket.flat_parameter is not None:
                self._stand_for(bucket, partial(getattr, bucket, "flat_parameter"), members)
            elif bucket.form.owns_grad:
                for index in members:
                    sharded = bucket.members[index].sharded
                    if (grad := read_grad(sharded)) is not None:
                        mark_gradient(grad, sharded)
            else:
                for index in members:
                    member = bucket.members[index]
                    self._stand_for(member, partial(getattr, member, "sharded"), {index})
            for view in views:
                if not view.alone and not members.isdisjoint(view.members):
                    self._stand_for(view, partial(getattr, view, "tensor"), members.intersection(view.members))

    def _stand_for(self, key: object, holder: Callable[[], torch.Tensor | None], members: set[int]) -> None:
        tensor = holder()
        if tensor is None or not members:
            return
        if (known := self.shown.get(id(key))) is not None and read_grad(tensor) is known.grad:
            known.members |= members
            return
        grad = read_grad(tensor)
        if ours := grad is None:
            grad = torch.full_like(tensor, -0.0)
            write_grad(tensor, grad)
        assert grad is not None
        self.shown[id(key)] = _Shown(holder, grad, read_version(grad), ours, members)

    def show_when_read(self, parameter: torch.Tensor, got: Sequence[bool]) -> torch.Tensor | None:
        """The zeros of a parameter of a class of ours, whose `.grad` is None and is being read; None: nothing waits."""
        bucket = self._bucket
        for index, member in enumerate(bucket.members):
            if member.sharded is parameter and got[index]:
                with plain_access(), torch.no_grad():
                    dtype, device = read_dtype(parameter), read_device(parameter)
                    zeros = bucket.shown(torch.zeros(member.part.shape, dtype=dtype, device=device), member)
                    mark_gradient(zeros, parameter)
                    write_grad(parameter, zeros)
                holder = partial(getattr, member, "sharded")
                self.shown[id(member)] = _Shown(holder, zeros, read_version(zeros), True, {index})
                return zeros
        return None

    def stands_for(self, bucket: Bucket, member: Member) -> bool:
        """Whether zeros of the engine's stand in `.grad` for what was accumulated for this member of this bucket."""
        shown = self.shown.get(id(bucket)) or self.shown.get(id(member))
        return shown is not None and shown.ours

    # Giving up.

    def given_up(self) -> list[Member]:
        """The members whose gradients users gave up since they were shown. They are not kept any more."""
        if not self.shown:
            return []
        gone = self._gone()
        self.shown = {key: shown for key, shown in self.shown.items() if not any(shown is one for one in gone)}
        return [self._bucket.members[index] for index in sorted(self._indices(gone))]

    def all_given_up(self, got: Sequence[bool]) -> bool:
        """Whether users gave up the gradients of all members for which there are some, as `got` says."""
        return bool(self.shown) and {i for i, some in enumerate(got) if some} <= self._indices(self._gone())

    @staticmethod
    def _indices(shown: Iterable[_Shown]) -> set[int]:
        return {index for one in shown for index in one.members}

    def _gone(self) -> list[_Shown]:
        """What users set to None, or zeroed in place."""
        gone, changed = [], []
        for shown in self.shown.values():
            tensor: Any = shown.holder()
            if tensor is None:  # an optimizer and its view are gone: that says nothing
                continue
            grad = read_grad(tensor)
            if grad is None:
                gone.append(shown)
            elif grad is shown.grad and read_version(grad) != shown.version and not self._bucket.form.owns_grad:
                changed.append(shown)
        with_elements = [shown for shown in changed if shown.grad.numel()]
        zeroed = [shown for shown in with_elements if not as_bits(shown.grad).any()]
        # Of what has no elements on this rank nothing but the others can tell.
        empty = [shown for shown in changed if not shown.grad.numel()] if len(zeroed) == len(with_elements) else []
        return [*gone, *zeroed, *empty]

    # Letting go.

    def clear(self) -> None:
        """Take the engine's zeros back, where users have put nothing else: the gradients come, or were dropped."""
        for shown in self.shown.values():
            tensor = shown.holder()
            if shown.ours and tensor is not None and read_grad(tensor) is shown.grad:
                write_grad(tensor, None)
        self.shown.clear()
