"""Draws the pictures of docs/architecture.md from the code: `python docs/pictures/draw.py`; a test draws them again.

    floors.svg   the floors of tests/test_house.py, with what really imports what
    phases.svg   the table of src/fullshard/runtime/phases.py
    step.svg     one training step: phases that units enter, and the engine's events with their bytes

Each has its own paper and ink for light and dark, so that it can be read whatever is around it.
"""

from __future__ import annotations

import ast
import sys
from html import escape
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from fullshard import Event, fully_shard, record_events
from fullshard.runtime import runner
from fullshard.runtime.phases import Happening, Phase, row
from fullshard.runtime.runner import Runner

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE.parent / "_ext"))

from reading import Package, locate  # noqa: E402

STYLE = """<style>
:root { --paper: #ffffff; --ink: #1b1f24; --faint: #8a929b; --box: #e8f0fb; --edge: #4a76b8;
  --stay: #f0f1f3; --go: #dcefe0; }
@media (prefers-color-scheme: dark) { :root { --paper: #16191d; --ink: #e3e6ea; --box: #22344d; --edge: #8ab4f8;
  --stay: #24282d; --go: #1f3d28; } }
text { fill: var(--ink); font: 12px system-ui, sans-serif; }
.paper { fill: var(--paper); } .box { fill: var(--box); stroke: var(--edge); } .rule { stroke: var(--faint); }
.small { font-size: 10px; } .faint { fill: var(--faint); } .bold { font-weight: bold; }
.mono { font-family: monospace; }
.line { stroke: var(--edge); fill: none; opacity: 0.35; } .bar { fill: var(--edge); opacity: 0.55; }
.stay { fill: var(--stay); } .go { fill: var(--go); } .mid { text-anchor: middle; }
</style>"""


def svg(width: int, height: int, title: str, parts: list[str]) -> str:
    """A whole picture."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img">\n<title>{escape(title)}</title>\n{STYLE}\n'
        f'<rect class="paper" width="{width}" height="{height}" rx="6"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def text(x: float, y: float, what: object, kind: str = "") -> str:
    """Text at a place."""
    return f'<text x="{x:g}" y="{y:g}"{f" class={chr(34)}{kind}{chr(34)}" if kind else ""}>{escape(str(what))}</text>'


# -- floors


def floors_of_the_test() -> dict[str, int]:
    """The table in tests/test_house.py, read and not run."""
    tree = ast.parse((ROOT / "tests" / "test_house.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FLOORS":
            return dict(ast.literal_eval(node.value))
    raise ValueError("tests/test_house.py has no FLOORS")


def part_of(path: str) -> str:
    """The part of the package that a file belongs to, as the floors name it."""
    return path.split("/")[1].removesuffix(".py")


def imports_between(source: Package) -> set[tuple[str, str]]:
    """Which part imports which."""
    return {(part_of(path), part_of(other)) for path, file in source.files.items() for other in file.imports}


def draw_floors(source: Package) -> str:
    """Boxes by floor; a line where one part imports another. No numbers: they would change with every edit."""
    floors = {name: floor for name, floor in floors_of_the_test().items() if floor < 15}
    width, step, wide = 920, 62, 124
    centre: dict[str, tuple[float, float]] = {}
    for floor in range(1, 15):
        row = sorted(name for name, at in floors.items() if at == floor)
        shift = (width - 60) / (len(row) + 1)
        for i, name in enumerate(row):
            lean = 0 if len(row) > 1 else (-190, 0, 190)[floor % 3]  # so that lines do not lie upon each other
            centre[name] = (60 + shift * (i + 1) + lean, 50 + step * (14 - floor))
    parts = []
    for upper, lower in sorted(imports_between(source)):
        if upper in centre and lower in centre and floors[upper] > floors[lower] > 1:
            (x1, y1), (x2, y2) = centre[upper], centre[lower]
            bend = (y1 + y2) / 2
            curve = f"M{x1:g} {y1 + 14:g} C{x1:g} {bend:g} {x2:g} {bend:g} {x2:g} {y2 - 14:g}"
            parts.append(f'<path class="line" d="{curve}"><title>{upper} imports {lower}</title></path>')
    parts += [text(12, 54 + step * (14 - floor), floor, "faint bold") for floor in range(1, 15)]
    for name, (x, y) in centre.items():
        box = min(wide, (width - 60) / (1 + sum(at == floors[name] for at in floors.values())) - 6)
        parts.append(f'<rect class="box" x="{x - box / 2:g}" y="{y - 14:g}" width="{box:g}" height="28" rx="4"/>')
        parts.append(text(x, y + 4, name, "mid bold"))
    parts.append(text(12, 20, "A floor imports only floors below it. All import floor 1: those lines are left out."))
    return svg(width, 50 + step * 13 + 40, "The floors of Fullshard, and what imports what", parts)


# -- phases


def draw_phases() -> str:
    """Happenings down, phases across: what is done, and the phase that follows where it is another one."""
    left, wide, tall, top = 132, 116, 36, 62
    parts = [
        text(12, 22, "What a unit does when something happens (rows) in a phase (columns); empty: refused", "bold")
    ]
    for i, phase in enumerate(Phase):
        parts.append(text(left + wide * (i + 0.5), top - 10, phase.name, "mid bold"))
    for j, happening in enumerate(Happening):
        y = top + tall * j
        parts.append(text(12, y + 22, happening.name, "small bold"))
        for i, phase in enumerate(Phase):
            cell = row(phase, happening)
            if cell is None:
                continue
            action, following = cell
            x = left + wide * i
            kind = "stay" if following == phase else "go"
            parts.append(
                f'<rect class="{kind}" x="{x + 2}" y="{y + 2}" width="{wide - 4}" height="{tall - 4}" rx="3"/>'
            )
            if action:
                parts.append(text(x + wide / 2, y + 15, action, "mid small mono"))
            if following != phase:
                parts.append(text(x + wide / 2, y + 28, f"→ {following.name}", "mid small bold"))
            elif not action:
                parts.append(text(x + wide / 2, y + 22, "·", "mid faint"))
    return svg(left + wide * len(Phase) + 12, top + tall * len(Happening) + 12, "The table of phases", parts)


# -- a step

Row = tuple[str, str, str, int]
"""One line of the picture: unit, what ("phase" or an event's verb), text, bytes alive after it."""


def record() -> list[Row]:
    """The third step of a small model on one rank of two, on a group that moves no data: the order is the same.

    The caller has started the process group. In the first two steps the order of units becomes known.
    """
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(2)]
    model = nn.Sequential(*blocks, nn.Linear(64, 10))
    for unit in [*blocks, model]:
        fully_shard(unit)
    rows: list[Row] = []

    def drawn(event: Happening, action: Any, following: Phase) -> tuple[Any, Phase]:
        def acts(runner: Runner) -> None:
            rows.append((runner.unit.name or "(root)", "phase", f"{event.name}: {action.__name__}", -1))
            action(runner)

        return acts if action is not None else None, following

    table = [[drawn(event, *runner.ROWS[phase][event]) for event in Happening] for phase in Phase]

    def told(event: Event) -> None:
        if not event.verb.startswith("wait"):
            rows.append((event.unit, event.verb, f"{event.verb} {event.nbytes:,} B", event.live))

    for _ in range(3):
        rows.clear()
        with mock.patch.object(runner, "ROWS", table), record_events(told):
            model(torch.randn(8, 64)).square().mean().backward()
        model.zero_grad()
    return rows


