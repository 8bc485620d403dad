"""Layouts hold to their invariants for any shapes, dtypes and 1 to 1,024 ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fullshard.errors import LayoutError
from fullshard.layout import (
    Blocks,
    Columns,
    Layout,
    ParameterSpec,
    Slot,
    columns_of,
    copies_out,
    plan_blocks,
    plan_flat,
    plan_owner,
    plan_rows,
    rectangles,
)
from fullshard.torch_private.foreach import columns_in, columns_out

WORLDS = st.one_of(st.integers(1, 9), st.sampled_from([16, 64, 100, 1023, 1024]))
ALIGNS = st.sampled_from([1, 2, 4, 8, 16])


@st.composite
def parameters(draw: st.DrawFn, scalars: bool, low: int = 0) -> list[ParameterSpec]:
    specs = []
    for i in range(draw(st.integers(1, 5))):
        ndim = draw(st.integers(0 if scalars else 1, 4))
        shape = tuple(draw(st.lists(st.integers(low, 9), min_size=ndim, max_size=ndim)))
        order = tuple(draw(st.permutations(range(ndim))))
        specs.append(ParameterSpec(f"p{i}", shape, order))
    return specs


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    world, align = draw(WORLDS), draw(ALIGNS)
    kind = draw(st.sampled_from(["flat", "rows", "blocks", "owner"]))
    if kind in ("blocks", "owner"):
        specs = draw(parameters(scalars=True))
        if kind == "owner":
            return plan_owner(specs, world, align)
        blocks = Blocks(draw(st.one_of(st.just("row"), st.integers(1, 40))))
        granules = [blocks.of(spec.shape, spec.order) for spec in specs]
        return plan_blocks(specs, granules, world, align, draw(st.sampled_from([1, 20, 1 << 40])), "blocks")
    if kind == "flat":
        return plan_flat(draw(parameters(scalars=True)), world, align)
    return plan_rows(draw(parameters(scalars=False)), world, align, draw(st.sampled_from([1, 20, 1 << 40])))


def values_of(layout: Layout) -> dict[str, torch.Tensor]:
    """Every element of the whole has a value of its own."""
    count, values = 1, {}
    for slot in layout.slots:
        values[slot.name] = torch.arange(count, count + slot.numel, dtype=torch.float32).reshape(slot.shape)
        count += slot.numel
    return values


def shards_of(layout: Layout, values: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """What every rank holds, filled from the parts alone."""
    shards = []
    for rank in range(layout.world):
        shard = torch.full((layout.shard_numel,), -1.0)
        for slot in layout.slots:
            part = layout.part(slot, rank)
            view = shard.as_strided(part.shape, part.stride, part.offset)
            if layout.kind == "flat":
                memory = values[slot.name].permute(slot.spec.order).reshape(-1)
                view.copy_(memory[part.start : part.start + part.numel])
            else:
                view.copy_(values[slot.name].narrow(slot.spec.dim, part.start, part.shape[slot.spec.dim]))
        shards.append(shard)
    return shards


def right(slots: Iterable[Slot], full: torch.Tensor, values: dict[str, torch.Tensor]) -> bool:
    """Whether the views of the full bucket are these parameters, each in its memory format."""
    return all(torch.equal(full.as_strided(s.shape, s.stride, s.full_offset), values[s.name]) for s in slots)


@settings(max_examples=150, deadline=None)
@given(layouts())
def test_round_trip_is_the_identity(layout: Layout) -> None:
    """parameter -> shards -> gather -> views gives back every parameter, by each of the engine's ways to copy."""
    values = values_of(layout)
    shards = shards_of(layout, values)
    gathered = [torch.cat([s[one.shard_offset :][: one.slice_numel] for s in shards]) for one in layout.segments]
    full, home = torch.full((layout.full_numel,), -2.0), layout.in_place_numel
    merged, staged, copied = full.clone(), [torch.empty(0)], []
    for segment, data in zip(layout.segments, gathered, strict=True):
        if segment.full_offset is not None:
            full[segment.full_offset : segment.full_offset + data.numel()] = data
        else:
            staged.append(data)
    for slot in layout.slots:
        strides, data = layout.strides_in_segment(slot), gathered[slot.segment]
        if strides is not None and slot.numel:  # it is one view of its segment
            assert torch.equal(data.as_strided(slot.shape, strides, slot.offset), values[slot.name])
        if layout.segments[slot.segment].full_offset is None:
            copied.append(slot)
            for piece in layout.copies_of(slot):
                to = full.as_strided(piece.sizes, piece.parameter_strides, slot.full_offset + piece.parameter_offset)
                to.copy_(data.as_strided(piece.sizes, piece.gathered_strides, piece.gathered_offset))
    assert right(layout.slots, full, values)

    staging, copies = torch.cat(staged), copies_out(layout)
    assert staging.numel() == layout.staging_numel and len(copies) <= sum(
        len(layout.copies_of(slot)) for slot in copied
    )
    for columns in columns_of(layout):
        numel = layout.world * sum(columns.widths)
        matrix = staging.narrow(0, columns.staging_offset, numel).view(layout.world, -1)
        wholes = [values[layout.slots[i].name].contiguous() for i in columns.slots]
        padding = [torch.full((layout.world * width,), -1.0) for width in columns.widths[len(wholes) :]]
        held, again = values_in(layout, columns), torch.empty_like(matrix)
        columns_in(again)([*wholes, *padding])
        assert torch.equal(again[held], matrix[held])
        sizes = [(layout.world, width) for width in columns.widths]
        at = zip(columns.offsets, sizes, strict=True)
        columns_out(matrix, columns.widths, [merged[home + o :][: math.prod(s)].view(s) for o, s in at])()
    for piece in copies:  # merged or not
        source = staging.as_strided(piece.sizes, piece.gathered_strides, piece.gathered_offset)
        merged[home:].as_strided(piece.sizes, piece.parameter_strides, piece.parameter_offset + home).copy_(source)
    assert right(copied, merged, values)


