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
from operator import is_, is_not, or_

import torch

from ..comm import Comm, Pending, wait_all
from ..containers import NONES, drain
from ..errors import PhaseError
from ..forms import Member
from ..torch_private.local_tensor import read_grad, write_grad
from .bucket import Bucket
from .delivery import Delivery
from .reduce_buffer import PlannedReduction, ReduceBuffer
from .scaling import MEAN, Scaling


class GradState(Enum):
    """See the module's docstring."""

    NONE = "none"
    PENDING = "pending"
    REDUCING = "reducing"


class Gradients:
    """See the module's docstring.

    Ownership: `buffer` is memory on demand, allocated at the first gradient of a backward, given back when the
    reduction is done. The reduced slice belongs to `delivery`.

    Args:
        bucket: whose gradients these are.

    Attributes:
        reduce_dtype: of the buffer and the reduction; see `GradientDtypes`.
    """

    def __init__(self, bucket: Bucket) -> None:
        self.bucket, self.reduce_dtype = bucket, bucket.storage_dtype
        self.delivery = Delivery(bucket)
        self.state = GradState.NONE
        self.buffer: ReduceBuffer | None = None  # [world * shard_numel], reduce dtype
        self.partial: torch.Tensor | None = None  # [shard_numel], reduced on the shard axis only (hybrid)
        self.scaling = MEAN
        self.replicating: Pending | None = None  # the all-reduce over the replicate axis, in flight
        self.own: torch.Tensor | None = None  # `ReduceBuffer.magnitudes` of what is in `.grad`, if they are asked for
        self._version = -1  # of what is shown, when it was delivered last
        self.slice: torch.Tensor | None = None  # [shard_numel], reduce dtype, while reducing
        self._pending: list[Pending] = []

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffer when it is allocated."""
        return self.bucket.layout.gathered_numel * self.reduce_dtype.itemsize

    @property
    def live_bytes(self) -> int:
        """Bytes of the buffer if it is allocated now."""
        return self.buffer.nbytes if self.buffer is not None and self.buffer.allocated else 0

    @property
    def accumulates(self) -> bool:
        """Whether something was accumulated that no reduction has taken yet."""
        return self.state is GradState.PENDING or (self.partial is not None and self.state is not GradState.REDUCING)

    def owed(self) -> bool:
        """Whether gradients of earlier backwards wait to be reduced, and the user did not give them up."""
        if self.state is not GradState.PENDING and self.partial is None:
            return False
        return not self.delivery.all_given_up()

    def waiting(self) -> bool:
        """Whether autograd left gradients on the unsharded parameters that were not collected yet."""
        unsharded = self.bucket.unsharded or self.bucket.list_unsharded()
        return not all(map(is_, map(read_grad, unsharded), NONES))

    # Collect.

    def collect(self) -> int:
        """Move autograd's gradients into the buffer, added to what is there from earlier backwards.

        Where there are none the buffer is zeros: the bucket takes part in a reduction that others need. If memory runs
        out nothing has changed.

        Returns:
            Bytes that are allocated now and were not before.
        """
        bucket, delivery, buffer = self.bucket, self.delivery, self.buffer
        if self.state is GradState.REDUCING:
            raise PhaseError(
                "gradients were collected while their bucket is being reduced; this is a bug in Fullshard", code="P048"
            )
        freed = 0
        if delivery.kept and (given_up := delivery.given_up()):
            freed = self.live_bytes
            self.give_up(given_up)
            freed -= self.live_bytes
        first = self.state is GradState.NONE
        if buffer is None or buffer.tensor.dtype != self.reduce_dtype:
            buffer = self.buffer = ReduceBuffer(bucket, self.reduce_dtype)
        bucket.turns.take()
        unsharded = bucket.unsharded or bucket.list_unsharded()
        grads = list(map(read_grad, unsharded)) or [None] * len(bucket.members)
        if first:
            buffer.take()
        try:
            everyone = buffer.fill(grads, first)
        except BaseException:
            if first:
                buffer.free()
            raise
        drain(map(write_grad, unsharded, NONES))
        delivery.got = delivery.everyone if everyone else list(map(or_, delivery.got, map(is_not, grads, NONES)))
        bucket.turns.give()
        self.state = GradState.PENDING
        return (buffer.nbytes if first else 0) - freed

    # Reduce.

    def issue_reduce(self, comm: Comm, scaling: Scaling, check: bool = False) -> int:
        """Start the reduction of the buffer over the shard axis.

        Args:
            check: note the magnitudes of this rank's own gradients first, in `own`.

        Returns:
            Bytes that are allocated until it is finished, besides the buffer and `.grad`.
        """
        assert self.buffer is not None and self.state is GradState.PENDING
        if self.delivery.kept and (given_up := self.delivery.given_up()):
            self.give_up(given_up)
        self.bucket.turns.take()
        self.delivery.look()
        bucket, axis = self.bucket, self.bucket.axes.shard
        fresh = self.delivery.all_none() and self.partial is None
        scratch = 0
        if check:
            mine, adds = self.buffer.magnitudes(), not fresh and self._version == self._shown_version()
            self.own = torch.maximum(self.own, mine) if adds and self.own is not None else mine  # the maximum keeps NaN
        mean = scaling.mean and axis.size > 1  # of one rank a sum is the average, and what every backend is fast at
        if fresh and self.reduce_dtype == self.delivery.grad_dtype and bucket.home is None:
            planned = self.delivery.writable().reduction
            if (
                planned is None
                or planned.comm is not comm
                or planned.buffer is not self.buffer
                or planned.mean is not mean
            ):
                planned = self._plan(comm, mean)
        else:
            out = torch.empty(bucket.layout.shard_numel, dtype=self.reduce_dtype, device=bucket.device)
            scratch = out.numel() * out.element_size()
            planned = PlannedReduction(comm, axis, out, self.buffer, mean)
        if scaling is not MEAN:
            if scaling.before != 1.0:
                self.buffer.tensor.mul_(scaling.before)
            if scaling.divides_buffer is not None:
                self.buffer.tensor.div_(scaling.divides_buffer)
        try:
            for reduce in planned.reductions:
                self._pending.append(reduce())
        except BaseException:
            wait_all(self._pending)
            raise
        self.state, self.scaling, self.slice = GradState.REDUCING, scaling, planned.out
        return scratch + planned.scratch

    def _plan(self, comm: Comm, mean: bool) -> PlannedReduction:
        """The reduction into the slice that is shown; nobody but the engine holds that now."""
        current = self.delivery.writable()
        assert self.buffer is not None
        current.reduction = PlannedReduction(comm, self.bucket.axes.shard, current.flat, self.buffer, mean)
        current.settle()
        return current.reduction

    def finish_shard_axis(self) -> int:
        """Wait for the reduction over the shard axis and give the buffer back; returns its bytes."""
        pending, buffer = self._pending, self.buffer
        assert buffer is not None
        self.bucket.turns.take()
        wait_all(pending)
        buffer.free()
        self.bucket.turns.give()
        return buffer.nbytes

    def keep_partial(self) -> None:
        """Set the slice aside, not yet reduced over the replicate axis, to be added to the next one."""
        assert self.slice is not None
        ours = self.delivery.set is not None and self.slice is self.delivery.set.flat
        reduced = self.slice.clone() if ours else self.slice
        self.partial = reduced if self.partial is None else self.partial.add_(reduced)
        self.slice, self.state = None, GradState.NONE

    def replicate(self, comm: Comm) -> int:
        """Start the all-reduce of the slice, with what `keep_partial` set aside, over the replicate axis.

        Returns:
            Bytes of the slice.
        """
        axis = self.bucket.axes.replicate
        assert axis is not None and self.slice is not None
        if self.partial is not None:
            self.slice.add_(self.partial)
            self.partial = None
        self.replicating = comm.all_reduce(axis, self.slice, self.scaling.mean and axis.size > 1)
        return self.slice.numel() * self.slice.element_size()

    def finish_replicate(self) -> None:
        """Wait for the all-reduce."""
        assert self.replicating is not None
        self.bucket.turns.take()
        self.replicating.wait()
        self.replicating = None

    def deliver(self, fill_unused: bool) -> list[torch.Tensor]:
        """Make the reduced slice the sharded parameters' `.grad`, or add it to what is there.

        Args:
            fill_unused: give parameters that no rank used a gradient of zeros.

        Returns:
            See `Delivery.deliver`.
        """
        assert self.slice is not None
        self.bucket.turns.take()
        if self.scaling is not MEAN:
            if self.scaling.after != 1.0:
                self.slice.mul_(self.scaling.after)
            if self.scaling.divides_slice is not None:
                self.slice.div_(self.scaling.divides_slice)
        given = self.delivery.deliver(self.slice, fill_unused)
        self.slice, self.state = None, GradState.NONE
        if self.own is not None:
            self._version = self._shown_version()
        self.bucket.turns.give()
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
        pending, self._pending = self._pending, []
        if self.replicating is not None:
            pending.append(self.replicating)
        try:
            wait_all(pending)
        finally:
            if self.buffer is not None:
                self.buffer.free()
            self.delivery.got = self.delivery.nobody
            self.delivery.undecided = []
            self.delivery.aside.clear()
            self.delivery.kept.clear()
            self.partial = self.replicating = self.slice = None
            self.bucket.turns.give()
            self.state = GradState.NONE

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
        if self.state is GradState.PENDING and self.buffer is not None:
            self.buffer.zero(members)
        if self.partial is not None:
            for member in members:
                self.bucket.part(self.partial, member).zero_()
        self.delivery.got = [
            got and member not in members for got, member in zip(self.delivery.got, self.bucket.members, strict=True)
        ]

    def release(self) -> None:
        """Give back the memory of gradients that the user set to None, if nobody else holds them."""
        if self.state is not GradState.REDUCING:
            self.bucket.turns.take()
            self.delivery.release()
            self.bucket.turns.give()

    @property
    def held_bytes(self) -> int:
        """Bytes of reduced gradients that are alive."""
        return self.delivery.set.storage.nbytes() if self.delivery.set is not None else 0

    def forget(self) -> None:
        """After the shard moved: buffers and sets of the old device or dtype are made anew when needed."""
        self.discard()
        self.buffer = self.own = None
        self.delivery.forget()


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
        if one.state is not GradState.NONE or one.partial is not None or one.waiting():
            raise PhaseError(
                f"Unit {unit or '(root)'!r} cannot be {what} now: it holds gradients not yet reduced.",
                parameter=", ".join(member.name for member in one.bucket.members),
                rank=one.bucket.axes.global_rank,
                remedy=f"{do} after the backward that reduces them (set_requires_gradient_sync(True)), "
                "or after optimizer.zero_grad() and before the next backward",
                code="P049",
            )
