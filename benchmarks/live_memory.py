"""Peak live bytes in a training step: transformer blocks at world 8, small batch, full step with AdamW."""

from __future__ import annotations

import gc

import torch
from allocations import mark, watch
from peers import OUR_PEERS, TORCH_PEERS, VIEW, WRAPPERS, adamw, choose, fake_world, quiet, wrap
from report import FSDP1, Quantity, Series, Target, hand_back, parse_arguments
from torch.distributed.device_mesh import DeviceMesh

from models import TransformerBlock, transformer_stack

BLOCKS, WIDTH, WORLD, STEPS = 8, 256, 8, 3
METHOD = (
    f"{BLOCKS} transformer blocks of width {WIDTH}, fp32, 2x8 tokens, world {WORLD} (fake group); the "
    f"allocator's own reports (torch.profiler, profile_memory), step {STEPS} of forward + backward + fused "
    "AdamW + zero_grad"
)


def peak(peer: str, mesh: DeviceMesh) -> tuple[int, int]:
    """Most bytes alive in the last step, and how many more are alive after it than before it."""
    with watch() as watched:
        model = wrap(peer, transformer_stack(BLOCKS, WIDTH), TransformerBlock, mesh)
        optimizer = adamw(peer, model)
        x = torch.randn(2, 8, WIDTH)
        for index in range(STEPS):
            with mark(str(index)):
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
    last = watched.windows[str(STEPS - 1)]
    return last.peak, last.end - last.start


def measure(quick: bool) -> list[Quantity]:
    """Two quantities, exact: peak live bytes, and how far they exceed the ideally sharded state.

    A peer of Fullshard's that holds more after the step than before it fails.
    """
    names, _ = choose(["plain", *TORCH_PEERS, *OUR_PEERS, *(name + VIEW for name in OUR_PEERS), *WRAPPERS])
    torch.set_num_threads(1)
    mesh = fake_world(WORLD)
    unit = sum(p.numel() * p.element_size() for p in TransformerBlock(WIDTH).parameters())
    state = 3 * sum(p.numel() * p.element_size() for p in transformer_stack(BLOCKS, WIDTH).parameters())
    totals, beyond = [], []
    for name in names:
        most, growth = peak(name, mesh)
        gc.collect()
        ours = name.startswith((*OUR_PEERS, *WRAPPERS))
        note = f"grows {growth:,} B a step" if growth else ""
        totals.append(Series(name, (most / 1e6,), note=note, grows=ours and growth > 0))
        beyond.append(Series(name, ((most - (state if name == "plain" else state / WORLD)) / unit,)))
    targets = tuple(Target(name, FSDP1, 1.0) for name in (*OUR_PEERS, *WRAPPERS))
    method = f"the same, less 3 x parameters (plain) or 3 x shard; in full parameters of one block ({unit:,} B)"
    return [
        Quantity("live_memory", "peak live memory", "MB", METHOD, tuple(totals), targets=targets),
        Quantity("live_memory", "peak beyond sharded state", "units", method, tuple(beyond), targets=targets),
    ]


def main() -> None:
    arguments = parse_arguments(__doc__)
    with quiet():
        hand_back(measure(arguments.quick), arguments.json)


if __name__ == "__main__":
    main()
