"""`park` and `resume`: state in host memory and back, of both front-ends and every layout.

On a CPU nothing has to move, which is one of the cases here. In the others the mover is told that everything has to, to
other memory of the same device: what is tested then is all but the device (tests/gpu has that).
"""

from __future__ import annotations

import copy
import gc
import math
import threading
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullshard
from fullshard import PhaseError, memory_use, park, resume
from fullshard.forms import HiddenParameter
from fullshard.shard import Mover, units_of
from fullshard.shard.parking import Parking
from fullshard.torch_private.local_tensor import around_local, plain_tensors
from training import assert_same
from ways import (
    LAYOUTS,
    backward_both,
    error_of,
    gradient_problems,
    inner,
    layers,
    loss_of,
    mine,
    named_error,
    shard,
    some_ways,
    value_problems,
    whole_state,
)


class Net(nn.Module):
    """Two blocks and a last layer, with buffers, and a parameter that is left alone."""

    def __init__(self) -> None:
        super().__init__()
        self.body = layers()
        self.norm = nn.BatchNorm1d(2, dtype=torch.float64)
        self.alone = nn.Parameter(torch.ones(2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.body(x)) * self.alone.detach()


def sharded(way: str, **settings: Any) -> nn.Module:
    model = Net()
    left = {"ignored_params": {model.alone}} if way in LAYOUTS else {"ignored_states": [model.alone]}
    model.norm.eval()
    return shard(model, way, lambda model: list(model.body)[:2], **settings, **left)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.1, eps=1e-3)


class _Forced:
    """The mover takes everything for somewhere else, in this process: until the last rank's end of it."""

    inside, needed = 0, Mover.needed

    def __enter__(self) -> None:
        _Forced.inside += 1
        Mover.needed = lambda mover, storage: True

    def __exit__(self, *_: Any) -> None:
        _Forced.inside -= 1
        if not _Forced.inside:
            Mover.needed = _Forced.needed


def moving(forced: bool) -> Any:
    return _Forced() if forced else nullcontext()


def memory_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[int, torch.UntypedStorage]:
    """By address, the memory of parameters, gradients, buffers and optimizer state: held, so that it is not reused."""
    tensors: list[Any] = [bucket.shard for unit in units_of(model) for bucket in unit.buckets]
    for parameter in model.parameters():
        tensors += [parameter] + ([parameter.grad] if parameter.grad is not None else [])
    tensors += [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    tensors += list(model.buffers())
    plain = [part for tensor in tensors for part in plain_tensors(tensor)]
    return {at: storage for part in plain if (at := (storage := part.untyped_storage()).data_ptr())}


def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Copies of what is to come back: this rank's parts of everything."""
    found: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        found[name] = [part.clone() for part in plain_tensors(parameter.detach())]
        if parameter.grad is not None:
            found[f"{name}.grad"] = [part.clone() for part in plain_tensors(parameter.grad)]
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"{name}.{key}"] = [part.clone() for part in plain_tensors(value)]
    return found


def alike(where: str, got: dict[str, Any], want: dict[str, Any]) -> list[str]:
    if missing := want.keys() - got.keys():  # a load makes state for parameters of which a rank holds nothing
        return [f"{where}: {sorted(missing)}"]
    return [
        f"{where}: {name}"
        for name, parts in want.items()
        if not all(torch.equal(one, other) for one, other in zip(got[name], parts, strict=True))
    ]


@pytest.mark.parametrize("forced", [False, True], ids=["nothing-moves", "all-moves"])
@some_ways
def test_training_goes_on_where_it_was(run_ranks, forced: bool, way: str) -> None:
    assert_same(run_ranks(parked_between_steps, forced, way))


def parked_between_steps(forced: bool, way: str) -> list[str]:
    """With gradients to which others are added, before and after a step; numbers: also tests/property."""
    model, plain = sharded(way), Net()
    plain.norm.eval()
    optimizers = optimizer, _ = optimizer_of(model), optimizer_of(plain)
    objects = [id(parameter) for parameter in model.parameters()]
    problems: list[str] = []
    for step in range(2):
        for part in range(2):
            backward_both(model, plain, 10 * step + part)
            problems += with_rest(model, optimizer, forced, f"step {step}, part {part}")
        problems += gradient_problems(f"step {step}", model, plain)
        for finish in ("step", "zero_grad"):
            for one in optimizers:
                getattr(one, finish)()
            problems += with_rest(model, optimizer, forced, f"after {finish} {step}")
    problems += value_problems("trained", model, plain)
    return problems + ([] if objects == [id(p) for p in model.parameters()] else ["other Parameter objects"])


