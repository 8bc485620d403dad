"""What the engine does in a step and what it holds meanwhile, from its own events and from its storages.

The model is eight equal blocks and a small root, and the batch is tiny: gathered units outweigh activations,
and a unit too many alive is seen at once.
"""

from __future__ import annotations

import gc
from collections import Counter
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fullshard
from fullshard import fully_shard
from fullshard.events import Ledger
from training import LAYOUTS, mesh_of

BLOCKS, WIDE = 8, 64
BLOCK_BYTES = 4 * (2 * WIDE * WIDE + 2 * WIDE)  # fp32, whole
ROOT_BYTES = 4 * 3 * WIDE
LARGE = 4096  # bytes: every weight of a block is larger, every bias, the root's weight and every activation smaller
both_layouts = pytest.mark.parametrize("layout", LAYOUTS)


class Wide(nn.Module):
    """Two square layers with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDE, WIDE)
        self.down = nn.Linear(WIDE, WIDE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Tower(nn.Module):
    """Blocks, and a row of weights in the root."""

    def __init__(self, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Wide() for _ in range(blocks))
        self.out = nn.Linear(WIDE, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def tower(layout: str, **settings: object) -> Tower:
    torch.manual_seed(0)
    model = Tower()
    for unit in [*model.blocks, model]:
        fully_shard(unit, layout=layout, **settings)
    return model


def step(model: nn.Module) -> None:
    model(torch.ones(1, WIDE)).square().sum().backward()


@dataclass
class Seen:
    """What one rank saw in one step, in plain data."""

    verbs: list[tuple[str, str, int]]  # verb, unit, bytes
    live: list[int]  # bytes that come and go, at each event, as the engine counts them
    uses: list[dict[str, int]] = field(default_factory=list)  # memory_use at each event
    stored: list[int] = field(default_factory=list)  # bytes of this model's large storages at each event
    after: dict[str, int] = field(default_factory=dict)  # memory_use when the step was over

    def order(self, *verbs: str) -> list[tuple[str, str]]:
        return [(verb, unit) for verb, unit, _ in self.verbs if verb in verbs]

    def count(self, verb: str) -> Counter[str]:
        return Counter(unit for kind, unit, _ in self.verbs if kind == verb)


MEMORY_FIELDS = ("parameters", "gradients", "gathered", "reducing", "peak_transient", "total")


def memory(model: nn.Module) -> dict[str, int]:
    use = fullshard.memory_use(model)
    return {name: getattr(use, name) for name in MEMORY_FIELDS}


def watch(layout: str, settings: dict[str, object], steps_before: int = 2) -> Seen:
    """A step of a model that has taken some, with everything recorded."""
    gc.freeze()  # what earlier tests left is looked at no more
    model = tower(layout, **settings)
    for _ in range(steps_before):
        step(model)
        model.zero_grad()
    uses: list[dict[str, int]] = []
    stored: list[int] = []

    def look(event: fullshard.Event) -> None:
        uses.append(memory(model))
        stored.append(storage_bytes())

    with fullshard.record_events(look) as events:
        step(model)
    assert {event.rank for event in events} == {dist.get_rank()}
    assert [event.time for event in events] == sorted(event.time for event in events)
    verbs = [(event.verb, event.unit, event.nbytes) for event in events]
    return Seen(verbs, [event.live for event in events], uses, stored, memory(model))


def storage_bytes() -> int:
    """Bytes of every storage made since `gc.freeze()` that a tensor refers to; each once, and none below LARGE."""
    sizes: dict[int, int] = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, nn.Parameter):
            for tensor in (thing, thing.grad if thing.is_leaf else None):
                if type(tensor) in (torch.Tensor, nn.Parameter):
                    storage = tensor.untyped_storage()
                    sizes[storage._cdata] = storage.nbytes()
    return sum(nbytes for nbytes in sizes.values() if nbytes >= LARGE)


SEEN: dict[object, Seen] = {}


@pytest.fixture
def seen(fake_world):
    """A watched step per layout and settings, of one of 2 ranks whose collectives move no data; each run once."""

    def get(layout: str, **settings: object) -> Seen:
        key = layout, tuple(sorted(settings.items()))
        if key not in SEEN:
            fake_world(2)
            SEEN[key] = watch(layout, settings)
        return SEEN[key]

    return get


ROOT = "(root)"
UNITS = [ROOT, *(f"blocks.{index}" for index in range(BLOCKS))]


@both_layouts
def test_two_gathers_and_one_reduce_per_unit(seen, layout):
    """The root is gathered once: by default it is kept from forward to backward."""
    step = seen(layout)
    assert step.count("gather") == {unit: 1 if unit == ROOT else 2 for unit in UNITS}
    assert step.count("reduce") == dict.fromkeys(UNITS, 1)
    assert step.count("free") == step.count("gather")


def test_one_gather_per_unit_when_kept(seen):
    assert seen("rows", reshard_after_forward=False).count("gather") == dict.fromkeys(UNITS, 1)


@both_layouts
def test_bytes_of_each_collective(seen, layout):
    """Buffers hold a unit once, and at most 16 bytes a rank of padding: these sizes divide."""
    wanted = {unit: ROOT_BYTES if unit == ROOT else BLOCK_BYTES for unit in UNITS}
    for verb, unit, nbytes in seen(layout).verbs:
        if verb in ("gather", "reduce"):
            assert wanted[unit] <= nbytes <= wanted[unit] + 2 * 16 + ROOT_BYTES * (unit == ROOT), (verb, unit)


def test_bytes_are_those_that_are_sent(fake_world):
    """In 8 bits a quarter of float32, and a scale for each block; slices kept by a reshard are gathered as they are."""
    fake_world(4)
    low = dict.fromkeys(("gather_dtype", "scatter_dtype", "all_reduce_dtype"), torch.int8)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    whole = 4 * 256 * 257
    for how in ({"reshard_after_forward": 2}, {"mesh": mesh}):
        model = nn.Sequential(nn.Linear(256, 256))
        fully_shard(model[0], mp_policy=fullshard.MixedPrecisionPolicy(**low), **how)
        fully_shard(model, mp_policy=fullshard.MixedPrecisionPolicy(**low))
        with fullshard.record_events() as events:
            model(torch.ones(1, 256)).sum().backward()
        gathers, frees, reduces, reduced, between = (
            [event.nbytes for event in events if event.verb == verb and event.unit == "0"]
            for verb in ("gather", "free", "reduce", "reduced", "all_reduce")
        )
        small = reduces[0]
        assert whole / 4 < small < whole / 3.9 and reduced == [small]
        assert gathers == frees == [small, whole if "mesh" not in how else small]
        assert [nbytes // 100 for nbytes in between] == ([] if "mesh" not in how else [small // 200])


@both_layouts
def test_order_of_events(seen, layout):
    """Gathered before it may be used, freed after; reduced once its gather in backward is over."""
    step = seen(layout)
    state = dict.fromkeys(UNITS, "free")
    follows = {"gather": ("free",), "gathered": ("gather",), "free": ("gathered",)}
    for verb, unit in step.order(*follows):
        assert state[unit] in follows[verb], f"{verb} of {unit!r} after {state[unit]}"
        state[unit] = verb
    assert set(state.values()) == {"free"}
    reduced = [unit for _, unit in step.order("reduce")]
    assert reduced == [*reversed(UNITS[1:]), ROOT]
    for unit in UNITS:
        own = [verb for verb, name, _ in step.verbs if name == unit]
        assert own.index("reduce") > len(own) - 1 - own[::-1].index("gathered")


@both_layouts
def test_prefetch_follows_the_schedule(seen, layout):
    """After the first step each unit's gather is issued before the unit ahead of it is freed, both ways."""
    order = seen(layout).order("gather", "free")
    for first, second in [(f"blocks.{i}", f"blocks.{i + 1}") for i in range(BLOCKS - 1)]:
        assert order.index(("gather", second)) < order.index(("free", first)), f"forward: {second} came late"
        late = len(order) - 1 - order[::-1].index(("gather", first))
        assert late < len(order) - 1 - order[::-1].index(("free", second)), f"backward: {first} came late"


