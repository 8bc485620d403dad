"""Where a bucket's gradients go on their way to a reduction: one buffer, rank-major, as the reduction needs it.

The world's slices lie one after the other, segment by segment. What depends on shapes alone is worked out once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress, repeat
from operator import is_not
from typing import Any

import torch

from ..comm import Comm, reduction_of
from ..containers import NONES
from ..dtypes import as_real
from ..errors import PhaseError
from ..forms import Member, Scratch
from ..layout import Piece
from ..mesh import Axis
from ..torch_private.foreach import add_all, copies_to, copy_all, same_form, zero_all
from .bucket import Bucket
from .scaling import MEAN, Rules

_STRIDED, _LAYOUT = {torch.strided}, repeat("layout")


class ReduceBuffer(Scratch):
    """The buffer [world * shard_numel], memory on demand, and the places of members' gradients in it.

    Ownership: allocated at the first gradient of a backward, given back when the reduction is done.

    Args:
        bucket: whose gradients these are.
        dtype: of the reduction.

    Attributes:
        segments: per segment of the layout, its part of the buffer [world * slice_numel].
    """

    __slots__ = ("_known", "_padding", "_places", "_strewn", "_zeros", "bucket", "segments")

    def __init__(self, bucket: Bucket, dtype: torch.dtype) -> None:
        layout = bucket.layout
        super().__init__(layout.gathered_numel, dtype, bucket.device)
        self.bucket, tensor = bucket, self.tensor
        self.segments = [
            tensor.narrow(0, layout.world * s.shard_offset, layout.world * s.slice_numel) for s in layout.segments
        ]
        self._padding = [tensor.narrow(0, start, length) for start, length in layout.padding]
        self._strewn = layout.padding_is_strewn  # padding is named by whole segments: zeroed before the copies
        self._zeros = [] if self._strewn else [torch.zeros_like(p) for p in self._padding]
        self._places = [_Places(member, bucket, tensor) for member in bucket.members]
        # If every gradient goes in as one tensor, of those alike, then of the others: which they are, what copies them
        # in, with zeros after them, and what adds them to what is there.
        self._known: list[tuple[list[bool], Callable[[Any], Any], list[torch.Tensor], Callable[[Any], Any]]] = []
        if all([place.whole and member.split is None for place, member in self._pairs()]):
            for alike, zeros in ((True, self._zeros), (False, [])):
                mine = [place.alike[0] is alike for place in self._places]
                targets = [place.targets[0] for place in compress(self._places, mine)]
                if targets or zeros:
                    copies = copies_to([*targets, *self._padding[: len(zeros)]])
                    self._known.append((mine, copies, zeros, partial(add_all, targets)))
        self.free()

    def _pairs(self) -> list[tuple[_Places, Member]]:
        return list(zip(self._places, self.bucket.members, strict=True))

    def fill(self, grads: list[Any], first: bool) -> bool:
        """Copy autograd's gradients in, or add them to what is there.

        Args:
            grads: by member, None where there is none.
            first: whether nothing is there: padding, and what has no gradient, becomes zero.

        Returns:
            Whether every member has one.

        Raises:
            PhaseError: a gradient is sparse.
        """
        if self._known and set(map(getattr, grads, _LAYOUT, NONES)) == _STRIDED:
            if first and self._strewn:
                zero_all(self._padding)
            for mine, copy, zeros, add in self._known:
                if first:
                    copy([*compress(grads, mine), *zeros])
                else:
                    add([*compress(grads, mine)])
            return True
        everyone = all(map(is_not, grads, NONES))
        targets, sources, strided, strided_sources = self._sorted(grads)
        if not first:
            add_all(targets, sources)
            add_all(strided, strided_sources)
            return everyone
        if self._strewn or not everyone:
            zero_all(self._padding if everyone else [self.tensor])
        else:
            targets += self._padding
            sources += self._zeros
        copy_all(targets, sources)
        copy_all(strided, strided_sources)
        return everyone

    def _sorted(self, grads: Sequence[torch.Tensor | None]) -> tuple[list[Any], ...]:
        """Targets and sources of the same form, which one kernel copies, and others."""
        pairs: tuple[list[Any], ...] = ([], [], [], [])
        for grad, (place, member) in zip(grads, self._pairs(), strict=True):
            if grad is None:
                continue
            if member.split is not None:
                grad = member.split.local_gradient(grad, self.tensor.dtype)
            if grad.layout is not torch.strided:
                raise _not_dense(member)
            parts = [grad] if place.whole else _cut(grad, member, place.pieces)
            for to, come, alike in zip(place.targets, parts, place.alike, strict=True):
                pairs[0 if alike else 2].append(to)
                pairs[1 if alike else 3].append(come)
        return pairs

    def magnitudes(self) -> torch.Tensor:
        """The largest absolute value in each place, NaN if there is one: [len(self.owners)], real, of this dtype."""
        places = [as_real(to) for place in self._places for to in place.targets if to.numel()]
        if not places:
            return torch.zeros(0, device=self.tensor.device)
        return torch.stack(torch._foreach_norm(places, math.inf))  # keeps NaN

    @property
    def owners(self) -> list[int]:
        """For each of `magnitudes`, the index of the member that it is of."""
        return [index for index, place in enumerate(self._places) for to in place.targets if to.numel()]

    def zero(self, members: Sequence[Member]) -> None:
        """Make what was collected for these members zero."""
        chosen = set(map(id, members))
        zero_all([to for place, member in self._pairs() if id(member) in chosen for to in place.targets])


class _Places:
    """Where one member's gradient goes.

    Attributes:
        whole: whether it goes in as one tensor of its own shape.
        targets: where to.
        pieces: what each target takes of it, if it is not whole.
        alike: for each target, whether a gradient with the parameter's strides, which autograd gives, has its form.
    """

    __slots__ = ("alike", "pieces", "targets", "whole")

    def __init__(self, member: Member, bucket: Bucket, tensor: torch.Tensor) -> None:
        slot, layout = member.slot, bucket.layout
        base = layout.world * layout.segments[slot.segment].shard_offset
        strides = layout.strides_in_segment(slot)
        self.whole = strides is not None
        self.pieces: tuple[Piece, ...] = () if strides is not None else layout.pieces(slot)
        if strides is not None:
            self.targets = [tensor.as_strided(slot.shape, strides, base + slot.offset)]
            forms = [torch.empty_strided(slot.shape, slot.stride, device="meta")]
        else:
            cut = self.pieces
            self.targets = [tensor.as_strided(p.sizes, p.gathered_strides, base + p.gathered_offset) for p in cut]
            forms = [torch.empty_strided(p.sizes, p.parameter_strides, device="meta") for p in cut]
        self.alike = list(map(same_form, self.targets, forms))


def _cut(grad: torch.Tensor, member: Member, pieces: Sequence[Piece]) -> list[torch.Tensor]:
    """The pieces of a whole gradient, as views; a copy first where its memory format differs from the parameter's."""
    slot = member.slot
    if grad.stride() != slot.stride:
        grad = torch.empty_strided(slot.shape, slot.stride, dtype=grad.dtype, device=grad.device).copy_(grad)
    at = grad.storage_offset()
    return [grad.as_strided(p.sizes, p.parameter_strides, at + p.parameter_offset) for p in pieces]


