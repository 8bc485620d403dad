"""A bucket's gradients: from autograd's `.grad` into one reduction buffer, through one reduction, into `.grad`.

The state moves in a cycle:

    none -> pending     gradients of a backward were copied (or, without gradient sync, added) to the buffer
    pending -> reducing the reduction was issued; the buffer belongs to it
    reducing -> none    the reduced slice became, or was added to, the sharded parameters' `.grad`

The buffer is rank-major, as the reduction needs it: the world's slices one after the other, segment by segment. A
parameter that this rank did not use takes part with zeros; all ranks together decide whether it gets a `.grad`, at the
end of a backward (`agreement/use.py`; here `undecided` and `decide`).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from itertools import repeat
from operator import attrgetter, is_, is_not, or_
from typing import Any

import torch

from ..comm import ONE_STREAM, Comm, Pending, Residuals
from ..containers import NONES, drain
from ..events import Ledger
from ..forms import Member
from ..torch_private.local_tensor import read_grad, write_grad
from ..torch_private.profiler import in_range, recording
from .bucket import Bucket
from .delivery import Delivery
from .gradient_set import free_all
from .hooks import sees_gradients
from .messages import not_reduced_yet
from .packed_reduction import PackedAllReduce
from .reduce_buffer import PlannedReduction, ReduceBuffer
from .scaling import MEAN, ReduceSettings, TokenCount, scaling_of


class GradState(Enum):
    """See the module's docstring."""

    NONE = "none"
    PENDING = "pending"
    REDUCING = "reducing"


NONE, PENDING, REDUCING = GradState


