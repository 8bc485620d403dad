"""The whole bucket, from gather to free: what it is gathered into, and the unsharded parameters that look at it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat
from operator import call, sub
from typing import Any, Protocol

import torch
from torch import nn

from ..comm import Gathers, Pending, Several, gathers_of
from ..dtypes import KNOWN, as_bits
from ..layout import Layout, columns_of, copies_out
from ..mesh import Axis
from ..torch_private.foreach import columns_out, copies, same_form
from ..torch_private.local_tensor import local_of, read_version, set_local
from ..torch_private.versions import HAS_VERSIONS, Versions
from .changes import OWNER_KEY
from .member import WHOLE_KEY, Member, attributes_of
from .scratch import Scratch

_Address = Callable[[], int]


class GatherPlan:
    """What a gather calls, moment by moment: made once, run in every step.

    Attributes:
        comm: the collectives that it was made for; None if it serves one gather only, whose source it holds.
        begins: take memory, and cast.
        gathers: each starts a collective.
        fills: once these are over: take memory for what is copied out of them, and copy.
        ends: give back what only the gather needed.
        frees: give back everything, at whatever time.
        whole_bytes: from `begins` to `frees`.
        passing_bytes: from `begins` to `ends`.
        copied_bytes: from `fills` to `frees`.
        addresses: each tells where a piece of the gathered memory lies now.
        watched, numbers: unsharded parameters, and their versions as long as nobody writes to them.
        pointers, bases, offsets: what tells where one lies, and its buffer; the difference as long as nobody gives it
            another `.data`.
        intact: each tells the same of what is not among these.
        varying: what is gathered whose bytes and addresses each gather tells anew.
        starts: `begins`, then what starts all of `gathers` and returns the one thing to wait for; see `seal`.
        completes: `fills`, then `ends`.
        issued_bytes, live_bytes: what is alive while the gather is in flight, and once it is over.
        counters: what counts changes in place of the shards that are gathered.
    """

    __slots__ = (
        *("addresses", "bases", "begins", "comm", "completes", "copied_bytes", "counters", "ends", "fills"),
        *("frees", "gathers", "intact", "issued_bytes", "live_bytes", "numbers", "offsets", "passing_bytes"),
        *("pointers", "starts", "varying", "watched", "whole_bytes"),
    )

    def __init__(self, comm: Any = None) -> None:
        self.comm = comm
        self.begins: list[Callable[[], object]] = []
        self.gathers: list[Callable[[], Pending]] = []
        self.fills: list[Callable[[], object]] = []
        self.ends: list[Callable[[], object]] = []
        self.frees: list[Callable[[], object]] = []
        self.whole_bytes = self.passing_bytes = self.copied_bytes = 0
        self.addresses: list[_Address] = []
        self.watched: list[torch.Tensor] = []
        self.numbers: list[int] = []
        self.pointers: list[_Address] = []
        self.bases: list[_Address] = []
        self.offsets: list[int] = []
        self.intact: list[Callable[[], bool]] = []
        self.varying: list[Varying] = []
        self.starts: list[Callable[[], Any]] = []
        self.completes: list[Callable[[], object]] = []
        self.issued_bytes = self.live_bytes = 0
        self.counters: list[torch.Tensor] = []

    def seal(self) -> None:
        """Everything was added: join what one moment calls, which a step then runs in C."""
        start = self.gathers[0] if len(self.gathers) == 1 else partial(Several, self.gathers)
        self.starts, self.completes = [*self.begins, start], [*self.fills, *self.ends]
        self.issued_bytes = self.whole_bytes + self.passing_bytes
        self.live_bytes = self.whole_bytes + self.copied_bytes

    def tell_issued(self) -> None:
        """The gather was started: of what varies, so many bytes are alive now."""
        passing = sum([full.passing_bytes for full in self.varying])
        self.issued_bytes = self.whole_bytes + self.passing_bytes + passing

    def tell_copied(self) -> None:
        """The gather is over: as `tell_issued`."""
        copied = sum([full.copied_bytes for full in self.varying])
        self.live_bytes = self.whole_bytes + self.copied_bytes + copied

    def is_intact(self) -> bool:
        """Whether nobody changed an unsharded parameter in place since the gather, or gave it another `.data`."""
        return (
            [*map(read_version, self.watched)] == self.numbers
            and [*map(sub, map(call, self.pointers), map(call, self.bases))] == self.offsets
            and all(map(call, self.intact))
        )

    def spend(self) -> None:
        """It was for one gather, which is over: let go of what that sent."""
        self.begins, self.gathers, self.starts = [], [], []


class Varying(Protocol):
    """What takes other memory in each gather.

    Attributes:
        passing_bytes, copied_bytes: of the last one; see `GatherPlan`.
        received_bytes: of it, from `fills` to `ends`, with what of it is among `copied_bytes`.
    """

    passing_bytes: int
    copied_bytes: int
    received_bytes: int

    def addresses(self) -> list[int]:
        """Where it lies now."""


class Full(Protocol):
    """What a bucket is gathered into. Made at the first gather; its memory comes and goes, its views stay."""

    def plan(self, to: GatherPlan, comm: Gathers, axis: Axis, source: Any, keeps: bool = False) -> None:
        """Add to a plan all but `frees`: gather `source` of every rank of `axis`.

        Args:
            to: the plan.
            comm: collectives.
            axis: the ranks.
            source: this rank's part; read whenever a gather is issued.
            keeps: the memory of unsharded parameters may be there already.
        """

    def frees(self, keep: bool = False) -> list[Callable[[], object]]:
        """What gives all memory back, at whatever time; `keep`: but that of the unsharded parameters."""

    def cut(self, axis: Axis) -> torch.Tensor:
        """This rank's slice of what was gathered, among the ranks of `axis`. Between `fills` and `ends`."""

    def differs(self, source: torch.Tensor) -> torch.Tensor:
        """[members], bool: whether this rank's part of what is gathered is not what `source` holds now."""

    def written(self) -> list[Member]:
        """Members whose unsharded parameter somebody changed in place since the gather, or gave another `.data`.

        That is put right as far as memory goes: the next gather, planned anew, gives it the right values.
        """

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

    Ownership: memory is taken and given back by plans alone; collectives write to it.

    Args:
        layout: the bucket's plan.
        members: its parameters; their unsharded parameters are made here.
        device, dtype: compute device and compute dtype.
    """

    def __init__(self, layout: Layout, members: Sequence[Member], device: torch.device, dtype: torch.dtype) -> None:
        self.layout, self.members, self.dtype = layout, members, dtype
        # `whole` is gathered into; `copied` is filled from `staging`, and takes memory only once the gather is done,
        # so that a prefetched unit holds its bytes once.
        self.whole = Scratch(layout.in_place_numel, dtype, device)  # from gather to free
        self.copied = Scratch(layout.full_numel - layout.in_place_numel, dtype, device)  # from its end to free
        self.staging = Scratch(layout.staging_numel, dtype, device)  # while gathering
        self._sent: Scratch | None = None  # [S], while gathering: the shard in the dtype that is gathered
        self._outs: list[torch.Tensor] = []  # per segment: [world * S], of `whole` or of `staging`
        at = 0
        for segment in layout.segments:
            numel = layout.world * segment.slice_numel
            if segment.full_offset is not None:
                self._outs.append(self.whole.tensor.narrow(0, segment.full_offset, numel))
            else:
                self._outs.append(self.staging.tensor.narrow(0, at, numel))
                at += numel
        to, come = self.copied.tensor, self.staging.tensor
        pairs = [
            (
                to.as_strided(p.sizes, p.parameter_strides, p.parameter_offset),
                come.as_strided(p.sizes, p.gathered_strides, p.gathered_offset),
            )
            for p in copies_out(layout)
        ]
        if dtype not in KNOWN:  # copies of many need one that accelerators have them for (no 8-bit float, say)
            pairs = [(as_bits(to), as_bits(come)) for to, come in pairs]
        self._copies: list[Callable[[], object]] = []
        for columns in columns_of(layout):
            world, widths = layout.world, columns.widths
            matrix = come.narrow(0, columns.staging_offset, world * sum(widths)).view(world, -1)
            parts = [
                to.narrow(0, offset, world * width).view(world, width)
                for offset, width in zip(columns.offsets, widths, strict=True)
            ]
            self._copies.append(columns_out(matrix, widths, parts))
        for same in (True, False):
            alike = [(to, come) for to, come in pairs if same_form(to, come) is same]
            if alike:
                self._copies.append(copies([to for to, _ in alike], [come for _, come in alike]))
        for member in members:
            buffer, offset = self._place_of(member)
            # `.data` gives the view a version counter of its own: a gather rewrites the same values, which must not
            # look to autograd like a change of what it saved.
            show_as_parameter(member, buffer.as_strided(member.slot.shape, member.slot.stride, offset).data)
        self._watch()
        for scratch in (self.whole, self.copied, self.staging):
            scratch.free()
        self._versions.spoil()

    def _watch(self) -> None:
        """Note what tells later whether users wrote to the unsharded parameters."""
        shown = [(member, plain_part(member)) for member in self.members]
        parallel = [(member, member.unsharded) for member in self.members if member.split is not None]
        self._watched = [member for member, _ in (*shown, *parallel)]
        self._versions = Versions([tensor for _, tensor in (*shown, *parallel) if tensor is not None])
        # Where the parameters that have elements lie in either buffer: their addresses, less the buffer's.
        self._addresses: list[tuple[_Address, list[_Address], list[int]]] = []
        for buffer in (self.whole, self.copied):
            mine = [t for m, t in shown if self._place_of(m)[0] is buffer.tensor and t.numel()]
            if mine:
                offsets = [int(t.storage_offset()) * t.element_size() for t in mine]
                self._addresses.append((buffer.storage.data_ptr, [t.data_ptr for t in mine], offsets))

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
        buffers = (self.whole, self.copied, self.staging, self._sent)
        return sum([buffer.storage.nbytes() for buffer in buffers if buffer is not None])

    def plan(self, to: GatherPlan, comm: Gathers, axis: Axis, source: torch.Tensor, keeps: bool = False) -> None:
        whole, copied, shard = self.whole, self.copied, source
        passing = [self.staging] if self.staging.nbytes else []
        if source.dtype != self.dtype:
            if self._sent is None or self._sent.tensor.numel() != source.numel():
                self._sent = Scratch(source.numel(), self.dtype, source.device)
                self._sent.free()
            shard = self._sent.tensor
            passing.append(self._sent)
        to.passing_bytes += sum([buffer.nbytes for buffer in passing])
        to.begins += [buffer.take for buffer in passing]
        if whole.nbytes:
            to.begins.append(whole.allocate if keeps else whole.take)
            to.whole_bytes += whole.nbytes
        if shard is not source:
            to.begins.append(partial(shard.copy_, source))
        parts = [shard]
        if len(self._outs) > 1:
            scale = shard.numel() // max(self.layout.shard_numel, 1)
            parts = [shard.narrow(0, s.shard_offset * scale, s.slice_numel * scale) for s in self.layout.segments]
        to.gathers += gathers_of(comm, axis, self._outs, parts)
        if copied.nbytes:
            to.fills.append(copied.allocate if keeps else copied.take)
            to.copied_bytes += copied.nbytes
        to.fills += self._copies
        versions = self._versions
        if HAS_VERSIONS:
            to.watched += versions.tensors
            to.numbers += versions.numbers
        else:  # the right ones are noted at each gather
            to.intact.append(versions.are_right)
        for base, addresses, offsets in self._addresses:
            to.pointers += addresses
            to.bases += [base] * len(addresses)
            to.offsets += offsets
        to.addresses += [buffer.storage.data_ptr for buffer in (whole, copied) if buffer.nbytes]
        to.ends += [versions.restore, *[buffer.free for buffer in passing]]

    def frees(self, keep: bool = False) -> list[Callable[[], object]]:
        buffers = [self.staging, self._sent, *(() if keep else (self.whole, self.copied))]
        return [*[buffer.free for buffer in buffers if buffer is not None and buffer.nbytes], self._versions.spoil]

    def cut(self, axis: Axis) -> torch.Tensor:
        return torch.cat([out.view(axis.size, -1)[axis.rank] for out in self._outs])

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
        for base, addresses, offsets in self._addresses:
            if list(map(sub, map(call, addresses), repeat(base()))) != offsets:
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
