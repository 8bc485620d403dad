"""`optimizer_state_on_host`: the same numbers; state is page-locked between steps, and few units' on the device."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import fullshard
from fullshard.comm import Lanes
from fullshard.optim.state_file import elementwise
from simulated import Device, by_nccl, simulated
from test_state_on_disk import parts
from test_step_in_backward import loss_of, sharded

pytestmark = pytest.mark.gloo("tests make their own device")

MAKES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01, amsgrad=True),
    "AdamW, fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.5),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=0.01),
    "Muon": lambda params: fullshard.Muon([p for p in params if p.ndim == 2], lr=0.01),
}
LAYOUTS: dict[str, Callable[[nn.Module], Any]] = {
    "rows": lambda model: model.parameters(),
    "flat": lambda model: model.parameters(),
    "view": fullshard.optimizer_view,
}


def made(name: str, layout: str) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = sharded("rows" if layout == "view" else layout)
    return model, MAKES[name](list(LAYOUTS[layout](model)))


def backward(model: nn.Module, step: int) -> torch.Tensor:
    loss = loss_of(model, step)
    loss.backward()
    return loss


def state_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [plain for p, state in optimizer.state.items() for _, plain in elementwise(p, state)]


def on_host(device: Device, optimizer: torch.optim.Optimizer) -> list[bool]:
    return [device.is_pinned(plain.untyped_storage()) for plain in state_of(optimizer)]


def differences(name: str, layout: str, way: str) -> list[str]:
    """Of six steps, with state on the host from before the first or the third to the fifth, and on the device."""
    results, problems = [], []
    inside, max_norm = way.startswith("inside"), 1.0 if way == "inside, clipped" else None
    with by_nccl(), simulated() as device:
        for hosted in (True, False):
            model, optimizer = made(name, layout)
            state: Any = fullshard.optimizer_state_on_host(optimizer) if hosted and "later" not in way else None
            steps = fullshard.step_in_backward(optimizer, max_norm=max_norm) if inside else None
            for step in range(6):
                if hosted and step == 2 and state is None:
                    state = fullshard.optimizer_state_on_host(optimizer)
                if hosted and step == 5:
                    enough = state.nbytes >= sum(plain.nbytes for plain in state_of(optimizer)) > 0
                    problems += [f"{state}"] * (not enough or state.kept > 0)
                    state.remove()
                    problems += ["still on the host"] * any(on_host(device, optimizer))
                if max_norm is not None:
                    with steps.measure():
                        loss_of(model, step).backward()
                if way == "closure":
                    optimizer.step(partial(backward, model, step))
                else:
                    loss_of(model, step).backward()
                    gradients = [p.grad for p in model.parameters()]
                    optimizer.step()
                    same = all(p.grad is grad for p, grad in zip(model.parameters(), gradients, strict=True))
                    problems += [f"step {step}: gradients were replaced"] * (not same)
                optimizer.zero_grad()
                if hosted and step < 5 and state is not None:
                    problems += [f"step {step}: state on the device"] * (not all(on_host(device, optimizer)))
            results.append(parts(model, optimizer))
    problems += [str(i) for i, pair in enumerate(zip(*results, strict=True)) if not torch.equal(*pair)]
    return problems


WAYS = ["at once", "later", "closure", "inside", "inside, hosted later", "inside, clipped"]


@pytest.mark.parametrize("way", WAYS)
def test_the_same_numbers(run_ranks: Callable, way: str) -> None:
    for name in MAKES:
        for layout in LAYOUTS if name == "AdamW" else ("rows",):
            if not (way.startswith("inside") and layout == "view"):
                assert run_ranks(differences, name, layout, way, world=2) == [[], []], (name, layout)


def resumed(folder: str) -> list[str]:
    """Saved, and loaded into a new optimizer, by `load`, by torch's `load_state_dict`, and over state in use."""
    problems, states = [], []
    with by_nccl(), simulated() as device:
        for turn in range(4):
            model, optimizer = made("AdamW", "rows")
            fullshard.optimizer_state_on_host(optimizer)
            if turn in {0, 3}:
                loss_of(model, 0).backward()
                optimizer.step()
                optimizer.zero_grad()
            if turn == 0:
                fullshard.save(folder, model, optimizer)
                dictionary = copy.deepcopy(optimizer.state_dict())
            if turn == 3:
                loss_of(model, 5).backward()
                optimizer.step()
                optimizer.zero_grad()
            if turn in (1, 3):
                fullshard.load(folder, model, optimizer)
            if turn == 2:
                fullshard.load(folder, model)
                optimizer.load_state_dict(dictionary)
            for step in (1, 2):
                loss_of(model, step).backward()
                optimizer.step()
                optimizer.zero_grad()
            problems += [f"turn {turn}: on the device"] * (not all(on_host(device, optimizer)))
            states.append(parts(model, optimizer))
    for turn in (1, 2, 3):
        problems += [f"turn {turn}"] * (not all(map(torch.equal, states[turn], states[0])))
    return problems


