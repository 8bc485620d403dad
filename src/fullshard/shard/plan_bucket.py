"""Plans a bucket: the layout of its parameters, and the form in which they show."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..comm import Comm
from ..forms import Form, RowsForm, RunsForm, SpmdMesh, SubclassForm
from ..layout import (
    ALIGN_BYTES,
    LITTLE_PADDING,
    SOME_PADDING,
    Blocks,
    Layout,
    ParameterSpec,
    plan_blocks,
    plan_flat,
    plan_owner,
    plan_rows,
)
from ..mesh import MeshAxes
from ..policies import MixedPrecisionPolicy
from .offload import Home

MakeForm = Callable[[Layout, MeshAxes, bool], Form]
"""Creates the form for a layout, the mesh, and whether shards lie apart from the mesh's device."""


@dataclass(frozen=True)
class BuildSettings:
    """How a unit, or one of its buckets, is built: the front-end arguments that shape it.

    Attributes:
        axes, comm, policy, layout: of the bucket; of the unit, the defaults for parameters without their own.
        placement: `shard_placement_fn`.
        spmd: the mesh that contains the dims in `axes`.
        form: creates the form; None: DTensors for rows, FlatShards for runs.
        home: memory of shards and gradients, if that is not the mesh's device.
        keeps_compute_dtype: whether `.grad` keeps the compute dtype.
        reduces_as_computed: whether gradients are reduced in the compute dtype if the policy has no `reduce_dtype`: the
            wrapper's rule, and that of PyTorch's `fully_shard` before torch 2.15.
        extensions: for a bucket of extensions, the unit's policy, which is passed to them.
    """

    axes: MeshAxes
    comm: Comm
    policy: MixedPrecisionPolicy
    layout: str | Blocks
    placement: Callable[[nn.Parameter], Any] | None = None
    spmd: SpmdMesh | None = None
    form: MakeForm | None = None
    home: Home | None = None
    keeps_compute_dtype: bool = False
    reduces_as_computed: bool = False
    extensions: MixedPrecisionPolicy | None = None

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype | None:
        """The dtype in which parameters of `dtype` are gathered; None: their own."""
        return self.policy.param_dtype if dtype.is_floating_point else None


def plan_bucket(specs: Sequence[ParameterSpec], dtype: torch.dtype, settings: BuildSettings) -> tuple[Layout, Form]:
    """Return the layout of a bucket's parameters, which have this dtype, and the form in which they show."""
    apart = settings.home is not None
    compute = settings.compute_dtype(dtype) or dtype
    reduce = settings.policy.reduce_dtype or compute
    align = max(1, ALIGN_BYTES // min(dtype.itemsize, compute.itemsize, reduce.itemsize))
    if settings.extensions is not None:
        # Only gradients use this layout: in one segment, which costs no additional copy.
        numel = sum(math.prod(spec.shape) for spec in specs)
        layout = plan_rows(specs, settings.axes.shard.size, align, 1 + numel)
        return layout, SubclassForm(layout, settings.axes, settings.extensions, apart)
    layout = _layout(specs, compute, align, settings)
    form = settings.form or (RunsForm if layout.holds_runs else RowsForm)
    return layout, form(layout, settings.axes, apart)


def _layout(specs: Sequence[ParameterSpec], compute: torch.dtype, align: int, settings: BuildSettings) -> Layout:
    kind, world = settings.layout, settings.axes.shard.size
    if kind == "flat":
        return plan_flat(specs, world, align)
    if kind == "owner":
        return plan_owner(specs, world, align)
    costs = settings.comm.costs(settings.axes.shard)
    alone = costs.break_even_bytes // compute.itemsize
    padding = SOME_PADDING if costs.shares else LITTLE_PADDING
    if isinstance(kind, Blocks):
        granules = [kind.of(spec.shape, spec.order) for spec in specs]
        label = f"blocks({kind.granule})"
        return plan_blocks(specs, granules, world, align, alone, label, kind.granule == "row", padding)
    if costs.shares and len(specs) > 1:  # a single parameter costs one collective either way
        alone = 1 + max(math.prod(spec.shape) for spec in specs)
    return plan_rows(specs, world, align, alone, padding)
