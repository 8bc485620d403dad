"""What `fully_shard` or the wrapper made of a model, in words."""

from __future__ import annotations

from torch import nn

from ..names import clean_path
from ..runtime import runner_of
from .facts import bucket_facts, size


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
        name = clean_path(path) or "(root)"
        for bucket in runner.unit.buckets:
            facts = bucket_facts(runner, bucket)
            names = meshes.setdefault(facts.mesh, [])
            if name not in names:
                names.append(name)
            rows.append(
                (
                    name,
                    facts.layout,
                    f"{len(facts.parameters)}",
                    f"{facts.elements:,}",
                    size(facts.gathered_bytes),
                    size(facts.rank_bytes),
                    f"{100 * facts.padding / max(facts.elements, 1):.1f}%",
                )
            )
    if not rows:
        return "no units: neither fully_shard nor FullyShardedDataParallel was applied to this model"
    header = ("unit", "layout", "tensors", "elements", "gathered", "per rank", "padding")
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    table = [
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(r, widths, strict=True)))
        for r in [header, *rows]
    ]
    lines = [line if len(meshes) == 1 else f"{line} ({_some(names)})" for line, names in meshes.items()]
    return "\n".join([*lines, *table])


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more units"
