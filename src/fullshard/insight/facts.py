"""Facts about a unit's buckets and its plan."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ..comm import Comm, HookComm
from ..mesh import MeshAxes
from ..names import size
from ..runtime import Runner
from ..shard import Bucket, ReduceSettings, Unit


@dataclass(frozen=True)
class BucketFacts:
    """Facts about one bucket.

    Attributes:
        parameters: their names, relative to the root once the model has run, before that to the sharded module.
        layout: the name of the layout's kind.
        mesh: how the mesh is used, and how gradients are reduced, in words.
        elements: number of elements of all parameters.
        padding: number of elements that the layout adds, over all ranks.
        gathered_bytes: bytes of the full bucket, in the compute dtype.
        rank_bytes: bytes of this rank's shard.
        storage_dtype, compute_dtype: the dtypes of the shard and of the full bucket.
        gather_dtype, scatter_dtype, all_reduce_dtype: the 8-bit dtypes in which parameters, gradients, and gradients
            between replicas are sent, if any.
        error_feedback: see `MixedPrecisionPolicy`.
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
    all_reduce_dtype: torch.dtype | None
    error_feedback: bool
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
        all_reduce_dtype=bucket.all_reduce_dtype,
        error_feedback=bucket.error_feedback,
        trains=any(member.sharded.requires_grad for member in bucket.members),
    )


def _ranks(axes: MeshAxes) -> str:
    """How a mesh is used."""
    ways, copies = axes.shard.size, axes.copies
    split = f"sharded {ways} ways" if ways > 1 else "not sharded"
    if copies > 1:
        split += f"{' x' if ways > 1 else ','} {copies} replicas"
    return f"{axes.world} rank{'s' * (axes.world > 1)}: {split}"


def _gradients(axes: MeshAxes, reduce: ReduceSettings, comm: Comm, root: MeshAxes) -> str:
    """How the ranks' gradients are reduced; `root` is the mesh over which tokens are counted."""
    if isinstance(comm, HookComm) and comm.between:
        settings = comm.state
        kept = " with error feedback" if settings.use_error_feedback else ""
        return (
            f"mean over {axes.world}, between replicas by PowerSGD of rank {settings.matrix_approximation_rank}{kept}"
        )
    if getattr(comm, "scales_itself", False):
        return f"by a communication hook, over {axes.world}"
    if reduce.reduction == "tokens":
        return f"sum over {axes.world}, divided by the count of tokens of {root.world}"
    if reduce.reduction == "sum":
        return f"sum over {axes.world}"
    if reduce.divide_factor is not None and reduce.divide_factor != axes.world:
        return f"sum over {axes.world}, divided by {reduce.divide_factor:g}"
    return f"mean over {axes.world}"


def plan_in_words(unit: Unit) -> str:
    """The collectives of a unit's plan."""
    plan = unit.plan
    if plan is None:
        return "no plan yet: the first gather makes one (if offloaded or resharded to fewer ranks, each gather does)"
    gather = f"gathers {size(unit.gathered_bytes)} in {len(plan.gathers)} collective{'s' * (len(plan.gathers) != 1)}"
    if plan.copied_bytes:
        gather += f", copies {size(plan.copied_bytes)} out of it"
    gather += f", holds {size(plan.whole_bytes + plan.copied_bytes)}"
    if plan.varying:
        gather += " and the tensors that subclasses create"
    reduced = [gradients for gradients in unit.gradients if gradients.bucket.trains]
    if not reduced:
        return f"{gather}; reduces nothing"
    dtypes = dict.fromkeys(str(gradients.reduce_dtype).removeprefix("torch.") for gradients in reduced)
    reduce = f"reduces {size(sum(gradients.buffer_bytes for gradients in reduced))} of {' and '.join(dtypes)}"
    reduce += _sent_in(gradients.bucket.scatter_dtype for gradients in reduced)
    if any(gradients.bucket.axes.replicate is not None for gradients in reduced):
        between = _sent_in(gradients.bucket.all_reduce_dtype for gradients in reduced)
        reduce += f", then its slice between replicas{between}"
    if residual := sum(gradients.residual_bytes for gradients in reduced):
        reduce += f"; keeps {size(residual)} of it for the next"
    return f"{gather}; {reduce}"


def _sent_in(dtypes: Iterable[torch.dtype | None]) -> str:
    """In which 8-bit dtypes something is sent, as the end of a phrase."""
    names = sorted({str(dtype).removeprefix("torch.") for dtype in dtypes if dtype is not None})
    return f", sent in {' and '.join(names)}" if names else ""
