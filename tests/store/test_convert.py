"""Every format into every other, bit for bit; nothing dropped unsaid, nothing left behind, one tensor in memory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor

import fullshard
from files import Awkward, program, same, trained
from fullshard import CheckpointError, ConfigError, convert
from fullshard.exchange.detect import kind_of, open_source

NAMES = {"fullshard": "folder", "torch": "file.pt", "safetensors": "folder.safetensors", "dcp": "folder.dcp"}


def tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, ties too, and those among the values."""
    with open_source(path) as source:
        found = {name: source.read(name).clone() for name in source.entries}
        return found | {name: found[known] for name, known in source.ties.items()}


def test_a_model_from_each_kind_into_each(tmp_path: Path) -> None:
    model = Awkward().state_dict()
    here = tmp_path / "start.pt"
    torch.save(model, here)
    for number, kind in enumerate(("torch", "fullshard", "fullshard", "torch", "safetensors", "safetensors",
                                   "fullshard", "dcp", "dcp", "fullshard", "safetensors", "dcp", "torch")):  # fmt: skip
        place = tmp_path / str(number)
        place.mkdir()
        done = convert(here, place / NAMES[kind], to="dcp" if kind == "dcp" else None)
        assert not done.left_out and done.target_kind == kind
        here = place / NAMES[kind]
        if number == 3:
            loaded = torch.load(here, weights_only=True)
            assert loaded["head.weight"].data_ptr() == loaded["embedding.weight"].data_ptr()
    loaded = torch.load(here, weights_only=True)
    assert loaded.keys() == model.keys() and all(same(loaded[name], value) for name, value in model.items())


def test_a_whole_program_there_and_back(tmp_path: Path) -> None:
    saved = program()
    torch.save(saved, tmp_path / "a.pt")
    assert not convert(tmp_path / "a.pt", tmp_path / "b").left_out
    assert not convert(tmp_path / "b", tmp_path / "c.pt").left_out
    first, second, third = (tensors(tmp_path / name) for name in ("a.pt", "b", "c.pt"))
    assert first.keys() == second.keys() == third.keys()
    assert all(same(value, second[name]) and same(value, third[name]) for name, value in first.items())
    loaded = torch.load(tmp_path / "c.pt", weights_only=True)
    assert (loaded["step"], loaded["epoch"], loaded["settings"]) == (12, 3, saved["settings"])
    assert same(loaded["generator"]["state"], saved["generator"]["state"]) and loaded["generator"]["list"][1] == 5
    trained()[0].load_state_dict(loaded["model"])
    (group,) = loaded["optimizer"]["param_groups"]
    assert same(group["lr"], torch.tensor(0.01)) and group["betas"] == (0.9, 0.999)


def test_a_whole_program_by_way_of_dcp(tmp_path: Path) -> None:
    """What is no tensor, too: settings, scalars of optimizer state, a step, and a user's values."""
    saved = program()
    saved["optimizer"]["state"][saved["optimizer"]["param_groups"][0]["params"][0]]["note"] = "kept"
    torch.save(saved, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "b", to="dcp")
    convert(tmp_path / "b", tmp_path / "c.pt")
    first, last = (torch.load(tmp_path / name, weights_only=True) for name in ("a.pt", "c.pt"))
    assert first.keys() == last.keys() and (last["step"], last["epoch"]) == (12, 3)
    assert last["settings"] == first["settings"] and same(last["generator"]["state"], first["generator"]["state"])
    assert "kept" in [own.get("note") for own in last["optimizer"]["state"].values()]
    (before,), (after,) = first["optimizer"]["param_groups"], last["optimizer"]["param_groups"]
    assert after["betas"] == before["betas"] and same(after["lr"], before["lr"])


def test_names_that_only_resemble_those_of_incomplete_checkpoints(tmp_path: Path) -> None:
    file = tmp_path / "my.savings.pt"
    torch.save({"w": torch.ones(2)}, file)
    assert kind_of(file) == "torch"
    for name in ("model", "lora-rank-0"):
        save_file({"w": torch.ones(2)}, tmp_path / f"{name}.safetensors")
    assert kind_of(tmp_path) == "safetensors"


