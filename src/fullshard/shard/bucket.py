"""One bucket: a unit's parameters of one class in one contiguous buffer, sharded, gathered and freed together.

Parameters and gradients in each state:

    state      module attribute    values                      gradient
    sharded    sharded parameter   view of `shard`             `.grad`: view of the reduced slice, or None
    gathered   unsharded one       view of `full`              `.grad`: autograd's, taken at the unit's post-backward

The form decides how a sharded parameter shows (`forms/`). Gradients have their own buffer and state, in `gradients.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..comm import Comm, Gathers, apart_of, packed, packed_bytes, rounded, turns_on
from ..dtypes import fingerprint
from ..forms import (
    OWNER_KEY,
    Chunks,
    Draft,
    Form,
    Full,
    GatherPlan,
    Member,
    Untouched,
    all_hold,
    attributes_of,
    hooks_onto,
    take_grad_dtype,
)
from ..layout import Layout, Part
from ..mesh import Axis
from ..torch_private.fake_tensors import is_fake
from ..torch_private.local_tensor import plain_access, plain_tensors, read_requires_grad
from .messages import on_another_device
from .offload import Home
from .plan_bucket import BuildSettings, plan_bucket


class Bucket:
    """See the module's docstring.

    Ownership: `shard` is allocated here and lives as long as the bucket; the optimizer writes to it through the
    sharded parameters, gathers read it. `full` is memory on demand, allocated by `issue_gather`, released by `free`.

    Args:
        drafts: the parameters, in the order of `layout.slots`.
        layout: the plan.
        form: how the parameters show while sharded.
        settings: how the bucket was built.
        chunks: the shard with its values, if it is not plain; None: create one, and copy values in.

    Attributes:
        axes: the mesh.
        home: memory of the shard and its gradients now, if that is not the mesh's device.
        compute_dtype: dtype of gathered parameters.
        gather_dtype, scatter_dtype, all_reduce_dtype: see `MixedPrecisionPolicy`; None where not used.
        error_feedback: the same; False where nothing is reduced in 8 bits.
        turns: order the streams that use the bucket's memory.
        trains: whether any parameter required a gradient at the beginning of the last forward or backward.
        sharded, unsharded: the members' parameters; see `list_sharded`.
        followed: `requires_grad` by member when last followed; empty: not followed yet.
        untouched: checks that users have not replaced the shard or its parameters; None: not recorded yet.
    """

    def __init__(
        self, drafts: Sequence[Draft], layout: Layout, form: Form, settings: BuildSettings, chunks: Chunks | None = None
    ) -> None:
        first, axes, policy = drafts[0].original, settings.axes, settings.policy
        self.layout, self.form, self.settings, self.axes, self.home = layout, form, settings, axes, settings.home
        self.turns = turns_on(axes.device)
        self.storage_dtype = first.dtype
        self.own_compute_dtype = settings.compute_dtype(first.dtype)
        self.compute_dtype = self.own_compute_dtype or first.dtype
        packs = form.plain and first.dtype.is_floating_point and first.dtype.itemsize > 1
        shards, replicates = packs and axes.shard.size > 1, packs and axes.copies > 1
        self.gather_dtype = policy.gather_dtype if shards else None
        self.scatter_dtype = policy.scatter_dtype if shards else None
        self.all_reduce_dtype = policy.all_reduce_dtype if replicates else None
        self.error_feedback = policy.error_feedback and bool(self.scatter_dtype or self.all_reduce_dtype)
        device = first.device if first.is_meta else axes.device
        # [layout.shard_numel], storage dtype; padding is zero and stays out of every result. Of extensions: `Chunks`.
        self.shard: Any = self._new_shard(first.dtype, device) if chunks is None else chunks
        self.members = [self._admit(draft, i) for i, draft in enumerate(drafts)]
        self.trains = any([member.sharded.requires_grad for member in self.members])
        self.full: Full | None = None  # from the first gather on
        self.kept: torch.Tensor | None = None  # [world / n * shard_numel], compute dtype, after a reshard to n ranks
        self.untouched: Untouched | None = None
        self.sharded: list[nn.Parameter] = []
        self.unsharded: list[nn.Parameter] = []
        self.followed: list[bool] = []

    def _new_shard(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return zeros [shard_numel]: at home if there is one, else on `device`; always on meta if `device` is."""
        if self.home is None or device.type == "meta":
            return torch.zeros(self.layout.shard_numel, dtype=dtype, device=device)
        return self.home.empty(self.layout.shard_numel, dtype).zero_()

    def _admit(self, draft: Draft, index: int) -> Member:
        """Copy this rank's part of the original in, and create the sharded parameter."""
        slot, original = self.layout.slots[index], draft.original
        part = self.layout.part(slot, self.axes.shard.rank)
        local = _view(self.shard, part) if self.form.plain else self.shard.of(slot)
        if self.form.plain and not original.is_meta and part.numel:
            with torch.no_grad():
                self.form.take(slot, part, original, local)
        member = Member(slot, part, list(draft.places), original, local, draft.split)
        has_bits = not original.is_meta and not is_fake(original)
        if self.form.plain and has_bits and self.axes.world > 1:
            whole = original.to_local() if isinstance(original, DTensor) else original
            writes = 0 if original.is_inference() else original._version
            member.birth = fingerprint(whole), self.fingerprint(member), writes
        member.sharded = self.form.make(member, original)
        take_grad_dtype(member.sharded, original)
        return member

    def fingerprint(self, member: Member) -> torch.Tensor:
        """A checksum of this rank's part of a member: 0-dim int64, on the compute device."""
        local = self.part(self.shard, member)
        return fingerprint(local if self.home is None else self.home.fetch(local))

    # Values of members, in any buffer laid out as the shard. A "local" is this rank's part; see `Form`.

    def part(self, buffer: torch.Tensor | Chunks, member: Member) -> torch.Tensor:
        """Return a view of this rank's part of a member in a buffer laid out as the shard [shard_numel]."""
        return buffer.of(member.slot) if isinstance(buffer, Chunks) else _view(buffer, member.part)

    def shown(self, local: torch.Tensor, member: Member) -> torch.Tensor:
        """Return a local in the form that users see (DTensor, FlatShard, plain 1-D); shares memory."""
        return self.form.view(member, local)

    def local(self, shown: torch.Tensor, member: Member) -> torch.Tensor:
        """Return the local inside the tensor that users see; shares memory."""
        return self.form.local(member, shown)

    def whole(self, member: Member) -> torch.Tensor:
        """Return a parameter's whole value, over all kinds of parallelism. Collective, except on meta."""
        return self.form.whole(member, self.part(self.shard, member))

    def cut(self, whole: torch.Tensor, member: Member) -> torch.Tensor:
        """Return this rank's part of a whole value, as a local."""
        return self.form.cut(member, whole)

    # Memory.

    @property
    def device(self) -> torch.device:
        """The device on which it is gathered: the mesh's device; meta until it is materialised."""
        here: torch.device = self.shard.device
        return here if self.home is None or here.type == "meta" else self.axes.device

    @property
    def shard_tensors(self) -> list[torch.Tensor]:
        """The tensors that make up the shard: a single one, or a chunk of each extension."""
        return self.shard.tensors if isinstance(self.shard, Chunks) else [self.shard]

    def shard_after(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        """Return the shard with `fn` applied to its tensors."""
        return self.shard.replaced(map(fn, self.shard.tensors)) if isinstance(self.shard, Chunks) else fn(self.shard)

    @property
    def shard_device(self) -> torch.device:
        """The device of the shard; for a shard on meta, the device it will have once it has values."""
        here: torch.device = self.shard.device
        if here.type != "meta":
            return here
        return self.axes.device if self.home is None else self.home.device

    @property
    def flat_parameter(self) -> Any:
        """The `FlatParameter` that users see in place of the members; None if there is none."""
        return getattr(self.form, "flat", None)

    def new_slice(self, dtype: torch.dtype) -> torch.Tensor:
        """Allocate this rank's slice of gradients [shard_numel]; contents undefined."""
        if self.home is not None:
            return self.home.empty(self.layout.shard_numel, dtype)
        return torch.empty(self.layout.shard_numel, dtype=dtype, device=self.device)

    @property
    def sent_bytes(self) -> int:
        """Bytes of this rank's slice as a gather sends it; not for extensions."""
        if self.gather_dtype is not None:
            return sum(map(packed_bytes, self.layout.slice_lengths))
        return self.layout.shard_numel * self.compute_dtype.itemsize

    @property
    def gathered_bytes(self) -> int:
        """Bytes of all ranks' slices together, as a gather sends them."""
        if self.full is not None and not self.form.plain:
            return self.full.nbytes
        return self.layout.world * self.sent_bytes

    @property
    def full_bytes(self) -> int:
        """Bytes of the bucket while it is gathered."""
        return self.layout.full_numel * self.compute_dtype.itemsize

    @property
    def kept_bytes(self) -> int:
        """Bytes kept by a reshard to fewer ranks."""
        return 0 if self.kept is None else self.kept.numel() * self.kept.element_size()

    # Gather and free: planned here, called by the unit.

    def plan_gather(self, to: GatherPlan, comm: Comm, kept_axis: Axis | None, apart: bool, unit: str) -> None:
        """Add this bucket's gather to a unit's plan: from the shard, or the slice kept by a reshard to fewer ranks.

        Args:
            to: the plan; it serves for a single gather if the source is created for that gather.
            comm: collectives.
            kept_axis: the ranks among which a reshard kept slices.
            apart: whether the user asked for the gather, possibly on this rank only.
            unit: the unit's name, for errors.
        """
        home, axis, source = self.home, self.axes.shard, self.shard
        gathers: Gathers = comm
        gather_dtype = self.gather_dtype
        if home is not None:
            home.begin(unit)
        with torch.inference_mode(False):  # these tensors must serve training later
            if self.full is None:
                if self.device != self.axes.device and self.device.type != "meta":
                    raise on_another_device(self.members[0].name, self.axes.device, self.device)
                self.followed = []
                self.full = self.form.full(self.members, self.device, self.compute_dtype)
            sent_bytes = self.gathered_bytes if self.form.plain else 0
            if self.kept is not None and kept_axis is not None:
                sent_bytes = kept_axis.size * self.kept_bytes
                axis, source, to.comm, gather_dtype = kept_axis, self.kept, None, None  # kept as unpacked
            elif home is not None:
                gathers = home.gathering(comm)
                if self.form.plain:
                    source, to.comm = home.to_device([source], self._as_sent), None
                    to.passing_bytes += source.numel() * source.element_size()
                else:
                    source = source.copied_by(home.to_device)
            to.plain_bytes += sent_bytes
            over = apart_of(axis, comm) if apart else axis
            self.full.plan(to, gathers, over, source, gather_dtype)

    def _as_sent(self, shard: torch.Tensor) -> torch.Tensor:
        """The shard, which is on the compute device, as gathers send it."""
        if self.gather_dtype is None:
            return shard.to(self.compute_dtype)
        return packed(shard, self.layout.slice_lengths, self.gather_dtype)

    def _source(self) -> Any:
        """Return the shard's values as the gather delivers them, on the compute device and in the compute dtype."""
        shard: Any = self.shard
        if not self.form.plain:
            return shard
        if self.home is not None:
            shard = self.home.fetch(shard)
        if self.gather_dtype is not None:
            return rounded(shard, self.layout.slice_lengths, self.gather_dtype, self.compute_dtype)
        return shard.to(self.compute_dtype)

    def drop_plans(self) -> None:
        """Drop the plans: the shard, the parameters, or their places have changed."""
        self.untouched = None
        self.sharded, self.unsharded, self.followed = [], [], []

    def list_sharded(self) -> list[nn.Parameter]:
        """List the members' sharded parameters in `sharded`, until `drop_plans`, and return it. Try `sharded` first."""
        self.sharded = [member.sharded for member in self.members]
        return self.sharded

    def list_unsharded(self) -> list[nn.Parameter]:
        """Like `list_sharded`, for unsharded parameters; empty before the first gather."""
        unsharded = [member.unsharded for member in self.members if member.unsharded is not None]
        self.unsharded = unsharded if len(unsharded) == len(self.members) else []
        return self.unsharded

    def counters(self) -> list[torch.Tensor]:
        """Return the tensors whose version counters register changes of the shard, as far as PyTorch counts them."""
        return [*self.shard_tensors, *self.form.counters(self.members)]

    def drop_kept(self) -> None:
        """Release the slice kept by a reshard to fewer ranks."""
        if self.kept is not None:
            self.turns.take()
            self.kept = None
            self.turns.give()

    def differs(self) -> torch.Tensor:
        """Return, for each member, whether the gathered values differ from this rank's shard: [members], bool."""
        if self.full is None:
            return torch.zeros(len(self.members), dtype=torch.bool, device=self.device)
        self.turns.take()
        return self.full.differs(self._source())

    def checksum(self) -> int:
        """Return the sum of the shard's bytes read as 64-bit integers; 0 if the shard is not plain."""
        if not self.form.plain or not self.shard.numel():
            return 0
        return int(self.shard.view(torch.uint8)[: self.shard.nbytes // 8 * 8].view(torch.int64).sum())

    def compute_in(self, dtype: torch.dtype | None) -> None:
        """Gather in `dtype` from now on; None: in the storage dtype. The bucket must be sharded."""
        self.own_compute_dtype, self.compute_dtype = dtype, dtype or self.storage_dtype
        self.forget_buffers()

    def forget_buffers(self) -> None:
        """Drop `full` and the unsharded parameters; the next gather creates them anew (in a different dtype, say)."""
        self.drop_kept()
        self.drop_plans()
        self.full = None
        for member in self.members:
            member.unsharded = None

    # Storage that users replaced, and members that leave.

    def replaced(self) -> bool:
        """Whether a sharded parameter or its storage is not the one this bucket created. About 0.1 us per parameter."""
        if self.untouched is None:
            self.untouched = self.form.untouched(self.members, self.shard)
        return not self.untouched.holds()

    @torch.inference_mode(False)  # the shard must serve training later, and counts its versions
    def take_over(self, runs: Sequence[tuple[int, torch.Tensor]] = ()) -> bool:
        """Copy replaced storage into a new shard, or refuse it and change nothing.

        Args:
            runs: replaced runs of the shard: first element, and values.

        Returns:
            Whether the same parameters show the new shard, in the same dtype on the same device: gradients still fit.

        Raises:
            ConfigError: see `Form.adopt`.
        """
        before = [member.sharded for member in self.members]
        parts = self.form.adopt(self.members)
        alike = False
        if not self.form.plain:
            self.rehome(self.shard.replaced(parts))
        else:
            shard = self._new_shard(parts[0].dtype, parts[0].device)
            for member, local in zip(self.members, parts, strict=True):
                if not local.is_meta:
                    _view(shard, member.part).copy_(local.detach())
            for offset, values in runs:
                shard.narrow(0, offset, values.numel()).copy_(values.detach())
            alike = (shard.dtype, shard.device) == (self.shard.dtype, self.shard.device)
            alike = alike and all(m.sharded is previous for m, previous in zip(self.members, before, strict=True))
            if alike:
                self.shard = shard
                self.drop_kept()
                self.form.point(self.members, shard)
            else:
                self.rehome(shard)
        for member in self.members:
            for place in member.places:
                place.show(member.shown)
        return alike

    def rehome(self, shard: Any) -> None:
        """Make `shard` (same length, any dtype or device) this bucket's shard; it already contains the values."""
        self.storage_dtype = shard.dtype
        self.compute_dtype = self.own_compute_dtype or shard.dtype
        if self.home is not None and not shard.is_meta:
            shard = self._at_home(shard, self.home)
        if self.form.plain and not shard.is_meta:
            self._zero_padding(shard)
        self.shard = shard
        self.forget_buffers()
        self.form.point(self.members, shard)
        for member in self.members:
            take_grad_dtype(member.sharded)

    @torch.no_grad()
    def _at_home(self, shard: Any, home: Home) -> Any:
        """A shard in memory of its home: itself if it is there."""
        if isinstance(shard, Chunks):
            if all([home.holds(plain) for tensor in shard.tensors for plain in plain_tensors(tensor)]):
                return shard
            return shard.replaced(map(home.keep, shard.tensors))
        return shard if home.holds(shard) else home.keep(shard)

    @torch.no_grad()
    def _zero_padding(self, shard: torch.Tensor) -> None:
        """Zero the elements of no parameter: `to_empty` leaves them undefined, and packing looks at whole blocks."""
        end = 0
        for begin, numel in (*sorted((m.part.offset, m.part.numel) for m in self.members), (shard.numel(), 0)):
            if begin > end:
                shard.narrow(0, end, begin - end).zero_()
            end = max(end, begin + numel)

    def copy_of_shard(self) -> Any:
        """Return a copy of the shard, in memory of the same kind."""
        if self.home is None or self.shard.is_meta:
            return self.shard.clone()
        return self.shard_after(self.home.keep)

    def without(self, leaving: Member) -> Bucket | None:
        """Return a bucket of all members but `leaving`; None if that is all. Collective, only for ties across units."""
        staying = [member for member in self.members if member is not leaving]
        if not staying:
            return None
        layout, form = plan_bucket([member.slot.spec for member in staying], self.storage_dtype, self.settings)
        form.apart = self.form.apart  # offloaded since it was planned
        # When a parameter leaves, runs of a flat layout move: copy values through whole tensors.
        drafts = [
            Draft(m.name, nn.Parameter(self.whole(m), requires_grad=m.sharded.requires_grad), m.places) for m in staying
        ]
        policy = replace(self.settings.policy, param_dtype=self.own_compute_dtype)
        rest = Bucket(drafts, layout, form, replace(self.settings, home=self.home, policy=policy))
        for old, new in zip(staying, rest.members, strict=True):
            new.sharded.__dict__.update(attributes_of(old.sharded))
            take_grad_dtype(new.sharded, old.sharded)
            new.sharded.__dict__[OWNER_KEY] = old.sharded.__dict__.get(OWNER_KEY)
            hooks_onto(new.sharded, old.sharded)
            form.succeed(old, new)
            for place in new.places:
                place.show(new.sharded)
        return rest

    def follow_requires_grad(self) -> None:
        """Let the unsharded parameters follow the `requires_grad` that the user set on the sharded ones."""
        if self.form.follows:
            self.form.follow(self.members)
        with plain_access():
            flags = list(map(read_requires_grad, self.sharded or self.list_sharded()))
        if flags == self.followed:
            return
        self.followed, self.trains = flags, True in flags
        for member, trains in zip(self.members, flags, strict=True):
            if member.trains is not trains and member.unsharded is not None:
                member.trains = trains
                member.unsharded.requires_grad_(trains)

    def take_requires_grad(self) -> None:
        """Let the sharded parameters follow the `requires_grad` that users set on unsharded ones shown by modules."""
        self.followed = []
        for member in self.members:
            if member.unsharded is not None and member.unsharded.requires_grad != member.trains:
                member.trains = member.unsharded.requires_grad
                member.sharded.requires_grad_(member.trains)


def _view(buffer: torch.Tensor, part: Part) -> torch.Tensor:
    return buffer.as_strided(part.shape, part.stride, buffer.storage_offset() + part.offset)


_UNTOUCHED = attrgetter("untouched")


def share_over(bucket: Bucket, ranks: int) -> float:
    """A rank's elements if the bucket were split over so many ranks, padding included, over those that it has."""
    axes = bucket.axes
    shard = replace(axes.shard, size=ranks, ranks=tuple(range(ranks)))
    settings = replace(bucket.settings, axes=replace(axes, shard=shard))
    layout, _ = plan_bucket([member.slot.spec for member in bucket.members], bucket.storage_dtype, settings)
    return float(layout.shard_numel / max(bucket.layout.shard_numel, 1))


def none_replaced(buckets: Sequence[Bucket]) -> bool:
    """Whether users replaced no sharded parameter, and no storage, of these. Compared together, in C."""
    untouched = [*map(_UNTOUCHED, buckets)]
    return None not in untouched and all_hold(untouched)
