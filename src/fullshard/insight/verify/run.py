"""`verify`: what users call, and the order in which things are done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ...api.functional.fully_shard import fully_shard
from ...api.wrapping import repeated_blocks
from ...errors import ConfigError
from .modules import run_parts
from .report import Report
from .session import opened
from .trial import Plan
from .whole import run_whole

__all__ = ["verify"]


def verify(
    model_fn: Callable[[], nn.Module],
    batch_fn: Callable[[int, int, int], Any],
    loss_fn: Callable[[nn.Module, Any], torch.Tensor],
    *,
    shard_fn: Callable[[nn.Module], Any] | None = None,
    optimizer_fn: Callable[[nn.Module], Any] | None = None,
    train_step_fn: Callable[[nn.Module, Any, list[Any]], Any] | None = None,
    steps: int = 3,
    micro_batches: int = 1,
    no_sync: bool = False,
    reduction: str = "mean",
    tokens_fn: Callable[[Any], float] | None = None,
    max_norm: float | None = None,
    modules: Sequence[str] | None = None,
    data_mesh: DeviceMesh | None = None,
    initial: str = "compare",
    check_draws: bool = True,
    tolerance: float | None = None,
    seed: int = 0,
) -> Report:
    """Train a few steps sharded and unsharded on the same global batches, and compare value by value.

    Compared, on every rank, parameter by parameter: structure, ties and dtypes; parameters and buffers before the first
    step; then in each step losses, random numbers drawn, gradients as the optimizer sees them, parameters after it and
    buffers. The run ends with the first step that differs. The reference steps with the gradients of the sharded model
    once these were found right, so that rounding does not grow from step to step.

    Collective over the default process group; without one, a group lasts as long as the call (that of torchrun's ranks
    if it started this process, else of this process alone). Generators of random numbers are put back afterwards.

    Args:
        model_fn: gives the unsharded model; called on every rank, from the same random numbers.
        batch_fn: `batch_fn(index, rank, world)` gives one micro-batch of a rank: `index` counts from 0 on, over steps
            and micro-batches; `rank` and `world` are data-parallel (see `data_mesh`).
        loss_fn: `loss_fn(model, batch)` gives a scalar.
        shard_fn: `shard_fn(model)` gives the sharded model, or that and its optimizer(s). None: `fully_shard` with
            `auto_wrap_policy="auto"`.
        optimizer_fn: `optimizer_fn(model)` gives an optimizer or several. None: AdamW with learning rate 1e-3.
        train_step_fn: `train_step_fn(model, optimizer, batches)`, the program's own step: forward, backward and
            `optimizer.step()` on this rank's micro-batches. It may return their losses' mean, a list of them, or None.
            `optimizer` is what `optimizer_fn` or `shard_fn` gave. None: verify's own loop.
        steps: how many.
        micro_batches: forwards and backwards per step.
        no_sync: verify's own loop reduces gradients with the last micro-batch only.
        reduction: what the reference trains on. "mean": of all ranks' and micro-batches' losses; "sum" of them;
            "tokens": their mean weighted by `tokens_fn(batch)`. Verify's own loop scales losses so that gradients
            averaged over ranks are this; a `train_step_fn` sees to that itself.
        tokens_fn: the number of tokens (or samples) over which `loss_fn` averages a batch.
        max_norm: gradients are clipped to this total norm, by the reference and verify's own loop.
        modules: names of modules to compare in place of the whole model, where one device cannot hold that: see
            docs/verify.md for what is left out.
        data_mesh: the data-parallel part of a mesh with other kinds of parallelism (`mesh["dp"]`): ranks at one place
            in it are given one batch. None: every rank has its own.
        initial: "compare" values before the first step, or "copy" the unsharded model's into the sharded one, which
            may then initialise itself as it likes.
        check_draws: whether to compare the random numbers that ranks draw in the first step. False for models that
            draw the same ones on all ranks on purpose.
        tolerance: of losses and gradients, relative; None: by dtype (see `fullshard.insight.verify.compare`).
        seed: of everything random.

    Returns:
        A `Report`, equal on all ranks: `report.ok`, `report.findings`, `str(report)`.

    Raises:
        ConfigError: arguments that cannot work, or an unsharded model that does not run. Errors of the sharded model
            are findings.
    """
    plan = Plan(
        model_fn, batch_fn, loss_fn, shard_fn or _by_blocks, optimizer_fn or _adamw, train_step_fn, steps,
        micro_batches, no_sync, reduction, tokens_fn, max_norm,
    )  # fmt: skip
    plan.check()
    if initial not in ("compare", "copy"):
        raise ConfigError(f'initial must be "compare" or "copy", got {initial!r}')
    with opened(data_mesh, seed) as session:
        if modules is not None:
            return run_parts(session, plan, modules, tolerance)
        return run_whole(session, plan, initial == "copy", check_draws, tolerance)


def _by_blocks(model: nn.Module) -> nn.Module:
    return fully_shard(model, auto_wrap_policy="auto" if repeated_blocks(model) else None)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)
