"""Layouts hold to their invariants for any shapes, dtypes and 1 to 1,024 ranks."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fullshard.errors import LayoutError
from fullshard.layout import (
    Blocks,
    Layout,
    ParameterSpec,
    Slot,
    copies_out,
    plan_blocks,
    plan_flat,
    plan_owner,
    plan_rows,
    rectangles,
)

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


def full_view(layout: Layout, slot: Slot, full: torch.Tensor) -> torch.Tensor:
    return full.as_strided(slot.shape, slot.stride, slot.full_offset)


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


def gather(layout: Layout, shards: list[torch.Tensor]) -> torch.Tensor:
    """The full bucket, as the engine makes it: one concatenation per segment, then the pieces."""
    full = torch.full((layout.full_numel,), -2.0)
    for index, segment in enumerate(layout.segments):
        slices = [s[segment.shard_offset : segment.shard_offset + segment.slice_numel] for s in shards]
        gathered = torch.cat(slices)
        if segment.full_offset is not None:
            full[segment.full_offset : segment.full_offset + gathered.numel()] = gathered
            continue
        for slot in (s for s in layout.slots if s.segment == index):
            for piece in layout.pieces(slot):
                to = full.as_strided(piece.sizes, piece.parameter_strides, slot.full_offset + piece.parameter_offset)
                to.copy_(gathered.as_strided(piece.sizes, piece.gathered_strides, piece.gathered_offset))
    return full


@settings(max_examples=150, deadline=None)
@given(layouts())
def test_round_trip_is_the_identity(layout: Layout) -> None:
    """parameter -> shards -> gather -> views gives back every parameter, in its memory format."""
    count, values = 0, {}
    for slot in layout.slots:
        values[slot.name] = torch.arange(count, count + slot.numel, dtype=torch.float32).reshape(slot.shape)
        count += slot.numel
    full = gather(layout, shards_of(layout, values))
    for slot in layout.slots:
        assert torch.equal(full_view(layout, slot, full), values[slot.name])


@settings(max_examples=150, deadline=None)
@given(layouts())
def test_a_parameter_that_is_one_view_of_its_segment_is_read_right(layout: Layout) -> None:
    values = {s.name: torch.arange(s.numel, dtype=torch.float32).reshape(s.shape) for s in layout.slots}
    shards = shards_of(layout, values)
    for slot in layout.slots:
        strides, segment = layout.strides_in_segment(slot), layout.segments[slot.segment]
        if strides is not None and slot.numel:
            start, stop = segment.shard_offset, segment.shard_offset + segment.slice_numel
            gathered = torch.cat([shard[start:stop] for shard in shards])
            assert torch.equal(gathered.as_strided(slot.shape, strides, slot.offset), values[slot.name])


@settings(max_examples=150, deadline=None)
@given(layouts())
def test_every_element_is_owned_once(layout: Layout) -> None:
    for slot in layout.slots:
        parts = [layout.part(slot, rank) for rank in range(layout.world)]
        assert sum(part.numel for part in parts) == slot.numel
        extent = slot.numel if layout.kind == "flat" else slot.shape[slot.spec.dim]
        at = 0
        for part in parts:
            held = part.numel if layout.kind == "flat" else part.shape[slot.spec.dim]
            if held:
                assert part.start == at
                at += held
        assert at == extent


@settings(max_examples=100, deadline=None)
@given(layouts())
def test_parts_do_not_overlap_and_lie_in_the_shard(layout: Layout) -> None:
    for rank in {0, layout.world // 2, layout.world - 1}:
        owner = torch.zeros(layout.shard_numel)
        for slot in layout.slots:
            part = layout.part(slot, rank)
            if part.numel:
                owner.as_strided(part.shape, part.stride, part.offset).add_(1)
        assert owner.max() <= 1 if owner.numel() else True


@settings(max_examples=100, deadline=None)
@given(layouts())
def test_holders_are_the_ranks_with_elements(layout: Layout) -> None:
    for slot in layout.slots:
        held = [rank for rank in range(layout.world) if layout.part(slot, rank).numel]
        assert list(layout.holders(slot)) == held


@settings(max_examples=100, deadline=None)
@given(layouts())
def test_offsets_are_aligned(layout: Layout) -> None:
    assert all(slot.full_offset % layout.align == 0 for slot in layout.slots)
    assert all(segment.slice_numel % layout.align == 0 for segment in layout.segments)
    assert all(segment.shard_offset % layout.align == 0 for segment in layout.segments)


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
        (ParameterSpec("s", (4,), (0,), dim=1), 2, "no dim 1"),
        (ParameterSpec("s", (4,), (0,)), 0, "at least 1"),
    ],
)
def test_what_rows_cannot_do_is_refused(spec: ParameterSpec, world: int, text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        plan_rows([spec], world, 4, 1)


@settings(max_examples=200, deadline=None)
@given(layouts())
def test_copies_out_of_staging_are_those_of_every_piece(layout: Layout) -> None:
    """Merged or not, they bring every parameter that is not gathered in place to where it belongs."""
    values = {s.name: torch.arange(1.0, s.numel + 1).reshape(s.shape) for s in layout.slots}
    shards = shards_of(layout, values)
    staged = [
        shard[segment.shard_offset :][: segment.slice_numel]
        for segment in layout.segments
        if segment.full_offset is None
        for shard in shards
    ]
    staging = torch.cat(staged) if staged else torch.empty(0)
    assert staging.numel() == layout.staging_numel
    full = torch.full((layout.full_numel,), -2.0)
    home, copies = full[layout.in_place_numel :], copies_out(layout)
    for piece in copies:
        source = staging.as_strided(piece.sizes, piece.gathered_strides, piece.gathered_offset)
        home.as_strided(piece.sizes, piece.parameter_strides, piece.parameter_offset + layout.in_place_numel).copy_(
            source
        )
    copied = [slot for slot in layout.slots if layout.segments[slot.segment].full_offset is None]
    for slot in copied:
        assert torch.equal(full_view(layout, slot, full), values[slot.name])
    assert len(copies) <= sum(len(layout.pieces(slot)) for slot in copied)


def test_parameters_of_one_shape_are_copied_at_once() -> None:
    shapes = [(16,), (16,), (16, 16), (16,), (16, 16), (16,)]  # a norm and two layers
    specs = [ParameterSpec(f"p{i}", shape, tuple(range(len(shape)))) for i, shape in enumerate(shapes)]
    assert len(copies_out(plan_rows(specs, 64, 4, 1 << 40))) < len(shapes)
