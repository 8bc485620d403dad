"""State dicts where ranks differ, state is missing, or values come in unusual forms."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import fullshard
import fullshard.state_dict as helpers
from fullshard import FullyShardedDataParallel as FSDP
from fullshard.state_dict import StateDictOptions

WAYS = ["rows", "flat", "wrapper-flat", "wrapper-orig"]
ways = pytest.mark.parametrize("way", WAYS)
wrapper_ways = pytest.mark.parametrize("way", WAYS[2:])
WHOLE = StateDictOptions(full_state_dict=True)


def plain(seed: int = 1, width: int = 5) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2))


def sharded(way: str, seed: int = 1, **options: Any) -> nn.Module:
    model = plain(seed, **options)
    if way.startswith("wrapper"):
        return FSDP(model, use_orig_params=way == "wrapper-orig", auto_wrap_policy={nn.Linear})
    for child in (model[0], model[2]):
        fullshard.fully_shard(child, layout=way)
    return fullshard.fully_shard(model, layout=way)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.1)


def train(model: nn.Module, optimizer: Any, steps: range, ranks: list[int]) -> list[float]:
    losses = []
    for step in steps:
        batch = torch.cat([torch.randn(4, 3, generator=torch.Generator().manual_seed(9 * step + r)) for r in ranks])
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def stepped(way: str, seed: int = 1) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = sharded(way, seed)
    optimizer = adam(model.parameters())
    train(model, optimizer, range(2), [dist.get_rank()])
    return model, optimizer


def reference() -> dict[str, dict[str, Tensor]]:
    model = plain()
    optimizer = adam(model.parameters())
    train(model, optimizer, range(2), list(range(dist.get_world_size())))
    return {name: optimizer.state[p] for name, p in model.named_parameters()}


def same_state(got: dict[str, Any], want: dict[str, Any]) -> bool:
    assert got.keys() == want.keys()
    for name, own in want.items():
        assert got[name].keys() == own.keys()
        for key, value in own.items():
            torch.testing.assert_close(got[name][key], value, rtol=1e-5, atol=1e-7, msg=f"{name} {key}")
    return True


# Before the first step.


@wrapper_ways
def test_sharded_state_before_the_first_step_is_zeros_to_load_into(run_ranks, way, tmp_path):
    run_ranks(resumes_sharded, way, str(tmp_path / "checkpoint"))


def resumes_sharded(way: str, folder: str) -> None:
    model, optimizer = stepped(way)
    kind = fullshard.StateDictType.SHARDED_STATE_DICT
    with FSDP.state_dict_type(model, kind):
        dcp.save({"optimizer": FSDP.optim_state_dict(model, optimizer)}, checkpoint_id=folder)
    other = sharded(way, 2)
    fresh = adam(other.parameters())
    with FSDP.state_dict_type(other, kind):
        state = {"optimizer": FSDP.optim_state_dict(other, fresh)}
        assert state["optimizer"]["state"].keys() == dict(plain().named_parameters()).keys()
        assert not fresh.state, "looking at the state must not make any"
        dcp.load(state, checkpoint_id=folder)
        fresh.load_state_dict(FSDP.optim_state_dict_to_load(other, fresh, state["optimizer"]))
    same_state(FSDP.optim_state_dict(other, fresh)["state"], reference())


# Ranks whose optimizers differ.


@ways
def test_ranks_may_list_parameters_in_different_orders(run_ranks, way):
    run_ranks(reversed_on_one_rank, way)


def reversed_on_one_rank(way: str) -> None:
    model = sharded(way)
    parameters = list(model.parameters())
    optimizer = adam(parameters[:: 1 if dist.get_rank() else -1])
    train(model, optimizer, range(2), [dist.get_rank()])
    state = helpers.get_optimizer_state_dict(model, optimizer, options=WHOLE)
    assert same_state(state["state"], reference())
    other = sharded(way, 2)
    loaded = adam(list(other.parameters())[:: -1 if dist.get_rank() else 1])
    sent = state if dist.get_rank() == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    helpers.set_optimizer_state_dict(other, loaded, sent, options=options)
    assert same_state(helpers.get_optimizer_state_dict(other, loaded, options=WHOLE)["state"], reference())


@ways
def test_ranks_that_hold_different_parameters_are_told(run_ranks, way):
    for said in run_ranks(differs, way):
        assert said[0].count("rank 0") == 1 and "4." in said[0], said
        assert "group" in said[1], said


def differs(way: str) -> list[str]:
    said = []
    model = sharded(way)
    parameters = list(model.parameters())
    short = adam(parameters if dist.get_rank() else parameters[:-1])
    if way == "wrapper-flat":
        short = adam(parameters if dist.get_rank() else [p for p in parameters if p is not model.module[4]._flat_param])
    grouped = adam([{"params": parameters[:1]}, {"params": parameters[1:]}])
    if dist.get_rank():
        grouped = adam([{"params": parameters[1:]}, {"params": parameters[:1]}])
    for optimizer in (short, grouped):
        with pytest.raises(fullshard.DivergenceError) as caught:
            helpers.get_optimizer_state_dict(model, optimizer, options=WHOLE)
        said.append(str(caught.value))
    return said


def test_steps_come_from_a_rank_that_holds_the_parameter(run_ranks):
    run_ranks(steps_of_owner)


def steps_of_owner() -> None:
    """Rank 0 holds nothing of the last bias, and an optimizer that counted steps of it all the same."""
    model = FSDP(nn.Linear(8, 2), use_orig_params=True)
    optimizer = adam(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    if dist.get_rank() == 0:
        assert not model.module.bias.numel()
        empty = torch.zeros_like(model.module.bias)
        optimizer.state[model.module.bias] = {"step": torch.tensor(7.0), "exp_avg": empty, "exp_avg_sq": empty}
    assert FSDP.optim_state_dict(model, optimizer)["state"]["bias"]["step"] == 1


# State that is missing.


def test_a_missing_part_of_a_flat_parameter_is_named(run_ranks):
    run_ranks(part_missing)


def part_missing() -> None:
    model, optimizer = stepped("wrapper-flat")
    state = FSDP.optim_state_dict(model, optimizer)
    del state["state"]["2.bias"]
    before = {id(p): s["exp_avg"].clone() for p, s in optimizer.state.items()}
    with pytest.raises(ValueError, match=r"2\.bias"):
        FSDP.optim_state_dict_to_load(model, optimizer, state, load_directly=True)
    assert all(torch.equal(before[id(p)], s["exp_avg"]) for p, s in optimizer.state.items())
    del state["state"]["2.weight"]
    made = FSDP.optim_state_dict_to_load(model, optimizer, state)
    assert len(made["state"]) == 2, "the instance without state has none, the others theirs"
    optimizer.load_state_dict(made)


@wrapper_ways
def test_state_without_groups(run_ranks, way):
    run_ranks(no_groups, way)


def no_groups(way: str) -> None:
    model, optimizer = stepped(way)
    bare = {"state": FSDP.optim_state_dict(model, optimizer)["state"]}
    other = sharded(way, 2)
    loaded = adam(other.parameters())
    FSDP.optim_state_dict_to_load(other, loaded, bare, load_directly=True)
    assert same_state(FSDP.optim_state_dict(other, loaded)["state"], reference())
    with FSDP.state_dict_type(
        other, fullshard.StateDictType.FULL_STATE_DICT, None, fullshard.FullOptimStateDictConfig(rank0_only=True)
    ):
        loaded = adam(other.parameters())
        sent = bare if dist.get_rank() == 0 else {}
        FSDP.optim_state_dict_to_load(other, loaded, sent, load_directly=True)
    again = FSDP.optim_state_dict(other, loaded, {"state": loaded.state_dict()["state"]})
    assert list(again) == ["state"] and same_state(again["state"], reference())
    everything = plain()
    numbered = FSDP.rekey_optim_state_dict(bare, fullshard.OptimStateKeyType.PARAM_ID, everything)
    assert list(numbered) == ["state"] and list(numbered["state"]) == list(range(6))


@ways
def test_state_that_lacks_parameters_of_the_groups(run_ranks, way):
    run_ranks(lacks, way)


def lacks(way: str) -> None:
    model, optimizer = stepped(way)
    state = helpers.get_optimizer_state_dict(model, optimizer, options=WHOLE)
    for name in ("0.weight", "0.bias"):
        del state["state"][name]
    other = sharded(way, 2)
    loaded = adam(other.parameters())
    if not way.startswith("wrapper"):
        with pytest.raises(RuntimeError, match=r"0\.weight"):
            helpers.set_optimizer_state_dict(other, loaded, state, options=WHOLE)
        assert not loaded.state
    options = StateDictOptions(full_state_dict=True, strict=False)
    helpers.set_optimizer_state_dict(other, loaded, state, options=options)
    want = {name: own for name, own in reference().items() if not name.startswith("0.")}
    assert same_state(helpers.get_optimizer_state_dict(other, loaded, options=WHOLE)["state"], want)


# Keys of named optimizers.


@wrapper_ways
def test_named_optimizers_find_their_keys(run_ranks, way):
    run_ranks(named_keys, way)


def named_keys(way: str) -> None:
    model, optimizer = stepped(way)
    state = FSDP.optim_state_dict(model, optimizer)
    named = FSDP.optim_state_dict_to_load(model, optimizer, state, is_named_optimizer=True)
    names = [name for name, _ in model.named_parameters()]
    mine = {name for name, p in model.named_parameters() if p.numel()}
    assert set(named["state"]) == mine and named["param_groups"][0]["params"] == names
    again = FSDP.optim_state_dict(model, optimizer, named)
    assert same_state(again["state"], state["state"])


# Values in unusual forms.


def test_pinned_shards_say_so(run_ranks):
    run_ranks(pinned_state)


def pinned_state() -> None:
    """A `ShardedTensor` refuses local tensors that are pinned where its metadata does not say so."""
    model = sharded("wrapper-flat")
    original = Tensor.is_pinned
    Tensor.is_pinned = lambda self, *args: True  # type: ignore[method-assign]  # as on an accelerator
    try:
        for kind in ("LOCAL", "SHARDED"):
            with FSDP.state_dict_type(model, fullshard.StateDictType[f"{kind}_STATE_DICT"]):
                state = model.state_dict()
            assert all(v.metadata().tensor_properties.pin_memory for v in state.values())
    finally:
        Tensor.is_pinned = original  # type: ignore[method-assign]


@pytest.mark.parametrize("layout", ["rows", "flat"])
def test_whole_tensors_load_into_a_part_of_a_unit(run_ranks, layout):
    run_ranks(into_child, layout)


def into_child(layout: str) -> None:
    model = fullshard.fully_shard(plain(), layout=layout)
    want = plain(2)
    for options in (WHOLE, StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)):
        helpers.set_model_state_dict(model[2], want[2].state_dict(), options=options)
        got = helpers.get_model_state_dict(model[2], options=WHOLE)
        assert got.keys() == {"weight", "bias"}
        assert all(torch.equal(got[name], value) for name, value in want[2].state_dict().items())
    with pytest.raises(fullshard.CheckpointError, match="weight"):
        helpers.set_model_state_dict(model[2], want[0].state_dict(), options=WHOLE)


class Lazy:
    """Like weights that are read from a file when they are copied: no tensor, but `copy_` takes it."""

    def __init__(self, value: Tensor) -> None:
        self.value, self.shape, self.dtype = value, value.shape, value.dtype
        self.is_meta = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return func(*[arg.value if isinstance(arg, Lazy) else arg for arg in args], **(kwargs or {}))


@ways
def test_tensor_likes_load(run_ranks, way):
    run_ranks(lazily, way)


def lazily(way: str) -> None:
    model, want = sharded(way), plain(2).state_dict()
    model.load_state_dict({name: Lazy(value) for name, value in want.items()})
    got = helpers.get_model_state_dict(model, options=WHOLE)
    assert all(torch.equal(got[name], value) for name, value in want.items())
    with pytest.raises((fullshard.CheckpointError, RuntimeError), match=r"0\.weight"):
        model.load_state_dict({**{n: Lazy(v) for n, v in want.items()}, "0.weight": Lazy(torch.zeros(1, 2))})


# What it costs.


@pytest.mark.gloo("counts the storages of a process")
@ways
def test_broadcast_holds_one_whole_tensor_at_a_time(run_ranks, way):
    run_ranks(broadcast_memory, way)


def broadcast_memory(way: str) -> None:
    from fullshard.checkpoint import values

    width = 64
    model, source = sharded(way, width=width), plain(2, width)
    optimizer, other = adam(model.parameters()), adam(source.parameters())
    train(source, other, range(1), [0])
    first = dist.get_rank() == 0
    state = helpers.get_state_dict(source, other) if first else ({}, {})
    live: list[Any] = []
    peak = [0]
    make = values.Sent.full_tensor

    def counted(self: Any) -> Tensor:
        made = make(self)
        live.append(torch.multiprocessing.reductions.StorageWeakRef(made.untyped_storage()))
        deadline = time.monotonic() + 20  # gloo's own thread lets go of a tensor a moment after it is done
        while alive() > 2 and time.monotonic() < deadline:
            time.sleep(0.001)
        peak[0] = max(peak[0], alive())
        return made

    def alive() -> int:
        return sum(not ref.expired() for ref in live)

    values.Sent.full_tensor = counted  # type: ignore[method-assign]
    try:
        helpers.set_state_dict(
            model,
            optimizer,
            model_state_dict=state[0],
            optim_state_dict=state[1],
            options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
        )
    finally:
        values.Sent.full_tensor = make  # type: ignore[method-assign]
    assert len(live) == 6 + 2 * 6 and peak[0] <= 2, (len(live), peak[0])
    got, got_state = helpers.get_state_dict(model, optimizer, options=WHOLE)
    assert all(torch.equal(got[name], value.detach()) for name, value in source.state_dict().items())
    want = {name: other.state[p] for name, p in source.named_parameters()}
    assert same_state(got_state["state"], want)


def test_optimizer_state_is_matched_in_time_linear_in_modules(run_ranks):
    run_ranks(linear)


def linear() -> None:
    """Calls, not seconds: of what walks the model, for twice the instances twice as many at most."""

    def visits(count: int) -> int:
        model = FSDP(nn.Sequential(*[FSDP(nn.Linear(2, 2)) for _ in range(count)]))
        optimizer = adam(model.parameters())
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        calls = [0]
        walk = nn.Module.named_modules

        def counted(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            for item in walk(self, *args, **kwargs):
                calls[0] += 1
                yield item

        nn.Module.named_modules = counted  # type: ignore[method-assign, assignment]
        try:
            FSDP.optim_state_dict_to_load(model, optimizer, FSDP.optim_state_dict(model, optimizer))
        finally:
            nn.Module.named_modules = walk  # type: ignore[method-assign]
        return calls[0]

    small, large = visits(8), visits(16)
    assert large < 2.5 * small, (small, large)
