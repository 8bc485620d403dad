"""Draw the memory that one rank holds during a training step, by the number of ranks: docs/guides/holds.svg.

    python docs/guides/holds.py

Bytes are those of real tensors, measured by `memory_use` at every event of the third step. The ranks are one process
and a fake group, whose collectives do nothing: the process holds the memory of one of N ranks, with meaningless values.
A test measures again and compares the picture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from fullshard import Event, fully_shard, memory_use, record_events

WIDTH, BLOCKS = 256, 12
WORLDS = (2, 8)
PICTURE = Path(__file__).with_name("holds.svg")
Moment = tuple[int, int, int]
"""Bytes of parameters and optimizer state; of gradients; of gathered units and reductions."""

COLOURS = ("#1f6fb4", "#3b8f4e", "#d9772b")
TOLD = ("parameters and optimizer state", "gradients", "gathered units, gradients in reduction")
PANEL, GAP, LEFT, TOP, HEIGHT = 250, 24, 70, 70, 230  # of the picture, in pixels


def build() -> nn.Sequential:
    torch.manual_seed(0)
    sizes = (WIDTH, 4 * WIDTH, WIDTH)
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(*sizes[:2]), nn.GELU(), nn.Linear(*sizes[1:])) for _ in range(BLOCKS)]
    )


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, last: Callable[[], None]) -> None:
    """Three steps; `last` is called before the third."""
    for step in range(3):
        if step == 2:
            last()
        model(torch.randn(4, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def unsharded() -> list[Moment]:
    """One process: gradients appear parameter by parameter."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    moments: list[Moment] = []

    def note(_: torch.Tensor | None = None) -> None:
        use = memory_use(model, optimizer)
        moments.append((use.parameters + use.optimizer, use.gradients, 0))

    def last() -> None:
        use = memory_use(model, optimizer)
        moments.extend([(use.parameters + use.optimizer, 0, 0)] * (2 * BLOCKS))  # forward: a third of the step
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(note)

    steps(model, optimizer, last)
    return moments


def sharded(world: int) -> list[Moment]:
    """Rank 0 of `world`."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        model = build()
        for block in model:
            fully_shard(block)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
        moments: list[Moment] = []

        def note(event: Event) -> None:
            if event.verb.startswith("wait"):
                return  # nothing comes or goes
            use = memory_use(model, optimizer)
            moments.append((use.parameters + use.optimizer, use.gradients, event.live))

        with record_events(note):
            steps(model, optimizer, moments.clear)
        return moments
    finally:
        dist.destroy_process_group()


def measure() -> dict[str, list[Moment]]:
    return {"one process": unsharded(), **{f"{world} ranks": sharded(world) for world in WORLDS}}


def draw(panels: dict[str, list[Moment]]) -> str:
    """The picture as SVG: in each panel the three parts, stacked, from the beginning of a step to its end."""
    most = max(sum(moment) for moments in panels.values() for moment in moments)
    width, height = LEFT + (PANEL + GAP) * len(panels), TOP + HEIGHT + 70
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="13">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="24" font-size="15">What one rank holds during a training step '
        f"({sum(p.numel() for p in build().parameters()) / 1e6:.1f}M parameters, fp32, AdamW)</text>",
    ]
    for tenth in range(0, int(most / 1e6) + 1, 25):
        y = TOP + HEIGHT * (1 - tenth * 1e6 / most)
        out.append(f'<line x1="{LEFT}" x2="{width - GAP}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dddddd"/>')
        out.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tenth} MB</text>')
    for index, (name, moments) in enumerate(panels.items()):
        x = LEFT + (PANEL + GAP) * index
        out += [area(moments, part, x, most) for part in (2, 1, 0)]
        peak = max(sum(moment) for moment in moments)
        out.append(
            f'<text x="{x}" y="{TOP - 12}"><tspan font-weight="bold">{name}</tspan>: {peak / 1e6:.1f} MB at most</text>'
        )
        out.append(f'<text x="{x}" y="{TOP + HEIGHT + 18}" fill="#666666">forward, backward</text>')
    x = LEFT
    for colour, told in zip(COLOURS, TOLD, strict=True):
        out.append(f'<rect x="{x}" y="{TOP + HEIGHT + 38}" width="14" height="14" fill="{colour}"/>')
        out.append(f'<text x="{x + 20}" y="{TOP + HEIGHT + 50}">{told}</text>')
        x += 44 + 7 * len(told)
    return "\n".join([*out, "</svg>"]) + "\n"


def area(moments: Sequence[Moment], part: int, x: int, most: int) -> str:
    """A part stacked on the parts below it, as a polygon down to the floor."""
    wide = PANEL / len(moments)
    points = []
    for index, moment in enumerate(moments):
        y = TOP + HEIGHT * (1 - sum(moment[: part + 1]) / most)
        points += [f"{x + wide * index:.1f},{y:.1f}", f"{x + wide * (index + 1):.1f},{y:.1f}"]
    floor = TOP + HEIGHT
    return f'<polygon points="{x},{floor} {" ".join(points)} {x + PANEL},{floor}" fill="{COLOURS[part]}"/>'


if __name__ == "__main__":
    PICTURE.write_text(draw(measure()))