def with_rest(model: nn.Module, optimizer: torch.optim.Optimizer, forced: bool, where: str) -> list[str]:
    """Park and resume; what differs before, between and after."""
    before, at, use = held(model, optimizer), memory_of(model, optimizer), memory_use(model, optimizer)
    with moving(forced):
        parked = park(model, optimizer)
        between, used = memory_of(model, optimizer), memory_use(model, optimizer)
        problems = alike(f"{where}, parked", held(model, optimizer), before)
        resumed = resume(model, optimizer)
    problems += alike(f"{where}, resumed", held(model, optimizer), before)
    shows = any(parameter.grad is not None for parameter in model.parameters())  # else their memory is given back
    kept = (use.parameters, use.gradients if shows else 0, use.optimizer)
    facts = {
        "other memory while parked": not forced or not at.keys() & between.keys(),
        "other memory when resumed": not forced or not between.keys() & memory_of(model, optimizer).keys(),
        "what moved": bool(parked.moved) == forced and bool(parked.stayed) != forced,
        "what moved back": bool(resumed.moved) == forced and not (forced and resumed.stayed),
        "what is said": forced or "nothing was moved" in str(parked),
        "bytes": kept == (used.parameters, used.gradients, used.optimizer) and used.host == used.total,
    }
    wrong = [what for what, right in facts.items() if not right]
    return problems + ([f"{where}: {wrong}: {parked}, {resumed}, {use} then {used}"] if wrong else [])


@pytest.mark.parametrize("way", ["rows", "originals"])
def test_what_computes_is_refused_while_parked(run_ranks, way: str) -> None:
    assert_same(run_ranks(refused_while_parked, way))


def refused_while_parked(way: str) -> list[str]:
    problems: list[str] = []
    for trained in (False, True):  # before the first forward, too
        model = sharded(way)
        optimizer = optimizer_of(model)
        if trained:
            loss_of(model, mine(0)).backward()
        late = loss_of(model, mine(1)) if trained else None  # its backward comes while the model is parked
        park(model, optimizer)
        tried: dict[str, Any] = {
            "forward": lambda model=model: model(mine(2)),
            "evaluation": lambda model=model: torch.no_grad()(model)(mine(2)),
            "block": lambda model=model: inner(model).body[0](mine(2)),
            "park": lambda model=model: park(model),
        }
        if trained:
            tried["backward"] = late.backward
        if way in LAYOUTS:
            tried["unshard"] = lambda model=model: inner(model).body[0].unshard()
        for name, action in tried.items():
            problems += named_error(error_of(action), "resume", kinds=PhaseError, where=f"{trained} {name}")
        resume(model, optimizer)
        optimizer.zero_grad()
        plain = Net()
        plain.norm.eval()
        backward_both(model, plain, 3)
        problems += gradient_problems(f"{trained}: after it", model, plain)
    return problems


@pytest.mark.parametrize("way", ["rows", "originals"])
def test_saving_and_loading_while_parked(run_ranks, tmp_path: Path, way: str) -> None:
    assert_same(run_ranks(saved_while_parked, str(tmp_path), way))


def saved_while_parked(folder: str, way: str) -> list[str]:
    problems: list[str] = []
    with moving(True):
        model = sharded(way)
        optimizer = optimizer_of(model)
        loss_of(model, mine(0)).backward()
        optimizer.step()
        want, before = whole_state(model), held(model, optimizer)
        park(model, optimizer)
        for name, value in whole_state(model).items():
            problems += [] if torch.equal(value, want[name]) else [f"state_dict: {name}"]
        fullshard.save(folder, model, optimizer, step=1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3)
        fullshard.load(folder, model, optimizer)
        problems += alike("loaded while parked", held(model, optimizer), before)
        resume(model, optimizer)
        problems += alike("resumed", held(model, optimizer), before)
        optimizer.zero_grad()
        loss_of(model, mine(1)).backward()
        optimizer.step()
        other = sharded(way)
        again = optimizer_of(other)
        park(other, again)
        fullshard.load(folder, other, again)  # state that was not there when it was parked
        resume(other, again)
        loss_of(other, mine(1)).backward()
        again.step()
    return problems + alike("went on", held(other, again), held(model, optimizer))


@pytest.mark.parametrize("way", ["wrapper", "rows"])
def test_views_and_copies(run_ranks, way: str) -> None:
    assert_same(run_ranks(views_and_copies, way))


def views_and_copies(way: str) -> list[str]:
    model, plain = sharded(way), Net()
    plain.norm.eval()
    optimizer = torch.optim.Adam(fullshard.optimizer_view(model), lr=0.1, eps=1e-3)
    reference = optimizer_of(plain)
    with moving(True):
        for step in range(3):
            backward_both(model, plain, step)
            park(model, optimizer)
            average = copy.deepcopy(model)  # is parked as well
            resume(model, optimizer)
            for one in (optimizer, reference):
                one.step()
                one.zero_grad()
        problems = value_problems("views", model, plain)
    return problems + named_error(error_of(lambda: average(mine(0))), "resume", where="a copy")


@pytest.mark.parametrize("way", ["rows", "wrapper"])
def test_nothing_is_left_behind(fake_world, way: str) -> None:
    """No tensor is left that shows the old memory: it is given back."""
    fake_world(2)
    gc.collect(), gc.freeze()  # what earlier tests left is looked at no more
    with moving(True):
        model = sharded(way)
        optimizer = optimizer_of(model)
        loss_of(model, mine(0)).backward()
        optimizer.step()
        for action in (park, resume):
            old = memory_of(model, optimizer)
            action(model, optimizer)
            gc.collect()
            now = {place for one in gc.get_objects() if isinstance(one, Tensor) for place in memory_shown_by(one)}
            assert not old.keys() & now, action.__name__
    gc.unfreeze()


