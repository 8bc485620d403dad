"""One unit: the buckets that are gathered together, and the state machine of their memory.

    sharded --issue_gather--> gathering --finish_gather--> gathered --free--> sharded

Assertions rule out illegal transitions; a gather that fails because memory runs out leaves the unit sharded.
Gradients have their own cycle, in `gradients.py`; `runtime/` decides when things happen.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
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
from ..forms import OWNER_KEY, GatherPlan, Member, Owner, Place, Touched, hooks_onto, identity_of, owner_of
from ..mesh import Axis, MeshAxes
from ..torch_private.local_tensor import read_version
from ..torch_private.profiler import in_range, recording
from .bucket import Bucket
from .gradient_dtypes import gradient_dtypes
from .gradients import Gradients
from .messages import (
    assigned_in_forward,
    written_while_gathered,
)
from .plan_bucket import BuildSettings
from .showing import Showing
from .views import OptimizerView

_PLAIN = (torch.Tensor, nn.Parameter)


class State(Enum):
    """See the module's docstring."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    GATHERED = "gathered"


SHARDED, GATHERING, GATHERED = State

_NUMBERS = itertools.count()


class Unit:
    """Parameters that are gathered, freed and reduced together.

    Ownership: owns its buckets, and through them every shard, gathered buffer and reduction buffer; see `comm.Turns`.

    Args:
        buckets: one per class of parameters.
        settings: how the unit was built.

    Attributes:
        number: of the units that this process has made, the same on all ranks that run the same program.
        name: qualified name from the root, for events and errors; until the root is known, a class in parentheses.
        kept_axis: the ranks among which backward gathers, if forward reshards to fewer ranks.
        keeps_storage: whether gathered memory stays allocated while the unit is sharded; see `keep_storage`.
        moving: whether the model's own code changes the weights within a forward: the unit is then not gathered ahead.
        touched: known changes to the shards by users' code; see `forms/changes.py`.
        ledger: the root's account of transient bytes.
        plan: the plan of future gathers; None before the first, and if each gather is planned anew.
        gathered: the plan of the current gather, finished or in flight.
        pending: the gather in flight.
        usual: the comparisons and calls of a usual step in `runtime`; None: not planned.
        gathered_version: `version()` of the shards at the current, or last, gather.
        counting: the buckets whose forms count changes that their shards' own counters do not register.
    """

    def __init__(self, buckets: Sequence[Bucket], settings: BuildSettings) -> None:
        self.number, self.name = next(_NUMBERS), "?"
        self.buckets = list(buckets)
        self.settings = settings
        self.gradients = [Gradients(bucket) for bucket in self.buckets]
        self.state = SHARDED
        self.ledger = Ledger()
        self.rank = settings.axes.global_rank
        self.kept_axis: Axis | None = None
        self.moving = False
        self.touched = Touched()
        self.plan: GatherPlan | None = None
        self.gathered: Any = None  # a `GatherPlan`
        self.pending: Any = None  # a `Pending`
        self.usual: Any = None  # a `UsualStep`
        self.keeps_storage = False
        self._idle_bytes = 0  # kept allocated while sharded
        self.showing = Showing(self.buckets)
        self.gathered_version = 0
        self.settle_dtypes()
        self.drop_plans()

    def settle_dtypes(self) -> None:
        """Determine the dtypes of gradients: at the first forward, and after a cast."""
        self.counting = [bucket for bucket in self.buckets if bucket.form.shows_locals]
        dtypes = gradient_dtypes(self.buckets, self.settings)
        for gradients, (reduce, shown) in zip(self.gradients, dtypes, strict=True):
            gradients.reduce_dtype = reduce
            if gradients.delivery.grad_dtype is not shown:
                gradients.delivery.grad_dtype, gradients.delivery.set = shown, None

    @property
    def members(self) -> list[Member]:
        """The parameters of all buckets."""
        return [member for bucket in self.buckets for member in bucket.members]

    def optimizer_views(self) -> Iterator[tuple[torch.Tensor, OptimizerView, list[Member]]]:
        """Each tensor that an optimizer updates in place of parameters, its view, and these parameters."""
        for bucket, gradients in zip(self.buckets, self.gradients, strict=True):
            for view in gradients.delivery.views:
                if view.tensor is not None:
                    yield view.tensor, view, [bucket.members[i] for i in view.members]

    @property
    def gathered_bytes(self) -> int:
        """Bytes of all ranks' slices together, as a gather of the shards sends them."""
        return sum(bucket.gathered_bytes for bucket in self.buckets)

    @property
    def full_bytes(self) -> int:
        """Bytes of the unit while it is gathered."""
        return sum(bucket.full_bytes for bucket in self.buckets)

    def emit(self, verb: str, nbytes: int) -> None:
        """Emit an event; call only if there are listeners."""
        if self.buckets:  # a root whose parameters are all in units below does nothing worth an event
            stream.emit(verb, self.name or "(root)", nbytes, self.rank, self.ledger, self._ranks_of(verb))

    def _ranks_of(self, verb: str) -> tuple[int, ...]:
        """Return the global ranks among which the unit's collective of this verb runs."""
        bucket = self.buckets[0]
        if verb == "gather":
            return (bucket.axes.shard if bucket.kept is None else self.kept_axis or bucket.axes.shard).ranks
        if verb == "reduce":
            return bucket.axes.shard.ranks
        return bucket.axes.replicate.ranks if verb == "all_reduce" and bucket.axes.replicate is not None else ()

    # Gather and free.

    def issue_gather(self, comm: Comm, apart: bool = False) -> None:
        """Start gathering; the unit must be sharded. `apart`: the user asked for it, possibly on this rank only."""
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
            plan.note_issued()
        self.ledger.gather(plan.issued_bytes)
        if stream.listeners:
            self.emit("gather", plan.sent_bytes)

    def _planned_gather(self, comm: Comm, apart: bool) -> GatherPlan:
        """Plan a gather of all buckets; store the plan if it can be reused."""
        plan = GatherPlan(comm, keeps=self.keeps_storage)
        for bucket in self.buckets:
            bucket.turns.take()
            bucket.plan_gather(plan, comm, self.kept_axis, apart, self.name)
            bucket.list_unsharded()
            plan.counters += bucket.counters()
        plan.frees = self._frees()
        plan.begins[:0], plan.fills[:0] = self.showing.takes, self.showing.takes
        plan.ends += [bucket.turns.give for bucket in self.buckets if bucket.turns is not ONE_STREAM]
        if self.keeps_storage:
            plan.begins.append(self._take_idle)
        if plan.comm is None:
            plan.ends.append(plan.spend)
        elif not apart:
            self.plan = plan
        plan.seal()
        return plan

    def _take_idle(self) -> None:
        """Count memory that was kept while the unit was sharded as gathered from now on."""
        self.ledger.gather(-self._idle_bytes)
        self._idle_bytes = 0

    def _frees(self) -> list[Callable[[], object]]:
        """Return the calls that release gathered memory, except what `keep_storage` keeps."""
        frees: list[Callable[[], object]] = []
        for bucket in self.buckets:
            if bucket.full is not None:
                releases = bucket.full.frees(self.keeps_storage)
                frees += releases if bucket.turns is ONE_STREAM else [bucket.turns.take, *releases, bucket.turns.give]
        return frees

    def finish_gather(self, keep: bool = False) -> None:
        """Wait for the gather; the unit must be gathering.

        Args:
            keep: keep this rank's slice for the gather among the ranks of `kept_axis` in backward.
        """
        assert self.state is GATHERING, f"unit {self.name!r} is {self.state.value}; there is no gather to wait for"
        plan, pending = self.gathered, self.pending
        if stream.listeners:
            self.emit("wait_gather", plan.sent_bytes)
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
            plan.note_copied()
            received = sum([full.received_bytes for full in plan.varying])
            self.ledger.gather(received)
            self.ledger.gather(-received)
        self.state, copied = GATHERED, plan.live_bytes - plan.whole_bytes
        self.ledger.gather(copied)  # while memory that only the gather needs is still allocated
        self.ledger.gather(plan.live_bytes - copied - plan.issued_bytes)
        if stream.listeners:
            self.emit("gathered", plan.sent_bytes)

    def keep_among(self, axis: Axis | None, axes: MeshAxes) -> None:
        """Keep slices among the ranks of `axis` from forward to backward; None: keep none.

        A unit that has parameters with a mesh other than `axes`, or with their own gather, keeps none.
        """
        divides = all(bucket.axes is axes and bucket.form.plain for bucket in self.buckets)
        self.kept_axis = axis if divides else None

    def _keep_part(self, axis: Axis) -> None:
        """Keep this rank's slice of the full buffers, to gather them again among the ranks of `axis`."""
        for bucket in self.buckets:
            if bucket.kept is None and bucket.full is not None:
                bucket.kept = bucket.full.cut(axis)
                self._forget_plan()
                self.ledger.gather(bucket.kept_bytes)

    def free(self, failed: bool = False) -> None:
        """Release the gathered parameters; wait first if the gather is in flight. `failed`: the gather failed."""
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
                    self.ledger.gather(-plan.live_bytes if self.state is GATHERED else -plan.issued_bytes)
            self.state, self.gathered = SHARDED, None
            if self.keeps_storage:
                self._note_idle()
        if stream.listeners and not failed:
            self.emit("free", plan.sent_bytes)

    def is_plain(self) -> bool:
        """Whether the plans determine everything that a step compares and calls."""
        plan, showing = self.plan, self.showing
        if self.keeps_storage or self.kept_axis is not None or self.moving or showing.summoned:
            return False
        if plan is None or plan.intact or plan.varying or not showing.is_planned:
            return False
        return not any([bucket.form.reassigned(bucket.members, bucket.shard) for bucket in self.counting])

    def _forget_plan(self) -> None:
        """Drop the gather plan: the next gather is planned anew."""
        self.plan = self.usual = None

    def keep_storage(self, keep: bool) -> None:
        """Keep the memory of gathered parameters allocated while the unit is sharded, or release it, from now on."""
        self.keeps_storage = keep
        self._forget_plan()
        if self.gathered is not None:
            self.gathered.frees = self._frees()
        else:
            drain(map(call, self._frees()))
            self._note_idle()

    def join_ledger(self, ledger: Ledger) -> None:
        """Move the bytes of this unit into the ledger of its root."""
        ledger.take_over(self.ledger)
        self.ledger, self.usual = ledger, None

    def leave_ledger(self) -> None:
        """Move the bytes of this unit, which is sharded and keeps no slices, from the root's ledger to its own."""
        reducing = sum([gradients.live_bytes for gradients in self.gradients])  # accumulated without sync
        self.ledger.gather(-self._idle_bytes)
        self.ledger.reduce(-reducing)
        self.ledger, self.usual = Ledger(self._idle_bytes, reducing, model=self.ledger.model), None

    def _note_idle(self) -> None:
        kept = sum([b.full.live_bytes for b in self.buckets if b.full is not None]) if self.keeps_storage else 0
        self.ledger.gather(kept - self._idle_bytes)
        self._idle_bytes = kept

    def differs(self) -> torch.Tensor:
        """Return, for each member, whether the gathered values differ from this rank's shards: [members], bool."""
        if self.state is GATHERING:
            self.finish_gather()
        return torch.cat([bucket.differs() for bucket in self.buckets])

    def drop_kept(self) -> None:
        """Release the slices kept by a reshard to fewer ranks."""
        for bucket in self.buckets:
            if bucket.kept is not None:
                self.ledger.gather(-bucket.kept_bytes)
                self._forget_plan()
                bucket.drop_kept()

    def reshard(self) -> None:
        """Show the sharded parameters, and free the unit if it is not sharded."""
        self.showing.show_sharded()
        if self.state is not SHARDED:
            self.free()

    def drop_plans(self) -> None:
        """Drop all plans: shards, parameters, or their places have changed."""
        self._forget_plan()
        for bucket in self.buckets:
            bucket.drop_plans()
        self.showing.forget()

    def written(self) -> list[Member]:
        """Return the parameters that a forward wrote to, in gathered memory that is about to be released."""
        if not self.showing.unsharded or self.gathered.is_intact():
            return []
        fulls: list[Any] = [bucket.full for bucket in self.buckets]  # all exist while the parameters are shown
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
        """Return a number that changes if users' code is known to have changed the shards."""
        counters = chain.from_iterable([bucket.counters() for bucket in self.buckets])
        return sum(map(read_version, counters), self.touched.changes)

    def note_gathered(self) -> None:
        """Note that the gathered values equal the shards."""
        self.gathered_version = self.version()

    def changed_since_gather(self) -> bool:
        """Whether users' code is known to have changed the shards since the gather."""
        return self.version() != self.gathered_version

    def replaced(self) -> bool:
        """Whether a sharded parameter or its storage was replaced; False, unchecked, while unsharded ones are shown."""
        return not self.showing.unsharded and any([bucket.replaced() for bucket in self.buckets])

    def checksum(self) -> int:
        """Return a checksum of the shards' bytes, equal for equal shards. Reads it to the host."""
        return sum([bucket.checksum() for bucket in self.buckets])

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is plain and lies in gathered memory, which `free` releases."""
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
        """Take over storage that the user replaced, and changes of `requires_grad`. Called once per step.

        Raises:
            ConfigError: a parameter was replaced by a tensor that cannot be its shard.
        """
        showing = self.showing
        if showing.summoned:
            return
        self.touched.assigned = False
        if showing.unsharded and showing.disturbed():  # after unshard()
            showing.show_sharded()
        for gradients in self.gradients:
            bucket, delivery = gradients.bucket, gradients.delivery
            views = delivery.replaced_views() if delivery.views else ()
            if not showing.unsharded and (views or bucket.replaced()):
                before = self.version()
                alike = bucket.take_over(views)
                if self.state is not SHARDED and not alike:
                    self.free()  # if alike, treat it as a change in place: a rank without elements notices neither
                for member in bucket.members:  # `_apply` swaps attributes too
                    member.sharded.__dict__.setdefault(OWNER_KEY, Owner(self))
                if alike:
                    delivery.point_views()
                else:
                    gradients.forget()
                self.settle_dtypes()
                self.drop_plans()
                self.touched.move(1 + before - self.version())  # the new shard counts from zero
            if showing.unsharded:  # after unshard()
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
        """For `nn.Module._apply`: adapt `fn` to this unit's sharded parameters, applying it to whole shards.

        Moving or materialising a bucket then costs one new shard, not one tensor per parameter and a copy.

        Returns:
            The function to apply, and a function to call when it has been applied to all parameters.
        """
        self.reshard()
        if self.replaced():
            self.refresh()
        owner = {id(m.sharded): (b, m) for b in self.buckets for m in b.members}
        moved: dict[int, Any] = {}
        # `_apply` swaps each parameter with a new tensor, including attributes: keep these to restore them.
        identities = {id(m.sharded): identity_of(m.sharded) for m in self.members}

        def applied(tensor: torch.Tensor) -> torch.Tensor:
            owned = owner.get(id(tensor))
            if owned is None:
                return fn(tensor)
            bucket, member = owned
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
        """Allocate zeroed memory for one of this unit's buckets on meta. Its parameters stay the same objects."""
        applied, finish = self.apply(lambda shard: torch.zeros_like(shard, device=bucket.shard_device))
        for member in bucket.members:
            with_memory = nn.Parameter(applied(member.sharded), requires_grad=member.sharded.requires_grad)
            hooks_onto(with_memory, member.sharded)
            torch.utils.swap_tensors(member.sharded, with_memory)  # `.data` cannot leave the meta device
        finish()

    def give_up_gradients(self, parameters: set[int]) -> None:
        """Discard undelivered gradients accumulated without sync for these sharded parameters, by id."""
        for gradients in self.gradients:
            if gradients.accumulates:
                self.ledger.reduce(-gradients.give_up_parameters(parameters))

    # Ties across units.

    def give_up(self, parameter: torch.Tensor) -> tuple[list[Place], torch.Tensor]:
        """Remove a parameter from this unit, for a unit above that shares it. Collective over the mesh.

        Returns:
            Its places, and its whole value.
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
        """Register a parameter of this unit in additional places, on modules elsewhere that are tied to it."""
        for member in self.members:
            if member.sharded is parameter:
                for place in places:
                    if not any(place.same_as(existing) for existing in member.places):
                        member.places.append(place)
                        place.show(parameter)
        self.drop_plans()

    # Recovery.

    def reset(self) -> None:
        """Return to sharded after an exception, and drop every gradient in flight."""
        try:
            for gradients in self.gradients:
                live = gradients.live_bytes
                gradients.discard()
                self.ledger.reduce(gradients.live_bytes - live)
        finally:
            if self.showing.unsharded:
                for bucket in self.buckets:
                    bucket.take_requires_grad()
            self.drop_kept()
            self.reshard()


# The units that own parameters.


def units_of(model: nn.Module) -> list[Unit]:
    """Return the units that own sharded parameters of `model`, in the order of its parameters."""
    units: dict[int, Unit] = {}
    for parameter in model.parameters():
        unit = owner_of(parameter)
        if unit is not None:
            units.setdefault(id(unit), unit)
    return list(units.values())


def members_of(model: nn.Module) -> list[tuple[Bucket, Gradients, Member]]:
    """Return every sharded parameter of `model`, with its bucket and gradients."""
    return [
        (bucket, gradients, member)
        for unit in units_of(model)
        for bucket, gradients in zip(unit.buckets, unit.gradients, strict=True)
        for member in bucket.members
    ]


def all_ranks_hold(unit: Unit, parameters: Sequence[torch.Tensor]) -> bool:
    """Whether every rank gets a gradient for any of these parameters of `unit`, when all of them have gradients."""
    ids, count = {id(parameter) for parameter in parameters}, 0
    for bucket in unit.buckets:
        members = [member for member in bucket.members if id(member.sharded) in ids]
        count += len(members)
        ranks = set[int]().union(*[bucket.layout.holders(member.slot) for member in members])
        if members and (not bucket.form.shows_locals or len(ranks) == bucket.axes.shard.size):
            return True
    return count < len(ids)  # some are views or a flat parameter, of which every rank has a part
