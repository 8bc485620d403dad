"""Planners that never cut a granule: minimal against brute force, exact about cuts, fast for real models."""

from __future__ import annotations

import math
import runpy
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullshard.errors import LayoutError
from fullshard.layout import Blocks, ParameterSpec, least_slice, plan_blocks, plan_owner

SIZES = st.lists(
    st.tuples(st.sampled_from([0, 1, 3, 7, 12, 16, 20, 35, 48]), st.sampled_from([1, 2, 3, 4, 5, 7, 8, 16, 100])),
    min_size=1,
    max_size=5,
)


def cuts(offset: int, numel: int, slice_numel: int) -> list[int]:
    """Where slices end inside of a parameter, from its first element."""
    first = offset // slice_numel + 1
    return [k * slice_numel - offset for k in range(first, -(-(offset + numel) // slice_numel))]


def fits(slice_numel: int, sizes: list[tuple[int, int]], world: int, align: int) -> bool:
    """Brute force: every aligned start is tried for each parameter in turn, the earliest that cuts no granule kept."""
    at = 0
    for numel, granule in sizes:
        if numel == 0:
            continue
        at = -(-at // align) * align
        while at + numel <= world * slice_numel and any(c % granule for c in cuts(at, numel, slice_numel)):
            at += align
        if at + numel > world * slice_numel:
            return False
        at += numel
    return True


@settings(max_examples=400, deadline=None)
@given(SIZES, st.sampled_from([1, 2, 3, 4, 5, 8]), st.sampled_from([1, 2, 4]))
def test_the_slice_is_the_least_there_is(sizes, world, align):
    slice_numel, offsets = least_slice(sizes, world, align)
    least = align
    while not fits(least, sizes, world, align):
        least += align
    assert slice_numel == least
    end = 0
    for (numel, granule), offset in zip(sizes, offsets, strict=True):
        if numel:
            assert offset % align == 0 and offset >= end
            assert not any(cut % granule for cut in cuts(offset, numel, slice_numel))
            end = offset + numel
    assert end <= world * slice_numel


def test_feasibility_is_not_monotone():
    """Why no binary search: here a slice of 8 does, 9 does not, and 12 does again."""
    sizes = [(24, 4)]
    assert [s for s in range(6, 13) if fits(s, sizes, 3, 1)] == [8, 12]
    assert least_slice(sizes, 3, 1)[0] == 8


def specs_of(shapes: list[tuple[int, ...]]) -> list[ParameterSpec]:
    return [ParameterSpec(f"p{i}", shape, tuple(range(len(shape)))) for i, shape in enumerate(shapes)]


PARAMETERS = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=6).map(specs_of)


@settings(max_examples=300, deadline=None)
@given(PARAMETERS, st.integers(1, 70), st.sampled_from([1, 4, 8]), st.sampled_from(["row", 3]), st.integers(1, 99))
def test_blocks_cut_no_granule_on_any_rank(specs, world, align, granule, segment_numel):
    blocks = Blocks(granule)
    granules = [blocks.of(spec.shape, spec.order) for spec in specs]
    layout = plan_blocks(specs, granules, world, align, segment_numel, "blocks")
    for slot, size in zip(layout.slots, granules, strict=True):
        starts = [layout.part(slot, rank) for rank in range(world)]
        for part in starts:
            if part.numel:
                assert part.start % size == 0
                assert part.numel % size == 0 or part.start + part.numel == slot.numel


@settings(max_examples=300, deadline=None)
@given(PARAMETERS, st.integers(1, 70), st.sampled_from([1, 4, 8]))
def test_owner_keeps_every_parameter_whole(specs, world, align):
    layout = plan_owner(specs, world, align)
    for slot in layout.slots:
        held = [part.numel for rank in range(world) if (part := layout.part(slot, rank)).numel]
        assert held == ([slot.numel] if slot.numel else [])
    rounded = [-(-slot.numel // align) * align for slot in layout.slots]
    best = max(align, *rounded, -(-sum(rounded) // world // align) * align)
    assert bool(layout.note) == (layout.gathered_numel > 2 * layout.parameter_numel)
    assert best <= layout.shard_numel <= 4 / 3 * best + sum(rounded) / world + align  # balanced


WIDTH, HIDDEN, KV = 4096, 14336, 1024
LAYER = [(WIDTH,), (WIDTH, WIDTH), (KV, WIDTH), (KV, WIDTH), (WIDTH, WIDTH), (WIDTH,), (HIDDEN, WIDTH), (HIDDEN, WIDTH),
         (WIDTH, HIDDEN)]  # fmt: skip


@pytest.mark.parametrize("world", [8, 64, 256, 1024])
@pytest.mark.parametrize("granule", ["row", 32, 128 * 128])
def test_real_layers_are_planned_at_once(world, granule):
    specs, blocks = specs_of(LAYER), Blocks(granule)
    start = time.process_time()
    layout = plan_blocks(specs, [blocks.of(s.shape, s.order) for s in specs], world, 8, 1 << 20, "blocks")
    assert time.process_time() - start < 0.5
    assert layout.gathered_numel < 1.1 * layout.parameter_numel


def test_incompatible_granules_get_collectives_of_their_own():
    """Rows of 1021 and of 1019 elements: one slice length for both would be a multiple of both."""
    specs = specs_of([(64, 1021), (64, 1019)])
    alone = plan_blocks(specs, [1021, 1019], 16, 1, 100, "blocks(row)")
    assert len(alone.segments) == 2 and alone.gathered_numel == alone.parameter_numel
    assert "2 collectives with 0.0% padding instead of a single collective" in alone.note
    together = plan_blocks(specs, [1021, 1019], 16, 1, 1 << 30, "blocks(row)")
    assert len(together.segments) == 1 and together.note == ""
    assert math.prod((64, 1021)) + math.prod((64, 1019)) < together.gathered_numel


@pytest.mark.parametrize("granule", [0, -1, "column", 1.5, True, None])
def test_what_is_no_granule(granule):
    with pytest.raises(LayoutError, match="Blocks takes"):
        Blocks(granule)


def test_the_table_in_the_docs_is_what_the_code_computes():
    docs = Path(__file__).parents[2] / "docs"
    assert runpy.run_path(str(docs / "padding.py"))["page"]() == (docs / "padding.md").read_text()


def test_long_rows_on_many_ranks_fall_back_to_rows():
    """7 rows of 1023 over 64 ranks: blocks would make every slice a multiple of 1023 and of the alignment, 4092."""
    specs = specs_of([(7, 1023), (7,), (13, 7), (13,), (1023, 13), (1023,)])
    granules = [Blocks().of(spec.shape, spec.order) for spec in specs]
    blocks = plan_blocks(specs, granules, 64, 4, 1 << 20, "blocks(row)")
    chosen = plan_blocks(specs, granules, 64, 4, 1 << 20, "blocks(row)", whole_rows=True)
    assert blocks.kind == "flat" and chosen.kind == "rows"
    assert chosen.gathered_numel < 0.4 * blocks.gathered_numel
    assert chosen.name == "blocks(row) as rows" and "a copy, instead of blocks" in chosen.note
    few = plan_blocks(specs, granules, 2, 4, 1 << 20, "blocks(row)", whole_rows=True)
    assert few.kind == "flat" and few.note == ""