def test_no_prefetch_when_set_to_zero(seen):
    """Then a unit's gather is issued when the unit is needed, after the one before was freed."""
    order = [verb for verb, unit in seen("rows", prefetch=0).order("gather", "free") if unit != ROOT]
    assert order[: 2 * BLOCKS] == ["gather", "free"] * BLOCKS


@both_layouts
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_gathered_units_in_flight_are_bounded(seen, layout, prefetch):
    """At most prefetch + 1 blocks are alive at once, besides the kept root, by events and by memory_use."""
    step = seen(layout, prefetch=prefetch)
    alive: set[str] = set()
    for verb, unit in step.order("gather", "free"):
        (alive.add if verb == "gather" else alive.discard)(unit)
        assert len(alive - {ROOT}) <= prefetch + 1, sorted(alive)
    units = prefetch + 1 if layout == "flat" else max(prefetch + 1, 2)  # rows: a unit and its copy-out
    limit = ROOT_BYTES + units * BLOCK_BYTES + 64 * (prefetch + 2)
    assert max(use["gathered"] for use in step.uses) <= limit


@both_layouts
def test_memory_in_a_step(seen, layout):
    """At each event: the shard, the kept root, two gathered units, the gradients in reduction; nothing else.

    A unit's gradients are there once as autograd made them, once as they are sent, and a rows unit's once on
    the way; a second unit's may come while the first one's are awaited.
    """
    step = seen(layout)
    shard = sum_of_shards()
    for (verb, unit, _), use, live in zip(step.verbs, step.uses, step.live, strict=True):
        where = f"at {verb} of {unit!r}: {use}, live {live}"
        assert use["parameters"] <= shard, where
        assert use["gradients"] <= shard, where
        assert use["gathered"] <= ROOT_BYTES + 2 * BLOCK_BYTES + 256, where
        assert use["reducing"] <= 3 * BLOCK_BYTES + ROOT_BYTES, where
        parts = ("parameters", "gradients", "gathered", "reducing")
        assert use["total"] >= sum(use[part] for part in parts), where
        assert live <= use["peak_transient"], where


