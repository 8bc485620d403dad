"""`copy.deepcopy` of sharded models: equal, independent, and trainable; and what it refuses."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fullshard
from fullshard import fully_shard
from models import EXAMPLES
from training import LAYOUTS, Options, full_gradients, full_parameters, shard

both_layouts = pytest.mark.parametrize("layout", LAYOUTS)


def sharded(name: str, layout: str, **settings: object) -> tuple[nn.Module, object]:
    example = EXAMPLES[name]
    options = Options(layout=layout, **settings)
    return shard(fullshard, example.make(options.dtype), example, options), example


def backward(model: nn.Module, example: object, step: int) -> torch.Tensor:
    inputs, targets = example.batch(step, dist.get_rank())
    loss = example.loss_of(model(inputs), targets)
    loss.backward()
    return loss.detach()


@both_layouts
@pytest.mark.parametrize("name", ["gpt", "odd_mlp", "tied_across", "gpt_list_unit"])
def test_a_copy_is_equal_and_independent(run_ranks, name, layout):
    assert all(run_ranks(equal_and_independent, name, layout))


def equal_and_independent(name: str, layout: str) -> bool:
    model, example = sharded(name, layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    backward(model, example, 0)
    twin = copy.deepcopy(model)  # without gradients, as torch copies parameters
    other = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    assert type(twin) is type(model)
    assert {n for n, _ in twin.named_parameters()} == {n for n, _ in model.named_parameters()}
    ours, theirs = dict(model.named_parameters()), dict(twin.named_parameters())
    for parameter_name, parameter in ours.items():
        assert theirs[parameter_name] is not parameter
    assert all(parameter.grad is None for parameter in theirs.values())
    same(full_parameters(model), full_parameters(twin))
    backward(twin, example, 0)
    same(full_gradients(model), full_gradients(twin))
    before = full_parameters(model)
    other.step()
    same(before, full_parameters(model))  # the copy's step left the model alone
    optimizer.step()
    same(full_parameters(model), full_parameters(twin))
    for step in range(1, 3):  # and both train on, equally
        for m, o in ((model, optimizer), (twin, other)):
            o.zero_grad()
            backward(m, example, step)
            o.step()
    same(full_parameters(model), full_parameters(twin))
    return True


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


@both_layouts
def test_averaged_model(run_ranks, layout):
    for got, want in run_ranks(average, layout):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)


def average(layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """torch's own EMA, which deep-copies the model, against the average computed from whole tensors."""
    model, example = sharded("gpt", layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    expected = None
    for step in range(3):
        backward(model, example, step)
        optimizer.step()
        optimizer.zero_grad()
        ema.update_parameters(model)
        now = full_parameters(model)
        expected = now if expected is None else {n: 0.9 * expected[n] + 0.1 * now[n] for n in now}
    inputs, _ = example.batch(0, dist.get_rank())
    with torch.no_grad():
        out = ema(inputs)
    assert isinstance(out, torch.Tensor) and not isinstance(out, DTensor)
    assert out.isfinite().all()
    got = full_parameters(ema.module)
    flat = lambda tensors: torch.cat([t.flatten() for t in tensors.values()])  # noqa: E731
    return flat(got), flat(expected)


@both_layouts
def test_settings_and_registered_methods_are_copied(fake_world, layout):
    fake_world(2)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in model:
        fully_shard(layer, layout=layout)
    fully_shard(model, layout=layout)
    model[0].set_modules_to_forward_prefetch([model[1]])
    model[1].set_gradient_divide_factor(3.0)
    model.extra = lambda: None
    model[0].scores = model[0].forward
    fullshard.register_fsdp_forward_method(model[0], "scores")
    twin = copy.deepcopy(model)
    assert twin[0]._runner().settings.prefetch.forward_units == (twin[1]._runner(),)
    assert twin[1]._runner().settings.reduce.divide_factor == 3.0
    assert twin[0]._runner().modules == [twin[0]]
    assert twin[0].scores is not model[0].scores
    assert twin[0]._runner().root is None


def test_nothing_gathered_is_copied(fake_world):
    fake_world(2)
    model = fully_shard(nn.Linear(8, 8))
    model.unshard()
    assert not isinstance(model.weight, DTensor)
    twin = copy.deepcopy(model)
    assert isinstance(twin.weight, DTensor)
    assert fullshard.memory_use(twin).gathered == 0
    assert not isinstance(model.weight, DTensor)  # and the model is left as it was


def test_copy_within_a_larger_object(fake_world):
    fake_world(2)
    model = fully_shard(nn.Sequential(nn.Linear(4, 4)))
    kept = copy.deepcopy({"model": model, "step": 3, "again": model})
    assert kept["model"] is kept["again"] is not model
    kept["model"](torch.ones(1, 4)).sum().backward()
    assert kept["model"][0].weight.grad is not None
    assert model[0].weight.grad is None


def test_copy_with_gradients_not_reduced_is_refused(fake_world):
    fake_world(2)
    model = fully_shard(nn.Linear(4, 4))
    model.set_requires_gradient_sync(False)
    model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(fullshard.PhaseError, match="not yet reduced"):
        copy.deepcopy(model)


def test_copy_during_forward_is_refused(fake_world):
    fake_world(2)

    class Copies(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            copy.deepcopy(self)
            return super().forward(x)

    model = fully_shard(Copies(4, 4))
    with pytest.raises(fullshard.PhaseError, match="while a forward"):
        model(torch.ones(1, 4))


def test_copy_of_a_part_with_a_tied_weight_is_refused(fake_world):
    fake_world(2)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    inner = nn.Sequential(model)
    fully_shard(inner)
    part = fully_shard(nn.Sequential(nn.Linear(4, 4)))
    assert copy.deepcopy(part) is not part
    pair = [nn.Linear(4, 4), nn.Linear(4, 4)]
    fully_shard(pair)
    with pytest.raises(fullshard.PhaseError, match="forms one unit"):
        copy.deepcopy(pair[0])
