"""`fullshard.OwnerOptimizer`: what an optimizer does with whole parameters in one process, and its state in files."""

from __future__ import annotations

import copy
import functools
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import bitsandbytes
import pytest
import pytorch_optimizer
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import fullshard
from fullshard.optim import owners
from fullshard.optim.owner_optimizer import _flatten, _nested
from quantised import StoredInt8, dequantise, quantise
from test_step_in_backward import CountsInPlace

WIDE, TALL = 6, 11
CLASSES: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "adafactor": (torch.optim.Adafactor, {"lr": 0.1}),
    "soap": (pytorch_optimizer.SOAP, {"lr": 0.1, "precondition_frequency": 2}),  # lists of matrices, counts in groups
    "adamw": (torch.optim.AdamW, {"lr": 0.1, "amsgrad": True}),
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
}


class Int8Momentum(torch.optim.Optimizer):
    """SGD whose momentum is a tensor subclass: int8 with a scale for each row."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                state, rows = self.state[parameter], parameter.grad.reshape(parameter.shape[0], -1)
                before = state.get("momentum")
                momentum = (
                    rows if before is None else rows + 0.9 * dequantise(before.quantised, before.scale, rows.dtype)
                )
                state["momentum"] = StoredInt8(*quantise(momentum))
                parameter.sub_(momentum.view_as(parameter), alpha=group["lr"])


CLASSES["subclasses"] = (Int8Momentum, {"lr": 0.1})
CLASSES["8 bits"] = (bitsandbytes.optim.AdamW8bit, {"lr": 0.1, "min_8bit_size": 8})  # of blocks of 256 elements
LAYOUTS = ["rows", "flat", "owner", fullshard.Blocks("row")]


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDE, TALL), nn.Sequential(nn.Linear(TALL, WIDE), nn.LayerNorm(WIDE)))


def sharded(layout: Any = "rows", **options: Any) -> nn.Sequential:
    model = build()
    fullshard.fully_shard(model[1], layout=layout, **options)
    return fullshard.fully_shard(model, layout=layout, **options)


def whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def set_gradients(model: nn.Module, step: int) -> None:
    """The same on every number of ranks; one parameter has none in step 1."""
    generator = torch.Generator().manual_seed(step)
    for number, parameter in enumerate(model.parameters()):
        gradient = torch.randn(parameter.shape, generator=generator)
        if isinstance(parameter, DTensor):
            mesh, placements = parameter.device_mesh, parameter.placements
            gradient = distribute_tensor(gradient, mesh, placements, src_data_rank=None)
        elif isinstance(parameter, fullshard.FlatShard):
            gradient = torch.zeros_like(parameter).copy_(gradient)
        parameter.grad = None if (step, number) == (1, 2) else gradient


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        set_gradients(model, step)
        optimizer.step()


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices and others, with settings of their own."""
    return [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.2},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]


def made(name: str, model: nn.Module, owners: bool = True) -> torch.optim.Optimizer:
    optimizer_class, settings = {**CLASSES, **IN_ONE_BATCH}[name]
    if owners:
        return fullshard.OwnerOptimizer(groups_of(model), optimizer_class, **settings)
    return optimizer_class(groups_of(model), **settings)


def differing(model: nn.Module, reference: nn.Module, rounded: bool = False) -> list[str]:
    """Parameters that differ in any bit, or by more than rounding."""
    pairs = zip(model.named_parameters(), reference.parameters(), strict=True)
    same = functools.partial(torch.allclose, rtol=1e-5, atol=1e-6) if rounded else torch.equal
    return [name for (name, p), theirs in pairs if not same(whole(p), theirs)]


