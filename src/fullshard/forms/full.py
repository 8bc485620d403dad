"""The whole bucket, from gather to free: what it is gathered into, and the unsharded parameters that look at it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from ..comm import Gathers, Pending, gather_segments, wait_all
from ..dtypes import KNOWN, as_bits
from ..layout import Layout, copies_out
from ..mesh import Axis
from ..torch_private.foreach import copy_all, same_form
from ..torch_private.local_tensor import local_of, set_local
from ..torch_private.versions import Versions
from .changes import OWNER_KEY
from .member import WHOLE_KEY, Member, attributes_of
from .scratch import Scratch


class Full(Protocol):
    """What a bucket is gathered into. Made at the first gather; its memory comes and goes, its views stay.

    A gather that fails, because memory runs out, leaves nothing allocated and nothing in flight.
    """

    def issue(self, comm: Gathers, axis: Axis, source: torch.Tensor) -> tuple[int, int]:
        """Allocate, and start gathering `source` of every rank of `axis`.

        Returns:
            Bytes that are allocated until `free`, and bytes until `finish`.
        """

    def finish(self) -> int:
        """Wait, and make the unsharded parameters whole. Returns bytes allocated from now on until `free`, besides."""

    def cut(self, axis: Axis) -> torch.Tensor:
        """This rank's slice of what was just gathered, among the ranks of `axis`. Between `finish` and `settle`."""

    def settle(self) -> None:
        """Give back what only the gather needed."""

    def free(self, keep: bool = False) -> None:
        """Wait for what is in flight and give all memory back; `keep`: but that of the unsharded parameters."""

    def differs(self, source: torch.Tensor) -> torch.Tensor:
        """[members], bool: whether this rank's part of what is gathered is not what `source` holds now."""

    def written(self) -> list[Member]:
        """Members whose unsharded parameter somebody changed in place since the gather, or gave another `.data`.

        That is put right as far as memory goes: the next gather gives it the right values.
        """

    def addresses(self) -> list[int]:
        """Where the gathered memory lies now."""

    @property
    def nbytes(self) -> int:
        """Bytes of what was allocated last."""

    @property
    def live_bytes(self) -> int:
        """Bytes that are allocated now, from the storages themselves."""


def show_as_parameter(member: Member, view: torch.Tensor) -> None:
    """Make `view` what the module computes with: the unsharded parameter, the same object as before if there is one."""
    if member.split is not None:
        view = member.split.unsharded(view)
    if member.unsharded is None:
        member.trains = member.sharded.requires_grad
        made = nn.Parameter(view, requires_grad=member.trains)
        made.__dict__.update({k: v for k, v in attributes_of(member.sharded).items() if k not in made.__dict__})
        made.__dict__[OWNER_KEY] = member.sharded.__dict__.get(OWNER_KEY)
        made.__dict__[WHOLE_KEY] = member.name
        member.unsharded = made
    elif member.split is not None:
        set_local(member.unsharded, local_of(view))
    else:
        member.unsharded.data = view


def plain_part(member: Member) -> torch.Tensor:
    """The unsharded parameter, or the tensor inside if it is a DTensor."""
    assert member.unsharded is not None
    return member.unsharded if member.split is None else local_of(member.unsharded)


