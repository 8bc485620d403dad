"""Weights changed between two passes are the weights of the next pass, whatever stayed gathered from the last one.

An assignment of `.data` gives a parameter other memory. It never writes to the memory that it had, which the program
may hold: what was set aside (to evaluate an average) is what is put back.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

import fullshard
from fullshard import FullyShardedDataParallel
from fullshard import FullyShardedDataParallel as FSDP
from training import full
from ways import (
    LAYOUTS,
    WIDTH,
    assert_equal,
    batch,
    but_last,
    differences,
    gradient_problems,
    inner,
    layers,
    loss_of,
    mine,
    on_ranks,
    shard,
    some_ways,
    synced,
    value_problems,
    whole_parameters,
)

HALF = 0.5  # what every change multiplies all weights by


def local(parameter: Tensor) -> Tensor:
    """The plain tensor of what this rank holds, sharing its memory."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter.detach()


def by_collective(parameter: Tensor) -> None:
    """Each rank sends half of its part to itself, into the part."""
    held, rank = local(parameter).detach().view(-1), dist.get_rank()
    sizes = [held.numel() if other == rank else 0 for other in range(dist.get_world_size())]
    dist.all_to_all_single(held, held * HALF, sizes, sizes)


def by_new_parameters(model: nn.Module) -> None:
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                setattr(module, name, nn.Parameter(parameter.detach() * HALF))


def by_torchs_loader(model: nn.Module) -> None:
    state = {name: value * HALF for name, value in whole_parameters(model).items()}
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))


def summoned(model: nn.Module) -> None:
    with FSDP.summon_full_params(model):
        torch._foreach_mul_(list(model.parameters()), HALF)


def each(change: Callable[[Any], object]) -> Callable[[nn.Module], object]:
    return lambda model: [change(parameter) for parameter in model.parameters()]


def halves(model: nn.Module) -> dict[str, Any]:
    return {name: value * HALF for name, value in model.state_dict().items()}


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "in place": each(lambda p: p.mul_(HALF)),
    "copied": each(lambda p: p.copy_(p * HALF)),
    "data in place": each(lambda p: p.data.mul_(HALF)),
    "data assigned": each(lambda p: setattr(p, "data", p.data * HALF)),
    "detached": each(lambda p: p.detach().mul_(HALF)),
    "lerp": each(lambda p: p.lerp_(torch.zeros_like(p), HALF)),
    "local": each(lambda p: local(p).mul_(HALF)),
    "numpy": each(lambda p: local(p).detach().numpy().__imul__(HALF)),  # no version counter anywhere moves
    "collective": each(by_collective),
    "foreach": lambda model: torch._foreach_mul_(list(model.parameters()), HALF),
    "foreach of detached": lambda model: torch._foreach_mul_([p.detach() for p in model.parameters()], HALF),
    "new parameters": by_new_parameters,
    "load": lambda model: model.load_state_dict(halves(model)),
    "load, assigning": lambda model: model.load_state_dict(halves(model), assign=True),
    "torch's loader": by_torchs_loader,
    "summoned": summoned,
    "apply": lambda model: model._apply(lambda tensor: tensor * HALF),  # what `model.to` and its like do
}
FEW = ("in place", "data assigned", "numpy")


def changes_of(way: str) -> dict[str, Callable[[nn.Module], object]]:
    """The wrapper's state dicts are whole tensors."""
    without = ("summoned",) if way in LAYOUTS else ("torch's loader", "load, assigning")
    return {name: change for name, change in CHANGES.items() if name not in without}


# What leaves units gathered.


def evaluation(model: nn.Module, context: Callable = torch.no_grad) -> None:
    with context():
        loss_of(model, mine(5))


def part_of_a_backward(model: nn.Module) -> None:
    """The root is not in the graph of this loss."""
    model(mine(5))
    inner(model)[0](mine(5)).sum().backward()
    model.zero_grad()


def failed_forward(model: nn.Module) -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(mine(5)[:, :2])


def failed_backward(model: nn.Module) -> None:
    output = model(mine(5))
    output.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        output.sum().backward()


def after_backward(model: Any) -> None:
    model.set_reshard_after_backward(False)
    loss_of(model, mine(5)).backward()
    model.zero_grad()


def unsharded(model: Any) -> None:
    """Not waited for: modules show the sharded parameters."""
    for unit in (*list(model)[:-1], model):
        unit.unshard(async_op=True)


