"""Bytes communicated in a step, against the theory of ZeRO-3: two gathers and one reduce of the parameters'
bytes.

On shapes that no world divides (dim 0 of 7, 13 and 1023 over 64 ranks), where chunking by rows must pad.
The same interception counts for everyone: each collective that reaches `torch.distributed` with the bytes
of its full buffer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from peers import OUR_PEERS, TORCH_PEERS, choose, fake_world, quiet, wrap
from report import Quantity, Series, Target, hand_back, parse_arguments
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from models import OddBlock, Stack, odd_stack

BLOCKS, WORLD, ALIGN = 4, 64, 16  # ALIGN: bytes to which a rank's slice may be rounded up
NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
METHOD = (
    f"{BLOCKS} blocks of Linear 1023-7-13-1023, fp32, world {WORLD} (fake group); third step, forward + "
    "backward; a TorchDispatchMode adds up, for every c10d operation, the larger of its input and output; "
    "theory: 3 times the parameters' bytes; chunking: 3 times ceil(dim0 / world) rows per rank, a slice "
    f"rounded up to {ALIGN} bytes"
)


def tensor_bytes(value: Any) -> int:
    """Bytes of all tensors in `value`, a tensor or nested lists of them."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, (list, tuple)):
        return sum(tensor_bytes(item) for item in value)
    return 0


class CollectiveBytes(TorchDispatchMode):
    """Adds up what passes through the collectives run under it.

    An all-gather's output and a reduce-scatter's input are its full buffer, an all-reduce's or all-to-all's
    input equals its output: the larger of the two sides is the full buffer in each case.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        self.count = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace in NAMESPACES and "wait" not in func.name() and "barrier" not in func.name():
            self.total += max(tensor_bytes(side) for side in (*args, result))
            self.count += 1
        return result


def step(model: nn.Module, x: Tensor) -> None:
    """Forward, backward, gradients dropped."""
    model(x).sum().backward()
    model.zero_grad(set_to_none=True)


def count(peer: str, model: nn.Module, x: Tensor) -> Series:
    """Bytes of the third step, noting the number of collectives, and whether Fullshard's own events say the same."""
    step(model, x)
    step(model, x)
    with CollectiveBytes() as counted:
        step(model, x)
    note, told = f"{counted.count} collectives", counted.total
    if peer in OUR_PEERS:
        from fullshard import record_events

        with record_events() as events:
            step(model, x)
        told = sum(event.nbytes for event in events if event.verb in ("gather", "reduce"))
        note += f"; own events say {'the same' if told == counted.total else f'{told:,}'}"
    return Series(peer, (float(counted.total),), note=note, differs=told != counted.total)


def chunking_bytes(block: nn.Module) -> int:
    """Bytes of one gather of `block`, its parameters cut by rows as by `torch.chunk`, every rank alike."""
    slice_bytes = sum(-(-len(p) // WORLD) * (p.numel() // len(p)) * p.element_size() for p in block.parameters())
    return -(-slice_bytes // ALIGN) * ALIGN * WORLD


def measure(quick: bool) -> list[Quantity]:
    """One quantity, exact: bytes per step."""
    names, _ = choose([*TORCH_PEERS, *OUR_PEERS])
    mesh = fake_world(WORLD)
    x = torch.randn(4, OddBlock.SIZES[0])
    reference: Stack = odd_stack(BLOCKS)
    theory = 3 * sum(p.numel() * p.element_size() for p in reference.parameters())
    chunking = 3 * sum(chunking_bytes(block) for block in reference.blocks)
    series = [Series("theory", (float(theory),)), Series("chunking", (float(chunking),))]
    for name in names:
        series.append(count(name, wrap(name, odd_stack(BLOCKS), OddBlock, mesh), x))
    targets = (Target("flat", "theory", 1.01), Target("rows", "chunking", 1.0))
    against = ("theory", "chunking")
    return [Quantity("traffic", "bytes communicated", "bytes / step", METHOD, tuple(series), against, targets)]


def main() -> None:
    arguments = parse_arguments(__doc__)
    with quiet():
        hand_back(measure(arguments.quick), arguments.json)


if __name__ == "__main__":
    main()