class PlainFull:
    """The whole of a bucket of plain tensors.

    Ownership: allocated by `issue` and `finish`, written by collectives, released by `settle` (staging) and `free`.

    Args:
        layout: the bucket's plan.
        members: its parameters; their unsharded parameters are made here.
        device, dtype: compute device and compute dtype.
    """

    def __init__(self, layout: Layout, members: Sequence[Member], device: torch.device, dtype: torch.dtype) -> None:
        self.layout, self.members = layout, members
        # `whole` is gathered into; `copied` is filled from `staging`, and takes memory only once the gather is done,
        # so that a prefetched unit holds its bytes once.
        self.whole = Scratch(layout.in_place_numel, dtype, device)  # from gather to free
        self.copied = Scratch(layout.full_numel - layout.in_place_numel, dtype, device)  # from its end to free
        self.staging = Scratch(layout.staging_numel, dtype, device)  # while gathering
        self._buffers = [buffer for buffer in (self.whole, self.copied, self.staging) if buffer.nbytes]
        self._outs: list[torch.Tensor] = []  # per segment: [world * S], of `whole` or of `staging`
        at = 0
        for segment in layout.segments:
            numel = layout.world * segment.slice_numel
            if segment.full_offset is not None:
                self._outs.append(self.whole.tensor.narrow(0, segment.full_offset, numel))
            else:
                self._outs.append(self.staging.tensor.narrow(0, at, numel))
                at += numel
        copies, to, come = copies_out(layout), self.copied.tensor, self.staging.tensor
        pairs = [
            (
                to.as_strided(p.sizes, p.parameter_strides, p.parameter_offset),
                come.as_strided(p.sizes, p.gathered_strides, p.gathered_offset),
            )
            for p in copies
        ]
        if dtype not in KNOWN:  # copies of many need one that accelerators have them for (no 8-bit float, say)
            pairs = [(as_bits(to), as_bits(come)) for to, come in pairs]
        self._copies = [
            ([a for a, b in pairs if same_form(a, b) is same], [b for a, b in pairs if same_form(a, b) is same])
            for same in (True, False)
        ]
        self._pending: list[Pending] = []
        for member in members:
            buffer, offset = self._place_of(member)
            # `.data` gives the view a version counter of its own: a gather rewrites the same values, which must not
            # look to autograd like a change of what it saved.
            show_as_parameter(member, buffer.as_strided(member.slot.shape, member.slot.stride, offset).data)
        self._watch()
        self.free()

    def _watch(self) -> None:
        """Note what tells later whether users wrote to the unsharded parameters."""
        shown = [(member, plain_part(member)) for member in self.members]
        parallel = [(member, member.unsharded) for member in self.members if member.split is not None]
        self._watched = [member for member, _ in (*shown, *parallel)]
        self._versions = Versions([tensor for _, tensor in (*shown, *parallel) if tensor is not None])
        # Where the parameters that have elements lie in either buffer: their addresses, less the buffer's.
        self._addresses: list[tuple[Scratch, list[torch.Tensor], list[int]]] = []
        for buffer in (self.whole, self.copied):
            mine = [t for m, t in shown if self._place_of(m)[0] is buffer.tensor and t.numel()]
            if mine:
                self._addresses.append((buffer, mine, [int(t.storage_offset()) * t.element_size() for t in mine]))

    def _place_of(self, member: Member) -> tuple[torch.Tensor, int]:
        """The buffer that holds a member while gathered, and its offset there."""
        slot = member.slot
        if self.layout.segments[slot.segment].full_offset is not None:
            return self.whole.tensor, slot.full_offset
        return self.copied.tensor, slot.full_offset - self.layout.in_place_numel

    @property
    def nbytes(self) -> int:
        return self.whole.nbytes + self.copied.nbytes

    @property
    def live_bytes(self) -> int:
        return sum(one.storage.nbytes() for one in (self.whole, self.copied, self.staging))

    def issue(self, comm: Gathers, axis: Axis, source: torch.Tensor) -> tuple[int, int]:
        try:
            for buffer in self._buffers:
                if buffer is not self.copied:
                    buffer.allocate()
            if len(self._outs) == 1:
                self._pending.append(comm.gather(axis, self._outs[0], source))
            else:
                scale = source.numel() // max(self.layout.shard_numel, 1)
                mine = [source.narrow(0, s.shard_offset * scale, s.slice_numel * scale) for s in self.layout.segments]
                gather_segments(comm, axis, self._outs, mine, self._pending)
        except BaseException:
            self.free()
            raise
        return self.whole.nbytes, self.staging.nbytes

    def finish(self) -> int:
        try:
            if self._pending:
                wait_all(self._pending)
            if self.copied.nbytes:
                self.copied.allocate()
                for to, come in self._copies:
                    if to:
                        copy_all(to, come)
        except BaseException:
            self.free()
            raise
        self._versions.restore()
        return self.copied.nbytes

    def cut(self, axis: Axis) -> torch.Tensor:
        return torch.cat([out.view(axis.size, -1)[axis.rank] for out in self._outs])

    def settle(self) -> None:
        self.staging.free()

    def free(self, keep: bool = False) -> None:
        try:
            if self._pending:
                wait_all(self._pending)
        finally:
            for buffer in self._buffers:
                if not keep or buffer is self.staging:
                    buffer.free()
            self._versions.spoil()

    def addresses(self) -> list[int]:
        return [self.whole.storage.data_ptr(), self.copied.storage.data_ptr()]

    def differs(self, source: torch.Tensor) -> torch.Tensor:
        found = torch.zeros(len(self.members), dtype=torch.bool, device=source.device)
        for index, member in enumerate(self.members):
            part = member.part
            mine = source.as_strided(part.shape, part.stride, source.storage_offset() + part.offset)
            held = mine  # nothing is held of it: compared all the same, so that all ranks allocate as much
            if part.numel:
                shape, strides, at = self.layout.held(member.slot, part)
                buffer, offset = self._place_of(member)
                held = buffer.as_strided(shape, strides, offset + at)
            found[index] = (as_bits(held) != as_bits(mine)).any()
        return found

    def written(self) -> list[Member]:
        written = [self._watched[index] for index in self._versions.moved()]
        for buffer, tensors, offsets in self._addresses:
            base = buffer.storage.data_ptr()
            if [tensor.data_ptr() - base for tensor in tensors] != offsets:
                written += self._point_back()
        return written

    def _point_back(self) -> list[Member]:
        """Make unsharded parameters that were given other memory views of the buffers again; returns their members."""
        astray = []
        for member in self.members:
            buffer, offset = self._place_of(member)
            view = buffer.as_strided(member.slot.shape, member.slot.stride, offset).data
            part = plain_part(member)
            if part.numel() and part.data_ptr() != view.data_ptr():
                show_as_parameter(member, view)
                astray.append(member)
        self._watch()
        return astray