@both_layouts
def test_nothing_is_left_after_a_step(seen, layout):
    after = seen(layout).after
    assert after["gathered"] == 0
    assert after["reducing"] == 0
    assert after["parameters"] >= sum_of_parameters() / 2
    assert after["gradients"] == after["parameters"]
    assert after["total"] == after["parameters"] + after["gradients"]


@both_layouts
def test_storages_at_each_event(seen, layout):
    """Counted without the engine: the shard and its gradients so far, and of whole units no more than five.

    Those are two gathered, one sent in reduction, its sum coming back, and the next one's gradients as autograd makes
    them. The engine's own account may only miss the last two: how long a sum is on its way is up to the machine.
    """
    step = seen(layout)
    reduced = 0
    for (verb, unit, nbytes), live, stored in zip(step.verbs, step.live, step.stored, strict=True):
        reduced += nbytes // 2 if verb == "reduce" else 0
        held = BLOCKS * BLOCK_BYTES // 2 + reduced
        where = f"at {verb} of {unit!r}: {stored} bytes stored, {held} of them sharded, live {live}"
        assert stored <= held + 5 * BLOCK_BYTES + LARGE, where
        assert -LARGE <= stored - held - live <= 2 * BLOCK_BYTES, where


def sum_of_parameters() -> int:
    return BLOCKS * BLOCK_BYTES + ROOT_BYTES


def sum_of_shards() -> int:
    """The bytes that one of two ranks holds, with 16 bytes of padding a parameter allowed."""
    return sum_of_parameters() // 2 + 16 * (4 * BLOCKS + 1) + 4 * WIDE  # a root of three rows: two and one


def test_hybrid_mesh_reduces_over_both_axes(fake_world):
    fake_world(4)
    model = tower("rows", mesh=mesh_of("hybrid"))
    step(model)
    with fullshard.record_events() as events:
        step(model)
    for verb in ("reduce", "all_reduce"):
        assert Counter(event.unit for event in events if event.verb == verb) == dict.fromkeys(UNITS, 1)


@pytest.mark.parametrize("shards", [2, 4])
def test_replicas_reduce_as_many_slices_at_once_as_there_are_shards(fake_world, shards):
    """Between machines the all-reduces of several units may be under way; the memory is that of the buffer before."""
    fake_world(2 * shards)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, shards), mesh_dim_names=("replicate", "shard"))
    model = tower("flat", mesh=mesh)
    for _ in range(2):  # the second one adds to gradients that are there
        with fullshard.record_events() as events:
            step(model)
        under_way, most = {}, 0
        for event in events:
            if event.verb == "all_reduce":
                under_way[event.unit] = event.nbytes
                most = max(most, len(under_way))
                assert sum(under_way.values()) <= BLOCK_BYTES + max(under_way.values())  # the last one, that it begins
            elif event.verb == "reduced":
                del under_way[event.unit]
        assert most == shards + 1 and not under_way


def test_nothing_is_reduced_without_sync(fake_world):
    fake_world(2)
    model = tower("flat")
    step(model)
    for sync, count in ((False, 0), (True, len(UNITS))):
        model.set_requires_gradient_sync(sync)
        with fullshard.record_events() as events:
            step(model)
        assert sum(event.verb == "reduce" for event in events) == count


def test_a_ledger_has_the_sums_of_its_changes_and_their_highest():
    ledger = Ledger(10, 5)
    ledger.gather(30)
    ledger.reduce(7)
    ledger.gather(-35)
    assert (ledger.gathered, ledger.reducing, ledger.live, ledger.peak) == (5, 12, 17, 52)
    ledger.settle()
    assert not ledger.changes and not ledger.reductions
    assert (ledger.gathered, ledger.reducing, ledger.live, ledger.peak) == (5, 12, 17, 52)
    ledger.restart_peak()
    ledger.reduce(-12)
    assert (ledger.reducing, ledger.live, ledger.peak) == (0, 5, 17)
    other = Ledger(1, 2)
    ledger.take_over(other)
    ledger.take_over(ledger)
    assert (ledger.gathered, ledger.reducing) == (6, 2)


def test_a_ledger_without_passes_does_not_grow():
    ledger = Ledger()
    for _ in range(20_000):
        ledger.gather(1)
        ledger.gather(-1)
    assert len(ledger.changes) < 5_000
    assert (ledger.live, ledger.peak) == (0, 1)
