"""How a bucket's parameters lie in memory, and which rank owns which elements.

A bucket is gathered by one or more collectives, its **segments**. To each, every rank contributes a slice of equal
length S; the gathered segment is the concatenation of the slices:

    shard of rank 1                     gathered segment (world = 3)
    [ slice 0 | slice 1 | ... ]         [ rank 0: S | rank 1: S | rank 2: S ]
        |         |
      segment 0  segment 1

- **flat**: a single segment; parameters lie back to back in the *gathered* segment, cut anywhere. The gathered segment
  is the full bucket: no copy.
- **rows**: every parameter is cut along a dim as by `torch.chunk`; the *slice* contains a chunk of each. A parameter
  with a separate segment is contiguous after the gather (no copy); parameters that share a segment are rank-major after
  the gather, and are copied into place.

Everything is counted in elements. Pure: integers in, frozen plan out. Nothing here imports torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

ALIGN_BYTES = 16  # alignment that vectorized kernels and NCCL's fast paths require


@dataclass(frozen=True)
class ParameterSpec:
    """A parameter, before its place in the bucket is planned.

    Attributes:
        name: its qualified name, for errors.
        shape: its full shape.
        order: its dims from outermost to innermost in memory ((0, 1, ...) when contiguous; (0, 2, 3, 1) for a
            channels-last convolution). Layouts keep it.
        dim: the dim that `rows` cuts.
    """

    name: str
    shape: tuple[int, ...]
    order: tuple[int, ...]
    dim: int = 0

    def chunk_numel(self, world: int) -> int:
        """Elements of the largest chunk of rows of any rank."""
        rest = math.prod(self.shape[: self.dim]) * math.prod(self.shape[self.dim + 1 :])
        return -(-self.shape[self.dim] // world) * rest


def dense_strides(shape: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a gapless tensor of `shape` whose dims lie in memory in `order`, outermost first."""
    strides = [1] * len(shape)
    step = 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


@dataclass(frozen=True)
class Part:
    """A rank's part of a parameter, as a view of its shard.

    Attributes:
        offset: first element in the shard.
        shape: local shape; one-dimensional for flat layouts.
        stride: local strides.
        start: the part's first row (rows) or first element in memory order (flat) within the parameter.
    """

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class StridedCopy:
    """A strided copy between a parameter's memory in `full` and a gathered segment; same sizes on both sides.

    Attributes:
        sizes: extents of the copy.
        parameter_strides, parameter_offset: within the parameter's own memory (offset from its first element).
        gathered_strides, gathered_offset: within the gathered segment.
    """

    sizes: tuple[int, ...]
    parameter_strides: tuple[int, ...]
    parameter_offset: int
    gathered_strides: tuple[int, ...]
    gathered_offset: int


@dataclass(frozen=True)
class Segment:
    """A collective of a bucket.

    Attributes:
        shard_offset: the first element of this segment's slice in every rank's shard.
        slice_numel: S, the length of a rank's slice.
        full_offset: the first element of the gathered segment in the full bucket; None if its parameters are copied
            out of a staging buffer.
        in_columns: whether a single kernel copies all of them out: the full bucket has space for equal chunks of all
            ranks, for each parameter and for the padding at the end of the slices; see `columns_of`.
    """

    shard_offset: int
    slice_numel: int
    full_offset: int | None
    in_columns: bool = False


@dataclass(frozen=True)
class Slot:
    """Where a parameter lies in its bucket.

    Attributes:
        spec: the parameter.
        segment: index of its segment.
        offset: flat: first element within the gathered segment; rows: first element within each rank's slice.
        full_offset: first element in the full bucket.
    """

    spec: ParameterSpec
    segment: int
    offset: int
    full_offset: int

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spec.shape

    @cached_property
    def numel(self) -> int:
        return math.prod(self.spec.shape)

    @cached_property
    def stride(self) -> tuple[int, ...]:
        """Strides of the full parameter."""
        return dense_strides(self.spec.shape, self.spec.order)


