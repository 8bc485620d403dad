"""What `fully_shard` or the wrapper made of a model, in words."""

from __future__ import annotations

from torch import nn

from ..names import clean_path
from ..runtime import runner_of


def describe(model: nn.Module) -> str:
    """A table of the units of `model`: name, layout, parameters, bytes when gathered and per rank, padding.

    Returns:
        Text of one line per bucket under a header; a sentence if the model has no units.
    """
    rows: list[tuple[str, ...]] = []
    seen: set[int] = set()
    for path, module in model.named_modules():
        runner = runner_of(module)
        if runner is None or id(runner) in seen:
            continue
        seen.add(id(runner))
        for bucket in runner.unit.buckets:
            layout = bucket.layout
            padding = layout.gathered_numel - layout.parameter_numel
            rows.append(
                (
                    clean_path(path) or "(root)",
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
    return "\n".join(
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(r, widths, strict=True)))
        for r in [header, *rows]
    )
