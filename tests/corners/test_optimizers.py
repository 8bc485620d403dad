"""Optimizers: saved before their first step, and those that must see whole tensors on memory that shows runs only."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import fullshard
from fullshard import FullyShardedDataParallel as FSDP
from fullshard import optimizer_view
from fullshard.optim.probe import treats_elements
from fullshard.state_dict import get_optimizer_state_dict
from training import compare_tensors, full_parameters, mesh_of
from ways import batch, every_wrapper, on_ranks, shard, whole, whole_state


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))


def take_steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int], all_ranks: bool = False
) -> None:
    """Through a closure, as LBFGS wants it; on this rank's batches or on those of all."""
    for step in steps:
        x = batch(step, None if all_ranks else dist.get_rank(), dtype=torch.float32)

        def closure(x: Tensor = x) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
    optimizer.zero_grad()


# Optimizer state before the first step.

SETTINGS = {
    "adamw": (torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.3, "amsgrad": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.2}),  # has state from the start
}
every_kind = pytest.mark.parametrize("kind", SETTINGS)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    with FSDP.state_dict_type(model, fullshard.StateDictType.SHARDED_STATE_DICT):
        return {"model": model.state_dict(), "optimizer": FSDP.optim_state_dict(model, optimizer)}


@every_kind
@every_wrapper
@on_ranks
def test_resuming_into_an_optimizer_that_has_not_stepped(kind: str, way: str, tmp_path: Path) -> list[str]:
    """Two steps, saved; a new model and optimizer load in place and go on: as without the interruption."""
    make, settings = SETTINGS[kind]
    given = {"device_mesh": mesh_of("1d")} if kind == "adamw" else {}
    model, other = (shard(network(), way, **given) for _ in range(2))
    optimizer, fresh = (make(each.parameters(), **settings) for each in (model, other))
    take_steps(model, optimizer, range(2))
    dcp.save(state_of(model, optimizer), checkpoint_id=tmp_path)
    take_steps(model, optimizer, range(2, 4))
    template = state_of(other, fresh)
    assert kind == "adagrad" or not fresh.state, "looking at the state must not make any"
    dcp.load(template, checkpoint_id=tmp_path)
    with FSDP.state_dict_type(other, fullshard.StateDictType.SHARDED_STATE_DICT):
        other.load_state_dict(template["model"])
        fresh.load_state_dict(FSDP.optim_state_dict_to_load(other, fresh, template["optimizer"]))
    take_steps(other, fresh, range(2, 4))
    return compare_tensors("resumed, parameter", whole_state(other), whole_state(model), 1e-6)


@every_kind
@every_wrapper
@on_ranks
def test_asking_for_state_before_the_first_step_changes_nothing(kind: str, way: str) -> list[str]:
    """Not weights, not gradients, not what follows."""
    make, settings = SETTINGS[kind]
    model, other = (shard(network(), way) for _ in range(2))
    optimizers = [make(each.parameters(), **settings) for each in (model, other)]
    model(batch(9, 0, dtype=torch.float32)).sum().backward()
    before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    state_of(model, optimizers[0])
    for old, p in zip(before, model.parameters(), strict=True):
        assert p.grad is None if old is None else torch.equal(old, p.grad)
    model.zero_grad()
    take_steps(model, optimizers[0], range(3)), take_steps(other, optimizers[1], range(3))
    return compare_tensors("after asking, parameter", whole_state(model), whole_state(other), 0.0)


@pytest.mark.parametrize("way", ["rows", "flat"])
@pytest.mark.gloo("hooks of all optimizers, which a rank takes away while it makes state, belong to a process")
@on_ranks
def test_state_before_the_first_step_of_complex_parameters(way: str) -> None:
    """Operations of AdamW on complex numbers exist for local tensors only: the state is that of a training step."""
    model = shard(network().to(torch.complex64), way)
    optimizer = torch.optim.AdamW(model.parameters())
    blank = get_optimizer_state_dict(model, optimizer)["state"]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    stepped = get_optimizer_state_dict(model, optimizer)["state"]
    assert {name: state.keys() for name, state in blank.items()} == {name: s.keys() for name, s in stepped.items()}
    assert not any(whole(state["exp_avg"]).any() for state in blank.values())


# Optimizers that look at more than one element at a time.


class OwnAdafactor(torch.optim.Adafactor):
    """A user's subclass."""


class OwnSign(torch.optim.Optimizer):
    """A user's optimizer, unknown to the library: `p -= lr * grad / (|grad| + 0.01)`."""

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor]) -> None:  # type: ignore[override]
        with torch.enable_grad():
            closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad / (parameter.grad.abs() + 0.01), alpha=-group["lr"])


def test_groups_that_differ_by_learning_rates_are_tried_once() -> None:
    """Trials take a fraction of a second for each of an unknown optimizer's settings, in its first step."""
    made: list[int] = []

    class Mine(torch.optim.SGD):
        def __init__(self, params: Any, lr: float, momentum: float) -> None:
            made.append(1)
            super().__init__(params, lr, momentum)

        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    def trials(*groups: dict[str, Any]) -> int:
        optimizer = Mine([{**group, "params": [nn.Parameter(torch.ones(2))]} for group in groups], 1e-3, 0.9)
        made.clear()
        assert treats_elements(optimizer)
        return len(made)

    several = trials({"momentum": 0.5}, {"momentum": 0.6})
    assert several > 0
    rates = [{"momentum": 0.7, "lr": 0.1 * n, "initial_lr": 0.1 * n, "max_lr": n} for n in range(20)]
    assert trials(*rates) == several / 2 and trials({"momentum": 0.7, "lr": 0.03}) == 0


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "LBFGS": lambda params: torch.optim.LBFGS(params, lr=0.5, max_iter=3),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=0.1),
    "Muon": lambda params: torch.optim.Muon(params, lr=0.1),
    "OwnAdafactor": lambda params: OwnAdafactor(params, lr=0.1),
}
ELEMENTWISE: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    **{name: {"lr": 0.1, "eps": 1e-3} for name in ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad")},
    "Adadelta": {"lr": 0.5, "eps": 1e-3},
    "RMSprop": {"lr": 0.05, "eps": 1e-3, "momentum": 0.5},
    "ASGD": {"lr": 0.1},
}
every_holder = pytest.mark.parametrize("holder", ["view of rows", "view of flat", "wrapper", "originals"])


