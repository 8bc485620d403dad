"""What PyTorch's programs save by DCP Fullshard loads; and they load what `convert --to dcp` makes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from awkward import STEPS, differences, make, parts, train, train_and_save, whole
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import fullshard
from forged import ForgedDcp, saved, small
from fullshard.exchange.convert import convert
from fullshard.exchange.inspect import inspect
from fullshard.store.formats.own import CheckpointSource, write_checkpoint
from training import full


def of_pytorch(seed: int) -> tuple[Any, torch.optim.Optimizer]:
    model, _ = make("plain", seed, uses=True, like_pytorch=True)
    for part in [*parts(model), model]:
        torch_fully_shard(part)
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


def all_of(model_state: Any, optimizer_state: Any) -> dict[str, Tensor]:
    found = {f"model.{name}": full(value) for name, value in model_state.items()}
    for name, own in optimizer_state["state"].items():
        found |= {f"state.{name}.{k}": full(v) for k, v in own.items()}
    return found


def pytorch_saves(folder: Path) -> dict[str, Tensor]:
    model, optimizer = of_pytorch(0)
    train(model, optimizer, range(STEPS))
    states = get_state_dict(model, optimizer)
    dcp.save(dict(zip(("model", "optimizer"), states, strict=True)), checkpoint_id=folder)
    return all_of(*states)


def ours_loads(folder: Path, way: str, want: dict[str, Tensor]) -> list[str]:
    model, optimizer = make(way, seed=1, uses=True, like_pytorch=True)
    loaded = fullshard.load(folder, model, optimizer)
    assert not loaded.untouched
    assert {group["lr"] for group in optimizer.param_groups} == {0.01}
    return differences(whole(model, optimizer), want)


@pytest.mark.parametrize(("way", "world"), [("rows", 3), ("flat", 2), ("wrapper", 1)])
def test_what_pytorch_saves_loads(run_ranks: Any, tmp_path: Path, way: str, world: int) -> None:
    want, _ = run_ranks(pytorch_saves, tmp_path / "theirs")
    for problems in run_ranks(ours_loads, tmp_path / "theirs", way, want, world=world):
        assert not problems


def ours_saves(folder: Path, way: str) -> dict[str, Tensor]:
    model, optimizer = make(way, uses=True, like_pytorch=True)
    train(model, optimizer, range(STEPS))
    fullshard.save(folder, model, optimizer)
    return whole(model, optimizer)


def pytorch_loads(path: Path, want: dict[str, Tensor]) -> list[str]:
    model, optimizer = of_pytorch(1)
    states = get_state_dict(model, optimizer)
    dcp.load(dict(zip(("model", "optimizer"), states, strict=True)), checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=states[0], optim_state_dict=states[1])
    return differences(all_of(*get_state_dict(model, optimizer)), want)


def test_pytorch_loads_what_was_converted(run_ranks: Any, tmp_path: Path) -> None:
    want, _ = run_ranks(ours_saves, tmp_path / "ours", "wrapper")
    path = tmp_path / "theirs"
    assert not fullshard.convert(tmp_path / "ours", path, to="dcp").left_out
    for problems in run_ranks(pytorch_loads, path, want, world=3):
        assert not problems
    dcp_to_torch_save(path, tmp_path / "whole.pt")
    found = torch.load(tmp_path / "whole.pt", weights_only=True)
    weights = {name: value for name, value in want.items() if name.startswith("model.")}
    assert not differences({f"model.{name}": value for name, value in found["model"].items()}, weights)
    assert found["optimizer"]["param_groups"][0]["lr"] == 0.01


def test_records_of_any_strides_and_dtypes(tmp_path: Path) -> None:
    """As other programs may have written them, and parts of them that a rank asks for."""
    tensors = {
        "turned": torch.arange(12.0).view(3, 4).T,
        "eight": torch.arange(6.0).to(torch.float8_e4m3fn).view(2, 3),
        "one": torch.tensor(5),
        "none": torch.empty(0, 3),
    }
    plain = {"betas": (0.9, 1), "words": ["a", None]}
    dcp.save({**tensors, "plain": plain}, checkpoint_id=tmp_path, no_dist=True)
    forged = ForgedDcp(tmp_path)
    forged.put_record("turned", saved(tensors["turned"]))  # DCP itself writes it row by row
    forged.sign()
    with CheckpointSource(tmp_path) as source:
        for name, tensor in tensors.items():
            read = source.read(f"model.{name}")
            assert read.shape == tensor.shape and torch.equal(read.float(), tensor.float()), name
        assert source.read("model.turned", [1, 1], [2, 2]).tolist() == tensors["turned"][1:3, 1:3].tolist()
        assert source.values["state"]["plain"] == plain


def test_tensor_by_tensor_in_one_process(run_ranks: Any, tmp_path: Path) -> None:
    """A checkpoint of two ranks, copied as conversion does, is one of one rank that loads the same."""
    (want, _), _ = run_ranks(train_and_save, "flat", tmp_path, state={"seen": {"tokens": 7}})
    copy = tmp_path / "copy"
    with CheckpointSource(tmp_path) as source:
        part = source.read("model.head.bias", [2], [3])

        def read(name: str) -> torch.Tensor:
            assert not copy.exists()
            return source.read(name)

        write_checkpoint(copy, source.entries, source.values, source.ties, read)
    assert torch.equal(part, want["model.head.bias"][2:5])
    model, optimizer = make("plain", seed=1)
    loaded = fullshard.load(copy, model, optimizer)
    assert loaded.state == {"seen": {"tokens": 7}} and loaded.step == STEPS
    assert not differences(whole(model, optimizer), want)


def test_inspect_names_the_files_of_a_plain_state_dict(tmp_path: Path) -> None:
    """Names in the folder lack the prefix "model." that entries have."""
    dcp.save({"layer.weight": torch.ones(3, 2)}, checkpoint_id=tmp_path, no_dist=True)
    (tensor,) = inspect(tmp_path).tensors
    assert (tensor.name, tensor.shape, tensor.files) == ("model.layer.weight", (3, 2), ("__0_0.distcp",))


class App(Stateful):
    """As in PyTorch's tutorial on `torch.distributed.checkpoint`."""

    def __init__(self, *states: Any) -> None:
        self.states = states

    def state_dict(self) -> dict[str, Any]:
        return dict(zip(("model", "optim"), self.states, strict=False))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("only saved here")