@dataclass(frozen=True)
class Layout:
    """A bucket's plan: the same on every rank.

    Attributes:
        kind: "flat" or "rows".
        world: ranks on the shard axis.
        align: elements per 16 bytes; full offsets and slice lengths are multiples of it.
        slots: the parameters, in the order of the specs.
        segments: the collectives.
        full_numel: length of the full bucket.
        label: the name for users if it is not the kind: layouts that differ from flat only in where parameters lie
            ("owner", "blocks(row)") are flat to the engine.
        note: a decision of the planner that users may want to know; may be empty.

    The constructor asserts that parameters do not overlap, and that each lies within the full bucket, at a multiple of
    `align`.
    """

    kind: str
    world: int
    align: int
    slots: tuple[Slot, ...]
    segments: tuple[Segment, ...]
    full_numel: int
    label: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        spans = sorted((s.full_offset, s.full_offset + s.numel, s.name) for s in self.slots if s.numel)
        for (_, stop, first), (start, _, second) in pairwise(spans):
            assert start >= stop, f"parameters {first} and {second} overlap in the full bucket"
        if spans:
            _, stop, last = spans[-1]
            assert stop <= self.full_numel, f"parameter {last} ends at {stop}, full bucket at {self.full_numel}"
        for slot in self.slots:
            start = slot.full_offset
            assert start % self.align == 0, f"parameter {slot.name} begins at {start}, not a multiple of {self.align}"

    @property
    def name(self) -> str:
        """The name for users."""
        return self.label or self.kind

    @cached_property
    def shard_numel(self) -> int:
        """Length of every rank's shard, padding included."""
        return sum(segment.slice_numel for segment in self.segments)

    @cached_property
    def parameter_numel(self) -> int:
        """Elements of all parameters, without padding."""
        return sum(slot.numel for slot in self.slots)

    @cached_property
    def staging_numel(self) -> int:
        """Length of the staging buffer: all segments whose parameters are copied out."""
        return sum(self.world * s.slice_numel for s in self.segments if s.full_offset is None)

    @cached_property
    def staging_offsets(self) -> tuple[int | None, ...]:
        """By segment, its first element in the staging buffer; None if it is gathered in place."""
        offsets: list[int | None] = []
        base = 0
        for segment in self.segments:
            offsets.append(base if segment.full_offset is None else None)
            base += self.world * segment.slice_numel if segment.full_offset is None else 0
        return tuple(offsets)

    @cached_property
    def slice_lengths(self) -> list[int]:
        """By segment, the length of a rank's slice."""
        return [segment.slice_numel for segment in self.segments]

    @cached_property
    def in_place_numel(self) -> int:
        """Number of elements of the full bucket, from its start, gathered in place; the rest is copied from staging."""
        copied = [slot.full_offset for slot in self.slots if self.segments[slot.segment].full_offset is None]
        return min(copied, default=self.full_numel)

    @property
    def gathered_numel(self) -> int:
        """Elements of a gather over all ranks, padding included."""
        return self.world * self.shard_numel

    @cached_property
    def padding(self) -> tuple[tuple[int, int], ...]:
        """Runs (first element, length) that contain padding; elements count through all gathered segments.

        Exact for flat. A rows segment with any padding is listed whole: its padding is scattered over the ranks.
        """
        runs, base = [], 0
        for index, segment in enumerate(self.segments):
            slots = [slot for slot in self.slots if slot.segment == index]
            numel = self.world * segment.slice_numel
            if self.kind == "flat":
                at = 0
                for slot in sorted(slots, key=lambda slot: (slot.offset, slot.numel)):
                    runs.append((base + at, slot.offset - at))
                    at = slot.offset + slot.numel
                runs.append((base + at, numel - at))
            elif sum(slot.numel for slot in slots) != numel:
                runs.append((base, numel))
            base += numel
        return tuple(run for run in runs if run[1])

    def part(self, slot: Slot, rank: int) -> Part:
        """The part of `slot` that `rank` holds; for rows exactly the chunk of `torch.chunk`."""
        segment = self.segments[slot.segment]
        if self.kind == "flat":
            start, stop = run_on_rank(slot.offset, slot.numel, segment.slice_numel, rank)
            at = slot.offset + start - rank * segment.slice_numel if stop > start else 0
            return Part(segment.shard_offset + at, (stop - start,), (1,), start)
        rows, extent = _chunk(slot, self.world), slot.shape[slot.spec.dim]
        start, stop = min(rank * rows, extent), min((rank + 1) * rows, extent)
        shape = _with_extent(slot, stop - start)
        return Part(segment.shard_offset + slot.offset, shape, dense_strides(shape, slot.spec.order), start)

    def holders(self, slot: Slot) -> range:
        """The ranks that hold elements of `slot`."""
        if not slot.numel:
            return range(0)
        if self.kind == "flat":
            length = self.segments[slot.segment].slice_numel
            return range(slot.offset // length, (slot.offset + slot.numel - 1) // length + 1)
        return range(-(-slot.shape[slot.spec.dim] // _chunk(slot, self.world)))

    @property
    def holds_runs(self) -> bool:
        """Whether a rank's part of a parameter is a run (1-D, in memory order) rather than rows."""
        return self.kind == "flat"

    @property
    def padding_is_scattered(self) -> bool:
        """Whether `padding` lists whole segments, only some of whose elements are padding."""
        return self.kind != "flat" and bool(self.padding)

    def view_in_whole(self, slot: Slot, part: Part) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        """`part` within the whole parameter's memory: shape, strides, and offset from the parameter's first element."""
        if self.kind == "flat":
            return part.shape, (1,), part.start
        return part.shape, slot.stride, part.start * (slot.stride[slot.spec.dim] if slot.stride else 0)

    def copies_of(self, slot: Slot) -> tuple[StridedCopy, ...]:
        """The copies that move `slot` from its gathered segment into the full bucket (or a gradient back)."""
        if self.kind == "flat":
            return (StridedCopy(slot.shape, slot.stride, 0, slot.stride, slot.offset),) if slot.numel else ()
        if not slot.numel:
            return ()
        slice_numel = self.segments[slot.segment].slice_numel
        rows, extent, step = _chunk(slot, self.world), slot.shape[slot.spec.dim], slot.stride[slot.spec.dim]
        whole, rest = divmod(extent, rows)
        copies = []
        if whole:
            local = dense_strides(_with_extent(slot, rows), slot.spec.order)
            sizes = (whole, *_with_extent(slot, rows))
            copies.append(StridedCopy(sizes, (rows * step, *slot.stride), 0, (slice_numel, *local), slot.offset))
        if rest:
            shape = _with_extent(slot, rest)
            at = whole * slice_numel + slot.offset
            copies.append(
                StridedCopy(shape, slot.stride, whole * rows * step, dense_strides(shape, slot.spec.order), at)
            )
        return tuple(copies)

    def strides_in_segment(self, slot: Slot) -> tuple[int, ...] | None:
        """Strides of the whole parameter as a single view of its gathered segment; None if it cannot be a view.

        It can if each rank has at most one row: rows then follow each other at the distance of a slice.
        """
        dim = slot.spec.dim
        if self.kind == "flat" or self.segments[slot.segment].full_offset is not None:
            return slot.stride
        if _chunk(slot, self.world) != 1 or not slot.numel:
            return None
        row = dense_strides(_with_extent(slot, 1), slot.spec.order)
        return (*row[:dim], self.segments[slot.segment].slice_numel, *row[dim + 1 :])


def _chunk(slot: Slot, world: int) -> int:
    """Rows per rank as for `torch.chunk`: ceil(extent / world), at least 1."""
    return max(1, -(-slot.spec.shape[slot.spec.dim] // world))


def _with_extent(slot: Slot, extent: int) -> tuple[int, ...]:
    """The slot's shape with `extent` along the dim that is cut."""
    shape, dim = slot.spec.shape, slot.spec.dim
    return (*shape[:dim], extent, *shape[dim + 1 :])


def run_on_rank(offset: int, numel: int, slice_numel: int, rank: int) -> tuple[int, int]:
    """The elements [start, stop) that `rank` holds of a parameter that begins at `offset` of a gathered segment."""
    start = min(max(rank * slice_numel - offset, 0), numel)
    return start, max(start, min((rank + 1) * slice_numel - offset, numel))


def round_up(value: int, multiple: int) -> int:
    """The least multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple
