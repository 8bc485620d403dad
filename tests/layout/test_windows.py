"""Windows hold every element once, from the rank that has it, and little else."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from fullshard.layout import ParameterSpec, plan_blocks, plan_flat, plan_owner, plan_rows, window_of

SMALL = 1 << 14

shapes = st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple), min_size=1, max_size=6)


def plans(specs: list[ParameterSpec], world: int):
    yield plan_flat(specs, world, 4)
    yield plan_rows(specs, world, 4, 1 << 30)
    yield plan_owner(specs, world, 4)
    yield plan_blocks(specs, [max(1, math.prod(spec.shape[1:])) for spec in specs], world, 4, 1 << 30, "blocks")


@given(shapes, st.integers(1, 5), st.data())
def test_a_window_holds_every_element_once(shapes, world, data):
    """As one process sees it: every part is copied where the plan says, and read back where it says."""
    specs = [
        ParameterSpec(f"p{i}", shape, tuple(data.draw(st.permutations(range(len(shape))))))
        for i, shape in enumerate(shapes)
    ]
    for layout in plans(specs, world):
        chosen = data.draw(st.lists(st.sampled_from(layout.slots), min_size=1, unique_by=id))
        window = window_of([(layout, slot) for slot in chosen])
        total = sum(slot.numel for slot in chosen)
        assert window.numel <= total + max(total // 8, SMALL)
        taken = [0] * window.numel
        for index, slot in enumerate(chosen):
            held = sorted(
                element for lot in window.lots[index] for element in elements(layout.view_in_whole(slot, lot.part))
            )
            assert held == list(range(slot.numel)), (layout.name, slot)
            at = window.whole_at(index)
            for lot in window.lots[index]:
                start, length = window.starts[lot.rank], window.lengths[lot.rank]
                assert start <= lot.at and lot.at + lot.part.numel <= start + length
                assert lot.part == layout.part(slot, lot.rank)
                places = list(elements((lot.part.shape, lot.part.stride, lot.at)))
                for place, element in zip(places, elements(layout.view_in_whole(slot, lot.part)), strict=True):
                    taken[place] += 1
                    assert at is None or place == at + element
        assert max(taken, default=0) <= 1 and sum(taken) == total


def elements(view: tuple[tuple[int, ...], tuple[int, ...], int]):
    """The places of a strided view's elements, in row-major order."""
    shape, strides, offset = view
    for number in range(math.prod(shape)):
        place, rest = offset, number
        for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
            rest, index = divmod(rest, extent)
            place += index * stride
        yield place


def test_a_tensor_on_one_rank_of_many_is_sent_once():
    """And is no multiple of itself in memory; where all hold as much, one gather does."""
    specs = [ParameterSpec(f"p{i}", (1000, 1000), (0, 1)) for i in range(64)]
    owner = plan_owner(specs, 64, 4)
    alone = window_of([(owner, owner.slots[0])])
    assert alone.numel == 1_000_000 and not alone.even and sum(n > 0 for n in alone.lengths) == 1
    together = window_of([(owner, slot) for slot in owner.slots])
    assert together.even and together.numel == 64_000_000
