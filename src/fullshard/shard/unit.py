"""One unit: the buckets that are gathered together, and the one state machine that says when.

    sharded --issue_gather--> gathering --finish_gather--> gathered --free--> sharded

An illegal transition raises `PhaseError`. Gradients have their own cycle, in `gradients.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any

import torch

from ..comm import Comm
from ..errors import PhaseError
from ..events import Ledger, stream
from ..mesh import Axis
from .bucket import Bucket
from .gradient_set import Scaling
from .gradients import Gradients, GradState
from .member import Member
from .parameter import OWNER_KEY, identity_of
from .staleness import stamp


class State(Enum):
    """See the module's docstring."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    GATHERED = "gathered"


def owner_of(parameter: torch.Tensor) -> Unit | None:
    """The unit that shards `parameter`, which may be its sharded or its unsharded form; None if none does."""
    reference = parameter.__dict__.get(OWNER_KEY)
    return reference() if reference is not None else None


def refuse_meta(units: Iterable[Unit]) -> None:
    """Raise if any of these units holds parameters without values.

    Raises:
        PhaseError: names all of them.
    """
    names = [m.name for unit in units for bucket in unit.buckets if bucket.shard.is_meta for m in bucket.members]
    if names:
        raise PhaseError(
            "A forward was called while parameters are on the meta device and hold no values.",
            parameter=", ".join(names),
            remedy="call model.to_empty(device=...) and then initialise every module "
            "(reset_parameters() or a state dict load)",
        )


