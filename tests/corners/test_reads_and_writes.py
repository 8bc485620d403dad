"""Between a forward and its backward, reads of sharded parameters are free, and every kind of write is noticed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions

from fullshard import PhaseError, fully_shard
from fullshard.errors import UsageError
from fullshard.shard import Bucket
from fullshard.state_dict import set_model_state_dict

READS: dict[str, Callable[[nn.Module], object]] = {
    "norms of a list": lambda model: torch.nn.utils.get_total_norm([*model.parameters()]),
    "norms": lambda model: [parameter.detach().norm() for parameter in model.parameters()],
    "foreach": lambda model: torch._foreach_norm([parameter.detach() for parameter in model.parameters()]),
}
WRITES: dict[str, Callable[[Any], object]] = {
    "out": lambda weight: torch.mul(weight, 0.5, out=weight),
    "out of a view": lambda weight: torch.add(weight.detach(), 1, out=weight.data),
    "foreach": lambda weight: torch._foreach_mul_([weight], 0.5),
    "fill_": lambda weight: weight.fill_(0.0),
    "init": lambda weight: nn.init.constant_(weight, 0.5),
    "inplace": lambda weight: nn.functional.relu(weight, inplace=True),
    "overload": lambda weight: torch.ops.aten.mul_.Tensor(weight, torch.tensor(0.5)),
}
VIEWS: dict[str, Callable[[Any], Any]] = {
    "narrow": lambda weight: weight.narrow(1, 0, 2),
    "flatten": lambda weight: weight.flatten(),
    "squeeze": lambda weight: weight.unsqueeze(0).squeeze(0),
    "expand_as": lambda weight: weight.expand_as(weight),
    "chunk": lambda weight: weight.chunk(2, 1)[0],
    "view": lambda weight: weight.view(-1),
    "T": lambda weight: weight.T,
}
WRITES_TO_PLAIN: dict[str, Callable[[Any, Any], object]] = {
    "lerp_": lambda plain, weight: plain.lerp_(weight, 0.5),
    "+=": lambda plain, weight: plain.__iadd__(weight),
    "foreach": lambda plain, weight: torch._foreach_lerp_([plain], [weight], 0.5),
    "out": lambda plain, weight: torch.add(weight, 1, out=plain),
}


@pytest.fixture(autouse=True)
def two_ranks(fake_world: Callable[..., None]) -> None:
    fake_world(2)


def two_layers(layout: str, dtype: torch.dtype = torch.float32) -> Any:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).to(dtype)
    for layer in model:
        fully_shard(layer, layout=layout)
    return fully_shard(model, layout=layout)


@pytest.mark.parametrize("layout", ["rows", "flat"])
@pytest.mark.parametrize("read", READS)
def test_a_read_is_not_a_change(layout, read):
    model = two_layers(layout)
    for _ in range(2):
        loss = model(torch.randn(2, 8)).sum()
        with torch.no_grad():
            READS[read](model)
        loss.backward()


@pytest.mark.parametrize("layout", ["rows", "flat"])
@pytest.mark.parametrize("write", WRITES)
def test_a_write_is_noticed(layout, write):
    model = two_layers(layout)
    loss = model(torch.randn(2, 8)).sum()
    with torch.no_grad():
        WRITES[write](model[2].weight)
    with pytest.raises(UsageError, match="changed between a forward and its backward"):
        loss.backward()


@pytest.mark.parametrize("view", VIEWS)
def test_a_write_to_a_view_is_noticed(view):
    model = two_layers("rows")
    loss = model(torch.randn(2, 8)).sum()
    VIEWS[view](model[2].weight.detach()).mul_(0.5)
    with pytest.raises(UsageError, match="changed between a forward and its backward"):
        loss.backward()


def test_a_write_to_a_copy_is_not_a_change():
    model = two_layers("rows")
    loss = model(torch.randn(2, 8)).sum()
    model[2].weight.detach().T.reshape(-1).mul_(0.5)
    loss.backward()


@pytest.mark.parametrize("write", WRITES_TO_PLAIN)
def test_a_plain_tensor_is_not_written_in_part(write):
    weight, plain = two_layers("flat")[0].weight.detach(), torch.zeros(8, 8)
    with pytest.raises(PhaseError, match=r"0\.weight is sharded and the target is not"):
        WRITES_TO_PLAIN[write](plain, weight)
    assert not plain.any()


@pytest.mark.parametrize("layout", ["rows", "flat"])
def test_a_deleted_gradient_is_given_up(layout):
    model, x = two_layers(layout), torch.ones(2, 8)

    def gradient(discards: bool) -> torch.Tensor:
        model.zero_grad()
        model.set_requires_gradient_sync(False)
        model(x).sum().backward()
        if discards:
            for parameter in model.parameters():
                del parameter.grad
        model.set_requires_gradient_sync(True)
        model(x).sum().backward()
        return model[2].weight.grad.to_local().clone()

    assert torch.equal(gradient(False), 2 * gradient(True))


def test_reductions_of_16_bits_do_not_overflow():
    layer = fully_shard(nn.Linear(512, 512, bias=False).half(), layout="flat")
    weight = layer.weight.detach()
    weight.fill_(1.0)
    assert weight.mean().item() == 0.5  # the other rank's sum is missing in a fake group
    assert weight.norm().item() == pytest.approx(512 / 2**0.5, rel=1e-3)
    assert weight.var().isfinite() and weight.std().isfinite()


@pytest.mark.parametrize("layout", ["rows", "flat"])
def test_a_copy_has_the_attributes(layout):
    layer = nn.Linear(8, 8)
    layer.weight.no_decay = True
    weight = fully_shard(layer, layout=layout).weight
    copied = copy.deepcopy(weight)
    assert copied.no_decay and isinstance(copied, nn.Parameter) and type(copied) is type(weight)
    copied.detach().zero_()
    assert weight.detach().to_local().any()
    with pytest.raises(RuntimeError, match="created explicitly by the user"):
        copy.deepcopy(weight * 2)


def test_one_name_of_a_tied_parameter_is_enough():
    model: Any = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False))
    model[1].weight = model[0].weight
    whole = torch.randn(8, 4)
    fully_shard(model)
    result = set_model_state_dict(model, {"0.weight": whole}, options=StateDictOptions(full_state_dict=True))
    assert not result.missing_keys and torch.equal(model[1].weight.detach().to_local(), whole[:4])


def test_each_value_is_cut_once(monkeypatch):
    """Units that lie in other units find the values cut by the outermost one."""
    cuts, shown = [], Bucket.shown
    monkeypatch.setattr(Bucket, "shown", lambda *args: cuts.append(args[2].name) or shown(*args))
    model: Any = nn.Linear(4, 4)
    whole = nn.Sequential(nn.Sequential(nn.Sequential(nn.Linear(4, 4)))).state_dict()
    for _ in range(3):
        model = nn.Sequential(fully_shard(model))
    fully_shard(model).load_state_dict(whole)
    assert len(cuts) == len(whole)


def test_what_migration_says_of_hooks_and_missing_keys():
    model, seen = two_layers("rows"), []
    model[0].register_forward_hook(lambda module, *_: seen.append(type(module.weight)))
    model(torch.randn(2, 8))
    assert seen == [nn.Parameter]
    part, options = {"0.bias": torch.zeros(8)}, StateDictOptions(full_state_dict=True)
    with pytest.raises(RuntimeError, match="Missing key"):
        set_model_state_dict(model, part, options=options)
    options.strict = False
    assert "0.weight" in set_model_state_dict(model, part, options=options).missing_keys
