"""Optimizer views stand for the parameters under them wherever a parameter can be named."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fullshard
from fullshard import DivergenceError, fully_shard, optimizer_view
from fullshard.runtime import runner_of
from ways import whole_parameters

LAYOUTS = ["rows", "flat", "owner"]
Change = Callable[[nn.Module, list], object]
"""Of the gradients of a model and of its views, before the optimizer's step."""


def three() -> nn.Sequential:
    """Layers whose rows two ranks cannot share evenly."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 1))


def sharded(layout: str) -> nn.Module:
    return fully_shard(three(), layout=layout, auto_wrap_policy={nn.Linear})


def backward(model: nn.Module, *seeds: int) -> None:
    for seed in seeds:
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))
        (20 * model(x).square().mean() / len(seeds)).backward()


def clipped(layout: str, how: str) -> list[str]:
    """Problems: of the norm that is returned, and of gradients."""
    plain, model = three(), sharded(layout)
    views = optimizer_view(model)
    backward(plain, 0, 1)
    backward(model, dist.get_rank())
    given = {
        "views": views,
        "and parameters": [*views, *model.parameters()],
        "some": [views[0], *model[2].parameters()],
    }
    some = {"some": [*plain[0].parameters(), *plain[2].parameters()]}
    for order in (2.0, 1.0, float("inf")):
        wanted = torch.nn.utils.clip_grad_norm_(some.get(how, list(plain.parameters())), 0.5, order)
        total = fullshard.clip_grad_norm_(given[how], 0.5, order)
        if not torch.allclose(total, wanted):
            return [f"norm {order}: {total.item()} where {wanted.item()} is right"]
    found = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
    return [f"{n}: {found[n]}" for n, p in plain.named_parameters() if not torch.allclose(found[n], p.grad)]


def test_clipping_is_by_the_norm_of_all_ranks(run_ranks):
    for layout, how in zip(LAYOUTS, ["views", "and parameters", "some"], strict=True):
        assert run_ranks(clipped, layout, how) == [[], []], (layout, how)


def given_up() -> list[bool]:
    """Whether anything was accumulated before and after `optimizer.zero_grad()`."""
    found = []
    for layout in LAYOUTS:
        model = sharded(layout)
        optimizer = torch.optim.SGD(optimizer_view(model), lr=0.1)
        model.set_requires_gradient_sync(False)
        for clear in (lambda: None, optimizer.zero_grad):
            backward(model, dist.get_rank())
            clear()
            units = [runner_of(module).unit for module in model.modules() if runner_of(module) is not None]
            found.append(any(gradients.accumulates for unit in units for gradients in unit.gradients))
    return found


def test_zero_grad_of_an_optimizer_gives_up_what_was_accumulated(run_ranks):
    assert run_ranks(given_up) == [[True, False] * len(LAYOUTS)] * 2


def other_settings() -> str:
    model = sharded("rows")
    optimizer = torch.optim.SGD(optimizer_view(model), lr=0.1 * (1 + dist.get_rank()))
    with pytest.raises(DivergenceError) as error:
        for _ in range(5):  # on a device two backwards later
            backward(model, dist.get_rank())
            optimizer.step()
    return str(error.value)


def test_other_settings_on_one_rank_are_named(run_ranks):
    for told in run_ranks(other_settings):
        assert "optimizers stepped differently" in told and "lr=0.1," in told and "lr=0.2," in told


def test_views_say_to_dcp_which_part_they_are(run_ranks, tmp_path):
    """`CheckpointableTensor` of torch 2.15: with it DCP saves and loads views as they are."""
    assert all(run_ranks(described, str(tmp_path)))


def described(path: str) -> bool:
    import torch.distributed.checkpoint as dcp

    for layout in LAYOUTS:
        model = sharded(layout)
        for name in ("all", "some"):  # runs of different lengths
            views = optimizer_view(model, [model[0].weight, *model[2].parameters()] if name == "some" else None)
            for view in views:
                start, length = (view.global_offsets[0][0], view.local_sizes[0][0]) if view.numel() else (0, 0)
                assert length == view.numel() and view.local_offsets == (((0,),) if length else ())
                parts: list = [None] * dist.get_world_size()
                dist.all_gather_object(parts, (start, length, view.global_shape))
                held = sorted(part[:2] for part in parts if part[1])
                assert [at for at, _ in held] == [sum(n for _, n in held[:i]) for i in range(len(held))]
                assert {part[2] for part in parts} == {(sum(n for _, n in held),)}
            if hasattr(dcp, "CheckpointableTensor"):
                state = {f"{index}": view for index, view in enumerate(views)}
                before = {key: value.detach().clone() for key, value in state.items()}
                dcp.save(state, checkpoint_id=f"{path}/{layout}-{name}")
                for value in state.values():
                    value.data.zero_()
                dcp.load(state, checkpoint_id=f"{path}/{layout}-{name}")
                assert all(torch.equal(value, before[key]) for key, value in state.items()), (layout, name)
                del state
            del views, view
    return True


def with_gradients(model: nn.Module) -> list[nn.Parameter]:
    """The wrapper's original parameters have none on ranks that hold nothing of them."""
    return [parameter for parameter in model.parameters() if parameter.grad is not None]


def assign(of: str, values: Callable[[torch.Tensor], torch.Tensor], data: bool = False) -> Change:
    """Gradients of the "parameters", the "views" or the "first" parameter are made anew of them, or their data is."""

    def change(model: nn.Module, views: list) -> None:
        first = next(model.parameters())
        chosen = {"parameters": with_gradients(model), "views": views, "first": [first] * (first.grad is not None)}[of]
        for one in chosen:
            made = values(one.grad.data if data else one.grad)
            if data:
                one.grad.data = made
            else:
                one.grad = made

    return change


