"""The whole bucket, from gather to free: its full buffers, and the unsharded parameters that are views of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, repeat
from operator import call, sub
from typing import Any

import torch
from torch import nn

from ..comm import Gathers, Packing, Pending, Several, gathers_of, packed_bytes
from ..dtypes import KNOWN, as_bits
from ..layout import Layout, columns_of, copies_out
from ..mesh import Axis
from ..torch_private.foreach import columns_out, copies, same_form
from ..torch_private.local_tensor import local_of, read_version, set_local
from ..torch_private.versions import Versions
from .changes import OWNER_KEY
from .member import WHOLE_KEY, Member, attributes_of
from .scratch import Scratch

_Address = Callable[[], int]
_Call = Callable[[], object]
PlannedGather = tuple[Gathers, Axis, list[torch.Tensor], list[torch.Tensor]]
"""Collectives, ranks, and by segment the buffer of all ranks' slices and this rank's slice."""


@dataclass(eq=False, slots=True)
class GatherPlan:
    """The calls of a gather, moment by moment: built once, run in every step.

    Attributes:
        comm: the collectives for which it was built; None for a plan of a single gather, which refers to its source.
        begins: allocate memory, and cast.
        gathers: each starts a collective, or several in one call of the group.
        planned: gathers that `seal` plans: over the same ranks together.
        fills: once the collectives are over, allocate the copied part and copy into it.
        ends: free memory that only the gather needed.
        frees: free everything, at any time.
        whole_bytes: allocated from `begins` to `frees`.
        passing_bytes: allocated from `begins` to `ends`.
        copied_bytes: allocated from `fills` to `frees`.
        addresses: each returns the current address of a piece of the gathered memory.
        watched, numbers: unsharded parameters, and their versions while nobody writes to them.
        pointers, bases, offsets: functions that return the addresses of a parameter and of its buffer, and their
            difference while nobody replaces the parameter's `.data`.
        intact: each checks the same for parameters not covered by these lists.
        varying: full buffers whose bytes and addresses change with each gather (those of extensions).
        starts: `begins`, then a call that starts all `gathers` and returns one `Pending`; see `seal`.
        completes: `fills`, then `ends`.
        issued_bytes, live_bytes: allocated while the gather is in flight, and once it is over.
        counters: tensors whose versions count in-place changes of the gathered shards.
        keeps: whether the memory of unsharded parameters may be allocated already.
        plain_bytes: those of `sent_bytes` that are known before the gather is issued.
    """

    comm: Any
    begins: list[_Call] = field(default_factory=list)
    gathers: list[Callable[[], Pending]] = field(default_factory=list)
    planned: list[PlannedGather] = field(default_factory=list)
    fills: list[_Call] = field(default_factory=list)
    ends: list[_Call] = field(default_factory=list)
    frees: list[_Call] = field(default_factory=list)
    whole_bytes: int = 0
    passing_bytes: int = 0
    copied_bytes: int = 0
    addresses: list[_Address] = field(default_factory=list)
    watched: list[torch.Tensor] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    pointers: list[_Address] = field(default_factory=list)
    bases: list[_Address] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    intact: list[Callable[[], bool]] = field(default_factory=list)
    varying: list[Any] = field(default_factory=list)
    starts: list[Callable[[], Any]] = field(default_factory=list)
    completes: list[_Call] = field(default_factory=list)
    issued_bytes: int = 0
    live_bytes: int = 0
    counters: list[torch.Tensor] = field(default_factory=list)
    keeps: bool = False
    plain_bytes: int = 0

    @property
    def sent_bytes(self) -> int:
        """Bytes of all ranks' slices together, as the gather sends them."""
        return self.plain_bytes + sum([full.nbytes for full in self.varying])

    def seal(self) -> None:
        """Complete the plan: join the calls of each moment, which a step then runs in C.

        A unit of several buckets (LoRA's frozen and trainable weights) is gathered in one call of the group, if its
        backend supports that.
        """
        joined: dict[tuple[int, int], PlannedGather] = {}
        for comm, axis, outs, parts in self.planned:
            _, _, all_outs, all_parts = joined.setdefault((id(comm), id(axis.group)), (comm, axis, [], []))
            all_outs += outs
            all_parts += parts
        self.gathers += chain.from_iterable([gathers_of(*together) for together in joined.values()])
        self.planned = []
        start = self.gathers[0] if len(self.gathers) == 1 else partial(Several, self.gathers)
        self.starts, self.completes = [*self.begins, start], [*self.fills, *self.ends]
        self.issued_bytes = self.whole_bytes + self.passing_bytes
        self.live_bytes = self.whole_bytes + self.copied_bytes

    def note_issued(self) -> None:
        """Update `issued_bytes` for the varying buffers, after the gather was started."""
        passing = sum([full.passing_bytes for full in self.varying])
        self.issued_bytes = self.whole_bytes + self.passing_bytes + passing

    def note_copied(self) -> None:
        """Update `live_bytes` for the varying buffers, after the gather is over."""
        copied = sum([full.copied_bytes for full in self.varying])
        self.live_bytes = self.whole_bytes + self.copied_bytes + copied

    def is_intact(self) -> bool:
        """Whether nobody has changed an unsharded parameter in place since the gather, or replaced its `.data`."""
        return (
            [*map(read_version, self.watched)] == self.numbers
            and [*map(sub, map(call, self.pointers), map(call, self.bases))] == self.offsets
            and all(map(call, self.intact))
        )

    def spend(self) -> None:
        """Drop the references of a single-gather plan to its source, once the gather is over."""
        self.begins, self.gathers, self.starts = [], [], []