@pytest.mark.parametrize("kind", ["torch", "dcp"])
def test_values_of_classes_that_a_pickle_would_call(tmp_path: Path, kind: str) -> None:
    """Arrays become tensors, others what they are read as; each is noted."""
    values = {"array": np.arange(3), "in": [torch.device("cpu"), (torch.Size([2]),)], "count": Counter(a=1), "n": 1}
    fullshard.save(tmp_path / "ours", torch.nn.Linear(2, 2), state={"v": values}, rng=False)
    done = convert(tmp_path / "ours", tmp_path / NAMES[kind], to=kind)
    assert not done.left_out and done.notes == (
        "state.v.array is a NumPy array: written as a tensor",
        "state.v.in.0 is a device: written as a str",
        "state.v.in.1.0 is a Size: written as a tuple",
        "state.v.count is a Counter: written as a dict",
    )
    assert not convert(tmp_path / NAMES[kind], tmp_path / "back").notes
    loaded = fullshard.load(tmp_path / "back", torch.nn.Linear(2, 2), rng=False).state["v"]
    assert loaded.pop("array").tolist() == [0, 1, 2] and type(loaded["count"]) is dict
    assert loaded == {"in": ["cpu", ((2,),)], "count": {"a": 1}, "n": 1}


def test_fullshard_loads_what_was_converted_and_converts_what_it_saved(tmp_path: Path) -> None:
    """And folders of other programs."""
    model, optimizer = trained()
    want = model.state_dict()
    torch.save({"model": want, "optimizer": optimizer.state_dict(), "step": 7}, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "b")
    fresh = Awkward()
    again = torch.optim.AdamW([(n, p) for n, p in fresh.named_parameters() if p.requires_grad], lr=torch.tensor(0.5))
    assert fullshard.load(tmp_path / "b", fresh, again).step == 7
    assert all(same(value, fresh.state_dict()[name]) for name, value in want.items())
    for one, other in zip(optimizer.state.values(), again.state.values(), strict=True):
        assert all(same(value, other[key]) for key, value in one.items())
    fullshard.save(tmp_path / "c", fresh, again, step=8)
    convert(tmp_path / "c", tmp_path / "d.pt")
    loaded = torch.load(tmp_path / "d.pt", weights_only=True)
    assert loaded["step"] == 8 and all(same(value, loaded["model"][name]) for name, value in want.items())
    state = {name: value for name, value in want.items() if value.numel()}
    dcp.save({"model": state, "epoch": 5}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    convert(tmp_path / "dcp", tmp_path / "e.safetensors")
    found = tensors(tmp_path / "e.safetensors")
    assert found and all(same(value, state[name.removeprefix("model.")]) for name, value in found.items())


def test_what_a_format_has_no_place_for_is_named(tmp_path: Path) -> None:
    torch.save({**program(), "model": Awkward().state_dict()}, tmp_path / "a.pt")
    done = convert(tmp_path / "a.pt", tmp_path / "b", to="safetensors")
    assert {"optimizer state (9 tensors)", "optimizer", "step", "state: epoch"} <= {*done.left_out}
    assert "model.head.weight is tied to model.embedding.weight: written as a separate tensor" in done.notes
    assert "state: epoch" in convert(tmp_path / "a.pt", tmp_path / "c.pt", model_only=True).left_out
    assert torch.load(tmp_path / "c.pt", weights_only=True).keys() == Awkward().state_dict().keys()
    optimizer = {"state": {}, "param_groups": [], "own": 1}
    torch.save({"model": {"a": torch.ones(1)}, "optimizer": optimizer}, tmp_path / "d.pt")
    assert convert(tmp_path / "d.pt", tmp_path / "e").left_out == ("optimizer: own",)


def test_numbers_in_place_of_names_and_averages_that_are_one_are_noted(tmp_path: Path) -> None:
    one = torch.ones(2)
    states = {"state": {0: {"exp_avg": one, "exp_avg_sq": one}}, "param_groups": [{"params": [0]}]}
    torch.save({"model": {"a": torch.ones(2)}, "optimizer": states}, tmp_path / "a.pt")
    notes = " ".join(convert(tmp_path / "a.pt", tmp_path / "b.pt").notes)
    assert (
        "numbers in place of names" in notes and "exp_avg_sq and optimizer.state.0.exp_avg are the same tensor" in notes
    )
    dcp.save({"model": {"a": one}, "optimizer": states}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    convert(tmp_path / "dcp", tmp_path / "c")
    convert(tmp_path / "c", tmp_path / "d.pt")
    optimizer = torch.load(tmp_path / "d.pt", weights_only=True)["optimizer"]
    assert optimizer["param_groups"] == [{"params": [0]}] and same(optimizer["state"][0]["exp_avg"], one)


def test_weights_are_cast_and_nothing_else(tmp_path: Path) -> None:
    saved = program()
    torch.save(saved, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "b.pt", dtype=torch.bfloat16)
    before, after = tensors(tmp_path / "a.pt"), tensors(tmp_path / "b.pt")
    for name, value in before.items():
        cast = name.startswith("model.") and value.dtype.is_floating_point
        assert same(after[name], value.to(torch.bfloat16) if cast else value)
    with pytest.raises(ConfigError, match="floating-point"):
        convert(tmp_path / "a.pt", tmp_path / "c.pt", dtype=torch.int64)


def test_nothing_is_overwritten_and_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(program(), tmp_path / "a.pt")
    (tmp_path / "there").mkdir()
    for name in ("a.pt", "there"):
        with pytest.raises(CheckpointError, match="is not overwritten"):
            convert(tmp_path / "a.pt", tmp_path / name)
    with pytest.raises(CheckpointError, match="does not exist"):
        convert(tmp_path / "a.pt", tmp_path / "x" / "y.pt")

    def stop(name: str, done: int, total: int) -> None:
        if done > 300:
            raise KeyboardInterrupt

    for kind, name in NAMES.items():
        with pytest.raises(KeyboardInterrupt):
            convert(tmp_path / "a.pt", tmp_path / name, to=kind, progress=stop)
        assert sorted(one.name for one in tmp_path.iterdir()) == ["a.pt", "there"], kind
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=10))
    with pytest.raises(CheckpointError, match="not enough disk space"):
        convert(tmp_path / "a.pt", tmp_path / "b.pt")