def values_in(layout: Layout, columns: Columns) -> torch.Tensor:
    """[world, S], bool: what holds elements of parameters; the rest is padding."""
    found = torch.zeros(layout.world, sum(columns.widths), dtype=torch.bool)
    for index in columns.slots:
        slot = layout.slots[index]
        for rank in range(layout.world):
            found[rank, slot.offset : slot.offset + layout.part(slot, rank).numel] = True
    return found


@settings(max_examples=150, deadline=None)
@given(layouts())
def test_every_element_is_owned_once(layout: Layout) -> None:
    """In a place of its own, by the holders and nobody else; offsets are aligned."""
    taken = [torch.zeros(layout.shard_numel) for _ in range(layout.world)]
    for slot in layout.slots:
        parts = [layout.part(slot, rank) for rank in range(layout.world)]
        at = 0
        for rank, part in enumerate(parts):
            if held := part.numel if layout.kind == "flat" else part.shape[slot.spec.dim]:
                assert part.start == at
                at += held
            if part.numel:
                taken[rank].as_strided(part.shape, part.stride, part.offset).add_(1)
        assert at == (slot.numel if layout.kind == "flat" else slot.shape[slot.spec.dim])
        assert sum(part.numel for part in parts) == slot.numel
        assert list(layout.holders(slot)) == [rank for rank, part in enumerate(parts) if part.numel]
    assert all(not shard.numel() or shard.max() <= 1 for shard in taken)
    offsets = [slot.full_offset for slot in layout.slots]
    offsets += [offset for segment in layout.segments for offset in (segment.slice_numel, segment.shard_offset)]
    assert all(offset % layout.align == 0 for offset in offsets)


