"""Which places of the engine that go another way on an accelerator the simulated one has been to."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from simulated import by_nccl, simulated
from test_host_waits import counted_tokens, default, kept_for_tokens

import fullshard
from fullshard.comm import lanes

ENGINE = Path(fullshard.__file__).parent
BY_TYPE = {
    # Functions that look at a device's type, and go the CPU's way here: what they decide. None chooses how a step runs.
    "agreement/late.py: send": "whether values go by page-locked memory; both are entered",
    "api/parking.py: park": "whether memory is page-locked",
    "api/wrapper/fsdp.py: _moves_inputs": "whether inputs of a forward are moved",
    "api/wrapper/setup.py: warn_of_host": "a warning",
    "checkpoint/model.py: save_instance": "where a whole value is kept",
    "comm/lanes.py: page_lock": "CUDA's own call",
    "comm/objects.py: run": "who watches a wait, outside of steps",
    "insight/memory.py: _host_bytes": "a report",
    "insight/verify/apart.py: exact": "a report",
    "insight/verify/generators.py: restore": "random numbers of a report",
    "insight/verify/session.py: _device": "a report",
    "insight/verify/whole.py: _of_all": "a report",
    "integrations/adopted/lightning.py: check": "a refusal",
    "mesh/axes.py: _device": "which device of its type",
    "shard/offload.py: home_of": "whether there is a home: the simulation gives one",
    "store/read.py: _fill": "whether a file is read straight into a tensor",
    "torch_private/sharded_tensor.py: _sharded_tensor": "the text of a device",
}


def functions(asks: Callable[[ast.AST], bool]) -> Iterator[str]:
    """Functions of the engine, "file: name", in which a node is one that `asks`; innermost."""

    def inside(node: ast.AST, name: str) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            own = child.name if isinstance(child, ast.FunctionDef) else name
            if asks(child):
                yield own
            yield from inside(child, own)

    for path in sorted(ENGINE.rglob("*.py")):
        for name in inside(ast.parse(path.read_text()), "the module"):
            yield f"{path.relative_to(ENGINE)}: {name}"


def asks_for_streams(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "has_streams"


def looks_at_type(node: ast.AST) -> bool:
    if not isinstance(node, ast.Compare):
        return False
    sides = [node.left, *node.comparators]
    return any(isinstance(side, ast.Constant) and side.value in ("cpu", "cuda", "mps") for side in sides)


def test_no_other_place_looks_at_a_device_s_type() -> None:
    """A new one is entered by the simulation if it asks `has_streams`; else it is for the table, with a reason."""
    assert set(functions(looks_at_type)) == set(BY_TYPE)


def test_every_place_that_asks_for_streams_is_entered(run_ranks: Callable) -> None:
    assert set().union(*run_ranks(entered)) == set(functions(asks_for_streams))


def entered() -> set[str]:
    """Functions that asked, and were told of an accelerator."""
    places: set[str] = set()
    for trained, offload in ((default, True), (kept_for_tokens, False), (counted_tokens, False)):
        with by_nccl(), simulated(offload) as device:
            _, step = trained()
            step()
            target = device.give_to_host(torch.zeros(3), pinned=True)
            (event,) = lanes.copy_to_host([(target, torch.ones(3))], locked=True)  # a snapshot's
            assert target.isnan().all()
            event.synchronize()
            assert target.eq(1).all()
        places |= device.asked
    return places
