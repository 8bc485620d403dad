"""One unit: the buckets that are gathered together, and the one state machine of their memory.

    sharded --issue_gather--> gathering --finish_gather--> gathered --free--> sharded

An illegal transition is asserted not to happen; a gather that fails, because memory runs out, leaves the unit sharded.
Gradients have their own cycle, in `gradients.py`; when things happen is the affair of `runtime/`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from itertools import chain
from operator import call
from typing import Any

import torch
from torch import nn

from ..comm import ONE_STREAM, Comm
from ..containers import drain
from ..errors import PhaseError
from ..events import Ledger, stream
from ..forms import OWNER_KEY, GatherPlan, Member, Owner, Place, Touched, hooks_onto, identity_of
from ..mesh import Axis
from ..torch_private.local_tensor import read_version
from ..torch_private.profiler import in_range, recording
from .bucket import Bucket
from .gradient_dtypes import GradientDtypes
from .gradients import Gradients
from .messages import (
    assigned_in_forward,
    written_while_gathered,
)
from .showing import Showing

_PLAIN = (torch.Tensor, nn.Parameter)


class State(Enum):
    """See the module's docstring."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    GATHERED = "gathered"


SHARDED, GATHERING, GATHERED = State


class Unit:
    """Parameters that are gathered, freed and reduced together.

    Ownership: owns its buckets, and through them every shard, gathered buffer and reduction buffer; see `comm.Turns`.

    Args:
        buckets: one per class of parameters.
        dtypes: of gradients.

    Attributes:
        name: from the root, for events and errors; set when the root is known.
        kept_axis: the ranks among which backward gathers, if forward reshards to fewer ranks.
        moving: whether the model's own code changes the weights within a forward: they are not gathered ahead in one.
        touched: what users' code is known to have done to the shards; see `changes.py`.
        ledger: the root's account of transient bytes.
        plan: what its gathers to come call; None until the first, and where each is planned anew.
        gathered: the plan of what is gathered now, or being so.
        pending: the gather in flight.
        usual: what `runtime` compares and calls in a step as long as nothing unusual happens; None: not known.
        gathered_version: `version()` of what is gathered, or was last.
        counting: the buckets whose forms count changes that their shards' own counters do not tell.
    """

    def __init__(self, buckets: Sequence[Bucket], dtypes: GradientDtypes) -> None:
        self.name = "?"
        self.buckets = list(buckets)
        self.dtypes = dtypes
        self.gradients = [Gradients(bucket) for bucket in self.buckets]
        self.state = SHARDED
        self.ledger = Ledger()
        self.rank = self.buckets[0].axes.global_rank if self.buckets else 0
        self.kept_axis: Axis | None = None
        self.moving = False
        self.touched = Touched()
        self.plan: GatherPlan | None = None
        self.gathered: Any = None  # a `GatherPlan`
        self.pending: Any = None  # a `Pending`
        self.usual: Any = None  # a `UsualStep`
        self._keeps_storage = False
        self._idle_bytes = 0  # that are kept while it is sharded; see `keep_storage`
        self.showing = Showing(self.buckets)
        self.gathered_version = 0  # `version()` when what is gathered was
        self.settle_dtypes()
        self.drop_plans()

    def settle_dtypes(self) -> None:
        """Take the dtypes of gradients from `dtypes` and the parameters: at the first forward, and after a cast."""
        self.counting = [bucket for bucket in self.buckets if bucket.form.counts]
        for gradients, (reduce, shown) in zip(self.gradients, self.dtypes.settle(self.buckets), strict=True):
            gradients.reduce_dtype = reduce
            if gradients.delivery.grad_dtype is not shown:
                gradients.delivery.grad_dtype, gradients.delivery.set = shown, None

    @property
    def members(self) -> list[Member]:
        """The parameters of all buckets."""
        return [member for bucket in self.buckets for member in bucket.members]

    @property
    def gathered_bytes(self) -> int:
        """Bytes of all ranks' slices together."""
        return sum(bucket.gathered_bytes for bucket in self.buckets)

    @property
    def full_bytes(self) -> int:
        """Bytes of the unit while it is gathered."""
        return sum(bucket.full_bytes for bucket in self.buckets)

    def emit(self, verb: str, nbytes: int) -> None:
        """Tell listeners, of whom there are some."""
        if self.buckets:  # a root whose parameters are all in units below does nothing worth telling
            stream.emit(verb, self.name or "(root)", nbytes, self.rank, self.ledger.live)

    # Gather and free.

    def issue_gather(self, comm: Comm, apart: bool = False) -> None:
        """Start gathering; the unit must be sharded. `apart`: a user asks for it, maybe on one rank alone."""
        assert self.state is SHARDED, f"unit {self.name!r} is {self.state.value}; only a sharded one is gathered"
        plan = self.plan
        try:
            if plan is None or plan.comm is not comm or apart:
                plan = self._planned_gather(comm, apart)
            self.gathered = plan
            if recording():
                *_, self.pending = in_range("gather", self.name, partial(list, map(call, plan.starts)))
            else:
                *_, self.pending = map(call, plan.starts)
        except BaseException:
            self.free(failed=True)
            raise
        self.state = GATHERING
        self.gathered_version = sum(map(read_version, plan.counters), self.touched.changes)
        if plan.varying:
            plan.tell_issued()
        ledger = self.ledger
        ledger.gathered += plan.issued_bytes
        if ledger.gathered + ledger.reducing > ledger.peak:
            ledger.note()
        if stream.listeners:
            self.emit("gather", self.gathered_bytes)

    def _planned_gather(self, comm: Comm, apart: bool) -> GatherPlan:
        """What a gather calls, for all buckets; kept if it serves again."""
        plan = GatherPlan(comm)
        for bucket in self.buckets:
            bucket.turns.take()
            bucket.plan_gather(plan, comm, self.kept_axis, apart, self.name)
            bucket.list_unsharded()
            plan.counters += bucket.counters()
        plan.frees = self._frees()
        plan.begins[:0], plan.fills[:0] = self.showing.takes, self.showing.takes
        plan.ends += [bucket.turns.give for bucket in self.buckets if bucket.turns is not ONE_STREAM]
        if self._keeps_storage:
            plan.begins.append(self._take_idle)
        if plan.comm is None:
            plan.ends.append(plan.spend)
        elif not apart:
            self.plan = plan
        plan.seal()
        return plan

    def _take_idle(self) -> None:
        """What was kept while the unit was sharded counts as gathered from now on."""
        self.ledger.gathered -= self._idle_bytes
        self._idle_bytes = 0

    def _frees(self) -> list[Callable[[], object]]:
        """What gives back what is gathered, but for what `keep_storage` keeps."""
        frees: list[Callable[[], object]] = []
        for bucket in self.buckets:
            if bucket.full is not None:
                mine = bucket.full.frees(bucket.keeps_storage)
                frees += mine if bucket.turns is ONE_STREAM else [bucket.turns.take, *mine, bucket.turns.give]
        return frees

    def finish_gather(self, keep: bool = False) -> None:
        """Wait for the gather; the unit must be gathering.

        Args:
            keep: keep this rank's slice of what `kept_axis`' ranks will gather in backward.
        """
        assert self.state is GATHERING, f"unit {self.name!r} is {self.state.value}; there is no gather to wait for"
        plan, pending = self.gathered, self.pending
        try:
            self.pending = None
            if recording():
                in_range("wait for gather", self.name, pending.wait)
            else:
                pending.wait()
            if keep and self.kept_axis is not None:
                drain(map(call, plan.fills))
                self._keep_part(self.kept_axis)
                drain(map(call, plan.ends))
            else:
                drain(map(call, plan.completes))
        except BaseException:
            self.free(failed=True)
            raise
        if plan.varying:
            plan.tell_copied()
            received = sum([full.received_bytes for full in plan.varying])
            self.ledger.peak = max(self.ledger.peak, self.ledger.live + received)
        self.state, ledger, copied = GATHERED, self.ledger, plan.live_bytes - plan.whole_bytes
        ledger.gathered += copied  # while what only the gather needs is still there
        ledger.note()
        ledger.gathered += plan.live_bytes - copied - plan.issued_bytes
        if stream.listeners:
            self.emit("gathered", self.gathered_bytes)

    def _keep_part(self, axis: Axis) -> None:
        """Keep this rank's slice of what the ranks of `axis` hold together, to gather it from them."""
        for bucket in self.buckets:
            if bucket.kept is None and bucket.full is not None:
                bucket.kept = bucket.full.cut(axis)
                self._forget_plan()
                self.ledger.gathered += bucket.kept_bytes

    def free(self, failed: bool = False) -> None:
        """Release the gathered parameters; waits first if the gather is still in flight. `failed`: it could not be."""
        assert failed or self.state is not SHARDED, f"unit {self.name!r} is already sharded; there is nothing to free"
        plan, pending = self.gathered, self.pending
        try:
            if pending is not None:
                self.pending = None
                pending.wait()
        finally:
            if plan is not None:
                drain(map(call, plan.frees))
                if self.state is not SHARDED:
                    self.ledger.gathered -= plan.live_bytes if self.state is GATHERED else plan.issued_bytes
            self.state, self.gathered = SHARDED, None
            if self._keeps_storage:
                self._note_idle()
        if stream.listeners and not failed:
            self.emit("free", self.gathered_bytes)

    def is_plain(self) -> bool:
        """Whether what a step compares and calls is known from its plans."""
        plan, showing = self.plan, self.showing
        if self._keeps_storage or self.kept_axis is not None or self.moving or showing.summoned:
            return False
        if plan is None or plan.intact or plan.varying or not showing.is_planned:
            return False
        return not any([bucket.form.reassigned(bucket.members, bucket.shard) for bucket in self.counting])

    def open(self, usual: Any) -> None:
        """As `finish_gather`, and show the unsharded parameters; where `usual` is what the unit was gathered by."""
        pending, self.pending = self.pending, None
        try:
            pending.wait()
            drain(map(call, usual.opens))
        except BaseException:
            self.free(failed=True)
            raise
        self.state, self.showing.unsharded = GATHERED, True
        ledger = self.ledger
        gathered = ledger.gathered
        if gathered + ledger.reducing + usual.copied > ledger.peak:  # noqa: PLR1730 - `max` takes longer
            ledger.peak = gathered + ledger.reducing + usual.copied
        ledger.gathered = gathered + usual.settles

    def close(self, usual: Any) -> None:
        """Show the sharded parameters, and `free`; the unit was opened."""
        drain(map(call, usual.closes))
        self.ledger.gathered -= usual.gather.live_bytes
        self.state, self.gathered, self.showing.unsharded = SHARDED, None, False

    def show(self, usual: Any) -> None:
        """Show the unsharded parameters; the unit stayed gathered."""
        drain(map(call, usual.shows))
        self.showing.unsharded = True

    def hide(self, usual: Any) -> None:
        """Show the sharded parameters; the unit was opened, and stays gathered."""
        drain(map(call, usual.hides))
        self.showing.unsharded = False

    def _forget_plan(self) -> None:
        """The next gather is planned anew."""
        self.plan = self.usual = None

    def keep_storage(self, keep: bool) -> None:
        """Keep the memory of gathered parameters from now on while the unit is sharded, or give it back."""
        self._keeps_storage = keep
        self._forget_plan()
        for bucket in self.buckets:
            bucket.keeps_storage = keep
        if self.gathered is not None:
            self.gathered.frees = self._frees()
        else:
            drain(map(call, self._frees()))
            self._note_idle()

    def _note_idle(self) -> None:
        kept = sum([b.full.live_bytes for b in self.buckets if b.keeps_storage and b.full is not None])
        self.ledger.gathered += kept - self._idle_bytes
        self._idle_bytes = kept

    def differs(self) -> torch.Tensor:
        """[members], bool: whether what is gathered is not what this rank's shards hold now."""
        if self.state is GATHERING:
            self.finish_gather()
        return torch.cat([bucket.differs() for bucket in self.buckets])

    def drop_kept(self) -> None:
        """Release what a reshard to a smaller group kept."""
        for bucket in self.buckets:
            if bucket.kept is not None:
                self.ledger.gathered -= bucket.kept_bytes
                self._forget_plan()
                bucket.drop_kept()

    def reshard(self) -> None:
        """Show the sharded parameters and release what is gathered, if anything."""
        self.showing.show_sharded()
        if self.state is not SHARDED:
            self.free()

    def drop_plans(self) -> None:
        """What they were made from has changed: shards, parameters, or where these are registered."""
        self._forget_plan()
        for bucket in self.buckets:
            bucket.drop_plans()
        self.showing.forget()

    def written(self) -> list[Member]:
        """Parameters that a forward wrote to: to what was gathered, which is about to be given back."""
        if not self.showing.unsharded or self.gathered.is_intact():
            return []
        fulls: list[Any] = [bucket.full for bucket in self.buckets]  # none is None while the parameters are shown
        written = [member for full in fulls for member in full.written()]
        if written:
            self._forget_plan()
        return written

    def written_error(self, members: Sequence[Member]) -> PhaseError:
        """The error for a forward that wrote to its own parameters."""
        return written_while_gathered([member.name for member in members], self.rank)

    def assigned_error(self, member: Member) -> PhaseError:
        """The error for a Parameter that was assigned to a module while forwards run."""
        return assigned_in_forward(member.name, self.rank, self.name)

    def version(self) -> int:
        """Differs between two times if users' code is known to have changed the shards in between."""
        counters = chain.from_iterable([bucket.counters() for bucket in self.buckets])
        return sum(map(read_version, counters), self.touched.changes)

    def note_gathered(self) -> None:
        """What is gathered is what the shards hold now."""
        self.gathered_version = self.version()

    def changed_since_gather(self) -> bool:
        """Whether users' code is known to have changed the shards since what is gathered was."""
        return self.version() != self.gathered_version

    def replaced(self) -> bool:
        """Whether a sharded parameter or its storage is not the one that was made here; not asked since `unshard()`."""
        return not self.showing.unsharded and any([bucket.replaced() for bucket in self.buckets])

    def checksum(self) -> int:
        """Of the shards' bytes; of equal value for equal shards. Reads them to the host."""
        return sum([bucket.checksum() for bucket in self.buckets])

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a plain one that lies in the gathered memory, which `free` gives back."""
        plan = self.gathered
        if plan is None or tensor.layout is not torch.strided or type(tensor) not in _PLAIN:
            return False
        at = tensor.untyped_storage().data_ptr()
        if at == 0:
            return False
        if at in map(call, plan.addresses):
            return True
        return bool(plan.varying) and any([at in full.addresses() for full in plan.varying])

    def refresh(self) -> None:
        """Once per step: notice storage that the user replaced and `requires_grad` that they changed.

        Raises:
            ConfigError: a parameter was replaced by something that is not its shard.
        """
        showing = self.showing
        if showing.summoned:
            return
        self.touched.assigned = False
        if showing.unsharded and showing.disturbed():  # since unshard()
            showing.show_sharded()
        for gradients in self.gradients:
            bucket, delivery = gradients.bucket, gradients.delivery
            views = delivery.replaced_views() if delivery.views else ()
            if not showing.unsharded and (views or bucket.replaced()):
                before = self.version()
                alike = bucket.take_over(views)
                if self.state is not SHARDED and not alike:
                    self.free()  # else as after a change in place: a rank that holds no element notices neither
                for member in bucket.members:  # `_apply` swaps attributes too
                    member.sharded.__dict__.setdefault(OWNER_KEY, Owner(self))
                if alike:
                    delivery.point_views()
                else:
                    gradients.forget()
                self.settle_dtypes()
                self.drop_plans()
                self.touched.move(1 + before - self.version())  # the new shard counts from zero
            if showing.unsharded:  # since unshard()
                bucket.take_requires_grad()
            bucket.follow_requires_grad()
            if delivery.all_none():
                gradients.release()

    def compute_in(self, dtype: torch.dtype | None) -> None:
        """Gather floating-point parameters in `dtype` from now on; None: in their own. The unit must be sharded."""
        for bucket, gradients in zip(self.buckets, self.gradients, strict=True):
            if bucket.storage_dtype.is_floating_point:
                bucket.compute_in(dtype)
                gradients.buffer = None
        self.settle_dtypes()
        self.drop_plans()

    def apply(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> tuple[Callable[[Any], Any], Callable[[], None]]:
        """For `nn.Module._apply`: `fn` as it acts on this unit's sharded parameters, a whole shard at once.

        Moving or materialising a bucket then costs one new shard, not one tensor per parameter and a copy.

        Returns:
            What to apply, and what to call when it has been applied to all parameters.
        """
        self.reshard()
        if self.replaced():
            self.refresh()
        owner = {id(m.sharded): (b, m) for b in self.buckets for m in b.members}
        moved: dict[int, Any] = {}
        # `_apply` swaps each parameter with a new tensor, attributes included: keep them to give them back.
        identities = {id(m.sharded): identity_of(m.sharded) for m in self.members}

        def applied(tensor: torch.Tensor) -> torch.Tensor:
            found = owner.get(id(tensor))
            if found is None:
                return fn(tensor)
            bucket, member = found
            if id(bucket) not in moved:
                moved[id(bucket)] = bucket.shard_after(fn)
            return bucket.shown(bucket.part(moved[id(bucket)], member), member)

        def finish() -> None:
            before = self.version()
            for bucket, gradients in zip(self.buckets, self.gradients, strict=True):
                if id(bucket) in moved:
                    for member in bucket.members:
                        member.sharded.__dict__.update(identities[id(member.sharded)])
                    bucket.rehome(moved[id(bucket)])
                    gradients.forget()
            self.settle_dtypes()
            self.drop_plans()
            self.touched.move(1 + before - self.version())

        return applied, finish

    def materialize(self, bucket: Bucket) -> None:
        """Give zeroed memory to one of this unit's buckets on the meta device. Its parameters stay the same objects."""
        applied, finish = self.apply(lambda shard: torch.zeros_like(shard, device=bucket.shard_device))
        for member in bucket.members:
            with_memory = nn.Parameter(applied(member.sharded), requires_grad=member.sharded.requires_grad)
            hooks_onto(with_memory, member.sharded)
            torch.utils.swap_tensors(member.sharded, with_memory)  # `.data` cannot leave the meta device
        finish()

    def give_up_gradients(self, parameters: set[int]) -> None:
        """Discard what was accumulated without sync, and not delivered yet, for these sharded parameters, by id."""
        for gradients in self.gradients:
            if gradients.accumulates:
                self.ledger.reducing -= gradients.give_up_parameters(parameters)

    # Ties across units.

    def give_up(self, parameter: torch.Tensor) -> tuple[list[Place], torch.Tensor]:
        """Take a parameter out of this unit, for a unit above it that shares it. Collective over the mesh.

        Returns:
            Where it was registered, and its whole value.
        """
        for index, bucket in enumerate(self.buckets):
            for member in bucket.members:
                if member.sharded is parameter:
                    whole = bucket.whole(member)
                    rest = bucket.without(member)
                    if rest is None:
                        del self.buckets[index], self.gradients[index]
                    else:
                        self.buckets[index] = rest
                        self.gradients[index] = Gradients(rest)
                    self.settle_dtypes()
                    self.drop_plans()
                    return list(member.places), whole
        raise AssertionError(f"unit {self.name!r} lacks what it should give up")

    def add_places(self, parameter: torch.Tensor, places: Sequence[Place]) -> None:
        """Register a parameter of this unit in more places: modules elsewhere that are tied to it."""
        for member in self.members:
            if member.sharded is parameter:
                for place in places:
                    if not any(place.same_as(known) for known in member.places):
                        member.places.append(place)
                        place.show(parameter)
        self.drop_plans()

    # Recovery.

    def reset(self) -> None:
        """After an exception: back to sharded, with every gradient in flight dropped."""
        try:
            for gradients in self.gradients:
                live = gradients.live_bytes
                gradients.discard()
                self.ledger.reducing -= live - gradients.live_bytes
        finally:
            if self.showing.unsharded:
                for bucket in self.buckets:
                    bucket.take_requires_grad()
            self.drop_kept()
            self.reshard()
