"""Compiled blocks, and parameters that stay gathered over an optimizer's step."""

from __future__ import annotations

import copy

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.utils import counters

import fullshard


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 3))


class Layer(nn.Module):
    """A block of one's own: Dynamo leaves a bare `nn.Linear` uncompiled."""

    def __init__(self, wide: int, out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(wide, out)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


def sharded(model: nn.Sequential, **settings: object) -> nn.Sequential:
    for layer in model:
        if isinstance(layer, nn.Linear):
            fullshard.fully_shard(layer, **settings)
    return fullshard.fully_shard(model, **settings)


def batch(step: int = 0) -> Tensor:
    torch.manual_seed(100 + step)
    return torch.randn(4, 5)


BREAKS = {"before": 0, "after": 0, "wrapped_before": 0, "wrapped_after": 2, "whole": 4}  # graph breaks, as documented


@pytest.mark.gloo("counts what Dynamo compiles in a process")
@pytest.mark.parametrize(
    ("when", "backend", "layout"),
    [*((when, "aot_eager", "rows") for when in BREAKS), ("before", "inductor", "flat"), ("whole", "inductor", "rows")],
)
def test_compiled_blocks_give_the_same_numbers(run_ranks, layout: str, when: str, backend: str) -> None:
    for plain, compiled, breaks, graphs in run_ranks(compiled_losses, layout, when, backend, timeout=240):
        assert compiled == pytest.approx(plain, rel=1e-5)
        assert breaks == BREAKS[when]
        assert graphs == 3  # one per block and none in later steps


def compiled_losses(layout: str, when: str, backend: str) -> tuple[list[float], list[float], int, int]:
    torch._dynamo.reset()
    counters.clear()
    losses = []
    for compiles in (False, True):
        torch.manual_seed(0)
        blocks = [Layer(5, 7), Layer(7, 7), Layer(7, 3)]
        model = nn.Sequential(*blocks)
        for index, block in enumerate(blocks):
            if compiles and when == "before":
                block.compile(backend=backend)
            if compiles and when == "wrapped_before":
                block = model[index] = torch.compile(block, backend=backend)
            fullshard.fully_shard(block, layout=layout)
            if compiles and when == "after":
                block.compile(backend=backend)
            if compiles and when == "wrapped_after":
                model[index] = torch.compile(block, backend=backend)
        fullshard.fully_shard(model, layout=layout)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if compiles and when == "whole":
            model = torch.compile(model, backend=backend)
        losses.append([])
        for step in range(4):
            with torch.compiler.set_stance("fail_on_recompile" if step >= 2 else "default"):
                loss = model(batch(step)).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    return losses[0], losses[1], sum(counters["graph_break"].values()), counters["stats"]["unique_graphs"]


def test_null_comm_communicates_nothing(fake_world) -> None:
    fake_world(4)
    recording = fullshard.RecordingComm(fullshard.NullComm())
    model = sharded(small(), comm=recording)
    model(batch()).sum().backward()
    assert {call.verb for call in recording.calls} == {"gather", "reduce"}
    assert copy.deepcopy(model)._runner().settings.comm is recording


def test_user_hooks_see_torch_functions_enabled(fake_world) -> None:
    """A post-accumulate hook runs inside the engine's own context and must not notice."""
    fake_world(2)
    model = fullshard.fully_shard(nn.Linear(4, 4))
    seen: list[str] = []

    def hook(parameter: Tensor) -> None:
        with pytest.raises(fullshard.PhaseError) as caught:
            torch.randn(2, 4) @ parameter.T
        seen.append(str(caught.value))

    model.weight.register_post_accumulate_grad_hook(hook)
    model(torch.randn(2, 4)).sum().backward()
    assert len(seen) == 1 and "weight" in seen[0]


@pytest.mark.parametrize("how", ["kept", "unshard", "small"])
def test_gathered_parameters_follow_the_optimizer(run_ranks, how: str) -> None:
    """Whatever stays gathered over an optimizer step, fused or not, is gathered anew and never used stale."""
    for plain, kept in run_ranks(losses_with_kept_parameters, how, world=4):
        assert kept == plain


def losses_with_kept_parameters(how: str) -> tuple[list[float], list[float]]:
    losses = []
    for special in (False, True):
        settings = {"reshard_after_forward": 2} if how == "small" and special else {}
        model = sharded(small(), **settings)
        if how == "kept" and special:
            model.set_reshard_after_backward(False)
        optimizer = torch.optim.SGD(fullshard.optimizer_view(model), lr=0.1, fused=True)
        losses.append([])
        for step in range(4):
            if how == "unshard" and special:
                model[0].unshard()
            loss = model(batch(step)).pow(2).mean()
            if step == 0 or how != "small":
                loss.backward()
            optimizer.step()  # for "small" with the gradients of the first step, and graphs that are never used
            losses[-1].append(loss.item())
            if how == "unshard" and special:
                model[0].unshard()  # gathered before the next step changes it
            optimizer.step()
    return losses[0], losses[1]
