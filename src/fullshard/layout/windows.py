"""Windows: parameters that are gathered together outside of passes, with little padding.

    parameters a [8], b [6]; layout flat, S = 7           rank 0 holds a[0:7], rank 1 holds a[7:8] and b[0:6]

    buffer of a window over both      [ a 0:7 | a 7:8 | b 0:6 ]
                                        rank 0   rank 1

The buffer contains the parts of rank 0, then those of rank 1, and so on. If all ranks have about the same number of
elements, a single gather fills the buffer; otherwise each rank that has elements broadcasts them, so that a parameter
that lies on one rank of a thousand is sent once.

Pure: integers in, frozen plan out. Everything is counted in elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .layout import Layout, Part, Slot

_SMALL = 1 << 14  # elements of padding that cost less than a collective per rank


@dataclass(frozen=True)
class Lot:
    """A rank's part of a parameter, in a window's buffer.

    Attributes:
        rank: the rank's index on the shard axis.
        part: its part of the parameter.
        at: the part's first element in the buffer.
    """

    rank: int
    part: Part
    at: int


@dataclass(frozen=True)
class Window:
    """See the module's docstring.

    Attributes:
        slots: the parameters, each with its layout.
        lots: by parameter, the lots of all ranks that have elements of it, in rank order.
        starts, lengths: by rank, the elements [start, start + length) of the buffer that it sends.
        even: whether a single gather of equal lengths fills the buffer; `lengths` are then padded to the longest.
        numel: length of the buffer.
    """

    slots: tuple[tuple[Layout, Slot], ...]
    lots: tuple[tuple[Lot, ...], ...]
    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    even: bool
    numel: int

    def whole_at(self, index: int) -> int | None:
        """The offset of a parameter in the buffer if it is contiguous there, in its memory order; else None."""
        layout, slot = self.slots[index]
        lots = self.lots[index]
        first, expected = lots[0].at if lots else 0, 0
        for lot in lots:
            _, strides, offset = layout.view_in_whole(slot, lot.part)
            dense = all(a == b for a, b, n in zip(strides, lot.part.stride, lot.part.shape, strict=True) if n > 1)
            if not dense or offset != expected or lot.at != first + expected:
                return None
            expected += lot.part.numel
        return first


def window_of(slots: Sequence[tuple[Layout, Slot]]) -> Window:
    """The plan of a window over these parameters, all split over the same number of ranks."""
    world = slots[0][0].world
    parts_of_rank: list[list[tuple[int, Part]]] = [[] for _ in range(world)]  # by rank: parameter and part
    for index, (layout, slot) in enumerate(slots):
        for rank in layout.holders(slot):
            part = layout.part(slot, rank)
            if part.numel:
                parts_of_rank[rank].append((index, part))
    lengths = [sum(part.numel for _, part in parts) for parts in parts_of_rank]
    total, padded = sum(lengths), world * max(lengths)
    even = padded <= total + max(total // 8, _SMALL)
    if even:
        lengths = [max(lengths)] * world
    lots: list[list[Lot]] = [[] for _ in slots]
    starts, begin = [], 0
    for rank, parts in enumerate(parts_of_rank):
        starts.append(begin)
        at = begin
        for index, part in parts:
            lots[index].append(Lot(rank, part, at))
            at += part.numel
        begin += lengths[rank]
    return Window(tuple(slots), tuple(map(tuple, lots)), tuple(starts), tuple(lengths), even, begin)
