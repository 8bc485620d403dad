"""`solve`: the largest micro-batch or sequence that fits into a device, or the fewest ranks on which a model fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import lcm
from typing import Any

from torch import nn

from ...errors import ConfigError
from ...generators import restored_generators
from ...policies import MixedPrecisionPolicy
from . import messages
from .costs import Hook
from .optimizer_costs import MakeOptimizer
from .planner import Parallelize, Plan, Planner, RunSize, checked_hook, list_of
from .profile import Step
from .schedule import Rates
from .strategy import MOST_RANKS, Strategy, check_counts, checked_node, node_size, strategies, with_fields


@restored_generators()
def solve(
    model: nn.Module | Callable[[], nn.Module],
    what: str,
    *,
    ranks: int = 1,
    ranks_per_node: int | None = None,
    batch: int = 1,
    sequence: int = 1,
    step: Step | None = None,
    strategy: Strategy | None = None,
    fixed: Mapping[str, Any] | None = None,
    mp_policy: MixedPrecisionPolicy | Sequence[MixedPrecisionPolicy] = MixedPrecisionPolicy(),  # noqa: B008 - frozen
    optimizer: str | MakeOptimizer = "AdamW",
    device: str = "cuda",
    device_memory: int | None = None,
    meshes: Mapping[str, tuple[int, int]] | None = None,
    tensor_parallel: int = 1,
    parallelize: Parallelize | None = None,
    rates: Rates | None = None,
    comm_hook: Hook | None = None,
) -> tuple[int, Plan | None]:
    """Find the largest micro-batch or sequence that fits into a device, or the fewest ranks on which it fits.

    A number fits if any strategy does that `plan` would search for it. The next number does not: the next integer for
    a micro-batch; one of the next sixteenth for a sequence; for ranks the one below, or one machine less where there
    are several.

    Args:
        what: "micro-batch", "sequence", or "world".
        strategy: None: the best one that `plan` finds; else this one, with `batch` as its micro-batch.
        others: see `plan`; the one that is solved for is ignored. A micro-batch is a whole batch.

    Returns:
        The number, and the plan of the fastest strategy that fits it; 0 and None if nothing fits.

    Raises:
        ConfigError: see `plan`; or no `device_memory`.
    """
    if what not in ("micro-batch", "sequence", "world"):
        raise messages.not_to_solve_for(what)
    if device_memory is None:
        raise messages.nothing_to_fit()
    check_counts(ranks=ranks, batch=batch, sequence=sequence, tensor_parallel=tensor_parallel)
    checked_node(ranks if what != "world" else ranks_per_node or 1, ranks_per_node, tensor_parallel)
    if fixed and strategy is not None:
        raise messages.fixed_without_search(fixed)
    if what == "micro-batch" and "micro_batch" in (fixed or {}):
        raise messages.fixed_and_solved_for()
    fields, policies = dict(fixed or {}), list_of(MixedPrecisionPolicy, "mp_policy", mp_policy)
    hook, tensor = checked_hook(comm_hook), (tensor_parallel, parallelize)

    def planner() -> Planner:
        return Planner(model, step, policies[0], optimizer, device, device_memory, meshes, tensor, rates, hook)

    shared = planner()
    shared.check_fixed(fields)

    def plans(value: int) -> Iterator[Plan]:
        """Plans of all strategies for this number; those that need the least memory come first."""
        world = value if what == "world" else ranks
        sequences = value if what == "micro-batch" else batch
        length = value if what == "sequence" else sequence
        run = RunSize(world, sequences, length, node_size(ranks_per_node, world * tensor_parallel))
        # Built anew for each length: a model may keep tensors of the lengths that it has seen.
        own = shared if what == "world" else planner()
        if strategy is not None:
            chosen = [replace(strategy, micro_batch=sequences)]
            chosen[0].check(world, sequences)
            yield own.plan(chosen[0], run)
            return
        set_here = fields | ({"micro_batch": sequences} if what == "micro-batch" else {})
        searched = strategies(world, ranks_per_node, sequences, policies, tensor_parallel)
        chosen = sorted(with_fields(searched, set_here, world, sequences), key=_needs)
        yield from own.search(chosen, run, set_here)

    planned: list[int] = []

    def fits(value: int) -> bool:
        try:
            any_fits = any(plan.fits for plan in plans(value))
        except ConfigError:
            if not planned:
                raise
            return False  # a length that the model does not take
        planned.append(value)
        return any_fits

    if what == "world":
        number = _fewest(fits, _smallest_world(strategy, fields, meshes), ranks_per_node, tensor_parallel)
    else:
        number = _largest(fits, exact=what == "micro-batch")
    best = min((plan for plan in plans(number) if plan.fits), key=lambda plan: plan.seconds) if number else None
    return number, best


def _needs(strategy: Strategy) -> tuple[int, bool, bool, int, bool]:
    """Sorts strategies by how much memory they are likely to need."""
    kept = strategy.reshard_after_forward is not True
    return strategy.micro_batch, not strategy.checkpointing, kept, strategy.replicate, strategy.layout != "flat"


def _smallest_world(
    strategy: Strategy | None, fixed: Mapping[str, Any], meshes: Mapping[str, tuple[int, int]] | None
) -> int:
    """The number of ranks that divides all worlds of such strategies."""
    replicate = fixed.get("replicate", 1) if strategy is None else strategy.replicate
    reshard = fixed.get("reshard_after_forward") if strategy is None else strategy.reshard_after_forward
    kept = 1 if reshard is None or isinstance(reshard, bool) else reshard
    return lcm(replicate * kept, *[shard * copies for shard, copies in (meshes or {}).values()])


def _fewest(fits: Callable[[int], bool], smallest: int, ranks_per_node: int | None, tensor_parallel: int) -> int:
    """The fewest ranks that fit; 0: none do. Beyond one machine, whole machines."""
    high = smallest
    while not fits(high):
        high *= 2
        if high > MOST_RANKS:
            return 0
    machine = max(1, node_size(ranks_per_node, high * tensor_parallel) // tensor_parallel)
    several = smallest if high <= machine else lcm(smallest, machine)
    if high % several:
        return high
    low, top = high // 2 // several, high // several
    while top - low > 1:
        middle = (low + top) // 2
        low, top = (low, middle) if fits(middle * several) else (middle, top)
    return top * several


def _largest(fits: Callable[[int], bool], exact: bool) -> int:
    """The largest number that fits, exactly or to 1 part in 16; 0: none does."""
    low, high = 0, 1
    while fits(high) and high < 2**24:
        low, high = high, 2 * high
    while high - low > (1 if exact else max(1, low // 16)):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
