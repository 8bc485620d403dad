"""Weights changed between two passes are the weights of the next pass, whatever stayed gathered from the last one."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from fullshard import FullyShardedDataParallel
from training import assert_same, full
from ways import (
    LAYOUTS,
    WAYS,
    batch,
    but_last,
    differences,
    every_way,
    gradient_problems,
    inner,
    layers,
    loss_of,
    mine,
    shard,
    value_problems,
    whole_parameters,
)

HALF = 0.5  # what every change multiplies all weights by


def local(parameter: Tensor) -> Tensor:
    """The plain tensor of what this rank holds, sharing its memory."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter.detach()


def change_in_place(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.mul_(HALF)


def change_by_copy(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.copy_(parameter * HALF)


def change_by_data_in_place(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(HALF)


def change_by_data_assigned(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * HALF


def change_by_detached(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.detach().mul_(HALF)


def change_by_foreach(model: nn.Module) -> None:
    torch._foreach_mul_(list(model.parameters()), HALF)


def change_by_foreach_of_detached(model: nn.Module) -> None:
    torch._foreach_mul_([parameter.detach() for parameter in model.parameters()], HALF)


def change_by_lerp(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.lerp_(torch.zeros_like(parameter), HALF)


def change_local(model: nn.Module) -> None:
    for parameter in model.parameters():
        local(parameter).mul_(HALF)


def change_local_by_numpy(model: nn.Module) -> None:
    """No version counter anywhere moves."""
    for parameter in model.parameters():
        array = local(parameter).detach().numpy()
        array *= HALF


def change_local_by_collective(model: nn.Module) -> None:
    """Each rank sends half of its part to itself, into the part."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for parameter in model.parameters():
        held = local(parameter).detach().view(-1)
        sizes = [held.numel() if other == rank else 0 for other in range(world)]
        dist.all_to_all_single(held, held * HALF, sizes, sizes)


def change_by_new_parameters(model: nn.Module) -> None:
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                setattr(module, name, nn.Parameter(parameter.detach() * HALF))


def change_by_load(model: nn.Module) -> None:
    model.load_state_dict({name: value * HALF for name, value in model.state_dict().items()})


def change_by_load_assigning(model: nn.Module) -> None:
    model.load_state_dict({name: value * HALF for name, value in model.state_dict().items()}, assign=True)


def change_by_torchs_loader(model: nn.Module) -> None:
    state = {name: value * HALF for name, value in whole_parameters(model).items()}
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))


def change_summoned(model: nn.Module) -> None:
    with FullyShardedDataParallel.summon_full_params(model):
        for parameter in model.parameters():
            parameter.mul_(HALF)


def change_by_apply(model: nn.Module) -> None:
    """What `model.to` and its like do."""
    model._apply(lambda tensor: tensor * HALF)


CHANGES: dict[str, Callable[[nn.Module], None]] = {
    name.removeprefix("change_"): change for name, change in list(globals().items()) if name.startswith("change_")
}
ONLY_LAYOUTS = ("by_torchs_loader", "by_load_assigning")  # the wrapper's state dicts are whole tensors
ONLY_WRAPPERS = ("summoned",)


def changes_of(way: str) -> dict[str, Callable[[nn.Module], None]]:
    left_out = ONLY_WRAPPERS if way in LAYOUTS else ONLY_LAYOUTS
    return {name: change for name, change in CHANGES.items() if name not in left_out}


# What leaves units gathered. Each gets a model that has taken one step already.


def forward_only(model: nn.Module) -> None:
    """A skipped step, or an evaluation without `no_grad`: the root stays gathered by default."""
    loss_of(model, mine(5))


def evaluation(model: nn.Module) -> None:
    with torch.no_grad():
        loss_of(model, mine(5))


def inference(model: nn.Module) -> None:
    with torch.inference_mode():
        loss_of(model, mine(5))


def part_of_a_backward(model: nn.Module) -> None:
    """The root is not in the graph of this loss."""
    model(mine(5))
    first = inner(model)[0]
    first(mine(5)).sum().backward()
    model.zero_grad()


def failed_forward(model: nn.Module) -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(mine(5)[:, :2])


def failed_backward(model: nn.Module) -> None:
    output = model(mine(5))
    output.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        output.sum().backward()


LEFT: dict[str, tuple[Callable[[nn.Module], None], bool]] = {  # and whether units are kept after forward
    "forward_only": (forward_only, False),
    "forward_only_kept": (forward_only, True),
    "evaluation_kept": (evaluation, True),
    "inference_kept": (inference, True),
    "part_of_a_backward_kept": (part_of_a_backward, True),
    "failed_forward": (failed_forward, False),
    "failed_backward": (failed_backward, False),
}
FIVE_WAYS = [way for way in WAYS if way != "blocks"]  # flat to the engine


def stepped(model: nn.Module, inputs: Tensor) -> None:
    loss_of(model, inputs).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.zero_grad()


@pytest.mark.parametrize("way", FIVE_WAYS)
@pytest.mark.parametrize("left", LEFT)
def test_a_change_is_computed_with(run_ranks, left, way):
    assert_same(run_ranks(changed, left, way))


def changed(left: str, way: str) -> list[str]:
    """After a step and what leaves units gathered, all weights are halved: the next pass is that of the halves."""
    leave, keep = LEFT[left]
    return each_change(changes_of(way), leave, way, keep)


def each_change(changes: dict[str, Callable], leave: Callable, way: str, keep: bool = False) -> list[str]:
    """One model for all changes, as long as nothing went wrong; gives the changes that did."""
    problems: list[str] = []
    model, reference = shard(layers(), way, but_last, keep=keep), layers()
    for name, change in changes.items():
        found = after_change(name, change, leave, model, reference)
        if found:
            problems += found[:1]
            model, reference = shard(layers(), way, but_last, keep=keep), layers()
    return problems


def after_change(name: str, change: Callable, leave: Callable, model: nn.Module, reference: nn.Module) -> list[str]:
    stepped(model, mine(0))
    stepped(reference, batch(0))
    try:
        leave(model)
        with torch.no_grad():
            change(model)
            change_in_place(reference)
        found = next_pass(name, model, reference)
        with torch.no_grad():
            for each in (model, reference):
                each.zero_grad()
                torch._foreach_div_(list(each.parameters()), HALF)
    except Exception as error:
        return [f"{name}: {type(error).__name__}: {error}"]
    return found


def next_pass(name: str, model: nn.Module, reference: nn.Module) -> list[str]:
    """The next loss, its gradients and what the parameters are then."""
    got, want = loss_of(model, mine(1)), loss_of(reference, mine(1))
    problems = [] if torch.allclose(got, want, rtol=1e-12) else [f"{name}: loss {got:.6f} where {want:.6f} is wanted"]
    got.backward()
    loss_of(reference, batch(1)).backward()
    return problems + gradient_problems(name, model, reference) + value_problems(name, model, reference)


@pytest.mark.gloo("weights change while an unshard that the program began is in flight; what it gathers is dropped")
@pytest.mark.parametrize("way", ["rows", "flat", "owner"])
@pytest.mark.parametrize("when", ["after backward", "unsharded"])
def test_a_change_is_computed_with_where_the_user_keeps_units(run_ranks, when, way):
    """`set_reshard_after_backward(False)` and `unshard()` keep the gathered weights only until they change."""
    assert_same(run_ranks(changed_while_kept, when, way))


def changed_while_kept(when: str, way: str) -> list[str]:
    def keep(model: nn.Module) -> None:
        if when == "after backward":
            model.set_reshard_after_backward(False)
            loss_of(model, mine(5)).backward()
            model.zero_grad()
        else:  # not waited for: modules show the sharded parameters
            for unit in (*list(model)[:-1], model):
                unit.unshard(async_op=True)

    seen = {name: change for name, change in changes_of(way).items() if name != "local_by_numpy"}  # nobody can see it
    return each_change(seen, keep, way)


@every_way
@pytest.mark.parametrize("keep", [False, True], ids=["default", "kept"])
def test_averaged_weights_swapped_in_and_out(run_ranks, keep, way):
    """Training, an evaluation (with a graph that is dropped) of averaged weights, training with the others."""
    assert_same(run_ranks(swapped, keep, way))


def swapped(keep: bool, way: str) -> list[str]:
    model, reference = shard(layers(), way, but_last, keep=keep), layers()
    seen: list[list[float]] = []
    for each in (model, reference):
        losses: list[float] = []
        seen.append(losses)
        optimizer = torch.optim.AdamW(each.parameters(), lr=1e-2)
        average = [parameter.detach().clone() for parameter in each.parameters()]
        for step in range(3):
            loss = loss_of(each, mine(step) if each is model else batch(step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            held = [parameter.detach().clone() for parameter in each.parameters()]
            torch._foreach_lerp_(average, held, 0.1)
            losses.append(loss_of(each, mine(9)).item())  # with gradients: nobody said no_grad
            for parameter, value in zip(each.parameters(), average, strict=True):
                parameter.data.copy_(value)
            losses.append(loss_of(each, mine(9)).item())
            for parameter, value in zip(each.parameters(), held, strict=True):
                parameter.data.copy_(value)
            losses.append(loss_of(each, mine(9)).item())
    problems = [
        f"evaluation {index}: {got} where {want} is wanted"
        for index, (got, want) in enumerate(zip(*seen, strict=True))
        if abs(got - want) > 1e-12
    ]
    return problems + value_problems("after three steps", model, reference)


@every_way
def test_weights_changed_and_read_back_without_a_pass(run_ranks, way):
    """A state dict, and whole parameters, show a change that no pass has seen yet."""
    assert_same(run_ranks(read_back, way))


def read_back(way: str) -> list[str]:
    problems: list[str] = []
    for name, change in changes_of(way).items():
        model, reference = shard(layers(), way, but_last), layers()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            forward_only(model)
            with torch.no_grad():
                change(model)
                change_in_place(reference)
            shown = {key: full(value) for key, value in model.state_dict().items()}
            problems += differences(f"{name}: state dict's", shown, reference.state_dict())[:1]
            problems += value_problems(name, model, reference)[:1]
    return problems


@every_way
@pytest.mark.parametrize("left", ["forward_only", "forward_only_kept", "evaluation_kept"])
def test_a_change_of_one_ranks_part_alone(run_ranks, left, way):
    """As an optimizer whose tensors have one owner each steps: the other rank must hear of it, too."""
    assert_same(run_ranks(changed_on_one_rank, left, way, timeout=10))


def changed_on_one_rank(left: str, way: str) -> list[str]:
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
    want = loss_of(reference, mine(1))
    problems = [] if torch.allclose(loss, want, rtol=1e-12) else [f"loss {loss:.6f} where {want:.6f} is wanted"]
    loss_of(reference, batch(1)).backward()
    return problems + gradient_problems("next pass", model, reference)
