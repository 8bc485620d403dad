"""Strategies: how a model is sharded and run, and which the planner searches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from ...api.functional.arguments import LAYOUTS
from ...layout import Blocks
from .messages import not_a_divisor, not_positive, unknown_layout


@dataclass(frozen=True)
class Strategy:
    """How a model is sharded and run. Fields are arguments of `fully_shard` or settings of the training loop.

    Attributes:
        replicate: number of copies of each shard (hybrid sharding).
        layout: "rows", "flat", "owner" or `Blocks`.
        reshard_after_forward: whether units other than the root are freed after their forward.
        prefetch: units gathered ahead.
        checkpointing: whether each unit's activations are recomputed in its backward.
        micro_batch: sequences in one forward.
        offload: whether shards, gradients and optimizer state are in host memory.
        units: which modules are units: "auto" (the repeated blocks), "model" (a single unit), or a wrap policy.
    """

    replicate: int = 1
    layout: str | Blocks = "rows"
    reshard_after_forward: bool = True
    prefetch: int = 1
    checkpointing: bool = False
    micro_batch: int = 1
    offload: bool = False
    units: Any = "auto"

    def check(self, ranks: int, batch: int) -> None:
        """Check against the world size and the sequences of a rank and step.

        Raises:
            ConfigError: a number is invalid.
        """
        if not isinstance(self.layout, Blocks) and self.layout not in LAYOUTS:
            raise unknown_layout(self.layout, LAYOUTS)
        if type(self.prefetch) is not int or self.prefetch < 0:
            raise not_positive("prefetch", self.prefetch)
        for name, value, whole, total in (
            ("micro_batch", self.micro_batch, "batch", batch),
            ("replicate", self.replicate, "ranks", ranks),
        ):
            if type(value) is not int or value < 1:
                raise not_positive(name, value)
            if total % value:
                raise not_a_divisor(name, value, whole, total)

    def __str__(self) -> str:
        words = [self.layout if isinstance(self.layout, str) else f"blocks({self.layout.granule})"]
        words += [] if self.reshard_after_forward else ["kept after forward"]
        words += [f"{self.replicate} replicas"] if self.replicate > 1 else []
        words += [f"prefetch {self.prefetch}"] if self.prefetch != 1 else []
        words += ["checkpointing"] if self.checkpointing else []
        words += ["offload"] if self.offload else []
        words += ["one unit"] if self.units == "model" else []
        return ", ".join(words)


def strategies(ranks: int, ranks_per_node: int, batch: int) -> Iterator[Strategy]:
    """The strategies that a search compares.

    Args:
        ranks, ranks_per_node: with several nodes, a copy of all shards on each node is also tried.
        batch: sequences of a rank and optimizer step; micro-batches are it and its divisors that are powers of two.
    """
    replicas = [1, ranks // ranks_per_node] if 1 < ranks_per_node < ranks and ranks % ranks_per_node == 0 else [1]
    sizes = sorted({size for size in (2**power for power in range(batch.bit_length())) if batch % size == 0} | {batch})
    choices = product(sizes, (False, True), replicas, ("rows", "flat"), (True, False))
    for micro_batch, checkpointing, replicate, layout, reshard in choices:
        yield Strategy(
            replicate=replicate,
            layout=layout,
            reshard_after_forward=reshard,
            checkpointing=checkpointing,
            micro_batch=micro_batch,
        )