def test_checkpoints_are_as_of_state_on_the_device(run_ranks: Callable, tmp_path: Path) -> None:
    assert run_ranks(resumed, str(tmp_path), world=2) == [[], []]


def copies_alive(inside: bool) -> tuple[int, int]:
    """The most copies of units' state on the device at once in a step; the units with state."""
    alive: list[weakref.ref[torch.UntypedStorage]] = []
    most = 0
    original = Lanes.copy_in

    def counted(lanes: Lanes, tensors: Any, prepare: Any) -> Any:
        nonlocal most
        made = original(lanes, tensors, prepare)
        alive.append(weakref.ref(made.untyped_storage()))
        most = max(most, sum(ref() is not None for ref in alive))
        return made

    with by_nccl(), simulated():
        model, optimizer = made("AdamW", "rows")
        state = fullshard.optimizer_state_on_host(optimizer)
        if inside:
            fullshard.step_in_backward(optimizer)
        for step in range(3):
            gc.collect()
            with mock.patch.object(Lanes, "copy_in", counted if step == 2 else original):
                loss_of(model, step).backward()
                optimizer.step()
                optimizer.zero_grad()
        return most, len(state._parts)


@pytest.mark.parametrize("inside", [False, True])
def test_few_units_have_state_on_the_device(run_ranks: Callable, inside: bool) -> None:
    for most, units in run_ranks(copies_alive, inside, world=2):
        assert 2 <= most <= 4 < units


def bytes_kept() -> list[tuple[int, int, bool]]:
    """What `keep` leaves on the device, for several of it, and whether results are those without."""
    results = []
    with by_nccl(), simulated() as device:
        for keep in (0, 1000, 10**9):
            model, optimizer = made("AdamW", "rows")
            state = fullshard.optimizer_state_on_host(optimizer, keep=keep)
            for step in range(3):
                loss_of(model, step).backward()
                optimizer.step()
                optimizer.zero_grad()
            there = sum(not where for where in on_host(device, optimizer))
            results.append((state.kept, there, parts(model, optimizer)))
    first = results[0][2]
    return [(kept, there, all(map(torch.equal, tensors, first))) for kept, there, tensors in results]


def test_a_budget_stays_on_the_device(run_ranks: Callable) -> None:
    for nothing, some, everything in run_ranks(bytes_kept, world=2):
        assert nothing == (0, 0, True)
        assert 0 < some[0] <= 1000 and some[1] > 0 and some[2]
        assert everything[0] > 1000 and everything[1] > some[1] and everything[2]


class Breaks(torch.optim.AdamW):
    """Raises in the step of its n-th unit."""

    calls, breaks_at = 0, -1

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        Breaks.calls += any(p.grad is not None for group in self.param_groups for p in group["params"])
        if Breaks.calls == Breaks.breaks_at:
            raise RuntimeError("planted")
        return super().step(closure)


def broken() -> list[str]:
    """A step that raises after state of the next unit was copied in; then state is written to, and steps go on."""
    problems, results = [], []
    with by_nccl(), simulated() as device:
        for hosted in (True, False):
            torch.manual_seed(0)
            model = sharded("rows")
            optimizer = Breaks(model.parameters(), lr=0.01)
            if hosted:
                fullshard.optimizer_state_on_host(optimizer)
            for step in range(4):
                loss_of(model, step).backward()
                if step == 2:
                    if hosted:
                        Breaks.calls, Breaks.breaks_at = 0, 1
                        with pytest.raises(RuntimeError, match="planted"):
                            optimizer.step()
                        Breaks.breaks_at = -1
                        problems += ["state on the device"] * (not all(on_host(device, optimizer)))
                    for plain in state_of(optimizer):
                        plain.mul_(0.5)
                optimizer.step()
                optimizer.zero_grad()
            results.append(parts(model, optimizer))
    return problems + [str(i) for i, pair in enumerate(zip(*results, strict=True)) if not torch.equal(*pair)]


def test_a_step_that_raises_leaves_state_on_the_host(run_ranks: Callable) -> None:
    assert run_ranks(broken, world=2) == [[], []]


