"""`Blocks` and `"owner"`: the same numbers as one process, in every setting, and checkpoints into any layout."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from test_checkpoints import load, resume, save
from test_precision import bf16_parity
from test_settings import clipped_parity
from torch import nn

import fullshard
from fullshard import Blocks
from models import EXAMPLES
from training import FP32, FP64, PACKED, Options, assert_same, compare_tensors, full_parameters, parity, shard

packed = pytest.mark.parametrize("layout", PACKED, ids=str)


@packed
@pytest.mark.parametrize("name", ["gpt", "odd_mlp", "odd_mlp_one_unit", "tied_within", "tied_across", "frozen"])
def test_model(run_ranks, name, layout):
    assert_same(run_ranks(parity, name, Options(layout=layout), FP32))


@packed
@pytest.mark.parametrize("name", ["gpt", "odd_mlp"])
@pytest.mark.parametrize("settings", [{}, {"mesh": "hybrid"}, {"reshard": 2}], ids=str)
def test_model_on_four_ranks(run_ranks, name, layout, settings):
    options = Options(layout=layout, dtype=torch.float64, **settings)
    check_torch = "reshard" not in settings
    assert_same(run_ranks(parity, name, options, FP64, check_torch=check_torch, world=4))


@packed
def test_accumulation_without_sync(run_ranks, layout):
    options = Options(layout=layout, micro_batches=3, sync=False, dtype=torch.float64)
    assert_same(run_ranks(parity, "odd_mlp", options, FP64))


@packed
def test_bf16(run_ranks, layout):
    assert_same(run_ranks(bf16_parity, Options(layout=layout, precision="bf16")))


@packed
@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_clipping(run_ranks, norm_type, layout):
    max_norm = {1.0: 5.0, 2.0: 0.3, float("inf"): 0.05}[norm_type]
    options = Options(
        layout=layout, clip="fullshard", max_norm=max_norm, norm_type=norm_type, dtype=torch.float64, steps=2
    )
    assert_same(run_ranks(clipped_parity, "odd_mlp", options))


PAIRS = [
    ("rows", "owner"),
    ("owner", Blocks("row")),
    ("owner", "flat"),
    (Blocks("row"), "rows"),
    (Blocks(5), "flat"),
    ("flat", Blocks(5)),
    (Blocks(5), "owner"),
]


@pytest.mark.parametrize(("saved_as", "loaded_as"), PAIRS, ids=str)
def test_checkpoints_go_from_one_to_the_other(run_ranks, tmp_path, saved_as, loaded_as):
    """Parameters on twice as many ranks, and half as many; the optimizer's state in a run that goes on."""
    want = run_ranks(save, "odd_mlp", saved_as, tmp_path / "two")[0]
    assert_same(run_ranks(load, "odd_mlp", loaded_as, tmp_path / "two", want, world=4))
    want = run_ranks(save, "odd_mlp", saved_as, tmp_path / "four", world=4)[0]
    assert_same(run_ranks(load, "odd_mlp", loaded_as, tmp_path / "four", want))
    assert_same(run_ranks(resume, "odd_mlp", loaded_as, tmp_path / "two"))


@packed
@pytest.mark.parametrize("kind", ["loop", "foreach", "fused", "view"])
def test_adamw_of_every_kind(run_ranks, kind, layout):
    for problems in run_ranks(steps_of, kind, layout):
        assert not problems


def steps_of(kind: str, layout: object) -> list[str]:
    """The same numbers as the loop over DTensors; and padding, which lies between parameters, stays zero."""
    results = []
    for how, where in (("loop", "rows"), (kind, layout)):
        example = EXAMPLES["odd_mlp_one_unit"]
        model = shard(fullshard, example.make(torch.float64), example, Options(layout=where))
        given = fullshard.optimizer_view(model) if how == "view" else model.parameters()
        flags = {"loop": {"foreach": False}, "foreach": {"foreach": True}}.get(how, {"fused": True})
        optimizer = torch.optim.AdamW(given, lr=1e-2, weight_decay=0.1, **flags)
        for step in range(3):
            inputs, targets = example.batch(step, dist.get_rank(), torch.float64)
            example.loss_of(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(full_parameters(model))
    problems = compare_tensors("parameters", results[1], results[0], FP64)
    for bucket in model._runner().unit.buckets:
        held = torch.ones_like(bucket.shard, dtype=torch.bool)
        for member in bucket.members:
            bucket.part(held, member).fill_(False)
        if bucket.shard[held].any():
            problems.append("padding is not zero any more")
    return problems


def test_owner_holds_whole_tensors(run_ranks):
    """Each parameter is on one rank and nothing of it elsewhere: what Muon and Shampoo want."""
    by_rank = run_ranks(held_by, "owner", world=4)
    for name, shape in by_rank[0][1].items():
        assert sorted(held[name] for held, _ in by_rank) == [0, 0, 0, torch.Size(shape).numel()], name


def held_by(layout: str) -> tuple[dict[str, int], dict[str, tuple[int, ...]]]:
    example = EXAMPLES["gpt"]
    model = shard(fullshard, example.make(), example, Options(layout=layout))
    named = dict(model.named_parameters())
    return {n: p.to_local().numel() for n, p in named.items()}, {n: tuple(p.shape) for n, p in named.items()}


def test_rows_are_never_cut(run_ranks):
    """Every rank holds whole rows; with the flat layout, on the same model, some do not."""
    assert all(run_ranks(whole_rows, Blocks("row"), world=4))
    assert not all(run_ranks(whole_rows, "flat", world=4))


def whole_rows(layout: object) -> bool:
    example = EXAMPLES["odd_mlp"]
    model = shard(fullshard, example.make(), example, Options(layout=layout))
    return all(p.to_local().numel() % torch.Size(p.shape[1:]).numel() == 0 for p in model.parameters())


@packed
def test_what_cannot_be_computed_raises_by_name(fake_world, layout):
    fake_world(2)
    model = fullshard.fully_shard(nn.Linear(6, 4), layout=layout)
    for function in (lambda w: w @ w.T, lambda w: w[0], lambda w: w.sum(0), lambda w: w.argmax()):
        with pytest.raises(fullshard.PhaseError, match="weight"):
            function(model.weight)


def test_the_plan_is_told(fake_world, caplog):
    fake_world(16)
    model = nn.Sequential(nn.Linear(1021, 64, bias=False), nn.Linear(1019, 64, bias=False))
    with caplog.at_level("INFO", "fullshard"):
        fullshard.fully_shard(model, layout=Blocks("row"), comm=Fast(fullshard.TorchComm()))
    assert "2 collectives with" in caplog.text
    assert "blocks(row)" in fullshard.describe(model)


class Fast:
    """Communication without latency, for which padding is never worth one collective less."""

    def __init__(self, inner: object) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def costs(self, axis: object) -> object:
        return replace(self.inner.costs(axis), latency=0.0)
