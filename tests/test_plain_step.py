"""torch's element-wise optimizers step local tensors: the same bits, state and attributes as steps on sharded ones."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim.optimizer import register_optimizer_step_post_hook

import fullshard
from fullshard.forms import OWNER_KEY, FlatShard, RowShard, note_change, owner_of
from fullshard.forms.elementwise import on_locals
from fullshard.optim import plain_step
from fullshard.torch_private.step_hooks import second_object

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
    "AdamW amsgrad in lists": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "AdamW, lr a tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), foreach=False),
    "AdamW capturable": lambda p: torch.optim.AdamW(p, lr=0.1, capturable=False, maximize=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1),
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 8), nn.Linear(8, 3)
        self.unused = nn.Parameter(torch.ones(5))
        self.register_parameter("ignored", nn.Parameter(torch.ones(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(torch.relu(self.one(x))) * self.ignored


def sharded(layout: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = Model()
    layouts = ["rows", "flat", "rows"] if layout == "mixed" else [layout] * 3
    for module, of_module in zip((model.one, model.two), layouts, strict=False):
        fullshard.fully_shard(module, layout=of_module)
    return fullshard.fully_shard(model, layout=layouts[2], ignored_params={model.ignored})


def backward(model: nn.Module, step: int = 0) -> None:
    """Give parameters gradients of known values: collectives of the fake group leave memory as it is."""
    torch.manual_seed(100 + step)
    model(torch.randn(4, 6)).square().sum().backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            local(parameter.grad).normal_()


@pytest.fixture
def steps(monkeypatch) -> list[Any]:
    """The steps on local tensors so far."""
    ended: list[Any] = []
    end = plain_step._Step.end

    def note(self: Any, *args: Any) -> None:
        ended.append(type(self))
        end(self, *args)

    monkeypatch.setattr(plain_step._Step, "end", note)
    return ended


def local(value: Any) -> Any:
    return getattr(value, "_local_tensor", value)


def groups(model: nn.Module, name: str) -> list[dict[str, Any]]:
    """Two groups; torch's own lists take no plain tensors beside DTensors."""
    parameters = [p for p in model.parameters() if "lists" not in name or p is not model.ignored]
    return [{"params": parameters[:3]}, {"params": parameters[3:], "lr": 0.05}]


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, first: int = 0, count: int = 4) -> None:
    for step in range(first, first + count):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("layout", ["rows", "flat", "mixed"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_same_bits_and_state_as_a_step_of_its_own(fake_world, steps, name, layout):
    fake_world(4)
    models = [sharded(layout), sharded(layout)]
    ours, own = (OPTIMIZERS[name](groups(m, name)) for m in models)
    own.register_step_pre_hook(lambda *_: None)  # a hook may look at anything: the step goes its own way
    trained(models[1], own)
    assert not steps
    trained(models[0], ours)
    assert len(steps) == 4
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(local(p), local(q))
        assert ours.state[p].keys() == own.state[q].keys()
        for key, value in own.state[q].items():
            mine = ours.state[p][key]
            assert isinstance(value, type(mine)), (key, type(mine), type(value))  # clones of gradients are `RowShard`s
            if isinstance(value, torch.Tensor):
                assert (mine.shape, mine.dtype, mine.stride()) == (value.shape, value.dtype, value.stride()), key
                assert torch.equal(local(mine), local(value)), key
            if isinstance(value, DTensor):
                assert mine.placements == value.placements and mine.device_mesh is p.device_mesh
    assert [group["lr"] for group in ours.param_groups] == [group["lr"] for group in own.param_groups]
    assert all(type(p) in (RowShard, FlatShard, nn.Parameter) for group in ours.param_groups for p in group["params"])


def test_state_that_was_loaded_is_stepped_on(fake_world, steps):
    fake_world(4)
    models = [sharded("rows"), sharded("rows")]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        trained(model, optimizer, count=2)
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    for model, optimizer in zip(models, optimizers, strict=True):
        trained(model, optimizer, first=2)
    assert len(steps) == 12
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(local(p), local(q))


def test_only_parameters_with_gradients_are_stepped(fake_world, steps):
    fake_world(4)
    model = sharded("rows")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    backward(model)
    model.one.weight.grad = None
    before = {name: local(p).clone() for name, p in model.named_parameters()}
    optimizer.step()
    assert steps
    changed = {name for name, p in model.named_parameters() if not torch.equal(local(p), before[name])}
    assert changed == {"one.bias", "two.weight", "two.bias", "ignored"}
    assert model.one.weight not in optimizer.state and model.unused not in optimizer.state


@pytest.mark.parametrize("what", ["closure", "a gradient of another class", "a subclass"])
def test_unusual_steps_go_their_own_way(fake_world, steps, what):
    fake_world(4)
    model = sharded("rows")

    class Mine(torch.optim.SGD):
        pass

    kind = Mine if what == "a subclass" else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=0.1)
    backward(model)
    if what == "a gradient of another class":
        model.one.weight.grad = DTensor.from_local(
            model.one.weight.grad.to_local(), model.one.weight.device_mesh, [Shard(0)]
        )
        assert type(model.one.weight.grad) is DTensor
    before = local(model.one.weight).clone()
    optimizer.step(*([lambda: None] if what == "closure" else []))
    assert not steps and not torch.equal(local(model.one.weight), before)


def test_an_error_in_a_step_leaves_nothing_behind(fake_world, monkeypatch):
    fake_world(4)
    model = sharded("rows")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    backward(model)

    def fails(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(sys.modules["torch.optim.sgd"], "sgd", fails)
    with pytest.raises(RuntimeError, match="planted") as kept:  # with its traceback, which holds what the step made
        optimizer.step()
    assert kept.tb
    assert all(local(p).grad is None for p in model.parameters() if local(p) is not p)
    assert all(p.grad is not None for p in model.one.parameters())
    monkeypatch.undo()
    before = local(model.one.weight).clone()
    optimizer.step()
    assert not torch.equal(local(model.one.weight), before)


def test_autograd_sees_that_a_step_changed_a_parameter(fake_world, steps):
    fake_world(4)
    model = sharded("rows")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    backward(model)
    penalty = (model.one.weight * model.one.weight).sum()
    optimizer.step()
    assert steps
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        penalty.backward()


def replaced_step(optimizer: torch.optim.Optimizer, monkeypatch: Any) -> None:
    real = type(optimizer).step

    @functools.wraps(real)
    def step(self: Any, closure: Any = None) -> Any:
        return real(self, closure)

    monkeypatch.setattr(type(optimizer), "step", step)


def replaced_method(optimizer: Any, monkeypatch: Any) -> None:
    real = optimizer._init_group
    optimizer._init_group = real


def hook_of_all(optimizer: torch.optim.Optimizer, monkeypatch: Any) -> Any:
    return register_optimizer_step_post_hook(lambda own, args, kwargs: None)


def replicated_state(optimizer: Any, monkeypatch: Any) -> None:
    state = next(state for p, state in optimizer.state.items() if type(p) is RowShard)
    state["exp_avg"] = state["exp_avg"].redistribute(placements=[Replicate()])


def replicated_setting(optimizer: Any, monkeypatch: Any) -> None:
    mesh = optimizer.param_groups[0]["params"][0].device_mesh
    optimizer.param_groups[0]["lr"] = DTensor.from_local(torch.tensor(0.1), mesh, [Replicate()])


@pytest.mark.parametrize("change", [replaced_step, replaced_method, hook_of_all, replicated_state, replicated_setting])
def test_what_others_change_is_looked_for_at_each_step(fake_world, steps, monkeypatch, change):
    fake_world(4)
    model = sharded("rows")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    trained(model, optimizer, count=2)
    assert len(steps) == 2
    handle = change(optimizer, monkeypatch)
    trained(model, optimizer, first=2, count=1)
    assert len(steps) == 2
    assert all(p in optimizer.state for p in model.one.parameters()) and len(optimizer.state) == 5
    assert type(optimizer.state[model.one.weight]["exp_avg_sq"]) is DTensor
    if handle is not None:
        handle.remove()


@pytest.mark.parametrize("layout", ["rows", "flat"])
def test_autograd_sees_that_a_step_changed_state(fake_world, steps, layout):
    fake_world(4)
    model = sharded(layout)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    trained(model, optimizer, count=1)
    average = optimizer.state[model.one.weight]["exp_avg"]
    before = average._version
    trained(model, optimizer, count=1)
    assert len(steps) == 2 and average._version > before


@pytest.mark.parametrize("as_tuple", [False, True])
def test_operations_on_lists_return_what_torchs_do(fake_world, as_tuple):
    """Their first list; in models of several layouts results of rows and of runs are put together."""
    fake_world(4)
    model = sharded("mixed")
    backward(model)
    with torch.no_grad():
        rows: Any = (
            [model.two.weight, model.two.bias][:1] if model.two.weight.__class__ is RowShard else [model.one.weight]
        )
        given = tuple(rows) if as_tuple else rows
        before = local(rows[0]).clone()
        returned = torch._foreach_mul_(given, 2.0)
        plain = torch._foreach_mul_((before.clone(),) if as_tuple else [before.clone()], 2.0)
        assert type(returned) is type(plain) and returned[0] is rows[0]
        assert torch.equal(local(rows[0]), before * 2)
    before = {name: local(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}
    both = [model.one.weight, model.two.weight]
    nn.utils.clip_grad_value_(both, 0.01, foreach=True)
    for name, p in model.named_parameters():
        if any(p is one for one in both):
            assert torch.equal(local(p.grad), before[name].clamp(-0.01, 0.01)), name


@pytest.mark.parametrize("layout", ["rows", "flat"])
def test_parameters_whose_units_are_gone_are_stepped(fake_world, layout):
    """Their model was deleted before the first step; what owned them was never looked up."""
    fake_world(4)
    model = sharded(layout)
    backward(model)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    first = next(p for p in parameters if type(p) in (RowShard, FlatShard) and p.grad is not None)
    before = local(first).clone()
    del model
    gc.collect()
    assert owner_of(first) is None
    optimizer.step()
    assert not torch.equal(local(first), before)


def test_changes_of_copies_are_nobodys(fake_world):
    """An unpickled parameter refers to no unit, by an empty dict, which has no hash."""
    fake_world(4)
    model = sharded("rows")
    model.unshard()
    copied = pickle.loads(pickle.dumps(model.unused))
    assert copied.__dict__[OWNER_KEY] == {}
    note_change([copied])


def test_lists_that_are_split_differently_on_other_ranks_are_dtensors(fake_world):
    """On the first of 4 ranks 5 and 6 rows are both two."""
    fake_world(4)
    model = fullshard.fully_shard(nn.Sequential(nn.Linear(1, 5, bias=False), nn.Linear(1, 6, bias=False)))
    five, six = model[0].weight, model[1].weight
    assert local(five).shape == local(six).shape == (2, 1)
    with torch.no_grad():
        assert on_locals(torch._foreach_add_, ([five], [six]), {}) is NotImplemented
        assert on_locals(torch._foreach_add_, ([five], [five.clone()]), {}) is not NotImplemented


def test_gradients_are_dropped_with_zero_grad_and_nothing_grows(fake_world, steps):
    fake_world(4)
    model = sharded("rows")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    alive, sets = [], set()
    for step in range(12):
        trained(model, optimizer, first=step, count=1)
        schedule.step()
        units = model._get_fsdp_state()._runner.root.units
        sets |= {id(g.delivery.set) for runner in units for g in runner.unit.gradients}
        gc.collect()
        alive.append(sum(isinstance(item, torch.Tensor) for item in gc.get_objects()))
    assert len(steps) == 12 and alive[-1] <= alive[3]
    assert len(sets) == 3  # memory of gradients is written again: nobody else holds it


def test_attributes_that_a_step_sets_are_the_optimizers(fake_world, steps):
    fake_world(4)
    model = sharded("rows")
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, fused=True)
    assert optimizer._need_device_dtype_check_for_fused
    backward(model)
    optimizer.step()
    assert steps and not optimizer._need_device_dtype_check_for_fused
    assert not any("fullshard" in name for name in optimizer.__dict__)


def test_hooks_of_all_optimizers_get_the_arguments_that_one_returned(fake_world):
    """What the engine builds on: torch passes what a hook before a step returned to the hooks after it."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    seen: list[Any] = []
    second: Any = second_object(optimizer, param_groups=[])
    handles = [
        optimizer.register_step_pre_hook(lambda *_: ((second,), {})),
        optimizer.register_step_post_hook(lambda own, args, kwargs: seen.append((own, args, kwargs))),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
    for handle in handles:
        handle.remove()
    assert seen == [(optimizer, (second,), {})]