def differences(name: str, layout: Any, mesh: tuple[int, ...], batch: int | None = None) -> list[str]:
    """Parameters that differ in any bit from those of one process; a scheduler changes the learning rate.

    Args:
        batch: bytes of whole parameters in a batch; None: all are in one.
    """
    names = ("replicate", "shard")[-len(mesh) :]
    model = sharded(layout, mesh=init_device_mesh("cpu", mesh, mesh_dim_names=names))
    plain = build()
    with mock.patch.object(owners, "BATCH", owners.BATCH if batch is None else batch):
        pairs = [(model, made(name, model)), (plain, made(name, plain, owners=False))]
        for module, optimizer in pairs:
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            for step in range(6):
                train(module, optimizer, range(step, step + 1))
                scheduler.step()
        assert [g["lr"] for g in pairs[0][1].param_groups] == [g["lr"] for g in pairs[1][1].param_groups]
        assert batch is None or (len(batches_of(pairs[0][1])) > 1) is (name not in IN_ONE_BATCH)
    return differing(model, plain)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("mesh", [(1,), (2,), (3,), (2, 2)], ids=str)
@pytest.mark.gloo("exchanges pieces of different sizes")
def test_equals_one_process(run_ranks, layout, mesh):
    for name in CLASSES:
        found = run_ranks(differences, name, layout, mesh, world=torch.Size(mesh).numel())
        assert found == [[]] * len(found), name


def batches_of(optimizer: Any) -> list[Any]:
    """Those of the last new step."""
    return [*optimizer._plans.values()][-1].batches


IN_ONE_BATCH = {"counts in place": (CountsInPlace, {"lr": 0.1})}


@pytest.mark.parametrize(("layout", "mesh"), [("rows", (2,)), ("flat", (3,)), ("rows", (2, 2))], ids=str)
@pytest.mark.gloo("exchanges pieces of different sizes")
def test_batches_change_no_bit(run_ranks, layout, mesh):
    for name in (*CLASSES, *IN_ONE_BATCH):
        found = run_ranks(differences, name, layout, mesh, 100, world=torch.Size(mesh).numel())
        assert found == [[]] * len(found), name