class Full(ABC):
    """A bucket's full buffers. Made at the first gather; their memory comes and goes, their views stay.

    Attributes:
        nbytes: bytes of the last allocation.
    """

    nbytes: int

    @abstractmethod
    def plan(self, to: GatherPlan, comm: Gathers, axis: Axis, source: Any, gather_dtype: torch.dtype | None) -> None:
        """Add the gather of every rank's `source` over `axis` to a plan, all but its `frees`.

        Args:
            to: the plan.
            comm: collectives.
            axis: the ranks.
            source: this rank's part; read whenever a gather is issued.
            gather_dtype: the 8-bit dtype in which it is sent; None: the compute dtype.
        """

    @abstractmethod
    def frees(self, keep: bool) -> list[_Call]:
        """Functions that free all memory, at any time; with `keep` all but that of the unsharded parameters."""

    def cut(self, axis: Axis) -> torch.Tensor:
        """This rank's slice, among the ranks of `axis`, of the gathered buffers. Between `fills` and `ends`."""
        raise AssertionError("extensions are freed as a whole, see Unit.keep_among")

    @abstractmethod
    def differs(self, source: torch.Tensor) -> torch.Tensor:
        """[members], bool: whether this rank's part of the gathered values differs from the current `source`."""

    @abstractmethod
    def written(self) -> list[Member]:
        """Members whose unsharded parameter was changed in place since the gather, or whose `.data` was replaced.

        Restores replaced memory; the next gather, with a new plan, restores the values.
        """

    @property
    @abstractmethod
    def live_bytes(self) -> int:
        """Bytes that are allocated now, as reported by the storages."""


def show_as_parameter(member: Member, view: torch.Tensor) -> None:
    """Make `view` the unsharded parameter that the module computes with; reuses the Parameter object if it exists."""
    if member.split is not None:
        view = member.split.unsharded(view)
    if member.unsharded is None:
        member.trains = member.sharded.requires_grad
        unsharded = nn.Parameter(view, requires_grad=member.trains)
        unsharded.__dict__.update(
            {k: v for k, v in attributes_of(member.sharded).items() if k not in unsharded.__dict__}
        )
        unsharded.__dict__[OWNER_KEY] = member.sharded.__dict__.get(OWNER_KEY)
        unsharded.__dict__[WHOLE_KEY] = member.name
        member.unsharded = unsharded
    elif member.split is not None:
        set_local(member.unsharded, local_of(view))
    else:
        member.unsharded.data = view


def plain_part(member: Member) -> torch.Tensor:
    """The unsharded parameter, or the local tensor if it is a DTensor."""
    assert member.unsharded is not None
    return member.unsharded if member.split is None else local_of(member.unsharded)


@contextmanager
def _allocated(*buffers: Scratch) -> Iterator[None]:
    """A context in which these buffers have memory, which views of their parts require."""
    freed = [buffer for buffer in buffers if not buffer.allocated]
    for buffer in freed:
        buffer.allocate()
    yield
    for buffer in freed:
        buffer.free()


def _sized(scratch: Scratch | None, numel: int, dtype: torch.dtype, device: torch.device) -> Scratch:
    """`scratch` if it has this length and dtype, else a new buffer, freed."""
    if scratch is not None and (scratch.tensor.numel(), scratch.tensor.dtype) == (numel, dtype):
        return scratch
    scratch = Scratch(numel, dtype, device)
    scratch.free()
    return scratch


