"""The wrapper's model state dicts: names, order and values of the unwrapped model, and back into any wrapping."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor

import fullshard
from fullshard import FullyShardedDataParallel as FSDP
from training import assert_same
from ways import on_ranks
from wrapped import differences, make_net, net_case, typed, whole_values, wrap_net

FULL, SHARDED = fullshard.FullStateDictConfig, fullshard.ShardedStateDictConfig


KINDS = [
    ("FULL", FULL()),
    ("FULL", FULL(offload_to_cpu=True)),
    ("SHARDED", SHARDED()),
    ("SHARDED", SHARDED(_use_dtensor=True)),
]


ORIG = pytest.mark.parametrize("orig", [False, True], ids=["flat", "orig"])


CASES = [
    "single", "nested", "tied", "tied_across", "tied_two", "frozen", "ignored", "ignored_parameter",
    "checkpoint_inside", "checkpoint_outside", "inside_plain", "tied-NO_SHARD",
]  # fmt: skip


def types_wrong(where: str, state: Any, kind: str, config: Any) -> list[str]:
    wanted: Any = torch.Tensor
    if kind == "SHARDED" and "NO_SHARD" not in where:
        wanted = DTensor if config._use_dtensor else ShardedTensor
    managed = "layers.0.down.weight"  # in every case by an instance
    found = type(state[managed])
    return [] if issubclass(found, wanted) else [f"{where}: {managed} is a {found.__name__}"]


@pytest.mark.parametrize(
    ("orig", "cases"), [(False, CASES), (True, ["nested", "tied_across", "ignored", "nested-NO_SHARD"])]
)
@on_ranks
def test_names_order_and_values_are_the_unwrapped_models(cases: list[str], orig: bool) -> list[str]:
    problems = []
    for case in cases:
        model, plain = net_case(case, orig)
        want = plain.state_dict()
        before = [(n, p.data_ptr()) for n, p in model.named_parameters()]
        for kind, config in KINDS:
            with typed(kind, model, config):
                state = model.state_dict()
            problems += differences(f"{case} {kind} {config}", whole_values(state), want)
            assert state._metadata.keys() == want._metadata.keys(), case
            problems += types_wrong(f"{case} {kind} {config}", state, kind, config)
            assert case != "nested" or list(model.state_dict(prefix="a.b.")) == [f"a.b.{key}" for key in want]
        with typed("FULL", model, FULL(offload_to_cpu=True, rank0_only=True)):
            state = model.state_dict()
        if dist.get_rank() == 0 and case != "inside_plain":
            problems += differences(f"{case} rank0_only", state, want)
        elif dist.get_rank() and [key for key in state if key.startswith("layers.0.")]:
            problems.append(f"{case} rank0_only: rank 1 got {list(state)}")
        assert before == [(n, p.data_ptr()) for n, p in model.named_parameters()], case
        model(torch.tensor([1, 2])).sum().backward()
    return problems


@on_ranks(world=4)
def test_names_order_and_values_on_a_hybrid_mesh() -> list[str]:
    problems = []
    for strategy in ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"):
        model, plain = net_case(f"tied-{strategy}", True)
        for kind, config in KINDS[:1] + KINDS[-1:]:
            with typed(kind, model, config):
                state = model.state_dict()
            problems += differences(f"{strategy} {kind}", whole_values(state), plain.state_dict())
            assert kind != "SHARDED" or isinstance(state["tokens.weight"], DTensor), (
                f"{strategy}: {type(state['tokens.weight'])}"
            )
    return problems


@pytest.mark.parametrize(
    ("case", "orig", "others"),
    [
        ("nested", False, ["single", "ignored", "inside_plain"]),
        ("nested", True, ["nested-NO_SHARD", "checkpoint_inside"]),
        ("tied_across", False, ["tied_two"]),
        ("tied-NO_SHARD", True, ["tied"]),
    ],
)
@on_ranks
def test_loads_across_wrappings_and_strategies(case: Any, orig: bool, others: list[str]) -> list[str]:
    """Each case's state into each other case with other numbers, and into the plain model."""
    problems = []
    for other in others:
        for kind, config in (KINDS[0], *KINDS[2:]) if other != "inside_plain" else KINDS[:1]:
            source, plain = net_case(case, orig, seed=3)
            target, _ = net_case(other, not orig, seed=4)
            with typed(kind, source, config):
                state = source.state_dict()
            given = dict(state)
            with typed(kind, target, config):
                keys = target.load_state_dict(state)
            assert not keys.missing_keys and not keys.unexpected_keys and given.keys() == state.keys(), (
                f"{case} -> {other} {kind}: {keys}"
            )
            with typed("FULL", target):
                problems += differences(f"{case} -> {other} {kind}", target.state_dict(), plain.state_dict())
    return problems


