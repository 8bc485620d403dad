"""Whether all ranks hold the same units, from the same weights: asked once, at a model's first forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from ..agreement import Line, check_same_model, check_same_weights, meet
from ..comm import Comm
from ..mesh import Axis
from ..shard import Unit
from .settings import UnitSettings


class Alike(Protocol):
    """What is asked of a unit: its `Runner`."""

    unit: Unit
    settings: UnitSettings
    held: int


def check_alike(
    units: Sequence[Alike], own: UnitSettings, ignored: Sequence[tuple[str, torch.Tensor]], comm: Comm
) -> None:
    """Compare units, their settings and their weights, and make ranks' watchers known to each other. Collective.

    Args:
        units: all under a root.
        own: the root's settings.
        ignored: parameters that are left alone, by name.
        comm: collectives.

    Raises:
        DivergenceError: ranks hold other units; see `agreement/model.py` and `agreement/weights.py`.
    """
    lines = [Line("(settings of the root)", "none", f"check={own.check!r}, unused={own.unused!r}")]
    axes: dict[int, Axis] = {}
    device = None
    for one in units:
        if one.unit.kept_axis is not None:
            axes[id(one.unit.kept_axis.group)] = one.unit.kept_axis
        for bucket in one.unit.buckets:
            device = bucket.axes.device
            axes |= {id(axis.group): axis for axis in bucket.axes.all}
            for member in bucket.members:
                dtype = str(bucket.storage_dtype).removeprefix("torch.")
                compute = str(bucket.compute_dtype).removeprefix("torch.")
                grad = "trainable" if member.sharded.requires_grad else "frozen"
                facts = f"{dtype}, computed in {compute}, {grad}, layout {bucket.layout.name}"
                facts += ", in keep_gathered" if one.held else ""
                lines.append(Line(member.name, str(member.slot.shape), facts, one.unit.name))
        # After the parameters: one of another dtype is told by its own line, not by what the unit's gradients become.
        if reduced := sorted({str(gradients.reduce_dtype).removeprefix("torch.") for gradients in one.unit.gradients}):
            facts = f"gradients reduced in {', '.join(reduced)}{one.settings.reduce.fact}"
            lines.append(Line("(gradients)", "none", facts, one.unit.name))
    if device is not None:
        left = [Line(name, str(tuple(parameter.shape))) for name, parameter in ignored]
        for axis in axes.values():
            meet(axis, comm, device)
            check_same_model(lines, left, [axis], comm, device)
        check_same_weights([one.unit for one in units], comm)
