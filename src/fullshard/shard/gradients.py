"""A bucket's gradients: from autograd's `.grad` into one reduction buffer, through one reduction, into `.grad`.

State of the whole, which moves in a circle:

    none -> pending     gradients of a backward were copied (or, without gradient sync, added) to the buffer
    pending -> reducing the reduction was issued; the buffer belongs to it
    reducing -> none    the reduced slice became, or was added to, the sharded parameters' `.grad`

The buffer is rank-major, as the reduction needs it: the world's slices one after the other, segment by segment.
"""

from __future__ import annotations

from enum import Enum

import torch

from ..comm import Comm, Pending
from ..errors import PhaseError
from ..layout import Piece
from ..torch_private.foreach import add_all, copy_all, zero_all
from .bucket import Bucket
from .gradient_set import (
    GradientSet,
    OptimizerView,
    Scaling,
    adopt_gradient,
    allow_any_dtype,
    cut_gradient,
    warn_of_zero_gradients,
)
from .member import Member
from .offload import copy_home
from .parameter import read_grad, write_grad
from .scratch import Scratch


class GradState(Enum):
    """See the module's docstring."""

    NONE = "none"
    PENDING = "pending"
    REDUCING = "reducing"


class Gradients:
    """See the module's docstring.

    Ownership: `buffer` is storage on demand, allocated at the first gradient of a backward, given back when the
    reduction is done. The reduced slice belongs to a `GradientSet`.
    """

    def __init__(self, bucket: Bucket, reduce_dtype: torch.dtype | None) -> None:
        self.bucket = bucket
        self.own_reduce_dtype = reduce_dtype
        self.state = GradState.NONE
        self.buffer: Scratch | None = None  # [world * shard_numel], reduce dtype
        self.set: GradientSet | None = None
        self.views: list[OptimizerView] = []
        self._told_of_zeros = False
        self.partial: torch.Tensor | None = None  # [shard_numel], reduced on the shard axis only (hybrid)
        self.fill_unused = False
        self.keeps_compute_dtype = False
        self._slice: torch.Tensor | None = None  # [shard_numel], reduce dtype, while reducing
        self._pending: list[Pending] = []
        self.scaling = Scaling(True)

    @property
    def reduce_dtype(self) -> torch.dtype:
        return self.own_reduce_dtype or self.bucket.compute_dtype

    @property
    def grad_dtype(self) -> torch.dtype:
        """Of `.grad`: the parameter's, or the one that it is computed in if that is kept."""
        return self.bucket.compute_dtype if self.keeps_compute_dtype else self.bucket.storage_dtype

    @property
    def buffer_bytes(self) -> int:
        return self.bucket.layout.gathered_numel * self.reduce_dtype.itemsize

    @property
    def live_bytes(self) -> int:
        """Bytes of the buffer if it is allocated now."""
        return self.buffer.nbytes if self.buffer is not None and self.buffer.allocated else 0

    def waiting(self) -> bool:
        """Whether autograd left gradients on the unsharded parameters that were not collected yet."""
        for member in self.bucket.members:
            unsharded = member.unsharded
            if unsharded is not None and unsharded.grad is not None:
                return True
        return False

    # Collect.

    def collect(self) -> None:
        """Move autograd's gradients into the buffer, added to what is there from earlier backwards."""
        first = self.state is GradState.NONE
        if self.state is GradState.REDUCING:
            raise PhaseError("gradients were collected while their bucket is being reduced; this is a bug in Fullshard")
        if self.buffer is None:
            self._make_buffer()
        assert self.buffer is not None
        if first:
            self.buffer.allocate()
        members = self.bucket.members
        grads = [member.unsharded.grad if member.unsharded is not None else None for member in members]
        if parallel := self.bucket.parallel:
            grads = [
                parallel[m.slot.name].local_gradient(g) if g is not None and m.slot.name in parallel else g
                for m, g in zip(members, grads, strict=True)
            ]
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        missing = False
        for member, grad, whole, target, pieces in zip(members, grads, *self._plan, strict=True):
            if grad is None:
                missing = True
                continue
            member.unsharded.grad = None
            member.got_grad = True
            if whole:
                targets.append(target[0])
                sources.append(grad)
            else:
                targets += target
                sources += cut_gradient(grad, member, pieces)
        if first:
            if missing or self._padded_segments:
                zero_all([self.buffer.tensor] if missing else self._padding)
            else:
                targets += self._padding
                sources += self._zeros
            copy_all(targets, sources)
        else:
            add_all(targets, sources)
        self.state = GradState.PENDING

    def _make_buffer(self) -> None:
        """Make the buffer and the places in it where each member's gradient goes. Once."""
        layout = self.bucket.layout
        self.buffer = Scratch(layout.gathered_numel, self.reduce_dtype, self.bucket.device)
        tensor = self.buffer.tensor
        self._segments = [
            tensor.narrow(0, layout.world * s.shard_offset, layout.world * s.slice_numel) for s in layout.segments
        ]
        self._padding = [tensor.narrow(0, start, length) for start, length in layout.padding]
        self._padded_segments = layout.kind == "rows" and bool(self._padding)  # named whole: zeroed before the copies
        self._zeros = [] if self._padded_segments else [torch.zeros_like(p) for p in self._padding]
        # Per member: whether its gradient goes in as one tensor of its own shape; where to; the pieces if not.
        plan: list[tuple[bool, list[torch.Tensor], tuple[Piece, ...]]] = []
        for member in self.bucket.members:
            slot, segment = member.slot, layout.segments[member.slot.segment]
            base = layout.world * segment.shard_offset
            if layout.kind == "flat" or segment.full_offset is not None:
                plan.append((True, [tensor.as_strided(slot.shape, slot.stride, base + slot.offset)], ()))
            else:
                pieces = layout.pieces(slot)
                if (strides := layout.strides_in_segment(slot)) is not None:
                    plan.append((True, [tensor.as_strided(slot.shape, strides, base + slot.offset)], ()))
                    continue
                cut = [tensor.as_strided(p.sizes, p.gathered_strides, base + p.gathered_offset) for p in pieces]
                plan.append((False, cut, pieces))
        self._plan = list(zip(*plan, strict=True))

    # Reduce.

    def issue_reduce(self, comm: Comm, scaling: Scaling) -> int:
        """Start the reduction of the buffer over the shard axis.

        Returns:
            Bytes that are allocated until it is finished, besides the buffer and `.grad`.
        """
        assert self.buffer is not None and self.state is GradState.PENDING
        bucket, layout, axis = self.bucket, self.bucket.layout, self.bucket.axes.shard
        self.state, self.scaling = GradState.REDUCING, scaling
        self._fresh = self._all_none() and self.partial is None
        direct = self._fresh and self.reduce_dtype == self.grad_dtype and bucket.home is None
        scratch = 0
        if direct:
            self._slice = self._writable_set().flat
        else:
            self._slice = torch.empty(layout.shard_numel, dtype=self.reduce_dtype, device=bucket.device)
            scratch = self._slice.numel() * self._slice.element_size()
        if scaling.before != 1.0:
            self.buffer.tensor.mul_(scaling.before)
        for segment, buffer in zip(layout.segments, self._segments, strict=True):
            whole = len(self._segments) == 1
            out = self._slice if whole else self._slice.narrow(0, segment.shard_offset, segment.slice_numel)
            self._pending.append(comm.reduce(axis, out, buffer, scaling.mean))
            scratch += comm.scratch_bytes(axis, buffer)
        return scratch

    def is_completed(self) -> bool:
        """Whether the reduction over the shard axis is done."""
        return all(pending.is_completed() for pending in self._pending)

    def finish_shard_axis(self) -> torch.Tensor:
        """Wait for the reduction over the shard axis and give the buffer back; returns the slice."""
        for pending in self._pending:
            pending.wait()
        self._pending = []
        assert self.buffer is not None and self._slice is not None
        self.buffer.free()
        return self._slice

    def keep_partial(self) -> None:
        """Set the slice aside, not yet reduced over the replicate axis, to be added to the next one."""
        assert self._slice is not None
        reduced = self._slice.clone() if self.set is not None and self._slice is self.set.flat else self._slice
        self.partial = reduced if self.partial is None else self.partial.add_(reduced)
        self._reset()

    def add_partial(self) -> None:
        """Add what `keep_partial` set aside to the slice."""
        if self.partial is not None:
            assert self._slice is not None
            self._slice.add_(self.partial)
            self.partial = None

    def deliver(self) -> list[Member]:
        """Make the reduced slice the sharded parameters' `.grad`, or add it to what is there.

        Returns:
            The members whose `.grad` was set or added to.
        """
        assert self._slice is not None
        if self.scaling.after != 1.0:
            self._slice.mul_(self.scaling.after)
        given = self._deliver_fresh() if self._fresh or self._all_none() else self._deliver_added()
        self._reset(keep_got=False)
        return given

    def _reset(self, keep_got: bool = True) -> None:
        self._slice = None
        self.state = GradState.NONE
        if not keep_got:
            for member in self.bucket.members:
                member.got_grad = False

    def discard(self) -> None:
        """Drop whatever is in the buffer or in flight (after an exception)."""
        for pending in self._pending:
            pending.wait()
        self._pending = []
        if self.buffer is not None:
            self.buffer.free()
        for member in self.bucket.members:
            if member.unsharded is not None:
                member.unsharded.grad = None
        self.partial = None
        self._reset(keep_got=False)

    # Deliver.

    def _deliver_fresh(self) -> list[Member]:
        """No `.grad` is there: the set's parts become it."""
        assert self._slice is not None
        target = self.set
        if target is None or target.flat is not self._slice:
            target = self._writable_set()
            copy_home(self.bucket.home, target.flat, self._slice)
        given, empty = [], self.bucket.gives_empty_gradients
        for member, part in zip(self.bucket.members, target.parts, strict=True):
            if not empty and not part.numel():
                continue
            if member.got_grad or (member.sharded.requires_grad and self._used_elsewhere(member, target.flat)):
                write_grad(member.sharded, part)
                given.append(member)
        self._show_views(target)
        if self.views and len(given) < len(target.parts) and not self._told_of_zeros:
            self._told_of_zeros = warn_of_zero_gradients(self.bucket, self.views)
        return given

    def _deliver_added(self) -> list[Member]:
        """Some `.grad` is there: add to it. One addition if all are this set's, else a new set."""
        assert self._slice is not None
        members, current = self.bucket.members, self.set
        ours = current is not None and all(
            read_grad(m.sharded) is part or (read_grad(m.sharded) is None and not m.got_grad)
            for m, part in zip(members, current.parts, strict=True)
        )
        if ours and current is not None:
            current.flat.add_(self._slice if self.bucket.home is None else self._at_home(self.reduce_dtype))
            return [m for m in members if read_grad(m.sharded) is not None]
        old = [read_grad(m.sharded) for m in members]
        fresh = self.set = self._make_set(self._at_home(self.grad_dtype))
        given, empty = [], self.bucket.gives_empty_gradients
        for member, part, grad in zip(members, fresh.parts, old, strict=True):
            if not empty and not part.numel():
                continue
            if grad is not None:
                part.add_(grad)
            if grad is not None or member.got_grad or self._used_elsewhere(member, fresh.flat):
                write_grad(member.sharded, part)
                given.append(member)
        self._show_views(fresh)
        return given

    def _at_home(self, dtype: torch.dtype) -> torch.Tensor:
        """A copy of the slice where gradients live, complete."""
        assert self._slice is not None
        home = self.bucket.home
        if home is None:
            return self._slice.to(dtype, copy=True)
        made = self.bucket.new_slice(dtype)
        copy_home(home, made, self._slice)
        home.settle()
        return made

    def _show_views(self, current: GradientSet) -> None:
        """Give the optimizer views the gradients that their parameters have."""
        for view, grad in zip(self.views, current.views, strict=True):
            tensor = view.tensor
            if tensor is not None and any(read_grad(self.bucket.members[i].sharded) is not None for i in view.members):
                tensor.grad = grad

    def _used_elsewhere(self, member: Member, flat: torch.Tensor) -> bool:
        """Whether other ranks had a gradient for a parameter that this rank did not use."""
        if self.fill_unused:
            return True
        if self.bucket.home is not None:
            self.bucket.home.settle()
        view = self.bucket.view_of(flat, member.slot)
        return bool(view.any()) if view.numel() else False

    def _all_none(self) -> bool:
        """Whether no `.grad` is there to be added to, on parameters or optimizer views."""
        for view in self.views:
            self._agree(view)
        for member in self.bucket.members:  # noqa: SIM110 - a generator costs twice as much, six times a step
            if read_grad(member.sharded) is not None:
                return False
        return True

    def _agree(self, view: OptimizerView) -> None:
        """An optimizer view and its parameters share one gradient: whoever set it to None set it for both."""
        tensor = view.tensor
        if tensor is None:
            return
        members = [self.bucket.members[i] for i in view.members]
        if tensor.grad is None:
            for member in members:
                write_grad(member.sharded, None)
        elif not view.alone and all(read_grad(member.sharded) is None for member in members):
            tensor.grad = None
        elif self.set is None or all(tensor.grad is not grad for grad in self.set.views):  # the user's own
            adopt_gradient(self.bucket, view, tensor.grad)

    def _writable_set(self) -> GradientSet:
        """The kept set if nobody else holds it, else a new one. Its `flat` is allocated."""
        current = self.set
        shape_fits = current is not None and len(current.views) == len(self.views)
        if current is not None and shape_fits and not current.storage.nbytes():
            current.storage.resize_(current.nbytes)  # `release` found that nobody else holds it
        elif current is None or not shape_fits or not current.reusable():
            self.set = self._make_set(self.bucket.new_slice(self.grad_dtype))
        assert self.set is not None
        return self.set

    def _make_set(self, flat: torch.Tensor) -> GradientSet:
        bucket = self.bucket
        parts = [bucket.tensor_of(bucket.view_of(flat, m.slot), m.slot) for m in bucket.members]
        views = [flat.narrow(0, view.offset, view.length) for view in self.views]
        if self.keeps_compute_dtype:
            allow_any_dtype(bucket, self.views)
        return GradientSet(flat, parts, views)

    def release(self) -> None:
        """Give back the memory of gradients that the user set to None, if nobody else holds them."""
        current = self.set
        if (
            current is not None
            and self.state is not GradState.REDUCING
            and current.storage.nbytes()
            and self._all_none()
        ):
            if self.bucket.home is not None:  # the host's memory is kept
                return
            if current.reusable():
                current.storage.resize_(0)
            else:
                self.set = None

    @property
    def held_bytes(self) -> int:
        """Bytes of reduced gradients that are alive."""
        return self.set.storage.nbytes() if self.set is not None else 0

    def forget(self) -> None:
        """After the shard moved: buffers and sets of the old device or dtype are made anew when needed."""
        self.buffer = self.set = None
        self.state = GradState.NONE
        for view in self.views:
            if (tensor := view.tensor) is not None:
                tensor.data = self.bucket.shard.narrow(0, view.offset, view.length)