class Gradients:
    """See the module's docstring.

    Ownership: `buffer` is memory on demand, allocated at the first gradient of a backward, released when the reduction
    is done. `residuals` are allocated at the first reduction and stay. The reduced slice belongs to `delivery`.

    Args:
        bucket: the bucket of the gradients.

    Attributes:
        residuals: what compressed reductions keep from step to step.
        reduce_dtype: dtype of the buffer and the reduction; see `gradient_dtypes`.
        running: the reduction in flight.
    """

    def __init__(self, bucket: Bucket) -> None:
        self.bucket, self.reduce_dtype = bucket, bucket.storage_dtype
        self.delivery = Delivery(bucket)
        self.state = NONE
        self.buffer: ReduceBuffer | None = None  # [world * shard_numel], reduce dtype
        self.partial: torch.Tensor | None = None  # [shard_numel], reduced on the shard axis only (hybrid)
        self.running: Any = None  # `PlannedReduction`; None: no reduction is in flight
        self.pending: Pending | None = None  # its collective, then its all-reduce over the replicate axis
        self.own: torch.Tensor | None = None  # `ReduceBuffer.magnitudes` of this rank's share of `.grad`, if requested
        self.residuals = Residuals()
        self._version = -1  # version of the shown gradients at their last delivery

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffer when it is allocated."""
        return self.bucket.layout.gathered_numel * self.reduce_dtype.itemsize

    @property
    def live_bytes(self) -> int:
        """Bytes of the buffer, if it is allocated, and of the scratch memory of a reduction in flight."""
        nbytes, running = self.buffer.storage.nbytes() if self.buffer is not None else 0, self.running
        if running is None:
            return nbytes
        between = running.between if not nbytes and self.pending is not None else 0
        reducing: int = nbytes + running.scratch + between
        return reducing

    @property
    def accumulates(self) -> bool:
        """Whether there are accumulated gradients that no reduction has taken yet."""
        return self.state is PENDING or (self.partial is not None and self.state is not REDUCING)

    def owed(self) -> bool:
        """Whether gradients of earlier backwards wait to be reduced, and the user has not given them up."""
        if self.state is not PENDING and self.partial is None:
            return False
        return not self.delivery.all_given_up()

    def waiting(self) -> bool:
        """Whether autograd left gradients on the unsharded parameters that are not collected yet."""
        unsharded = self.bucket.unsharded or self.bucket.list_unsharded()
        return not all(map(is_, map(read_grad, unsharded), NONES))

    # Collect.

    def collect(self, ledger: Ledger) -> None:
        """Move autograd's gradients into the buffer, adding them to those of earlier backwards.

        Parameters without a gradient contribute zeros, so that the bucket can take part in a reduction that other ranks
        need. Changes nothing if memory runs out.

        Args:
            ledger: the account of allocated bytes.
        """
        bucket, delivery, buffer = self.bucket, self.delivery, self.buffer
        if delivery.kept and (given_up := delivery.given_up()):
            live = self.live_bytes
            self.give_up(given_up)
            ledger.reduce(self.live_bytes - live)
        first = self.state is NONE
        assert first or self.state is PENDING, "gradients were collected while their bucket is being reduced"
        if buffer is None or buffer.tensor.dtype != self.reduce_dtype:
            buffer = self.buffer = ReduceBuffer(bucket, self.reduce_dtype)
        bucket.turns.take()
        unsharded = bucket.unsharded or bucket.list_unsharded()
        grads = [*map(read_grad, unsharded)] or [None] * len(bucket.members)
        try:
            if first:
                buffer.take()
            everyone = buffer.fill(grads, first)
        except BaseException:
            if first:
                buffer.free()
            raise
        drain(map(write_grad, unsharded, NONES))
        delivery.got = delivery.everyone if everyone else [*map(or_, delivery.got, map(is_not, grads, NONES))]
        bucket.turns.give()
        if first:
            self.state = PENDING
            ledger.reduce(buffer.nbytes)

    # Reduce.

    def issue_reduce(self, comm: Comm, rules: ReduceSettings, total: TokenCount | None, unit: str) -> None:
        """Start the reduction of the buffer over the shard axis.

        Args:
            comm: collectives.
            rules: how to reduce.
            total: the token count that divides sums; None: no division.
            unit: the unit's name.
        """
        bucket, delivery, buffer = self.bucket, self.delivery, self.buffer
        assert buffer
        if delivery.kept and (given_up := delivery.given_up()):
            self.give_up(given_up)
        bucket.turns.take()
        delivery.hooked = sees_gradients(
            delivery.tensors() if delivery.views else bucket.sharded or bucket.list_sharded()
        )
        if rules.check_nonfinite:
            self._note_own(buffer)
        current: Any = delivery.set
        planned: PlannedReduction | None = None if current is None else current.reduction
        if (
            planned is None
            or planned.rules is not rules
            or planned.comm is not comm
            or planned.buffer is not buffer
            or total is not None
            or self.partial is not None
            or current.storage.nbytes()  # 0 once released: nothing else holds or shows it
        ):
            planned = self._plan(comm, rules, total, buffer)
        else:
            current.take()
        scaling = planned.scaling
        if scaling is not MEAN:
            if scaling.before != 1.0:
                buffer.tensor.mul_(scaling.before)
            if scaling.divides_buffer is not None:
                buffer.tensor.div_(scaling.divides_buffer)
        self.pending = planned.start() if not recording() else in_range("reduce", unit, planned.start)
        self.state, self.running = REDUCING, planned

    def _note_own(self, buffer: ReduceBuffer) -> None:
        """Record the magnitudes of this rank's gradients in `own`: the larger ones, if added to earlier gradients."""
        magnitudes, fresh = buffer.magnitudes(), self.partial is None and self.delivery.all_none()
        adds = not fresh and self._version == self._shown_version()
        # The maximum keeps NaN.
        self.own = torch.maximum(self.own, magnitudes) if adds and self.own is not None else magnitudes

    def _plan(
        self, comm: Comm, rules: ReduceSettings, total: TokenCount | None, buffer: ReduceBuffer
    ) -> PlannedReduction:
        """Plan the reduction into the current slice if only the engine holds it, else into a new one."""
        bucket, delivery = self.bucket, self.delivery
        scaling = scaling_of(comm, bucket.axes.world, self.reduce_dtype, rules, total)
        mean = scaling.mean
        same = self.reduce_dtype == delivery.grad_dtype and bucket.home is None and self.partial is None
        if same and delivery.all_none():
            current = delivery.writable()
            planned = current.reduction
            if planned is None or (planned.comm, planned.buffer, planned.mean) != (comm, buffer, mean):
                planned = current.reduction = PlannedReduction(comm, current.flat, buffer, mean, self.residuals)
                current.settle()
        else:
            out = torch.empty(bucket.layout.shard_numel, dtype=self.reduce_dtype, device=bucket.device)
            planned = PlannedReduction(comm, out, buffer, mean, self.residuals)
            planned.scratch += out.nbytes
        planned.rules, planned.scaling = rules if total is None else None, scaling  # a total is of one step
        return planned

    def wait(self, unit: str) -> int:
        """Wait for the collective in flight, release the buffer if it still has memory, and return the bytes released.

        Args:
            unit: the unit's name.

        Returns:
            Those of the buffer, or those that the all-reduce over the replicate axis had allocated.
        """
        turns, buffer, pending = self.bucket.turns, self.buffer, self.pending
        assert buffer and pending
        nbytes = buffer.storage.nbytes()
        turns.take()
        self.pending = None
        if recording():
            in_range("wait for reduce" if nbytes else "wait for all_reduce", unit, pending.wait)
        else:
            pending.wait()
        buffer.free()
        turns.give()
        return nbytes or self.running.between

    def keep_partial(self) -> None:
        """Set the slice aside, not yet reduced over the replicate axis, to add it to the next one."""
        assert self.running is not None
        reduced, current = self.running.out, self.delivery.set
        if current is not None and reduced is current.flat:
            reduced = reduced.clone()
        self.partial = reduced if self.partial is None else self.partial.add_(reduced)
        self.running, self.state = None, NONE

    def replicate(self) -> int:
        """Start the all-reduce of the slice, plus any slice set aside by `keep_partial`, over the replicate axis.

        Returns:
            Bytes that it allocated.
        """
        running = self.running
        if self.partial is not None:
            running.out.add_(self.partial)
            self.partial = None
        self.pending = running.replicate()
        between: int = running.between
        return between

    def go_on(self) -> None:
        """Start the second collective of a packed all-reduce in flight, if there is one; waits for the first."""
        if isinstance(self.pending, PackedAllReduce):
            self.bucket.turns.take()
            self.pending.go_on()
            self.bucket.turns.give()

    def deliver(self, fill_unused: bool) -> list[torch.Tensor]:
        """Make the reduced slice the sharded parameters' `.grad`, or add it to the existing ones.

        Args:
            fill_unused: give parameters that no rank used a gradient of zeros.

        Returns:
            See `Delivery.deliver`.
        """
        turns, running = self.bucket.turns, self.running
        scaling, reduced = running.scaling, running.out
        turns.take()
        if scaling is not MEAN:
            if scaling.after != 1.0:
                reduced.mul_(scaling.after)
            if scaling.divides_slice is not None:
                reduced.div_(scaling.divides_slice)
        receivers = self.delivery.deliver(reduced, fill_unused)
        self.running, self.state = None, NONE
        if self.own is not None:
            self._version = self._shown_version()
        turns.give()
        return receivers

    def _shown_version(self) -> int:
        """Return a number that rises when users write to shown gradients: they may zero them instead of setting None.

        Always 0 if gradients are on the host, where they are written as they arrive.
        """
        current = self.delivery.set
        return current.version() if current is not None and self.bucket.home is None else 0

    # Giving up.

    def discard(self) -> None:
        """Drop all gradients: autograd's, those in the buffer, and those in flight (after an exception)."""
        for member in self.bucket.members:
            if member.unsharded is not None:
                member.unsharded.grad = None
        self.delivery.used = self.delivery.nobody  # uses in the backward that broke do not count
        self._drop()

    def _drop(self) -> None:
        self.bucket.turns.take()
        pending, self.pending = self.pending, None
        try:
            if pending is not None:
                pending.wait()
        finally:
            if self.buffer is not None:
                self.buffer.free()
            self.delivery.got = self.delivery.nobody
            self.delivery.undecided = []
            self.delivery.aside.clear()
            self.delivery.kept.clear()
            self.partial = self.running = None
            self.bucket.turns.give()
            self.state = NONE

    def give_up_parameters(self, parameters: set[int]) -> int:
        """Run `give_up` for these sharded parameters, or views over them, by id; return the bytes released."""
        bucket, live = self.bucket, self.live_bytes
        viewed = {i for view in self.delivery.views if id(view.tensor) in parameters for i in view.members}
        self.give_up([m for i, m in enumerate(bucket.members) if i in viewed or id(m.sharded) in parameters])
        return live - self.live_bytes

    def give_up(self, members: Sequence[Member]) -> None:
        """Discard undelivered gradients accumulated for these members; does nothing while they are being reduced."""
        if not self.accumulates:
            return
        if len(members) == len(self.bucket.members):
            self._drop()
            return
        self.bucket.turns.take()
        if self.state is PENDING and self.buffer is not None:
            self.buffer.zero(members)
        if self.partial is not None:
            for member in members:
                self.bucket.part(self.partial, member).zero_()
        self.delivery.got = [
            got and member not in members for got, member in zip(self.delivery.got, self.bucket.members, strict=True)
        ]

    def release(self) -> None:
        """Release the memory of gradients if nobody else holds it, except host memory. All `.grad` must be None."""
        bucket, current = self.bucket, self.delivery.set
        if current is None or self.state is REDUCING or bucket.home is not None:
            return
        bucket.turns.take()
        if current.reusable():
            current.storage.resize_(0)
        else:
            self.delivery.set = None
        bucket.turns.give()

    @property
    def held_bytes(self) -> int:
        """Bytes of reduced gradients that are alive."""
        return self.delivery.set.storage.nbytes() if self.delivery.set is not None else 0

    @property
    def residual_bytes(self) -> int:
        """Bytes that compressed reductions keep from step to step."""
        return sum([tensor.nbytes for tensor in self.residuals.values()])

    def forget(self) -> None:
        """Drop buffers and sets of the old device or dtype after the shard moved; they are recreated when needed."""
        self.discard()
        self.buffer = self.own = None
        self.residuals.clear()  # they belong to gradients at other values
        self.delivery.forget()


