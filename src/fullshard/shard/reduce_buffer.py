"""The buffer into which a bucket's gradients are copied for a reduction: rank-major, as the reduction needs it.

The world's slices lie one after the other, segment by segment. Everything that depends only on shapes is planned once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter, call, is_not
from typing import Any

import torch

from ..comm import Comm, Pending, Residuals, reduction_of
from ..containers import NONES, drain
from ..dtypes import as_real
from ..forms import Member, Scratch
from ..layout import StridedCopy, columns_of
from ..torch_private.foreach import add_all, columns_in, copies_to, copy_all, same_form, zero_all, zeroes
from .bucket import Bucket
from .messages import not_dense
from .packed_reduction import PackedAllReduce, PackedReduction
from .scaling import MEAN, ReduceSettings

_FORM, _STRIDED = attrgetter("layout", "dtype"), torch.strided
_MOST_ZEROS = 2**16
"""Bytes of padding up to which zeros are copied along with gradients. They are kept; more is zeroed by itself."""


class ReduceBuffer(Scratch):
    """The buffer [world * shard_numel], memory on demand, and the places of members' gradients in it.

    Ownership: allocated at the first gradient of a backward, released when the reduction is done.

    Args:
        bucket: the bucket of the gradients.
        dtype: dtype of the reduction.

    Attributes:
        segments: for each segment of the layout, its part of the buffer [world * slice_numel].
        sent_bytes: of all ranks' slices together, as reductions send them.
    """

    def __init__(self, bucket: Bucket, dtype: torch.dtype) -> None:
        layout = bucket.layout
        super().__init__(layout.gathered_numel, dtype, bucket.device)
        self.bucket, self.sent_bytes, tensor = bucket, self.nbytes, self.tensor
        self.segments = [
            tensor.narrow(0, layout.world * s.shard_offset, layout.world * s.slice_numel) for s in layout.segments
        ]
        self._padding = [tensor.narrow(0, start, length) for start, length in layout.padding]
        self._scattered = layout.padding_is_scattered  # `padding` then lists whole segments, zeroed before the copies
        self._places = [_Places(member, bucket, tensor) for member in bucket.members]
        # For when all members have a gradient, each in one piece. `_copies`: groups of member indices, the call that
        # copies a group in, and the zeros it copies after them. `_adds`: the same for adding. `_zeroes`: a call that
        # zeroes the padding that no copy writes, if there is any.
        self._copies: list[tuple[list[int], Callable[[Any], Any], _Zeros]] = []
        self._adds: list[tuple[list[int], Callable[[Any], Any]]] = []
        self._zeroes: list[Callable[[], object]] = []
        if all([member.split is None for member in bucket.members]):
            self._plan_fill()
        self.free()

    def _plan_fill(self) -> None:
        layout, places, device = self.bucket.layout, self._places, self.tensor.device
        columns, gaps = columns_of(layout), []
        rest = {i for i, place in enumerate(places) if place.targets}.difference(*[group.slots for group in columns])
        if not all([places[i].whole for i in rest]):
            return
        for group in columns:
            padding = [layout.world * width for width in group.widths[len(group.slots) :]]
            matrix = self.segments[group.segment].view(layout.world, -1)
            self._copies.append((list(group.slots), columns_in(matrix), _Zeros(padding, device)))
        adds = all([place.whole for place in places if place.targets])
        for alike in (True, False):
            indices = [i for i, place in enumerate(places) if place.targets and place.alike[0] is alike]
            if adds and indices:
                self._adds.append((indices, partial(add_all, [places[i].targets[0] for i in indices])))
            indices = [i for i in indices if i in rest]
            behind = self._padding if alike and not self._scattered else []
            if sum([padding.nbytes for padding in behind]) > _MOST_ZEROS:
                gaps, behind = behind, []
            if indices or behind:
                targets = [places[i].targets[0] for i in indices]
                zeros = _Zeros([padding.numel() for padding in behind], device)
                self._copies.append((indices, copies_to([*targets, *behind]), zeros))
        if self._scattered:
            written = {layout.world * layout.segments[group.segment].shard_offset for group in columns}
            gaps = [gap for gap in self._padding if gap.storage_offset() not in written]
        self._zeroes = [zeroes(gaps)] if gaps else []

    def fill(self, grads: list[Any], first: bool) -> bool:
        """Copy autograd's gradients in, or add them to those already collected.

        Args:
            grads: by member, None if it has no gradient.
            first: whether nothing was collected yet: padding, and members without a gradient, become zero.

        Returns:
            Whether every member has a gradient.

        Raises:
            PhaseError: a gradient is sparse.
        """
        everyone = all(map(is_not, grads, NONES))
        if everyone and (self._copies if first else self._adds):
            forms = set(map(_FORM, grads))
            layout, dtype = forms.pop()
            if layout is _STRIDED and not forms:
                if not first:
                    for indices, add in self._adds:
                        add([*map(grads.__getitem__, indices)])
                    return True
                if self._zeroes:
                    drain(map(call, self._zeroes))
                for indices, copy, zeros in self._copies:
                    copy([*map(grads.__getitem__, indices), *zeros[dtype]])
                return True
        targets, sources, strided, strided_sources = self._sorted(grads)
        if not first:
            add_all(targets, sources)
            add_all(strided, strided_sources)
            return everyone
        zero_all(self._padding if everyone else [self.tensor])
        copy_all(targets, sources)
        copy_all(strided, strided_sources)
        return everyone

    def _sorted(self, grads: Sequence[torch.Tensor | None]) -> tuple[list[Any], ...]:
        """Return targets and sources of the same form, which one kernel copies, then the other targets and sources."""
        pairs: tuple[list[Any], ...] = ([], [], [], [])
        for grad, place in zip(grads, self._places, strict=True):
            if grad is None:
                continue
            member = place.member
            if member.split is not None:
                grad = member.split.local_gradient(grad, self.tensor.dtype)
            if grad.layout is not _STRIDED:
                raise not_dense(member.name)
            parts = [grad] if place.whole else place.cut(grad)
            for target, source, alike in zip(place.targets, parts, place.alike, strict=True):
                pairs[0 if alike else 2].append(target)
                pairs[1 if alike else 3].append(source)
        return pairs

    def magnitudes(self) -> torch.Tensor:
        """Return the largest absolute value in each place, NaN if it has one: [len(self.owners)], real, this dtype."""
        places = [as_real(to) for place in self._places for to in place.targets if to.numel()]
        if not places:
            return torch.zeros(0, device=self.tensor.device)
        return torch.stack(torch._foreach_norm(places, math.inf))  # keeps NaN

    @property
    def owners(self) -> list[int]:
        """For each of `magnitudes`, the index of its member."""
        return [index for index, place in enumerate(self._places) for to in place.targets if to.numel()]

    def zero(self, members: Sequence[Member]) -> None:
        """Set the gradients collected for these members to zero."""
        chosen = set(map(id, members))
        zero_all([to for place in self._places if id(place.member) in chosen for to in place.targets])


class _Zeros(dict[torch.dtype, list[torch.Tensor]]):
    """Zeros of these lengths for padding, by dtype: one kernel copies many tensors only if all have the same dtype."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self._lengths, self._device = lengths, device

    def __missing__(self, dtype: torch.dtype) -> list[torch.Tensor]:
        zeros = self[dtype] = [torch.zeros(numel, dtype=dtype, device=self._device) for numel in self._lengths]
        return zeros


