"""Ways to shard a model: front-end, units, what is split and when it is freed, precision, memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from random_blocks import Model, ModelPlan, Short
from torch import nn

import fullshard
from fullshard import BackwardPrefetch, ShardingStrategy
from training import mesh_of
from ways import WAYS, WRAPPERS, wrap


@dataclass(frozen=True, repr=False)
class Way(Short):
    """How a model is sharded.

    Attributes:
        front: see `ways.WAYS`.
        units: "blocks" and the root; "nested": parts of blocks, too; "root" alone; or a number whose bits say which
            modules are units beside the root.
        strategy: "full", "keep" (after forward), "none" (nothing is split), "two" (kept on two ranks; the wrapper has
            no such thing), "mixed" (unit by unit).
        hybrid: whether two replicas are sharded over half of the ranks each; on an even number of ranks.
        param, reduce, output: dtypes of computation, of reductions, and of what the root returns.
        offload: whether shards live in host memory.
        prefetch: units ahead; for the wrapper the places of its list of settings.
        reduction: "mean", "sum" or "tokens".
    """

    front: str
    units: str | int = "blocks"
    strategy: str = "full"
    hybrid: bool = False
    param: torch.dtype | None = None
    reduce: torch.dtype | None = None
    output: torch.dtype | None = None
    offload: bool = False
    prefetch: int = 1
    reduction: str = "mean"

    @property
    def wraps(self) -> bool:
        return self.front in WRAPPERS

    @property
    def flat(self) -> bool:
        """Whether a unit shows one parameter, so that all of its parameters train or none does."""
        return self.front == "wrapper"

    def copies(self, world: int) -> int:
        """How many ranks hold the same elements."""
        if self.strategy == "none" and self.wraps:
            return world
        return 2 if self.hybrid and world % 2 == 0 else 1


def valid(way: Way) -> Way:
    """Without what the front-end does not have."""
    if way.param is None:
        way = replace(way, output=None)
    return replace(way, output=None) if way.wraps else replace(way, strategy="full") if way.strategy == "none" else way


LOW = [None] * 6 + [torch.float32, torch.bfloat16, torch.float16]
ways = st.builds(
    Way,
    front=st.sampled_from(list(WAYS)),
    units=st.sampled_from(["blocks", "blocks", "nested", "root"]) | st.integers(0, 2**12 - 1),
    strategy=st.sampled_from(["full", "full", "keep", "none", "two", "mixed"]),
    hybrid=st.booleans(),
    param=st.sampled_from(LOW),
    reduce=st.sampled_from(LOW),
    output=st.sampled_from([None, torch.float32]),
    offload=st.sampled_from([False, False, False, True]),
    prefetch=st.integers(0, 2),
    reduction=st.sampled_from(["mean", "mean", "mean", "sum", "tokens"]),
).map(valid)
worlds = st.sampled_from([2, 2, 1, 3, 4])


def units_of(model: Any, way: Way) -> list[str]:
    """The names of the modules that are units beside the root, innermost first."""
    if way.units == "blocks":
        return [f"blocks.{number}" for number in range(len(model.blocks))]
    names = [n for n, m in model.named_modules() if n not in ("", "blocks") and any(True for _ in m.parameters())]
    if way.units == "nested":
        names = [name for name in names if name.startswith("blocks") and name.endswith(("down", "inner", *"0123"))]
    else:
        bits = 0 if way.units == "root" else int(way.units)
        names = [name for number, name in enumerate(names) if bits >> number % 12 & 1]
    return sorted(names, key=lambda name: -name.count("."))


class Sharding:
    """How this rank shards: a way, and the mesh of all of its units. On a rank's thread."""

    def __init__(self, plan: ModelPlan, way: Way, world: int) -> None:
        self.way, self.world = way, world
        hybrid = way.hybrid and world % 2 == 0 and way.strategy != "none"
        self.mesh = mesh_of("hybrid") if hybrid else None
        self.settings: dict[str, Any] = {**WAYS[way.front], "reduction": way.reduction}
        self.settings |= {"unused": "zeros", "check": "every"} if plan.of_some_ranks else {}

    def model(self, model: Model) -> nn.Module:
        """The whole model, sharded."""
        for number, name in enumerate(units_of(model, self.way)):
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, self.unit(model.get_submodule(name), number))
        return self.unit(model, len(model.blocks), root=True)

    def unit(self, module: nn.Module, number: int = 0, root: bool = False) -> nn.Module:
        """One module as a unit."""
        kept = self.way.strategy == "keep" or (self.way.strategy == "mixed" and number % 2 == 1)
        if self.way.wraps:
            return wrap(module, **self.settings, **self._of_wrapper(kept))
        return fullshard.fully_shard(module, **self.settings, **self._of_function(kept, root))

    def _of_function(self, kept: bool, root: bool) -> dict[str, Any]:
        way = self.way
        settings: dict[str, Any] = {"mesh": self.mesh, "prefetch": way.prefetch}
        settings["mp_policy"] = fullshard.MixedPrecisionPolicy(way.param, way.reduce, way.output if root else None)
        if kept:
            settings["reshard_after_forward"] = False
        elif way.strategy == "two" and self.world == 4 and self.mesh is None:
            settings["reshard_after_forward"] = 2
        return settings | ({"offload_policy": fullshard.CPUOffloadPolicy()} if way.offload else {})

    def _of_wrapper(self, kept: bool) -> dict[str, Any]:
        way = self.way
        names = ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"] if self.mesh is not None else ["FULL_SHARD", "SHARD_GRAD_OP"]
        settings: dict[str, Any] = {"device_mesh": self.mesh, "forward_prefetch": way.prefetch == 2}
        settings["sharding_strategy"] = ShardingStrategy["NO_SHARD" if way.strategy == "none" else names[kept]]
        settings["backward_prefetch"] = [None, *BackwardPrefetch][way.prefetch]
        settings["limit_all_gathers"] = way.prefetch != 2
        if way.param or way.reduce:
            settings["mixed_precision"] = fullshard.MixedPrecision(way.param, way.reduce)
        return settings | ({"cpu_offload": fullshard.CPUOffload(offload_params=True)} if way.offload else {})
