"""The wrapper's model state dicts: names, order and values of the unwrapped model, and back into any wrapping."""

from __future__ import annotations

import io
import time
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as torch_fsdp
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor

import fullshard
from fullshard import FullyShardedDataParallel as FSDP
from training import assert_same
from wrapped import differences, make_net, net_case, train_net, typed, whole_values, wrap_net

FULL, SHARDED = fullshard.FullStateDictConfig, fullshard.ShardedStateDictConfig


KINDS = [
    ("FULL", FULL()),
    ("FULL", FULL(offload_to_cpu=True)),
    ("SHARDED", SHARDED()),
    ("SHARDED", SHARDED(offload_to_cpu=True)),
    ("SHARDED", SHARDED(_use_dtensor=True)),
]


ORIG = pytest.mark.parametrize("orig", [False, True], ids=["flat", "orig"])


CASES = [
    "single", "nested", "tied", "tied_across", "tied_two", "frozen", "ignored", "ignored_parameter",
    "checkpoint_inside", "checkpoint_outside", "inside_plain", "nested-NO_SHARD", "tied-NO_SHARD",
]  # fmt: skip


def saves(cases: list[str], orig: bool) -> list[str]:
    problems = []
    for case in cases:
        model, plain = net_case(case, orig)
        want = plain.state_dict()
        before = [(n, p.data_ptr()) for n, p in model.named_parameters()]
        for kind, config in KINDS:
            with typed(kind, model, config):
                state = model.state_dict()
            problems += differences(f"{case} {kind} {config}", whole_values(state), want)
            if state._metadata.keys() != want._metadata.keys():
                problems.append(f"{case} {kind}: metadata {state._metadata.keys() ^ want._metadata.keys()}")
            problems += types_wrong(f"{case} {kind} {config}", state, kind, config)
            with typed(kind, model, config):
                nothing = model.state_dict(prefix="a.b.")
            if list(nothing) != [f"a.b.{key}" for key in want]:
                problems.append(f"{case} {kind}: prefix gives {list(nothing)}")
        with typed("FULL", model, FULL(offload_to_cpu=True, rank0_only=True)):
            state = model.state_dict()
        if dist.get_rank() == 0 and case != "inside_plain":
            problems += differences(f"{case} rank0_only", state, want)
        elif dist.get_rank() and [key for key in state if key.startswith("layers.0.")]:
            problems.append(f"{case} rank0_only: rank 1 got {list(state)}")
        if before != [(n, p.data_ptr()) for n, p in model.named_parameters()]:
            problems.append(f"{case}: saving changed the model's parameters")
        model(torch.tensor([1, 2])).sum().backward()
    return problems


def types_wrong(where: str, state: Any, kind: str, config: Any) -> list[str]:
    wanted: Any = torch.Tensor
    if kind == "SHARDED" and "NO_SHARD" not in where:
        wanted = DTensor if config._use_dtensor else ShardedTensor
    managed = "layers.0.down.weight"  # in every case by an instance
    found = type(state[managed])
    return [] if issubclass(found, wanted) else [f"{where}: {managed} is a {found.__name__}"]


@ORIG
def test_names_order_and_values_are_the_unwrapped_models(run_ranks, orig):
    assert_same(run_ranks(saves, CASES, orig))


@ORIG
def test_names_order_and_values_on_a_hybrid_mesh(run_ranks, orig):
    assert_same(run_ranks(saves_hybrid, orig, world=4))


def saves_hybrid(orig: bool) -> list[str]:
    problems = []
    for strategy in ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"):
        model, plain = net_case(f"tied-{strategy}", orig)
        for kind, config in KINDS[:1] + KINDS[-1:]:
            with typed(kind, model, config):
                state = model.state_dict()
            problems += differences(f"{strategy} {kind}", whole_values(state), plain.state_dict())
            if kind == "SHARDED" and not isinstance(state["tokens.weight"], DTensor):
                problems.append(f"{strategy}: {type(state['tokens.weight'])}")
    return problems


def roundtrips(cases: list[str], orig: bool, others: list[str]) -> list[str]:
    """Each case's state into each other case with other numbers, and into the plain model."""
    problems = []
    for case in cases:
        for other in others:
            for kind, config in KINDS if other != "inside_plain" else KINDS[:2]:
                source, plain = net_case(case, orig, seed=3)
                target, _ = net_case(other, not orig, seed=4)
                with typed(kind, source, config):
                    state = source.state_dict()
                given = dict(state)
                with typed(kind, target, config):
                    keys = target.load_state_dict(state)
                if keys.missing_keys or keys.unexpected_keys or given.keys() != state.keys():
                    problems.append(f"{case} -> {other} {kind}: {keys}")
                with typed("FULL", target):
                    problems += differences(f"{case} -> {other} {kind}", target.state_dict(), plain.state_dict())
    return problems


@ORIG
def test_loads_across_wrappings_and_strategies(run_ranks, orig):
    others = ["nested", "single", "nested-NO_SHARD", "checkpoint_inside", "ignored", "inside_plain"]
    assert_same(run_ranks(roundtrips, ["nested", "nested-NO_SHARD"], orig, others))
    assert_same(run_ranks(roundtrips, ["tied_across"], orig, ["tied", "tied_two", "tied_across"]))


