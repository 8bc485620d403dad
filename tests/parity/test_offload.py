"""Shards and gradients at a home apart from the compute device: the same bits as without, in every setting.

Both are the host here, with memory of their own and real copies between them; nothing here shows what a GPU does.
"""

from __future__ import annotations

import copy
import importlib
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from test_extensions import train as train_extensions
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import fullshard
from fullshard import Blocks, DivergenceError
from fullshard.shard import units_of
from fullshard.shard.offload import Home, home_of
from fullshard.torch_private.fake_tensors import fake_tensors
from fullshard.torch_private.local_tensor import plain_tensors
from models import EXAMPLES
from quantised import GatheredInt8
from simulated import Stream, by_nccl, simulated
from test_step_in_backward import CLIPS_SOME, differences
from test_tensor_parallel import batch, data_rank, parallel_model
from test_tensor_parallel import train as train_parallel
from training import (
    Options,
    assert_same,
    compare,
    compare_tensors,
    full_gradients,
    full_parameters,
    shard,
    train_sharded,
)
from ways import on_ranks
from wrapped import Wrapping, wrap_example

API, WRAPPER = (
    importlib.import_module("fullshard.api.functional.fully_shard"),
    importlib.import_module("fullshard.api.wrapper.instances"),
)


class Here(threading.local):
    """A rank's own: whether units are made with a home, and what crossed."""

    def __init__(self) -> None:
        self.forced = False
        self.crossings: Counter[str] = Counter()


here = Here()


