"""Files of `torch.save`: read as `torch.load` reads them, written as `torch.save` writes them, nothing executed."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from files import Runs, archive, call, program, same, tensor, under
from fullshard import CheckpointError
from fullshard.store.formats.state import leaves
from fullshard.store.formats.torch_file import TorchFileSource, write_torch_file


def copied(source: TorchFileSource, path: Path) -> Any:
    """The same checkpoint, written again, and read by PyTorch."""
    write_torch_file(path, source.entries, source.values, source.ties, source.read)
    return torch.load(path, weights_only=True)


@pytest.mark.parametrize("protocol", [2, 5])
def test_what_torch_save_writes_is_read_and_written_again(tmp_path: Path, protocol: int) -> None:
    saved = program()
    torch.save(saved, tmp_path / "a.pt", pickle_protocol=protocol)
    with TorchFileSource(tmp_path / "a.pt") as source:
        model = {name: source.ties.get(f"model.{name}", f"model.{name}") for name in saved["model"]}
        assert all(same(source.read(model[name]), value) for name, value in saved["model"].items())
        assert source.ties == {"model.head.weight": "model.embedding.weight"}
        groups = saved["optimizer"]["param_groups"]
        names = dict(zip(groups[0]["params"], groups[0]["param_names"], strict=True))
        for number, state in saved["optimizer"]["state"].items():
            for key, value in state.items():
                assert same(source.read(f"optimizer.state.{names[number]}.{key}"), value)
        assert source.values["optimizer"]["param_groups"][0]["params"] == list(names.values())
        assert source.values["step"] == 12 and source.values["state"]["settings"] == saved["settings"]
        assert same(source.values["state"]["generator"]["list"][0], torch.ones(2))
        loaded = copied(source, tmp_path / "b.pt")
    assert loaded["model"].keys() == saved["model"].keys()
    assert all(same(loaded["model"][name], value) for name, value in saved["model"].items())
    assert loaded["model"]["head.weight"].data_ptr() == loaded["model"]["embedding.weight"].data_ptr()
    assert loaded["settings"] == saved["settings"] and loaded["step"] == 12
    assert [type(one) for one in loaded["generator"]["list"]] == [torch.Tensor, int]
    assert same(loaded["optimizer"]["param_groups"][0]["lr"], torch.tensor(0.01))
    mapped = torch.load(tmp_path / "b.pt", weights_only=True, mmap=True)
    assert all(same(one, dict(leaves(loaded))[path]) for path, one in leaves(mapped) if isinstance(one, torch.Tensor))


def test_rectangles_and_views(tmp_path: Path) -> None:
    whole = torch.arange(6_000_000, dtype=torch.int32).reshape(2000, 3000)
    saved = {"column": whole[:, 3:5], "turned": whole[:40, :30].t(), "cube": whole[:8].reshape(8, 100, 30)}
    torch.save(saved, tmp_path / "a.pt")
    with TorchFileSource(tmp_path / "a.pt") as source:
        assert all(same(source.read(f"model.{name}"), value) for name, value in saved.items())
        assert same(source.read("model.cube", (2, 5, 7), (3, 90, 11)), saved["cube"][2:5, 5:95, 7:18])
        assert same(source.read("model.turned", (4, 0), (0, 40)), saved["turned"][4:4])


def test_a_turned_view_of_a_large_tensor(tmp_path: Path) -> None:
    """Its last dim goes the longest way in the file; a hundredth of which is needed."""
    base = torch.arange(6_000_000, dtype=torch.int32).reshape(60, 100_000)
    saved = {"turned": base[:, :1000].t(), "cube": base[:, :1000].reshape(60, 10, 100).permute(2, 0, 1)}
    torch.save(saved, tmp_path / "a.pt")
    with TorchFileSource(tmp_path / "a.pt") as source:
        assert all(same(source.read(f"model.{name}"), value) for name, value in saved.items())


@pytest.mark.parametrize(
    ("model", "optimizer"), [("state_dict", "optim"), ("model_state_dict", "optimizer_state_dict")]
)
def test_the_names_that_programs_use(tmp_path: Path, model: str, optimizer: str) -> None:
    states = {"state": {"a.b": {"exp_avg": torch.ones(2), "step": 3}}, "param_groups": [{"lr": 0.1, "params": ["a.b"]}]}
    torch.save({model: {"a": {"b": torch.zeros(2)}}, optimizer: states}, tmp_path / "a.pt")
    with TorchFileSource(tmp_path / "a.pt") as source:
        assert list(source.entries) == ["model.a.b", "optimizer.state.a.b.exp_avg"]
        assert source.values["optimizer"]["scalars"] == {"a.b": {"step": 3}}
        loaded = copied(source, tmp_path / "b.pt")
    assert loaded["optimizer"]["state"]["a.b"]["step"] == 3
    assert loaded["optimizer"]["param_groups"] == states["param_groups"]


def test_numbered_state_that_cannot_be_named_is_kept_and_said(tmp_path: Path) -> None:
    layer = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.ones(2)).sum().backward()
    optimizer.step()
    torch.save({"model": layer.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    with TorchFileSource(tmp_path / "a.pt") as source:
        assert "optimizer.state.0.exp_avg" in source.entries and "numbers" in source.values["optimizer"]["warning"]
        loaded = copied(source, tmp_path / "b.pt")
    optimizer.load_state_dict(loaded["optimizer"])  # the numbers are numbers again


def test_optimizers_that_are_none_or_several_are_kept_as_they_are(tmp_path: Path) -> None:
    """Groups that list something else; and a list of optimizers."""
    one = {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"params": [0]}]}
    for name, optimizer in (("a", {"state": {}, "param_groups": [{"params": [{}]}]}), ("b", [one, one])):
        torch.save({"model": {"a": torch.ones(1)}, "optimizer": optimizer}, tmp_path / f"{name}.pt")
        with TorchFileSource(tmp_path / f"{name}.pt") as source:
            assert "optimizer" in source.values["state"] and "optimizer" not in source.values
            loaded = copied(source, tmp_path / f"{name}-again.pt")
    assert same(loaded["optimizer"][1]["state"][0]["exp_avg"], torch.ones(2))


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    torch.save({"a": {"b": torch.ones(1)}, "a.b": torch.zeros(1)}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="same name"):
        TorchFileSource(tmp_path / "a.pt")


@pytest.mark.parametrize("where", ["root", "model", "beside"])
def test_pickles_do_not_run(tmp_path: Path, where: str) -> None:
    witness = Runs(tmp_path / "ran")
    saved = {"root": witness, "model": {"a": witness}, "beside": {"model": {"a": torch.ones(1)}, "x": [{"y": witness}]}}
    torch.save(saved[where], tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"posix\.system"):
        TorchFileSource(tmp_path / "a.pt")
    assert not (tmp_path / "ran").exists()
    torch.load(tmp_path / "a.pt", weights_only=False)
    assert (tmp_path / "ran").exists(), "the pickle is one that runs"


def billion_laughs() -> dict[str, Any]:
    inner: dict[str, Any] = {"w": torch.ones(1)}
    for _ in range(40):
        inner = {"a": inner, "b": inner}
    return inner


def cycle() -> dict[str, Any]:
    made: dict[str, Any] = {"w": torch.ones(1)}
    made["self"] = made
    return made


FLOATS = {"0": bytes(16)}
ENDLESS = b"K\x01\x85q\x000" + b"".join(b"h%ch%c\x86q%c0" % (i, i, i + 1) for i in range(50))
"""Puts a tuple of 2^50 numbers, which consists of the same tuple twice, and so on, into place 50."""
ATTACKS = {
    "bytearray": (under("w", call("builtins", "bytearray", 10**12)), FLOATS, "bytearray"),
    "storage": (under("w", call("torch.storage", "UntypedStorage", 10**12)), FLOATS, "UntypedStorage"),
    "tensor": (under("w", call("torch", "FloatTensor", 10**12)), FLOATS, "FloatTensor"),
    "getattr": (under("w", call("builtins", "getattr", "x")), FLOATS, "getattr"),
    "record too short": (under("w", tensor(4000, (2, 2), (2, 1))), FLOATS, "wrong size"),
    "no record": (under("w", tensor(4, (2, 2), (2, 1))), {}, "no record"),
    "view beyond": (under("w", tensor(4, (2, 2), (2, 1), 1)), FLOATS, "beyond its record"),
    "negative stride": (under("w", tensor(4, (2, 2), (-2, 1), 3)), FLOATS, "damaged"),
    "negative size": (under("w", tensor(4, (-2, 2), (2, 1))), FLOATS, "damaged"),
    "large of little": (under("w", tensor(4, (10**12,), (0,))), FLOATS, "larger than the file"),
    "copies": (
        under("w", b"](" + b"K\x01" * 5000 + b"eq\x010" + b"ctorch\nSize\nh\x01\x85R0" * 1000 + b"N"),
        FLOATS,
        "over and over",
    ),
    "codec": (under("w", b"c_codecs\nencode\nX\x01\x00\x00\x00aX\x02\x00\x00\x00os\x86R"), FLOATS, "encoding"),
    "copies into dicts": (
        under("w", b"](" + b"K\x01K\x02" * 5000 + b"tq\x010" + b"}h\x01Ku\x87Q0" * 1000 + b"N"),
        FLOATS,
        "over and over",
    ),
    "endless text": (under("w", ENDLESS + b"ctorch\ndevice\nh\x32K\x01\x86R"), FLOATS, "device"),
    "endless key": (under("w", ENDLESS + b"}h\x32Ns"), FLOATS, "key of type tuple"),
    "endless item": (under("w", ENDLESS + b"\x8f(h\x32\x90"), FLOATS, "key of type tuple"),
    "endless frozen item": (under("w", ENDLESS + b"(h\x32\x91"), FLOATS, "key of type tuple"),
    "endless shape": (under("w", ENDLESS + tensor(4, (), ()).replace(b"(t(t", b"h\x32h\x32")), FLOATS, "shape"),
    "nested key": (under("w", b"}((K\x01tK\x01tK\x02s"), FLOATS, "key"),
    "no end": (b"\x80\x02}q\x00", FLOATS, "damaged"),
    "nothing": (b"", FLOATS, "damaged"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_sizes_are_checked_and_nothing_is_called(tmp_path: Path, attack: str) -> None:
    pickled, records, told = ATTACKS[attack]
    path = archive(tmp_path / "a.pt", pickled, records)
    with pytest.raises(CheckpointError, match=told):
        TorchFileSource(path)


@pytest.mark.parametrize("made", [billion_laughs, cycle])
def test_what_is_nested_without_end_is_refused(tmp_path: Path, made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fullshard.store.formats.state.MOST", 10_000)
    torch.save(made(), tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"nested too deeply|too many values"):
        TorchFileSource(tmp_path / "a.pt")


def test_zip_files_that_torch_does_not_write_are_refused(tmp_path: Path) -> None:
    good = under("w", tensor(4, (2, 2), (2, 1)))
    path = archive(tmp_path / "a.pt", good, FLOATS)
    assert list(TorchFileSource(path).entries) == ["model.w"]
    data = path.read_bytes()
    for size in (len(data) - 1, len(data) // 2, 40):
        path.write_bytes(data[:size])
        with pytest.raises(CheckpointError, match="not a complete zip file"):
            TorchFileSource(path)
    with pytest.raises(CheckpointError, match="compressed"):
        TorchFileSource(archive(path, good, {"0": bytes(16)}, compression=zipfile.ZIP_DEFLATED))
    with zipfile.ZipFile(path, "w") as made:
        made.writestr("x/readme", "hello")
    with pytest.raises(CheckpointError, match=r"not one of torch\.save"):
        TorchFileSource(path)
    with zipfile.ZipFile(archive(path, good, FLOATS), "a") as made, pytest.warns(UserWarning, match="Duplicate"):
        made.writestr("archive/data/0", bytes(16))
    with pytest.raises(CheckpointError, match="same name"):
        TorchFileSource(path)


def test_records_that_lie_on_one_another_are_refused(tmp_path: Path) -> None:
    path = archive(tmp_path / "a.pt", under("w", tensor(4, (2, 2), (2, 1))), {"0": bytes(16), "1": bytes(16)})
    data = bytearray(path.read_bytes())
    first, second = (data.index(b"PK\1\2", at) for at in (data.index(b"archive/data/0", 300) - 60, len(data) - 90))
    data[second + 42 : second + 46] = data[first + 42 : first + 46]  # where the record begins
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="records overlap"):
        TorchFileSource(path)


def test_nothing_is_left_of_a_file_that_was_not_finished(tmp_path: Path) -> None:
    torch.save(program(), tmp_path / "a.pt")
    path = tmp_path / "b.pt"
    with TorchFileSource(tmp_path / "a.pt") as source:

        def read(name: str) -> torch.Tensor:
            assert [one.name for one in tmp_path.iterdir() if one.name != "a.pt"] == ["b.pt.saving"]
            return torch.ones(1)

        with pytest.raises(CheckpointError, match="match its entry"):
            write_torch_file(path, source.entries, source.values, source.ties, read)
        assert [one.name for one in tmp_path.iterdir()] == ["a.pt"]
        with pytest.raises(CheckpointError, match="no place"):
            write_torch_file(path, source.entries, {"state": {"model": 1}}, {}, source.read)
        assert [one.name for one in tmp_path.iterdir()] == ["a.pt"]
