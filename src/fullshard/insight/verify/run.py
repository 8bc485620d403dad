"""`verify`, as users call it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ...api.functional.fully_shard import fully_shard
from ...api.wrapping import repeated_blocks
from .findings import VerifyReport
from .modules import ModuleTrial
from .session import opened
from .trial import TrialPlan, shard_model
from .whole_trial import WholeTrial


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
) -> VerifyReport:
    """Train a few steps sharded and unsharded on the same global batches, and compare value by value.

    Compared, on every rank, parameter by parameter: structure, ties and dtypes; parameters and buffers before the first
    step; then in each step losses, random numbers drawn, gradients as the optimizer sees them, parameters after it and
    buffers. The run ends with the first step that differs. After comparing gradients, the reference steps with those of
    the sharded model, so that rounding does not grow from step to step.

    Collective over the default process group. Without a group, one is created for the call: of torchrun's ranks if it
    started this process, else of this process alone. Random number generators are restored afterwards.

    Args:
        model_fn: returns the unsharded model; called on every rank, from the same random numbers.
        batch_fn: `batch_fn(index, rank, world)` returns one micro-batch of a rank: `index` counts from 0 over steps and
            micro-batches; `rank` and `world` are data-parallel (see `data_mesh`).
        loss_fn: `loss_fn(model, batch)` returns a scalar.
        shard_fn: `shard_fn(model)` returns the sharded model, or that and its optimizer(s). None: `fully_shard` with
            `auto_wrap_policy="auto"`.
        optimizer_fn: `optimizer_fn(model)` returns an optimizer or a list. None: AdamW with learning rate 1e-3.
        train_step_fn: `train_step_fn(model, optimizer, batches)`, the program's own step: forward, backward and
            `optimizer.step()` on this rank's micro-batches. It may return the mean of their losses, a list with one for
            each, or None; nothing else. `optimizer` is what `optimizer_fn` or `shard_fn` returned, and may be stepped
            with a closure that it calls once. None: verify's own loop.
        steps: number of steps.
        micro_batches: forwards and backwards per step.
        no_sync: verify's own loop reduces gradients with the last micro-batch only.
        reduction: what the reference trains on. "mean": of the losses of all ranks and micro-batches; "sum" of them;
            "tokens": their mean weighted by `tokens_fn(batch)`. Verify's own loop scales losses so that gradients
            averaged over ranks match; a `train_step_fn` has to do that itself.
        tokens_fn: the number of tokens (or samples) over which `loss_fn` averages a batch.
        max_norm: gradients are clipped to this total norm, by the reference and verify's own loop.
        modules: names of modules to compare instead of the whole model, if that does not fit one device; docs/verify.md
            says what is left out.
        data_mesh: the data-parallel part of a mesh with other kinds of parallelism (`mesh["dp"]`): ranks at the same
            place in it get the same batch. None: every rank has its own.
        initial: "compare" values before the first step, or "copy" the unsharded model's into the sharded one, which
            may then be initialized in any way.
        check_draws: whether to compare the random numbers that ranks draw in the first step. False for models that
            draw the same numbers on all ranks on purpose.
        tolerance: of losses and gradients, relative; None: by dtype (see `fullshard.insight.verify.rounding`).
        seed: for everything random.

    Returns:
        A `VerifyReport`, equal on all ranks: `report.ok`, `report.findings`, `str(report)`.

    Raises:
        ConfigError: invalid arguments; an unsharded model that does not run; a step that cannot be compared
            (`step_in_backward`, LBFGS). Errors of the sharded model are findings.
    """
    plan = TrialPlan(
        model_fn, batch_fn, loss_fn, shard_fn or _by_blocks, optimizer_fn or _adamw, train_step_fn, steps,
        micro_batches, no_sync, reduction, tokens_fn, max_norm, modules, initial, check_draws, tolerance,
    )  # fmt: skip
    with opened(data_mesh, seed) as session:
        sharded = shard_model(session, plan)
        if isinstance(sharded, list):
            return VerifyReport(tuple(sharded), session.world, 0, 0)
        trial_class = WholeTrial if plan.modules is None else ModuleTrial
        return trial_class(session, plan, *sharded).run()


def _by_blocks(model: nn.Module) -> nn.Module:
    return fully_shard(model, auto_wrap_policy="auto" if repeated_blocks(model) else None)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)
