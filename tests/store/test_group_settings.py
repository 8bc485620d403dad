"""Settings of optimizers belong to parameters: loaded into other groups, each keeps its own, or there is an error."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import fullshard
from fullshard import CheckpointError
from fullshard.errors import MissingStateError
from fullshard.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

WEIGHTS, BIASES = ["0.weight", "1.weight"], ["0.bias", "1.bias"]
SPLIT = [(WEIGHTS, {"lr": 0.1, "weight_decay": 0.3}), (BIASES, {"lr": 0.1, "weight_decay": 0.0})]
ONE = [(WEIGHTS + BIASES, {"lr": 0.7})]


pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A group of one rank that moves objects, as torch 2.11's fake one does not."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def trained(groups: list[tuple[list[str], dict[str, Any]]]) -> tuple[Any, torch.optim.AdamW]:
    """A model and its optimizer of these groups, after one step."""
    torch.manual_seed(0)
    model: Any = fullshard.fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    named = dict(model.named_parameters())
    optimizer = torch.optim.AdamW([{"params": [named[name] for name in names], **own} for names, own in groups])
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


FLAT, FULL = StateDictOptions(flatten_optimizer_state_dict=True), StateDictOptions(full_state_dict=True)


def through_a_folder(folder: Path, model: Any, optimizer: Any, into: tuple[Any, Any]) -> None:
    fullshard.save(folder, model, optimizer)
    fullshard.load(folder, *into)


def through_a_flat_folder(folder: Path, model: Any, optimizer: Any, into: tuple[Any, Any]) -> None:
    """A program's that saves with DCP, and flattens."""
    state = get_optimizer_state_dict(model, optimizer, options=FLAT)
    dcp.save({"model": get_model_state_dict(model), "optimizer": state}, checkpoint_id=folder)
    fullshard.load(folder, *into)


def through_a_state_dict(folder: Path, model: Any, optimizer: Any, into: tuple[Any, Any], options: Any = FULL) -> None:
    state = get_optimizer_state_dict(model, optimizer, options=options)
    set_optimizer_state_dict(*into, optim_state_dict=state, options=options)


def through_a_flat_state_dict(folder: Path, model: Any, optimizer: Any, into: tuple[Any, Any]) -> None:
    through_a_state_dict(folder, model, optimizer, into, FLAT)


THROUGH = (through_a_folder, through_a_flat_folder, through_a_state_dict, through_a_flat_state_dict)


def settings(optimizer: torch.optim.Optimizer) -> list[tuple[float, float]]:
    return [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]


def test_every_parameter_keeps_its_settings(tmp_path: Path) -> None:
    """By other groups, in another order: each way that state takes."""
    alone = [([name], {"lr": 0.9}) for name in (*BIASES, *WEIGHTS)]
    for number, through in enumerate(THROUGH):
        for groups, want in ((SPLIT[::-1], [(0.1, 0.0), (0.1, 0.3)]), (alone, [(0.1, 0.0)] * 2 + [(0.1, 0.3)] * 2)):
            model, optimizer = trained(groups)
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message="Groups")
                through(tmp_path / f"{number}-{len(groups)}", *trained(SPLIT), (model, optimizer))
            assert settings(optimizer) == want, through


def test_groups_that_share_a_tensor_get_their_own_values(tmp_path: Path) -> None:
    """A learning rate that is a tensor is one tensor in all groups, by default."""

    def with_rates(*rates: float) -> tuple[Any, torch.optim.AdamW]:
        model, optimizer = trained([(WEIGHTS, {}), (BIASES, {})])
        for group, rate in zip(optimizer.param_groups, [torch.tensor(rate) for rate in rates], strict=True):
            group["lr"] = rate
        return model, optimizer

    for number, through in enumerate(THROUGH):
        model, optimizer = trained([(WEIGHTS, {}), (BIASES, {}), ([], {})])
        shared = torch.tensor(0.5)
        for group in optimizer.param_groups:
            group["lr"] = shared
        through(tmp_path / f"{number}", *with_rates(0.125, 0.25), (model, optimizer))
        assert [float(group["lr"]) for group in optimizer.param_groups] == [0.125, 0.25, 0.5], through
        if through is through_a_folder:  # tensors stay where groups agree: others may refer to them
            one = torch.tensor(0.5)
            for group in optimizer.param_groups[:2]:
                group["lr"] = one
            through(tmp_path / "alike", *with_rates(0.125, 0.125), (model, optimizer))
            assert [group["lr"] is one for group in optimizer.param_groups] == [True, True, False]
            assert one == 0.125


def test_one_group_cannot_have_two_values(tmp_path: Path) -> None:
    """An error that changes nothing; groups that were one are told of."""
    for number, through in enumerate(THROUGH):
        model, optimizer = trained(ONE)
        before = [p.clone() for p in optimizer.state[next(iter(optimizer.state))].values()]
        with pytest.raises(CheckpointError, match=r"group 0 .*'weight_decay'") as caught:
            through(tmp_path / str(number), *trained(SPLIT), (model, optimizer))
        assert "weight_decay=0.3, as 0.weight" in str(caught.value) and "weight_decay=0.0" in str(caught.value)
        assert settings(optimizer) == [(0.7, 0.01)]
        after = optimizer.state[next(iter(optimizer.state))].values()
        assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
    for through in (through_a_folder, through_a_state_dict):
        model, optimizer = trained(SPLIT)
        with pytest.warns(UserWarning, match=r"Optimizer groups 0 and 1 .*'weight_decay'"):
            through(tmp_path / "one", *trained(ONE), (model, optimizer))
        assert settings(optimizer) == [(0.7, 0.01)] * 2


