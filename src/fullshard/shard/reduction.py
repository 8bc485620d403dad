"""Reducing a unit's gradients: all its buckets together, over the shard axis, then over the replicate axis."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..comm import Comm
from ..events import stream
from ..torch_private.profiler import begin_range, recording
from .gradients import NONE, PENDING, REDUCING
from .scaling import Rules, Total
from .unit import Unit


def has_gradients(unit: Unit) -> bool:
    """Whether gradients wait to be reduced: autograd's, or collected ones."""
    for gradients in unit.gradients:  # noqa: SIM110 - a comprehension costs a call, in every backward
        if gradients.state is PENDING or gradients.waiting():
            return True
    return False


def collect(unit: Unit, everything: bool) -> None:
    """Move autograd's gradients into the reduction buffers (no communication).

    Args:
        everything: buckets that train and got no gradient take part with zeros, as other ranks may have some: all
            trainable buckets of a unit are reduced once one is.
    """
    ledger = unit.ledger
    for gradients in unit.gradients:
        if (everything and gradients.state is NONE and gradients.bucket.trains) or gradients.waiting():
            gradients.collect(ledger)
    if stream.listeners:
        unit.emit("collect", sum(g.live_bytes for g in unit.gradients))


def reduce_unit(unit: Unit, comm: Comm, rules: Rules, total: Total | None) -> None:
    """Start reducing what a unit collected, over the shard axis.

    Args:
        comm: collectives.
        rules: how.
        total: what sums are divided by; None: nothing.
    """
    end = begin_range("reduce", unit.name) if recording() else None
    try:
        for gradients in unit.gradients:
            if gradients.state is PENDING:
                gradients.issue_reduce(comm, rules, total)
                if scratch := gradients.running.scratch:
                    unit.ledger.reducing += scratch
                    unit.ledger.note()
    finally:
        if end is not None:
            end()
    if stream.listeners:
        unit.emit("reduce", sum([g.buffer_bytes for g in unit.gradients if g.state is REDUCING]))


def replicate_unit(unit: Unit, comm: Comm, all_reduce: bool) -> None:
    """Wait for the shard axis, give the buffers back, and start reducing over the replicate axis.

    Args:
        comm: collectives.
        all_reduce: False keeps the slice reduced over the shard axis only, to be added to the next one.
    """
    for gradients in unit.gradients:
        if gradients.state is not REDUCING:
            continue
        unit.ledger.reducing -= gradients.wait(unit.name)
        if gradients.bucket.axes.replicate is None:
            continue
        if not all_reduce:
            unit.ledger.reducing -= gradients.running.scratch
            gradients.keep_partial()
            continue
        end = begin_range("all_reduce", unit.name) if recording() else None
        try:
            nbytes = gradients.replicate(comm)
        finally:
            if end is not None:
                end()
        if stream.listeners:
            unit.emit("all_reduce", nbytes)


def deliver_unit(unit: Unit, hook: Callable[[torch.Tensor], None] | None, fill_unused: bool) -> list[torch.Tensor]:
    """Wait for what is in flight, and deliver into `.grad`.

    Args:
        hook: called with each reduced slice [shard_numel] before it is delivered.
        fill_unused: see `Gradients.deliver`, as what is returned.
    """
    given: list[torch.Tensor] = []
    ledger = unit.ledger
    for gradients in unit.gradients:
        if gradients.state is REDUCING:
            running = gradients.running
            if gradients.pending is not None:
                ledger.reducing -= gradients.wait(unit.name)
            if hook is not None:
                hook(running.out)
            given += gradients.deliver(fill_unused)
            if running.scratch:
                ledger.reducing -= running.scratch
    if stream.listeners:
        unit.emit("reduced", sum(g.buffer_bytes for g in unit.gradients))
    return given
