"""What is saved besides the model comes back as it was, or is refused when it is saved."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import fullshard
from forged import all_of, same, small
from fullshard import CheckpointError
from fullshard.store.background import WRITER


def test_tensors_of_one_path_keep_their_values(tmp_path: Path) -> None:
    state = {"a": {"b.c": torch.zeros(2), "b": {"c": torch.ones(2)}}, "a.b": {"c": torch.full((2,), 2.0)}}
    fullshard.save(tmp_path, small(0)[0], state=state)
    found = fullshard.load(tmp_path, small(1)[0]).state
    assert found["a"]["b.c"].tolist() == [0, 0] and found["a"]["b"]["c"].tolist() == [1, 1]
    assert found["a.b"]["c"].tolist() == [2, 2]


def test_what_could_not_be_read_is_not_written(tmp_path: Path) -> None:
    deep = functools.reduce(lambda value, _: [value], range(60), 1)
    fullshard.save(tmp_path, small(0)[0], step=1, state={"deep": deep})
    assert fullshard.load(tmp_path, small(1)[0]).state["deep"] == deep
    within_itself: list[Any] = []
    within_itself.append(within_itself)
    for value in ([deep], within_itself, {"a": object()}, {"a": {1: print}}):
        with pytest.raises(CheckpointError, match="cannot be saved"):
            fullshard.save(tmp_path, small(0)[0], step=2, state={"deep": value})
    assert fullshard.Folder(tmp_path).names() == ["step-000000001"]


def test_numbers_of_numpy_and_those_that_are_not_finite(tmp_path: Path) -> None:
    state = {"complex": complex("nan+infj"), "numpy": np.complex64(1 + 2j), "inf": float("-inf")}
    fullshard.save(tmp_path, small(0)[0], state=state)
    loaded = fullshard.load(tmp_path, small(1)[0]).state
    assert repr(loaded["complex"]) == repr(state["complex"])
    assert loaded["numpy"] == 1 + 2j and loaded["inf"] == float("-inf")
    for dtype in (np.longdouble, ">f4"):
        with pytest.raises(CheckpointError, match="torch has no such dtype"):
            fullshard.save(tmp_path, small(0)[0], state={"array": np.zeros(3, dtype)})


def error_of_one_rank(folder: str) -> str:
    """What each rank's save raises, as one rank alone has a tensor that cannot be saved."""
    value = torch.ones(2)
    if dist.get_rank() == 1:
        value = torch.quantize_per_tensor(value, 0.1, 0, torch.qint8)
    try:
        fullshard.save(folder, small(0)[0], state={"scaled": value})
    except CheckpointError as error:
        return str(error)
    return "no error"


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_all_ranks_raise_what_one_cannot_save(run_ranks: Any, tmp_path: Path) -> None:
    for words in run_ranks(error_of_one_rank, str(tmp_path), world=2):
        assert "quantized" in words and "state.scaled" in words, words


def with_lbfgs(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, _ = small(seed)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = model(torch.ones(2, 3)).square().sum()
        value.backward()
        return value

    for _ in range(2):
        optimizer.step(loss)
    return model, optimizer


def test_optimizer_state_of_lists_of_tensors(tmp_path: Path) -> None:
    model, optimizer = with_lbfgs(0)
    fullshard.save(tmp_path, model, optimizer)
    again, other = with_lbfgs(1)
    fullshard.load(tmp_path, again, other)
    (want,), (got,) = optimizer.state.values(), other.state.values()
    assert want["old_dirs"] and len(got["old_dirs"]) == len(want["old_dirs"])
    assert all(torch.equal(a, b) for a, b in zip(got["old_dirs"], want["old_dirs"], strict=True))


def test_a_save_in_the_background_that_cannot_start_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = small(0)
    before = all_of(model, optimizer)

    def no_room(nbytes: int) -> Any:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(WRITER, "_room", no_room)
        with pytest.raises(CheckpointError, match="No space left"):
            fullshard.save(tmp_path, model, optimizer, step=1, asynchronous=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock"]
    fullshard.save(tmp_path, model, optimizer, step=2, asynchronous=True).wait()
    again, other = small(1)
    assert fullshard.load(tmp_path, again, other).step == 2 and same(all_of(again, other), before)


def test_a_save_in_the_background_after_one_that_had_no_descriptor_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would wait for the answer to a job that was never sent."""
    with monkeypatch.context() as patched:
        patched.setattr(os, "dup", mock.Mock(side_effect=OSError(24, "Too many open files")))
        with pytest.raises(CheckpointError, match="Too many open files"):
            fullshard.save(tmp_path, small(0)[0], step=1, asynchronous=True)
    fullshard.save(tmp_path, small(0)[0], step=2, asynchronous=True).wait()
    assert fullshard.Folder(tmp_path).names() == ["step-000000002"]


def test_a_class_of_folders_that_the_writing_process_cannot_import(tmp_path: Path) -> None:
    class Own(fullshard.Folder):
        pass

    for module in (Own.__module__, "__main__"):
        Own.__module__ = module
        with pytest.raises(fullshard.ConfigError, match=r"move the class .* into a module"):
            fullshard.save(Own(tmp_path), small(0)[0], asynchronous=True)
        Own.__qualname__ = "Own"
    assert not list(tmp_path.iterdir())
    fullshard.save(Own(tmp_path), small(0)[0])


def save_and_load_without_tensors(folder: Path) -> list[Any]:
    torch.manual_seed(dist.get_rank())
    fullshard.save(folder, nn.Identity(), state={"seen": torch.ones(2)})
    loaded = fullshard.load(folder, nn.Identity())
    return [loaded.state["seen"].tolist(), loaded.untouched]


def test_state_beside_a_model_without_tensors(run_ranks: Any, tmp_path: Path) -> None:
    """Tensors that each rank has (of random generators) were taken for the model's, and refused."""
    assert run_ranks(save_and_load_without_tensors, tmp_path, world=2) == [[[1, 1], ()]] * 2
