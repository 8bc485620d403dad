"""Errors of Lightning's strategies; most in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from raising import Programs, assert_raised, outcome, raises, two_layers

pytest.importorskip("lightning", reason="needs the extra lightning: pip install -e '.[lightning]'")


def fabric() -> Any:
    """A Fabric on two ranks."""
    from lightning.fabric import Fabric

    from fullshard.integrations.lightning import FullshardFabricStrategy

    made = Fabric(accelerator="cpu", devices=2, strategy=FullshardFabricStrategy())
    made.launch()
    return made


def test_options_of_a_storage(tmp_path):
    from fullshard.integrations.lightning import FullshardStrategy

    with raises("ConfigError: FullshardStrategy writes checkpoints itself and takes no"):
        FullshardStrategy().save_checkpoint({}, tmp_path, storage_options={"block": 1})


def test_a_filter_of_what_is_saved(tmp_path):
    from fullshard.integrations.lightning import FullshardFabricStrategy

    with raises("ConfigError: FullshardFabricStrategy writes checkpoints itself"):
        FullshardFabricStrategy().save_checkpoint(tmp_path, {"model": two_layers()}, filter={"model": len})


def test_two_models_in_a_checkpoint(tmp_path):
    from fullshard.integrations.lightning import FullshardFabricStrategy

    with raises("ConfigError: A checkpoint holds one model and its optimizers"):
        FullshardFabricStrategy().save_checkpoint(tmp_path, {"student": two_layers(), "teacher": two_layers()})


PROGRAMS = Programs()


@pytest.mark.parametrize("words", PROGRAMS)
def test_two_ranks(run_clients, tmp_path, words):
    assert_raised(words, run_clients(outcome, PROGRAMS[words], tmp_path))


@PROGRAMS.raise_("ConfigError: Some parameters of the model are on meta, and others have values")
def a_model_that_is_half_on_meta(rank: int, folder: Path) -> None:
    fabric().setup_module(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta")))


class Scale(nn.Module):
    """A module without `reset_parameters`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, device="meta"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


@PROGRAMS.raise_("ConfigError: was built on meta and has no reset_parameters() to initialise it")
def a_model_on_meta_that_cannot_make_its_values(rank: int, folder: Path) -> None:
    fabric().setup_module(Scale())


@PROGRAMS.raise_("ConfigError: no_backward_sync needs a module that Fabric has set up, got")
def no_sync_of_a_plain_module(rank: int, folder: Path) -> None:
    with fabric().strategy._backward_sync_control.no_backward_sync(two_layers(), True):
        pass


@PROGRAMS.raise_("CheckpointError: nothing was loaded ... remove it from the state to load")
def state_that_was_not_saved(rank: int, folder: Path) -> None:
    made = fabric()
    model = made.setup_module(two_layers())
    made.save(folder / "half", {"model": model})
    made.load(folder / "half", {"model": model, "epoch": 1})


@PROGRAMS.raise_("CheckpointError: is not a checkpoint, or is damaged")
def a_damaged_file(rank: int, folder: Path) -> None:
    made = fabric()
    model = made.setup_module(two_layers())
    (folder / f"{rank}.ckpt").write_bytes(b"no checkpoint")
    made.strategy.load_checkpoint(folder / f"{rank}.ckpt", {"model": model})


@PROGRAMS.raise_("CheckpointError: is a single file, which stores optimizer state by parameter number")
def optimizer_state_of_one_file(rank: int, folder: Path) -> None:
    made = fabric()
    model = made.setup_module(two_layers())
    optimizer = made.setup_optimizers(torch.optim.AdamW(model.parameters()))
    torch.save({"state_dict": two_layers().state_dict(), "optimizer_states": [{}]}, folder / f"{rank}.ckpt")
    made.strategy.load_checkpoint(folder / f"{rank}.ckpt", {"model": model, "optimizer": optimizer})