def draw_step(rows: list[Row]) -> str:
    """Time goes down; a column for each unit; on the right what is alive on the rank beyond its shards."""
    units = sorted({row[0] for row in rows}, key=lambda unit: (unit != "(root)", unit))
    left, wide, tall, top, graph = 12, 196, 19, 66, 150
    bottom = top + tall * len(rows)
    most = max(row[3] for row in rows)
    parts = [
        text(left, 22, "One step of three units on a rank of two: phases (plain), events of the engine (bold)", "bold")
    ]
    for i, unit in enumerate(units):
        x = left + wide * i
        parts.append(text(x + 8, top - 12, unit, "bold"))
        parts.append(f'<line class="rule" x1="{x}" x2="{x}" y1="{top - 4}" y2="{bottom}" opacity="0.6"/>')
    x = left + wide * len(units)
    parts.append(text(x, top - 12, f"alive, of {most:,} B", "bold"))
    live = 0
    for j, (unit, verb, what, after) in enumerate(rows):
        y = top + tall * j
        at = left + wide * units.index(unit)
        live = after if after >= 0 else live
        if verb == "phase":
            parts.append(text(at + 6, y + 13, what, "small"))
        else:
            kind = "go" if verb in ("gather", "gathered", "free") else "box"
            parts.append(
                f'<rect class="{kind}" x="{at + 2}" y="{y + 1}" width="{wide - 12}" height="{tall - 2}" rx="3"/>'
            )
            parts.append(text(at + 8, y + 13, what, "small bold"))
        parts.append(f'<rect class="bar" x="{x}" y="{y}" width="{graph * live / most:.1f}" height="{tall}"/>')
    return svg(x + graph + 12, bottom + 14, "One step, as the engine records it", parts)


def drawn(rows: list[Row]) -> dict[str, str]:
    """All pictures by their file's name."""
    source = locate(str(ROOT / "src" / "fullshard"))
    return {"floors.svg": draw_floors(source), "phases.svg": draw_phases(), "step.svg": draw_step(rows)}


def main() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    for name, picture in drawn(record()).items():
        (HERE / name).write_text(picture)


if __name__ == "__main__":
    main()