class _Places:
    """The place of one member's gradient in the buffer.

    Attributes:
        whole: whether it goes in as one tensor of its own shape.
        targets: views of the buffer.
        alike: for each target, whether a gradient with the parameter's strides, autograd's default, has the same form.
    """

    def __init__(self, member: Member, bucket: Bucket, tensor: torch.Tensor) -> None:
        slot, layout = member.slot, bucket.layout
        base = layout.world * layout.segments[slot.segment].shard_offset
        strides = layout.strides_in_segment(slot)
        self.member, self.whole = member, strides is not None
        whole = () if strides is None else (StridedCopy(slot.shape, slot.stride, 0, strides, slot.offset),)
        self._pieces = whole or layout.copies_of(slot)
        self.targets = [tensor.as_strided(p.sizes, p.gathered_strides, base + p.gathered_offset) for p in self._pieces]
        forms = [torch.empty_strided(p.sizes, p.parameter_strides, device="meta") for p in self._pieces]
        self.alike = list(map(same_form, self.targets, forms))

    def cut(self, grad: torch.Tensor) -> list[torch.Tensor]:
        """Return views of the pieces of a gradient; copied first if its memory format is not the parameter's."""
        slot = self.member.slot
        if grad.stride() != slot.stride:
            grad = torch.empty_strided(slot.shape, slot.stride, dtype=grad.dtype, device=grad.device).copy_(grad)
        at = grad.storage_offset()
        return [grad.as_strided(p.sizes, p.parameter_strides, at + p.parameter_offset) for p in self._pieces]


