"""The copies out of the staging buffer, as few as possible: each is a call of a kernel, twice per unit and step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .plan import Layout, Piece, round_up


@dataclass(frozen=True)
class Columns:
    """A gathered segment as a matrix [world, S], cut into columns: one for each parameter, and one for the padding.

    Attributes:
        segment: its index.
        staging_offset: where it begins in the staging buffer.
        slots: indices of the parameters, in the order of their columns.
        widths: elements of a row in each column; the padding's last, where there is any.
        offsets: where each column goes, [world, width] without gaps, in the part of the full bucket that is copied.
    """

    segment: int
    staging_offset: int
    slots: tuple[int, ...]
    widths: tuple[int, ...]
    offsets: tuple[int, ...]


def columns_of(layout: Layout) -> tuple[Columns, ...]:
    """The segments into which one kernel copies gradients, and out of which another one copies parameters."""
    found, base = [], 0
    for index, segment in enumerate(layout.segments):
        if segment.in_columns:
            slots = [(slot.offset, i) for i, slot in enumerate(layout.slots) if slot.segment == index and slot.numel]
            mine = [i for _, i in sorted(slots)]
            widths = [layout.slots[i].spec.chunk_numel(layout.world) for i in mine]
            offsets = [layout.slots[i].full_offset - layout.in_place_numel for i in mine]
            if padding := segment.slice_numel - sum(widths):
                offsets.append(round_up(offsets[-1] + layout.world * widths[-1], layout.align))
                widths.append(padding)
            found.append(Columns(index, base, tuple(mine), tuple(widths), tuple(offsets)))
        if segment.full_offset is None:
            base += layout.world * segment.slice_numel
    return tuple(found)


def copies_out(layout: Layout) -> tuple[Piece, ...]:
    """The copies that bring a layout's parameters from staging into the part of the full bucket that is copied.

    Without those of `columns_of`. Offsets are within these two buffers: the staging segments in a row, and the full
    bucket from `layout.in_place_numel` on.
    """
    found, base = [], 0
    for index, segment in enumerate(layout.segments):
        if segment.full_offset is not None:
            continue
        for slot in layout.slots:
            if slot.segment == index and not segment.in_columns:
                home = slot.full_offset - layout.in_place_numel
                found += [
                    Piece(
                        p.sizes,
                        p.parameter_strides,
                        home + p.parameter_offset,
                        p.gathered_strides,
                        base + p.gathered_offset,
                    )
                    for p in layout.pieces(slot)
                ]
        base += layout.world * segment.slice_numel
    return merged(found)


def merged(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """Fewer pieces that copy the same: those of one form at equal distances on both sides become one with one more dim.

    Parameters of one shape (a block's biases and norms, its projections) are so.
    """
    forms: dict[tuple[tuple[int, ...], ...], list[Piece]] = {}
    for piece in pieces:
        forms.setdefault((piece.sizes, piece.parameter_strides, piece.gathered_strides), []).append(piece)
    result = []
    for alike in forms.values():
        alike.sort(key=lambda piece: piece.gathered_offset)
        while alike:
            run = _run(alike)
            del alike[: len(run)]
            result.append(_joined(run))
    return tuple(result)


def _distance(first: Piece, second: Piece) -> tuple[int, int]:
    return (
        second.parameter_offset - first.parameter_offset,
        second.gathered_offset - first.gathered_offset,
    )


def _run(alike: list[Piece]) -> list[Piece]:
    """The first pieces of a list that lie at equal distances; on the parameters' side they may not go backwards."""
    run = alike[:2]
    if len(run) < 2 or _distance(*run)[0] < 0:
        return alike[:1]
    for piece in alike[2:]:
        if _distance(run[-1], piece) != _distance(*run[:2]):
            break
        run.append(piece)
    return run


def _joined(run: list[Piece]) -> Piece:
    first = run[0]
    if len(run) == 1:
        return first
    parameter, gathered = _distance(first, run[1])
    return Piece(
        (len(run), *first.sizes),
        (parameter, *first.parameter_strides),
        first.parameter_offset,
        (gathered, *first.gathered_strides),
        first.gathered_offset,
    )
