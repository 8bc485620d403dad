"""Steps of AdamW during the backward, in one pass and in two, or undone and redone, beside steps after it.

    python benchmarks/step_in_backward.py     # the demo's GPT on two ranks over gloo on this machine, in turns

Milliseconds of a training step, medians; bytes of reduced gradients on a rank, the most at any delivery; bytes of the
copies that undo a step.
"""

from __future__ import annotations

import sys
import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from demo_ranks import demo_model, demo_tokens, on_ranks

import fullshard
from fullshard.events import stream
from fullshard.shard import units_of

WAYS = {  # max_norm and clip of `step_in_backward`
    "after": None,
    "after, clipped": None,
    "in backward": {},
    "in backward, clipped in two passes": {"max_norm": 1.0},
    "in backward, redone where clipped: never": {"max_norm": 1e9, "clip": "redo"},
    "in backward, redone where clipped: always": {"max_norm": 1e-9, "clip": "redo"},
}


def gradient_bytes(model: Any) -> int:
    return sum(gradients.held_bytes for unit in units_of(model) for gradients in unit.gradients)


def rank(rounds: int) -> None:
    """One rank; the first prints the table."""
    runs: dict[str, Any] = {}
    for way, settings in WAYS.items():
        model = demo_model()
        for block in model.blocks:
            fullshard.fully_shard(block)
        fullshard.fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
        steps = None if settings is None else fullshard.step_in_backward(optimizer, **settings)
        runs[way] = model, optimizer, steps, [], [0]
    tokens = demo_tokens()
    for index in range(rounds + 2):
        for way, (model, optimizer, steps, times, most) in runs.items():

            def look(event: Any, model: Any = model, most: list[int] = most) -> None:
                if event.verb == "reduced":
                    most[0] = max(most[0], gradient_bytes(model))

            if index == 1:
                stream.listeners.append(look)
            dist.barrier()
            began = time.perf_counter()
            if way.endswith("passes"):
                with steps.measure():
                    model(tokens, tokens).backward()
            model(tokens, tokens).backward()
            if way == "after, clipped":
                fullshard.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            dist.barrier()
            if index == 1:
                stream.listeners.remove(look)
            if index >= 2:
                times.append(time.perf_counter() - began)
    if dist.get_rank() == 0:
        first = median(runs["after"][3])
        print("| AdamW steps | step, ms | of steps after | gradients, bytes | copies, bytes |\n|---|---|---|---|---|")
        for way, (_, _, steps, times, most) in runs.items():
            figures = f"{median(times) * 1e3:.1f} | {median(times) / first:.2f} | {most[0]:,}"
            print(f"| {way} | {figures} | {0 if steps is None else steps.host_bytes:,} |")


if __name__ == "__main__":
    sys.exit(on_ranks(__file__, __doc__, rank, rounds=30))
