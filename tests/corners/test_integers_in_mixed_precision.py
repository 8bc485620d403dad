"""Parameters that are no floating-point numbers keep dtype and values, whatever precision the others compute in."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fullshard
from fullshard import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from training import assert_same
from ways import LAYOUTS

WIDTH = 4
VALUES = {  # none survives a trip through bfloat16 or float16
    "int64": torch.tensor([16777, 2**40 + 1, -(2**31) - 7], dtype=torch.int64),
    "int32": torch.tensor([16777, 1_000_003, -999_983], dtype=torch.int32),
    "uint8": torch.tensor([255, 1, 0], dtype=torch.uint8),
    "bool": torch.tensor([True, False, True]),
}
LOW = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class Coded(nn.Module):
    """A layer and frozen parameters of integers; remembers what forward saw of them."""

    def __init__(self, kinds: tuple[str, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.codes = nn.ParameterDict({kind: nn.Parameter(VALUES[kind].clone(), requires_grad=False) for kind in kinds})
        self.seen: list[tuple[torch.dtype, dict[str, Tensor]]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(
            (self.layer.weight.dtype, {kind: codes.detach().clone() for kind, codes in self.codes.items()})
        )
        return self.layer(x)


def coded(kinds: tuple[str, ...]) -> nn.Sequential:
    return nn.Sequential(Coded(kinds), Coded(kinds))


def problems_of(model: nn.Module, when: str, computed: torch.dtype) -> list[str]:
    """What the last forward saw that it should not have."""
    problems = []
    for module in model.modules():
        if isinstance(module, Coded):
            dtype, codes = module.seen[-1]
            if dtype != computed:
                problems.append(f"{when}: the layer is computed in {dtype}, not {computed}")
            for kind, values in codes.items():
                if values.dtype != VALUES[kind].dtype or not torch.equal(values, VALUES[kind]):
                    problems.append(f"{when}: {kind} is seen as {values.tolist()} of {values.dtype}")
    return problems


def passes(model: nn.Module, low: torch.dtype, in_eval: torch.dtype) -> list[str]:
    """Training, evaluation, training, evaluation with gradients, training."""
    problems: list[str] = []
    x = torch.ones(2, WIDTH)
    for number, mode in enumerate(["train", "eval", "train", "eval with gradients", "train"]):
        model.train(mode == "train")
        with torch.set_grad_enabled(mode != "eval"):
            out = model(x)
        problems += problems_of(model, f"pass {number} ({mode})", low if mode == "train" else in_eval)
        if mode != "eval":
            out.float().sum().backward()
            model.zero_grad()
    return problems


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("kinds", [("int64",), ("int32", "uint8"), ("bool", "int64")], ids="-".join)
@pytest.mark.parametrize("in_eval", [True, False], ids=["full_in_eval", "low_in_eval"])
def test_wrapper_with_original_parameters(run_ranks, in_eval, kinds, low):
    assert_same(run_ranks(wrapped, in_eval, kinds, low))


def wrapped(in_eval: bool, kinds: tuple[str, ...], low: str) -> list[str]:
    model: nn.Module = coded(kinds)
    mixed = MixedPrecision(param_dtype=LOW[low], reduce_dtype=torch.float32)
    given = {"mixed_precision": mixed, "use_orig_params": True, "full_precision_in_eval": in_eval}
    model[1] = FullyShardedDataParallel(model[1], **given)
    model = FullyShardedDataParallel(model, **given)
    problems = passes(model, LOW[low], torch.float32 if in_eval else LOW[low])
    for name, value in model.state_dict().items():
        if ".codes." in name and not torch.equal(value, VALUES[name.rpartition(".")[2]]):
            problems.append(f"the state dict's {name} is {value.tolist()} of {value.dtype}")
    with FullyShardedDataParallel.summon_full_params(model):
        for name, parameter in model.named_parameters():
            if ".codes." in name and not torch.equal(parameter, VALUES[name.rpartition(".")[2]]):
                problems.append(f"the summoned {name} is {parameter.tolist()} of {parameter.dtype}")
    return problems


@pytest.mark.parametrize("in_eval", [True, False], ids=["full_in_eval", "low_in_eval"])
def test_wrapper_whose_instance_holds_integers_alone(run_ranks, in_eval):
    """One `FlatParameter` holds one dtype; an instance of integers alone is one of its own."""
    assert_same(run_ranks(integers_alone, in_eval))


class Codes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.int64 = nn.Parameter(VALUES["int64"].clone(), requires_grad=False)
        self.seen: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.int64.detach().clone()
        return x


def integers_alone(in_eval: bool) -> list[str]:
    mixed = MixedPrecision(param_dtype=torch.bfloat16)
    given = {"mixed_precision": mixed, "use_orig_params": False, "full_precision_in_eval": in_eval}
    codes = Codes()
    model = FullyShardedDataParallel(
        nn.Sequential(FullyShardedDataParallel(codes, **given), nn.Linear(WIDTH, WIDTH)), **given
    )
    problems = []
    for mode in ("train", "eval", "train"):
        model.train(mode == "train")
        model(torch.ones(2, WIDTH)).float().sum().backward()
        if codes.seen is None or codes.seen.dtype != torch.int64 or not torch.equal(codes.seen, VALUES["int64"]):
            problems.append(f"{mode}: {codes.seen}")
    return problems


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("way", LAYOUTS)
def test_fully_shard(run_ranks, way, low):
    assert_same(run_ranks(sharded, way, low))


def sharded(way: str, low: str) -> list[str]:
    problems: list[str] = []
    for kinds in (("int64",), ("int32", "uint8"), ("bool", "int64")):
        model = coded(kinds)
        for unit in (model[1], model):
            fully_shard(unit, layout=LAYOUTS[way], mp_policy=MixedPrecisionPolicy(param_dtype=LOW[low]))
        problems += passes(model, LOW[low], LOW[low])
        problems += [
            f"{name} holds {parameter.full_tensor().tolist()}"
            for name, parameter in model.named_parameters()
            if ".codes." in name and not torch.equal(parameter.full_tensor(), VALUES[name.rpartition(".")[2]])
        ]
    assert fullshard.memory_use(model).gathered == 0
    return problems