class PlannedReduction:
    """The reduction of a buffer into a slice over the shard axis, and of the slice between replicas.

    Args:
        comm: collectives.
        out: [shard_numel], the slice.
        buffer: the source; its memory may be released and allocated again.
        mean: whether the collectives average.
        residuals: what compressed reductions of the bucket keep from step to step.

    Attributes:
        start: starts the collectives over the shard axis.
        replicate: starts the all-reduce of the slice over the replicate axis, if there is one.
        replicated_bytes: of the slice, as `replicate` sends it.
        received: bytes that the collectives of `start` allocate until they are waited for.
        between: the same of `replicate`.
        scratch: all bytes allocated until then besides the buffer and `between`.
        rules, scaling: the settings of its last run, and the scaling chosen from them.
    """

    def __init__(self, comm: Comm, out: torch.Tensor, buffer: ReduceBuffer, mean: bool, residuals: Residuals) -> None:
        self.comm, self.out, self.buffer, self.mean = comm, out, buffer, mean
        self.rules: ReduceSettings | None = None
        self.scaling = MEAN
        segments, parts = buffer.segments, [out]
        if len(segments) > 1:
            cuts = buffer.bucket.layout.segments
            parts = [out.narrow(0, cut.shard_offset, cut.slice_numel) for cut in cuts]
        bucket = buffer.bucket
        axis, between = bucket.axes.shard, bucket.axes.replicate
        fed_back = residuals if bucket.error_feedback else None
        self.replicated_bytes = out.nbytes
        if bucket.scatter_dtype is None:
            # Over one rank the sum is the average, and fast on every backend.
            self.start = reduction_of(comm, axis, parts, segments, mean and axis.size > 1)
            self.received = sum([comm.scratch_bytes(axis, segment) for segment in segments])
        else:
            packed = PackedReduction(comm, axis, parts, segments, mean, bucket.scatter_dtype, fed_back)
            self.start, buffer.sent_bytes, self.received = packed.start, packed.sent_bytes, packed.nbytes
        self.scratch, self.between = self.received, 0
        self.replicate: Callable[[], Pending] | None = None
        if bucket.all_reduce_dtype is not None and between is not None:
            packed_slice = PackedAllReduce(comm, between, out, mean, bucket.all_reduce_dtype, fed_back)
            self.replicate, self.between = packed_slice.start, packed_slice.nbytes
            self.replicated_bytes = packed_slice.sent_bytes
        elif between is not None:
            mean = mean and between.size > 1
            plan = getattr(comm, "plan_all_reduce", None)
            self.replicate = (
                partial(comm.all_reduce, between, out, mean)
                if plan is None
                else plan(between, out, mean, *_matrices(bucket, out), residuals)
            )


def _matrices(bucket: Bucket, out: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return views of a slice [shard_numel]: matrices and others, as `GradientSlice` has them."""
    matrices, others = [], []
    for member in bucket.members:
        part, slot, head, rows, columns = member.part, member.slot, 0, 0, 1
        is_run = len(part.shape) == 1
        shape, strides = (slot.shape, slot.stride) if is_run else (part.shape, part.stride)
        if len(slot.shape) > 1 and part.numel:
            columns = max([stride for size, stride in zip(shape, strides, strict=True) if size > 1], default=1)
            head = min(-part.start % columns, part.numel) if is_run else 0
            rows = (part.numel - head) // columns if columns > 1 else 0
        cut = head + rows * columns
        run = out.narrow(0, part.offset, part.numel)
        if rows:
            matrices.append(run[head:cut].view(rows, columns))
        others += [piece for piece in (run[:head], run[cut:]) if piece.numel()]
    return matrices, others