FORMS: dict[str, Callable[[Any, Any], dict[str, Any]]] = {
    "app": lambda model, optimizer: {"app": App(model, optimizer), "step": 3},
    "optim": lambda model, optimizer: {"model": model, "optim": optimizer},
    "state_dict": lambda model, optimizer: {"state_dict": model, "optimizer_state_dict": optimizer},
    "flattened": lambda model, optimizer: {"model": model, "optim": flat_of(optimizer)},
}


def flat_of(optimizer: dict[str, Any]) -> dict[str, Any]:
    """As `flatten_optimizer_state_dict=True` returns it."""
    flat = {f"state.{name}.{key}": v for name, state in optimizer["state"].items() for key, v in state.items()}
    for group in optimizer["param_groups"]:
        flat |= {
            f"param_groups.{name}.{key}": v for name in group["params"] for key, v in group.items() if key != "params"
        }
    return flat


@pytest.mark.parametrize("form", FORMS)
def test_the_usual_keys_of_programs(tmp_path: Path, form: str) -> None:
    """Loaded, and converted, as if saved under "model" and "optimizer"."""
    model, optimizer = small(0)
    optimizer.param_groups[0]["lr"] = 0.5
    dcp.save(FORMS[form](*get_state_dict(model, optimizer)), checkpoint_id=tmp_path / "dcp", no_dist=True)
    convert(tmp_path / "dcp", tmp_path / "own", to="fullshard")
    for folder in ("dcp", "own"):
        again, its_optimizer = small(1)
        loaded = fullshard.load(tmp_path / folder, again, its_optimizer, check=False)
        assert not differences(all_of(*get_state_dict(again, its_optimizer)), all_of(*get_state_dict(model, optimizer)))
        assert not loaded.untouched and int(its_optimizer.state[again[0].weight]["step"]) == 1
        assert its_optimizer.param_groups[0]["lr"] == 0.5
    convert(tmp_path / "dcp", tmp_path / "tensors", to="safetensors", model_only=True)
    assert {tensor.name for tensor in inspect(tmp_path / "tensors").tensors} == {
        f"model.{n}" for n in model.state_dict()
    }


def test_several_models_or_optimizers_keep_their_keys(tmp_path: Path) -> None:
    model, optimizer = small(0)
    first, second = get_state_dict(model, optimizer)
    dcp.save({"a": App(first, second), "b": App(first, second)}, checkpoint_id=tmp_path, no_dist=True)
    with CheckpointSource(tmp_path) as source:
        assert {name.split(".")[1] for name in source.entries} == {"a", "b"}
    with pytest.raises(fullshard.CheckpointError):
        fullshard.load(tmp_path, *small(1), check=False)


def test_an_optimizer_under_another_key_is_named(tmp_path: Path) -> None:
    """That it was not saved, and that nothing was left out, was wrong."""
    model, optimizer = small(0)
    states = dict(zip(("model", "mine"), get_state_dict(model, optimizer), strict=True))
    dcp.save({**states, "seen": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(fullshard.CheckpointError) as caught:
        fullshard.load(tmp_path, *small(1), check=False)
    assert "mine.state." in str(caught.value) and "torch.distributed.checkpoint" in str(caught.value)
    for number in (1, 2):  # the model alone, and both
        loaded = fullshard.load(tmp_path, *small(1)[:number], check=False, strict=False)
        assert any(name.startswith("mine.state.") for name in loaded.untouched)
