"""What ranks hold of parameters in each layout, and AdamW's steps on it."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import fullshard
from fullshard import Blocks
from models import EXAMPLES
from training import FP64, Options, assert_same, compare_tensors, full_parameters, mesh_of, shard
from ways import on_ranks


@pytest.mark.parametrize(
    ("kind", "layout"), [("foreach", "flat"), ("fused", Blocks("row")), ("view", Blocks(5)), ("loop", "owner")], ids=str
)
@on_ranks
def test_adamw_of_every_kind(kind: str, layout: Any) -> list[str]:
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
        assert not bucket.shard[held].any(), "padding is not zero any more"
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


@pytest.mark.parametrize("layout", ["flat", "owner"])
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


class Fast(fullshard.RecordingComm):
    """Communication without latency, for which padding is never worth one collective less."""

    def costs(self, axis: Any) -> Any:
        return replace(self.inner.costs(axis), latency=0.0)


@pytest.mark.parametrize("mesh", ["default", "hybrid"])
@on_ranks(world=4)
def test_rows_are_dtensors_cut_as_chunk_does(mesh: str) -> list[str]:
    """Names, shapes, placements and local parts of every sharded parameter; some parts are empty."""
    model = made(Options(mesh=mesh))
    ways = dist.get_world_size() // (2 if mesh == "hybrid" else 1)
    want = (Replicate(), Shard(0)) if mesh == "hybrid" else (Shard(0),)
    problems = []
    plain = dict(EXAMPLES["odd_mlp"].make().named_parameters())
    if [name for name, _ in model.named_parameters()] != list(plain):
        raise AssertionError(f"names {[name for name, _ in model.named_parameters()]}, wanted {list(plain)}")
    mesh_shape = (mesh_of(mesh) or mesh_of("1d")).shape
    for name, p in model.named_parameters():
        assert p.device_mesh.shape == mesh_shape, f"{name} lies on {p.device_mesh}"
        if not isinstance(p, DTensor) or not isinstance(p, nn.Parameter) or tuple(p.placements) != want:
            problems.append(f"{name} is a {type(p)} with placements {getattr(p, 'placements', None)}")
            continue
        chunks = list(plain[name].chunk(ways)) + [plain[name][:0]] * ways
        local = p.to_local()
        if p.shape != plain[name].shape or not torch.equal(local, chunks[dist.get_rank() % ways]):
            raise AssertionError(f"{name}: local part {tuple(local.shape)} of {tuple(p.shape)} is not its chunk")
    return problems


def test_flat_shards_hold_everything_once(run_ranks):
    """Global shapes and whole tensors are exact; no rank holds more than its share of the elements."""
    by_rank = run_ranks(flat_shards, world=4)
    assert_same([problems for problems, _ in by_rank])
    held = [count for _, count in by_rank]
    total = sum(p.numel() for p in EXAMPLES["odd_mlp"].make().parameters())
    assert total <= sum(held) <= total + 4 * 6 * 4, f"ranks hold {held} elements of {total}"


def flat_shards() -> tuple[list[str], int]:
    model = made(Options(layout="flat"))
    want = {name: p.detach() for name, p in EXAMPLES["odd_mlp"].make().named_parameters()}
    problems = [f"{n} has shape {p.shape}" for n, p in model.named_parameters() if p.shape != want[n].shape]
    problems += compare_tensors("whole", full_parameters(model), want, 0.0)
    return problems, sum(view.numel() for view in fullshard.optimizer_view(model))


def made(options: Options) -> nn.Module:
    example = EXAMPLES["odd_mlp"]
    return shard(fullshard, example.make(), example, options)


def meets_whole_tensors() -> list[float]:
    """Of parameters with one element, which one rank has; then AdamW with the state of one process."""
    torch.manual_seed(0)
    model, one = (nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 1)) for _ in range(2))
    one.load_state_dict(model.state_dict())
    fullshard.fully_shard(model, layout="flat")
    with torch.no_grad():
        for ours, theirs in zip(model.parameters(), one.parameters(), strict=True):
            ours.lerp_(torch.ones(theirs.shape), 0.5)
            theirs.lerp_(torch.ones(theirs.shape), 0.5)
    before = torch.optim.AdamW(one.parameters())
    one(torch.ones(1, 4)).sum().backward()
    before.step()
    after = torch.optim.AdamW(model.parameters())
    after.load_state_dict(copy.deepcopy(before.state_dict()))
    for ours, theirs in zip(model.parameters(), one.parameters(), strict=True):
        ours.detach().copy_(theirs.detach())
    for module, optimizer in ((model, after), (one, before)):
        module.zero_grad()
        module(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    pairs = zip(model.parameters(), one.parameters(), strict=True)
    return [(ours.full_tensor() - theirs).abs().max().item() for ours, theirs in pairs]


def test_whole_tensors_beside_parameters_of_one_element(run_ranks):
    for differences in run_ranks(meets_whole_tensors, world=2):
        assert max(differences) < 1e-6, differences


def test_optimizer_view_says_which_gradient_is_zero(run_ranks):
    """A parameter that nothing used, beside one that was: one warning that names it, from a rank that holds it."""
    said = [text for texts in run_ranks(warnings_of_views, "flat") for text in texts]
    assert said
    assert all("unused" in text and "optimizer_view(model, params=...)" in text for text in said)


def warnings_of_views(layout: str) -> list[str]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].unused = nn.Parameter(torch.ones(4))
    for module in (*model, model):
        fullshard.fully_shard(module, layout=layout)
    views = fullshard.optimizer_view(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            model.zero_grad()
    texts = [str(warning.message) for warning in caught if "optimizer view" in str(warning.message)]
    assert len(views) == 2 and len(texts) <= 1
    return texts