LEFT: dict[str, tuple[Callable[[nn.Module], object], bool]] = {  # and whether units are kept after forward
    "forward": (lambda model: loss_of(model, mine(5)), False),  # the root stays gathered by default
    "forward, kept": (lambda model: loss_of(model, mine(5)), True),
    "evaluation, kept": (evaluation, True),
    "inference, kept": (lambda model: evaluation(model, torch.inference_mode), True),
    "part of a backward, kept": (part_of_a_backward, True),
    "failed forward": (failed_forward, False),
    "failed backward": (failed_backward, False),
}
LEFT_BY_USER = {"after backward": (after_backward, False)}


def stepped(model: nn.Module, inputs: Tensor) -> None:
    loss_of(model, inputs).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.zero_grad()


def next_pass(where: str, model: nn.Module, reference: nn.Module) -> list[str]:
    """The next loss, its gradients and what the parameters are then."""
    got, want = loss_of(model, mine(1)), loss_of(reference, mine(1))
    problems = differences(where, {"loss": got.detach()}, {"loss": want.detach()})
    got.backward()
    loss_of(reference, batch(1)).backward()
    return problems + gradient_problems(where, model, reference) + value_problems(where, model, reference)


def computed_with(way: str, lefts: dict[str, tuple[Callable[[nn.Module], object], bool]]) -> list[str]:
    """After a step and what leaves units gathered, all weights are halved: the next pass is that of the halves."""
    problems: list[str] = []
    for left, (leave, keep) in lefts.items():
        model, reference = shard(layers(), way, but_last, keep=keep), layers()
        for name in changes_of(way) if left in ("forward, kept", "after backward") else FEW:
            if left in ("after backward", "unsharded") and name == "numpy":
                continue  # nobody can see it
            stepped(model, mine(0))
            stepped(reference, batch(0))
            leave(model)
            with torch.no_grad():
                CHANGES[name](model)
                CHANGES["in place"](reference)
            problems += next_pass(f"{left}, {name}", model, reference)
            for one in (model, reference):
                one.zero_grad()
                with torch.no_grad():
                    torch._foreach_div_(list(one.parameters()), HALF)
    return problems


@some_ways
@pytest.mark.cpu("writes through numpy to units that stay gathered: of a device no such memory can be had")
@on_ranks
def test_a_change_is_computed_with(way: str) -> list[str]:
    return computed_with(way, {**LEFT, **(LEFT_BY_USER if way in LAYOUTS else {})})


@pytest.mark.gloo("the program writes to what a gather in flight reads, which ranks in memory refuse of anybody")
@on_ranks
def test_a_change_while_unshard_is_under_way_is_computed_with() -> list[str]:
    return computed_with("rows", {"unsharded": (unsharded, False)})


@some_ways
@on_ranks
def test_weights_changed_and_read_without_a_pass(way: str, tmp_path: Path) -> list[str]:
    """A state dict, whole parameters, and a checkpoint show a change that no pass has seen yet."""
    problems: list[str] = []
    for name, change in changes_of(way).items():
        model, reference = shard(layers(), way, but_last), layers()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loss_of(model, mine(5))
            with torch.no_grad():
                change(model)
                CHANGES["in place"](reference)
            shown = {key: full(value) for key, value in model.state_dict().items()}
            problems += differences(f"{name}: state dict's", shown, reference.state_dict())
            problems += value_problems(name, model, reference)
        if name in FEW:
            fullshard.save(tmp_path / name, model, step=1)
            fullshard.load(tmp_path / name, loaded := layers())
            problems += differences(f"{name}, saved:", dict(loaded.state_dict()), dict(reference.state_dict()))
    return problems


@some_ways
@on_ranks
def test_a_change_of_one_ranks_part_alone(way: str) -> list[str]:
    """As an optimizer whose tensors have one owner each steps: the other rank must hear of it, too."""
    problems = []
    for left in ("forward", "forward, kept", "evaluation, kept"):
        leave, keep = LEFT[left]
        model, reference = shard(layers(), way, but_last, keep=keep), layers()
        stepped(model, mine(0))
        leave(model)
        with torch.no_grad():
            for parameter in model.parameters():
                if dist.get_rank() == 1 and local(parameter).numel():
                    local(parameter).mul_(HALF)
        loss = loss_of(model, mine(1))
        loss.backward()
        reference.load_state_dict(whole_parameters(model))
        problems += differences(left, {"loss": loss.detach()}, {"loss": loss_of(reference, mine(1)).detach()})
        loss_of(reference, batch(1)).backward()
        problems += gradient_problems(left, model, reference)
    return problems


