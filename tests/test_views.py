"""Optimizer views stand for the parameters under them wherever a parameter can be named."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fullshard
from fullshard import DivergenceError, fully_shard, optimizer_view
from fullshard.runtime import runner_of

LAYOUTS = ["rows", "flat", "owner"]


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
        for _ in range(2):
            backward(model, dist.get_rank())
            optimizer.step()
    return str(error.value)


def test_other_settings_on_one_rank_are_named(run_ranks):
    for told in run_ranks(other_settings):
        assert "optimizers did not step alike" in told and "lr=0.1," in told and "lr=0.2," in told


def parked() -> bool:
    model = sharded("rows")
    optimizer = torch.optim.AdamW(optimizer_view(model))
    backward(model, dist.get_rank())
    optimizer.step()
    before = [view.clone() for view in optimizer.param_groups[0]["params"]]
    fullshard.park(model, optimizer)
    fullshard.resume(model, optimizer)
    return all(map(torch.equal, before, optimizer.param_groups[0]["params"]))


def test_a_model_is_parked_with_an_optimizer_over_views(run_ranks):
    assert run_ranks(parked) == [True, True]


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


def halve(model: nn.Module, views: list) -> None:
    for parameter in with_gradients(model):
        parameter.grad = parameter.grad * 0.5


def halve_data(model: nn.Module, views: list) -> None:
    for parameter in with_gradients(model):
        parameter.grad.data = parameter.grad.data * 0.5


def halve_data_of_one(model: nn.Module, views: list) -> None:
    weight = next(model.parameters())
    if weight.grad is not None:  # a rank that holds nothing of it
        weight.grad.data = weight.grad.data * 0.5


def halve_data_of_views(model: nn.Module, views: list) -> None:
    for view in views:
        view.grad.data = view.grad.data * 0.5


def kept_and_scaled(model: nn.Module, views: list) -> None:
    """PCGrad: gradients are set aside, dropped, and put together anew."""
    parameters = with_gradients(model)
    aside = [parameter.grad for parameter in parameters]
    torch.optim.SGD(views, lr=1.0).zero_grad()
    for parameter, grad in zip(parameters, aside, strict=True):
        parameter.grad = grad  # the very objects


def without_one_layer(model: nn.Module, views: list) -> None:
    for parameter in model[2].parameters():
        parameter.grad = None


def without_any(model: nn.Module, views: list) -> None:
    model.zero_grad()


def without_a_weight(model: nn.Module, views: list) -> None:
    model[0].weight.grad = None


def by_search(model: nn.Module, views: list) -> None:
    """Evolution strategies: no backward has given anything, or what it gave counts no more."""
    for parameter in model.parameters():
        parameter.grad = parameter.detach() * 0.1


def by_search_on_views(model: nn.Module, views: list) -> None:
    for view in views:
        view.grad = view.detach() * 0.1


def moved_and_searched(model: nn.Module, views: list) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.9
    by_search(model, views)


def clipped_after_search(model: nn.Module, views: list) -> None:
    by_search(model, views)
    fullshard.clip_grad_norm_(views, 0.01)


def searched_then_added(model: nn.Module, views: list) -> None:
    """A backward adds to what was assigned."""
    by_search(model, views)
    backward(model, *((0, 1) if views[0] is next(model.parameters()) else (dist.get_rank(),)))


def searched_on_views_then_added(model: nn.Module, views: list) -> None:
    by_search_on_views(model, views)
    backward(model, *((0, 1) if views[0] is next(model.parameters()) else (dist.get_rank(),)))


def halved_then_added(model: nn.Module, views: list) -> None:
    halve_data(model, views)
    backward(model, *((0, 1) if views[0] is next(model.parameters()) else (dist.get_rank(),)))


WITHOUT = [by_search, by_search_on_views, moved_and_searched, clipped_after_search, searched_then_added]
WITHOUT.append(searched_on_views_then_added)
WITH_A_BACKWARD = [halve, halve_data, halve_data_of_one, halve_data_of_views, halved_then_added, kept_and_scaled]
WITH_A_BACKWARD += [without_one_layer, without_any, without_a_weight, *WITHOUT]


def originals() -> nn.Module:
    return fullshard.FullyShardedDataParallel(
        three(),
        auto_wrap_policy=lambda module, recurse, nonwrapped_numel: recurse or isinstance(module, nn.Linear),
        use_orig_params=True,
    )


def whole_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    if isinstance(model, fullshard.FullyShardedDataParallel):
        with fullshard.FullyShardedDataParallel.summon_full_params(model):
            return {n.replace("_fsdp_wrapped_module.", ""): p.detach().clone() for n, p in model.named_parameters()}
    return {name: parameter.full_tensor() for name, parameter in model.named_parameters()}


def changed_gradients(layout: str) -> list[str]:
    """Which changes of parameters' gradients train otherwise than in one process."""
    wrong = []
    cases = [(change, True) for change in WITH_A_BACKWARD] + [(change, False) for change in WITHOUT]
    for change, after in cases:
        if layout == "originals" and change is clipped_after_search:
            continue  # models of the wrapper clip themselves
        plain, model = three(), originals() if layout == "originals" else sharded(layout)
        views = optimizer_view(model)
        models = [(plain, list(plain.parameters()), (0, 1)), (model, views, (dist.get_rank(),))]
        for one, parameters, seeds in models:
            momentum = 0.0 if change is without_a_weight else 0.9  # to a view its gradient is zero
            optimizer = torch.optim.SGD(parameters, lr=0.01, momentum=momentum)
            for step in range(3):
                optimizer.zero_grad()
                if after:
                    backward(one, *seeds)
                if step or not after:
                    change(one, parameters)
                optimizer.step()
        ours = whole_parameters(model)
        wrong += [f"{change.__name__} {after} {n}" for n, p in plain.named_parameters() if not ours[n].allclose(p)]
    return wrong


