"""Optimizers: saved before their first step, and those that must see whole tensors on memory that shows runs only."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard import FullyShardedDataParallel as FSDP
from fullshard import optimizer_view
from training import assert_same, compare_tensors, full_parameters

orig_or_not = pytest.mark.parametrize("orig", [False, True], ids=["flat parameter", "original parameters"])


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 3))


def wrapped(orig: bool, with_mesh: bool = False) -> nn.Module:
    given: dict[str, Any] = {"use_orig_params": orig}
    if with_mesh:
        given["device_mesh"] = init_device_mesh("cpu", (dist.get_world_size(),))
    model = network()
    model[0] = FSDP(model[0], **given)
    return FSDP(model, **given)


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 7, generator=torch.Generator().manual_seed(10 * step + rank))


def take_steps(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int]) -> None:
    """Through a closure, as LBFGS wants it."""
    for step in steps:
        x = batch(step, dist.get_rank())

        def closure(x: Tensor = x) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
    optimizer.zero_grad()


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Whole parameters by the unwrapped model's names."""
    if isinstance(model, FSDP):
        return {name: value.clone() for name, value in model.state_dict().items()}
    return full_parameters(model)


# Optimizer state before the first step.

ADAMW: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
SETTINGS = {
    "adamw": (torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.3}),
    "amsgrad": (torch.optim.Adam, {"lr": 0.1, "amsgrad": True}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.2}),  # has state from the start
}


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    with FSDP.state_dict_type(model, fullshard.StateDictType.SHARDED_STATE_DICT):
        return {"model": model.state_dict(), "optimizer": FSDP.optim_state_dict(model, optimizer)}


def resumed(kind: str, orig: bool, with_mesh: bool, folder: str) -> list[str]:
    """Two steps, saved; a new model and optimizer load in place and go on: as without the interruption."""
    made, settings = SETTINGS[kind]
    model = wrapped(orig, with_mesh)
    optimizer = made(model.parameters(), **settings)
    take_steps(model, optimizer, range(2))
    dcp.save(state_of(model, optimizer), checkpoint_id=folder)
    take_steps(model, optimizer, range(2, 4))

    other = wrapped(orig, with_mesh)
    fresh = made(other.parameters(), **settings)
    template = state_of(other, fresh)
    dcp.load(template, checkpoint_id=folder)
    with FSDP.state_dict_type(other, fullshard.StateDictType.SHARDED_STATE_DICT):
        other.load_state_dict(template["model"])
        fresh.load_state_dict(FSDP.optim_state_dict_to_load(other, fresh, template["optimizer"]))
    take_steps(other, fresh, range(2, 4))
    return compare_tensors("resumed, parameter", whole(other), whole(model), 1e-6)


@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.parametrize("with_mesh", [False, True], ids=["no mesh", "mesh"])
@orig_or_not
def test_resuming_into_an_optimizer_that_has_not_stepped(run_ranks, orig, with_mesh, kind, tmp_path):
    assert_same(run_ranks(resumed, kind, orig, with_mesh, str(tmp_path)))


def saved_before_training(kind: str, orig: bool) -> list[str]:
    """Asking for the state before the first step changes nothing: not weights, not gradients, not what follows."""
    made, settings = SETTINGS[kind]
    results = []
    for asks in (False, True):
        model = wrapped(orig)
        optimizer = made(model.parameters(), **settings)
        if asks:
            model(batch(9, 0)).sum().backward()
            before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
            state_of(model, optimizer)
            for old, p in zip(before, model.parameters(), strict=True):
                if (old is None) != (p.grad is None) or (old is not None and not torch.equal(old, p.grad)):
                    return ["gradients changed"]
            model.zero_grad()
        take_steps(model, optimizer, range(3))
        results.append(whole(model))
    return compare_tensors("after asking, parameter", results[1], results[0], 0.0)


@pytest.mark.parametrize("kind", SETTINGS)
@orig_or_not
def test_asking_for_state_before_the_first_step_changes_nothing(run_ranks, orig, kind):
    assert_same(run_ranks(saved_before_training, kind, orig))


# Optimizers that look at more than one element at a time.

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "LBFGS": lambda params: torch.optim.LBFGS(params, lr=0.5, max_iter=3),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=0.1),
    "Muon": lambda params: torch.optim.Muon(params, lr=0.1),
    "OwnLBFGS": lambda params: OwnLBFGS(params, lr=0.5, max_iter=3),
    "OwnAdafactor": lambda params: OwnAdafactor(params, lr=0.1),
}


class OwnLBFGS(torch.optim.LBFGS):
    """A user's subclass."""


class OwnAdafactor(torch.optim.Adafactor):
    """A user's subclass."""


def view_of(layout: Any) -> tuple[nn.Module, list[nn.Parameter]]:
    model = network()
    fullshard.fully_shard(model[0], layout=layout)
    fullshard.fully_shard(model, layout=layout)
    return model, optimizer_view(model)


HOLDERS: dict[str, Callable[[], tuple[nn.Module, list[nn.Parameter]]]] = {
    "view of rows": lambda: view_of("rows"),
    "view of flat": lambda: view_of("flat"),
    "view of owner": lambda: view_of("owner"),
    "flat parameter": lambda: with_parameters(wrapped(False)),
    "original parameters": lambda: with_parameters(wrapped(True)),
}


def with_parameters(model: nn.Module) -> tuple[nn.Module, list[nn.Parameter]]:
    return model, list(model.parameters())


