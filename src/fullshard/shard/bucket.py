"""One bucket: a unit's parameters of one class in one contiguous buffer, sharded, gathered and freed together.

What `parameter` and `grad` mean in every state:

    state      module attribute    values                      gradient
    sharded    sharded parameter   view of `shard`             `.grad`: view of the reduced slice, or None
    gathered   unsharded one       view of `full`              `.grad`: autograd's, taken at the unit's post-backward

Gradients have a bucket and a state of their own, in `gradients.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..comm import Comm, Pending
from ..layout import Layout, ParameterSpec, Slot, copies_out
from ..mesh import Axis, MeshAxes
from ..torch_private.foreach import copy_all
from .flat_shard import FlatShard, Run
from .member import Draft, Member
from .offload import Home
from .parameter import (
    OWNER_KEY,
    RowShard,
    attributes_of,
    identity_of,
    local_of,
    part_view,
    rows_parameter,
    rows_tensor,
    set_local,
)
from .replacement import check_meta, check_replacement
from .scratch import Scratch
from .staleness import stamp
from .tensor_parallel import local_part


class Bucket:
    """See the module's docstring.

    Ownership: `shard` is allocated here and lives as long as the bucket; the optimizer writes to it through the
    sharded parameters, gathers read it. `full` and `staging` are storage on demand, allocated by `issue_gather`,
    written by collectives, released by `free` and `finish_gather`.

    Class attributes:
        keeps_originals: whether original Parameter objects become the sharded ones.
        plain: whether `shard` is one plain 1-D tensor.
        gives_empty_gradients: whether a parameter of which this rank holds nothing gets an (empty) `.grad`.

    Args:
        drafts: the parameters, in the order of `layout.slots`.
        layout: the plan.
        axes: the mesh.
        compute_dtype: dtype of `full`; None for the storage dtype.
        plan: makes the layout of any of these parameters.
        home: memory of the shard and its gradients, if that is not the mesh's device.
    """

    plain = True
    keeps_originals = False
    gives_empty_gradients = True

    def __init__(
        self,
        drafts: Sequence[Draft],
        layout: Layout,
        axes: MeshAxes,
        compute_dtype: torch.dtype | None,
        plan: Callable[[Sequence[ParameterSpec]], Layout],
        home: Home | None = None,
    ) -> None:
        first = drafts[0].original
        self.layout, self.axes, self.plan, self.home = layout, axes, plan, home
        self.device = first.device if first.is_meta else axes.device
        self.storage_dtype = first.dtype
        self.own_compute_dtype = compute_dtype
        # [layout.shard_numel], storage dtype; padding is zero and stays out of every result.
        self.shard = self._new_shard(self.storage_dtype, self.device)
        self.parallel = {draft.name: draft.parallel for draft in drafts if draft.parallel is not None}
        self.members = [self._admit(draft, slot) for draft, slot in zip(drafts, layout.slots, strict=True)]
        # The full bucket, compute dtype. `full` is gathered into; `copied` is filled from `staging`, and takes memory
        # only once the gather is done, so that a prefetched unit holds its bytes once.
        self.full: Scratch | None = None  # [layout.in_place_numel], from gather to free
        self.copied: Scratch | None = None  # [layout.full_numel - layout.in_place_numel], from its end to free
        self.staging: Scratch | None = None  # [layout.staging_numel], compute dtype, while gathering
        self.small: torch.Tensor | None = None  # [world / n * shard_numel], after a reshard to n ranks
        self._cast: torch.Tensor | None = None  # [shard_numel], compute dtype, while gathering
        self.gathered_at = (-1, -1)  # the shard's stamp when it was last gathered
        self._pending: list[Pending] = []

    def _new_shard(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """[shard_numel] of zeros: at home if there is one, else on `device`; on meta in either case."""
        if self.home is None or device.type == "meta":
            return torch.zeros(self.layout.shard_numel, dtype=dtype, device=device)
        return self.home.empty(self.layout.shard_numel, dtype).zero_()

    def _admit(self, draft: Draft, slot: Slot) -> Member:
        """Copy this rank's part of the original in, and make the sharded parameter."""
        part = self.layout.part(slot, self.axes.shard.rank)
        local = part_view(self.shard, part)
        original = draft.original
        if not original.is_meta and part.numel:
            with torch.no_grad():
                if self.layout.kind == "flat":
                    memory = original.detach().permute(slot.spec.order).reshape(-1)
                    local.copy_(memory[part.start : part.start + part.numel])
                else:
                    local.copy_(local_part(original).narrow(slot.spec.dim, part.start, part.shape[slot.spec.dim]))
        attributes = {**attributes_of(original), "_fullshard_name": slot.name}
        sharded = self._sharded_parameter(local, slot, original.requires_grad, attributes)
        return Member(slot, list(draft.places), sharded, local_of(sharded))

    def _sharded_parameter(
        self, local: torch.Tensor, slot: Slot, requires_grad: bool, attributes: dict[str, Any]
    ) -> nn.Parameter:
        if self.layout.kind == "flat":
            parameter = nn.Parameter(self.tensor_of(local, slot), requires_grad=requires_grad)
            parameter.__dict__.update(attributes)
            return parameter
        return rows_parameter(self.tensor_of(local, slot), requires_grad, attributes)

    def tensor_of(self, local: torch.Tensor, slot: Slot) -> torch.Tensor:
        """`local`, shaped as this rank's part of `slot`, as a tensor of the whole parameter (not a Parameter)."""
        if self.layout.kind == "flat":
            return FlatShard(local, self._run_of(slot))
        parallel = self.parallel.get(slot.name)
        if parallel is not None:
            return parallel.sharded(local)
        return rows_tensor(local, slot, self.axes, apart=self.home is not None)

    def _run_of(self, slot: Slot) -> Run:
        return Run.of(slot, self.layout.segments[slot.segment].slice_numel, self.axes.shard)

    def full_of(self, member: Member) -> torch.Tensor:
        """A parameter's whole value; collective, except on meta."""
        parameter: Any = member.sharded
        if parameter.is_meta:
            return torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        whole: Any = parameter.detach()
        if self.home is not None and self.layout.kind == "rows":  # ranks talk on the device
            whole = rows_tensor(local_of(parameter).to(self.axes.device), member.slot, self.axes)
        full: torch.Tensor = whole.full_tensor()
        return full

    def whole_shape(self, member: Member) -> tuple[int, ...]:
        """The shape that the parameter has as a whole, over all kinds of parallelism."""
        parallel = self.parallel.get(member.slot.name)
        return member.slot.shape if parallel is None else tuple(parallel.shape)

    def keep_object(self, old: Member, new: Member) -> None:
        """`new`, of this bucket, holds what `old` of another one held."""
        old.sharded.__dict__["_fullshard_successor"] = new.sharded

    def flat_part(self, tensor: torch.Tensor, member: Member) -> torch.Tensor:
        """What `view_of` is to be filled with, from a tensor in the form of the sharded parameter."""
        return local_of(tensor)

    def view_of(self, buffer: torch.Tensor, slot: Slot) -> torch.Tensor:
        """This rank's part of `slot` in any buffer laid out as the shard."""
        return part_view(buffer, self.layout.part(slot, self.axes.shard.rank))

    def new_slice(self, dtype: torch.dtype) -> torch.Tensor:
        """Memory for this rank's slice of gradients [shard_numel]; contents undefined."""
        if self.home is not None:
            return self.home.empty(self.layout.shard_numel, dtype)
        return torch.empty_like(self.shard, dtype=dtype)

    def copy_of_shard(self) -> torch.Tensor:
        """The shard's values in memory of the same kind."""
        if self.home is None or self.shard.is_meta:
            return self.shard.clone()
        return self.home.empty(self.shard.numel(), self.shard.dtype).copy_(self.shard)

    def set_shard(self, shard: torch.Tensor) -> None:
        """Make `shard`, or a copy of it at home, this bucket's; buffers of the old one are dropped."""
        self.storage_dtype = shard.dtype
        if self.home is not None and not shard.is_meta and not self.home.holds(shard):
            shard = self.home.empty(shard.numel(), shard.dtype).copy_(shard)
        self.shard = shard
        self.device = shard.device if self.home is None or shard.is_meta else self.axes.device
        self.full = self.copied = self.staging = self.small = None

    @property
    def compute_dtype(self) -> torch.dtype:
        return self.own_compute_dtype or self.storage_dtype

    @property
    def gathered_bytes(self) -> int:
        """Bytes of all ranks' slices together, in the dtype they are gathered in."""
        return self.layout.gathered_numel * self.compute_dtype.itemsize

    @property
    def full_bytes(self) -> int:
        return self.layout.full_numel * self.compute_dtype.itemsize

    # Gather and free.

    def issue_gather(self, comm: Comm, small_axis: Axis | None) -> tuple[int, int]:
        """Allocate `full` and start its collectives, from the shard or from what a reshard to fewer ranks kept.

        Returns:
            Bytes that are allocated until `free`, and bytes until `finish_gather`.
        """
        if self.full is None:
            with torch.inference_mode(False):  # what is made here must serve training later
                self._make_buffers()
        assert self.full is not None and self.staging is not None
        self.full.allocate()
        if self.staging.nbytes:
            self.staging.allocate()
        axis, source = self.axes.shard, self.shard
        self.gathered_at = stamp(source)
        if self.small is not None and small_axis is not None:
            axis, source = small_axis, self.small
        elif self.home is not None:
            source = self._cast = self.home.to_device(self.shard, self.compute_dtype)
        elif self.compute_dtype != self.storage_dtype:
            source = self._cast = self.shard.to(self.compute_dtype)
        if len(self._outs) == 1:
            self._pending = [comm.gather(axis, self._outs[0], source)]
        else:
            scale = source.numel() // max(self.layout.shard_numel, 1)
            self._pending = [
                comm.gather(axis, out, source.narrow(0, s.shard_offset * scale, s.slice_numel * scale))
                for out, s in zip(self._outs, self.layout.segments, strict=True)
            ]
        cast = self._cast.numel() * self._cast.element_size() if self._cast is not None else 0
        return self.full.nbytes, self.staging.nbytes + cast

    def finish_gather(self, keep_small: Axis | None) -> int:
        """Wait, copy out what did not come out in place, and give the staging back.

        Args:
            keep_small: the axis that the unit will reshard to after forward: its slice is kept here and now.

        Returns:
            Bytes that are allocated from now until `free`, besides those of `issue_gather`.
        """
        for pending in self._pending:
            pending.wait()
        self._pending = []
        self._cast = None
        assert self.copied is not None and self.staging is not None
        if self.copied.nbytes:
            self.copied.allocate()
            copy_all(self._copy_out_to, self._copy_out_from)
        if keep_small is not None:
            parts = [out.view(keep_small.size, -1)[keep_small.rank] for out in self._outs]
            self.small = torch.cat(parts)
        if self.staging.nbytes:
            self.staging.free()
        return self.copied.nbytes

    def free(self) -> None:
        """Give the full bucket back. The unsharded parameters stay, without memory."""
        assert self.full is not None and self.copied is not None
        self.full.free()
        self.copied.free()

    def _make_buffers(self) -> None:
        """Make `full`, `staging` and all their views, and the unsharded parameters. Once, at the first gather."""
        layout, dtype = self.layout, self.compute_dtype
        self.full = Scratch(layout.in_place_numel, dtype, self.device)
        self.copied = Scratch(layout.full_numel - layout.in_place_numel, dtype, self.device)
        self.staging = Scratch(layout.staging_numel, dtype, self.device)
        self._outs: list[torch.Tensor] = []  # per segment: [world * S], of full or of staging
        at = 0
        for segment in layout.segments:
            numel = layout.world * segment.slice_numel
            if segment.full_offset is not None:
                self._outs.append(self.full.tensor.narrow(0, segment.full_offset, numel))
            else:
                self._outs.append(self.staging.tensor.narrow(0, at, numel))
                at += numel
        copies, to, come = copies_out(layout), self.copied.tensor, self.staging.tensor
        self._copy_out_to = [to.as_strided(p.sizes, p.parameter_strides, p.parameter_offset) for p in copies]
        self._copy_out_from = [come.as_strided(p.sizes, p.gathered_strides, p.gathered_offset) for p in copies]
        for member in self.members:
            self._make_unsharded(member)
        self.copied.free()

    def _home(self, slot: Slot) -> tuple[torch.Tensor, int]:
        """The buffer that holds `slot` while the unit is gathered, and its offset there."""
        assert self.full is not None and self.copied is not None
        if self.layout.segments[slot.segment].full_offset is not None:
            return self.full.tensor, slot.full_offset
        return self.copied.tensor, slot.full_offset - self.layout.in_place_numel

    def _make_unsharded(self, member: Member) -> None:
        slot = member.slot
        buffer, offset = self._home(slot)
        # `.data` gives the view a version counter of its own: a gather rewrites the same values, which must not
        # look to autograd like a change of what it saved.
        view = buffer.as_strided(slot.shape, slot.stride, offset).data
        if slot.name in self.parallel:
            view = self.parallel[slot.name].unsharded(view)
        if member.unsharded is None:
            member.trains = member.sharded.requires_grad
            member.unsharded = nn.Parameter(view, requires_grad=member.trains)
            member.unsharded.__dict__.update(attributes_of(member.sharded))
            member.unsharded.__dict__[OWNER_KEY] = member.sharded.__dict__.get(OWNER_KEY)
        elif slot.name in self.parallel:
            set_local(member.unsharded, local_of(view))
        else:
            member.unsharded.data = view

    def without(self, leaving: Member) -> Bucket | None:
        """A bucket of the other members; None if there are none. Collective, only for ties across units."""
        staying = [member for member in self.members if member is not leaving]
        if not staying:
            return None
        layout = self.plan([member.slot.spec for member in staying])
        # Runs of a flat layout move when a parameter leaves: the values pass through whole tensors.
        drafts = [
            Draft(m.name, nn.Parameter(self.full_of(m), requires_grad=m.sharded.requires_grad), m.places)
            for m in staying
        ]
        rest = type(self)(drafts, layout, self.axes, self.own_compute_dtype, self.plan, self.home)
        for old, new in zip(staying, rest.members, strict=True):
            new.sharded.__dict__.update(attributes_of(old.sharded))
            new.sharded.__dict__[OWNER_KEY] = old.sharded.__dict__.get(OWNER_KEY)
            rest.keep_object(old, new)
            for place, key in new.places:
                place[key] = new.sharded
        return rest

    def forget_buffers(self) -> None:
        """Make `full`, `staging` and the unsharded parameters anew at the next gather (of another dtype, say)."""
        self.full = self.copied = self.staging = self.small = None
        for member in self.members:
            member.unsharded = None

    # Storage that the user replaced.

    def rehome(self, shard: torch.Tensor) -> None:
        """Make `shard` (same length, any dtype or device) this bucket's shard; the values are already in it."""
        self.set_shard(shard)
        shard = self.shard
        for member in self.members:
            local = self.view_of(shard, member.slot)
            if local_of(member.sharded).data_ptr() != local.data_ptr() or shard.is_meta:
                set_local(member.sharded, local)
            if self.layout.kind == "rows":
                member.sharded.__class__ = RowShard  # type: ignore[assignment]
            member.sharded.__dict__["_fullshard_name"] = member.name
            member.local = local_of(member.sharded)
            member.unsharded = None

    def replaced(self) -> bool:
        """Whether a sharded parameter or its storage is not the one this bucket made. About 0.2 us a parameter."""
        for member in self.members:
            sharded = member.sharded
            if sharded._local_tensor is not member.local:  # type: ignore[attr-defined]
                return True
            for parameters, key in member.places:
                if parameters.get(key) is not sharded:
                    return True
        return False

    def take_over(self) -> None:
        """Copy replaced storage into the shard, or refuse.

        Raises:
            ConfigError: the replacement is not this parameter's shard: other shape, mesh, placement or kind.
        """
        for member in self.members:
            for parameters, key in member.places:
                found = parameters.get(key)
                if found is not member.sharded and found is not member.unsharded:
                    check_replacement(self, member, found)
                    assert isinstance(found, nn.Parameter)
                    found.__dict__.update(identity_of(member.sharded))
                    member.sharded = found
        locals_now = [local_of(member.sharded) for member in self.members]
        check_meta(self, locals_now)
        home = locals_now[0]
        shard = self._new_shard(home.dtype, home.device)
        for member, local in zip(self.members, locals_now, strict=True):
            view = self.view_of(shard, member.slot)
            if not local.is_meta:
                view.copy_(local.detach())
            for parameters, key in member.places:
                parameters[key] = member.sharded
        self.rehome(shard)

    def sync_requires_grad(self) -> None:
        """Let the unsharded parameters follow what the user set on the sharded ones since the last step."""
        for member in self.members:
            unsharded = member.unsharded
            if unsharded is not None and unsharded.requires_grad != member.sharded.requires_grad:
                member.trains = member.sharded.requires_grad
                unsharded.requires_grad_(member.trains)

    def take_requires_grad(self) -> None:
        """Let the sharded parameters follow what the user set on the unsharded ones, which modules showed."""
        for member in self.members:
            if member.unsharded is not None and member.unsharded.requires_grad != member.trains:
                member.trains = member.unsharded.requires_grad
                member.sharded.requires_grad_(member.trains)