class LateHome(Home):
    """Gradients arrive only when somebody waits for them, and are garbage before; crossings are counted."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), torch.device("cpu"))
        self.late: list[tuple] = []

    def to_device(self, tensors: list[torch.Tensor], prepare: Callable[..., Any]) -> Any:
        here.crossings["to_device"] += 1

        def prepared(*copies: torch.Tensor) -> Any:
            for copied, tensor in zip(copies, tensors, strict=True):
                for one, other in zip(plain_tensors(copied), plain_tensors(tensor), strict=True):
                    assert not one.numel() or one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr()
            return prepare(*copies)

        return super().to_device(tensors, prepared)

    def bring(self, target, reduced, turns, then=None) -> None:
        here.crossings["bring"] += 1
        assert target.untyped_storage().data_ptr() != reduced.untyped_storage().data_ptr()
        self.late.append((target, reduced.clone(), turns, then))
        target.fill_(float("nan"))

    def settle(self) -> None:
        for crossing in self.late:
            super().bring(*crossing)
        self.late.clear()


def home(policy: object, device: torch.device) -> Home | None:
    return LateHome() if here.forced else home_of(policy, device)


API.home_of = WRAPPER.home_of = home  # for good, and only where `forced`: ranks may be threads of one process


@contextmanager
def forced() -> Iterator[None]:
    """`fully_shard` and the wrapper make units with a home of their own inside."""
    here.crossings.clear()
    here.forced = True
    try:
        yield
    finally:
        here.forced = False


def both(name: str, options: Options) -> list[str]:
    example = EXAMPLES[name]
    want = train_sharded(fullshard, example, options)
    with forced():
        got = train_sharded(fullshard, example, options)
    problems = compare(got, want, 0.0, "the run without offload")
    if not here.crossings["to_device"]:
        problems.append("no shard was copied to the device: the path was not forced")
    if not here.crossings["bring"]:
        problems.append("no gradient was brought home")
    return problems


@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        ("rows", {"clip": "fullshard", "max_norm": 0.05}),
        ("flat", {"precision": "bf16", "micro_batches": 2}),
        (Blocks("row"), {"precision": "bf16_reduce", "micro_batches": 2, "sync": False}),
        ("rows", {"mesh": "hybrid"}),
        ("flat", {"reshard": 2}),
    ],
    ids=str,
)
def test_same_bits(run_ranks, layout, settings):
    world = 4 if {"mesh", "reshard"} & settings.keys() else 2
    assert_same(run_ranks(both, "odd_mlp", Options(layout=layout, steps=2, **settings), world=world))


def crossed() -> list[str]:
    return [] if here.crossings["to_device"] and here.crossings["bring"] else ["the path was not forced"]


def extensions(layout: str, options: dict[str, object]) -> list[str]:
    losses, values = train_extensions(fullshard, options, layout=layout)
    with forced():
        offloaded_losses, offloaded_values = train_extensions(fullshard, options, layout=layout)
    problems = [] if losses == offloaded_losses else [f"losses {offloaded_losses}, not {losses}"]
    return problems + crossed() + compare_tensors("parameter", offloaded_values, values, 0.0)


@pytest.mark.parametrize(
    ("layout", "options"),
    [("rows", {"reshard": False}), ("flat", {"accumulate": True}), ("rows", {"precision": True, "hybrid": True})],
    ids=str,
)
def test_tensor_subclasses(run_ranks, layout, options):
    """Their chunks are copied to the device, each of its tensors, before they say what they send."""
    assert_same(run_ranks(extensions, layout, options, world=4 if "hybrid" in options else 2))


def page_locked(layout: str) -> list[str]:
    """On a simulated device, whose copies from page-locked memory are ordered by streams and events."""
    losses, values = train_extensions(fullshard, {}, layout=layout)
    with by_nccl(), simulated(offload=True):
        offloaded_losses, offloaded_values = train_extensions(fullshard, {}, layout=layout)
    problems = [] if losses == offloaded_losses else [f"losses {offloaded_losses}, not {losses}"]
    return problems + compare_tensors("parameter", offloaded_values, values, 0.0)


@pytest.mark.parametrize("layout", ["rows", "flat"])
@pytest.mark.gloo("processes")
def test_tensor_subclasses_in_page_locked_memory(run_ranks, layout):
    assert_same(run_ranks(page_locked, layout))


KINDS = "plain", "subclass", "tensor parallel"
Order = tuple[list[tuple[str, str]], list[tuple[int, str]], list[str]]


def order_of_a_step(kind: str, offload: bool = True) -> tuple[Order, list[torch.Tensor]]:
    """Of a steady step: what units do; after how many of these one stream waits for another; what the host waits for.

    And the weights after it.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    waits, prepared = [], set()

    def waiting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def wait(stream: Stream, other: Any) -> None:
            waits.append((len(events), f"{stream.name} for {getattr(other, 'stream', other).name}"))
            original(stream, other)

        return mock.patch.object(Stream, name, wait)

    class Told(GatheredInt8):
        @classmethod
        def __tensor_unflatten__(cls, inner, meta, size, stride):
            return cls(inner["values"])

        def fsdp_pre_all_gather(self, mesh, size, stride, module, policy):
            prepared.add(device.current.name)
            return super().fsdp_pre_all_gather(mesh, size, stride, module, policy)

    with by_nccl(), simulated(offload) as device:
        torch.manual_seed(0)
        model: Any = torch.nn.Sequential(*[torch.nn.Linear(8, 8, bias=False) for _ in range(4)])
        if kind == "tensor parallel":
            parallelize_module(model, mesh["tp"], {"*": ColwiseParallel(output_layouts=Replicate())})
        for layer in model:
            if kind == "subclass":
                layer.weight = torch.nn.Parameter(Told(layer.weight.detach()))
            fullshard.fully_shard(layer, mesh=mesh["dp"])
        fullshard.fully_shard(model, mesh=mesh["dp"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            waits.clear(), device.waits.clear()
            with (
                fullshard.record_events() as events,
                waiting("wait_stream", Stream.wait_stream),
                waiting("wait_event", Stream.wait_event),
            ):
                model(torch.ones(2, 8)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        weights = [plain.clone() for parameter in model.parameters() for plain in plain_tensors(parameter)]
    assert prepared == ({"inward" if offload else "compute"} if kind == "subclass" else set())
    return ([(event.verb, event.unit) for event in events], waits, sorted(device.waits)), weights


def orders() -> dict[str, Order]:
    result = {}
    for kind in KINDS:
        result[kind], weights = order_of_a_step(kind)
        _, expected = order_of_a_step(kind, offload=False)
        assert all(map(torch.equal, weights, expected)), kind
    return result


@pytest.mark.gloo("processes")
def test_copies_of_every_kind_are_beside_the_computation(run_ranks):
    """In the same order as those of plain parameters: the compute stream waits for a copy where it uses the unit."""
    for kinds in run_ranks(orders, world=4):
        events, waits, of_host = kinds["plain"]
        assert kinds["subclass"] == kinds["tensor parallel"] == kinds["plain"]
        assert of_host == ["wait for inward by lanes.py: settle"] * 2 + ["wait for outward by lanes.py: settle"]
        copied = [at for at, what in waits if what == "inward for compute"]
        used = [at for at, what in waits if what == "compute for inward"]
        assert len(copied) == len(used) == 2 * 4  # for the forward and the backward of each unit
        assert [events[at] for at in copied] == [event for event in events if event[0] == "gather"]
        assert [events[at - 1] for at in used] == [event for event in events if event[0] == "wait_gather"]


def tensor_parallel(shape: tuple[int, ...]) -> list[str]:
    rank, _ = data_rank(shape)
    results = []
    for enter in (nullcontext, forced):
        with enter():
            model = parallel_model(fullshard, shape)
        norms, values = train_parallel(model, lambda step: batch(step, rank), fullshard.clip_grad_norm_)
        results.append((norms, values))
    (norms, values), (offloaded_norms, offloaded_values) = results
    problems = [] if norms == offloaded_norms else [f"norms {offloaded_norms}, not {norms}"]
    return problems + crossed() + compare_tensors("parameter", offloaded_values, values, 0.0)


@pytest.mark.parametrize("shape", [(2, 2), (2, 1, 2)], ids=str)
def test_tensor_parallel_parameters(run_ranks, shape):
    assert_same(run_ranks(tensor_parallel, shape, world=4))


def stepped_at_home(layout: str, clip: str, threads: int | None) -> list[str]:
    with forced():
        problems = differences("AdamW", layout, CLIPS_SOME[None], False, clip, threads)
    return problems + ([] if here.crossings["bring"] else ["no gradient was brought home"])


@pytest.mark.parametrize("threads", [None, 1])
@pytest.mark.parametrize("clip", ["two passes", "redo"])
@pytest.mark.parametrize("layout", ["rows", "flat"])
@pytest.mark.gloo("processes")
def test_steps_in_the_backward(run_ranks, layout, clip, threads):
    """Of units at home: their gradients have arrived when they step."""
    assert run_ranks(stepped_at_home, layout, clip, threads, world=2) == [[], []]


@on_ranks
def test_deepcopy_and_recovery() -> list[str]:
    example, batch = EXAMPLES["gpt"], EXAMPLES["gpt"].batch(0, 0, torch.float32)
    plain = shard(fullshard, example.make(torch.float32), example, Options(layout="flat"))
    with forced():
        model = shard(fullshard, example.make(torch.float32), example, Options(layout="flat"))

    def fail(grad: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("in mid-backward")

    norm = next(m for m in model.modules() if isinstance(m, torch.nn.LayerNorm))
    handle = norm.register_full_backward_pre_hook(lambda module, grads: fail(grads[0]))
    with pytest.raises(ArithmeticError):
        example.loss(model, batch).backward()
    handle.remove()
    for one in (plain, model):
        one.zero_grad()
        example.loss(one, batch).backward()
    clone = copy.deepcopy(model)
    problems = [f"{n}: copied with a gradient" for n, p in clone.named_parameters() if p.grad is not None]
    example.loss(clone, batch).backward()
    problems += compare_tensors("gradient", full_gradients(model), full_gradients(plain), 0.0)
    problems += compare_tensors("the copy's gradient", full_gradients(clone), full_gradients(plain), 0.0)
    return problems + compare_tensors("parameter", full_parameters(model), full_parameters(plain), 0.0)


def test_who_gets_a_home():
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    assert home_of(fullshard.OffloadPolicy(), gpu) is None
    assert home_of(fullshard.CPUOffloadPolicy(), cpu) is None
    for pin in (True, False):
        home = home_of(fullshard.CPUOffloadPolicy(pin_memory=pin), gpu)
        assert (home.device, home.compute, home.pinned) == (cpu, gpu, pin)


@on_ranks
def test_wrapper() -> list[str]:
    """The wrapper with its parameters at home: the same losses and state as without."""
    example, results = EXAMPLES["gpt"], []
    for enter in (nullcontext, forced):
        with enter():
            model = wrap_example(fullshard, example.make(), example, Wrapping(False))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            for part in range(2):
                with model.no_sync() if part == 0 else nullcontext():
                    example.loss(model, example.batch(2 * step + part, 0)).backward()
            example.loss(model, example.batch(50 + step, 0)).backward()  # adds to what is there
            model.clip_grad_norm_(0.1)
            optimizer.step()
            optimizer.zero_grad()
        state = fullshard.FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"]
        moments = {f"{name}.{key}": value for name, own in state.items() for key, value in own.items()}
        results.append({**model.state_dict(), **moments})
    problems = [] if here.crossings["to_device"] and here.crossings["bring"] else ["the path was not forced"]
    return problems + compare_tensors("state", results[1], results[0], 0.0)


@on_ranks
def test_hooks_and_checkpoints(tmp_path: Path) -> list[str]:
    """Post-accumulate hooks see whole gradients; DCP saves and loads; `to_empty` and `to` keep shards at home."""
    import torch.distributed.checkpoint as dcp

    problems, example = [], EXAMPLES["gpt"]
    with forced():
        model = shard(fullshard, example.make(), example, Options(layout="rows"))
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p, name=name: problems.append(name) if p.grad._local_tensor.isnan().any() else None
        )
    example.loss(model, example.batch(0, 0)).backward()
    before = full_parameters(model)
    dcp.save(model.state_dict(), checkpoint_id=str(tmp_path / "checkpoint"))
    with torch.device("meta"):
        plain = example.make()
    with forced():
        empty = shard(fullshard, plain, example, Options(layout="rows"))
    empty.to_empty(device="cpu")
    state = empty.state_dict()
    dcp.load(state, checkpoint_id=str(tmp_path / "checkpoint"))
    empty.load_state_dict(state)
    problems += compare_tensors("loaded", full_parameters(empty), before, 0.0)
    example.loss(empty, example.batch(0, 0)).backward()
    problems += compare_tensors("gradient", full_gradients(empty), full_gradients(model), 0.0)
    assert not any(unit.buckets[0].home is None for unit in units_of(empty)), "a unit lost its home"
    return problems


@on_ranks
def test_starting_weights_are_compared() -> None:
    """Ranks drew different ones, or one of them loaded some, or wrote to its shards since."""

    def build(loads: bool = False) -> nn.Module:
        torch.manual_seed(dist.get_rank())
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        if loads and dist.get_rank() == 0:
            model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
        for layer in model:
            fullshard.fully_shard(layer)
        return fullshard.fully_shard(model)

    batch = torch.ones(2, 4)
    for home in (forced, partial(simulated, offload=True)):
        with by_nccl(), home():
            said = pytest.warns(UserWarning, match=r"(?s)start from different weights.*parameter: +0\.weight")
            with said if dist.get_rank() == 0 else nullcontext():
                build()(batch)
            with pytest.raises(DivergenceError, match="start from different weights"):
                build(loads=True)(batch)
            model = build()
            with torch.no_grad():
                for parameter in model.parameters() if dist.get_rank() == 0 else ():
                    parameter.zero_()
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                model(batch)


def test_norms_of_gradients_on_the_host_and_on_a_device_are_joined_on_the_device(monkeypatch) -> None:
    """On fake tensors, of which torch stacks some on different devices: real ones it refuses."""
    stack, devices = torch.stack, []

    def noted(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        devices.append({tensor.device.type for tensor in tensors})
        return stack(tensors)

    monkeypatch.setattr(torch, "stack", noted)
    with fake_tensors():
        parameters = [torch.nn.Parameter(torch.ones(4, device=device)) for device in ("cpu", "cuda", "cpu")]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        assert fullshard.clip_grad_norm_(parameters, 1.0).device.type == "cuda"
    assert devices == [{"cuda"}, {"cuda"}]
