"""The names of a model between two steps, whatever shards, wraps or compiles it."""

from __future__ import annotations

from torch import nn

from ..checkpoint.names import Table
from ..errors import CheckpointError, PhaseError
from ..names import plain_name


def table_of(model: nn.Module) -> Table:
    """The names of `model`, without what wrapping and compiling put in, once what the user replaced was noticed.

    What is gathered stays as it is.

    Raises:
        PhaseError: `model` is in the middle of a step, or shows whole parameters that may be written to.
        CheckpointError: a tensor on the meta device.
    """
    table = Table(model, plain_name)
    for unit, runner in table.units:
        root = runner.root if runner is not None else None
        if unit.showing.summoned or (root is not None and (root.pass_top is not None or root.in_backward)):
            raise PhaseError(
                "Whole values of a model were asked for in the middle of a step, or inside summon_full_params.",
                parameter=unit.name or "(root)",
                remedy="ask between steps: after optimizer.step(), or before the next forward",
                topic="called-in-a-step",
            )
        unit.refresh()
    tensors = {row.name: row.parameter if row.bucket is None else row.bucket.shard for row in table.parameters}
    for name, tensor in {**tensors, **table.buffers}.items():
        if tensor.is_meta or isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer)):
            raise CheckpointError(
                "A tensor of the model has no values: it is on the meta device, or not initialised.",
                parameter=name,
                remedy="model.to_empty(device=...) and a load first; lazy modules need a forward",
                topic="weights-on-meta",
            )
    return table
