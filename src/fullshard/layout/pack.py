"""Planners that never cut a granule: parameters back to back, cut only where their granules end.

A granule is the smallest run of elements that may not be cut: a row, a quantisation block, a whole tensor.

The gathered segment is `world` slices of equal length S, so slices end at S, 2S, ...; a parameter may extend across the
end of a slice only if a granule ends there. `least_slice` finds the exact least S for a fixed order of parameters. For
a fixed S, placing each parameter as early as possible is optimal; but feasibility is not monotone in S (a larger S
moves the ends of all slices), so a binary search would be wrong. Stepping S by the alignment would be exact but slow.
Instead every comparison during placement is recorded as a linear function of S. Placement can only change at a value of
S at which some comparison changes, so the scan jumps from each such value to the next.

Pure. Everything in elements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..errors import LayoutError
from .kinds import LITTLE_PADDING, plan_rows
from .layout import Layout, ParameterSpec, Segment, Slot, round_up

ROW = "row"


@dataclass(frozen=True)
class Blocks:
    """`layout=Blocks(granule)` of `fully_shard`: cut parameters only between granules; gathers copy nothing.

    Attributes:
        granule: number of elements, counted in memory order from a parameter's first (a quantisation block: 32,
            128 * 128), or "row": all elements of an index of the outermost dim.

    Raises:
        LayoutError: neither a positive int nor "row".
    """

    granule: int | str = ROW

    def __post_init__(self) -> None:
        whole = isinstance(self.granule, int) and not isinstance(self.granule, bool) and self.granule > 0
        if not whole and self.granule != ROW:
            raise LayoutError(f'Blocks takes a positive number of elements or "row", got {self.granule!r}')

    def of(self, shape: tuple[int, ...], order: tuple[int, ...]) -> int:
        """The granule, in elements, of a parameter of `shape` whose dims lie in memory in `order`."""
        if isinstance(self.granule, int):
            return self.granule
        return max(1, math.prod(shape) // max(shape[order[0]], 1)) if shape else 1


class _Scan:
    """An attempt to pack with a slice length, and the next length at which a comparison would change."""

    def __init__(self, slice_numel: int, align: int) -> None:
        self.S, self.align = slice_numel, align
        self.next: int | None = None

    def nonnegative(self, constant: int, slope: int) -> bool:
        """Whether constant + slope * S >= 0; records where that changes."""
        value = constant + slope * self.S
        if value >= 0 > slope:
            self._note(constant // -slope + 1)
        elif value < 0 < slope:
            self._note(-(constant // slope))
        return value >= 0

    def divides(self, granule: int) -> bool:
        """Whether S is a multiple of `granule`; records where that changes."""
        if self.S % granule == 0:
            self._note(self.S + 1)
            return True
        self._note(round_up(self.S + 1, math.lcm(granule, self.align)))
        return False

    def _note(self, at: int) -> None:
        if self.next is None or at < self.next:
            self.next = at

    def multiples(self, constant: int, slope: int, unit: int) -> int:
        """floor((constant + slope * S) / unit); records where that changes."""
        quotient = (constant + slope * self.S) // unit
        self.nonnegative(constant - quotient * unit, slope)
        self.nonnegative(constant - (quotient + 1) * unit, slope)
        return quotient

    def place(self, cursor: tuple[int, int], numel: int, granule: int) -> tuple[int, int] | None:
        """The earliest start at or after `cursor`, both as (constant, slope) of S; None if there is none."""
        at, slope = cursor
        if numel == 0:
            return cursor
        index = (at + slope * self.S) // self.S  # index of the slice that contains the cursor
        self.nonnegative(at, slope - index)
        self.nonnegative(-at - 1, index + 1 - slope)
        end = index + 1  # the slice ends at end * S
        if self.nonnegative(-at - numel, end - slope):
            return cursor
        unit = math.lcm(granule, self.align)  # before a cut: whole granules from an aligned start
        before = self.multiples(-at, end - slope, unit) * unit
        if before > 0 and (self.nonnegative(before - numel, 1) or self.divides(granule)):
            return -before, end
        if self.nonnegative(-numel, 1) or self.divides(granule):
            return 0, end
        before = self.multiples(0, 1, unit) * unit
        if before > 0 and self.nonnegative(before - numel, 1):
            return -before, end + 1
        return None

    def pack(self, sizes: Sequence[tuple[int, int]], world: int) -> list[int] | None:
        """Offsets of parameters of (numel, granule) in `world` slices, or None if they do not fit."""
        cursor, offsets, last = (0, 0), [], (0, 0)
        for numel, granule in sizes:
            start = self.place(cursor, numel, granule)
            if start is None:
                return None
            offsets.append(start[0] + start[1] * self.S)
            if numel:
                last = (start[0] + numel, start[1])
                cursor = (round_up(start[0] + numel, self.align), start[1])
        return offsets if self.nonnegative(-last[0], world - last[1]) else None


def least_slice(sizes: Sequence[tuple[int, int]], world: int, align: int) -> tuple[int, list[int]]:
    """The least slice length, a multiple of `align`, for parameters in this order, and their offsets.

    Args:
        sizes: (numel, granule) of each parameter.
        world: number of slices.
        align: every offset and the slice length are multiples of this.
    """
    total = sum(numel for numel, _ in sizes)
    slice_numel = max(align, round_up(-(-total // world), align))
    while True:
        scan = _Scan(slice_numel, align)
        offsets = scan.pack(sizes, world)
        if offsets is not None:
            return slice_numel, offsets
        assert scan.next is not None  # a slice as long as all parameters together always suffices
        slice_numel = round_up(max(scan.next, slice_numel + 1), align)


def plan_blocks(
    specs: Sequence[ParameterSpec],
    granules: Sequence[int],
    world: int,
    align: int,
    segment_numel: int,
    label: str,
    whole_rows: bool = False,
    most_padding: float = LITTLE_PADDING,
) -> Layout:
    """Cut parameters only at granules: in a single segment, or in several if less padding outweighs their latency.

    Rows that are long compared with a rank's share cause much padding: a parameter that extends across several slices
    makes their length a multiple of its rows. If this costs more than a copy, the rows layout is used, which does not
    cut rows either.

    Compares several orders (the original order, by size, by granule) and several divisions into segments (a single
    segment, a segment per granule, a segment per parameter). Each segment is a collective, gathered in place.

    Args:
        specs: the bucket's parameters.
        granules: of each parameter, in elements.
        world: ranks on the shard axis.
        align: elements per 16 bytes.
        segment_numel: elements whose transfer takes as long as an additional collective.
        label: the layout's name; `note` mentions several segments, or the rows layout if it is used instead.
        whole_rows: whether granules are rows, so that the rows layout may be used instead.
        most_padding: see `plan_rows`.
    """
    sizes = [(math.prod(spec.shape), max(1, granule)) for spec, granule in zip(specs, granules, strict=True)]
    everything = list(range(len(sizes)))
    by_granule: dict[int, list[int]] = {}
    for i in everything:
        by_granule.setdefault(sizes[i][1], []).append(i)
    choices = [[everything], list(by_granule.values()), [[i] for i in everything]]
    plans = []
    for groups in choices[: 1 if len(sizes) == 1 else 3]:
        packed = [_best_order(group, sizes, world, align) for group in groups]
        gathered = world * sum(slice_numel for slice_numel, _ in packed)
        plans.append((gathered + len(packed) * segment_numel, len(packed), gathered, packed))
    cost, count, gathered, packed = min(plans, key=lambda plan: plan[:2])
    note = ""
    if whole_rows and all(spec.shape and spec.order[0] == spec.dim for spec in specs):
        rows = plan_rows(specs, world, align, segment_numel, most_padding)
        if rows.gathered_numel + rows.staging_numel + len(rows.segments) * segment_numel < cost:
            total = rows.parameter_numel
            note = (
                f"rows with {_percent(rows.gathered_numel, total)} padding, and a copy, instead of blocks "
                f"with {_percent(gathered, total)}"
            )
            return replace(rows, label=f"{label} as rows", note=note)
    if count > 1:
        total = sum(numel for numel, _ in sizes)
        note = (
            f"{count} collectives with {_percent(gathered, total)} padding instead of a single collective "
            f"with {_percent(plans[0][2], total)}"
        )
    return replace(_assemble(specs, packed, world, align), label=label, note=note)


def _percent(gathered: int, total: int) -> str:
    return f"{100 * (gathered / max(total, 1) - 1):.1f}%"


Packed = tuple[int, dict[int, int]]  # slice length, offset by parameter


def _best_order(group: list[int], sizes: Sequence[tuple[int, int]], world: int, align: int) -> Packed:
    """The shortest slice over several orders of a group of parameters."""
    orders = [
        group,
        sorted(group, key=lambda i: (-sizes[i][0], i)),
        sorted(group, key=lambda i: (-sizes[i][1], -sizes[i][0], i)),
        sorted(group, key=lambda i: (sizes[i][1], -sizes[i][0], i)),
    ]
    best: Packed | None = None
    for order in {tuple(order): order for order in orders}.values():
        slice_numel, offsets = least_slice([sizes[i] for i in order], world, align)
        if best is None or slice_numel < best[0]:
            best = slice_numel, dict(zip(order, offsets, strict=True))
    assert best is not None
    return best


def _assemble(specs: Sequence[ParameterSpec], packed: Sequence[Packed], world: int, align: int) -> Layout:
    """The layout of consecutive segments; the engine treats it as flat."""
    segments: list[Segment] = []
    slots: dict[int, Slot] = {}
    shard = full = 0
    for slice_numel, offsets in packed:
        for i, offset in offsets.items():
            slots[i] = Slot(specs[i], len(segments), offset, full + offset)
        segments.append(Segment(shard, slice_numel, full))
        shard, full = shard + slice_numel, full + world * slice_numel
    return Layout("flat", world, align, tuple(slots[i] for i in range(len(specs))), tuple(segments), full)


def plan_owner(specs: Sequence[ParameterSpec], world: int, align: int) -> Layout:
    """Every parameter whole on a single rank, with balanced loads: the better of two methods.

    Either in order, where each rank takes the next parameters (`least_slice` with whole parameters as granules, exact
    for an order); or the largest parameter first, each to the rank with the smallest load (R. L. Graham, "Bounds on
    multiprocessing timing anomalies", SIAM J. Appl. Math. 17, 1969: at most 4/3 of the optimum).
    """
    numels = [math.prod(spec.shape) for spec in specs]
    in_order = _best_order(list(range(len(specs))), [(numel, max(numel, 1)) for numel in numels], world, align)
    loads = [0] * world
    rank_and_start: dict[int, tuple[int, int]] = {}
    for i in sorted(range(len(specs)), key=lambda i: (-numels[i], i)):
        rank = min(range(world), key=lambda r: (loads[r], r))
        rank_and_start[i] = rank, loads[rank]
        loads[rank] += round_up(numels[i], align)
    slice_numel = max(align, *loads)
    balanced = slice_numel, {i: rank * slice_numel + start for i, (rank, start) in rank_and_start.items()}
    best = min(in_order, balanced, key=lambda packed: packed[0])
    total, gathered = sum(numels), world * best[0]
    note = ""
    if gathered > 2 * total:
        note = f"{_percent(gathered, total)} padding: the largest tensor sets the slice; use larger units, or Blocks"
    return replace(_assemble(specs, [best], world, align), label="owner", note=note)
