"""What can be said of a unit's buckets: for tables and for programs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..comm import Comm
from ..mesh import MeshAxes
from ..names import size
from ..runtime import Runner
from ..shard import Bucket, ReduceSettings, Unit


@dataclass(frozen=True)
class BucketFacts:
    """One bucket.

    Attributes:
        parameters: names, from the root once the model has run; before that from the module that was sharded.
        layout: the name of its kind.
        mesh: how the mesh was read, and what becomes of gradients, in words.
        elements: of the parameters together.
        padding: elements that the layout adds, over all ranks.
        gathered_bytes: while it is gathered, in the compute dtype.
        rank_bytes: of this rank's shard.
        storage_dtype, compute_dtype: of the shard, and of what is gathered.
        gather_dtype, scatter_dtype: the 8-bit dtypes in which parameters and gradients are sent, if any.
        trains: whether any of the parameters requires a gradient.
    """

    parameters: tuple[str, ...]
    layout: str
    mesh: str
    elements: int
    padding: int
    gathered_bytes: int
    rank_bytes: int
    storage_dtype: torch.dtype
    compute_dtype: torch.dtype
    gather_dtype: torch.dtype | None
    scatter_dtype: torch.dtype | None
    trains: bool


def bucket_facts(runner: Runner, bucket: Bucket) -> BucketFacts:
    """The facts of one bucket of a unit."""
    layout, settings = bucket.layout, runner.settings
    root = runner.root.top.settings.axes if runner.root is not None else settings.axes
    return BucketFacts(
        parameters=tuple(member.name for member in bucket.members),
        layout=layout.name,
        mesh=f"{_ranks(bucket.axes)}; gradients: {_gradients(bucket.axes, settings.reduce, settings.comm, root)}",
        elements=layout.parameter_numel,
        padding=layout.gathered_numel - layout.parameter_numel,
        gathered_bytes=bucket.full_bytes,
        rank_bytes=layout.shard_numel * bucket.storage_dtype.itemsize,
        storage_dtype=bucket.storage_dtype,
        compute_dtype=bucket.compute_dtype,
        gather_dtype=bucket.gather_dtype,
        scatter_dtype=bucket.scatter_dtype,
        trains=any(member.sharded.requires_grad for member in bucket.members),
    )


def _ranks(axes: MeshAxes) -> str:
    """How a mesh was read."""
    ways, copies = axes.shard.size, axes.replicate.size if axes.replicate is not None else 1
    split = f"sharded {ways} ways" if ways > 1 else "not sharded"
    if copies > 1:
        split += f"{' x' if ways > 1 else ','} {copies} replicas"
    return f"{axes.world} rank{'s' * (axes.world > 1)}: {split}"


def _gradients(axes: MeshAxes, reduce: ReduceSettings, comm: Comm, root: MeshAxes) -> str:
    """How a gradient is made of the ranks' own; `root` is the mesh over which tokens are counted."""
    if getattr(comm, "scales_itself", False):
        return f"as a communication hook makes them, over {axes.world}"
    if reduce.reduction == "tokens":
        return f"sum over {axes.world}, divided by the count of tokens of {root.world}"
    if reduce.reduction == "sum":
        return f"sum over {axes.world}"
    if reduce.divide_factor is not None and reduce.divide_factor != axes.world:
        return f"sum over {axes.world}, divided by {reduce.divide_factor:g}"
    return f"mean over {axes.world}"


def plan_in_words(unit: Unit) -> str:
    """What a unit calls when it is gathered and reduced."""
    plan = unit.plan
    if plan is None:
        return "no plan yet: one is made at the first gather (at each, if it is offloaded or resharded to fewer ranks)"
    gather = f"gathers {size(unit.gathered_bytes)} in {len(plan.gathers)} collective{'s' * (len(plan.gathers) != 1)}"
    if plan.copied_bytes:
        gather += f", copies {size(plan.copied_bytes)} out of it"
    gather += f", holds {size(plan.whole_bytes + plan.copied_bytes)}"
    if plan.varying:
        gather += " and what tensor subclasses make"
    reduced = [gradients for gradients in unit.gradients if gradients.bucket.trains]
    if not reduced:
        return f"{gather}; reduces nothing"
    dtypes = dict.fromkeys(str(gradients.reduce_dtype).removeprefix("torch.") for gradients in reduced)
    reduce = f"reduces {size(sum(gradients.buffer_bytes for gradients in reduced))} of {' and '.join(dtypes)}"
    replicated = any(gradients.bucket.axes.replicate is not None for gradients in reduced)
    return f"{gather}; {reduce}{', then its slice between replicas' if replicated else ''}"
