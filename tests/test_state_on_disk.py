"""`optimizer_state_on_disk`: the same numbers with state in files without names, and errors before anything moves."""

from __future__ import annotations

import copy
import errno
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fullshard
from fullshard.optim.state_file import elementwise
from fullshard.torch_private.local_tensor import plain_tensors
from test_step_in_backward import loss_of, sharded

MAKES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01, amsgrad=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.5),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=0.01),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1, initial_accumulator_value=0.5),
    "Muon": lambda params: fullshard.Muon([p for p in params if p.ndim == 2], lr=0.01),
}


def mapped(optimizer: torch.optim.Optimizer) -> list[bool]:
    """For each tensor of state that has an element for each of a parameter's, whether it lies in a file."""
    ranges = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        bounds, *_, inode = line.split(maxsplit=5)[:5]
        if int(inode) and "deleted" in line:
            ranges.append([int(bound, 16) for bound in bounds.split("-")])
    return [
        any(start <= plain.data_ptr() < stop for start, stop in ranges)
        for parameter, state in optimizer.state.items()
        for _, plain in elementwise(parameter, state)
    ]


def parts(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    states = [sorted(optimizer.state.get(p, {}).items()) for p in model.parameters()]
    tensors = [value for state in states for _, value in state if isinstance(value, torch.Tensor)]
    return [part for tensor in (*model.parameters(), *tensors) for part in plain_tensors(tensor)]


def differences(name: str, layout: str, way: str, folder: str) -> list[str]:
    """Of four steps, with state on disk from before the second (or the first) on, and in memory."""
    results, problems = [], []
    for on_disk in (True, False):
        model = sharded(layout)
        optimizer = MAKES[name](list(model.parameters()))
        inside = {"after": None, "inside": {}, "redo": {"max_norm": 1e-5, "clip": "redo", "threads": 1}}[way]
        if inside is not None and on_disk:
            fullshard.step_in_backward(optimizer, **inside)
        kept = None
        for step in range(4):
            if on_disk and step == (0 if way == "inside" else 1):
                kept = fullshard.optimizer_state_on_disk(optimizer, folder)
                assert kept.nbytes > 1 and os.listdir(folder) == []
            loss_of(model, step).backward()
            if kept is not None and inside is not None and not (optimizer.state and all(mapped(optimizer))):
                problems.append(f"step {step}: state of units is in memory after the backward")
            if way == "redo" and not on_disk:
                fullshard.clip_grad_norm_(model.parameters(), 1e-5)
            optimizer.step()
            optimizer.zero_grad()
        if kept is not None:
            is_mapped, nbytes = mapped(optimizer), kept.nbytes
            if not is_mapped or not all(is_mapped):
                problems.append(f"{is_mapped.count(False)} of {len(is_mapped)} in memory")
            if nbytes != sum(-(-p.nbytes // 64) * 64 for q, s in optimizer.state.items() for _, p in elementwise(q, s)):
                problems.append(f"{nbytes} bytes were reserved")
            kept.remove()
            if any(mapped(optimizer)):
                problems.append("still mapped")
            loss_of(model, 9).backward()
            optimizer.step()
        else:
            loss_of(model, 9).backward()
            if way == "redo":
                fullshard.clip_grad_norm_(model.parameters(), 1e-5)
            optimizer.step()
        results.append(parts(model, optimizer))
    problems += [str(i) for i, pair in enumerate(zip(*results, strict=True)) if not torch.equal(*pair)]
    return problems


@pytest.mark.parametrize("way", ["after", "inside", "redo"])
@pytest.mark.gloo("processes")
def test_the_same_numbers(run_ranks: Callable, tmp_path: Path, way: str) -> None:
    for name in MAKES:
        if way != "redo" or name != "Muon":
            for layout in ("rows", "flat") if name == "AdamW" else ("rows",):
                assert run_ranks(differences, name, layout, way, str(tmp_path), world=2) == [[], []], (name, layout)


def resumed(folder: str, saved: str) -> list[str]:
    """Saved from disk into a checkpoint, loaded to disk, by `load` and by `load_state_dict`."""
    problems, states = [], []
    for turn in range(3):
        model = sharded()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        fullshard.optimizer_state_on_disk(optimizer, folder)
        if turn == 0:
            loss_of(model, 0).backward()
            optimizer.step()
            optimizer.zero_grad()
            fullshard.save(saved, model, optimizer)
            dictionary = copy.deepcopy(fullshard.optimizer_state_dict(model, optimizer))
        elif turn == 1:
            fullshard.load(saved, model, optimizer)
        else:
            fullshard.load(saved, model)
            fullshard.load_optimizer_state_dict(model, optimizer, dictionary)
        loss_of(model, 1).backward()
        optimizer.step()
        problems += [f"turn {turn}: in memory"] * (not all(mapped(optimizer)))
        states.append(parts(model, optimizer))
    for turn in (1, 2):
        problems += [f"turn {turn}"] * (not all(map(torch.equal, states[turn], states[0])))
    return problems


@pytest.mark.gloo("processes")
def test_checkpoints_are_as_of_state_in_memory(run_ranks: Callable, tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    assert run_ranks(resumed, str(tmp_path / "state"), str(tmp_path / "saved"), world=2) == [[], []]


def refused(folder: str) -> dict[str, str]:
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters())
    owners = fullshard.OwnerOptimizer(sharded().parameters(), torch.optim.Adafactor)
    full = OSError(errno.ENOSPC, "No space left on device")
    errors = {}

    def attempt(name: str, optimizer: Any, folder: Any) -> None:
        with pytest.raises(fullshard.ConfigError) as raised:
            fullshard.optimizer_state_on_disk(optimizer, folder)
        errors[name] = str(raised.value)

    attempt("missing", optimizer, f"{folder}/none")
    Path(folder, f"file{dist.get_rank()}").touch()
    attempt("a file", optimizer, f"{folder}/file{dist.get_rank()}")
    attempt("no path", optimizer, None if dist.get_rank() else folder)
    attempt("empty", optimizer, "")
    attempt("owners", owners, folder)
    attempt("no optimizer", model, folder)
    reserve = mock.Mock(side_effect=full) if dist.get_rank() == 1 else os.posix_fallocate
    with mock.patch.object(os, "posix_fallocate", reserve):
        attempt("full", optimizer, folder)
    assert not optimizer.state and all(p.grad is None for p in model.parameters())
    fullshard.optimizer_state_on_disk(optimizer, folder)
    attempt("twice", optimizer, folder)
    return errors


@pytest.mark.gloo("processes")
def test_what_it_refuses_on_all_ranks(run_ranks: Callable, tmp_path: Path) -> None:
    for errors in run_ranks(refused, str(tmp_path), world=2):
        assert "folder=None, which is not the path" in errors["no path"] and "folder=''" in errors["empty"]
        assert "No such file or directory" in errors["missing"] and "bytes in" in errors["missing"]
        assert "Not a directory" in errors["a file"]
        assert "OwnerOptimizer" in errors["owners"] and "not an optimizer" in errors["no optimizer"]
        assert "No space left" in errors["full"] and "rank" in errors["full"] and "1" in errors["full"]
        assert "on disk already" in errors["twice"]


def test_nothing_is_left_by_a_process_that_is_killed(tmp_path: Path) -> None:
    program = f"""
        import os, signal, torch, fullshard
        from torch import nn
        model = nn.Linear(64, 64)
        optimizer = torch.optim.AdamW(model.parameters())
        kept = fullshard.optimizer_state_on_disk(optimizer, {str(tmp_path)!r})
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
        assert kept.nbytes >= 2 * 65 * 64 * 4 and os.listdir({str(tmp_path)!r}) == []
        print("stepped", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    ran = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=False)
    assert ran.returncode == -signal.SIGKILL and "stepped" in ran.stdout, ran.stderr
    assert os.listdir(tmp_path) == []
