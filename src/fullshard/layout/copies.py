"""The copies out of the staging buffer, as few as possible: each is launched twice per unit and step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from .layout import Layout, StridedCopy, round_up


@dataclass(frozen=True)
class Columns:
    """A gathered segment as a matrix [world, S], cut into a column per parameter and a last column of padding, if any.

    Attributes:
        segment: its index.
        staging_offset: its first element in the staging buffer.
        slots: indices of the parameters, in the order of their columns.
        widths: elements per row of each column.
        offsets: destination of each column, [world, width] without gaps, in the copied part of the full bucket.
    """

    segment: int
    staging_offset: int
    slots: tuple[int, ...]
    widths: tuple[int, ...]
    offsets: tuple[int, ...]


def columns_of(layout: Layout) -> tuple[Columns, ...]:
    """The segments in which a single kernel copies all gradients in, or all parameters out."""
    columns = []
    for index, segment in enumerate(layout.segments):
        base = layout.staging_offsets[index]
        if segment.in_columns and base is not None:
            slots = [(slot.offset, i) for i, slot in enumerate(layout.slots) if slot.segment == index and slot.numel]
            order = [i for _, i in sorted(slots)]
            widths = [layout.slots[i].spec.chunk_numel(layout.world) for i in order]
            offsets = [layout.slots[i].full_offset - layout.in_place_numel for i in order]
            if padding := segment.slice_numel - sum(widths):
                offsets.append(round_up(offsets[-1] + layout.world * widths[-1], layout.align))
                widths.append(padding)
            columns.append(Columns(index, base, tuple(order), tuple(widths), tuple(offsets)))
    return tuple(columns)


def copies_out(layout: Layout) -> tuple[StridedCopy, ...]:
    """The copies that move a layout's parameters from staging into the copied part of the full bucket.

    Excludes the segments of `columns_of`. Offsets count within these two buffers: the concatenated staging segments,
    and the full bucket from `layout.in_place_numel` on.
    """
    copies = []
    for slot in layout.slots:
        base, start = layout.staging_offsets[slot.segment], slot.full_offset - layout.in_place_numel
        if base is not None and not layout.segments[slot.segment].in_columns:
            for copy in layout.copies_of(slot):
                at, gathered = start + copy.parameter_offset, base + copy.gathered_offset
                copies.append(replace(copy, parameter_offset=at, gathered_offset=gathered))
    return merged(copies)


def merged(copies: Iterable[StridedCopy]) -> tuple[StridedCopy, ...]:
    """Merge copies of equal form, at equal distances on both sides, into a single copy with an additional dim.

    Parameters of the same shape (a block's biases and norms, its projections) usually lie at equal distances.
    """
    forms: dict[tuple[tuple[int, ...], ...], list[StridedCopy]] = {}
    for copy in copies:
        forms.setdefault((copy.sizes, copy.parameter_strides, copy.gathered_strides), []).append(copy)
    result = []
    for same_form in forms.values():
        same_form.sort(key=lambda copy: copy.gathered_offset)
        while same_form:
            run = _run(same_form)
            del same_form[: len(run)]
            result.append(_joined(run))
    return tuple(result)


def _distance(first: StridedCopy, second: StridedCopy) -> tuple[int, int]:
    return (
        second.parameter_offset - first.parameter_offset,
        second.gathered_offset - first.gathered_offset,
    )


def _run(same_form: list[StridedCopy]) -> list[StridedCopy]:
    """The leading copies that lie at equal distances; on the parameters' side distances may not be negative."""
    run = same_form[:2]
    if len(run) < 2 or _distance(*run)[0] < 0:
        return same_form[:1]
    for copy in same_form[2:]:
        if _distance(run[-1], copy) != _distance(*run[:2]):
            break
        run.append(copy)
    return run


def _joined(run: list[StridedCopy]) -> StridedCopy:
    first = run[0]
    if len(run) == 1:
        return first
    parameter, gathered = _distance(first, run[1])
    return StridedCopy(
        (len(run), *first.sizes),
        (parameter, *first.parameter_strides),
        first.parameter_offset,
        (gathered, *first.gathered_strides),
        first.gathered_offset,
    )
