"""Optimizer step: what AdamW costs per parameter on plain tensors, on sharded DTensors, and on Fullshard's
views.

Parameters are small, so that the cost is that of the calls. "plain" has the very shapes of a rank's local
slices.
"""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from peers import choose, fake_world, interleaved, quiet, wrap
from report import Quantity, Series, Target, hand_back, parse_arguments
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from models import TinyBlock, tiny_stack

BLOCKS, WIDTH, WORLD = 16, 64, 2
LOOP, FOREACH, FUSED = {"foreach": False, "fused": False}, {"foreach": True}, {"fused": True}
METHOD = (
    f"AdamW on {BLOCKS * 6} parameters of up to {WIDTH // WORLD}x{WIDTH} elements per rank (fake "
    f"group, world {WORLD}), gradients in place; process CPU time of optimizer.step() over the number of "
    "parameters, whatever tensors the optimizer was given in their stead; variants shuffled every round"
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


def variants(mesh: DeviceMesh) -> dict[str, tuple[list[Tensor], dict[str, Any]]]:
    """Label -> (tensors, AdamW options). One line of the table each."""
    fsdp2 = trained("fsdp2", mesh)
    found = {f"plain {name}": (plain_like(fsdp2), options) for name, options in _KINDS.items()}
    found |= {"fsdp2 loop": (fsdp2, LOOP), "fsdp2 fused": (trained("fsdp2", mesh), FUSED)}
    if not choose(["rows"])[0]:
        return found
    found |= {"rows loop": (trained("rows", mesh), LOOP), "rows fused": (trained("rows", mesh), FUSED)}
    for layout in ("rows", "flat"):
        for view in ("each", "whole"):
            found[f"{layout}+view {view} fused"] = (trained(layout, mesh, view), FUSED)
    return found


_KINDS = {"loop": LOOP, "foreach": FOREACH, "fused": FUSED}


def measure(quick: bool) -> list[Quantity]:
    """One quantity: microseconds per parameter and step."""
    torch.set_num_threads(1)
    found = variants(fake_world(WORLD))
    optimizers = {name: torch.optim.AdamW(tensors, **options) for name, (tensors, options) in found.items()}
    for optimizer in optimizers.values():
        optimizer.step()
        optimizer.step()
    gc.collect()
    gc.freeze()
    samples: dict[str, list[float]] = defaultdict(list)
    steps = 2 if quick else 5
    for name in interleaved(list(optimizers), 5 if quick else 30):
        start = time.process_time()
        for _ in range(steps):
            optimizers[name].step()
        samples[name].append((time.process_time() - start) / (steps * BLOCKS * 6) * 1e6)
    notes = {name: f"{len(tensors)} tensors" for name, (tensors, _) in found.items()}
    series = tuple(Series(name, tuple(samples[name]), note=notes[name]) for name in optimizers)
    targets = tuple(
        Target(f"{layout}+view {view} fused", "plain fused", 1.1)
        for layout in ("rows", "flat")
        for view in ("each", "whole")
    )
    against = ("plain fused", "fsdp2 fused")
    return [Quantity("optimizer_step", "AdamW step", "us / parameter", METHOD, series, against, targets)]


def main() -> None:
    arguments = parse_arguments(__doc__)
    with quiet():
        hand_back(measure(arguments.quick), arguments.json)


if __name__ == "__main__":
    main()