MEASURE = """
import json, threading, time
from fullshard import convert

def held():
    # Anonymous memory: pages of files that are read or written can be dropped by the system at any time.
    return int(next(line for line in open("/proc/self/status") if line.startswith("RssAnon")).split()[1]) * 1024

def peak_of(kind):
    convert("small.pt", f"small-{kind}", to=kind)  # what is imported and made once
    before = peak = held()
    done = []
    working = threading.Thread(target=lambda: done.append(convert("large.pt", f"large-{kind}", to=kind)))
    working.start()
    while working.is_alive():
        peak = max(peak, held())
        time.sleep(0.001)
    assert done
    return peak - before

print(json.dumps({kind: peak_of(kind) for kind in ("torch", "fullshard", "safetensors", "dcp")}))
"""


def test_memory_is_of_one_tensor_and_a_buffer(tmp_path: Path) -> None:
    one = 40 * 2**20  # less than 32 MiB malloc keeps
    torch.save({"a": torch.ones(3)}, tmp_path / "small.pt")
    with torch.serialization.skip_data():  # 160 MiB of holes
        torch.save({f"layer{i}": torch.empty(one // 4) for i in range(4)}, tmp_path / "large.pt")
    ran = subprocess.run(
        [sys.executable, "-c", MEASURE], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=250
    )
    peaks = json.loads(ran.stdout)
    assert len(peaks) == 4 and max(peaks.values()) < one + 64 * 2**20, peaks
    assert min(peaks.values()) > one / 2, "a tensor is seen while it is held"
