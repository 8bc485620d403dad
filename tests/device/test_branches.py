"""Which places of the engine that go another way on an accelerator the simulated one has been to."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from test_host_waits import counted_tokens, default, kept_for_tokens, undone
from torch import nn

import fullshard
from fullshard.api.wrapper.instances import warn_of_host
from fullshard.comm import lanes, objects
from fullshard.forms import retire
from fullshard.mesh import axes
from fullshard.optim import owners
from fullshard.shard import Mover, units_of
from fullshard.shard.offload import Home
from simulated import CPU, Stream, by_nccl, simulated

ENGINE = Path(fullshard.__file__).parent
BY_TYPE = {
    # Functions that look at a device's type, and go the CPU's way here: what they decide. None chooses how a step runs.
    "agreement/exchange.py: send": "whether values go by page-locked memory; both are entered",
    "api/park.py: park": "whether memory is page-locked; entered below",
    "api/state_on_disk.py: _why_not": "which parameters' state cannot be in files of the host's",
    "api/wrapper/fsdp.py: _moves_inputs": "whether inputs of a forward are moved",
    "api/wrapper/instances.py: warn_of_host": "a warning; entered below",
    "checkpoint/model.py: save_instance": "where a whole value is kept",
    "checkpoint/optimizer_state.py: _described_state": "whether state is made as it was described",
    "comm/lanes.py: page_lock": "CUDA's own call; entered below",
    "comm/objects.py: run": "who watches a wait, outside of steps; entered below",
    "insight/comparison.py: rows": "which memory a table names",
    "insight/memory.py: _host_bytes": "a report",
    "insight/monitor/monitor.py: __init__": "whose clock is read: tests/test_monitor.py has both",
    "insight/monitor/monitor.py: _as_tokens": "an argument that is refused: tests/test_monitor.py has both",
    "insight/monitor/monitor.py: device_peak_flops": "a report",
    "insight/planner/planner.py: backend": "the backend that a plan is for",
    "insight/planner/planner.py: offloads": "whether there is a device to leave for host memory",
    "insight/planner/planner.py: _optimizer": "whether a plan is for one kernel over many tensors",
    "insight/planner/planner.py: assumed_rates": "the device that a plan is for",
    "insight/planner/rates.py: _seconds": "whether a measured call is waited for",
    "insight/verify/rounding.py: exact": "a report",
    "insight/verify/whole_trial.py: _global_batches": "a report",
    "mesh/axes.py: _device": "which device of its type",
    "optim/clip.py: checked_clipping": "whether a `max_norm` may be read: tests/device/test_host_waits.py",
    "optim/clip.py: on_one_device": "where norms are joined: tests/parity/test_offload.py has both",
    "optim/in_backward.py: _in_host_memory": "which units step beside the backward: all do in a simulation",
    "runtime/out_of_memory.py: _on_device": "which shards an error counts: entered below",
    "shard/offload.py: home_of": "whether there is a home: the simulation gives one",
    "store/source.py: fill": "whether a file is read straight into a tensor",
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
    for trained, offload in ((default, True), (kept_for_tokens, False), (counted_tokens, False), (undone, False)):
        with by_nccl(), simulated(offload) as device:
            model, step = trained()
            step()
            statistics = {"allocated_bytes.all.current": 3 * 2**30, "reserved_bytes.all.current": 5 * 2**30}
            with mock.patch.object(torch.accelerator, "memory_stats", mock.Mock(return_value=statistics)):
                explained = fullshard.explain_memory(model)
            assert "3.0 GiB in optimizer state, activations" in explained and "allocator has 2.0 GiB more" in explained
            target = device.give_to_host(torch.zeros(3), pinned=True)
            (event,) = lanes.copy_to_host([(target, torch.ones(3))], locked=True)  # a snapshot's
            assert target.isnan().all()
            event.synchronize()
            assert target.eq(1).all()
            with mock.patch.object(owners, "reduce_value", ask):  # the host waits for no comparison of what is known
                owners.agree(0, [], dist.group.WORLD, None, "", known=True, groups=[])
        places |= device.asked
    return places


# What those that the simulation goes past do: page-locked memory, CUDA's own calls, graphs, names of backends.


def test_page_locked_memory_is_asked_for_where_copies_arrive() -> None:
    plain = torch.arange(6.0).view(2, 3)[:, 1:]
    with simulated():
        assert lanes.host_buffer(3).is_pinned() and lanes.host_buffer(3).dtype == torch.int64
        for pinned in (False, True):
            home, mover = Home(CPU, CPU, pinned), Mover(CPU, pinned)
            memory = home.empty(2, torch.bfloat16)
            assert memory.is_pinned() is pinned and memory.dtype == torch.bfloat16
            assert home.holds(memory) and home.holds(plain) is not pinned
            moved = mover.move(plain)
            assert moved.is_pinned() is pinned and torch.equal(moved, plain) and moved.stride() == plain.stride()
            assert (mover.moved, mover.stayed) == ((24, 0) if pinned else (0, 24))  # bytes of the whole storage
            assert mover.move(moved) is moved and mover.moved + mover.stayed == 24


class Asked(Exception):
    """What a function was called with."""


def ask(*given: object, **named: object) -> None:
    raise Asked(given, named)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("pin", [False, True])
def test_what_is_parked_is_page_locked_beside_an_accelerator(fake_world: Callable, kind: str, pin: bool) -> None:
    fake_world(1)
    model = fullshard.fully_shard(nn.Linear(2, 2))
    (unit,) = units_of(model)
    object.__setattr__(unit.buckets[0].axes, "device", torch.device(kind))
    with mock.patch("fullshard.api.park.Mover", ask), pytest.raises(Asked) as raised:
        fullshard.park(model, pin_memory=pin)
    assert raised.value.args == ((CPU,), {"pinned": pin and kind == "cuda"})


def test_cuda_alone_page_locks_memory_of_others() -> None:
    runtime = mock.Mock()
    runtime.cudaHostRegister.side_effect = [0, 1]  # success, and an error
    with mock.patch.object(torch.cuda, "cudart", lambda: runtime):
        with mock.patch.object(torch.accelerator, "current_accelerator", lambda **given: torch.device("cuda")):
            assert lanes.page_lock(4096, 8192) and not lanes.page_lock(4096, 8192)
        with mock.patch.object(torch.accelerator, "current_accelerator", lambda **given: torch.device("xpu")):
            assert not lanes.page_lock(4096, 8192)
        lanes.page_unlock(4096)
    portable = 1
    assert runtime.mock_calls == [mock.call.cudaHostRegister(4096, 8192, portable)] * 2 + [
        mock.call.cudaHostUnregister(4096)
    ]


@pytest.mark.parametrize("captured", [None, "compute", "other"])
def test_a_stream_that_is_captured_waits_for_none_and_is_waited_for_by_none(captured: str | None) -> None:
    """A wait for what was queued before the capture would make that a part of the graph: an error of CUDA's."""
    with simulated() as device:
        turns, compute, other = lanes.turns_on(CPU), device.compute, Stream("other", device)
        for stream in (compute, other):
            stream.capturing = stream.name == captured
        with other:
            turns.take()
            turns.give()
        assert other.waited == ([] if captured else [compute])
        assert compute.waited == ([] if captured == "other" else [other])
        turns.take()
        assert len(compute.waited) == (captured != "other") + (captured is None)


