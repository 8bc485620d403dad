"""Whole parameters for those who feed another engine: rollouts, evaluation, averages of weights, export."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn

from ..checkpoint.whole import BATCH_BYTES, Wanted, batches
from ..errors import ConfigError, PhaseError
from .contents import table_of
from .lora import Given, merged_parameters
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
    """Every parameter of a sharded model, whole, one after the other, on every rank. Collective.

        for name, tensor in fullshard.full_parameters(model, dtype=torch.bfloat16):
            engine.load_weights([(name, tensor)])

    Parameters come in the order and under the names of the unwrapped model's `named_parameters`, a tied one once, on
    the device where the model computes. They are read from the shards: neither these nor what is gathered is changed or
    freed. A tensor is the caller's: it may be written to and kept.

    Memory: parameters are gathered `bucket_bytes` at a time. A tensor that is kept, also by the loop's own variable
    while the next bucket is gathered, keeps its whole bucket: a loop that copies what it needs takes at most two
    buckets, and three times a parameter that is larger than one. With tensor parallelism it takes a bucket more, with
    `merge_lora` a weight in the widest of the dtypes that are added.

    Ranks go from bucket to bucket together. One that stops early (`break`, an exception in the loop) tells the others,
    who raise at their next bucket; it waits there for them. If all stop in the same bucket, nothing is raised. It is
    told when the generator is closed: at once where only the loop holds it, else by its `close()`. A rank that stops
    and does not close it, or does not call this at all, leaves the others waiting, and the watcher tells.

    Args:
        model: sharded by either front-end, in whole or in part, or not at all.
        dtype: cast floating-point parameters to this before they are sent; None: as they are stored.
        bucket_bytes: of whole values that are gathered together. A larger parameter is gathered alone.
        merge_lora: of a model that PEFT made: LoRA's weights are added to those they adapt, B @ A times the scaling of
            the active adapters, and names are those of the base model, as `merge_and_unload()` leaves them. What is
            added is added in the dtype of weights and adapters, whichever is wider, then cast to `dtype`.
        buffers: give persistent buffers, too, after the parameters: this rank's.
        process_group: the ranks that hold the model; None: all.

    Yields:
        Name and tensor.

    Raises:
        ConfigError: an invalid argument, or with `merge_lora` an adapter that cannot be merged.
        PhaseError: called in the middle of a step or inside `summon_full_params`.
        CheckpointError: another rank stopped early or failed, or a parameter has no values.
    """
    check_dtype(dtype)
    if not isinstance(bucket_bytes, int) or bucket_bytes <= 0:
        raise ConfigError("bucket_bytes must be a positive number of bytes.", got=repr(bucket_bytes))
    return _given(model, dtype, bucket_bytes, merge_lora, buffers, Ranks(process_group))


def check_dtype(dtype: torch.dtype | None) -> None:
    """Raise unless parameters can be cast to it.

    Raises:
        ConfigError: it is not a floating-point dtype.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigError("dtype must be a floating-point dtype, or None.", got=repr(dtype))


def _given(
    model: nn.Module, dtype: torch.dtype | None, bucket_bytes: int, merge_lora: bool, buffers: bool, ranks: Ranks
) -> Iterator[tuple[str, torch.Tensor]]:
    wanted = ranks.together("full_parameters", lambda: wanted_of(model, dtype, merge_lora, buffers))
    yield from stream(wanted, bucket_bytes, ranks)


def wanted_of(model: nn.Module, dtype: torch.dtype | None, merge_lora: bool, buffers: bool) -> list[Given]:
    """What `full_parameters` gives, in order. No communication."""
    table = table_of(model)
    if merge_lora:
        return merged_parameters(model, table, dtype, buffers)
    wanted = [Given(Wanted(row.name, row, dtype)) for row in table.parameters]
    if buffers:
        wanted += [Given(Wanted(name, buffer, dtype)) for name, buffer in table.buffers.items()]
    return wanted


def stream(wanted: Sequence[Given], bucket_bytes: int, ranks: Ranks) -> Iterator[tuple[str, torch.Tensor]]:
    """Make these whole, bucket by bucket. Collective; see `full_parameters` for what happens when a rank stops.

    A consumer that fails may tell the others why: `generator.throw(error)`.
    """
    needed = [part for given in wanted for part in (*given.before, given.wanted)]
    owner: dict[int, Given] = {id(given.wanted): given for given in wanted}
    kept: dict[int, torch.Tensor] = {}  # adapters' weights, until what they are added to has come
    left = list(batches(needed, bucket_bytes))[::-1]
    name = "the first parameter"
    while left:
        batch = left.pop()
        ranks.together("full_parameters", batch.pack)
        wholes = batch.gather()[::-1]
        del batch
        try:
            while wholes:
                part, whole = wholes.pop()
                given = owner.get(id(part))
                if given is None:
                    kept[id(part)] = whole.clone()  # small, and not to keep its bucket
                    continue
                name = part.name
                whole = given.finish(whole, kept)
                yield name, whole
                del whole
        except BaseException as stop:  # GeneratorExit where the consumer stopped
            if left:
                _report(ranks, name, stop)
            raise


def _report(ranks: Ranks, name: str, stop: BaseException) -> None:
    """Let the other ranks know, where they would gather the next bucket, that this one does not come."""
    error: Exception | None = stop if isinstance(stop, Exception) else None
    if error is None:
        error = PhaseError(
            "The loop over full_parameters was left before its end.",
            parameter=name,
            expected="all ranks to go through all parameters, or to stop at the same one",
            remedy="stop on all ranks alike; an exception in the loop's body stops it, too",
        )
    with contextlib.suppress(Exception):  # what stopped this rank is what it raises
        ranks.meet(error, "full_parameters")
