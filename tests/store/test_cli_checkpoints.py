"""`fullshard convert` and `fullshard inspect`: what they print, also for what is wrong, and exit codes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from files import Runs, program
from fullshard import convert
from fullshard.cli.main import main


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    torch.save(program(), "a.pt")
    return tmp_path


def test_convert_then_inspect(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", "a.pt", "b"]) == 0
    assert capsys.readouterr().out.startswith("wrote b (fullshard): 25 tensors, ")
    assert main(["inspect", "b"]) == 0
    assert "model.odd.weight" not in capsys.readouterr().out
    assert main(["inspect", "b", "--tensors"]) == 0
    text = capsys.readouterr().out
    row = next(line for line in text.splitlines() if line.startswith("model.odd.weight "))
    assert row.split() == ["model.odd.weight", "13x3", "float32", "156", "rank-0.safetensors"]
    assert "tied: model.head.weight is model.embedding.weight" in text and "hashes: all right" in text
    assert main(["convert", "b", "c", "--to", "safetensors", "--dtype", "bfloat16"]) == 0
    assert "left out: optimizer state (9 tensors)" in capsys.readouterr().out
    assert main(["inspect", "c", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["kind"] == "safetensors" and told["hashed_bytes"] is None
    (odd,) = [one for one in told["tensors"] if one["name"] == "model.odd.weight"]
    assert odd == {
        "name": "model.odd.weight", "shape": [13, 3], "dtype": "bfloat16", "bytes": 78, "files": ["model.safetensors"]
    }  # fmt: skip


def test_damage_is_found_by_hashes(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    convert("a.pt", "b")
    (file,) = Path("b").glob("rank-*.safetensors")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert main(["inspect", "b"]) == 1
    assert f"damaged: {file.name}: " in capsys.readouterr().out
    assert main(["convert", "b", "c.pt"]) == 2
    assert "damaged" in capsys.readouterr().err and not Path("c.pt").exists()


@pytest.mark.parametrize("length", [None, 0, 1000])
def test_files_that_are_missing_or_truncated_make_a_checkpoint_incomplete(
    here: Path, capsys: pytest.CaptureFixture[str], length: int | None
) -> None:
    convert("a.pt", "b")
    (file,) = Path("b").glob("rank-*.safetensors")
    data = file.read_bytes()
    file.unlink()
    if length is not None:
        file.write_bytes(data[:length])
    assert main(["inspect", "b"]) == 2
    assert f"A file of a checkpoint is {'missing' if length is None else 'truncated'}" in capsys.readouterr().err


def test_an_empty_path_is_not_the_current_folder(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    convert("a.pt", "b")
    assert main(["inspect", ""]) == 2
    assert "The path to inspect is empty" in capsys.readouterr().err


def test_a_file_without_a_tensor_is_noted(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({}, "empty.pt")
    assert main(["convert", "empty.pt", "b"]) == 0
    assert "note: the source contains no tensor" in capsys.readouterr().out


def half_folder() -> None:
    convert("a.pt", "bad")
    Path("bad/manifest.json").unlink()


BAD = {
    "nothing": lambda: None,
    "text": lambda: Path("bad").write_text("hello, this is no checkpoint"),
    "half a folder": half_folder,
    "a pickle that runs": lambda: torch.save(
        {"model": {"a": Runs(Path("ran"))}, "x\x1b[2Jy": Runs(Path("ran"))}, "bad"
    ),
}


@pytest.mark.parametrize("bad", BAD)
def test_what_is_wrong_is_told_in_words(here: Path, capsys: pytest.CaptureFixture[str], bad: str) -> None:
    BAD[bad]()
    for arguments in (["inspect", "bad"], ["convert", "bad", "new.pt"]):
        assert main(arguments) == 2
        told = capsys.readouterr()
        assert re.fullmatch(r"fullshard: .+\n(  .+\n)*", told.err) and told.out == ""
        assert "\x1b" not in told.err
    assert not Path("new.pt").exists() and not Path("ran").exists()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["a.pt"], "DST"),
        (["a.pt", "a.pt"], "a.pt already exists"),
        (["a.pt", "b", "--to", "zip"], "--to"),
        (["a.pt", "b.pt", "--to", "dcp"], "The name b.pt has the suffix of the format torch"),
        (["a.pt", ""], "The path to write is empty"),
        (["", "b"], "The path to read is empty"),
        (["a.pt", "b", "--model", "nothing"], "--model"),
    ],
)
def test_arguments_that_make_no_sense(
    here: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], named: str
) -> None:
    assert main(["convert", *arguments]) == 2
    assert named in capsys.readouterr().err and not Path("b").exists()


def test_formats_are_listed_in_one_order(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["convert", "a.pt", "b", "--to", "zip"])
    words = " ".join(capsys.readouterr().err.replace("│", "").split())
    assert "('auto', 'fullshard', 'dcp', 'torch', 'safetensors')" in words, words


def test_names_cannot_change_the_terminal(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"a\x1b[2J\nb": torch.ones(1)}, "a.pt")
    assert main(["inspect", "a.pt", "--tensors"]) == 0
    assert "\x1b" not in capsys.readouterr().out