class Scaled(torch.optim.AdamW):
    """Its step takes an argument, and looks at gradients before that of its base does."""

    @torch.no_grad()
    def step(self, closure: Any = None, *, scale: float = 1.0) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(scale)
        step: Any = torch.optim.AdamW.step
        return getattr(step, "__wrapped__", step)(self, closure)  # without hooks, which would run twice


def hooked() -> list[str]:
    """Steps with an argument, and hooks of before and after: the first may change gradients, the second reads state."""
    problems, results = [], []
    with by_nccl(), simulated():
        for hosted in (True, False):
            torch.manual_seed(0)
            model = sharded("rows")
            optimizer = Scaled(model.parameters(), lr=0.01)
            seen: list[Any] = []

            def read(optimizer: Any, args: Any, kwargs: Any, seen: list[Any] = seen) -> None:
                seen.append(sum(float(plain.square().sum()) for plain in state_of(optimizer)))
                seen.append(sum(p.grad is not None for group in optimizer.param_groups for p in group["params"]))

            def halve(optimizer: Any, args: Any, kwargs: Any) -> None:
                for parameter in optimizer.param_groups[0]["params"]:
                    parameter.grad.mul_(0.5)
                optimizer.param_groups[0]["lr"] *= 0.9

            def refuse(optimizer: Any, args: Any, kwargs: Any) -> None:
                raise RuntimeError("planted")

            optimizer.register_step_post_hook(read)
            if hosted:
                fullshard.optimizer_state_on_host(optimizer)
            optimizer.register_step_pre_hook(halve)
            for step in range(4):
                loss_of(model, step).backward()
                if step == 2:  # a batch is left out
                    handle = optimizer.register_step_pre_hook(refuse)
                    with pytest.raises(RuntimeError, match="planted"):
                        optimizer.step(scale=0.3)
                    handle.remove()
                else:
                    optimizer.step(scale=0.3)
                optimizer.zero_grad()
            results.append([*parts(model, optimizer), torch.tensor(seen)])
    return problems + [str(i) for i, pair in enumerate(zip(*results, strict=True)) if not torch.equal(*pair)]


def test_hooks_and_arguments_are_those_of_a_step(run_ranks: Callable) -> None:
    assert run_ranks(hooked, world=2) == [[], []]


def refusals() -> dict[str, str]:
    """The errors, and what is done on a CPU."""
    texts: dict[str, str] = {}

    def note(name: str, make: Callable[[], object]) -> None:
        try:
            texts[name] = str(make())
        except fullshard.ConfigError as error:
            texts[name] = str(error)

    host = fullshard.optimizer_state_on_host
    with by_nccl(), simulated():
        model, optimizer = made("AdamW", "rows")
        note("not an optimizer", lambda: host(model))  # type: ignore[arg-type]
        note("keep", lambda: host(optimizer, keep=-1))
        note("owners", lambda: host(fullshard.OwnerOptimizer(model.parameters(), torch.optim.Adafactor, lr=0.1)))
        note("closure", lambda: host(torch.optim.LBFGS(model.parameters())))
        redo = fullshard.step_in_backward(optimizer, max_norm=1.0, clip="redo")
        note("redo", lambda: host(optimizer))
        redo.remove()
        host(optimizer)
        note("twice", lambda: host(optimizer))
        note("redo later", lambda: fullshard.step_in_backward(optimizer, max_norm=1.0, clip="redo"))
    return texts


def on_a_cpu() -> bool:
    _, optimizer = made("AdamW", "rows")
    return fullshard.optimizer_state_on_host(optimizer) is None and not optimizer._optimizer_step_pre_hooks


def test_what_is_refused(run_ranks: Callable) -> None:
    (texts,) = run_ranks(refusals, world=1)
    expected = {
        "not an optimizer": "not an optimizer: ",
        "keep": "keep=-1",
        "owners": "OwnerOptimizer, which exchanges all parameters at once",
        "closure": "LBFGS, whose step() computes gradients",
        "redo": 'step_in_backward(clip="redo"), which keeps copies of the state',
        "twice": "an optimizer whose state is in host memory already",
        "redo later": "whose state is in host memory (optimizer_state_on_host)",
    }
    assert texts.keys() == expected.keys()
    for name, text in expected.items():
        assert text in texts[name], texts[name]


def test_on_a_cpu_nothing_is_done(run_ranks: Callable) -> None:
    assert run_ranks(on_a_cpu, world=1) == [True]
