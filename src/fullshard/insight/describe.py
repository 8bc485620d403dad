"""What `fully_shard` or the wrapper made of a model, in words."""

from __future__ import annotations

from torch import nn

from ..comm import Comm
from ..mesh import MeshAxes
from ..names import clean_path
from ..runtime import ReduceSettings, runner_of


def describe(model: nn.Module) -> str:
    """How the mesh was read, what becomes of gradients, and a table of the units of `model`.

    The first lines say how many ranks there are, over how many the elements are split and how often the split copies
    are repeated, and how a gradient is made of the ranks':

        8 ranks: sharded 2 ways x 4 replicas; gradients: mean over 8

    One such line for all units that are alike in this, with their names if there are several. Then the table: name,
    layout, parameters, bytes when gathered and per rank, padding.

    Returns:
        Lines about meshes, a header, and one line per bucket; a sentence if the model has no units.
    """
    rows: list[tuple[str, ...]] = []
    meshes: dict[str, list[str]] = {}
    seen: set[int] = set()
    for path, module in model.named_modules():
        runner = runner_of(module)
        if runner is None or id(runner) in seen:
            continue
        seen.add(id(runner))
        settings, name = runner.settings, clean_path(path) or "(root)"
        for bucket in runner.unit.buckets:
            layout = bucket.layout
            padding = layout.gathered_numel - layout.parameter_numel
            root = runner.root.top.settings.axes if runner.root is not None else settings.axes
            line = f"{_ranks(bucket.axes)}; gradients: {_gradients(bucket.axes, settings.reduce, settings.comm, root)}"
            names = meshes.setdefault(line, [])
            if name not in names:
                names.append(name)
            rows.append(
                (
                    name,
                    layout.name,
                    f"{len(layout.slots)}",
                    f"{layout.parameter_numel:,}",
                    f"{bucket.full_bytes / 2**20:.2f}",
                    f"{layout.shard_numel * bucket.storage_dtype.itemsize / 2**20:.2f}",
                    f"{100 * padding / max(layout.parameter_numel, 1):.1f}%",
                )
            )
    if not rows:
        return "no units: neither fully_shard nor FullyShardedDataParallel was applied to this model"
    header = ("unit", "layout", "tensors", "elements", "MiB gathered", "MiB per rank", "padding")
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    table = [
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(r, widths, strict=True)))
        for r in [header, *rows]
    ]
    lines = [line if len(meshes) == 1 else f"{line} ({_some(names)})" for line, names in meshes.items()]
    return "\n".join([*lines, *table])


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


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more units"
