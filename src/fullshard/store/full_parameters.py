"""Whole parameters, for another engine: rollouts, evaluation, averages of weights, export."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn

from ..checkpoint.whole import BATCH_BYTES, Wanted, batches
from ..errors import PhaseError, check_module, invalid_argument
from .contents import table_of
from .lora import Export, merged_parameters
from .ranks import Ranks


def full_parameters(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    bucket_bytes: int = BATCH_BYTES,
    merge_lora: bool = False,
    buffers: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every parameter of a sharded model, whole, on every rank. Collective.

        for name, tensor in fullshard.full_parameters(model, dtype=torch.bfloat16):
            engine.load_weights([(name, tensor)])

    Parameters have the order and the names of the unwrapped model's `named_parameters`, a tied parameter once, and are
    on the device where the model computes. They are read from the shards; neither shards nor gathered units are changed
    or freed. The caller owns each tensor, and may write to it and keep it.

    Memory: parameters are gathered `bucket_bytes` at a time. A tensor keeps its whole bucket alive, and so does the
    loop's own variable while the next bucket is gathered. A loop that copies what it needs takes at most two buckets,
    or three times a parameter that is larger than a bucket. Tensor parallelism takes another bucket, `merge_lora`
    another weight in the widest of the dtypes that are added.

    Ranks go from bucket to bucket together. A rank that stops early (`break`, an exception in the loop) reports it when
    the generator is closed: at once if only the loop refers to it, else by its `close()`. It then waits for the others,
    which raise at their next bucket. If all stop in the same bucket, nothing is raised. A rank that stops without
    closing the generator, or does not call this function at all, leaves the others waiting, which the watcher reports.

    Args:
        model: sharded by either front-end, in whole or in part, or not at all.
        dtype: cast floating-point parameters to this before they are sent; None: as they are stored.
        bucket_bytes: bytes of whole values to gather together. A larger parameter is gathered alone.
        merge_lora: for a PEFT model: add LoRA's weights to those they adapt (B @ A times the scaling, for all active
            adapters), under the names of the base model, as `merge_and_unload()` does. The sum has the wider of the
            dtypes of weights and adapters, and is then cast to `dtype`.
        buffers: also yield this rank's persistent buffers, after the parameters.
        process_group: the ranks that have the model; None: all.

    Yields:
        Name and tensor.

    Raises:
        ConfigError: an invalid argument, or with `merge_lora` an adapter that cannot be merged.
        PhaseError: called in the middle of a step or inside `summon_full_params`.
        CheckpointError: another rank stopped early or failed, or a parameter has no values.
    """
    check_module("full_parameters", model)
    check_dtype(dtype)
    check_bucket_bytes(bucket_bytes)
    return _export(model, dtype, bucket_bytes, merge_lora, buffers, Ranks(process_group))


def check_dtype(dtype: torch.dtype | None) -> None:
    """Check that parameters can be cast to `dtype`.

    Raises:
        ConfigError: it is not a floating-point dtype.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise invalid_argument("dtype=", dtype, "a floating-point torch.dtype, or None")


def check_bucket_bytes(bucket_bytes: int) -> None:
    """Check the bytes of whole values to gather together.

    Raises:
        ConfigError: they are not a positive int.
    """
    if not isinstance(bucket_bytes, int) or bucket_bytes <= 0:
        raise invalid_argument("bucket_bytes=", bucket_bytes, "a positive number of bytes")


def _export(
    model: nn.Module, dtype: torch.dtype | None, bucket_bytes: int, merge_lora: bool, buffers: bool, ranks: Ranks
) -> Iterator[tuple[str, torch.Tensor]]:
    exports = ranks.together("full_parameters", lambda: exports_of(model, dtype, merge_lora, buffers))
    yield from stream(exports, bucket_bytes, ranks)


def exports_of(model: nn.Module, dtype: torch.dtype | None, merge_lora: bool, buffers: bool) -> list[Export]:
    """The tensors of `full_parameters`, in order. No communication."""
    table = table_of(model)
    if merge_lora:
        return merged_parameters(model, table, dtype, buffers)
    rows = [*table.parameters, *(table.buffer_rows if buffers else ())]
    return [Export(Wanted(row.name, row, dtype)) for row in rows]


def stream(exports: Sequence[Export], bucket_bytes: int, ranks: Ranks) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors, gathered bucket by bucket. Collective; see `full_parameters` for what happens if a rank stops.

    A consumer that fails can report its error to the other ranks: `generator.throw(error)`.
    """
    gathered = [tensor for export in exports for tensor in (*export.factors, export.wanted)]
    export_of: dict[int, Export] = {id(export.wanted): export for export in exports}
    factors: dict[int, torch.Tensor] = {}  # whole weights of adapters, until they are added
    remaining = list(batches(gathered, bucket_bytes))[::-1]
    name = "the first parameter"
    while remaining:
        batch = remaining.pop()
        ranks.together("full_parameters", batch.pack)
        wholes = batch.gather()[::-1]
        del batch
        try:
            while wholes:
                wanted, whole = wholes.pop()
                export = export_of.get(id(wanted))
                if export is None:
                    factors[id(wanted)] = whole.clone()  # small; does not keep its bucket alive
                    continue
                name = wanted.name
                whole = export.finish(whole, factors)
                yield name, whole
                del whole
        except BaseException as stop:  # GeneratorExit if the consumer stopped
            if remaining:
                _report(ranks, name, stop)
            raise


def _report(ranks: Ranks, name: str, stop: BaseException) -> None:
    """Report to the other ranks, when they gather the next bucket, that this rank has stopped."""
    error: Exception | None = stop if isinstance(stop, Exception) else None
    if error is None:
        error = PhaseError(
            "The loop over full_parameters stopped before its end.",
            parameter=name,
            expected="all ranks to iterate over all parameters, or to stop at the same parameter",
            remedy="stop on all ranks alike; an exception in the loop's body stops it, too",
        )
    with contextlib.suppress(Exception):  # this rank raises `stop`
        ranks.meet(error, "full_parameters")
