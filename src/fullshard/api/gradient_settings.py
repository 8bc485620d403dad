"""Settings of gradients for both front-ends: the divisor of sums, and which checks run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..comm import Comm, HookComm, PowerSGDState, custom_of, powerSGD_hook
from ..errors import invalid_argument
from ..runtime import Runner, runners_in
from ..shard import REDUCTIONS, TokenCount, Unit
from . import messages
from .preconditions import runners_of


def set_token_count(model: nn.Module, counts: int | torch.Tensor | Sequence[int | torch.Tensor]) -> None:
    """Set the number of tokens (or samples) that this rank's losses of the coming step sum over. Collective.

    For models with `reduction="tokens"`: call it once per step, on every rank, before the step's first backward. Every
    backward of the step then delivers the sum of the ranks' gradients divided by the count over all ranks of the root's
    mesh and all micro-batches, so that `.grad` at the end of the step is the gradient of the mean over all tokens,
    however unevenly they are distributed. A count of 0 is fine; if the total is 0, nothing is divided.

    Costs an all-reduce of three integers. Its result stays on the device: the host never waits for the accelerator.

    Args:
        model: the root, or a module that contains roots.
        counts: the count of the step's only micro-batch; or a count for each backward of the step, in a sequence or
            an integer tensor [micro-batches]. Tensors on the device are not copied to the host.

    Raises:
        ConfigError: the model's units have a different `reduction`; a count is missing, invalid or negative.
        UsageError: gradients accumulated without sync are not reduced yet: they would be divided by the new count.
        PhaseError: the model is not a root; or a backward is running.
    """
    tops, checked = _tops(runners_of(model, "set_token_count")), _checked(counts)
    for runner in [runner for top in tops for runner in _below(top)]:
        if runner.settings.reduce.reduction != "tokens":
            raise messages.not_divided_by_tokens(runner.unit.name, runner.settings.reduce.reduction)
        if any(gradients.owed() for gradients in runner.unit.gradients):
            raise messages.counted_within_a_step(runner.unit.name)
    for top in tops:
        axes = top.settings.axes
        total = _summed(checked, axes.device)
        if (previous := top.settings.reduce.tokens) is not None:
            previous.let_go()
        top.set(reduce_tokens=TokenCount(total, len(checked), axes, top.settings.comm))


def _tops(runners: list[Runner]) -> list[Runner]:
    """The runners of the outermost of these units, each once."""
    inner = {id(nested) for runner in runners for nested in _below(runner) if nested is not runner}
    tops = [runner for runner in runners if id(runner) not in inner]
    for top in tops:
        if top.root is not None and not top.is_top:
            raise messages.method_of_root("set_token_count", top.unit.name, topic="token-counts")
        if top.root is not None and top.root.in_backward:
            raise messages.counted_within_backward()
    return tops


def _below(top: Runner) -> Sequence[Any]:
    """The runners of a unit that is or will be a root, and of all units below it."""
    runners = [runner for module in top.modules for runner in runners_in(module)]
    return runners if top.root is None else [runner for runner in runners if runner.root in (None, top.root)]


MOST_TOKENS = 2**48
"""The most tokens of a rank in a micro-batch: a sum over ranks has to fit in 64 bits."""


def _checked(counts: Any) -> list[int | torch.Tensor]:
    """The counts as a list, a count for each micro-batch.

    Raises:
        ConfigError: no counts, or an invalid count.
    """
    if isinstance(counts, torch.Tensor) and counts.dim() == 1:
        values: list[Any] = list(counts.unbind())
    else:
        values = list(counts) if isinstance(counts, (list, tuple)) else [counts]
    for count in values:
        if isinstance(count, torch.Tensor):
            kind = count.dtype
            fits = count.numel() == 1 and not (kind.is_floating_point or kind.is_complex or kind is torch.bool)
        else:
            fits = isinstance(count, int) and not isinstance(count, bool) and 0 <= count < MOST_TOKENS
        if not fits:
            expected = "an int from 0 to 2**48, an integer tensor of one element, or a sequence of them"
            raise invalid_argument("set_token_count(counts=)", count, expected)
    if not values:
        raise invalid_argument("set_token_count(counts=)", counts, "a count for each backward of the step")
    return values


def _summed(counts: Sequence[int | torch.Tensor], device: torch.device) -> torch.Tensor:
    """The sum of the counts, [1], int64, on `device`, without a copy of device tensors to the host."""
    on_host = sum(count for count in counts if isinstance(count, int))
    total = torch.full((1,), on_host, dtype=torch.int64, device=device)
    for count in counts:
        if isinstance(count, torch.Tensor):
            total += count.detach().to(device, torch.int64, non_blocking=True).view(1)
    return total


@contextmanager
def without_sync(runners: Sequence[Runner], shards_of_hybrid: bool = False) -> Iterator[None]:
    """Context in which backwards accumulate gradients without communication; the next one after it reduces all.

    Contexts may be nested. Their end restores the settings of their beginning.

    Args:
        runners: of the model's units.
        shards_of_hybrid: True: units on a mesh (replicate, shard) reduce over the shard axis nevertheless, so that
            accumulated gradients take the memory of a shard, and defer the all-reduce over the replicate axis, which
            is the slow one.
    """
    previous = [runner.settings.reduce for runner in runners]
    for runner in runners:
        runner.set(reduce_sync=shards_of_hybrid and _is_hybrid(runner.unit), reduce_all_reduce=False)
    try:
        yield
    finally:
        for runner, before in zip(runners, previous, strict=True):
            runner.set(reduce_sync=before.sync, reduce_all_reduce=before.all_reduce)


def _is_hybrid(unit: Unit) -> bool:
    """Whether all parameters of a unit are split along one axis and repeated along another."""
    axes = [bucket.axes for bucket in unit.buckets]
    return bool(axes) and all(a.shard.size > 1 and a.replicate is not None and a.replicate.size > 1 for a in axes)


def set_check_nonfinite(model: nn.Module, enable: bool) -> None:
    """Record, before each reduction, which of this rank's own gradients contain NaN or inf; for `nonfinite_gradients`.

    Off by default, at no cost. When on, each reduction reads its buffer [gathered elements of the unit] once more on
    the device; the host does not wait. Call it on every rank.

    Args:
        model: a module with units; the setting applies to all of them.
        enable: whether to record them from the next backward on.

    Raises:
        ConfigError: the model has no units.
    """
    for runner in runners_of(model, "set_check_nonfinite"):
        runner.set(reduce_check_nonfinite=bool(enable))
        if not enable:
            for gradients in runner.unit.gradients:
                gradients.own = None


def check_reduction(reduction: Any, comm: Comm) -> str:
    """The `reduction` argument of a front-end, checked.

    Raises:
        ConfigError: the name is unknown; or `comm` scales gradients itself.
    """
    if reduction not in REDUCTIONS:
        raise invalid_argument("reduction=", reduction, f"one of {REDUCTIONS}", 'omit it for "mean"')
    if reduction != "mean" and getattr(comm, "scales_itself", False):
        raise messages.reduction_beside_scaling(reduction, comm.kind)
    return str(reduction)


def register_hook(runners: Sequence[Runner], state: object, hook: Callable[..., Any]) -> None:
    """`register_comm_hook` of both front-ends, for the units of a model.

    Args:
        runners: of these units.
        state, hook: see `HookComm`.

    Raises:
        UsageError: a hook is registered already; or the mesh is hybrid, and the hook is not PowerSGD.
        ConfigError: the hook is not callable; gradients are not averaged; PowerSGD has no replicas, a process group of
            other ranks; or the reduction that the hook replaces is in 8 bits, or a custom one.
    """
    if not callable(hook):
        raise invalid_argument(
            "register_comm_hook(hook=)",
            hook,
            "a function of (state, gradient, slice); of (state, gradient) without sharding",
            "pass one of fullshard.comm_hooks, for example",
        )
    between = isinstance(state, PowerSGDState)
    if hook is powerSGD_hook and not between:
        raise messages.power_sgd_without_state(state)
    group = state.process_group if isinstance(state, PowerSGDState) else None
    for runner in runners:
        if isinstance(runner.settings.comm, HookComm):
            raise messages.second_hook()
        if not between:
            _check_replaced(runner)
        refuse_divisor(runner, "a communication hook, which scales gradients itself,")
        if runner.settings.reduce.divide_factor is not None or runner.settings.reduce.force_sum:
            raise messages.divisor_beside_hook("a custom divisor", runner.unit.name)
        for bucket in runner.unit.buckets:
            if bucket.all_reduce_dtype is not None:
                raise messages.hook_beside_8_bits(bucket.members[0].name, "all_reduce_dtype")
            replicate = bucket.axes.replicate
            ranks = dist.get_process_group_ranks(group) if group is not None else []
            if group is not None and replicate is not None and sorted(ranks) != sorted(replicate.ranks):
                raise messages.hook_of_other_ranks(bucket.members[0].name, replicate.ranks, ranks)
    worlds = [bucket.axes for runner in runners for bucket in runner.unit.buckets]
    if between and all(axes.replicate is None and axes.world > 1 for axes in worlds) and worlds:
        raise messages.no_replicas_to_hook()
    for runner in runners:
        runner.set(comm=HookComm(runner.settings.comm, state, hook))


def _check_replaced(runner: Runner) -> None:
    """Check the reduction of a unit that a communication hook, other than PowerSGD, replaces; see `register_hook`."""
    for axes in (runner.settings.axes, *[bucket.axes for bucket in runner.unit.buckets]):
        if axes.shard.size > 1 and axes.replicate is not None:
            raise messages.hook_beside_hybrid(axes.shard.size, axes.copies)
    if custom_of(runner.settings.comm).reduce_scatter is not None and not runner.settings.group_memory:
        raise messages.hook_beside_collective(runner.unit.name)
    for bucket in runner.unit.buckets:
        if bucket.scatter_dtype is not None:
            raise messages.hook_beside_8_bits(bucket.members[0].name, "scatter_dtype")


def refuse_divisor(runner: Runner, what: str) -> None:
    """Raise if `reduction=` or a hook already determines the divisor of sums, which `what` would change.

    Raises:
        ConfigError: the unit's `reduction` is not "mean", or it has a communication hook.
    """
    if isinstance(runner.settings.comm, HookComm):
        raise messages.divisor_beside_hook(what, runner.unit.name)
    reduction = runner.settings.reduce.reduction
    if reduction != "mean":
        raise messages.divisor_beside_reduction(what, reduction, runner.unit.name)