@pytest.mark.filterwarnings("ignore:A parameter got no gradient")
def test_what_is_assigned_to_gradients_of_parameters_is_stepped(run_ranks):
    """The optimizer stepped by what the backward had given, or by nothing, and said nothing."""
    for layout in (*LAYOUTS, "originals"):
        assert run_ranks(changed_gradients, layout) == [[], []], layout


def accumulated_after_an_assignment(layout: str, over_views: bool) -> list[str]:
    plain, model = three(), originals() if layout == "originals" else sharded(layout)
    views = optimizer_view(model) if over_views else []
    for one, seeds in ((plain, (0, 1)), (model, (dist.get_rank(),))):
        parameters = list(one.parameters())
        for _ in range(3):
            backward(one, *seeds)
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.data = parameter.grad.data * 0.5
        backward(one, *seeds)
    torch.optim.SGD(views or model.parameters(), lr=0.01).step()
    torch.optim.SGD(plain.parameters(), lr=0.01).step()
    ours = whole_parameters(model)
    return [f"{layout} {n}" for n, p in plain.named_parameters() if not ours[n].allclose(p)]


def all_accumulated() -> list[str]:
    return [w for layout in (*LAYOUTS, "originals") for v in (0, 1) for w in accumulated_after_an_assignment(layout, v)]


def test_a_backward_adds_to_data_that_was_assigned_to_gradients(run_ranks):
    """`p.grad.data = other`: the next backward was added to memory that nothing showed any more."""
    assert run_ranks(all_accumulated) == [[], []]


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
    ours = whole_parameters(model)
    return [f"{layout} {n}" for n, p in plain.named_parameters() if not ours[n].allclose(p)]


def test_what_is_assigned_is_unscaled(run_ranks):
    for layout in LAYOUTS:
        assert run_ranks(unscaled, layout) == [[], []], layout


def assigned_to_both() -> str:
    model = sharded("rows")
    views = optimizer_view(model)
    optimizer = torch.optim.SGD(views, lr=0.1)
    backward(model, dist.get_rank())
    before = [parameter.grad for parameter in model.parameters()]
    by_search(model, views)
    by_search_on_views(model, views)
    with pytest.raises(fullshard.ConfigError) as error:
        optimizer.step()
    assert all(grad is not None for grad in before)
    return str(error.value)


def test_two_gradients_for_a_parameter_and_its_view_are_refused(run_ranks):
    for told in run_ranks(assigned_to_both):
        assert "0.weight" in told and "Both a parameter and the optimizer view" in told
