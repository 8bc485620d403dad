"""The planners: from parameters and a world size to a `Layout`. Pure, and the same on every rank.

`flat` needs no copy and almost no padding; `rows` splits parameters as `torch.chunk` does, which `DTensor` understands.
Sizes in elements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from .layout import Layout, ParameterSpec, Segment, Slot, round_up
from .messages import scalar_in_rows, uneven_dim

LITTLE_PADDING, SOME_PADDING = 1 / 64, 1 / 4
"""Limits of `plan_rows`: where a kernel more costs little (CPUs), and where it costs time (accelerators)."""


def plan_flat(specs: Sequence[ParameterSpec], world: int, align: int) -> Layout:
    """Parameters back to back in a single segment, cut anywhere.

    Args:
        specs: the bucket's parameters, in order.
        world: ranks on the shard axis, at least 1.
        align: elements per 16 bytes (of the narrowest dtype in which the bucket is stored).

    Returns:
        A layout whose only padding brings each parameter and each slice to a multiple of `align`.
    """
    slots, offset = [], 0
    for spec in specs:
        slots.append(Slot(spec, 0, offset, offset))
        offset = round_up(offset + math.prod(spec.shape), align)
    slice_numel = round_up(-(-offset // world), align)
    segment = Segment(0, slice_numel, 0)
    return Layout("flat", world, align, tuple(slots), (segment,), world * slice_numel)


def plan_rows(
    specs: Sequence[ParameterSpec],
    world: int,
    align: int,
    own_segment_numel: int,
    most_padding: float = LITTLE_PADDING,
) -> Layout:
    """Every parameter cut on `spec.dim` into `torch.chunk`'s chunks.

    Parameters of at least `own_segment_numel` elements whose cut dim is outermost in memory get a separate collective
    and are gathered in place; all others share a collective and are copied out. In the shared slice parameters are
    ordered by how well their chunks align, so that it has padding only at its end. If rows divide evenly, or nearly
    so, each parameter has space for equal chunks in the full bucket: a single kernel then copies all of them
    (`Segment.in_columns`).

    Args:
        specs: the bucket's parameters, in order; at least 1-dimensional.
        world: ranks on the shard axis, at least 1.
        align: elements per 16 bytes.
        own_segment_numel: number of elements from which a collective costs less than a copy in and out.
        most_padding: padding for equal chunks in the full bucket, as a share of the parameters' elements, that a single
            kernel is worth.

    Raises:
        LayoutError: a 0-dimensional parameter, or an uneven cut on a dim other than 0.
    """
    for spec in specs:
        _check_rows(spec, world)
    separate = [i for i, spec in enumerate(specs) if _comes_out_whole(spec, world, align, own_segment_numel)]
    shared = [i for i in range(len(specs)) if i not in set(separate)]
    segments: list[Segment] = []
    slots: dict[int, Slot] = {}
    shard = full = 0
    for i in separate:
        slice_numel = specs[i].chunk_numel(world)
        slots[i] = Slot(specs[i], len(segments), 0, full)
        segments.append(Segment(shard, slice_numel, full))
        shard, full = shard + slice_numel, full + round_up(world * slice_numel, align)
    if shared:
        shared.sort(key=lambda i: (-math.gcd(specs[i].chunk_numel(world), align), i))
        in_place = world == 1
        in_columns = not in_place and _has_columns([specs[i] for i in shared], world, align, most_padding)
        start, offset = full, 0
        for i in shared:
            slots[i] = Slot(specs[i], len(segments), offset, full)
            width = specs[i].chunk_numel(world)
            full = round_up(full + (world * width if in_columns else math.prod(specs[i].shape)), align)
            offset = full - start if in_place else offset + width
        slice_numel = round_up(offset, align)
        segments.append(Segment(shard, slice_numel, start if in_place else None, in_columns))
        if in_columns:
            full += world * (slice_numel - offset)
    return Layout("rows", world, align, tuple(slots[i] for i in range(len(specs))), tuple(segments), full)


def _check_rows(spec: ParameterSpec, world: int) -> None:
    if not spec.shape:
        raise scalar_in_rows(spec.name)
    assert 0 <= spec.dim < len(spec.shape), f"parameter {spec.name} of shape {spec.shape} has no dim {spec.dim}"
    if spec.dim != 0 and spec.shape[spec.dim] % world:
        raise uneven_dim(spec.name, spec.shape, spec.dim, world)


def _has_columns(specs: Sequence[ParameterSpec], world: int, align: int, most_padding: float) -> bool:
    """Whether the parameters of a shared slice are padded to equal chunks: only if that takes little memory."""
    if any(spec.dim != 0 or spec.order != tuple(range(len(spec.shape))) for spec in specs):
        return False
    numel = sum(math.prod(spec.shape) for spec in specs)
    slice_numel = round_up(sum(spec.chunk_numel(world) for spec in specs), align)
    return numel > 0 and world * slice_numel - numel <= numel * most_padding


def _comes_out_whole(spec: ParameterSpec, world: int, align: int, own_segment_numel: int) -> bool:
    """Whether a parameter is large enough for a separate collective, and contiguous after it: cut along the dim that is
    outermost in memory, into chunks that need no rounding."""
    large = math.prod(spec.shape) >= max(own_segment_numel, 1)
    return large and world > 1 and spec.order[0] == spec.dim and spec.chunk_numel(world) % align == 0