def order_of_a_step() -> list[str]:
    """Exchanges as they begin and end, and steps of a batch's parameters between them."""
    order: list[str] = []

    class Noted(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            order.append(f"step {sum(p.grad is not None for g in self.param_groups for p in g['params'])}")
            super().step()

    class Work:
        def __init__(self, work: Any, number: int) -> None:
            self.work, self.number = work, number

        def wait(self, *timeout: Any) -> None:
            self.work.wait(*timeout)
            order.append(f"end {self.number}")

    exchange, begun = dist.all_to_all_single, 0

    def noted(*args: Any, **options: Any) -> Any:
        nonlocal begun
        begun += 1
        order.append(f"begin {begun}")
        return Work(exchange(*args, **options), begun)

    model = fullshard.fully_shard(nn.Sequential(*[nn.Linear(WIDE, WIDE, bias=False) for _ in range(6)]))
    with mock.patch.object(owners, "BATCH", 4 * WIDE * WIDE):
        optimizer = fullshard.OwnerOptimizer(model.parameters(), Noted, lr=0.1)
        set_gradients(model, 0)
        optimizer.step()
        order.clear()
        begun = 0
        with mock.patch.object(dist, "all_to_all_single", noted):
            optimizer.step()
    return order


@pytest.mark.gloo("exchanges pieces of different sizes")
def test_exchanges_are_under_way_while_a_batch_steps(run_ranks):
    """Values are exchanges 1, 3 and 6, gradients 2, 4 and 7, results 5, 8 and 9: of three batches of a matrix each."""
    for order in run_ranks(order_of_a_step, world=2):
        assert order == [
            *("begin 1", "end 1", "begin 2", "end 2"),  # of the first batch, one after another: less memory
            *("begin 3", "begin 4", "step 1", "begin 5"),
            *("end 3", "end 4", "begin 6", "begin 7", "step 1", "end 5", "begin 8"),
            *("end 6", "end 7", "step 1", "end 8", "begin 9", "end 9"),
        ]


def split_over_two_axes() -> bool:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    value, gradient = torch.randn(9, 6), torch.randn(9, 6)
    plain = nn.Parameter(value.clone())
    ours = nn.Parameter(distribute_tensor(value, mesh, [Shard(0), Shard(1)]))
    plain.grad, ours.grad = gradient, distribute_tensor(gradient, mesh, [Shard(0), Shard(1)])
    reference = torch.optim.Adafactor([plain], lr=0.1)
    optimizer = fullshard.OwnerOptimizer([ours], torch.optim.Adafactor, lr=0.1)
    for _ in range(3):
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        reference.step()
    assert isinstance(ours, DTensor)
    return torch.equal(ours.full_tensor(), plain)


@pytest.mark.gloo("DTensor's collectives")
def test_parameters_that_are_split_twice_are_gathered(run_ranks):
    assert run_ranks(split_over_two_axes, world=4) == [True] * 4


def resumed(name: str, how: str, folder: str, layout: str, save: bool) -> list[str]:
    """Three steps, and a save; or a load, and the steps that follow: differences to one process."""
    model, plain = sharded(layout), build()
    optimizer, reference = made(name, model), made(name, plain, owners=False)
    train(plain, reference, range(3 if save else 6))
    if save:
        train(model, optimizer, range(3))
    if how == "fullshard":
        (fullshard.save if save else fullshard.load)(folder, model, optimizer)
    else:
        if not save:  # state to load into
            train(model, optimizer, range(1))
        state = {"model": model.state_dict(), "optimizer": fullshard.optimizer_state_dict(model, optimizer)}
        (dcp.save if save else dcp.load)(state, checkpoint_id=folder)
        if not save:
            model.load_state_dict(state["model"])
            fullshard.load_optimizer_state_dict(model, optimizer, state["optimizer"])
    if not save:
        train(model, optimizer, range(3, 6))
    return differing(model, plain, rounded=name == "soap")  # whose matrices lie column by column before they are saved


@pytest.mark.parametrize("how", ["fullshard", "dcp"])
@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.gloo("processes")
def test_checkpoints_load_on_other_worlds_and_layouts(run_ranks, tmp_path: Path, name, how):
    assert run_ranks(resumed, name, how, str(tmp_path / "saved"), "rows", True, world=2) == [[]] * 2
    for world, layout in ((3, "flat"), (1, "rows"), (2, "rows")):
        found = run_ranks(resumed, name, how, str(tmp_path / "saved"), layout, False, world=world)
        assert found == [[]] * world, (world, layout)


def to_and_from_adamw(folder: str) -> list[str]:
    """State of AdamW on owners goes on in AdamW on rows, and back."""
    model, plain = sharded(), build()
    train(plain, made("adamw", plain, owners=False), range(6))
    pair = [made("adamw", model), made("adamw", model, owners=False)]
    for begin, end, optimizer, after in ((0, 2, *pair), (2, 4, *pair[::-1]), (4, 6, *pair)):
        train(model, optimizer, range(begin, end))
        fullshard.save(folder, model, optimizer, step=end)
        fullshard.load(folder, model, after)
    return differing(model, plain)


@pytest.mark.gloo("processes")
def test_state_goes_on_without_owners_and_back(run_ranks, tmp_path: Path):
    assert run_ranks(to_and_from_adamw, str(tmp_path), world=2) == [[]] * 2


def other_ways() -> list[str]:
    """A copy, torch's own state dicts, a group that is added, a closure: as one process does."""
    wrong = []
    for name, (optimizer_class, settings) in CLASSES.items():
        model, plain = sharded(), build()
        (first, *rest), (first_plain, *rest_plain) = groups_of(model), groups_of(plain)
        optimizer: Any = fullshard.OwnerOptimizer([first], optimizer_class, **settings)
        reference = optimizer_class([first_plain], **settings)
        train(model, optimizer, range(2)), train(plain, reference, range(2))
        for each in (optimizer, reference):
            each.param_groups[0]["lr"] *= 0.5  # as a scheduler does, before a group is added
        optimizer.add_param_group(rest[0]), reference.add_param_group(rest_plain[0])
        assert [group["lr"] for group in optimizer.param_groups] == [group["lr"] for group in reference.param_groups]
        train(model, optimizer, range(2, 3)), train(plain, reference, range(2, 3))
        state = get_optimizer_state_dict(model, optimizer)
        again: Any = fullshard.OwnerOptimizer(groups_of(model), optimizer_class, **settings)
        if name != "soap":  # torch's function loads no settings that a new optimizer lacks: its groups' "step"
            model.zero_grad()  # with gradients torch's function would not take the step that makes state
            set_optimizer_state_dict(model, again, state)
        else:
            again.load_state_dict(optimizer.state_dict())
        set_gradients(model, 3), set_gradients(plain, 3)
        assert again.step(lambda: 5) == 5
        reference.step()
        wrong += [f"{name}: {one}" for one in differing(model, plain, name == "soap")]
        copied = copy.deepcopy(again)
        assert type(copied) is fullshard.OwnerOptimizer and copied.optimizer_class is optimizer_class
        assert copied.param_groups[0]["params"][0] is not model[0].weight
        train(model, again, range(4, 5)), train(plain, reference, range(4, 5))
        wrong += [f"{name} after a copy: {one}" for one in differing(model, plain, name == "soap")]
    return wrong


@pytest.mark.gloo("processes")
def test_what_else_programs_do(run_ranks):
    assert run_ranks(other_ways, world=2) == [[]] * 2


class Gained(torch.optim.SGD):
    """SGD that multiplies gradients by a setting of its own, which no group shows."""

    def __init__(self, params: Any, **settings: Any) -> None:
        self.gain = settings.pop("gain")
        super().__init__(params, **settings)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                parameter.sub_(parameter.grad, alpha=self.gain * group["lr"])


def moved_by_a_copy() -> bool:
    model = sharded()
    optimizer = fullshard.OwnerOptimizer(model.parameters(), Gained, lr=0.5, gain=2.0)
    both, other = copy.deepcopy((model, optimizer))
    set_gradients(both, 0)
    before = [whole(p.detach()).clone() for p in both.parameters()]
    other.step()
    pairs = zip(both.parameters(), before, strict=True)
    return all(torch.allclose(whole(p.detach()), value - whole(p.grad), atol=1e-6) for p, value in pairs)


@pytest.mark.gloo("processes")
def test_a_copy_has_settings_that_only_the_constructor_knows(run_ranks):
    assert run_ranks(moved_by_a_copy, world=2) == [True, True]


def held_bytes() -> tuple[int, int, int, list[int]]:
    """State on this rank, whole and by `memory_use`; all of it; and tensors alive after each of some steps."""
    import gc

    model = sharded()
    optimizer: Any = made("adamw", model)
    alive = []
    for step in range(12):
        train(model, optimizer, range(step, step + 1))
        if step % 4 == 3:
            optimizer.state_dict()
        gc.collect()
        alive.append(sum(isinstance(one, torch.Tensor) for one in gc.get_objects()))
    train(model, optimizer, range(12, 13))
    state = sum(v.numel() * 4 for own in optimizer.state.values() for v in own.values() if v.dim())
    wholes = [param.whole for param in optimizer._params.values()]
    assert all(whole.untyped_storage().nbytes() <= 4 for whole in wholes), "values are let go"
    total = 3 * 4 * sum(p.numel() for p in model.parameters())
    return state, fullshard.memory_use(model, optimizer).optimizer, total, alive


@pytest.mark.gloo("processes")
def test_each_rank_keeps_the_state_of_its_own_and_nothing_grows(run_ranks):
    found = run_ranks(held_bytes, world=2)
    assert sum(state for state, *_ in found) == found[0][2]
    for state, told, total, alive in found:
        assert 0.4 * total < state < 0.6 * total
        assert state <= told <= state + 64  # step counts
        assert alive[8] <= alive[4] and alive[9] <= alive[5]  # after `state_dict`, and then; others may free some


class Together(torch.optim.SGD):
    """Steps by gradients that are divided by the norm of all."""

    def step(self, closure: Any = None) -> None:
        gradients = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        torch.nn.utils.clip_grads_with_norm_(
            [p for g in self.param_groups for p in g["params"]], 1.0, torch.nn.utils.get_total_norm(gradients)
        )
        super().step()


class NeedsClosure(torch.optim.SGD):
    def step(self, closure: Any) -> None:
        super().step(closure)


class Guess(torch.optim.SGD):
    """Adds random numbers."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.add_(torch.randn_like(p.grad))
        super().step()


def refused() -> dict[str, str]:
    model = sharded("flat")
    view = fullshard.optimizer_view(sharded())
    tries: dict[str, Callable[[], Any]] = {
        "together": lambda: fullshard.OwnerOptimizer(model.parameters(), Together, lr=0.1),
        "closure": lambda: fullshard.OwnerOptimizer(model.parameters(), NeedsClosure, lr=0.1),
        "lbfgs": lambda: fullshard.OwnerOptimizer(model.parameters(), torch.optim.LBFGS),
        "adagrad": lambda: fullshard.OwnerOptimizer(model.parameters(), torch.optim.Adagrad),
        "view": lambda: fullshard.OwnerOptimizer(view, torch.optim.Adafactor),
        "instance": lambda: fullshard.OwnerOptimizer(model.parameters(), torch.optim.SGD(view)),  # type: ignore[arg-type]
        "rows": lambda: train_once(torch.optim.Adafactor),
        "list": lambda: train_once(pytorch_optimizer.Adan),
        "element-wise": lambda: train_once(torch.optim.Rprop),
        "runs": lambda: train_once(pytorch_optimizer.CAME, fullshard.optimizer_view),
    }
    errors = {}
    for name, attempt in tries.items():
        try:
            attempt()
        except fullshard.ConfigError as error:
            errors[name] = str(error)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fullshard.OwnerOptimizer(model.parameters(), Guess, lr=0.1)
    errors["random"] = str(caught[0].message) if caught else ""
    return errors


def train_once(optimizer_class: Any, parameters: Any = lambda model: model.parameters()) -> None:
    model = sharded()
    optimizer = optimizer_class(parameters(model), lr=0.1)
    model(torch.ones(2, WIDE)).sum().backward()
    optimizer.step()


@pytest.mark.gloo("processes")
def test_what_cannot_be_exact_is_refused_by_name(run_ranks):
    for errors in run_ranks(refused, world=2):
        assert "Together, whose step of a parameter depends on others" in errors["together"]
        assert "NeedsClosure, whose step() computes gradients" in errors["closure"]
        assert "LBFGS" in errors["lbfgs"]
        assert "Adagrad creates state in its constructor" in errors["adagrad"]
        assert "is a flat run of elements" in errors["view"] and "fully_shard" in errors["view"]
        assert "subclass of torch.optim.Optimizer" in errors["instance"]
        assert "Adafactor computes with operations" in errors["rows"] and "OwnerOptimizer" in errors["rows"]
        assert "0.weight" in errors["rows"]
        assert "Adan(..., foreach=False)" in errors["list"]
        assert "Rprop(optimizer_view(model), ...)" in errors["element-wise"]
        assert "CAME needs whole tensors" in errors["runs"] and "OwnerOptimizer" in errors["runs"]
        assert "cannot determine whether Guess does" in errors["random"]


def test_nested_state_is_put_together_again():
    state = {"a": 1, "GG": [torch.ones(2), [], (3.0, {"x": None, 4: "text"})], "empty": {}, "none": ()}
    flat: dict[str, Any] = {}
    for key, value in state.items():
        _flatten(value, key, flat, {})
    backwards = dict(reversed(list(flat.items())))
    assert repr(_nested(flat, {})) == repr(state)
    again = _nested(backwards, {})
    assert torch.equal(again["GG"].pop(0), torch.ones(2)) and again["GG"] == state["GG"][1:]
    with pytest.raises(fullshard.CheckpointError, match="cannot be saved"):
        _flatten({"a": object()}, "key", flat, {})


def versions(layout: str) -> list[int]:
    """By how much a step counts up the versions of parameters, with a gradient and without."""
    model = sharded(layout)
    optimizer = made("sgd", model)
    set_gradients(model, 0)
    parameters = list(model.parameters())
    parameters[1].grad = None
    before = [p._version for p in parameters]
    optimizer.step()
    return [p._version - version for p, version in zip(parameters, before, strict=True)]


@pytest.mark.parametrize("layout", ["rows", "flat"])
@pytest.mark.gloo("exchanges pieces of different sizes")
def test_a_step_counts_as_a_change_in_place(run_ranks, layout):
    for counted in run_ranks(versions, layout, world=2):
        assert [count > 0 for count in counted] == [number != 1 for number in range(len(counted))], counted


def keys_in_any_order() -> list[list[float]]:
    """State from elsewhere, whose keys one rank lists the other way round: moments are not exchanged for each other."""
    results = []
    for turned in (False, True):
        torch.manual_seed(0)
        model = fullshard.fully_shard(nn.Linear(6, 4))
        plain = torch.optim.AdamW(model.parameters(), lr=0.1)
        for optimizer in (plain, fullshard.OwnerOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)):
            if optimizer is not plain:
                state = plain.state_dict()
                if turned and dist.get_rank() == 1:
                    state["state"] = {number: dict(reversed(each.items())) for number, each in state["state"].items()}
                optimizer.load_state_dict(state)
            for _ in range(2):
                model(torch.ones(3, 6)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        results.append(model.weight.full_tensor().flatten().tolist())
    return results


@pytest.mark.gloo("processes")
def test_ranks_may_list_keys_of_state_in_any_order(run_ranks):
    for usual, turned in run_ranks(keys_in_any_order, world=2):
        assert usual == turned and not any(map(math.isnan, usual))


class _RefusesRates(torch.optim.SGD):
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if param_group.get("lr", 0.0) < 0:
            raise ValueError("lr < 0")
        super().add_param_group(param_group)


def test_a_group_that_the_class_refuses_changes_nothing(fake_world):
    fake_world(1)
    weight, other = (nn.Parameter(torch.ones(2, 2)) for _ in range(2))
    optimizer = fullshard.OwnerOptimizer([weight], _RefusesRates, lr=0.5)
    with pytest.raises(ValueError, match="lr < 0"):
        optimizer.add_param_group({"params": [other], "lr": -1.0})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [other], "lr": 0.25})
    for parameter in (weight, other):
        parameter.grad = torch.ones(2, 2)
    optimizer.step()
    assert weight.eq(0.5).all() and other.eq(0.75).all()


@pytest.mark.parametrize("layout", ["rows", "flat"])
def test_state_that_does_not_fit_is_refused_when_loaded(fake_world, layout):
    """The owner's next step would fail, while other ranks wait for it."""
    fake_world(2)
    model = fullshard.fully_shard(nn.Linear(4, 6, bias=False), layout=layout)
    optimizer = fullshard.OwnerOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    saved = optimizer.state_dict()
    before = optimizer.state[model.weight]["exp_avg"].to_local().clone()
    values = torch.ones(2), torch.ones(6, 4).to_sparse(), torch.ones(6, 4, device="meta"), "no", None
    for value in values:
        state = {**saved, "state": {0: {**saved["state"][0], "exp_avg": value}}}
        with pytest.raises(fullshard.CheckpointError, match=r"does not fit its parameter(.|\n)*weight\.exp_avg"):
            optimizer.load_state_dict(state)
        assert torch.equal(optimizer.state[model.weight]["exp_avg"].to_local(), before)
    for value in (torch.ones(6, 4), saved["state"][0]["exp_avg"]):  # whole, and split
        optimizer.load_state_dict({**saved, "state": {0: {**saved["state"][0], "exp_avg": value}}})
        optimizer.step()