_SETS, _STATES, _HOMES = attrgetter("delivery.set"), attrgetter("state"), attrgetter("bucket.home")
_TURNS = attrgetter("bucket.turns")


def release_all(every: Sequence[Gradients]) -> None:
    """Run `release` on each. All `.grad` must be None."""
    sets: list[Any] = [*filter(None, map(_SETS, every))]  # frozen buckets have none
    alike = (
        all(map(is_, map(_STATES, every), repeat(NONE)))
        and all(map(is_, map(_HOMES, every), NONES))
        and all(map(is_, map(_TURNS, every), repeat(ONE_STREAM)))
    )
    if sets and not (alike and free_all(sets)):
        for gradients in every:
            gradients.release()


def has_gradients(every: Sequence[Gradients]) -> bool:
    """Whether gradients of a unit wait to be reduced, collected or still autograd's."""
    for gradients in every:  # noqa: SIM110 - a comprehension costs a call, in every backward
        if gradients.state is PENDING or gradients.waiting():
            return True
    return False


def has_gradient(member: Member) -> bool:
    """Whether the sharded parameter has a `.grad`."""
    return read_grad(member.sharded) is not None


def refuse_unreduced(unit: str, gradients: Sequence[Gradients], what: str, do: str) -> None:
    """Raise if a unit has gradients that were accumulated without sync, or are in flight.

    Args:
        unit: the unit's name.
        gradients: those of its buckets.
        what: the refused action, as a participle ("copied").
        do: the same, as an instruction ("copy the model").

    Raises:
        PhaseError: there are such gradients; names the parameters.
    """
    for of_bucket in gradients:
        if of_bucket.state is not NONE or of_bucket.partial is not None or of_bucket.waiting():
            bucket = of_bucket.bucket
            raise not_reduced_yet(unit, [member.name for member in bucket.members], bucket.axes.global_rank, what, do)
