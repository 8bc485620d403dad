"""The wrapper's optimizer state dicts: the unsharded optimizer's, by parameter name, and back into any wrapping."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fullshard
from fullshard import FullyShardedDataParallel as FSDP
from fullshard import OptimStateKeyType
from ways import on_ranks
from wrapped import differences, make_net, train_net, typed, whole_values, wrap_net

FULL, SHARDED = fullshard.FullOptimStateDictConfig, fullshard.ShardedOptimStateDictConfig
KINDS = [
    ("FULL", FULL()),
    ("FULL", FULL(offload_to_cpu=True)),
    ("SHARDED", SHARDED()),
    ("SHARDED", SHARDED(_use_dtensor=True)),
]
ORIG = pytest.mark.parametrize("orig", [False, True], ids=["flat", "orig"])
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-3, weight_decay=0.1),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, eps=1e-3, amsgrad=True),
}
STEPS = 2


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Layers with a rate of their own; an instance's parameters are in one group."""
    layers = [p for n, p in model.named_parameters() if "layers." in n]
    rest = [p for n, p in model.named_parameters() if "layers." not in n]
    return [{"params": layers, "lr": 0.03, "weight_decay": 0.0}, {"params": rest}]


def trained(
    orig: bool, name: str = "adamw", groups: bool = False, seed: int = 3, steps: int = STEPS, **options: Any
) -> Any:
    model = wrap_net(make_net(seed), use_orig_params=orig, **options)
    optimizer = OPTIMIZERS[name](groups_of(model) if groups else model.parameters())
    train_net(model, optimizer, range(steps))
    return model, optimizer


def reference(name: str, world: int, groups: bool = False, steps: int = STEPS) -> Any:
    """One process on all ranks' batches: its model, optimizer and losses."""
    model = make_net()
    optimizer = OPTIMIZERS[name](groups_of(model) if groups else model.parameters())
    return model, optimizer, train_net(model, optimizer, range(steps), list(range(world)))


def by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    names = {id(p): n for n, p in model.named_parameters()}
    return {names[id(p)]: dict(s) for p, s in optimizer.state.items()}


def flattened(state: dict[str, dict[str, Any]]) -> dict[str, Any]:
    flat = {f"{name} {key}": value for name in sorted(state) for key, value in sorted(state[name].items())}
    return dict(whole_values(flat))


@ORIG
@on_ranks
def test_state_is_the_unsharded_optimizers_by_name(orig: bool) -> list[str]:
    problems = []
    for name, strategy, groups in (
        ("amsgrad", "NO_SHARD", False),
        ("sgd", "FULL_SHARD", False),
        ("adamw", "FULL_SHARD", True),
    ):
        model, optimizer = trained(orig, name, groups, strategy=strategy)
        plain, other, _ = reference(name, dist.get_world_size(), groups)
        names = {id(p): n for n, p in plain.named_parameters()}
        for kind, config in KINDS:
            with typed(kind, model, None, config):
                state = FSDP.optim_state_dict(model, optimizer)
            where = f"{name} {strategy} {kind}"
            problems += differences(where, flattened(state["state"]), flattened(by_name(plain, other)), 2e-6)
            got = [{**g, "params": sorted(g["params"])} for g in state["param_groups"]]
            want = [{**g, "params": sorted(names[id(p)] for p in g["params"])} for g in other.param_groups]
            assert got == want, f"{where}: groups {got} where {want}"
    with typed("FULL", model, None, FULL(rank0_only=True, offload_to_cpu=True)):
        state = FSDP.optim_state_dict(model, optimizer)
    assert (dist.get_rank() == 0) == bool(state), f"rank0_only: rank {dist.get_rank()} has {list(state)}"
    return problems


@ORIG
@on_ranks
def test_training_goes_on_with_the_same_losses(orig: bool) -> None:
    """Every kind into other wrappings; the steps after it equal those of one process without interruption."""
    _, _, want = reference("adamw", dist.get_world_size(), steps=2 * STEPS)
    source, optimizer = trained(orig)
    targets: list[dict[str, Any]] = [{}, {"auto_wrap_policy": None}, {"strategy": "NO_SHARD"}, {"mesh": True}]
    for number, (kind, config) in enumerate([*KINDS, ("FULL", FULL(rank0_only=True))]):
        other, options = bool(number % 2), targets[number % len(targets)]
        with typed(kind, source, None, config):
            values, state = source.state_dict(), FSDP.optim_state_dict(source, optimizer)
        target = wrap_net(make_net(4), use_orig_params=other, **options)
        loaded = torch.optim.AdamW(target.parameters(), lr=0.5, eps=1e-3)  # the saved settings are what counts
        with typed(kind, target, None, config):
            target.load_state_dict(values)
            made = FSDP.optim_state_dict_to_load(target, loaded, state, load_directly=options == {})
        if options:
            loaded.load_state_dict(made)
        got = train_net(target, loaded, range(STEPS, 2 * STEPS))
        assert got == pytest.approx(want[STEPS:], abs=1e-6), (
            f"{kind} {config} -> {other} {options}: losses {got} where {want[STEPS:]}"
        )


