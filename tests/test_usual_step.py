"""The usual way of a step (`runtime/step.py`, `runtime/usual.py`) leaves what the long way leaves, whatever users do.

Both run one program on one rank of a group that moves no data: values mean nothing there, but are the same bit by bit.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from fullshard import (
    Blocks,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    PhaseError,
    fully_shard,
    optimizer_view,
)
from fullshard.runtime import runner, runner_of, step
from fullshard.runtime.reducer import Reducer
from fullshard.runtime.runner import Runner
from fullshard.runtime.unit_settings import UnitSettings
from fullshard.shard import Gradients, Share
from fullshard.watcher import RANK, VERB_BITS
from fullshard.watcher.issued import ROOT
from ways import synced

BLOCKS, WIDE, STEPS = 4, 6, 7


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDE), nn.Linear(WIDE, 5), nn.Linear(5, WIDE)
        self.writes = self.hands_out = False

    def forward(self, x: Tensor, scale: float = 1.0, seen: list[Tensor] | None = None) -> Tensor:
        if self.writes:
            with torch.no_grad():
                self.up.weight.mul_(0.5)
        if self.hands_out:
            return self.down.bias.expand_as(x)
        y = self.down(torch.relu(self.up(self.norm(x))))
        if seen is not None:
            seen.append(y.detach().sum())
        return x + scale * y


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks, self.head = (
            nn.Linear(WIDE, WIDE),
            nn.ModuleList(Block() for _ in range(BLOCKS)),
            nn.Linear(WIDE, 3),
        )
        self.order = list(range(BLOCKS))
        self.run: Callable[[nn.Module, Tensor], Tensor] = lambda block, x: block(x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for index in self.order:
            x = self.run(self.blocks[index], x)
        return self.head(x)


def by_layout(**how: Any) -> Callable[[Net], nn.Module]:
    def shard(net: Net) -> nn.Module:
        for block in net.blocks:
            fully_shard(block, **how)
        return fully_shard(net, **how)

    return shard


def replicated(net: Net) -> nn.Module:
    return by_layout(mesh=init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "fsdp")))(net)


def frozen_in_part(net: Net) -> Net:
    """As with low-rank adapters: two buckets in each unit."""
    for block in net.blocks:
        block.up.requires_grad_(False)
    return net


def one_is_different(net: Net) -> nn.Module:
    """Units that go the usual way, and in their midst one that stays gathered, and one of two modules."""
    first, second, third, last = net.blocks
    fully_shard(net.first, reshard_after_forward=False)
    for unit in (first, [second, third], last):
        fully_shard(unit)
    return fully_shard(net)


def wrapped(**how: Any) -> Callable[[Net], nn.Module]:
    return lambda net: FullyShardedDataParallel(net, auto_wrap_policy={Block}, **how)


LOW = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
WAYS: dict[str, Callable[[Net], nn.Module]] = {
    "rows": by_layout(),
    "flat": by_layout(layout="flat"),
    "blocks": by_layout(layout=Blocks("row")),
    "owner": by_layout(layout="owner"),
    "two ahead": by_layout(prefetch=2),
    "bf16": by_layout(mp_policy=MixedPrecisionPolicy(**LOW)),
    "wrapper": wrapped(),
    "originals": wrapped(use_orig_params=True),
    "originals, bf16": wrapped(use_orig_params=True, mixed_precision=MixedPrecision(**LOW)),
    "one is different": one_is_different,
    "kept after forward": by_layout(reshard_after_forward=False),
    "frozen in part": lambda net: by_layout()(frozen_in_part(net)),
    "replicated": replicated,
}


class Program:
    """A training whose steps users disturb in one way or another; what can be seen of it is noted in `seen`."""

    def __init__(self, way: str) -> None:
        torch.manual_seed(0)
        self.net = Net()
        self.blocks: list[Any] = list(self.net.blocks)
        self.model = WAYS[way](self.net)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.seen: list[Any] = []

    def step(self, number: int, loss: Callable[[Tensor], Tensor] = lambda y: y.float().pow(2).mean()) -> None:
        torch.manual_seed(number)
        value = loss(self.model(torch.randn(3, WIDE)))
        value.backward()
        self.note(value)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def note(self, value: Tensor) -> None:
        grads = [None if p.grad is None else inside(p.grad).clone() for p in self.model.parameters()]
        self.seen.append((value.detach().clone(), grads, [inside(p.detach()).clone() for p in self.model.parameters()]))


def inside(tensor: Tensor) -> Tensor:
    return (
        tensor.to_local()
        if hasattr(tensor, "to_local")
        else torch.Tensor.detach(getattr(tensor, "_local_tensor", tensor))
    )


PROGRAMS: dict[str, Callable[[Program, int], None]] = {}


def program(act: Callable[[Program, int], None]) -> Callable[[Program, int], None]:
    PROGRAMS[act.__name__.replace("_", " ")] = act
    return act


@program
def undisturbed(run: Program, number: int) -> None:
    run.step(number)


@program
def gradients_are_added_to(run: Program, number: int) -> None:
    run.model(torch.ones(2, WIDE)).sum().backward()
    run.step(number)


@program
def several_forwards_before_one_backward(run: Program, number: int) -> None:
    x = torch.ones(2, WIDE)
    (run.model(x).sum() + run.model(2 * x).sum()).backward()
    run.step(number)


@program
def evaluation_between_steps(run: Program, number: int) -> None:
    with torch.no_grad():
        run.seen.append(run.model(torch.ones(2, WIDE)))
    run.step(number)


@program
def evaluations(run: Program, number: int) -> None:
    """Several in a row, in both modes, one of which raises, writes, or builds a graph within."""
    for mode in (torch.no_grad, torch.inference_mode, torch.no_grad):
        with mode():
            run.seen.append(run.model(torch.ones(2, WIDE)))
            run.seen.append([block.up.weight.shape for block in run.blocks])
    if number == 3:
        hook = run.net.blocks[2].register_forward_pre_hook(planted)
        with torch.no_grad(), contextlib.suppress(ZeroDivisionError):
            run.model(torch.ones(2, WIDE))
        hook.remove()
    if number == 4:
        run.blocks[1].writes = True
        with torch.no_grad(), pytest.raises(PhaseError, match=r"up\.weight"):
            run.model(torch.ones(2, WIDE))
        run.blocks[1].writes = False
    if number == 5:
        run.net.run = lambda block, x: with_graph(block, x) if block is run.net.blocks[1] else block(x)
        with torch.no_grad():
            run.seen.append(run.model(torch.ones(2, WIDE)))
        run.net.run = lambda block, x: block(x)
    run.step(number)


@torch.enable_grad()
def with_graph(block: nn.Module, x: Tensor) -> Tensor:
    return block(x)


@program
def part_of_a_forward_builds_no_graph(run: Program, number: int) -> None:
    def apart(block: nn.Module, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(block is not run.net.blocks[0]):
            return block(x)

    if number > 2:
        run.net.run = apart
    run.step(number)


@program
def a_forward_without_backward(run: Program, number: int) -> None:
    run.model(torch.ones(2, WIDE))
    run.step(number)


@program
def a_block_raises(run: Program, number: int) -> None:
    if number == 4:
        hook = run.net.blocks[2].register_forward_pre_hook(planted)
        with contextlib.suppress(ZeroDivisionError):
            run.model(torch.ones(2, WIDE))
        hook.remove()
    run.step(number)


@program
def a_forward_writes_to_its_weight(run: Program, number: int) -> None:
    run.blocks[2].writes = number == 4
    if number == 4:
        with pytest.raises(PhaseError, match=r"up\.weight") as error:
            run.model(torch.ones(2, WIDE))
        run.seen.append(str(error.value))
    else:
        run.step(number)


@program
def a_backward_raises(run: Program, number: int) -> None:
    if number == 4:
        x = torch.ones(2, WIDE)
        hook = run.net.blocks[1].register_forward_hook(lambda m, a, y: y.register_hook(planted) and None)
        with contextlib.suppress(ZeroDivisionError):
            run.model(x).sum().backward()
        hook.remove()
        run.optimizer.zero_grad()
    run.step(number)


def planted(*_: Any) -> None:
    raise ZeroDivisionError


@program
def blocks_are_recomputed(run: Program, number: int) -> None:
    if number == 3:
        run.net.run = lambda block, x: checkpoint(block, x, use_reentrant=False)
    run.step(number)


@program
def another_order(run: Program, number: int) -> None:
    run.net.order = [0, 1, 2, 3] if number != 4 else [0, 2, 1, 3]
    run.step(number)


@program
def a_block_twice(run: Program, number: int) -> None:
    run.net.order = [0, 1, 1, 2, 3] if number > 3 else [0, 1, 2, 3]
    run.step(number)


@program
def other_arguments(run: Program, number: int) -> None:
    found: list[Tensor] = []
    if number > 3:
        run.net.run = lambda block, x: block(x, scale=0.5, seen=found)
    run.step(number)
    run.seen.append(list(found))


@program
def frozen_and_not(run: Program, number: int) -> None:
    run.net.blocks[1].requires_grad_(number not in (4, 5))
    run.step(number)


@program
def a_gradient_is_held(run: Program, number: int) -> None:
    run.step(number)
    run.model(torch.ones(2, WIDE)).sum().backward()
    run.seen.append([inside(p.grad) for p in run.model.parameters() if p.grad is not None])
    run.optimizer.zero_grad()


@program
def a_hook_on_a_parameter(run: Program, number: int) -> None:
    if number == 3:
        for parameter in filter(lambda p: p.requires_grad, run.model.parameters()):
            parameter.register_post_accumulate_grad_hook(lambda p: run.seen.append(inside(p.grad).clone()))
    run.step(number)


@program
def gradients_are_assigned_before_a_backward(run: Program, number: int) -> None:
    def assign(y: Tensor) -> Tensor:
        for parameter in run.model.parameters() if number == 4 else ():
            parameter.grad = torch.full_like(parameter, number) if parameter.requires_grad else None
        return y.float().pow(2).mean()

    run.step(number, assign)


@program
def settings_are_switched(run: Program, number: int) -> None:
    for block in run.blocks if hasattr(run.model, "set_reshard_after_forward") and number > 2 else ():
        block.set_reshard_after_forward(number != 4)
    with synced(run.model, number % 2 == 0):
        run.model(torch.ones(2, WIDE)).sum().backward()
    run.step(number)


@program
def blocks_are_frozen_one_by_one(run: Program, number: int) -> None:
    run.net.blocks[number % BLOCKS].up.requires_grad_(number > 3)
    run.step(number)


@program
def an_optimizer_of_views(run: Program, number: int) -> None:
    """In place of the one of parameters; it goes away with its views, and another comes."""
    if number in (0, 4) and not any("_flat_param" in name for name, _ in run.model.named_parameters()):
        run.optimizer = None
        run.optimizer = torch.optim.AdamW(optimizer_view(run.model), lr=1e-2)
    run.step(number)


@program
def detached_between_blocks(run: Program, number: int) -> None:
    run.net.run = lambda block, x: block(x.detach()) if block is run.net.blocks[2] and number == 4 else block(x)
    run.step(number)


@program
def the_loss_leaves_blocks_out(run: Program, number: int) -> None:
    run.step(number, (lambda y: y.float().sum() * 0 + 1) if number == 4 else lambda y: y.float().pow(2).mean())


@program
def weights_change_between_steps(run: Program, number: int) -> None:
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.mul_(0.99)
    run.step(number)


@program
def a_block_returns_its_own_weight(run: Program, number: int) -> None:
    run.blocks[1].hands_out = number > 3
    run.step(number)


@program
def events_are_recorded(run: Program, number: int) -> None:
    from fullshard import record_events

    with record_events() as events:
        run.step(number)
    run.seen.append([(event.verb, event.unit, event.nbytes, event.live) for event in events])


def finished(way: str, act: Callable[[Program, int], None]) -> tuple[list[Any], list[int], list[int]]:
    RANK.log.clear()
    run = Program(way)
    for number in range(STEPS):
        act(run, number)
    root: Any = root_of(run.model)
    log = [word % (ROOT << VERB_BITS) for word in RANK.log]  # without turns, and the number of the root
    return run.seen, [root.ledger.peak, root.ledger.gathered, root.ledger.reducing], log


def root_of(model: nn.Module) -> Any:
    found = runner_of(model)
    assert found is not None
    return found.root


@pytest.fixture
def long_way(monkeypatch: pytest.MonkeyPatch) -> Callable[[], contextlib.AbstractContextManager[None]]:
    @contextlib.contextmanager
    def forced() -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setattr(runner, "plan_usual_step", lambda one: None)
            yield

    return forced


@pytest.mark.parametrize("act", PROGRAMS)
@pytest.mark.parametrize("way", WAYS)
def test_both_ways_leave_the_same(fake_world: Any, long_way: Any, way: str, act: str) -> None:
    fake_world(6)
    with long_way():
        expected = finished(way, PROGRAMS[act])
    found = finished(way, PROGRAMS[act])
    assert_equal(found[0], expected[0])
    assert found[1:] == expected[1:]


def assert_equal(found: Any, expected: Any) -> None:
    if isinstance(expected, Tensor):
        assert torch.equal(found, expected)
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)
    else:
        assert found == expected


@pytest.mark.parametrize("way", [way for way in WAYS if way != "one is different"])
def test_a_steady_step_goes_the_usual_way(fake_world: Any, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Every unit in every moment: else this file compares the long way with itself."""
    fake_world(6)
    long_ways, counted = Counter[str](), Counter[str]()
    for name in ("before_forward", "after_forward", "before_backward", "after_backward"):
        monkeypatch.setattr(Runner, name, counting(getattr(Runner, name), long_ways))
    monkeypatch.setattr(step, "open_unit", counting(step.open_unit, counted))
    monkeypatch.setattr(Reducer, "_close", counting(Reducer._close, long_ways))
    monkeypatch.setattr(Gradients, "replicate", counting(Gradients.replicate, counted))
    run = Program(way)
    for number in range(3):
        run.step(number)
    assert long_ways.total()  # in the first steps
    long_ways.clear()
    counted.clear()
    run.step(3)
    assert not long_ways.total()
    assert counted["open_unit"] == 1 + 2 * BLOCKS - (BLOCKS if way == "kept after forward" else 0)
    assert counted["replicate"] == (BLOCKS + 1 if way == "replicated" else 0)
    if way == "kept after forward":  # also after an evaluation, so that the next passes have nothing to gather
        return
    for mode in (torch.no_grad, torch.inference_mode):
        for _ in range(2):  # the first pass of a kind is compared
            long_ways.clear()
            counted.clear()
            with mode():
                run.model(torch.ones(2, WIDE))
        assert counted["open_unit"] == 1 + BLOCKS
        assert not long_ways.total()
    run.step(4)
    assert not long_ways.total()


