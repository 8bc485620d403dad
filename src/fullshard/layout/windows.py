"""Windows: parameters that are gathered together outside of passes, without padding worth the name.

    parameters a [8], b [6]; layout flat, S = 7           rank 0 holds a[0:7], rank 1 holds a[7:8] and b[0:6]

    buffer of a window over both      [ a 0:7 | a 7:8 | b 0:6 ]
                                        rank 0   rank 1

A rank's parts lie side by side, rank by rank. Where all ranks hold about as much one gather fills the buffer; else
every rank that holds something sends it, so that a parameter that lies on one rank of a thousand is sent once.

Pure: integers in, frozen plan out. Everything is counted in elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .plan import Layout, Part, Slot

_SMALL = 1 << 14  # elements of padding that cost less than a collective for each rank


@dataclass(frozen=True)
class Lot:
    """One rank's part of one parameter, in a window's buffer.

    Attributes:
        rank: on the shard axis.
        part: what it holds.
        at: its first element in the buffer.
    """

    rank: int
    part: Part
    at: int


@dataclass(frozen=True)
class Window:
    """See the module's docstring.

    Attributes:
        slots: the parameters, each with the layout that it is in.
        lots: by parameter, those of all ranks that hold any of it, in their order.
        starts, lengths: by rank, what it sends: elements [start, start + length) of the buffer.
        even: whether one gather of equal lengths fills it; `lengths` are padded to the longest then.
        numel: length of the buffer.
    """

    slots: tuple[tuple[Layout, Slot], ...]
    lots: tuple[tuple[Lot, ...], ...]
    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    even: bool
    numel: int

    def whole_at(self, index: int) -> int | None:
        """Where a parameter lies in the buffer in one piece, in its own memory order; None if it does not."""
        layout, slot = self.slots[index]
        lots = self.lots[index]
        first, expected = lots[0].at if lots else 0, 0
        for lot in lots:
            _, strides, offset = layout.held(slot, lot.part)
            dense = all(a == b for a, b, n in zip(strides, lot.part.stride, lot.part.shape, strict=True) if n > 1)
            if not dense or offset != expected or lot.at != first + expected:
                return None
            expected += lot.part.numel
        return first


def window_of(slots: Sequence[tuple[Layout, Slot]]) -> Window:
    """The plan of a window over these parameters, all of them split over as many ranks."""
    world = slots[0][0].world
    held: list[list[tuple[int, Part]]] = [[] for _ in range(world)]  # by rank: parameters, and what it holds of them
    for index, (layout, slot) in enumerate(slots):
        for rank in layout.holders(slot):
            part = layout.part(slot, rank)
            if part.numel:
                held[rank].append((index, part))
    lengths = [sum(part.numel for _, part in parts) for parts in held]
    total, padded = sum(lengths), world * max(lengths)
    even = padded <= total + max(total // 8, _SMALL)
    if even:
        lengths = [max(lengths)] * world
    lots: list[list[Lot]] = [[] for _ in slots]
    starts, begin = [], 0
    for rank, parts in enumerate(held):
        starts.append(begin)
        at = begin
        for index, part in parts:
            lots[index].append(Lot(rank, part, at))
            at += part.numel
        begin += lengths[rank]
    return Window(tuple(slots), tuple(map(tuple, lots)), tuple(starts), tuple(lengths), even, begin)
