"""State dicts where ranks differ, state is missing, or values come in unusual forms."""

from __future__ import annotations

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
from ways import WRAPPERS, adam, assert_equal, every_wrapper, one_process, shard, some_ways, train

WHOLE = StateDictOptions(full_state_dict=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def plain(seed: int = 1) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 2))


def fresh(way: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of other values, and an optimizer without state."""
    model = shard(plain(2), way)
    return model, adam(model.parameters())


def stepped(way: str, order: int = 1) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = shard(plain(), way)
    optimizer = adam(list(model.parameters())[::order])
    train(model, optimizer, range(2))
    return model, optimizer


def reference() -> dict[str, dict[str, Tensor]]:
    model, optimizer = one_process(2, plain)
    return {name: optimizer.state[p] for name, p in model.named_parameters()}


def same_state(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert got.keys() == want.keys()
    for name, wanted in want.items():
        assert_equal(got[name], wanted, name, 1e-4)


def whole_state(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    return helpers.get_optimizer_state_dict(model, optimizer, options=WHOLE)["state"]


# Before the first step.


@every_wrapper
def test_sharded_state_before_the_first_step_is_zeros_to_load_into(run_ranks, way, tmp_path):
    run_ranks(resumes_sharded, way, str(tmp_path / "checkpoint"))


def resumes_sharded(way: str, folder: str) -> None:
    model, optimizer = stepped(way)
    kind = fullshard.StateDictType.SHARDED_STATE_DICT
    with FSDP.state_dict_type(model, kind):
        dcp.save({"optimizer": FSDP.optim_state_dict(model, optimizer)}, checkpoint_id=folder)
    other, loaded = fresh(way)
    with FSDP.state_dict_type(other, kind):
        state = {"optimizer": FSDP.optim_state_dict(other, loaded)}
        assert state["optimizer"]["state"].keys() == dict(plain().named_parameters()).keys()
        assert not loaded.state, "looking at the state must not make any"
        dcp.load(state, checkpoint_id=folder)
        loaded.load_state_dict(FSDP.optim_state_dict_to_load(other, loaded, state["optimizer"]))
    same_state(FSDP.optim_state_dict(other, loaded)["state"], reference())


# Ranks whose optimizers differ.


@some_ways
def test_ranks_may_list_parameters_in_different_orders(run_ranks, way):
    run_ranks(reversed_on_one_rank, way)


def reversed_on_one_rank(way: str) -> None:
    model, optimizer = stepped(way, order=1 if dist.get_rank() else -1)
    state = helpers.get_optimizer_state_dict(model, optimizer, options=WHOLE)
    same_state(state["state"], reference())
    other = shard(plain(2), way)
    loaded = adam(list(other.parameters())[:: -1 if dist.get_rank() else 1])
    helpers.set_optimizer_state_dict(other, loaded, state if dist.get_rank() == 0 else {}, options=FROM_RANK_0)
    same_state(whole_state(other, loaded), reference())


@some_ways
def test_ranks_that_hold_different_parameters_are_told(run_ranks, way):
    for short, grouped in run_ranks(differs, way):
        assert short.count("rank 0") == 1 and "4." in short, short
        assert "group" in grouped, grouped


def differs(way: str) -> list[str]:
    said = []
    parameters = list((model := shard(plain(), way)).parameters())
    halves = [{"params": parameters[:1]}, {"params": parameters[1:]}]
    first = dist.get_rank() == 0
    for given in (parameters[:-1] if first else parameters, halves if first else halves[::-1]):
        with pytest.raises(fullshard.DivergenceError) as caught:
            whole_state(model, adam(given))
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
    model, optimizer = stepped("wrapper")
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


@every_wrapper
def test_state_without_groups(run_ranks, way):
    run_ranks(no_groups, way)


def no_groups(way: str) -> None:
    model, optimizer = stepped(way)
    bare = {"state": FSDP.optim_state_dict(model, optimizer)["state"]}
    other, loaded = fresh(way)
    FSDP.optim_state_dict_to_load(other, loaded, bare, load_directly=True)
    same_state(FSDP.optim_state_dict(other, loaded)["state"], reference())
    config = fullshard.FullOptimStateDictConfig(rank0_only=True)
    with FSDP.state_dict_type(other, fullshard.StateDictType.FULL_STATE_DICT, None, config):
        loaded = adam(other.parameters())
        FSDP.optim_state_dict_to_load(other, loaded, bare if dist.get_rank() == 0 else {}, load_directly=True)
    again = FSDP.optim_state_dict(other, loaded, {"state": loaded.state_dict()["state"]})
    assert list(again) == ["state"]
    same_state(again["state"], reference())
    numbered = FSDP.rekey_optim_state_dict(bare, fullshard.OptimStateKeyType.PARAM_ID, plain())
    assert list(numbered) == ["state"] and list(numbered["state"]) == list(range(6))


@some_ways
def test_state_that_lacks_parameters_of_the_groups(run_ranks, way):
    run_ranks(lacks, way)


def lacks(way: str) -> None:
    model, optimizer = stepped(way)
    state = helpers.get_optimizer_state_dict(model, optimizer, options=WHOLE)
    for name in ("0.weight", "0.bias"):
        del state["state"][name]
    other, loaded = fresh(way)
    if way not in WRAPPERS:
        with pytest.raises(RuntimeError, match=r"0\.weight"):
            helpers.set_optimizer_state_dict(other, loaded, state, options=WHOLE)
        assert not loaded.state
    options = StateDictOptions(full_state_dict=True, strict=False)
    helpers.set_optimizer_state_dict(other, loaded, state, options=options)
    same_state(whole_state(other, loaded), {n: own for n, own in reference().items() if not n.startswith("0.")})


@every_wrapper
def test_named_optimizers_find_their_keys(run_ranks, way):
    run_ranks(named_keys, way)


def named_keys(way: str) -> None:
    model, optimizer = stepped(way)
    state = FSDP.optim_state_dict(model, optimizer)
    named = FSDP.optim_state_dict_to_load(model, optimizer, state, is_named_optimizer=True)
    names = [name for name, _ in model.named_parameters()]
    mine = {name for name, p in model.named_parameters() if p.numel()}
    assert set(named["state"]) == mine and named["param_groups"][0]["params"] == names
    same_state(FSDP.optim_state_dict(model, optimizer, named)["state"], state["state"])


# Values in unusual forms.


def test_pinned_shards_say_so(fake_world, monkeypatch):
    """A `ShardedTensor` refuses local tensors that are pinned where its metadata does not say so."""
    fake_world(2)
    model = shard(plain(), "wrapper")
    monkeypatch.setattr(Tensor, "is_pinned", lambda self, *args: True)  # as on an accelerator
    for kind in ("LOCAL", "SHARDED"):
        with FSDP.state_dict_type(model, fullshard.StateDictType[f"{kind}_STATE_DICT"]):
            state = model.state_dict()
        assert all(v.metadata().tensor_properties.pin_memory for v in state.values())


@pytest.mark.parametrize("layout", ["rows", "flat"])
def test_whole_tensors_load_into_a_part_of_a_unit(run_ranks, layout):
    run_ranks(into_child, layout)


def into_child(layout: str) -> None:
    model = fullshard.fully_shard(plain(), layout=layout)
    want = plain(2)
    for options in (WHOLE, FROM_RANK_0):
        helpers.set_model_state_dict(model[2], want[2].state_dict(), options=options)
        assert_equal(helpers.get_model_state_dict(model[2], options=WHOLE), want[2].state_dict(), "part", 0.0)
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


@some_ways
def test_tensor_likes_load(run_ranks, way):
    run_ranks(lazily, way)


def lazily(way: str) -> None:
    model, want = shard(plain(), way), plain(2).state_dict()
    likes = {name: Lazy(value) for name, value in want.items()}
    model.load_state_dict(likes)
    assert_equal(helpers.get_model_state_dict(model, options=WHOLE), want, "loaded", 0.0)
    with pytest.raises((fullshard.CheckpointError, RuntimeError), match=r"0\.weight"):
        model.load_state_dict({**likes, "0.weight": Lazy(torch.zeros(1, 2))})


def test_optimizer_state_is_matched_in_time_linear_in_modules(fake_world, monkeypatch):
    """Calls, not seconds: of what walks the model, for twice the instances twice as many at most."""
    fake_world(2)
    calls, walk = [0], nn.Module.named_modules

    def counted(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        for item in walk(self, *args, **kwargs):
            calls[0] += 1
            yield item

    def visits(count: int) -> int:
        model = FSDP(nn.Sequential(*[FSDP(nn.Linear(2, 2)) for _ in range(count)]))
        optimizer = adam(model.parameters())
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        calls[0] = 0
        FSDP.optim_state_dict_to_load(model, optimizer, FSDP.optim_state_dict(model, optimizer))
        return calls[0]

    monkeypatch.setattr(nn.Module, "named_modules", counted)
    small, large = visits(8), visits(16)
    assert large < 2.5 * small, (small, large)