@settings(max_examples=100, deadline=None)
@given(parameters(scalars=False), WORLDS, ALIGNS)
def test_rows_are_torch_chunks_and_pad_only_the_slice_end(specs: list[ParameterSpec], world: int, align: int) -> None:
    layout = plan_rows(specs, world, align, 1 << 40)
    for slot in layout.slots:
        chunks = torch.empty(slot.shape).chunk(world, dim=0)
        for rank in {0, world // 3, world - 1}:
            expected = tuple(chunks[rank].shape) if rank < len(chunks) else (0, *slot.shape[1:])
            assert layout.part(slot, rank).shape == expected
    if world > 1:
        required = sum(-(-s.shape[0] // world) * math.prod(s.shape[1:]) for s in specs)
        assert layout.shard_numel < required + align


@settings(max_examples=100, deadline=None)
@given(parameters(scalars=True), WORLDS, ALIGNS)
def test_flat_pads_less_than_an_alignment_per_parameter_and_rank(
    specs: list[ParameterSpec], world: int, align: int
) -> None:
    layout = plan_flat(specs, world, align)
    used = sum(math.prod(spec.shape) for spec in specs)
    assert layout.gathered_numel - used < align * (len(specs) + world) + world
    padded = torch.zeros(layout.gathered_numel)
    for start, length in layout.padding:
        padded[start : start + length] += 1
    for slot in layout.slots:
        padded[slot.offset : slot.offset + slot.numel] += 1
    assert bool((padded == 1).all())


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=0, max_size=4), st.data())
def test_rectangles_cover_a_run_exactly(shape: list[int], data: st.DataObject) -> None:
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    tensor = torch.arange(numel).reshape(shape)
    found = rectangles(tuple(shape), start, stop)
    assert len(found) <= max(2 * len(shape) - 1, 1)
    at = start
    for rectangle in found:
        block = tensor
        for dim, (offset, size) in enumerate(zip(rectangle.offsets, rectangle.sizes, strict=True)):
            block = block.narrow(dim, offset, size)
        assert rectangle.start == at - start
        assert torch.equal(block.reshape(-1), torch.arange(at, at + block.numel()))
        at += block.numel()
    assert at == stop


def test_large_parameters_get_their_own_segment_and_no_copy() -> None:
    specs = [ParameterSpec("w", (8, 4), (0, 1)), ParameterSpec("b", (3,), (0,))]
    layout = plan_rows(specs, 4, 4, own_segment_numel=32)
    assert [segment.full_offset for segment in layout.segments] == [0, None]
    assert layout.staging_numel == 4 * 4  # 1 row each for 3 ranks, slice rounded up to 16 bytes


@pytest.mark.parametrize(
    ("spec", "world", "text"),
    [
        (ParameterSpec("s", (), ()), 2, "scalar"),
        (ParameterSpec("s", (4, 5), (0, 1), dim=1), 2, "evenly"),
    ],
)
def test_what_rows_cannot_do_is_refused(spec: ParameterSpec, world: int, text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        plan_rows([spec], world, 4, 1)


def test_parameters_of_one_shape_are_copied_at_once() -> None:
    shapes = [(16,), (16,), (16, 16), (16,), (16, 16), (16,)]  # a norm and two layers
    specs = [ParameterSpec(f"p{i}", shape, tuple(range(len(shape)))) for i, shape in enumerate(shapes)]
    assert 0 < len(copies_out(plan_rows(specs, 64, 4, 1 << 40))) < len(shapes)


@pytest.mark.parametrize(
    ("rows", "align", "columns", "full"),
    [
        (64, 4, True, 64 * 5),
        (67, 1, False, 67 * 5),
        (1021, 1, True, 1024 * 5),
        (4104, 16, True, 20528 + 8 * 11),  # 11 elements of padding in each slice, behind a multiple of 16
        (64, 16, False, 64 * 5),
        (3, 1, False, 3 * 5),
    ],
    ids=["even", "uneven", "nearly even", "padded", "much padding", "few rows"],
)
def test_what_divides_evenly_or_nearly_so_has_columns(rows: int, align: int, columns: bool, full: int) -> None:
    """On eight ranks; else a parameter takes no more room in the full bucket than its elements."""
    layout = plan_rows([ParameterSpec("w", (rows, 5), (0, 1))], 8, align, 1 << 40)
    found = columns_of(layout)
    assert bool(found) is columns is not bool(copies_out(layout))
    assert all(sum(each.widths) == layout.shard_numel for each in found)
    assert layout.full_numel == full
