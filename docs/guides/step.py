"""Draw one training step, from its events on two ranks: docs/guides/step.svg.

    torchrun --standalone --nproc-per-node=2 docs/guides/step.py

Rows are units, columns are events in their order; below is the memory that comes and goes within the step. A test
records the step again and compares every verb, unit and byte with the picture.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from fullshard import Event, fully_shard, record_events

WIDTH, BLOCKS = 64, 3
PICTURE = Path(__file__).with_name("step.svg")

COLUMN, ROW, LEFT, TOP, GRAPH = 34, 46, 92, 92, 110  # of the picture, in pixels
COLOURS = {
    "gather": "#1f6fb4",
    "gathered": "#8fc1e8",
    "free": "#b9b9b9",
    "collect": "#f3c179",
    "reduce": "#d9772b",
    "reduced": "#3b8f4e",
}


def record() -> list[Event]:
    """The events of this rank in the third step; the first two record the order of units."""
    torch.manual_seed(0)
    shape = [(WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)]
    blocks = [nn.Sequential(nn.Linear(*shape[0]), nn.GELU(), nn.Linear(*shape[1])) for _ in range(BLOCKS)]
    model = nn.Sequential(*blocks, nn.Linear(WIDTH, 10))
    for block in blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        with record_events() as events:
            model(torch.randn(8, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [event for event in events if not event.verb.startswith("wait")]


def facts(events: list[Event]) -> list[tuple[str, str, int, int]]:
    """The facts of each event that are the same in every run: verb, unit, bytes, bytes alive after it."""
    return [(event.verb, event.unit, event.nbytes, event.live) for event in events]


def read(picture: str) -> list[tuple[str, str, int, int]]:
    """The facts that a picture was drawn from."""
    titles = re.findall(r"<title>(\w+) (\S+): ([\d,]+) bytes; ([\d,]+) alive", picture)
    return [
        (verb, unit, int(nbytes.replace(",", "")), int(live.replace(",", ""))) for verb, unit, nbytes, live in titles
    ]


def draw(steps: list[tuple[str, str, int, int]]) -> str:
    """The picture as SVG."""
    units = list(dict.fromkeys(unit for _, unit, _, _ in steps))
    width, base = LEFT + COLUMN * len(steps) + 20, TOP + ROW * len(units)
    height, most = base + GRAPH + 70, max(live for *_, live in steps)
    gathers = [(verb, unit) for verb, unit, *_ in steps]
    turn = next(index for index, one in enumerate(gathers) if one[0] == "gather" and one in gathers[:index])
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        *legend(),
    ]
    for name, start, stop in (("forward", 0, turn), ("backward", turn, len(steps))):
        x = LEFT + COLUMN * start
        out.append(f'<rect x="{x + 2}" y="60" width="{COLUMN * (stop - start) - 4}" height="20" fill="#eeeeee"/>')
        out.append(f'<text x="{x + COLUMN * (stop - start) / 2}" y="74" text-anchor="middle">{name}</text>')
    for row, unit in enumerate(units):
        y = TOP + ROW * row
        out.append(f'<text x="{LEFT - 10}" y="{y + 20}" text-anchor="end">{unit}</text>')
        out.append(f'<line x1="{LEFT}" x2="{width - 20}" y1="{y + 38}" y2="{y + 38}" stroke="#e4e4e4"/>')
    points = []
    for column, (verb, unit, nbytes, live) in enumerate(steps):
        x, y = LEFT + COLUMN * column, TOP + ROW * units.index(unit)
        out.append(
            f'<rect x="{x + 2}" y="{y + 4}" width="{COLUMN - 4}" height="16" fill="{COLOURS[verb]}">'
            f"<title>{verb} {unit}: {nbytes:,} bytes; {live:,} alive after it</title></rect>"
        )
        if verb in ("gather", "reduce"):
            out.append(
                f'<text x="{x + COLUMN / 2}" y="{y + 33}" text-anchor="middle" font-size="10">{kilo(nbytes)}</text>'
            )
        level = base + 20 + GRAPH * (1 - live / most)
        points += [f"{x + 2},{level:.1f}", f"{x + COLUMN + 2},{level:.1f}"]
    floor = base + 20 + GRAPH
    out += [
        f'<polygon points="{LEFT + 2},{floor} {" ".join(points)} {width - 18},{floor}" fill="#cfe3f5" '
        'stroke="#1f6fb4"/>',
        f'<text x="{LEFT - 10}" y="{base + 26}" text-anchor="end">{kilo(most)} kB</text>',
        f'<text x="{LEFT - 10}" y="{floor}" text-anchor="end">0</text>',
        f'<text x="{LEFT}" y="{floor + 22}">memory of gathered units and of gradients in reduction, '
        "after each event</text>",
        f'<text x="{LEFT}" y="{floor + 40}">numbers in the rows: kB that all ranks together put into one gather '
        "or reduction</text>",
        "</svg>",
    ]
    return "\n".join(out) + "\n"


def legend() -> list[str]:
    told = {"gathered": "gathered: may be used", "collect": "collect gradients", "reduced": "reduced: in .grad"}
    out, x = [], LEFT
    for verb, colour in COLOURS.items():
        text = told.get(verb, verb)
        out.append(f'<rect x="{x}" y="20" width="14" height="14" fill="{colour}"/>')
        out.append(f'<text x="{x + 19}" y="31">{text}</text>')
        x += 40 + 7 * len(text)
    return out


def kilo(nbytes: int) -> str:
    return f"{nbytes / 1000:.1f}"


def main() -> None:
    dist.init_process_group("gloo")
    steps = facts(record())
    if dist.get_rank() == 0:
        PICTURE.write_text(draw(steps))
        for verb, unit, nbytes, live in steps:
            print(f"{verb:9} {unit:7} {nbytes:9,} {live:9,}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