def test_reductions_are_usual_again_after_a_change(fake_world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that stays: the step after it plans them anew."""
    fake_world(2)
    counted = Counter[str]()
    monkeypatch.setattr(Reducer, "_close", counting(Reducer._close, counted))
    run = Program("rows")
    model: Any = run.model
    run.step(0)
    for change in (lambda: model.set_reduce_scatter_max_input_buffers(3), lambda: optimizer_view(model)):
        change()
        run.step(1)
        assert counted.total()
        counted.clear()
        run.step(2)
        assert not counted.total()


def test_settings_that_come_back_are_the_same_objects(fake_world: Any) -> None:
    """What was planned under them holds."""
    fake_world(3)
    settings = settings_of(Program("rows"))
    off = settings.with_changes({"reduce_sync": False, "reduce_all_reduce": False})
    assert (off.reduce.sync, off.reduce.all_reduce) == (False, False)
    assert settings.with_changes({"reduce_sync": True, "reduce_all_reduce": True}) is settings
    for _ in range(3):
        assert off.with_changes({"reduce_sync": True, "reduce_all_reduce": True}) is settings
        assert settings.with_changes({"reduce_sync": False, "reduce_all_reduce": False}) is off
    found = settings
    for _ in range(3):  # there and back by another way, as pipelines do
        for name, value in itertools.product(("reshard_after_backward", "reduce_sync"), (False, True)):
            found = found.with_changes({name: value})
        for name, value in (("reshard_after_backward", False), ("reduce_sync", False)):
            found = found.with_changes({name: value})
        for name, value in (("reshard_after_backward", True), ("reduce_sync", True)):
            found = found.with_changes({name: value})
        assert found is settings
        assert len(settings._family) == 5
    kept = off.with_changes({"reshard_after_forward": False})
    assert kept.reshard_after_forward is False and kept.reduce is off.reduce
    assert kept.with_changes({"reshard_after_forward": off.reshard_after_forward}) is off
    doubled = off.with_changes({"reduce_divide_factor": 2.0})
    assert doubled.reduce.divide_factor == 2.0
    assert doubled.with_changes({"reduce_divide_factor": None}) == off
    shared = off.with_changes({"share": Share()})
    assert shared.with_changes({"share": None}) == off


def settings_of(run: Program) -> UnitSettings:
    found = runner_of(run.blocks[0])
    assert found is not None
    return found.settings


def counting(method: Any, counted: Counter[str]) -> Any:
    def called(*given: Any) -> Any:
        counted[method.__name__] += 1
        return method(*given)

    return called