def test_text_in_place_of_a_number(tmp_path: Path) -> None:
    for number, change in enumerate(({"lr": "0.1"}, {"betas": (0.9, "0.99")}, {"eps": [1e-8]}, {"lr": torch.ones(2)})):
        model, optimizer = trained(SPLIT)
        optimizer.param_groups[1].update(change)
        fullshard.save(tmp_path / str(number), model, optimizer)
        with pytest.raises(CheckpointError, match="different type"):
            fullshard.load(tmp_path / str(number), *trained(SPLIT))


def test_settings_of_other_types_that_mean_the_same(tmp_path: Path) -> None:
    """A learning rate in a tensor, or None where it was a number, is no damage."""
    model, optimizer = trained(SPLIT)
    optimizer.param_groups[0].update(lr=torch.tensor(0.25), betas=[0.8, 0.9], foreach=None, capturable=False)
    fullshard.save(tmp_path, model, optimizer)
    model, optimizer = trained(SPLIT)
    optimizer.param_groups[0].update(foreach=False)
    fullshard.load(tmp_path, model, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.25 and optimizer.param_groups[0]["foreach"] is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_settings_are_compared_as_python_numbers(tmp_path: Path, dtype: torch.dtype) -> None:
    """Whatever torch's default dtype, and beyond the integers of tensors."""
    for first, second in ((1e-3, 1.001e-3), (1e-46, 0.0), (2**64 - 1, 2**64 - 2)):
        groups = [(WEIGHTS, {"lr": 0.1, "more": first}), (BIASES, {"lr": 0.1, "more": second})]
        fullshard.save(tmp_path, *trained(groups))
        fullshard.load(tmp_path, *trained(groups))
        model, optimizer = trained(ONE)
        torch.set_default_dtype(dtype)
        try:
            with pytest.raises(CheckpointError, match="different values of 'more'"):
                fullshard.load(tmp_path, model, optimizer)
        finally:
            torch.set_default_dtype(torch.float32)
    nan = [(names, {"lr": 0.1, "more": (float("nan"), 1)}) for names in (WEIGHTS, BIASES)]
    fullshard.save(tmp_path, *trained(nan))
    fullshard.load(tmp_path, *trained(ONE))


def test_what_no_int_or_float_equals_is_loaded_as_it_is(tmp_path: Path) -> None:
    for saved, now in ((float("inf"), 1), (float("nan"), 1), (10**400, 1.0)):
        fullshard.save(tmp_path, *trained([(WEIGHTS + BIASES, {"clip": saved})]))
        model, optimizer = trained([(WEIGHTS + BIASES, {"clip": now})])
        fullshard.load(tmp_path, model, optimizer)
        assert str(optimizer.param_groups[0]["clip"]) == str(saved)


def test_an_optimizer_that_keeps_no_state(tmp_path: Path) -> None:
    """Its settings load, by each way; state that another optimizer would need is missed, as before."""

    def sgd(model: Any, lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=lr)

    for number, through in enumerate(THROUGH):
        model, _ = trained(ONE)
        into, _ = trained(ONE)
        optimizer = sgd(into, 0.9)
        through(tmp_path / str(number), model, sgd(model, 0.25), (into, optimizer))
        assert optimizer.param_groups[0]["lr"] == 0.25 and not optimizer.state
    for through in THROUGH[2:]:
        adam = torch.optim.Adam(model.parameters())
        with pytest.raises(MissingStateError, match=r"0.weight"):
            through(tmp_path, model, sgd(model, 0.25), (model, adam))
        assert not adam.state


def test_a_group_without_parameters_gets_its_settings(tmp_path: Path) -> None:
    """By its place, if the other groups are at theirs; beside another optimizer's groups, too."""
    saved, now = [*SPLIT, ([], {"lr": 0.5})], [*SPLIT, ([], {"lr": 0.9})]
    for number, through in enumerate((through_a_folder, through_a_state_dict)):
        for groups, lr in ((now, 0.5), ([now[2], *SPLIT], 0.9), ([*now[:2], now[2], now[2]], 0.5)):
            model, optimizer = trained(groups)
            through(tmp_path / f"{number}-{len(groups)}", *trained(saved), (model, optimizer))
            empty = next(group for group in optimizer.param_groups if not group["params"])
            assert empty["lr"] == lr, (through, groups)
    pairs = []
    for lr in (0.5, 0.9):
        model, _ = trained(ONE)
        weights, biases = ([p for n, p in model.named_parameters() if n.endswith(end)] for end in ("weight", "bias"))
        groups = [{"params": weights}, {"params": []}]
        pairs.append((model, [torch.optim.SGD(biases, lr=0.1), torch.optim.SGD(groups, lr=lr)]))
    fullshard.save(tmp_path / "two", *pairs[0])
    fullshard.load(tmp_path / "two", *pairs[1])
    assert [group["lr"] for group in pairs[1][1][1].param_groups] == [0.5, 0.5]
