"""What `torch.save` makes of a sharded model, and names in errors before the first forward."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import fullshard
from fullshard import PhaseError
from fullshard.forms import row_shard
from ways import WAYS, WIDTH, batch, but_last, layers, mine, shard


def written(thing: Any) -> io.BytesIO:
    torch.save(thing, file := io.BytesIO())
    file.seek(0)
    return file


def test_a_file_of_a_part_is_warned_of_once(run_ranks, tmp_path):
    run_ranks(saved_in_parts, tmp_path)


def saved_in_parts(folder: Path) -> None:
    model = shard(layers(), "rows", but_last)
    row_shard._warned.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = model.state_dict()
        copy.deepcopy(state)
        copy.copy(model)
        pickle.loads(pickle.dumps(state))  # as queues of other processes do
        dcp.save({"model": state, "settings": {"lr": 0.1}}, checkpoint_id=folder / "dcp")
        written(dict(fullshard.full_parameters(model)))
    with pytest.warns(UserWarning, match="writes only this rank's part of a sharded state dict"):
        written(state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        written(state)
    for way in ("rows", "flat"):
        with pytest.raises(RuntimeError, match=r"0\.0\.weight is sharded and the target is not") as error:
            layers().load_state_dict(shard(layers(), way, but_last).state_dict())
        assert "forward" not in str(error.value)


def test_a_sharded_model_cannot_be_pickled(run_ranks):
    run_ranks(pickled)


def pickled() -> None:
    for way in WAYS:
        for model in (shard(layers(), way, but_last), nn.ModuleList([shard(layers(), way)])):
            with pytest.raises(PhaseError, match="cannot be pickled"):
                written(model)
            copy.copy(model)
        model = shard(layers(), way)
        again = copy.copy(model)
        assert again(batch(0)).shape == copy.deepcopy(model)(batch(0)).shape
        del model
        gc.collect()
        with pytest.raises(PhaseError, match=r"copy\.deepcopy"):
            again(batch(0))


def test_errors_before_the_first_forward_name_parameters_from_the_model(run_ranks):
    run_ranks(named)


def named() -> None:
    model = layers()
    before = list(model.parameters())
    optimizer = torch.optim.SGD(before)
    shard(model, "rows", but_last)
    x = torch.ones(2, WIDTH, dtype=torch.float64)
    with pytest.raises(fullshard.ConfigError, match=r"parameter: +0\.0\.weight"):
        optimizer.step()
    with pytest.raises(fullshard.ConfigError, match=r"parameter: +1\.2\.weight"):
        before[6].norm()
    with pytest.raises(fullshard.ConfigError, match=r"parameter: +1\.0\.bias"):
        model[1][0].bias.data = torch.zeros(WIDTH)
    with pytest.raises(PhaseError, match=r"parameter: +1\.2\.weight"):
        model[1][2](x)
    model = shard(layers(), "wrapper", but_last)
    with pytest.raises(PhaseError, match=r"data was used on[^:]*\n +parameter: +1\.2\.weight"):
        model.module[1].module[2].weight.data.norm()
    model(mine(0))