# An average swapped in. Each sets aside, puts the average in place, yields for the evaluation, and puts back.

Parameters = list[nn.Parameter]


def assign(parameters: Parameters, values: list[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.data = value


def by_data(parameters: Parameters, average: list[Tensor], aside: Callable = lambda p: p.data) -> Iterator[None]:
    backup = [aside(p) for p in parameters]
    assign(parameters, average)
    yield
    assign(parameters, backup)


def exchanged_in_turn(parameters: Parameters, average: list[Tensor]) -> Iterator[None]:
    for _ in range(2):
        for at, parameter in enumerate(parameters):
            parameter.data, average[at] = average[at], parameter.data
        yield


def twice(parameters: Parameters, average: list[Tensor]) -> Iterator[None]:
    """Put in, back, and in once more, before anything runs."""
    for _ in by_data(parameters, average):
        pass
    yield from by_data(parameters, average)


def copied_in_and_assigned_back(parameters: Parameters, average: list[Tensor]) -> Iterator[None]:
    backup = [p.data.clone() for p in parameters]
    with torch.no_grad():
        for parameter, value in zip(parameters, average, strict=True):
            parameter.copy_(value)
    yield
    assign(parameters, backup)


SWAPS: dict[str, Callable[[Parameters, list[Tensor]], Iterator[None]]] = {
    "by data": by_data,
    "by detached": lambda parameters, average: by_data(parameters, average, lambda p: p.detach()),
    "with copies": lambda parameters, average: by_data(parameters, [value.clone() for value in average]),
    "only weights": lambda parameters, average: by_data(parameters[::2], average[::2]),  # a part of every unit
    "exchanged in turn": exchanged_in_turn,
    "twice": twice,
    "copied in": copied_in_and_assigned_back,
}


def average_losses(model: nn.Module, parameters: Any, stepped: Any, swap: Callable) -> dict[str, Tensor]:
    """Three steps with momentum, and after each an evaluation with the average; losses of both.

    Every rank has the same batch: losses are one process's.
    """
    parameters, optimizer = list(parameters), torch.optim.SGD(stepped, lr=0.2, momentum=0.9)
    average = [p.detach().clone() for p in parameters]
    losses = {}
    for step in range(3):
        loss = loss_of(model, batch(step, 0))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for value, parameter in zip(average, parameters, strict=True):
            value.lerp_(parameter.detach(), 0.5)
        losses[f"training {step}"] = loss.detach()
        for time, _ in enumerate(swap(parameters, average)):
            with torch.no_grad():
                losses[f"evaluation {step}.{time}"] = loss_of(model, batch(step + 10, 0))
    return losses


CASES = [("rows", ""), ("flat", ""), ("wrapper", ""), ("originals", ""), ("rows", "stepped"), ("owner", "swapped")]


@pytest.mark.parametrize(("way", "views"), CASES)
@on_ranks
def test_what_was_set_aside_is_what_is_put_back(way: str, views: str) -> list[str]:
    """Also where an optimizer's view is stepped, or all that the program has."""
    problems = []
    for at, (name, swap) in enumerate(SWAPS.items()):
        if name == "only weights" and (way == "wrapper" or views == "swapped"):
            continue  # what is one for several parameters is no weight
        plain, model = layers(), shard(layers(), way, but_last, keep=at % 2 == 0)
        want = average_losses(plain, plain.parameters(), plain.parameters(), swap)
        viewed = fullshard.optimizer_view(model) if views else list(model.parameters())
        exchanged = viewed if views == "swapped" else model.parameters()
        problems += differences(name, average_losses(model, exchanged, viewed, swap), want)
        with torch.no_grad():
            model(mine(0))  # what is assigned to a view is taken over by the next pass
        problems += value_problems(name, model, plain)
    if views == "swapped":
        viewed[0].data = torch.zeros(1, dtype=torch.float64)
        with pytest.raises(fullshard.ConfigError, match="a different shape"):
            model(mine(0))
    return problems


@some_ways
@on_ranks
def test_an_assignment_writes_to_no_tensor_that_somebody_holds(way: str) -> list[str]:
    """Views of every kind, taken before; the assigned tensor is not written to by the next step either."""
    problems = []
    for keep in (False, True):
        model = shard(layers(), way, but_last, keep=keep)
        loss_of(model, mine(0)).backward()
        for parameter in model.parameters():
            views = [local(view) for view in (parameter.data, parameter.detach(), parameter)]
            before = [view.clone() for view in views]
            parameter.data = parameter.detach() * 2
            parameter.data = parameter.detach() * 2
            problems += [
                f"keep={keep}" for view, value in zip(views, before, strict=True) if not torch.equal(view, value)
            ]
    return problems


@pytest.mark.parametrize(("way", "views"), [(way, bool(views)) for way, views in CASES])
@on_ranks
def test_gradients_and_steps_outlive_an_assignment(way: str, views: bool) -> list[str]:
    """Micro-batches, some without sync, with assignments after each, and a step with no forward in between."""
    plain, model = layers(), shard(layers(), way, but_last)
    for one in (plain, model):
        optimizer = torch.optim.SGD(
            fullshard.optimizer_view(model) if views and one is model else one.parameters(), lr=0.2
        )
        for step in range(2):
            for sync in (False, True, True):
                with synced(one, sync):
                    loss_of(one, batch(step, 0)).backward()
                for parameter in one.parameters():
                    parameter.data = parameter.data * 0.9
            optimizer.step()
            optimizer.zero_grad()
    return value_problems("after two steps", model, plain)


# Data that parameters exchange, and what is tied or copied after sharding.


def swap_data(one: nn.Module, other: nn.Module, detached: bool = False) -> None:
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        p.data, q.data = (q.detach(), p.detach()) if detached else (q.data, p.data)


@some_ways
@pytest.mark.parametrize("detached", [False, True], ids=["data", "detached"])
@on_ranks
def test_the_weights_of_a_model_and_its_copy_are_exchanged(way: str, detached: bool) -> list[str]:
    """And back: what averages of weights do around an evaluation. A copy has no gradients, as torch's have none."""
    model, plain = shard(layers(), way, but_last), layers()
    loss_of(model, mine(0)).backward(), loss_of(plain, batch(0)).backward()
    average, plain_average = copy.deepcopy(model), copy.deepcopy(plain)
    plain_average.zero_grad()
    assert all(p.grad is None for p in average.parameters())
    problems = gradient_problems("of the model itself", model, plain)
    model.zero_grad(), plain.zero_grad()
    stepped(model, mine(0)), stepped(plain, batch(0))
    for number in (1, 2):
        swap_data(model, average, detached), swap_data(plain, plain_average)
        with torch.no_grad():
            problems += differences("output", {"": model(mine(9))}, {"": plain(mine(9))})
        stepped(average, mine(number)), stepped(plain_average, batch(number))
    return problems + value_problems("model", model, plain) + value_problems("its copy", average, plain_average)


def rotate(model: nn.Module) -> None:
    """The two blocks take each other's data, layer by layer."""
    squares = [m for m in model.modules() if isinstance(m, nn.Linear) and m.out_features == WIDTH]
    data = [(layer.weight.data, layer.bias.data) for layer in squares]
    for layer, (weight, bias) in zip(squares, data[2:] + data[:2], strict=True):
        layer.weight.data, layer.bias.data = weight, bias


@pytest.mark.parametrize("way", ["rows", "flat", "owner"])
@on_ranks
def test_blocks_take_each_others_data(way: str) -> list[str]:
    model, plain = shard(layers(), way, but_last), layers()
    for number in range(2):
        rotate(model), rotate(plain)
        stepped(model, mine(number)), stepped(plain, batch(number))
    return value_problems("rotated", model, plain)


@pytest.mark.parametrize("way", ["rows", "flat", "originals"])
@pytest.mark.parametrize("late", [False, True])
def test_a_tie_inside_a_unit_after_sharding_is_refused_by_name(fake_world, way, late):
    fake_world(2)
    norm = nn.LayerNorm(WIDTH).double()
    model = shard(nn.Sequential(*layers()[:2], norm), way, but_last)
    if late:
        stepped(model, mine(0))
    norm.bias = norm.weight
    with pytest.raises(fullshard.FullshardError, match=r"2\.bias"):
        model(mine(0))


@on_ranks
def test_a_step_inside_summon_full_params_is_told_of() -> None:
    """One FlatParameter: the step counts, and whole values from before are not written over it."""
    model, other = (shard(layers(), "wrapper", but_last) for _ in range(2))
    for one in (model, other):
        loss_of(one, mine(0)).backward()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, other)]
    optimizers[1].step()
    inside = pytest.raises(RuntimeError, match="inside summon_full_params")
    with inside, FullyShardedDataParallel.summon_full_params(model):
        optimizers[0].step()
    assert_equal(whole_parameters(model), whole_parameters(other), "weights")
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        optimizers[0].step()