def search(views_too: bool = False) -> Change:
    """Evolution strategies: no backward has given anything, or what it gave counts no more."""

    def change(model: nn.Module, views: list) -> None:
        for one in views if views_too else model.parameters():
            one.grad = one.detach() * 0.1

    return change


def drop(choose: Callable[[nn.Module], Iterable[nn.Parameter]]) -> Change:
    def change(model: nn.Module, views: list) -> None:
        for parameter in choose(model):
            parameter.grad = None

    return change


def then_added(first: Change) -> Change:
    """A backward adds to what was assigned."""

    def change(model: nn.Module, views: list) -> None:
        first(model, views)
        backward(model, *((0, 1) if views[0] is next(model.parameters()) else (dist.get_rank(),)))

    return change


def kept_and_scaled(model: nn.Module, views: list) -> None:
    """PCGrad: gradients are set aside, dropped, and put together anew."""
    parameters = with_gradients(model)
    aside = [parameter.grad for parameter in parameters]
    torch.optim.SGD(views, lr=1.0).zero_grad()
    for parameter, grad in zip(parameters, aside, strict=True):
        parameter.grad = grad  # the very objects


def moved_and_searched(model: nn.Module, views: list) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.9
    search()(model, views)


def clipped_after_search(model: nn.Module, views: list) -> None:
    search()(model, views)
    fullshard.clip_grad_norm_(views, 0.01)


def half(grad: torch.Tensor) -> torch.Tensor:
    return grad * 0.5


halve = assign("parameters", half)
WITHOUT: dict[str, Change] = {
    "search": search(),
    "search on views": search(views_too=True),
    "moved and searched": moved_and_searched,
    "clipped after search": clipped_after_search,
    "searched then added": then_added(search()),
    "searched on views then added": then_added(search(views_too=True)),
}
WITH_A_BACKWARD: dict[str, Change] = {
    "halve": halve,
    "halve data": assign("parameters", half, data=True),
    "halve data of one": assign("first", half, data=True),
    "halve data of views": assign("views", half, data=True),
    "halved then added": then_added(assign("parameters", half, data=True)),
    "kept and scaled": kept_and_scaled,
    "without one layer": drop(lambda model: model[2].parameters()),
    "without any": lambda model, views: model.zero_grad(),
    "without a weight": drop(lambda model: [model[0].weight]),
    **WITHOUT,
}


def originals() -> nn.Module:
    return fullshard.FullyShardedDataParallel(three(), auto_wrap_policy={nn.Linear}, use_orig_params=True)


def changed_gradients(layout: str) -> list[str]:
    """Which changes of parameters' gradients train otherwise than in one process."""
    wrong = []
    for name, after in [(name, True) for name in WITH_A_BACKWARD] + [(name, False) for name in WITHOUT]:
        change = WITH_A_BACKWARD[name]
        if layout == "originals" and change is clipped_after_search:
            continue  # models of the wrapper clip themselves
        plain, model = three(), originals() if layout == "originals" else sharded(layout)
        views = optimizer_view(model)
        models = [(plain, list(plain.parameters()), (0, 1)), (model, views, (dist.get_rank(),))]
        for one, parameters, seeds in models:
            momentum = 0.0 if name == "without a weight" else 0.9  # to a view its gradient is zero
            optimizer = torch.optim.SGD(parameters, lr=0.01, momentum=momentum)
            for step in range(3):
                optimizer.zero_grad()
                if after:
                    backward(one, *seeds)
                if step or not after:
                    change(one, parameters)
                optimizer.step()
        wrong += differing(f"{name} {after}", model, plain)
    return wrong


def differing(where: str, model: nn.Module, plain: nn.Module) -> list[str]:
    ours = whole_parameters(model)
    return [f"{where} {name}" for name, parameter in plain.named_parameters() if not ours[name].allclose(parameter)]


@pytest.mark.filterwarnings("ignore:A parameter got no gradient")
def test_what_is_assigned_to_gradients_of_parameters_is_stepped(run_ranks):
    """The optimizer stepped by what the backward had given, or by nothing, and said nothing."""
    for layout in (*LAYOUTS, "originals"):
        assert run_ranks(changed_gradients, layout) == [[], []], layout


def unscaled(layout: str) -> list[str]:
    """What is assigned before `unscale_` is unscaled, too."""
    plain, model = three(), sharded(layout)
    for one, parameters, seeds in ((plain, [*plain.parameters()], (0, 1)), (model, optimizer_view(model), (0, 1))):
        optimizer, scaler = torch.optim.SGD(parameters, lr=0.01), fullshard.ShardedGradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.ones(()))
        backward(one, *seeds)
        halve(one, parameters)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
    return differing(layout, model, plain)


def test_what_is_assigned_is_unscaled(run_ranks):
    for layout in LAYOUTS:
        assert run_ranks(unscaled, layout) == [[], []], layout


def assigned_to_both() -> str:
    model = sharded("rows")
    views = optimizer_view(model)
    optimizer = torch.optim.SGD(views, lr=0.1)
    backward(model, dist.get_rank())
    before = [parameter.grad for parameter in model.parameters()]
    search()(model, views)
    search(views_too=True)(model, views)
    with pytest.raises(fullshard.ConfigError) as error:
        optimizer.step()
    assert all(grad is not None for grad in before)
    return str(error.value)


def test_two_gradients_for_a_parameter_and_its_view_are_refused(run_ranks):
    for told in run_ranks(assigned_to_both):
        assert "0.weight" in told and "both a parameter and the optimizer view" in told