def refused(holder: str, name: str) -> list[str]:
    """An error that names the optimizer, when it is built or at its first step, before any weight changed."""
    model, parameters = HOLDERS[holder]()
    before = whole(model)
    try:
        optimizer = OPTIMIZERS[name](parameters)
        take_steps(model, optimizer, [0])
    except ValueError as error:  # ConfigError is one; torch's own of Muon as well
        problems = [] if name in str(error) or name == "Muon" else [f"does not name {name}: {error}"]
    else:
        problems = [f"{name} was let through"]
    return problems + compare_tensors("after refusal, parameter", whole(model), before, 0.0)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("holder", HOLDERS)
def test_optimizers_of_whole_tensors_are_refused(run_ranks, holder, name):
    assert_same(run_ranks(refused, holder, name))


ELEMENTWISE: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "Adam": {"lr": 0.1, "eps": 1e-3},
    "AdamW": {"lr": 0.1, "eps": 1e-3},
    "NAdam": {"lr": 0.1, "eps": 1e-3},
    "RAdam": {"lr": 0.1, "eps": 1e-3},
    "Adamax": {"lr": 0.1, "eps": 1e-3},
    "Adagrad": {"lr": 0.1, "eps": 1e-3},
    "Adadelta": {"lr": 0.5, "eps": 1e-3},
    "RMSprop": {"lr": 0.05, "eps": 1e-3, "momentum": 0.5},
    "ASGD": {"lr": 0.1},
}


class OwnSign(torch.optim.Optimizer):
    """A user's optimizer, unknown to the library: `p -= lr * grad / (|grad| + 0.01)`."""

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> None:  # type: ignore[override]
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad / (parameter.grad.abs() + 0.01), alpha=-group["lr"])


def reference(made: Callable[[Any], torch.optim.Optimizer], steps: int, world: int) -> dict[str, Tensor]:
    model = network()
    optimizer = made(model.parameters())
    for step in range(steps):
        x = torch.cat([batch(step, rank) for rank in range(world)])

        def closure(x: Tensor = x) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
    return {name: p.detach() for name, p in model.named_parameters()}


def accepted(holder: str) -> list[str]:
    """Every element-wise optimizer of torch, and one that nobody knows, trains as one process does."""
    problems = []
    kinds: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        name: (lambda params, name=name, given=given: getattr(torch.optim, name)(params, **given))
        for name, given in ELEMENTWISE.items()
    }
    kinds["OwnSign"] = lambda params: OwnSign(params, lr=0.05)
    for name, made in kinds.items():
        model, parameters = HOLDERS[holder]()
        take_steps(model, made(parameters), range(3))
        want = reference(made, 3, dist.get_world_size())
        problems += compare_tensors(f"{name}: parameter", whole(model), want, 1e-5)
    return problems


@pytest.mark.filterwarnings("ignore:.*element-wise")
@pytest.mark.parametrize("holder", HOLDERS)
def test_element_wise_optimizers_train_as_one_process_does(run_ranks, holder):
    assert_same(run_ranks(accepted, holder))


# The same on sharded parameters themselves: right, or refused by name.


def on_parameters(layout: str, name: str) -> list[str]:
    model = network()
    fullshard.fully_shard(model[0], layout=layout)
    fullshard.fully_shard(model, layout=layout)
    made = OPTIMIZERS[name]
    parameters = [p for p in model.parameters() if p.dim() == 2] if name == "Muon" else list(model.parameters())
    before = whole(model)
    try:
        take_steps(model, made(parameters), [0])
    except RuntimeError as error:  # ours, or that of DTensor, which cannot do every operation
        problems = compare_tensors("after refusal, parameter", whole(model), before, 0.0)
        named = isinstance(error, fullshard.FullshardError) or (layout == "rows" and "harding" in str(error))
        return problems if named else [f"{type(error).__name__}: {error}"]
    if name == "Muon":
        plain = network()
        optimizer = made([p for p in plain.parameters() if p.dim() == 2])
        x = torch.cat([batch(0, rank) for rank in range(dist.get_world_size())])
        plain(x).square().mean().backward()
        optimizer.step()
        return compare_tensors("parameter", whole(model), full_parameters(plain), 1e-2)  # it orthogonalises in bf16
    return compare_tensors("parameter", whole(model), reference(made, 1, dist.get_world_size()), 1e-5)


@pytest.mark.parametrize("name", ["LBFGS", "Adafactor", "Muon"])
@pytest.mark.parametrize("layout", ["rows", "flat", "owner"])
def test_on_sharded_parameters_right_or_refused(run_ranks, layout, name):
    assert_same(run_ranks(on_parameters, layout, name, timeout=20))


def built_while_gathered(layout: str) -> bool:
    model = network()
    fullshard.fully_shard(model[0], layout=layout)
    fullshard.fully_shard(model, layout=layout)
    take_steps(model, torch.optim.SGD(model.parameters(), lr=0.1), [0])
    model[0].unshard()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[0].reshard()
    with pytest.raises(fullshard.ConfigError, match=r"(?s)while a unit was gathered.*0\.weight"):
        take_steps(model, optimizer, [1])
    return True


@pytest.mark.parametrize("layout", ["rows", "flat", "owner"])
def test_an_optimizer_built_between_unshard_and_reshard_is_refused(run_ranks, layout):
    assert all(run_ranks(built_while_gathered, layout, timeout=20))
