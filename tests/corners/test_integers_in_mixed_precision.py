"""Parameters that are no floating-point numbers keep dtype and values, whatever precision the others compute in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullshard
from fullshard import MixedPrecision, MixedPrecisionPolicy
from ways import LAYOUTS, on_ranks, shard, some_ways, whole_parameters, whole_state

WIDTH = 4
VALUES = {  # none survives a trip through bfloat16 or float16
    "int64": torch.tensor([16777, 2**40 + 1, -(2**31) - 7], dtype=torch.int64),
    "int32": torch.tensor([16777, 1_000_003, -999_983], dtype=torch.int32),
    "uint8": torch.tensor([255, 1, 0], dtype=torch.uint8),
    "bool": torch.tensor([True, False, True]),
}
KINDS = (("int64",), ("int32", "uint8"), ("bool", "int64"))


class Codes(nn.Module):
    """Frozen parameters of integers, which remembers what forward saw of them; and perhaps a layer."""

    def __init__(self, kinds: tuple[str, ...], layer: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.codes = nn.ParameterDict({kind: nn.Parameter(VALUES[kind].clone(), requires_grad=False) for kind in kinds})
        self.layer = nn.Linear(WIDTH, WIDTH) if layer else None
        self.seen: dict[str, Tensor] = {}
        self.dtype: torch.dtype | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.seen = {kind: codes.detach().clone() for kind, codes in self.codes.items()}
        self.dtype = self.layer.weight.dtype if self.layer is not None else None
        return x if self.layer is None else self.layer(x)


def unlike(where: str, found: dict[str, Tensor]) -> list[str]:
    """Those that are not their kind's values; names end in the kind."""
    wanted = {name: VALUES[name.rpartition(".")[2]] for name in found if name.rpartition(".")[2] in VALUES}
    wrong = [n for n, v in wanted.items() if found[n].dtype != v.dtype or not torch.equal(found[n], v)]
    return [f"{where}: {name} is {found[name].tolist()} of {found[name].dtype}" for name in wrong]


def passes(model: nn.Module, low: torch.dtype, in_eval: torch.dtype) -> list[str]:
    """Training, evaluation, training, evaluation with gradients, training."""
    problems: list[str] = []
    for mode in ["train", "eval", "train", "eval with gradients", "train"]:
        model.train(mode == "train")
        with torch.set_grad_enabled(mode != "eval"):
            out = model(torch.ones(2, WIDTH))
        for module in model.modules():
            if isinstance(module, Codes):
                problems += unlike(mode, module.seen)
                if module.dtype not in (None, low if mode == "train" else in_eval):
                    problems.append(f"{mode}: the layer is computed in {module.dtype}")
        if mode != "eval":
            out.float().sum().backward()
            model.zero_grad()
    return problems


@some_ways
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
@on_ranks
def test_integers_keep_their_values(way: str, low: torch.dtype) -> list[str]:
    problems: list[str] = []
    for in_eval in (False,) if way in LAYOUTS else (False, True):
        given: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(param_dtype=low)}
        if way not in LAYOUTS:
            mixed = MixedPrecision(param_dtype=low, reduce_dtype=torch.float32)
            given = {"mixed_precision": mixed, "full_precision_in_eval": in_eval}
        for kinds in KINDS:
            if way == "wrapper" and len(kinds) > 1:
                continue  # one `FlatParameter` holds one dtype: integers have an instance of their own
            first = Codes(kinds, layer=way != "wrapper")
            last = nn.Linear(WIDTH, WIDTH) if way == "wrapper" else Codes(kinds)
            model = shard(nn.Sequential(first, last), way, lambda model: [model[0]], **given)
            problems += passes(model, low, torch.float32 if in_eval else low)
            problems += unlike("state dict", whole_state(model)) + unlike("whole", whole_parameters(model))
            assert fullshard.memory_use(model).gathered == 0
    return problems
