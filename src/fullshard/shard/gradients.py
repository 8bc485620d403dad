"""A bucket's gradients: from autograd's `.grad` into one reduction buffer, through one reduction, into `.grad`.

State of the whole, which moves in a circle:

    none -> pending     gradients of a backward were copied (or, without gradient sync, added) to the buffer
    pending -> reducing the reduction was issued; the buffer belongs to it
    reducing -> none    the reduced slice became, or was added to, the sharded parameters' `.grad`

The buffer is rank-major, as the reduction needs it: the world's slices one after the other, segment by segment. A
parameter that this rank did not use takes part with zeros; whether it gets a `.grad` is for all ranks to say, which
`runtime.agreement` asks at the end of a backward (`undecided`, `decide`).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from itertools import repeat
from operator import attrgetter, is_, is_not, or_
from typing import Any

import torch

from ..comm import ONE_STREAM, Comm, Pending
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
from .reduce_buffer import PlannedReduction, ReduceBuffer
from .scaling import MEAN, ReduceSettings, scaling_of
from .tokens import TokenCount


class GradState(Enum):
    """See the module's docstring."""

    NONE = "none"
    PENDING = "pending"
    REDUCING = "reducing"


NONE, PENDING, REDUCING = GradState


class Gradients:
    """See the module's docstring.

    Ownership: `buffer` is memory on demand, allocated at the first gradient of a backward, given back when the
    reduction is done. The reduced slice belongs to `delivery`.

    Args:
        bucket: whose gradients these are.

    Attributes:
        reduce_dtype: of the buffer and the reduction; see `GradientDtypes`.
        running: the reduction in flight.
    """

    def __init__(self, bucket: Bucket) -> None:
        self.bucket, self.reduce_dtype = bucket, bucket.storage_dtype
        self.delivery = Delivery(bucket)
        self.state = NONE
        self.buffer: ReduceBuffer | None = None  # [world * shard_numel], reduce dtype
        self.partial: torch.Tensor | None = None  # [shard_numel], reduced on the shard axis only (hybrid)
        self.running: Any = None  # `PlannedReduction`; None: nothing is being reduced
        self.pending: Pending | None = None  # its collective, then the all-reduce over the replicate axis
        self.own: torch.Tensor | None = None  # `ReduceBuffer.magnitudes` of what is in `.grad`, if they are asked for
        self._version = -1  # of what is shown, when it was delivered last

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffer when it is allocated."""
        return self.bucket.layout.gathered_numel * self.reduce_dtype.itemsize

    @property
    def live_bytes(self) -> int:
        """Bytes of the buffer if it is allocated now, and what a reduction in flight holds besides."""
        held = self.buffer.storage.nbytes() if self.buffer is not None else 0
        return held + (self.running.scratch if self.running is not None else 0)

    @property
    def accumulates(self) -> bool:
        """Whether something was accumulated that no reduction has taken yet."""
        return self.state is PENDING or (self.partial is not None and self.state is not REDUCING)

    def owed(self) -> bool:
        """Whether gradients of earlier backwards wait to be reduced, and the user did not give them up."""
        if self.state is not PENDING and self.partial is None:
            return False
        return not self.delivery.all_given_up()

    def waiting(self) -> bool:
        """Whether autograd left gradients on the unsharded parameters that were not collected yet."""
        unsharded = self.bucket.unsharded or self.bucket.list_unsharded()
        return not all(map(is_, map(read_grad, unsharded), NONES))

    # Collect.

    def collect(self, ledger: Ledger) -> None:
        """Move autograd's gradients into the buffer, added to what is there from earlier backwards.

        Where there are none the buffer is zeros: the bucket takes part in a reduction that others need. If memory runs
        out nothing has changed.

        Args:
            ledger: told of what is allocated.
        """
        bucket, delivery, buffer = self.bucket, self.delivery, self.buffer
        if delivery.kept and (given_up := delivery.given_up()):
            live = self.live_bytes
            self.give_up(given_up)
            ledger.reducing -= live - self.live_bytes
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
            ledger.reducing += buffer.nbytes
            if ledger.gathered + ledger.reducing > ledger.peak:
                ledger.note()

    # Reduce.

    def issue_reduce(self, comm: Comm, rules: ReduceSettings, total: TokenCount | None, unit: str) -> None:
        """Start the reduction of the buffer over the shard axis.

        Args:
            comm: collectives.
            rules: how.
            total: what sums are divided by; None: nothing.
            unit: its name.
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
            or current.storage.nbytes()  # else it was given back: nobody else holds it, and none is shown
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
        """Note the magnitudes of this rank's own gradients in `own`: the larger ones where they add to others."""
        mine, fresh = buffer.magnitudes(), self.partial is None and self.delivery.all_none()
        adds = not fresh and self._version == self._shown_version()
        self.own = torch.maximum(self.own, mine) if adds and self.own is not None else mine  # the maximum keeps NaN

    def _plan(
        self, comm: Comm, rules: ReduceSettings, total: TokenCount | None, buffer: ReduceBuffer
    ) -> PlannedReduction:
        """The reduction into the kept slice, if nobody but the engine holds that now; else into another one."""
        bucket, delivery, axis = self.bucket, self.delivery, self.bucket.axes.shard
        scaling = scaling_of(comm, bucket.axes.world, self.reduce_dtype, rules, total)
        mean = scaling.mean and axis.size > 1  # of one rank a sum is the average, and what every backend is fast at
        same = self.reduce_dtype == delivery.grad_dtype and bucket.home is None and self.partial is None
        if same and delivery.all_none():
            current = delivery.writable()
            planned = current.reduction
            if planned is None or (planned.comm, planned.buffer, planned.mean) != (comm, buffer, mean):
                planned = current.reduction = PlannedReduction(comm, axis, current.flat, buffer, mean)
                current.settle()
        else:
            out = torch.empty(bucket.layout.shard_numel, dtype=self.reduce_dtype, device=bucket.device)
            planned = PlannedReduction(comm, axis, out, buffer, mean)
            planned.scratch += out.nbytes
        planned.rules, planned.scaling = rules if total is None else None, scaling  # a total is of one step
        return planned

    def wait(self, unit: str) -> int:
        """Wait for the collective in flight, and give the buffer back if that was its; returns its bytes.

        Args:
            unit: its name.
        """
        turns, buffer, pending = self.bucket.turns, self.buffer, self.pending
        assert buffer and pending
        held = buffer.storage.nbytes()
        turns.take()
        self.pending = None
        if recording():
            in_range("wait for reduce" if held else "wait for all_reduce", unit, pending.wait)
        else:
            pending.wait()
        buffer.free()
        turns.give()
        return held

    def keep_partial(self) -> None:
        """Set the slice aside, not yet reduced over the replicate axis, to be added to the next one."""
        assert self.running is not None
        reduced, current = self.running.out, self.delivery.set
        if current is not None and reduced is current.flat:
            reduced = reduced.clone()
        self.partial = reduced if self.partial is None else self.partial.add_(reduced)
        self.running, self.state = None, NONE

    def replicate(self, comm: Comm) -> int:
        """Start the all-reduce of the slice, with what `keep_partial` set aside, over the replicate axis.

        Returns:
            Bytes of the slice.
        """
        axis, running = self.bucket.axes.replicate, self.running
        assert axis is not None and running is not None
        if self.partial is not None:
            running.out.add_(self.partial)
            self.partial = None
        self.pending = comm.all_reduce(axis, running.out, running.scaling.mean and axis.size > 1)
        return running.out.nbytes

    def deliver(self, fill_unused: bool) -> list[torch.Tensor]:
        """Make the reduced slice the sharded parameters' `.grad`, or add it to what is there.

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
        given = self.delivery.deliver(reduced, fill_unused)
        self.running, self.state = None, NONE
        if self.own is not None:
            self._version = self._shown_version()
        turns.give()
        return given

    def _shown_version(self) -> int:
        """Rises when the user writes to the gradients that are shown: in place of None they may be made zeros.

        Not where they are on the host, and written when they arrive there: always 0.
        """
        current = self.delivery.set
        return current.version() if current is not None and self.bucket.home is None else 0

    # Letting go.

    def discard(self) -> None:
        """Drop whatever autograd left, is in the buffer or in flight (after an exception)."""
        for member in self.bucket.members:
            if member.unsharded is not None:
                member.unsharded.grad = None
        self.delivery.used = self.delivery.nobody  # of the backward that broke
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
        """`give_up` for these sharded parameters, or views over them, by id; how many bytes are no longer held."""
        bucket, live = self.bucket, self.live_bytes
        whole = id(bucket.flat_parameter) in parameters
        viewed = {i for view in self.delivery.views if id(view.tensor) in parameters for i in view.members}
        self.give_up([m for i, m in enumerate(bucket.members) if whole or i in viewed or id(m.sharded) in parameters])
        return live - self.live_bytes

    def give_up(self, members: Sequence[Member]) -> None:
        """Discard what was accumulated for these members and not delivered yet; nothing while it is being reduced."""
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
        """Give back the memory of gradients if nobody else holds it; not the host's. All `.grad` are None."""
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

    def forget(self) -> None:
        """After the shard moved: buffers and sets of the old device or dtype are made anew when needed."""
        self.discard()
        self.buffer = self.own = None
        self.delivery.forget()