def local_roundtrip(orig: bool) -> list[str]:
    problems = []
    for case in ("single", "nested", "tied_across", "frozen"):
        source, _ = net_case(case, orig, seed=3)
        target, _ = net_case(case, orig, seed=4)
        with typed("LOCAL", source), typed("LOCAL", target):
            state = source.state_dict()
            memory = io.BytesIO()
            torch.save(state, memory)
            memory.seek(0)
            target.load_state_dict(torch.load(memory, weights_only=False))
        problems += differences(case, target.state_dict(), source.state_dict())
    return problems


@ORIG
def test_local_state_dicts_come_back(run_ranks, orig):
    assert_same(run_ranks(local_roundtrip, orig))


def torch_saves(orig: bool) -> list[str]:
    problems = []
    source, plain = net_case("tied", orig)
    for kind, config in KINDS:
        target, _ = net_case("tied", orig, seed=4)
        with typed(kind, source, config), typed(kind, target, config):
            memory = io.BytesIO()
            torch.save(source.state_dict(), memory)
            memory.seek(0)
            target.load_state_dict(torch.load(memory, weights_only=False))
        problems += differences(f"{kind} {config}", target.state_dict(), plain.state_dict())
    return problems


@ORIG
def test_every_kind_goes_through_torch_save(run_ranks, orig):
    assert_same(run_ranks(torch_saves, orig))


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
    for case in ("single", "nested", "nested-HYBRID_SHARD") if dist.get_world_size() == 4 else ("single", "nested"):
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


@pytest.mark.parametrize("worlds", [(2, 4), (4, 2)])
def test_files_load_on_other_numbers_of_ranks(run_ranks, tmp_path, worlds):
    for orig in (False, True):
        folder = tmp_path / str(orig)
        folder.mkdir()
        run_ranks(save_files, str(folder), orig, world=worlds[0])
        assert_same(run_ranks(load_files, str(folder), not orig, world=worlds[1]))


def like_pytorch(orig: bool) -> list[str]:
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
                    if described(got[key]) != described(want[key]):
                        problems.append(f"{where} {key}: {described(got[key])} where {described(want[key])}")
    return problems


def described(value: Any) -> Any:
    if isinstance(value, ShardedTensor):
        shards = [(s.metadata.shard_offsets, s.metadata.shard_sizes) for s in value.local_shards()]
        return "ShardedTensor", tuple(value.size()), shards, [str(m) for m in value.metadata().shards_metadata]
    if isinstance(value, DTensor):
        return "DTensor", value.placements, tuple(value.to_local().shape), tuple(value.shape), value.stride()
    return "Tensor", tuple(value.shape), value.dtype, value.requires_grad


@ORIG
def test_state_dicts_are_pytorchs_key_for_key(run_ranks, orig):
    assert_same(run_ranks(like_pytorch, orig))


def memory_bound(orig: bool) -> list[str]:
    """While one instance's values are made, nothing of another's whole values is alive but what is in the result."""
    model, _ = net_case("nested", orig)
    peak, problems = [0], []
    sizes = [sum(b.layout.gathered_numel for b in m._runner().unit.buckets) for m in FSDP.fsdp_modules(model)]
    from fullshard.shard import Bucket

    gather, alive = Bucket.gather_whole, []

    def elements() -> int:
        return sum({s._cdata: s.nbytes() // 4 for ref in alive if (s := ref()) is not None}.values())

    def counted(bucket: Any, comm: Any, local: torch.Tensor) -> torch.Tensor:
        made = gather(bucket, comm, local)
        alive.append(weakref.ref(made.untyped_storage()))
        deadline = time.monotonic() + 20  # gloo's own thread lets go of a gather a moment after it is done
        while elements() > max(sizes) and time.monotonic() < deadline:
            time.sleep(0.001)
        peak[0] = max(peak[0], elements())
        return made

    Bucket.gather_whole = counted
    try:
        with typed("FULL", model, FULL(offload_to_cpu=True, rank0_only=True)):
            state = model.state_dict()
    finally:
        Bucket.gather_whole = gather
    if len(alive) != len(sizes) or peak[0] > max(sizes):
        problems.append(f"{len(alive)} gathers, {peak[0]} elements whole at once; the largest unit has {max(sizes)}")
    for key, value in state.items():
        if value.untyped_storage().nbytes() != value.numel() * value.element_size():
            problems.append(f"{key} keeps {value.untyped_storage().nbytes()} bytes alive")
    if dist.get_rank() and state:
        problems.append(f"rank 1 holds {list(state)}")
    return problems


@pytest.mark.gloo("counts the storages of a process")
@ORIG
def test_a_full_state_dict_holds_one_unit_above_its_result(run_ranks, orig):
    assert_same(run_ranks(memory_bound, orig))


def goes_on(orig: bool) -> list[str]:
    """Loaded between steps, training goes on from the loaded values; saving in between changes nothing."""
    source, _ = net_case("nested", orig)
    optimizer = torch.optim.SGD(source.parameters(), lr=0.1)
    train_net(source, optimizer, range(2))
    state = source.state_dict()
    target, _ = net_case("nested", orig, seed=4)
    other = torch.optim.SGD(target.parameters(), lr=0.1)
    train_net(target, other, range(1))
    target.load_state_dict(state)
    want, got = train_net(source, optimizer, range(2, 4)), train_net(target, other, range(2, 4))
    return [] if want == got else [f"losses {got} where {want}"]


@ORIG
def test_training_goes_on_from_loaded_values(run_ranks, orig):
    assert_same(run_ranks(goes_on, orig))