def _not_dense(member: Member) -> PhaseError:
    return PhaseError(
        "A parameter has a sparse gradient, which cannot be reduced into shards.",
        parameter=member.name,
        expected="a dense gradient",
        got="a sparse one",
        remedy="build the layer with sparse=False (nn.Embedding, nn.EmbeddingBag), or put the parameter in "
        "ignored_params and reduce its gradient yourself",
        code="P052",
    )


class PlannedReduction:
    """The reduction of a buffer into a slice over the shard axis.

    Args:
        comm: collectives.
        axis: the ranks.
        out: [shard_numel], the slice.
        buffer: its memory may come and go.
        mean: whether the collective averages.

    Attributes:
        start: starts the collectives.
        scratch: bytes that they allocate until they are waited for.
        rules, scaling: how it ran last, and what that was chosen from.
    """

    __slots__ = ("buffer", "comm", "mean", "out", "rules", "scaling", "scratch", "start")

    def __init__(self, comm: Comm, axis: Axis, out: torch.Tensor, buffer: ReduceBuffer, mean: bool) -> None:
        self.comm, self.out, self.buffer, self.mean = comm, out, buffer, mean
        self.rules: Rules | None = None
        self.scaling = MEAN
        segments, parts = buffer.segments, [out]
        if len(segments) > 1:
            cuts = buffer.bucket.layout.segments
            parts = [out.narrow(0, cut.shard_offset, cut.slice_numel) for cut in cuts]
        self.start = reduction_of(comm, axis, parts, segments, mean)
        self.scratch = sum([comm.scratch_bytes(axis, segment) for segment in segments])
