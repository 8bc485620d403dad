"""What `explain_memory` promises of each change is what the change frees: planned ones, and those of what is held."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import fullshard
from fullshard import ConfigError, explain_memory, fully_shard, memory_use
from fullshard.insight.planner.live import plan_changes

BATCH, LENGTH, WIDTH = 4, 32, 96


class Block(nn.Module):
    """Matrices and vectors of sizes that 8 ranks do not divide, and 16 even less."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.scale = nn.Linear(WIDTH, 267), nn.Linear(267, WIDTH), nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x))) * self.scale.sum()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def step(model: nn.Module, micro_batch: int, sequence: int) -> torch.Tensor:
    return model(torch.ones(micro_batch, sequence, 7)).square().mean()


@dataclass(frozen=True)
class Way:
    world: int = 8
    micro_batch: int = BATCH
    checkpointing: bool = False
    how: tuple[tuple[str, Any], ...] = ()
    blocks: tuple[tuple[str, Any], ...] = ()


CHANGES: dict[str, Callable[[Way], Way]] = {
    "prefetch=0": lambda way: replace(way, how=(*way.how, ("prefetch", 0))),
    "reshard_after_forward=True": lambda way: replace(way, blocks=(("reshard_after_forward", True),)),
    "half the micro-batch, and twice as many of them": lambda way: replace(way, micro_batch=BATCH // 2),
    "activation checkpointing of the units": lambda way: replace(way, checkpointing=True),
    "shards over 16 ranks instead of 8": lambda way: replace(way, world=16),
}
BASES = {
    "rows": Way(),
    "kept, flat": Way(how=(("layout", "flat"),), blocks=(("reshard_after_forward", False),)),
}


def sharded(way: Way) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, how = Model(), dict(way.how)
    for block in model.blocks:
        if way.checkpointing:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
        fully_shard(block, **how, **dict(way.blocks))
    fully_shard(model, **how)
    return model, torch.optim.AdamW(model.parameters(), fused=True)


def begin(world: int) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, micro_batch: int = BATCH) -> None:
    for _ in range(BATCH // micro_batch):
        step(model, micro_batch, LENGTH).backward()
    optimizer.step()
    optimizer.zero_grad()


def peak(way: Way) -> int:
    from allocations import mark, watch

    begin(way.world)
    with watch() as watched:
        model, optimizer = sharded(way)
        for index in range(3):
            with mark(str(index)):
                train(model, optimizer, way.micro_batch)
    return watched.windows["2"].peak


def promised(way: Way) -> tuple[int, dict[str, int]]:
    begin(way.world)
    model, optimizer = sharded(way)
    for _ in range(2):
        train(model, optimizer)
    now, changes, _ = plan_changes(model, optimizer, Model, batch=BATCH, micro_batch=BATCH, sequence=LENGTH, step=step)
    said = explain_memory(model, optimizer, build=Model, step=step, batch=BATCH, sequence=LENGTH)
    assert all((words in said) is (saved > 0) for words, saved in changes.items()), said
    return now.peak, changes


@pytest.mark.parametrize("name", BASES)
def test_a_planned_change_frees_what_is_promised(in_a_process, name):
    """Within 3%, measured by the allocator before and after each change."""
    way = BASES[name]
    planned, changes = in_a_process(promised, way)
    before = in_a_process(peak, way)
    assert planned == pytest.approx(before, rel=0.03)
    measured = {
        words: before - in_a_process(peak, change(way)) for words, change in CHANGES.items() if words in changes
    }
    assert len(measured) >= 4
    for words, saved in measured.items():
        assert changes[words] == pytest.approx(saved, rel=0.03), (words, changes, measured)


@pytest.mark.parametrize("layout", ["rows", "flat"])
@pytest.mark.parametrize("prefetch", [1, 2])
def test_what_is_held_now_is_what_a_change_frees(in_a_process, layout, prefetch):
    """In the middle of a forward: units that are gathered ahead, and those kept for the backward; to the byte."""
    before, note = in_a_process(held, layout, prefetch, False)
    promised = {words: freed for words, freed in lines_of(note).items() if "ranks" not in words}
    for words, change in (("prefetch=0", (layout, 0, False)), ("reshard_after_forward=True", (layout, prefetch, True))):
        now, _ = in_a_process(held, *change)
        freed = next(freed for line, freed in promised.items() if line.startswith(words))
        assert freed == pytest.approx(before - now, rel=0.03), (words, promised, before, now)


def held(layout: str, prefetch: int, reshard: bool) -> tuple[int, str]:
    """Bytes of gathered units in the forward of the third block, and the note of an allocation that fails there."""
    begin(8)
    model = Model()
    for block in model.blocks:
        fully_shard(block, layout=layout, prefetch=prefetch, reshard_after_forward=reshard)
    fully_shard(model, layout=layout, prefetch=prefetch)
    for _ in range(2):
        step(model, BATCH, LENGTH).backward()
        model.zero_grad()
    gathered: list[int] = []

    def fail(*_: object) -> None:
        gathered.append(memory_use(model).gathered)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 MiB. GPU 0 has ...")

    model.blocks[2].up.register_forward_hook(fail)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        step(model, BATCH, LENGTH)
    (note,) = caught.value.__notes__
    return gathered[0], note


UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20}