class PlainFull(Full):
    """The full buffers of a bucket of plain tensors.

    Ownership: only plans allocate and free memory; collectives write to it.

    Args:
        layout: the bucket's plan.
        members: its parameters; this makes their unsharded parameters.
        device, dtype: compute device and compute dtype.
    """

    def __init__(self, layout: Layout, members: Sequence[Member], device: torch.device, dtype: torch.dtype) -> None:
        self.layout, self.members, self.dtype = layout, members, dtype
        # Collectives write to `whole` and `staging`. `copied` is filled from `staging` and allocated only once the
        # gather is done, so that a prefetched unit takes its bytes once.
        self.whole = Scratch(layout.in_place_numel, dtype, device)  # from gather to free
        self.copied = Scratch(layout.full_numel - layout.in_place_numel, dtype, device)  # from its end to free
        self.staging = Scratch(layout.staging_numel, dtype, device)  # while gathering
        self.nbytes = self.whole.nbytes + self.copied.nbytes
        self._sent: Scratch | None = None  # [S], while gathering: the shard cast to compute dtype; or packed, in bytes
        self._received: Scratch | None = None  # while gathering: all ranks' packed shards, in bytes
        self._unpack: _Call = bool  # from there into `_outs`
        self._outs: list[torch.Tensor] = []  # per segment: [world * S], of `whole` or of `staging`
        for segment, at in zip(layout.segments, layout.staging_offsets, strict=True):
            scratch, start = (self.whole, segment.full_offset) if at is None else (self.staging, at)
            self._outs.append(scratch.tensor.narrow(0, start or 0, layout.world * segment.slice_numel))
        to, staging = self.copied.tensor, self.staging.tensor
        pairs = [
            (
                to.as_strided(p.sizes, p.parameter_strides, p.parameter_offset),
                staging.as_strided(p.sizes, p.gathered_strides, p.gathered_offset),
            )
            for p in copies_out(layout)
        ]
        if dtype not in KNOWN:  # multi-tensor copies exist for some dtypes only (on accelerators not for 8-bit floats)
            pairs = [(as_bits(to), as_bits(staging)) for to, staging in pairs]
        self._copies: list[_Call] = []
        for columns in columns_of(layout):
            world, widths = layout.world, columns.widths
            matrix = staging.narrow(0, columns.staging_offset, world * sum(widths)).view(world, -1)
            parts = [
                to.narrow(0, offset, world * width).view(world, width)
                for offset, width in zip(columns.offsets, widths, strict=True)
            ]
            self._copies.append(columns_out(matrix, widths, parts))
        for same in (True, False):
            group = [(to, staging) for to, staging in pairs if same_form(to, staging) is same]
            if group:
                self._copies.append(copies([to for to, _ in group], [staging for _, staging in group]))
        for member in members:
            buffer, offset = self._place_of(member)
            # `.data` gives the view a version counter of its own: a gather rewrites the same values, which must not
            # look to autograd like a change of a saved tensor.
            show_as_parameter(member, buffer.as_strided(member.slot.shape, member.slot.stride, offset).data)
        self._watch()
        for scratch in (self.whole, self.copied, self.staging):
            scratch.free()
        self._versions.spoil()

    def _watch(self) -> None:
        """Record the state that later shows whether users wrote to the unsharded parameters."""
        shown = [(member, plain_part(member)) for member in self.members]
        parallel = [(member, member.unsharded) for member in self.members if member.split is not None]
        self._watched = [member for member, _ in (*shown, *parallel)]
        self._versions = Versions([tensor for _, tensor in (*shown, *parallel) if tensor is not None])
        # Per buffer, the offsets of its non-empty parameters: their addresses minus the buffer's address.
        self._addresses: list[tuple[_Address, list[_Address], list[int]]] = []
        for buffer in (self.whole, self.copied):
            views = [t for m, t in shown if self._place_of(m)[0] is buffer.tensor and t.numel()]
            if views:
                offsets = [int(t.storage_offset()) * t.element_size() for t in views]
                self._addresses.append((buffer.storage.data_ptr, [t.data_ptr for t in views], offsets))

    def _place_of(self, member: Member) -> tuple[torch.Tensor, int]:
        """The buffer that contains a member while gathered, and its offset there."""
        slot = member.slot
        if self.layout.segments[slot.segment].full_offset is not None:
            return self.whole.tensor, slot.full_offset
        return self.copied.tensor, slot.full_offset - self.layout.in_place_numel

    @property
    def live_bytes(self) -> int:
        buffers = (self.whole, self.copied, self.staging, self._sent, self._received)
        return sum([buffer.storage.nbytes() for buffer in buffers if buffer is not None])

    def plan(self, to: GatherPlan, comm: Gathers, axis: Axis, source: Any, gather_dtype: torch.dtype | None) -> None:
        whole, copied, shard, outs = self.whole, self.copied, source, self._outs
        passing = [self.staging] if self.staging.nbytes else []
        prepares: _Call | None = None
        if gather_dtype is not None:
            lengths = self.layout.slice_lengths
            received, unpack = self._unpacking(gather_dtype, axis.size, lengths)
            passing.append(received)
            outs = [received.tensor]
            to.fills.append(unpack)
            if source.dtype != torch.uint8:  # otherwise the home has packed it
                sent = self._sent = _sized(self._sent, sum(map(packed_bytes, lengths)), torch.uint8, source.device)
                with _allocated(sent):
                    shard = sent.tensor
                    prepares = Packing(gather_dtype, source.view(1, -1).split(lengths, 1), shard.view(1, -1)).pack
        elif source.dtype != self.dtype:
            self._sent = _sized(self._sent, source.numel(), self.dtype, source.device)
            shard = self._sent.tensor
            prepares = partial(shard.copy_, source)
        if prepares is not None and self._sent is not None:
            passing.append(self._sent)
        to.passing_bytes += sum([buffer.nbytes for buffer in passing])
        to.begins += [buffer.take for buffer in passing]
        if whole.nbytes:
            to.begins.append(whole.allocate if to.keeps else whole.take)
            to.whole_bytes += whole.nbytes
        if prepares is not None:
            to.begins.append(prepares)
        parts = [shard]
        if len(outs) > 1:
            scale = shard.numel() // max(self.layout.shard_numel, 1)
            parts = [shard.narrow(0, s.shard_offset * scale, s.slice_numel * scale) for s in self.layout.segments]
        to.planned.append((comm, axis, outs, parts))
        if copied.nbytes:
            to.fills.append(copied.allocate if to.keeps else copied.take)
            to.copied_bytes += copied.nbytes
        to.fills += self._copies
        versions = self._versions
        to.watched += versions.tensors
        to.numbers += versions.numbers
        for base, addresses, offsets in self._addresses:
            to.pointers += addresses
            to.bases += [base] * len(addresses)
            to.offsets += offsets
        to.addresses += [buffer.storage.data_ptr for buffer in (whole, copied) if buffer.nbytes]
        to.ends += [versions.restore, *[buffer.free for buffer in passing]]

    def _unpacking(self, dtype: torch.dtype, world: int, lengths: Sequence[int]) -> tuple[Scratch, _Call]:
        """The buffer for all ranks' packed slices, and the function that unpacks it into `_outs`."""
        if self._received is None:
            self._received = Scratch(world * sum(map(packed_bytes, lengths)), torch.uint8, self.whole.tensor.device)
            with _allocated(self.whole, self.staging):
                floats = [out.view(world, -1) for out in self._outs]
                self._unpack = Packing(dtype, floats, self._received.tensor.view(world, -1)).unpack
            self._received.free()
        return self._received, self._unpack

    def frees(self, keep: bool) -> list[_Call]:
        buffers = [self.staging, self._sent, self._received, *(() if keep else (self.whole, self.copied))]
        return [*[buffer.free for buffer in buffers if buffer is not None and buffer.nbytes], self._versions.spoil]

    def cut(self, axis: Axis) -> torch.Tensor:
        return torch.cat([out.view(axis.size, -1)[axis.rank] for out in self._outs])

    def differs(self, source: torch.Tensor) -> torch.Tensor:
        differs = torch.zeros(len(self.members), dtype=torch.bool, device=source.device)
        for index, member in enumerate(self.members):
            part = member.part
            local = source.as_strided(part.shape, part.stride, source.storage_offset() + part.offset)
            gathered = local  # for an empty part: compared anyway, so that all ranks allocate the same
            if part.numel:
                shape, strides, at = self.layout.view_in_whole(member.slot, part)
                buffer, offset = self._place_of(member)
                gathered = buffer.as_strided(shape, strides, offset + at)
            differs[index] = (as_bits(gathered) != as_bits(local)).any()
        return differs

    def written(self) -> list[Member]:
        written = [self._watched[index] for index in self._versions.moved()]
        for base, addresses, offsets in self._addresses:
            if list(map(sub, map(call, addresses), repeat(base()))) != offsets:
                written += self._point_back()
        return written

    def _point_back(self) -> list[Member]:
        """Point unsharded parameters whose memory was replaced at the buffers again; returns their members."""
        replaced = []
        for member in self.members:
            buffer, offset = self._place_of(member)
            view = buffer.as_strided(member.slot.shape, member.slot.stride, offset).data
            part = plain_part(member)
            if part.numel() and part.data_ptr() != view.data_ptr():
                show_as_parameter(member, view)
                replaced.append(member)
        self._watch()
        return replaced