@pytest.mark.parametrize(
    ("backend", "kind"),
    [
        ("nccl", "cuda"),
        ("cpu:gloo,cuda:nccl", "cuda"),
        ("undefined", "cuda"),  # torch chose one for every device type
        ("cpu:gloo,cuda:gloo", "cuda"),  # on purpose
        ("gloo", "cpu"),
        ("mpi", "cpu"),
        ("cpu:gloo", "cpu"),
    ],
)
def test_a_group_serves_the_accelerator_if_its_backend_does(backend: str, kind: str) -> None:
    with (
        mock.patch.object(dist, "get_backend", lambda group: backend),
        mock.patch.object(axes, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl"),
        mock.patch.object(torch.accelerator, "is_available", lambda: True),
        mock.patch.object(torch.accelerator, "current_accelerator", lambda: torch.device("cuda")),
    ):
        assert axes.device_type_of(None) == kind
        assert axes.backend_of(None, "cuda") == {"mpi": "mpi", "gloo": "gloo", "cpu:gloo": None}.get(
            backend, "gloo" if backend.endswith("gloo") else "nccl"
        )


@pytest.mark.parametrize("kind", ["cpu", "meta"])
def test_the_host_watches_waits_of_its_own_collectives(fake_world: Callable, kind: str) -> None:
    """Those on a device the device waits for."""
    fake_world(2)
    work, watched = mock.Mock(), mock.Mock()
    with (
        mock.patch.object(objects, "device_of", lambda group: torch.device(kind)),
        mock.patch.object(objects, "Watched", watched),
    ):
        objects._Talk(None, "texts").run(lambda group: work)
    assert (watched.mock_calls, work.mock_calls) == (
        ([mock.call(work), mock.call().wait()], []) if kind == "cpu" else ([], [mock.call.wait()])
    )


def test_a_module_on_the_host_that_computes_elsewhere_is_warned_of() -> None:
    module = nn.Linear(2, 2)
    for kind, ignored, count in (("cpu", (), 0), ("cuda", (), 1), ("cuda", module.parameters(), 0)):
        arguments = mock.Mock(axes=mock.Mock(device=torch.device(kind)), ignored={id(one) for one in ignored})
        with mock.patch("warnings.warn") as warned:
            warn_of_host(module, arguments)
        assert ["its values are copied there" in call.args[0] for call in warned.mock_calls] == [True] * count


def test_a_parameter_tied_to_an_instance_below_is_not_on_the_host() -> None:
    """Whoever looks for parameters on the host meets what is left of it: its values are the instance's below."""
    tied = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)])
    tied[1].weight = tied[0].weight
    arguments: Any = mock.Mock(axes=mock.Mock(device=torch.device("cuda", 0)), ignored=set())
    with pytest.warns(UserWarning, match="on the CPU"):
        warn_of_host(tied, arguments)
    retire(tied[0].weight, "0.weight", nn.Parameter(torch.zeros(2)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_host(tied, arguments)
