"""Strategies: how a model is sharded and run, and which the planner searches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any

from ...api.functional.arguments import LAYOUTS, reshard_of
from ...dtypes import dtype_name
from ...errors import ConfigError
from ...layout import Blocks
from ...policies import MixedPrecisionPolicy
from . import messages

MOST_RANKS = 2**20
"""The largest world that can be planned."""
ACCUMULATE = ("reduced", "partial", "whole")


def check_counts(function: str = "plan", /, least: int = 1, **counts: Any) -> None:
    """Check that these arguments of a function, by name, are integers of at least 1, or 0.

    Raises:
        ConfigError: one is not.
    """
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise messages.not_positive(name, value, least, function)


@dataclass(frozen=True)
class UnitStrategy:
    """How one unit is sharded and run.

    Attributes:
        layout, policy, prefetch, offload: see `Strategy`.
        reshard: whether the unit is freed after its forward.
        kept_ranks: among how many ranks slices of a freed unit are kept for the backward; 0: none are.
    """

    layout: str | Blocks
    policy: MixedPrecisionPolicy
    prefetch: int
    offload: bool
    reshard: bool
    kept_ranks: int


@dataclass(frozen=True)
class Strategy:
    """How a model is sharded and run. Fields are arguments of `fully_shard` or settings of the training loop.

    Attributes:
        replicate: number of copies of each shard (hybrid sharding).
        layout: "rows", "flat", "owner" or `Blocks`.
        reshard_after_forward: whether units other than the root are freed after their forward; an integer: freed, but
            slices are kept, to be gathered among that many ranks in the backward.
        prefetch: units gathered ahead.
        checkpointing: whether each unit's activations are recomputed in its backward.
        micro_batch: sequences in one forward.
        offload: whether shards, gradients and optimizer state are in host memory.
        units: which modules are units: "auto" (the repeated blocks), "model" (a single unit), or a wrap policy. What a
            `CustomPolicy` returns for a block replaces `layout`, `prefetch`, `mp_policy`, `reshard_after_forward`.
        accumulate: how gradients of all micro-batches but the last are added up: "reduced", each micro-batch's is
            reduced; "partial", over the shard axis only (`set_requires_all_reduce(False)`); "whole", not at all
            (`set_requires_gradient_sync(False)`).
        step_in_backward: whether units step during the backward (`fullshard.step_in_backward`).
        state_on_host: whether the optimizer's state is in host memory, and on the device a few units' at a time
            (`fullshard.optimizer_state_on_host`).
        mp_policy: dtypes; None: the argument of `plan`.
    """

    replicate: int = 1
    layout: str | Blocks = "rows"
    reshard_after_forward: bool | int = True
    prefetch: int = 1
    checkpointing: bool = False
    micro_batch: int = 1
    offload: bool = False
    units: Any = "auto"
    accumulate: str = "reduced"
    step_in_backward: bool = False
    state_on_host: bool = False
    mp_policy: MixedPrecisionPolicy | None = None

    def __post_init__(self) -> None:
        if isinstance(self.units, set | list):  # of classes, as a wrap policy may be; a strategy is a key
            object.__setattr__(self, "units", frozenset(self.units))

    def check(self, ranks: int, batch: int) -> None:
        """Check against the world size and the sequences of a rank and step.

        Raises:
            ConfigError: a number is invalid.
        """
        if not isinstance(self.layout, Blocks) and self.layout not in LAYOUTS:
            raise messages.invalid("layout", ", ".join([*LAYOUTS, "or Blocks(...)"]), self.layout)
        check_counts(least=0, prefetch=self.prefetch)
        for name in ("checkpointing", "offload", "step_in_backward", "state_on_host"):
            if not isinstance(getattr(self, name), bool):
                raise messages.invalid(name, "True or False", getattr(self, name))
        if not isinstance(self.mp_policy, MixedPrecisionPolicy | None):
            raise messages.invalid("mp_policy", "a MixedPrecisionPolicy or None", self.mp_policy)
        for name, value, whole, total in (
            ("micro_batch", self.micro_batch, "batch", batch),
            ("replicate", self.replicate, "ranks", ranks),
        ):
            check_counts(**{name: value})
            if total % value:
                raise messages.not_a_divisor(name, value, whole, total)
        if self.accumulate not in ACCUMULATE:
            raise messages.invalid("accumulate", ", ".join(ACCUMULATE), self.accumulate)
        if self.step_in_backward and self.micro_batch != batch and self.accumulate == "reduced":
            raise messages.steps_in_every_backward(batch // self.micro_batch)
        reshard_of(self.reshard_after_forward, ranks // self.replicate)

    def by_unit(
        self, blocks: Sequence[tuple[str, Mapping[str, Any]]], policy: MixedPrecisionPolicy, shard: int
    ) -> dict[str, UnitStrategy]:
        """How each unit is run, by path; the root, which stays gathered until the backward, is the last.

        Args:
            blocks: the units below it: path, and arguments of `fully_shard` that replace the strategy's.
            policy: dtypes, if neither the strategy nor a block has any.
            shard: ranks on the shard axis.

        Raises:
            ConfigError: `reshard_after_forward` does not divide the ranks.
        """
        units = {}
        for path, overrides in [*blocks, ("", {"reshard_after_forward": False})]:
            reshard, kept = reshard_of(overrides.get("reshard_after_forward", self.reshard_after_forward), shard)
            units[path] = UnitStrategy(
                overrides.get("layout", self.layout),
                overrides.get("mp_policy", self.mp_policy or policy),
                overrides.get("prefetch", self.prefetch),
                self.offload,
                reshard is not False,
                kept,
            )
        return units

    def __str__(self) -> str:
        words = [self.layout if isinstance(self.layout, str) else f"blocks({self.layout.granule})"]
        if self.reshard_after_forward is not True:
            kept = "kept after forward"
            words.append(f"{kept} among {self.reshard_after_forward}" if self.reshard_after_forward else kept)
        words += [f"{self.replicate} replicas"] if self.replicate > 1 else []
        words += [f"prefetch {self.prefetch}"] if self.prefetch != 1 else []
        words += ["checkpointing"] if self.checkpointing else []
        words += ["offload"] if self.offload else []
        words += ["one unit"] if self.units == "model" else []
        words += [f"gradients {self.accumulate}"] if self.accumulate != "reduced" else []
        words += ["steps in the backward"] if self.step_in_backward else []
        words += ["state on the host"] if self.state_on_host else []
        words += [_precision(self.mp_policy)] if self.mp_policy is not None else []
        return ", ".join(words)


def _precision(policy: MixedPrecisionPolicy) -> str:
    dtypes = (policy.param_dtype, policy.reduce_dtype, policy.gather_dtype, policy.scatter_dtype)
    names = ["as stored" if dtype is None else dtype_name(dtype) for dtype in dtypes]
    return " and ".join([" and ".join(dict.fromkeys(names[:2])), *(n for n in names[2:] if n != "as stored")])


def node_size(ranks_per_node: int | None, devices: int) -> int:
    """Devices of one machine; by default 8, or all if there are fewer."""
    return min(8, devices) if ranks_per_node is None else ranks_per_node


def checked_node(ranks: int, ranks_per_node: int | None, tensor_parallel: int) -> int:
    """Devices of one machine, for a run on this many ranks.

    Raises:
        ConfigError: they do not divide the world, or there are too many ranks.
    """
    devices = ranks * tensor_parallel
    node = node_size(ranks_per_node, devices)
    check_counts(ranks_per_node=node)
    if ranks > MOST_RANKS:
        raise messages.too_many_ranks(ranks, MOST_RANKS)
    if ranks_per_node is not None and node < devices and devices % node:
        raise messages.not_a_divisor("ranks_per_node", node, "the world", devices)
    return node


def strategies(
    ranks: int,
    ranks_per_node: int | None,
    batch: int,
    policies: Sequence[MixedPrecisionPolicy] = (),
    tensor_parallel: int = 1,
) -> Iterator[Strategy]:
    """The strategies that a search starts from; `REFINEMENTS` are tried on each.

    Args:
        ranks, ranks_per_node, tensor_parallel: see `plan`. With several nodes, a copy of all shards on each node is
            also tried, and slices that are kept within each node.
        batch: sequences of a rank and optimizer step; micro-batches are it and its divisors that are powers of two.
        policies: dtypes; several are compared.
    """
    within = node_size(ranks_per_node, ranks * tensor_parallel) // tensor_parallel  # ranks of the shard axis
    ways: list[tuple[int, bool | int]] = [(1, True), (1, False)]
    if 1 < within < ranks and ranks % within == 0:
        ways += [(1, within), (ranks // within, True), (ranks // within, False)]
    sizes = sorted({size for size in (2**power for power in range(batch.bit_length())) if batch % size == 0} | {batch})
    for micro_batch, checkpointing, (replicate, reshard), layout, policy in product(
        sizes, (False, True), ways, ("rows", "flat"), policies if len(policies) > 1 else (None,)
    ):
        yield Strategy(
            replicate=replicate,
            layout=layout,
            reshard_after_forward=reshard,
            checkpointing=checkpointing,
            micro_batch=micro_batch,
            mp_policy=policy,
        )


def with_fields(candidates: Iterable[Strategy], fixed: Mapping[str, Any], ranks: int, batch: int) -> list[Strategy]:
    """The candidates with the fields in `fixed` set, without those that this makes invalid.

    Raises:
        ConfigError: all are invalid, or a field does not exist.
    """
    names = [field.name for field in fields(Strategy)]
    if unknown := [name for name in fixed if name not in names]:
        raise messages.unknown_field(unknown[0], names)
    valid: dict[Strategy, None] = {}
    error = None
    for candidate in candidates:
        strategy = replace(candidate, **fixed)
        try:
            strategy.check(ranks, batch)
        except ConfigError as raised:
            error = error or raised
        else:
            valid[strategy] = None
    if error is not None and not valid:
        raise error
    return list(valid)


REFINEMENTS: tuple[dict[str, Any], ...] = (
    {"accumulate": "whole"},
    {"accumulate": "partial"},
    {"units": "model"},
    {"prefetch": 2},
    {"prefetch": 0},
    {"step_in_backward": True},
    {"state_on_host": True},
)
"""Changes to a strategy that a search keeps only where they make it faster by 1%, or make it fit."""


def refines(strategy: Strategy, change: Mapping[str, Any], batch: int) -> bool:
    """Whether a refinement changes what this strategy does."""
    if "accumulate" in change:
        return strategy.micro_batch < batch and (strategy.replicate > 1 or change["accumulate"] == "whole")
    if "step_in_backward" in change:
        return strategy.micro_batch == batch or strategy.accumulate == "whole"
    if "state_on_host" in change:
        return not strategy.offload
    if "units" in change:
        return strategy.reshard_after_forward is True and not strategy.checkpointing  # both act on units below the root
    return strategy.units != "model"
