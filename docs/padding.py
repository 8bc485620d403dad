"""Writes docs/padding.md: how much each layout pads real models' units. `python docs/padding.py`; a test compares."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from fullshard.comm.torch_comm import TorchComm
from fullshard.layout import Blocks, Layout, ParameterSpec, plan_blocks, plan_flat, plan_owner, plan_rows

WORLDS = (8, 64, 256, 1024)
ITEMSIZE = 2  # gathered in bf16
ALIGN = 16 // ITEMSIZE
Shape = tuple[int, ...]


def attention(width: int, query: int, kv: int) -> list[Shape]:
    return [(query, width), (kv, width), (kv, width), (width, query)]


def swiglu(width: int, hidden: int) -> list[Shape]:
    return [(hidden, width), (hidden, width), (width, hidden)]


LLAMA = [*attention(4096, 4096, 1024), *swiglu(4096, 14336), (4096,), (4096,)]
QWEN = [*attention(2560, 4096, 1024), (128,), (128,), *swiglu(2560, 9728), (2560,), (2560,)]
MIXTRAL = [*attention(4096, 4096, 1024), (8, 4096), *swiglu(4096, 14336) * 8, (4096,), (4096,)]
GPT_OSS = [
    *attention(2880, 4096, 512),
    *[(4096,), (512,), (512,), (2880,), (64,)],  # biases and attention sinks
    *[(128, 2880), (128,)],  # router
    *[(128, 2880, 5760), (128, 5760), (128, 2880, 2880), (128, 2880)],  # experts
    *[(2880,), (2880,)],
]
UNITS: dict[str, list[Shape]] = {  # shapes as in the models' published configurations
    "Llama-3-8B, layer": LLAMA,
    "Llama-3-8B, embedding": [(128256, 4096)],
    "Llama-3-8B, norm and head": [(4096,), (128256, 4096)],
    "Qwen3-4B, layer": QWEN,
    "Qwen3-4B, embedding (tied) and norm": [(151936, 2560), (2560,)],
    "Mixtral-8x7B, layer": MIXTRAL,
    "Mixtral-8x7B, embedding": [(32000, 4096)],
    "GPT-OSS-120B, layer": GPT_OSS,
    "GPT-OSS-120B, embedding": [(201088, 2880)],
}
LAYOUTS = ('"rows"', '"flat"', 'Blocks("row")', "Blocks(32)", "Blocks(128 * 128)", '"owner"')


@dataclass
class _Accelerator:
    """An axis of a backend other than gloo, for `costs`."""

    size: int
    backend: str = "nccl"


def plan(layout: str, shapes: list[Shape], world: int) -> Layout:
    """The layout of that name of a unit's parameters."""
    specs = [ParameterSpec(f"p{i}", shape, tuple(range(len(shape)))) for i, shape in enumerate(shapes)]
    costs = TorchComm().costs(_Accelerator(world))  # type: ignore[arg-type]
    segment = costs.break_even_bytes // ITEMSIZE
    if layout == '"rows"':
        return plan_rows(specs, world, ALIGN, segment if len(specs) == 1 else 1 + max(map(math.prod, shapes)))
    if layout == '"flat"':
        return plan_flat(specs, world, ALIGN)
    if layout == '"owner"':
        return plan_owner(specs, world, ALIGN)
    blocks = {'Blocks("row")': Blocks("row"), "Blocks(32)": Blocks(32)}.get(layout, Blocks(128 * 128))
    granules = [blocks.of(spec.shape, spec.order) for spec in specs]
    return plan_blocks(specs, granules, world, ALIGN, segment, layout, whole_rows=blocks.granule == "row")


def cell(layout: str, shapes: list[Shape], world: int) -> str:
    """Padding in percent of the parameters, and how many collectives if not one."""
    found = plan(layout, shapes, world)
    padding = 100 * (found.gathered_numel / found.parameter_numel - 1)
    text = f"{padding:.3f}" if padding < 1 else f"{padding:,.1f}" if padding < 1000 else f"{padding:,.0f}"
    if padding == 0:
        text = "0"
    return text + (f" ({len(found.segments)})" if len(found.segments) > 1 else "")


def page() -> str:
    """The whole page."""
    lines = [
        "# Padding",
        "",
        "In a collective every rank contributes a slice of the same length. If parameters cannot be cut into",
        "equal slices, some slices are filled up with **padding**, which costs communication and memory.",
        "",
        "The tables show, in percent, how much longer a gathered unit is than its parameters, by",
        "[layout](guides/strategy.md#layouts) and number of ranks. The number in `Blocks(32)` counts the elements",
        "that must stay together. `docs/padding.py` computes the tables with the",
        "planners that `fully_shard` uses, for parameters gathered in bf16.",
        "",
        "- A number in brackets is the number of collectives: `0 (5)` means no padding, with five collectives.",
        "  Without brackets there is one. `Blocks` uses several if a single slice length would pad more than a",
        "  collective costs, and logs it.",
        "- `rows` uses one collective on accelerators. On gloo a large parameter gets a separate collective, to",
        "  save a copy.",
        "- `owner` never cuts a tensor, so every slice is at least as long as the largest tensor. It suits few",
        "  ranks, or units of many tensors of the same size.",
    ]
    for name, shapes in UNITS.items():
        numel = plan('"flat"', shapes, 1).parameter_numel
        lines += ["", f"## {name}: {numel / 1e6:,.1f}M parameters", ""]
        lines += ["| layout | " + " | ".join(f"{world:,} ranks" for world in WORLDS) + " |", "|---|---|---|---|---|"]
        for layout in LAYOUTS:
            lines.append(f"| `{layout}` | " + " | ".join(cell(layout, shapes, world) for world in WORLDS) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path(__file__).with_suffix(".md").write_text(page())