def lines_of(text: str) -> dict[str, float]:
    """The changes and what they free, as a paragraph shows them."""
    found = re.findall(r"^ +([\d.]+) (B|KiB|MiB)  (.*)$", text, re.MULTILINE)
    return {words: float(number) * UNITS[unit] for number, unit, words in found}


def held_between_steps(world: int, layout: str) -> tuple[int, str]:
    """Bytes of shards, gradients and state after a step, and the paragraph."""
    begin(world)
    model = fully_shard(nn.Sequential(nn.Linear(64, 5), nn.Linear(5, 64)), layout=layout)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    use = memory_use(model, optimizer)
    said = explain_memory(nn.ModuleList([model]), optimizer)  # not the root, so nothing is planned
    return use.parameters + use.gradients + use.optimizer, said


@pytest.mark.parametrize("layout", ["rows", "flat"])
def test_more_ranks_free_what_their_layouts_say(in_a_process, layout):
    """In rows not half: of a matrix of five rows, each rank has one, padding or not, whether there are 8 or 16."""
    before, said = in_a_process(held_between_steps, 8, layout)
    now, _ = in_a_process(held_between_steps, 16, layout)
    assert lines_of(said)["shards over 16 ranks instead of 8"] == pytest.approx(before - now, rel=0.03)


def test_another_model_is_refused(fake_world):
    fake_world(2)
    model = fully_shard(Model())
    with pytest.raises(ConfigError, match="other parameters than the sharded one"):
        explain_memory(model, build=lambda: nn.Linear(2, 2), step=step)


def owned() -> tuple[int, int, int]:
    """The peak of a step with owners as planned from the live model, as planned before, and what 16 ranks free."""
    begin(8)
    model = Model()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    make = partial(fullshard.OwnerOptimizer, optimizer_class=torch.optim.Adafactor)
    optimizer = make(model.parameters())
    how: dict[str, Any] = {"batch": BATCH, "sequence": LENGTH, "step": step}
    now, changes, _ = plan_changes(model, optimizer, Model, micro_batch=BATCH, **how)
    strategy = fullshard.Strategy(micro_batch=BATCH)
    before = fullshard.plan(Model, ranks=8, strategy=strategy, optimizer=make, **how).best
    return now.peak, before.peak, next(saved for words, saved in changes.items() if "16 ranks" in words)


def test_owners_of_a_live_model_are_planned(in_a_process):
    now, before, saved = in_a_process(owned)
    assert now == before and saved > 0


def state_on_host() -> tuple[list[int], list[int]]:
    """The peak of a live model, and what state on the host frees of it; the same as planned before."""
    begin(8)
    model = Model()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    train(model, optimizer)
    how: dict[str, Any] = {"batch": BATCH, "sequence": LENGTH, "step": step}
    now, changes, failed = plan_changes(model, optimizer, Model, micro_batch=BATCH, **how)
    assert not failed
    strategies = [fullshard.Strategy(micro_batch=BATCH, state_on_host=on_host) for on_host in (False, True)]
    planned = [fullshard.plan(Model, ranks=8, strategy=strategy, **how).best.peak for strategy in strategies]
    return [now.peak, changes["optimizer_state_on_host(optimizer)"]], [planned[0], planned[0] - planned[1]]


def test_state_on_the_host_is_among_the_changes(in_a_process):
    live, before = in_a_process(state_on_host)
    assert live == before and live[1] > 0


def changes_of_the_wrapper(use_orig_params: bool) -> dict[str, int]:
    begin(8)
    policy = fullshard.wrap.ModuleWrapPolicy({Block})
    model = fullshard.FullyShardedDataParallel(Model(), auto_wrap_policy=policy, use_orig_params=use_orig_params)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    train(model, optimizer)
    _, changes, _ = plan_changes(model, optimizer, Model, batch=BATCH, micro_batch=BATCH, sequence=LENGTH, step=step)
    return changes


def test_flat_parameters_of_the_wrapper_are_planned_as_what_is_inside(in_a_process):
    flat, whole = (in_a_process(changes_of_the_wrapper, use_orig_params) for use_orig_params in (False, True))
    assert flat == whole and whole["shards over 16 ranks instead of 8"] > 0
