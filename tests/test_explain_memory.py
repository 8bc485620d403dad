"""What holds memory, in one paragraph: on demand, and with an allocation that fails in a forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fullshard
import models
from fullshard import (
    ConfigError,
    DivergenceError,
    FullyShardedDataParallel,
    ShardingStrategy,
    explain_memory,
    fully_shard,
    memory_use,
)
from fullshard.insight.planner.live import plan_changes
from fullshard.runtime.out_of_memory import bytes_asked, is_out_of_memory
from fullshard.text import size

TOKENS = torch.zeros(2, 12, dtype=torch.int64)


@pytest.fixture
def model(fake_world) -> nn.Module:
    fake_world(8)
    model = models.GPT(4)
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=block is not model.blocks[0])
    return fully_shard(model)


def test_state_of_every_shape_counts_as_in_one_process(fake_world):
    """LBFGS keeps its state with its first parameter; Adafactor one of rows and one of columns."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 16))

    def use(optimizer_class: type, whole: nn.Module) -> fullshard.MemoryUse:
        optimizer = optimizer_class(whole.parameters())

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = whole(torch.ones(2, 16)).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
        return memory_use(whole, optimizer)

    for optimizer_class in (torch.optim.LBFGS, torch.optim.Adafactor):
        alone = use(optimizer_class, build())
        assert alone.single_process == alone.total > 2 * alone.parameters, optimizer_class
    fake_world(2)
    sharded = use(torch.optim.LBFGS, fully_shard(build()))
    assert sharded.single_process == 4 * sharded.parameters + sharded.optimizer  # whole on each rank


@pytest.mark.parametrize("way", ["parameters", "view", "flat parameter", "original parameters"])
def test_state_of_views_counts_as_in_one_process(fake_world, way):
    """AdamW's is twice the parameters, whatever tensors have it."""
    fake_world(2)
    built = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 16))
    whole = sum(p.nbytes for p in built.parameters())
    if way in ("parameters", "view"):
        built = fully_shard(built)
    else:
        built = fullshard.FullyShardedDataParallel(built, use_orig_params=way.startswith("original"))
    optimizer = torch.optim.AdamW(fullshard.optimizer_view(built) if way == "view" else built.parameters())
    built(torch.ones(2, 16)).square().mean().backward()
    optimizer.step()
    counts = 4 * len(optimizer.state)  # of steps, float32
    assert memory_use(built, optimizer).single_process == pytest.approx(4 * whole + counts, abs=4)


def test_between_steps(model):
    optimizer = torch.optim.AdamW(model.parameters())
    model(TOKENS).sum().backward()
    optimizer.step()
    use, said = memory_use(model, optimizer), explain_memory(model, optimizer)
    for nbytes, what in (
        (use.parameters, "sharded parameters"),
        (use.gradients, "reduced gradients"),
        (use.optimizer, "optimizer state"),
    ):
        assert f"{size(nbytes)} in {what}" in said
    assert "units" not in said.splitlines()[0] and "16 ranks instead of 8" in said
    assert "optimizer state" not in explain_memory(model)


def test_an_allocation_that_fails_in_a_forward(model):
    """The note of the error names units by why they are gathered. On a CPU nothing is gained by offloading."""
    for _ in range(2):  # the order of units is known from then on
        model(TOKENS).sum().backward()
        model.zero_grad()

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has ...")

    handle = model.blocks[2].mlp[1].register_forward_hook(fail)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        model(TOKENS)
    (note,) = caught.value.__notes__
    assert "units in use ((root), blocks.2)" in note
    assert "units kept for the backward or by request (blocks.0)" in note
    assert "units gathered ahead (blocks.3)" in note
    assert "prefetch=0" in note and "reshard_after_forward=True" in note
    assert "CPUOffloadPolicy" not in note
    handle.remove()
    model(TOKENS).sum().backward()  # the model goes on


def test_changes_are_named_as_arguments_of_the_front_end(fake_world):
    """Of the wrapper: its own; what `backward_prefetch=None` frees, by the plans of two models. See also `_smaller`."""
    fake_world(8)

    def trained(**how: Any) -> FullyShardedDataParallel:
        wrapped = FullyShardedDataParallel(models.GPT(4), auto_wrap_policy={models.Block}, use_orig_params=True, **how)
        for _ in range(2):
            wrapped(TOKENS).sum().backward()
            wrapped.zero_grad()
        return wrapped

    wrapped = trained()
    now, changes, _ = plan_changes(wrapped, None)
    without, fewer, _ = plan_changes(trained(backward_prefetch=None), None)
    assert changes["backward_prefetch=None"] == now.peak - without.peak > 0
    assert "backward_prefetch=None" not in fewer and "cpu_offload=CPUOffload(offload_params=True)" in fewer
    kept = trained(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    assert plan_changes(kept, None)[1]["sharding_strategy=ShardingStrategy.FULL_SHARD"] > 0
    kept.module.blocks[2].mlp[1].register_forward_hook(lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError()))
    with pytest.raises(torch.OutOfMemoryError) as caught:
        kept(TOKENS)
    (note,) = caught.value.__notes__
    assert "backward_prefetch=None" in note and "sharding_strategy=ShardingStrategy.FULL_SHARD" in note
    assert "reshard_after_forward" not in note