def save_files(folder: str, orig: bool) -> None:
    model, _ = net_case("nested", orig)
    for name, config in (("sharded", SHARDED()), ("dtensor", SHARDED(_use_dtensor=True))):
        with typed("SHARDED", model, config):
            dcp.save({"model": model.state_dict()}, checkpoint_id=f"{folder}/{name}")
    with typed("FULL", model, FULL(offload_to_cpu=True, rank0_only=True)):
        state = model.state_dict()
    if dist.get_rank() == 0:
        torch.save(state, f"{folder}/full.pt")


def load_files(folder: str, orig: bool) -> list[str]:
    problems = []
    for case in ("single", "nested-HYBRID_SHARD" if dist.get_world_size() == 4 else "nested"):
        for name in ("sharded", "dtensor", "full"):
            model, _ = net_case(case, orig, seed=4)
            if name == "full":
                model.load_state_dict(torch.load(f"{folder}/full.pt"))
            else:
                with typed("SHARDED", model, SHARDED(_use_dtensor="HYBRID" in case or orig)):
                    state = {"model": model.state_dict()}
                    dcp.load(state, checkpoint_id=f"{folder}/{name}")
                    model.load_state_dict(state["model"])
            problems += differences(f"{case} {name}", model.state_dict(), make_net().state_dict())
    return problems


@pytest.mark.parametrize(("worlds", "orig"), [((2, 4), False), ((4, 2), True)])
def test_files_load_on_other_numbers_of_ranks(run_ranks, tmp_path, worlds, orig):
    run_ranks(save_files, str(tmp_path), orig, world=worlds[0])
    assert_same(run_ranks(load_files, str(tmp_path), not orig, world=worlds[1]))


def described(value: Any) -> Any:
    if isinstance(value, ShardedTensor):
        shards = [(s.metadata.shard_offsets, s.metadata.shard_sizes) for s in value.local_shards()]
        return "ShardedTensor", tuple(value.size()), shards, [str(m) for m in value.metadata().shards_metadata]
    if isinstance(value, DTensor):
        return "DTensor", value.placements, tuple(value.to_local().shape), tuple(value.shape), value.stride()
    return "Tensor", tuple(value.shape), value.dtype, value.requires_grad


@ORIG
@on_ranks
def test_state_dicts_are_pytorchs_key_for_key(orig: bool) -> list[str]:
    """Key for key with PyTorch's: types, shapes, local shards, placements."""
    problems = []
    for mesh in (False, True):
        for strategy in ("FULL_SHARD", "NO_SHARD"):
            ours = wrap_net(make_net(), use_orig_params=orig, mesh=mesh, strategy=strategy)
            theirs = wrap_net(make_net(), torch_fsdp, use_orig_params=orig, mesh=mesh, strategy=strategy)
            for kind in ("FULL", "SHARDED"):
                where = f"mesh={mesh} {strategy} {kind}"
                with typed(kind, ours), typed(kind, theirs, library=torch_fsdp):
                    got, want = ours.state_dict(), theirs.state_dict()
                problems += differences(where, whole_values(got), whole_values(want))
                for key in want:
                    assert described(got[key]) == described(want[key]), (
                        f"{where} {key}: {described(got[key])} where {described(want[key])}"
                    )
    return problems