class Unit:
    """Parameters that are gathered, freed and reduced together.

    Ownership: owns its buckets, and through them every shard, gathered buffer and reduction buffer. Frees are in
    program order on the compute stream.

    Args:
        buckets: one per class of parameters.
        reduce_dtype: dtype of reductions; None for the compute dtype.
        name: from the root, for events and errors; set when the root is known.
    """

    def __init__(self, buckets: Sequence[Bucket], reduce_dtype: torch.dtype | None, name: str = "?") -> None:
        self.name = name
        self.buckets = list(buckets)
        self.gradients = [Gradients(bucket, reduce_dtype) for bucket in self.buckets]
        self.reduce_dtype = reduce_dtype
        self.state = State.SHARDED
        self.ledger = Ledger()
        self.rank = self.buckets[0].axes.global_rank if self.buckets else 0
        self.small_axis: Axis | None = None
        self._full_bytes = 0  # of what is gathered now
        self._staging_bytes = 0
        self._scratch_bytes = 0
        self._shown = False  # whether modules show the unsharded parameters
        self._unsharded_places: list[tuple[dict[str, Any], str, Any]] | None = None
        self._sharded_places: list[tuple[dict[str, Any], str, Any]] = []

    @property
    def members(self) -> list[Member]:
        return [member for bucket in self.buckets for member in bucket.members]

    @property
    def gathered_bytes(self) -> int:
        return sum(bucket.gathered_bytes for bucket in self.buckets)

    @property
    def full_bytes(self) -> int:
        """Bytes of the unit while it is gathered."""
        return sum(bucket.full_bytes for bucket in self.buckets)

    def _emit(self, verb: str, nbytes: int) -> None:
        if self.buckets:  # a root whose parameters are all in units below does nothing worth telling
            stream.emit(verb, self.name, nbytes, self.rank, self.ledger.live)

    # Gather and free.

    def issue_gather(self, comm: Comm) -> None:
        """Start gathering; the unit must be sharded."""
        if self.state is not State.SHARDED:
            raise PhaseError(f"unit {self.name!r} is {self.state.value}; only a sharded unit can be gathered")
        self.state = State.GATHERING
        small_axis = self.small_axis
        for bucket in self.buckets:
            held, staging = bucket.issue_gather(comm, small_axis)
            self._full_bytes += held
            self._staging_bytes += staging
        ledger = self.ledger
        ledger.gathered += self._full_bytes
        ledger.staging += self._staging_bytes
        ledger.note()
        if stream.listeners:
            self._emit("gather", self.gathered_bytes)

    def finish_gather(self, keep_small: bool = False) -> None:
        """Wait for the gather; the unit must be gathering. `keep_small`: keep the slice of `small_axis`' group."""
        if self.state is not State.GATHERING:
            raise PhaseError(f"unit {self.name!r} is {self.state.value}; there is no gather to wait for")
        keep = self.small_axis if keep_small else None
        for bucket in self.buckets:
            kept = bucket.small is None and keep is not None
            held = bucket.finish_gather(keep if kept else None)
            self._full_bytes += held
            self.ledger.gathered += held
            if kept and bucket.small is not None:
                self.ledger.gathered += bucket.small.numel() * bucket.small.element_size()
                self.ledger.note()
        self.ledger.note()
        self.ledger.staging -= self._staging_bytes
        self._staging_bytes = 0
        self.state = State.GATHERED
        if stream.listeners:
            self._emit("gathered", self.gathered_bytes)

    def free(self) -> None:
        """Release the gathered parameters; waits first if the gather is still in flight."""
        if self.state is State.SHARDED:
            raise PhaseError(f"unit {self.name!r} is already sharded; there is nothing to free")
        if self.state is State.GATHERING:
            self.finish_gather()
        for bucket in self.buckets:
            bucket.free()
        self.ledger.gathered -= self._full_bytes
        self._full_bytes = 0
        self.state = State.SHARDED
        if stream.listeners:
            self._emit("free", self.gathered_bytes)

    def stale(self) -> bool:
        """Whether what is gathered is not what the shards hold now (after an optimizer step, or a load)."""
        held = self.state is not State.SHARDED
        for bucket in self.buckets:
            if (held or bucket.small is not None) and bucket.gathered_at != stamp(bucket.shard):
                return True
        return False

    def drop_stale(self) -> None:
        """Release gathered parameters, whole or in part, that the shards no longer agree with."""
        if self.stale():
            self.show_sharded()
            self.drop_small()
            if self.state is not State.SHARDED:
                self.free()

    def drop_small(self) -> None:
        """Release what a reshard to a smaller group kept."""
        for bucket in self.buckets:
            if bucket.small is not None:
                self.ledger.gathered -= bucket.small.numel() * bucket.small.element_size()
                bucket.small = None

    # Which parameters modules show.

    def show_unsharded(self) -> None:
        """Register the unsharded parameters on the modules; the unit must be gathered."""
        if self._shown:
            return
        places = self._unsharded_places
        if places is None:
            places = self._list_places()
        for parameters, key, parameter in places:
            parameters[key] = parameter
        self._shown = True

    def show_sharded(self) -> None:
        """Register the sharded parameters on the modules."""
        if not self._shown:
            return
        for parameters, key, parameter in self._sharded_places:
            parameters[key] = parameter
        self._shown = False

    def _list_places(self) -> list[tuple[dict[str, Any], str, Any]]:
        self._sharded_places = [
            (d, k, m.sharded if m.hidden is None else m.hidden) for m in self.members for d, k in m.places
        ]
        self._unsharded_places = [(d, k, m.unsharded) for m in self.members for d, k in m.places]
        return self._unsharded_places

    def refresh(self) -> None:
        """Once per step: notice storage that the user replaced and `requires_grad` that they changed.

        Raises:
            ConfigError: a parameter was replaced by something that is not its shard.
        """
        for bucket, gradients in zip(self.buckets, self.gradients, strict=True):
            if not self._shown and bucket.replaced():
                if self.state is not State.SHARDED:
                    self.free()
                bucket.take_over()
                gradients.forget()
                self._unsharded_places = None
            if self._shown:  # since unshard()
                bucket.take_requires_grad()
            bucket.sync_requires_grad()
            gradients.release()

    def apply(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        """For `nn.Module._apply`: `fn` as it acts on this unit's sharded parameters, a whole shard at once.

        Moving or materialising a bucket then costs one new shard, not one tensor per parameter and a copy.
        """
        self.show_sharded()
        if self.state is not State.SHARDED:
            self.free()
        owner = {id(m.sharded): (b, m) for b in self.buckets for m in b.members}
        moved: dict[int, torch.Tensor] = {}

        def applied(tensor: torch.Tensor) -> torch.Tensor:
            found = owner.get(id(tensor))
            if found is None:
                return fn(tensor)
            bucket, member = found
            if id(bucket) not in moved:
                moved[id(bucket)] = fn(bucket.shard)
            return bucket.tensor_of(bucket.view_of(moved[id(bucket)], member.slot), member.slot)

        self._applied = moved
        # `_apply` swaps each parameter with a new tensor, attributes included: keep them to give them back.
        self._identities = {id(m.sharded): identity_of(m.sharded) for m in self.members}
        return applied

    def finish_apply(self) -> None:
        """Take the shards that `apply` made."""
        for bucket, gradients in zip(self.buckets, self.gradients, strict=True):
            moved = self._applied.get(id(bucket))
            if moved is not None:
                for member in bucket.members:
                    member.sharded.__dict__.update(self._identities[id(member.sharded)])
                bucket.rehome(moved)
                gradients.forget()
        self._applied, self._identities = {}, {}
        self._unsharded_places = None

    def give_up(self, parameter: torch.Tensor) -> tuple[list[tuple[dict[str, Any], str]], torch.Tensor]:
        """Take a parameter out of this unit, for a unit above it that shares it. Collective over the mesh.

        Returns:
            Where it was registered, and its whole value.
        """
        for index, bucket in enumerate(self.buckets):
            for member in bucket.members:
                if member.sharded is parameter:
                    full = bucket.full_of(member)
                    rest = bucket.without(member)
                    reduce_dtype = self.gradients[index].own_reduce_dtype
                    if rest is None:
                        del self.buckets[index], self.gradients[index]
                    else:
                        self.buckets[index] = rest
                        self.gradients[index] = Gradients(rest, reduce_dtype)
                    self._unsharded_places = None
                    return list(member.places), full
        raise PhaseError(
            f"unit {self.name!r} does not hold the parameter it should give up; this is a bug in Fullshard"
        )

    def add_places(self, parameter: torch.Tensor, places: Sequence[tuple[dict[str, Any], str]]) -> None:
        """Register a parameter of this unit in more places: modules elsewhere that are tied to it."""
        for member in self.members:
            if member.sharded is parameter:
                known = {(id(getattr(place, "module", place)), key) for place, key in member.places}
                for place in places:
                    if (id(getattr(place[0], "module", place[0])), place[1]) not in known:
                        member.places.append(place)
                        place[0][place[1]] = parameter
        self._unsharded_places = None

    # Gradients.

    def has_gradients(self) -> bool:
        """Whether gradients wait to be reduced: autograd's, or collected ones."""
        return any(g.state is GradState.PENDING or g.waiting() for g in self.gradients)

    def collect_gradients(self) -> None:
        """Move autograd's gradients into the reduction buffers (no communication)."""
        for gradients in self.gradients:
            if gradients.waiting():
                before = gradients.live_bytes
                gradients.collect()
                self.ledger.reducing += gradients.live_bytes - before
        self.ledger.note()
        if stream.listeners:
            self._emit("collect", sum(g.live_bytes for g in self.gradients))

    def issue_reduce(self, comm: Comm, factor: float | None, force_sum: bool) -> None:
        """Start reducing every bucket that has gradients."""
        nbytes = 0
        for gradients in self.gradients:
            if gradients.state is GradState.PENDING:
                world = gradients.bucket.axes.world
                scaling = Scaling.choose(world, gradients.reduce_dtype, factor, force_sum)
                if getattr(comm, "scales_itself", False):
                    scaling = Scaling(True)
                self._scratch_bytes += gradients.issue_reduce(comm, scaling)
                nbytes += gradients.buffer_bytes
        self.ledger.reducing += self._scratch_bytes
        self.ledger.note()
        if stream.listeners:
            self._emit("reduce", nbytes)

    def reduce_is_completed(self) -> bool:
        """Whether `finish_reduce` would neither wait nor communicate."""
        return all(g.is_completed() and g.bucket.axes.replicate is None for g in self.gradients)

    def finish_reduce(
        self, comm: Comm, all_reduce: bool, hook: Callable[[torch.Tensor], None] | None
    ) -> list[torch.Tensor]:
        """Wait, reduce over the replicate axis if there is one, and deliver into `.grad`.

        Args:
            all_reduce: False keeps the slice reduced over the shard axis only, to be added to the next one.
            hook: called with each reduced slice [shard_numel] before it is delivered.

        Returns:
            The sharded parameters whose `.grad` changed, and the optimizer views over them.
        """
        given: list[torch.Tensor] = []
        for gradients in self.gradients:
            if gradients.state is not GradState.REDUCING:
                continue
            live = gradients.live_bytes
            reduced = gradients.finish_shard_axis()
            self.ledger.reducing -= live
            axis = gradients.bucket.axes.replicate
            if axis is not None and not all_reduce:
                gradients.keep_partial()
                continue
            gradients.add_partial()
            if axis is not None:
                comm.all_reduce(axis, reduced, gradients.scaling.mean).wait()
                if stream.listeners:
                    self._emit("all_reduce", reduced.numel() * reduced.element_size())
            if hook is not None:
                hook(reduced)
            given += [member.sharded for member in gradients.deliver()]
            given += [view.tensor for view in gradients.views if view.tensor is not None and view.has_gradient]
        self.ledger.reducing -= self._scratch_bytes
        self._scratch_bytes = 0
        if stream.listeners:
            self._emit("reduced", sum(g.buffer_bytes for g in self.gradients))
        return given

    # Recovery.

    def reset(self) -> None:
        """After an exception: back to sharded, with every gradient in flight dropped."""
        for gradients in self.gradients:
            live = gradients.live_bytes
            gradients.discard()
            self.ledger.reducing -= live
        self.ledger.reducing -= self._scratch_bytes
        self._scratch_bytes = 0
        if self._shown:
            for bucket in self.buckets:
                bucket.take_requires_grad()
        self.show_sharded()
        self.drop_small()
        if self.state is not State.SHARDED:
            self.free()
