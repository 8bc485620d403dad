"""`fullshard.state_dict`: get and set with every option, of models sharded in every way, against an unsharded model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as torch_functions
from torch import nn

import fullshard
from fullshard import state_dict as helpers
from fullshard.state_dict import StateDictOptions
from ways import on_ranks
from wrapped import differences, make_net, train_net, whole_values, wrap_net


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


# Options, against PyTorch's functions on an unsharded model.


ORIG = pytest.mark.parametrize("orig", [False, True], ids=["flat", "orig"])
STEPS = 2


def adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.1)


def pair(orig: bool, **flags: bool) -> tuple[Any, Any, Any, Any]:
    """A wrapped model and its optimizer, and an unsharded one of the same numbers, both after the same steps."""
    model, plain = wrap_net(make_net(**flags), use_orig_params=orig), make_net(**flags)
    optimizer, other = adamw(model), adamw(plain)
    train_net(model, optimizer, range(STEPS))
    train_net(plain, other, range(STEPS), list(range(dist.get_world_size())))
    return model, optimizer, plain, other


def nested(state: dict[str, Any]) -> dict[str, Any]:
    flat = {f"{n} {k}": v for n in sorted(state["state"]) for k, v in sorted(state["state"][n].items())}
    return dict(whole_values(flat))


@ORIG
@on_ranks
def test_every_option_gives_what_pytorch_gives_of_an_unsharded_model(orig: bool) -> list[str]:
    problems = []
    model, optimizer, plain, other = pair(orig, frozen=True)
    rank = dist.get_rank()
    for options in (
        StateDictOptions(),
        StateDictOptions(full_state_dict=True),
        StateDictOptions(cpu_offload=True),
        StateDictOptions(full_state_dict=True, cpu_offload=True),
        StateDictOptions(ignore_frozen_params=True),
    ):
        want, want_state = torch_functions.get_state_dict(plain, other, options=options)
        got, got_state = helpers.get_state_dict(model, optimizer, options=options)
        if options.full_state_dict and options.cpu_offload and rank:
            problems += [f"{options}: rank {rank} has values"] if got or got_state else []
            continue
        problems += differences(f"{options}", whole_values(got), want, 3e-6)
        problems += differences(f"{options} optimizer", nested(got_state), nested(want_state), 3e-6)
        assert options.full_state_dict != any(type(v) is not torch.Tensor for v in got.values()), options
    flat = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
    want = torch_functions.get_optimizer_state_dict(plain, other, options=flat)
    got = helpers.get_optimizer_state_dict(model, optimizer, options=flat)
    trainable = {n for n, p in plain.named_parameters() if p.requires_grad}
    kept = {k: v for k, v in want.items() if any(f".{n}." in k for n in trainable) and k in got}
    problems += differences("flattened", {k: got[k] for k in sorted(kept)}, {k: kept[k] for k in sorted(kept)}, 3e-6)
    assert {k for k in want if k.startswith("state.")} == {k for k in got if k.startswith("state.")}
    for keep in (True, False):
        options = StateDictOptions(full_state_dict=True, keep_submodule_prefixes=keep)
        want = torch_functions.get_model_state_dict(plain, submodules={plain.layers[1]}, options=options)
        got = helpers.get_model_state_dict(model, submodules={model.module.layers[1]}, options=options)
        problems += differences(f"submodules keep={keep}", whole_values(got), want, 3e-6)
    return problems


@on_ranks
def test_what_is_missing_or_not_known_is_refused() -> None:
    model = wrap_net(make_net(), use_orig_params=False)
    part = {k: v for k, v in make_net(5).state_dict().items() if not k.startswith("side.")}
    keys = helpers.set_model_state_dict(model, part, options=StateDictOptions(strict=False))
    assert sorted(keys.missing_keys) == ["side.bias", "side.weight"], f"strict=False: {keys}"
    with pytest.raises(RuntimeError, match=r"side\.weight"):
        helpers.set_model_state_dict(model, part)
    with pytest.raises(fullshard.ConfigError, match="full_state_dict"):
        helpers.set_model_state_dict(model, part, options=StateDictOptions(broadcast_from_rank0=True))
    with pytest.raises(fullshard.ConfigError, match="dsd_fqn_modifiers"):
        helpers.get_model_state_dict(model, options=StateDictOptions(dsd_fqn_modifiers="other"))


@pytest.mark.parametrize("layout", ["rows", "flat"])
@on_ranks
def test_models_of_fully_shard_give_whole_values(layout: str) -> list[str]:
    """Without the wrapper: PyTorch's functions, and whole values of flat layouts, which those do not gather."""
    plain, model = make_net(), make_net()
    fullshard.fully_shard(model, layout=layout)
    optimizer, other = adamw(model), adamw(plain)
    train_net(model, optimizer, range(STEPS))
    train_net(plain, other, range(STEPS), list(range(dist.get_world_size())))
    options = StateDictOptions(full_state_dict=True)
    got, state = helpers.get_state_dict(model, optimizer, options=options)
    want, want_state = torch_functions.get_state_dict(plain, other, options=options)
    problems = differences("model", whole_values(got), want, 3e-6)
    problems += differences("optimizer", nested(state), nested(want_state), 3e-6)
    wrong = [key for key, value in got.items() if type(value) is not torch.Tensor]
    offloaded = helpers.get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return problems + ([f"not whole: {wrong}"] if wrong or bool(offloaded) != (dist.get_rank() == 0) else [])