_SETS, _STATES, _HOMES = attrgetter("delivery.set"), attrgetter("state"), attrgetter("bucket.home")
_TURNS = attrgetter("bucket.turns")


def release_all(every: Sequence[Gradients]) -> None:
    """`release` of each. All `.grad` are None."""
    sets: list[Any] = [*map(_SETS, every)]
    alike = (
        all(map(is_, map(_STATES, every), repeat(NONE)))
        and all(map(is_, map(_HOMES, every), NONES))
        and all(map(is_, map(_TURNS, every), repeat(ONE_STREAM)))
    )
    if None in sets or not sets or not alike or not free_all(sets):
        for each in every:
            each.release()


def has_gradients(every: Sequence[Gradients]) -> bool:
    """Whether gradients of a unit wait to be reduced: autograd's, or collected ones."""
    for gradients in every:  # noqa: SIM110 - a comprehension costs a call, in every backward
        if gradients.state is PENDING or gradients.waiting():
            return True
    return False


def has_gradient(member: Member) -> bool:
    """Whether the sharded parameter has a `.grad` now."""
    return read_grad(member.sharded) is not None


def refuse_unreduced(unit: str, gradients: Sequence[Gradients], what: str, do: str) -> None:
    """Raise if a unit holds gradients that were accumulated without sync, or are in flight.

    Args:
        unit: its name.
        gradients: of its buckets.
        what: cannot be done to it then ("copied").
        do: the same, as a remedy says it ("copy the model").

    Raises:
        PhaseError: names the parameters.
    """
    for one in gradients:
        if one.state is not NONE or one.partial is not None or one.waiting():
            bucket = one.bucket
            raise not_reduced_yet(unit, [member.name for member in bucket.members], bucket.axes.global_rank, what, do)
