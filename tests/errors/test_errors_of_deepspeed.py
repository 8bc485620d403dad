"""Errors of folders that DeepSpeed wrote (ZeRO-3, three ranks: tests/store/data/zero3), with something changed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fullshard
from files import rewritten
from raising import raises

ZERO3 = Path(__file__).parents[1] / "store" / "data" / "zero3"
Content = dict[str, Any]


@pytest.fixture
def step(tmp_path: Path) -> Path:
    """The folder of a step, which may be changed."""
    return shutil.copytree(ZERO3, tmp_path / "zero3") / "global_step2"


def one_group_more(content: Content) -> None:
    """Weights that no parameter is said to have."""
    content["optimizer_state_dict"]["fp32_flat_groups"].append(torch.ones(3))


def frozen_of_another_size(content: Content) -> None:
    """A part of a frozen parameter that is too short."""
    content["frozen_param_fragments"] = {name: torch.ones(1) for name in content["frozen_param_fragments"]}


def unknown_parameter(content: Content) -> None:
    """A tensor that is neither parameter nor buffer."""
    content["module"]["more.weight"] = torch.ones(3)


def buffer_that_is_none(content: Content) -> None:
    """A number in the place of a buffer."""
    content["module"].update(dict.fromkeys(content["buffer_names"], 7))


def buffer_that_is_a_parameter(content: Content) -> None:
    """One name for both."""
    name = next(iter(content["frozen_param_shapes"]))
    content["buffer_names"] = [*content["buffer_names"], name]
    content["module"][name] = torch.ones(3)


CHANGED: dict[str, tuple[str, Callable[[Content], None]]] = {
    "K069": ("optim", one_group_more),
    "K071": ("model", frozen_of_another_size),
    "K072": ("model", unknown_parameter),
    "K073": ("model", buffer_that_is_none),
    "K074": ("model", buffer_that_is_a_parameter),
}


@pytest.mark.parametrize("code", CHANGED)
def test_a_file_that_was_changed(step, tmp_path, code):
    kind, change = CHANGED[code]
    (file,) = step.glob(f"*rank_0_*{kind}_states.pt")
    rewritten(file, change)
    with raises(code):
        fullshard.convert(step, tmp_path / "a.safetensors")