def held_by(holder: str) -> tuple[nn.Module, list[nn.Parameter]]:
    model = shard(network(), holder.removeprefix("view of "))
    return model, optimizer_view(model) if "view" in holder else list(model.parameters())


@pytest.mark.parametrize("name", OPTIMIZERS)
@every_holder
@on_ranks
def test_optimizers_of_whole_tensors_are_refused(holder: str, name: str) -> list[str]:
    """An error that names the optimizer, when it is built or at its first step, before any weight changed."""
    model, parameters = held_by(holder)
    with pytest.raises(ValueError, match=None if name == "Muon" else name):  # torch's own of Muon
        take_steps(model, OPTIMIZERS[name](parameters), [0])
    return compare_tensors("after refusal, parameter", whole_state(model), whole_state(network()), 0.0)


@pytest.mark.filterwarnings("ignore:.*element-wise")
@every_holder
@on_ranks
def test_element_wise_optimizers_train_as_one_process_does(holder: str) -> list[str]:
    """Those of torch, and one that nobody knows."""
    problems = []
    for name, given in {**ELEMENTWISE, "OwnSign": {"lr": 0.05}}.items():
        make = OwnSign if name == "OwnSign" else getattr(torch.optim, name)
        (model, parameters), plain = held_by(holder), network()
        take_steps(model, make(parameters, **given), range(3))
        take_steps(plain, make(plain.parameters(), **given), range(3), all_ranks=True)
        problems += compare_tensors(f"{name}: parameter", whole_state(model), whole_state(plain), 1e-5)
    return problems


@pytest.mark.parametrize("name", ["LBFGS", "Adafactor", "Muon"])
@pytest.mark.parametrize("way", ["rows", "flat", "owner"])
@on_ranks
def test_on_sharded_parameters_right_or_refused(way: str, name: str) -> list[str]:
    model, plain = shard(network(), way), network()
    chosen = [[p for p in each.parameters() if name != "Muon" or p.dim() == 2] for each in (model, plain)]
    try:
        take_steps(model, OPTIMIZERS[name](chosen[0]), [0])
    except fullshard.FullshardError:
        return compare_tensors("after refusal, parameter", whole_state(model), whole_state(plain), 0.0)
    take_steps(plain, OPTIMIZERS[name](chosen[1]), [0], all_ranks=True)
    tolerance = 1e-2 if name == "Muon" else 1e-5  # it orthogonalises in bf16
    return compare_tensors("parameter", whole_state(model), full_parameters(plain), tolerance)


@pytest.mark.parametrize("way", ["rows", "flat"])
@on_ranks
def test_an_optimizer_built_between_unshard_and_reshard_is_refused(way: str) -> None:
    model = shard(network(), way)
    take_steps(model, torch.optim.SGD(model.parameters(), lr=0.1), [0])
    model[0].unshard()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[0].reshard()
    with pytest.raises(fullshard.ConfigError, match=r"(?s)while a unit was gathered.*0\.weight"):
        take_steps(model, optimizer, [1])


# Units of several layouts in one optimizer: DTensors, and others.

TORCHS = {
    "AdamW foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=True),
    "AdamW fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
    "AdamW amsgrad": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=True, amsgrad=True),
    "SGD foreach": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "RAdam foreach": lambda parameters: torch.optim.RAdam(parameters, lr=0.1, weight_decay=0.1, foreach=True),
    "Adagrad foreach": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1, foreach=True),
}


MIXED = [
    *[("flat", "rows", name) for name in TORCHS],
    *[
        ("rows", "flat", name) for name in TORCHS if "fused" in name
    ],  # others hand torch lists that begin with a DTensor
]


@pytest.mark.parametrize(("first", "last", "name"), MIXED)
@on_ranks
def test_units_of_several_layouts_in_one_optimizer(first: str, last: str, name: str) -> list[str]:
    model, whole = network(), network()
    for layer, layout in zip((model[0], model[2]), (first, last), strict=True):
        fullshard.fully_shard(layer, layout=layout)
    fullshard.fully_shard(model)
    optimizer = TORCHS[name](model.parameters())
    take_steps(model, optimizer, range(3))
    take_steps(whole, TORCHS[name](whole.parameters()), range(3), all_ranks=True)
    return compare_tensors("parameter", whole_state(model), whole_state(whole), 1e-5)


@pytest.mark.parametrize(("first", "last"), [("rows", "flat"), ("flat", "rows")])
@on_ranks
def test_parameters_of_several_layouts_in_one_list(first: str, last: str) -> list[str]:
    model, whole = network(), network()
    for layer, layout in zip((model[0], model[2]), (first, last), strict=True):
        fullshard.fully_shard(layer, layout=layout)
    fullshard.fully_shard(model)
    for each in (model, whole):
        parameters = list(each.parameters())
        with torch.no_grad():
            torch._foreach_mul_(parameters, [2.0, 3.0, 4.0, 5.0])
            torch._foreach_add_(parameters, torch._foreach_mul(parameters, 0.5))
            torch._foreach_abs_(parameters)
    return compare_tensors("parameter", whole_state(model), whole_state(whole), 1e-6)