def test_what_another_rank_raised_is_no_allocation_of_this_one():
    quoted = DivergenceError("Ranks are stuck: rank 1 raised RuntimeError: DefaultCPUAllocator: can't allocate memory")
    assert not is_out_of_memory(quoted)


def test_of_a_part_of_a_model_its_own_state_is_counted(model):
    optimizer = torch.optim.AdamW(model.parameters())
    model(TOKENS).sum().backward()
    optimizer.step()
    parts = [memory_use(block, optimizer).optimizer for block in model.blocks]
    own = memory_use(model, optimizer).optimizer
    assert parts[1] == parts[2] > 0 and sum(parts) < own
    assert f"{size(parts[1])} in optimizer state" in explain_memory(model.blocks[1], optimizer)
    assert explain_memory(model, [optimizer, optimizer]) == explain_memory(model, optimizer)
    with torch.no_grad():
        within = explain_memory(model, optimizer)
    assert within == explain_memory(model, optimizer)


def test_an_allocation_that_fails_in_a_backward(model):
    """The units of its moment are named, once; the next step is an ordinary one."""
    for _ in range(2):
        model(TOKENS).sum().backward()
        model.zero_grad()

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has ...")

    handle = model.blocks[2].mlp[1].register_full_backward_hook(fail)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        model(TOKENS).sum().backward()
    (note,) = caught.value.__notes__
    assert "units in use ((root), blocks.2)" in note and "in reductions" in note, note
    handle.remove()
    with pytest.raises(ZeroDivisionError) as other:
        model.blocks[2].mlp[1].register_full_backward_hook(lambda *_: 1 / 0)
        model(TOKENS).sum().backward()
    assert not hasattr(other.value, "__notes__")


def test_the_failures_that_are_recognised():
    host = RuntimeError(
        "[enforce fail at alloc_cpu.cpp:119] DefaultCPUAllocator: can't allocate memory: "
        "you tried to allocate 42 bytes."
    )
    assert is_out_of_memory(host) and bytes_asked(str(host)) == 42
    assert is_out_of_memory(torch.OutOfMemoryError("no")) and bytes_asked("no") is None
    assert bytes_asked("Tried to allocate 1.50 GiB.") == 3 * 2**29
    assert not is_out_of_memory(RuntimeError("size mismatch"))


def test_what_is_allocated_besides_is_activations(model, monkeypatch):
    """On an accelerator: what its allocator holds beyond units and state."""
    known = memory_use(model).parameters
    monkeypatch.setattr("fullshard.runtime.out_of_memory._allocator", lambda device: (known + 2**20, known + 2**21))
    said = explain_memory(model)
    assert "1.0 MiB in optimizer state, activations and the program's own tensors" in said
    assert "The allocator has 1.0 MiB more" in said
    assert "512.0 KiB  half the micro-batch" in said


def test_changes_that_fit_are_marked(model, monkeypatch):
    """Those that bring the peak of a step under what the allocator had when it failed."""
    model(TOKENS).sum().backward()
    peak = plan_changes(model, None)[0].peak
    monkeypatch.setattr("fullshard.runtime.out_of_memory._allocator", lambda device: (peak // 2, peak - 1000))
    assert "(fits)" not in explain_memory(model)
    try:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 MiB.")
    except torch.OutOfMemoryError:
        said = explain_memory(model)
    assert "(fits)" in said, said
    monkeypatch.setattr("fullshard.runtime.out_of_memory._allocator", lambda device: (10, 1000))
    try:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 MiB.")
    except torch.OutOfMemoryError:
        assert "(fits)" not in explain_memory(model)


@pytest.mark.parametrize("name", ["batch", "micro_batch", "sequence"])
@pytest.mark.parametrize("value", [0, -1, "8", 2.5])
def test_sizes_that_are_none(model, name, value):
    model(TOKENS).sum().backward()
    with pytest.raises(ConfigError, match=rf"explain_memory\(\): {name} must be a positive integer"):
        explain_memory(model, **{name: value})


def test_optimizers_that_are_none_or_of_another_model(model):
    model(TOKENS).sum().backward()
    with pytest.raises(ConfigError, match="is not an optimizer"):
        explain_memory(model, 5)
    stranger, own = torch.optim.SGD(nn.Linear(2, 2).parameters()), torch.optim.SGD(model.parameters())
    with pytest.raises(ConfigError, match="steps none of the model's parameters"):
        explain_memory(model, stranger)
    assert "at the peak of a step" in explain_memory(model, [own, stranger])


def test_a_model_without_units():
    with pytest.raises(ConfigError, match="needs a sharded model"):
        fullshard.explain_memory(nn.Linear(2, 2))
