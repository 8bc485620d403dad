"""Weights that replace others: a process that is killed at any moment leaves the old ones or the new ones."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullshard import CheckpointError
from fullshard.integrations.hf.saving import write_weights
from fullshard.store import in_place
from fullshard.store.formats.safetensors_folder import SafetensorsSource


class Killed(BaseException):
    """In place of a signal."""


_left: list[int] = []
"""How many changes of names are allowed before the end; empty: any number."""


def watch(event: str, args: tuple[Any, ...]) -> None:
    if _left and event in ("os.rename", "os.remove", "os.rmdir"):
        if not _left[0]:
            raise Killed
        _left[0] -= 1


sys.addaudithook(watch)


@contextmanager
def killed_after(changes: int) -> Iterator[None]:
    _left[:] = [changes]
    try:
        yield
    finally:
        _left.clear()


def model_of(value: float, layers: int = 4) -> nn.Module:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return model


def values_in(folder: Path) -> set[float]:
    """Of all tensors; nothing if the folder says itself that it holds two models."""
    try:
        with SafetensorsSource(folder) as source:
            return {value for name in source.entries for value in source.read(name).unique().tolist()}
    except CheckpointError as error:
        assert "holds two models" in str(error)
        return set()


def test_weights_are_never_mixed(tmp_path: Path) -> None:
    """Of one file and of several, in either order: a kill before each change of a name."""
    for before, after in itertools.product((10**9, 200, 170), repeat=2):
        for changes in itertools.count():
            folder = tmp_path / f"{before}-{after}-{changes}"
            write_weights(model_of(1.0), folder, max_shard_size=before)
            (folder / "tokenizer.json").write_text("{}")
            try:
                with killed_after(changes):
                    write_weights(model_of(2.0), folder, max_shard_size=after)
            except Killed:
                assert len(values_in(folder)) <= 1, (before, after, changes)
            else:
                assert values_in(folder) == {2.0}
                break
            write_weights(model_of(3.0), folder, max_shard_size=after)
            assert values_in(folder) == {3.0}
        assert changes >= 3
        left = {path.name for path in folder.iterdir()}
        with SafetensorsSource(folder) as source:
            held = {source.file_of(name) for name in source.entries}
        assert left == {"tokenizer.json", *held} | ({"model.safetensors.index.json"} if len(held) > 1 else set())


def test_a_folder_takes_anothers_place(tmp_path: Path, monkeypatch: Any) -> None:
    """With an exchange of names, and without: there is always one, or `recover_folder` puts it back."""
    for exchanges in (True, False):
        if not exchanges:
            monkeypatch.setattr(in_place, "_exchanged", lambda *args: False)
        for changes in range(8):
            path, fresh = tmp_path / f"{exchanges}{changes}", tmp_path / f".{exchanges}{changes}.new"
            for folder, text in ((path, "old"), (fresh, "new")):
                folder.mkdir()
                (folder / "text").write_text(text)
            try:
                with killed_after(changes):
                    in_place.put_folder(fresh, path)
            except Killed:
                assert path.exists() or not exchanges
                in_place.recover_folder(path)
                assert (path / "text").read_text() in ("old", "new")
            else:
                assert changes and (path / "text").read_text() == "new" and not fresh.exists()
                assert not in_place._old(path).exists()


def test_complex_weights_in_safetensors(tmp_path: Path) -> None:
    """Also conjugated ones, which are views of memory that holds something else."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.randn(3, dtype=torch.complex64).conj())
    write_weights(model, tmp_path)
    with SafetensorsSource(tmp_path) as source:
        assert torch.equal(source.read("model.weight"), model.weight.detach())
