"""Builds a unit from parameters: classes them into buckets, lays them out, and replaces them by sharded ones."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from ..forms import (
    OWNER_KEY,
    SUCCESSOR_KEY,
    Chunks,
    Draft,
    Form,
    Owner,
    TensorParallel,
    attributes_of,
    chunk_of,
    explicit_grad_dtype,
    hooks_onto,
    is_extension,
    retire,
    successor_of,
    take_grad_dtype,
)
from ..layout import Blocks, Layout, ParameterSpec
from ..mesh import MeshAxes, refuse_misread, resolve_mesh
from ..policies import MixedPrecisionPolicy
from ..torch_private.local_tensor import local_part
from .bucket import Bucket
from .find import Found
from .messages import (
    mesh_on_another_device,
    not_cut_into_blocks,
    placement_on_missing_dim,
    unusable_override,
    unusable_placement,
)
from .plan_bucket import BuildSettings, plan_bucket
from .unit import Unit

logger = logging.getLogger("fullshard")


@dataclass
class PlannedBucket:
    """A bucket to be: its parameters, its layout and form, and its own settings.

    Attributes:
        chunks: for extensions, the shard with its values; None for plain parameters.
    """

    items: list[Found]
    layout: Layout
    form: Form
    settings: BuildSettings
    chunks: Chunks | None = None


def plan_unit(parameters: Sequence[Found], settings: BuildSettings) -> list[PlannedBucket]:
    """Class parameters into buckets and lay them out. Changes nothing.

    Raises:
        LayoutError: the layout cannot hold a parameter.
        ConfigError: an unusable placement, mesh, or combination; an `AssertedError` if the parameter lacks the dim.
    """
    classes: dict[tuple[Any, ...], tuple[BuildSettings, list[Found]]] = {}
    for item in parameters:
        parameter = item.parameter
        item.placement, axes = choose_placement(item, settings)
        own = replace(settings, axes=axes, policy=policy_of(item.name, parameter, settings.policy))
        if is_block_shard(item.placement):
            own = replace(own, layout=Blocks(parameter.shape[-1]))
        if is_extension(parameter):
            own = replace(own, extensions=settings.policy)
        kind = parameter.dtype, parameter.requires_grad, parameter.is_meta, explicit_grad_dtype(parameter)
        key = *kind, axes, own.policy.param_dtype, own.layout, own.extensions is not None
        classes.setdefault(key, (own, []))[1].append(item)
    planned = []
    for own, items in classes.values():
        layout, form = plan_bucket([_spec(item) for item in items], items[0].parameter.dtype, own)
        bucket = PlannedBucket(items, layout, form, own)
        for item in items:
            item.split = _split(item, own)
        if not form.plain:
            keep = None if own.home is None else own.home.keep
            rows = [chunk_of(i.parameter, slot, own.axes, keep) for i, slot in zip(items, layout.slots, strict=True)]
            bucket.chunks = Chunks(layout.slots, rows)
        planned.append(bucket)
    return planned


@torch.inference_mode(False)  # these tensors must serve training later
def build_unit(parameters: Sequence[Found], settings: BuildSettings) -> Unit:
    """Create the buckets and put the sharded parameters in the places of the originals.

    Refuses everything that it can refuse before the first place is written.

    Raises:
        LayoutError, ConfigError: see `plan_unit`.
    """
    planned = plan_unit(parameters, settings)
    for bucket in planned:
        if bucket.layout.note:
            logger.info("%s: %s", bucket.layout.name, bucket.layout.note)
    buckets = []
    for plan in planned:
        drafts = [_draft(item, plan.form.keeps_originals) for item in plan.items]
        buckets.append(Bucket(drafts, plan.layout, plan.form, plan.settings, plan.chunks))
    unit = Unit(buckets, settings)
    for plan, built in zip(planned, buckets, strict=True):
        for item, member in zip(plan.items, built.members, strict=True):
            member.sharded.__dict__[OWNER_KEY] = Owner(unit)
            for place in member.places:
                place.show(member.sharded)
            if member.sharded is item.parameter:
                continue
            if item.owner is not None:
                item.parameter.__dict__[SUCCESSOR_KEY] = member.sharded
            else:
                retire(item.parameter, item.name, member.sharded)
    return unit


def _split(item: Found, settings: BuildSettings) -> TensorParallel | None:
    """Return how a parameter that is already a DTensor is split; None for others."""
    if item.owner is not None or not isinstance(item.parameter, DTensor):
        return None
    apart = settings.layout == "flat"  # the wrapper: its sharded parameters are plain tensors
    return TensorParallel.of(item.parameter, item.name, settings.axes, _spec(item).dim, settings.spmd, apart)


def _draft(item: Found, keep_object: bool) -> Draft:
    """Draft a parameter; a tied one that a unit below had taken comes back whole, with the places it had there."""
    if item.owner is None:
        return Draft(item.name, item.parameter, item.places, item.split)
    item.parameter = successor_of(item.parameter)  # a different parameter that left its unit may have moved it
    places, full = item.owner.give_up(item.parameter)
    if keep_object:
        original = item.parameter
        original.data = full
    else:
        original = nn.Parameter(full, requires_grad=item.parameter.requires_grad)
        original.__dict__.update(attributes_of(item.parameter))
        take_grad_dtype(original, item.parameter)
        hooks_onto(original, item.parameter)
    return Draft(item.name, original, [*places, *item.places])


def policy_of(name: str, parameter: nn.Parameter, policy: MixedPrecisionPolicy) -> MixedPrecisionPolicy:
    """Return a parameter's policy: `param_dtype_override_fn` may keep it in its own dtype.

    Raises:
        ConfigError: it returned a different dtype, or an object that is not a dtype.
    """
    override = policy.param_dtype_override_fn
    if override is None:
        return policy
    dtype, chosen = parameter.dtype, override(parameter)
    if chosen is not None and chosen not in (dtype, policy.param_dtype):
        raise unusable_override(name, policy.param_dtype, dtype, chosen)
    return replace(policy, param_dtype=None) if chosen is dtype and dtype is not policy.param_dtype else policy


def choose_placement(item: Found, settings: BuildSettings) -> tuple[Any, MeshAxes]:
    """Return the placement (None: the default) and mesh axes that `shard_placement_fn` chose for a parameter.

    Raises:
        ConfigError: it returned an unusable value.
    """
    chosen: Any = settings.placement(item.parameter) if settings.placement is not None else None
    placement, mesh = chosen, None
    if hasattr(chosen, "placement"):  # ShardPlacementResult: ours, or PyTorch's, whose mesh is in a `mesh_info`
        placement, mesh = chosen.placement, getattr(chosen, "mesh", None)
        if mesh is None:
            mesh = getattr(getattr(chosen, "mesh_info", None), "mesh", None)
    blocks = is_block_shard(placement)
    if blocks and (not item.parameter.dim() or isinstance(item.parameter, DTensor) or is_extension(item.parameter)):
        raise not_cut_into_blocks(item.name, item.parameter)
    if placement is not None and not blocks and (not isinstance(placement, Shard) or settings.layout != "rows"):
        raise unusable_placement(item.name, placement, settings.layout)
    if mesh is None:
        return placement, settings.axes
    if isinstance(mesh, MeshAxes):  # the planner's: there are no groups
        return placement, mesh
    if mesh != settings.axes.mesh:
        refuse_misread(mesh)
    axes = resolve_mesh(mesh)
    if axes.device != settings.axes.device:
        raise mesh_on_another_device(item.name, settings.axes.device, axes.device)
    return placement, axes


def is_block_shard(placement: object) -> bool:
    """Whether it is a `BlockShard` of torch 2.16, recognised by name: experts [E, r, c] cut between rows of c."""
    return type(placement).__name__ == "BlockShard"


def _spec(item: Found) -> ParameterSpec:
    parameter, placement = item.parameter, item.placement
    if item.owner is None and isinstance(parameter, DTensor):
        parameter = local_part(parameter)
    shape, order = tuple(parameter.shape), None
    if item.owner is not None:  # its sharded form may have a different shape than the whole
        slot = next(member.slot for member in item.owner.members if member.sharded is parameter)
        shape, order = slot.shape, slot.spec.order
    dim = 0 if placement is None or is_block_shard(placement) else placement.dim
    dims = max(len(shape), 1)
    if not -dims <= dim < dims:
        raise placement_on_missing_dim(item.name, dims, shape, placement)
    return ParameterSpec(item.name, shape, order or memory_order(parameter), dim % dims)


def memory_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the dims from outermost to innermost in memory if the tensor has no gaps, else as if contiguous."""
    natural = tuple(range(tensor.dim()))
    if tensor.is_contiguous():
        return natural
    strides = tensor.stride()
    order = tuple(sorted(natural, key=lambda dim: (-strides[dim], dim)))
    return order if tensor.permute(order).is_contiguous() else natural