def memory_shown_by(tensor: Tensor) -> set[int]:
    """Where the memory of any tensor of this process begins."""
    if isinstance(tensor, HiddenParameter):
        return set()
    places = set()
    for part in plain_tensors(tensor):
        with suppress(RuntimeError):  # of a compiler, left by another test: it has no memory
            places.add(part.untyped_storage().data_ptr())
    return places - {0}


def test_a_view_takes_what_it_is_a_view_of_along() -> None:
    """Else the old memory would be held by it: a tensor keeps alive what it was made a view of."""
    base = torch.arange(8.0)
    view, old = base[2:4], base.untyped_storage()
    with moving(True):
        mover = Mover(torch.device("cpu"))
        mover.move_inside(view)
    assert view.tolist() == [2, 3] and base.tolist() == list(range(8))
    assert {view.untyped_storage().data_ptr(), base.untyped_storage().data_ptr()} - {old.data_ptr()}
    assert view.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
    assert mover.moved == old.nbytes()


def test_wrong_uses_are_named_and_change_nothing(run_ranks) -> None:
    assert_same(run_ranks(wrong_uses))


def wrong_uses() -> list[str]:
    """What tests/errors has not: `park` in other phases, and parts of a model that is parked."""
    model = sharded("flat")
    optimizer = optimizer_of(model)
    problems = named_error(error_of(lambda: park(model, None)), "optimizers", where="none")
    found: list[Any] = []
    handle = model.body.register_forward_hook(lambda *_: found.append(error_of(lambda: park(model))))
    loss_of(model, mine(0)).backward()
    handle.remove()
    problems += named_error(found[0], "between steps", where="in a forward")
    park(model, optimizer)
    problems += named_error(error_of(lambda: resume(model)), "Adam missing", where="missing")
    problems += named_error(error_of(lambda: resume(model.body[0])), "module that was passed to park", where="a part")
    problems += named_error(error_of(lambda: park(model.body[0])), "already parked", where="a part of it")
    resume(model, optimizer)
    optimizer.step()
    return problems


@pytest.mark.parametrize("fails", ["park", "resume"])
@some_ways
def test_memory_that_runs_out_midway(run_ranks, way: str, fails: str) -> None:
    assert_same(run_ranks(moved_again, way, fails))


def moved_again(way: str, fails: str) -> list[str]:
    """At each of the first moves in turn: `resume` restores the model, and it trains on."""
    model, problems = sharded(way), list[str]()
    optimizer = optimizer_of(model)
    loss_of(model, mine(0)).backward()
    optimizer.step()
    for at in range(12):
        want = held(model, optimizer)
        if fails == "resume":
            park(model, optimizer)
        with _Forced(), _Short(at):
            error = error_of(lambda: (park if fails == "park" else resume)(model, optimizer))
        assert isinstance(error, torch.OutOfMemoryError), error
        with _Forced():
            resume(model, optimizer)
        assert not any(type(bucket.home) is Parking for unit in units_of(model) for bucket in unit.buckets)
        problems += alike(f"move {at}", held(model, optimizer), want)
        loss_of(model, mine(0)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=at % 2 == 0)
    return problems


class _Short:
    """Memory runs out in this thread at its move of this number."""

    move, thread = Mover.move, threading.local()

    def __init__(self, at: int) -> None:
        self.at = at

    def __enter__(self) -> None:
        self.thread.left = self.at
        Mover.move = _Short.counted

    def __exit__(self, *_: Any) -> None:
        self.thread.left = math.inf

    @staticmethod
    def counted(mover: Mover, plain: Tensor) -> Tensor:
        left = getattr(_Short.thread, "left", math.inf)
        _Short.thread.left = left - 1
        if left == 0:
            raise torch.OutOfMemoryError("planted")
        return _Short.move(mover, plain)


def test_wrappers_say_where_their_memory_is(run_ranks) -> None:
    """What a DTensor or FlatShard is made into when the memory inside it is on another device; here: on meta.

    That it becomes that, as a Parameter, torch allows between CPUs and accelerators only: tests/gpu.
    """
    assert_same(run_ranks(said_devices))


def said_devices() -> list[str]:
    problems: list[str] = []
    for way in ("rows", "flat"):
        parameter: Any = inner(sharded(way)).body[0][0].weight
        local = parameter._local_tensor
        for device in ("meta", "cpu"):
            parameter._local_tensor = local.to(device)
            made: Any = around_local(parameter)
            facts = (made.device.type, made.shape, made.dtype, made.requires_grad)
            problems += [] if facts == (device, (5, 5), torch.float64, False) else [f"{way}: {facts}"]
        problems += [] if torch.equal(made.to_local(), local) else [f"{way}: other values"]
    return problems