def memory_bound(orig: bool) -> list[str]:
    """While one instance's values are made, nothing of another's whole values is alive but what is in the result."""
    model, _ = net_case("nested", orig)
    peak, problems = [0], []
    sizes = [sum(b.layout.gathered_numel for b in m._runner().unit.buckets) for m in FSDP.fsdp_modules(model)]
    from fullshard.checkpoint.whole import Batch

    pack, alive = Batch.pack, []

    def elements() -> int:
        return sum({s._cdata: s.nbytes() // 4 for ref in alive if (s := ref()) is not None}.values())

    def counted(batch: Any) -> None:
        pack(batch)
        alive.append(weakref.ref(batch._buffer.untyped_storage()))
        peak[0] = max(peak[0], elements())

    Batch.pack = counted
    try:
        with typed("FULL", model, FULL(offload_to_cpu=True, rank0_only=True)):
            state = model.state_dict()
    finally:
        Batch.pack = pack
    if len(alive) != len(sizes) or peak[0] > max(sizes):
        problems.append(f"{len(alive)} gathers, {peak[0]} elements whole at once; the largest unit has {max(sizes)}")
    for key, value in state.items():
        if value.untyped_storage().nbytes() != value.numel() * value.element_size():
            problems.append(f"{key} keeps {value.untyped_storage().nbytes()} bytes alive")
    if dist.get_rank() and state:
        problems.append(f"rank 1 holds {list(state)}")
    return problems


@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_state_dict_holds_one_unit_above_its_result(fake_world, rank):
    fake_world(2, rank)
    assert_same([memory_bound(False)])


# What does not fit.


def refused(model: nn.Module, state: Any, strict: bool) -> str:
    try:
        model.load_state_dict(dict(state), strict=strict)
    except (RuntimeError, fullshard.CheckpointError) as error:
        return str(error)
    return ""


@on_ranks
def test_missing_and_unexpected_keys_are_named_as_by_the_unwrapped_model() -> list[str]:
    problems = []
    for case in ("nested", "inside_plain", "tied", "tied_across", "ignored"):
        model, plain = net_case(case, False, seed=4)
        state = make_net(3, tied=case.startswith("tied")).state_dict()
        for key in ("layers.1.up.weight", "layers.0.calls", "head.weight", "shift"):
            del state[key]
        state["layers.2.more"] = torch.zeros(2)
        state["other"] = torch.zeros(2)
        want_error = refused(plain, state, True)
        got_error = refused(model, state, True)
        for line in want_error.splitlines()[1:]:
            names = sorted(line.split(":", 1)[1].replace('"', "").replace(" ", "").strip(".").split(","))
            assert any(
                sorted(g.split(":", 1)[-1].replace('"', "").replace(" ", "").strip(".").split(",")) == names
                for g in got_error.splitlines()
            ), f"{case}: {got_error} where {want_error}"
        plain = make_net(4, tied=case.startswith("tied"))
        want, got = plain.load_state_dict(state, strict=False), model.load_state_dict(dict(state), strict=False)
        assert [sorted(k) for k in want] == [sorted(k) for k in got], f"{case}: {got} where {want}"
        problems += differences(f"{case} not strict", model.state_dict(), plain.state_dict())
    return problems


@on_ranks
def test_wrong_shapes_are_refused_before_anything_changes() -> list[str]:
    problems = []
    for case in ("nested", "ignored", "checkpoint_outside", "inside_plain"):
        for key in ("layers.2.up.weight", "layers.2.scale", "layers.1.up.weight"):
            if case == "inside_plain" and key.startswith("layers.2.s"):
                continue
            model, plain = net_case(case, True, seed=4)
            state = make_net(3).state_dict()
            state[key] = torch.zeros(1, 4)
            error = refused(model, state, True)
            assert key in error and "(1, 4)" in error, f"{case} {key}: {error}"
            if case != "inside_plain":
                problems += differences(f"{case} {key}", model.state_dict(), plain.state_dict())
    return problems


@on_ranks
def test_state_dicts_while_parameters_are_whole() -> None:
    model, _ = net_case("nested", True)
    with FSDP.summon_full_params(model):
        assert list(model.state_dict()) == list(make_net().state_dict())
        with pytest.raises(fullshard.PhaseError):
            model.load_state_dict(make_net().state_dict())
    errors = []

    def save_inside(*_: object) -> None:
        with pytest.raises(fullshard.PhaseError) as error:
            model.state_dict()
        errors.append(error)

    model.module.layers[0].module.up.register_forward_hook(save_inside)
    model(torch.tensor([1]))
    assert len(errors) == 1
