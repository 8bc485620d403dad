"""Whole parameters, bucket by bucket: the same in every layout, bounded, and no rank is left waiting."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fullshard
from files import same
from fullshard import CheckpointError, PhaseError
from fullshard import FullyShardedDataParallel as FSDP
from fullshard.runtime import runners_in
from models import EXAMPLES
from test_tensor_parallel import Model, parallel_model
from ways import error_of, named_error, on_ranks, shard


def memory_of(model: Any) -> list[Any]:
    """Where shards and what is gathered lie, and what it is."""
    found = []
    for runner in runners_in(model):
        for bucket in runner.unit.buckets:
            gathered = [m.unsharded.untyped_storage().nbytes() for m in bucket.members if m.unsharded is not None]
            found.append((bucket.shard.data_ptr(), bucket.shard.tolist(), bucket.shard._version, gathered))
        found.append(runner.unit.state)
    return found


@pytest.mark.parametrize(
    ("way", "name"), [("rows", "odd_mlp"), ("flat", "tied_across"), ("owner", "odd_mlp"), ("wrapper", "tied_across")]
)
@on_ranks
def test_whole_values_in_the_models_order(way, name):
    """Sharded and gathered, in small buckets and large ones: names, order, values, and nothing is touched."""
    example = EXAMPLES[name]
    want = dict(example.make().named_parameters())
    for keep in (False, True):
        model = shard(example.make(), way, example.units, keep=keep)
        if keep:
            with torch.no_grad():
                model(example.batch(0, dist.get_rank())[0])
        before = memory_of(model)
        for bucket_bytes, dtype in ((1, None), (200, torch.bfloat16), (1 << 30, None)):
            got = dict(fullshard.full_parameters(model, bucket_bytes=bucket_bytes, dtype=dtype))
            assert list(got) == list(want)
            for key, tensor in got.items():
                assert type(tensor) is Tensor and not tensor.requires_grad
                assert same(tensor, want[key].detach().to(dtype or want[key].dtype)), (key, keep, bucket_bytes)
                tensor.zero_()  # is the caller's
        assert memory_of(model) == before, keep


@on_ranks(world=4)
def test_other_meshes_and_compiled_models():
    """Tensor parallelism, replicas, and names without what `torch.compile` puts in."""
    example = EXAMPLES["odd_mlp"]
    for model, plain in (
        (parallel_model(fullshard, (2, 2), hidden=9), Model(hidden=9)),
        (shard(example.make(), "rows", example.units, hybrid=True), example.make()),
        (torch.compile(shard(example.make(), "flat", example.units)), example.make()),
    ):
        got, want = dict(fullshard.full_parameters(model, bucket_bytes=300)), dict(plain.named_parameters())
        assert list(got) == list(want) and all(torch.equal(got[key], want[key]) for key in want)


@on_ranks
def test_buffers_and_what_no_unit_holds():
    """Persistent buffers on request; what is no floating-point number keeps its dtype; a part that no unit holds."""
    model = torch.nn.ModuleDict({"norm": torch.nn.BatchNorm1d(3), "free": torch.nn.Linear(3, 2)})
    model["norm"].register_buffer("scratch", torch.zeros(2), persistent=False)
    fullshard.fully_shard(model["norm"])
    got = {name: t.dtype for name, t in fullshard.full_parameters(model, dtype=torch.float16, buffers=True)}
    names = ["norm.weight", "norm.bias", "free.weight", "free.bias", "norm.running_mean", "norm.running_var"]
    assert got == {**dict.fromkeys(names, torch.float16), "norm.num_batches_tracked": torch.int64}
    assert list(got)[:4] == names[:4]


def held_at_once(way: str, bucket_bytes: int) -> tuple[int, int]:
    """The most buckets that are alive while the next is gathered, and the most bytes of one."""
    model = shard(torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(6)]), way)
    alive: list[Any] = []
    most = largest = 0
    for _, tensor in fullshard.full_parameters(model, bucket_bytes=bucket_bytes):
        if not any(ref() is tensor._base for ref in alive):
            alive.append(weakref.ref(tensor._base))
        largest = max(largest, tensor.untyped_storage().nbytes())
        most = max(most, sum(ref() is not None for ref in alive))
    return most, largest


@pytest.mark.parametrize("way", ["rows", "flat", "owner"])
def test_two_buckets_are_alive_at_most(run_ranks, way):
    """As the docstring says: the loop's variable keeps the bucket before. A bucket's padding is told there, too."""
    for most, largest in run_ranks(held_at_once, way, 40_000):
        assert most <= 2
        assert largest <= 40_000 + max(40_000 // 8, 4 * (1 << 14))
        assert way == "rows" or largest > 20_000, "parameters of other layouts are views of their bucket"


def left_early(way: str, stops: list[int], error: Exception | None) -> str:
    """What a rank meets when those in `stops` leave the loop after two of many buckets."""
    example = EXAMPLES["odd_mlp"]
    model = shard(example.make(), way, example.units)

    def consume() -> None:
        for number, _ in enumerate(fullshard.full_parameters(model, bucket_bytes=1)):
            if dist.get_rank() in stops and number == 1:
                if error is None:
                    break
                raise error

    said = error_of(consume)
    want = dict(example.make().named_parameters())  # no collective is left over: what follows is right
    assert all(torch.equal(t, want[name]) for name, t in fullshard.full_parameters(model))
    return f"{type(said).__name__}: {said}"


def test_a_rank_that_stops_alone_is_told_to_the_others(run_ranks):
    first, second = run_ranks(left_early, "flat", [0], None)
    assert first == "NoneType: None"
    assert second.startswith("PhaseError") and "rank:      0" in second and "stopped before its end" in second
    first, second = run_ranks(left_early, "rows", [1], OSError("the engine that was fed is gone"))
    assert second == "OSError: the engine that was fed is gone"
    assert first.startswith("PhaseError") and "rank:      1" in first
    assert run_ranks(left_early, "flat", [0, 1], None) == ["NoneType: None"] * 2  # together


@on_ranks
def test_what_cannot_be_is_refused_by_name():
    example = EXAMPLES["odd_mlp"]
    model = shard(example.make(), "originals", example.units)
    with FSDP.summon_full_params(model):
        inside = error_of(lambda: list(fullshard.full_parameters(model)))
    with torch.device("meta"):
        empty = torch.nn.Linear(3, 3)
    fullshard.fully_shard(empty)
    error = error_of(lambda: list(fullshard.full_parameters(empty)))
    empty.to_empty(device="cpu")
    with torch.no_grad():
        for p in empty.parameters():
            p.fill_(2.0)
    assert all(bool((t == 2).all()) for _, t in fullshard.full_parameters(empty)), "storage that was replaced"
    problems = named_error(inside, "summon_full_params", kinds=PhaseError)
    return problems + named_error(error, "meta", kinds=CheckpointError)
