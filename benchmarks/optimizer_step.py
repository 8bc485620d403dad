"""Optimizer step: what AdamW, and clipping before it, cost per parameter on plain tensors, on PyTorch's sharded
DTensors, on Fullshard's sharded parameters, and on its views. A loop over parameters is AdamW's default on a CPU,
foreach on a GPU.

Parameters are small, so that the cost is that of the calls. "plain" has the very shapes of a rank's local
slices.
"""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from peers import choose, fake_world, interleaved, quiet, wrap
from report import Quantity, Series, Target, hand_back, parse_arguments
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from models import TinyBlock, tiny_stack

BLOCKS, WIDTH, WORLD = 16, 64, 2
OPTIONS: dict[str, dict[str, Any]] = {
    "loop": {"foreach": False, "fused": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
METHOD = (
    f"AdamW on {BLOCKS * 6} parameters of up to {WIDTH // WORLD}x{WIDTH} elements per rank (fake "
    f"group, world {WORLD}), gradients in place; process CPU time of optimizer.step() over the number of "
    "parameters, whatever tensors the optimizer was given in their stead; variants shuffled every round"
)


CLIP = "clip"
CLIP_METHOD = (
    f"torch.nn.utils.clip_grad_norm_ on the same {BLOCKS * 6} parameters; process CPU time over their number, with the "
    "fake group's all-reduce of the norm"
)


def trained(peer: str, mesh: DeviceMesh, view: str = "") -> list[Tensor]:
    """What the optimizer is given for `peer` after one forward and backward, with its gradients.

    Args:
        view: "" for `model.parameters()`, "each" for one view per parameter, "whole" for one per bucket.
    """
    model = wrap(peer, tiny_stack(BLOCKS, WIDTH), TinyBlock, mesh)
    parameters: Iterable[Tensor] = list(model.parameters())
    if view:
        from fullshard import optimizer_view

        each = ([parameter] for parameter in model.parameters())
        parameters = [v for p in each for v in optimizer_view(model, p)] if view == "each" else optimizer_view(model)
    model(torch.randn(4, WIDTH)).sum().backward()
    kept = list(parameters)
    missing = sum(parameter.grad is None for parameter in kept)
    if missing:
        raise RuntimeError(f"{peer} {view}: {missing} of {len(kept)} parameters have no gradient after backward")
    MODELS.append(model)  # DTensors and views do not keep the engine alive
    return kept


MODELS: list[nn.Module] = []


def plain_like(parameters: list[Tensor]) -> list[Tensor]:
    """Plain parameters of the local shapes of `parameters`, with gradients."""
    local = [p.to_local() if hasattr(p, "to_local") else p for p in parameters]
    copies: list[Tensor] = [nn.Parameter(t.detach().clone()) for t in local]
    for copy in copies:
        copy.grad = torch.randn_like(copy)
    return copies


def variants(mesh: DeviceMesh) -> dict[tuple[str, str], list[Tensor]]:
    """(how AdamW steps, peer) -> the tensors that it is given."""
    found: dict[tuple[str, str], list[Tensor]] = {}
    for how in (*OPTIONS, CLIP):
        found[how, "fsdp2"] = trained("fsdp2", mesh)
        found[how, "plain"] = plain_like(found[how, "fsdp2"])
        for layout in ("rows", "flat") if choose(["rows"])[0] else ():
            found[how, layout] = trained(layout, mesh)
            for view in ("each", "whole") if how == "fused" else ():
                found[how, f"{layout}+view {view}"] = trained(layout, mesh, view)
    return found


def measure(quick: bool) -> list[Quantity]:
    """Microseconds per parameter and step, for each of AdamW's three ways to step, and for clipping."""
    torch.set_num_threads(1)
    found = variants(fake_world(WORLD))
    calls: dict[tuple[str, str], Callable[[], Any]] = {
        (how, peer): partial(torch.nn.utils.clip_grad_norm_, tensors, 1.0)
        if how == CLIP
        else torch.optim.AdamW(tensors, **OPTIONS[how]).step
        for (how, peer), tensors in found.items()
    }
    for call in calls.values():
        call()
        call()
    gc.collect()
    gc.freeze()
    samples: dict[tuple[str, str], list[float]] = defaultdict(list)
    steps = 2 if quick else 5
    for key in interleaved(list(calls), 5 if quick else 30):
        start = time.process_time()
        for _ in range(steps):
            calls[key]()
        samples[key].append((time.process_time() - start) / (steps * BLOCKS * 6) * 1e6)
    quantities = []
    for how in (*OPTIONS, CLIP):
        peers = [peer for way, peer in found if way == how]
        series = tuple(
            Series(peer, tuple(samples[how, peer]), note=f"{len(found[how, peer])} tensors") for peer in peers
        )
        targets = [Target(layout, "fsdp2", 1.0) for layout in ("rows", "flat")]
        targets += [Target(peer, "plain", 1.1) for peer in peers if "view" in peer]
        title, method = ("clip_grad_norm_", CLIP_METHOD) if how == CLIP else (f"AdamW step, {how}", METHOD)
        quantities.append(
            Quantity("optimizer_step", title, "us / parameter", method, series, ("plain", "fsdp2"), tuple(targets))
        )
    return quantities


def main() -> None:
    arguments = parse_arguments(__doc__)
    with quiet():
        hand_back(measure(arguments.quick), arguments.json)


if __name__ == "__main__":
    main()
