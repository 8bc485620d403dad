"""Windows: parameters that are gathered together outside of passes, with little padding.

    parameters a [8], b [6]; layout flat, S = 7           rank 0 holds a[0:7], rank 1 holds a[7:8] and b[0:6]

    buffer of a window over both      [ a 0:7 | a 7:8 | b 0:6 ]
                                        rank 0   rank 1

A rank's parts lie side by side, rank by rank. If all ranks hold about the same number of elements one gather fills the
buffer; else every rank that holds elements sends them, so that a parameter on one rank of a thousand is sent once.

Pure: integers in, frozen plan out. Everything is counted in elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .plan import Layout, Part, Slot

_SMALL = 1 << 14  # elements of padding that cost less than one collective per rank


@dataclass(frozen=True)
class Lot:
    """One rank's part of one parameter, in a window's buffer.

    Attributes:
        rank: on the shard axis.
        part: the rank's part of the parameter.
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
        lots: by parameter, the lots of all ranks that hold elements of it, in rank order.
        starts, lengths: by rank, the elements [start, start + length) of the buffer that it sends.
        even: whether one gather of equal lengths fills the buffer; `lengths` are then padded to the longest.
        numel: length of the buffer.
    """

    slots: tuple[tuple[Layout, Slot], ...]
    lots: tuple[tuple[Lot, ...], ...]
    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    even: bool
    numel: int

    def whole_at(self, index: int) -> int | None:
        """Offset at which a parameter lies in the buffer contiguously, in its memory order; None if it does not."""
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
