"""`fullshard.state_dict`: get and set with every option, of models sharded in every way, against an unsharded model."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import fullshard
from fullshard import state_dict as helpers
from fullshard.state_dict import StateDictOptions
from ways import on_ranks


class Net(nn.Module):
    """Two trainable layers and a frozen one, with sizes that divide nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.body = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        self.frozen = nn.Linear(3, 3)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.body(x))


def build(way: str, double: bool = True) -> nn.Module:
    model = Net().double() if double else Net()
    if way.startswith("wrapper"):
        given = {"use_orig_params": way != "wrapper-flat"}
        if way == "wrapper-no-shard":
            given["sharding_strategy"] = fullshard.ShardingStrategy.NO_SHARD
        return fullshard.FullyShardedDataParallel(model, auto_wrap_policy={nn.Linear}, **given)
    if way != "plain":
        fullshard.fully_shard(model, layout=way, auto_wrap_policy={nn.Linear})
    return model


def optimizers_of(model: nn.Module, several: bool = False) -> list[torch.optim.Optimizer]:
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [[trainable[0]], trainable[1:]] if several else [trainable]
    return [torch.optim.AdamW(group, lr=0.02 * (i + 1)) for i, group in enumerate(groups)]


def steps(model: nn.Module, optimizers: list[torch.optim.Optimizer], start: int, count: int) -> list[float]:
    losses = []
    for step in range(start, start + count):
        x = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(step))  # on all ranks
        loss = model(x).square().mean()
        loss.backward()
        losses.append(loss.item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return losses


OPTIONS = {
    "sharded": {},
    "sharded on the host": {"cpu_offload": True},
    "whole": {"full_state_dict": True},
    "from rank 0": {"full_state_dict": True, "cpu_offload": True, "broadcast_from_rank0": True},
    "flattened": {"flatten_optimizer_state_dict": True},
    "whole and flattened": {"full_state_dict": True, "flatten_optimizer_state_dict": True},
    "flattened, from rank 0": {
        "full_state_dict": True,
        "broadcast_from_rank0": True,
        "flatten_optimizer_state_dict": True,
    },
}


@pytest.mark.parametrize(
    ("way", "other", "option", "several"),
    [
        ("rows", "rows", "sharded", False),
        ("flat", "flat", "sharded on the host", True),
        ("owner", "wrapper-orig", "from rank 0", False),
        ("wrapper-flat", "wrapper-flat", "flattened", False),
        ("wrapper-orig", "flat", "whole and flattened", False),
        ("wrapper-no-shard", "rows", "whole", True),
        ("plain", "wrapper-flat", "whole", False),
        ("wrapper-flat", "plain", "whole", False),
        ("wrapper-flat", "wrapper-orig", "flattened, from rank 0", False),
    ],
)
@on_ranks
def test_training_goes_on(way: str, other: str, option: str, several: bool) -> None:
    """Save one model with the option, load it into another kind, and go on as the unsharded one does."""
    options = StateDictOptions(**OPTIONS[option])
    plain, model, into = build("plain"), build(way), build(other)
    sets = [optimizers_of(one, several) for one in (plain, model, into)]
    want = steps(plain, sets[0], 0, 6)
    got = steps(model, sets[1], 0, 3)
    state, optim = helpers.get_state_dict(model, sets[1], options=options)
    if options.broadcast_from_rank0 and not options.cpu_offload and dist.get_rank():
        state, optim = {}, {}
    if option == "from rank 0":
        assert bool(state) == (dist.get_rank() == 0) or way == "plain", "rank 0 only"
        if way == "plain" and dist.get_rank() != 0:
            state, optim = {}, {}
    helpers.set_state_dict(into, sets[2], model_state_dict=state, optim_state_dict=optim, options=options)
    got += steps(into, sets[2], 3, 3)
    for step, (mine, theirs) in enumerate(zip(got, want, strict=True)):
        assert abs(mine - theirs) <= 1e-12 * abs(theirs), f"loss of step {step}: {mine!r}, wanted {theirs!r}"


def saved_at(way: str, folder: str) -> list[float]:
    """Three steps, saved; the losses of three more."""
    model = build(way)
    optimizers = optimizers_of(model)
    steps(model, optimizers, 0, 3)
    state, optim = helpers.get_state_dict(model, optimizers)
    dcp.save({"model": state, "optim": optim}, checkpoint_id=folder)
    return steps(model, optimizers, 3, 3)


def loaded_at(way: str, folder: str) -> list[float]:
    model = build(way)
    optimizers = optimizers_of(model)
    state, optim = helpers.get_state_dict(model, optimizers)
    loaded = {"model": state, "optim": optim}
    dcp.load(loaded, checkpoint_id=folder)
    helpers.set_state_dict(model, optimizers, model_state_dict=loaded["model"], optim_state_dict=loaded["optim"])
    return steps(model, optimizers, 3, 3)


@pytest.mark.parametrize(
    ("way", "other", "worlds"),
    [("wrapper-orig", "wrapper-flat", (2, 4)), ("rows", "wrapper-orig", (4, 2)), ("flat", "rows", (2, 4))],
)
def test_another_number_of_ranks(run_ranks, way, other, worlds, tmp_path):
    """Dims of 3 over 4 ranks: some hold nothing of a parameter."""
    folder = str(tmp_path / "checkpoint")
    want = run_ranks(saved_at, way, folder, world=worlds[0])[0]
    for got in run_ranks(loaded_at, other, folder, world=worlds[1]):
        assert got == pytest.approx(want, rel=1e-12)


class Shared(nn.Module):
    """Two layers with one weight; the wrapper's instance that manages it is not the one where its first name is."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def shared(way: str) -> nn.Module:
    model = Shared().double()
    if not way.startswith("wrapper"):
        return model if way == "plain" else fullshard.fully_shard(model, layout=way, auto_wrap_policy={nn.Linear})
    given = {"use_orig_params": way == "wrapper-orig"}
    model.second = fullshard.FullyShardedDataParallel(model.second, **given)
    model.first = fullshard.FullyShardedDataParallel(model.first, **given)
    return fullshard.FullyShardedDataParallel(model, **given)


@pytest.mark.parametrize("way", ["rows", "wrapper-flat", "wrapper-orig"])
@on_ranks
def test_state_of_a_shared_weight_has_the_name_that_it_has_unwrapped(way: str) -> None:
    model, plain = shared(way), shared("plain")
    optimizers, plain_optimizers = optimizers_of(model), optimizers_of(plain)
    assert steps(model, optimizers, 0, 2) == pytest.approx(steps(plain, plain_optimizers, 0, 2), rel=1e-9)
    whole = StateDictOptions(full_state_dict=True)
    got = helpers.get_optimizer_state_dict(model, optimizers, options=whole)
    want = helpers.get_optimizer_state_dict(plain, plain_optimizers, options=whole)
    assert got["state"].keys() == want["state"].keys() == {"first.weight", "first.bias", "second.bias"}
    again = shared(way)
    loaded = optimizers_of(again)
    values = helpers.get_model_state_dict(model, options=whole)
    if way.startswith("wrapper"):  # older files have the other name
        got["state"]["second.weight"] = got["state"].pop("first.weight")
        for group in got["param_groups"]:
            group["params"] = ["second.weight" if name == "first.weight" else name for name in group["params"]]
    helpers.set_state_dict(again, loaded, model_state_dict=values, optim_state_dict=got, options=whole)
    assert steps(again, loaded, 2, 2) == pytest.approx(steps(plain, plain_optimizers, 2, 2), rel=1e-9)