@on_ranks
def test_parameters_never_updated_have_no_state() -> list[str]:
    """Parameters without gradients have no state, in the state dict and after loading it."""
    model = wrap_net(make_net(), use_orig_params=True)
    for parameter in model.module.layers[1].parameters():
        parameter.requires_grad_(False)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    train_net(model, optimizer, range(1))
    state = FSDP.optim_state_dict(model, optimizer)
    extra = [name for name in state["state"] if name.startswith("layers.1.")]
    missing = {n for n, _ in make_net().named_parameters() if not n.startswith("layers.1.")} - state["state"].keys()
    target = wrap_net(make_net(), use_orig_params=False)
    loaded = OPTIMIZERS["adamw"](target.parameters())
    FSDP.optim_state_dict_to_load(target, loaded, state, load_directly=True)
    again = FSDP.optim_state_dict(target, loaded)
    problems = differences("again", flattened(again["state"]), flattened(state["state"]))
    named = FSDP.optim_state_dict_to_load(target, loaded, state, is_named_optimizer=True)
    assert all(isinstance(key, str) for key in [*named["state"], *named["param_groups"][0]["params"]])
    return problems + ([f"state of {extra}, none of {missing}"] if extra or missing else [])


class RowMeans(torch.optim.Optimizer):
    """Like Adafactor: keeps one value per row of a matrix, and per element of a vector or one for all of it."""

    def __init__(self, params: Any, whole: bool = False) -> None:
        super().__init__(params, {"lr": 0.1})
        self.whole = whole

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    squares = p.grad.pow(2)
                    rows = squares.mean(1) if p.dim() > 1 else squares if self.whole else squares.sum()[None]
                    self.state[p]["rows"] = self.state[p].get("rows", 0) + rows
                    p.sub_(p.grad, alpha=group["lr"])


@ORIG
@on_ranks
def test_state_that_is_not_element_wise(orig: bool) -> list[str]:
    problems = []
    model = wrap_net(make_net(), use_orig_params=orig)
    optimizer = RowMeans(model.parameters())
    train_net(model, optimizer, range(1))
    with pytest.raises(fullshard.CheckpointError, match=r"rows[\s\S]*tokens.weight|rows[\s\S]*shift"):
        FSDP.optim_state_dict(model, optimizer)
    if orig:
        model, plain = wrap_net(make_net(), use_orig_params=True, strategy="NO_SHARD"), make_net()
        optimizer, other = RowMeans(model.parameters(), True), RowMeans(plain.parameters(), True)
        train_net(model, optimizer, range(1))
        train_net(plain, other, range(1), list(range(dist.get_world_size())))
        state = FSDP.optim_state_dict(model, optimizer)
        problems += differences("rows", flattened(state["state"]), flattened(by_name(plain, other)), 1e-6)
        made = FSDP.optim_state_dict_to_load(model, optimizer, state)
        optimizer.load_state_dict(made)
        again = FSDP.optim_state_dict(model, optimizer)
        problems += differences("again", flattened(again["state"]), flattened(state["state"]))
    return problems


OPTIONS = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1}


@on_ranks
def test_older_methods() -> list[str]:
    problems = []
    model, optimizer = trained(False)
    plain, reference_optimizer, want = reference("adamw", dist.get_world_size(), steps=2 * STEPS)
    plain, reference_optimizer, _ = reference("adamw", dist.get_world_size())
    names = [n for n, _ in plain.named_parameters()]
    wanted = flattened(by_name(plain, reference_optimizer))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        everywhere = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
        rank0 = FSDP.full_optim_state_dict(model, optimizer, list(model.parameters()))
        shards = FSDP.sharded_optim_state_dict(model, optimizer)
        problems += differences("full", flattened(everywhere["state"]), wanted, 2e-6)
        problems += differences("sharded", flattened(shards["state"]), wanted, 2e-6)
        assert bool(rank0) == (dist.get_rank() == 0), f"full_optim_state_dict on rank {dist.get_rank()}: {list(rank0)}"
        values = model.state_dict()
        for kind in ("shard", "scatter", "flatten", "input"):
            target = wrap_net(make_net(4), use_orig_params=True)
            target.load_state_dict(values)
            loaded = OPTIMIZERS["adamw"](target.parameters())
            made = {
                "shard": lambda t=target, o=loaded: FSDP.shard_full_optim_state_dict(everywhere, t, optim=o),
                "scatter": lambda t=target, o=loaded: FSDP.scatter_full_optim_state_dict(rank0 or None, t, optim=o),
                "flatten": lambda t=target, o=loaded: FSDP.flatten_sharded_optim_state_dict(shards, t, o),
                "input": lambda t=target: FSDP.shard_full_optim_state_dict(
                    everywhere, t, [{"params": t.parameters(), **OPTIONS}]
                ),
            }[kind]()
            loaded.load_state_dict(made)
            got = train_net(target, loaded, range(STEPS, 2 * STEPS))
            assert got == pytest.approx(want[STEPS:], abs=1e-6), f"{kind}: losses {got} where {want[STEPS:]}"
        numbered = FSDP.rekey_optim_state_dict(everywhere, OptimStateKeyType.PARAM_ID, plain, optim=reference_optimizer)
        reference_optimizer.load_state_dict(numbered)
        problems += differences("rekeyed", flattened(by_name(plain, reference_optimizer)), wanted, 2e-6)
        back = FSDP.rekey_optim_state_dict(numbered, OptimStateKeyType.PARAM_NAME, plain, list(plain.parameters()))
        problems += differences("back", flattened(back["state"]), flattened(everywhere["state"]))
        assert numbered["param_groups"][0]["params"] == list(range(len(names)))
        assert back["param_groups"][0]["params"] == names
        with pytest.raises(fullshard.CheckpointError, match=r"missing\.name"):
            wrong = {"state": {"missing.name": {}}, "param_groups": []}
            FSDP.rekey_optim_state_dict(wrong, OptimStateKeyType.PARAM_ID, plain)
    return problems
