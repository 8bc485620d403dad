"""Weights that replace others: a process that is killed at any moment leaves the old ones or the new ones."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from disk import Disk, Fault, Killed, put
from torch import nn

from fullshard import CheckpointError
from fullshard.integrations.hf.saving import write_weights
from fullshard.store.formats.safetensors_folder import SafetensorsSource


def killed(folder: Path, number: int, act: Callable[[], object]) -> bool:
    """Whether it was, at its call of this number that changes a file."""
    with Disk(folder) as disk, disk.acting("it"):
        disk.fault = Fault("it", number, "kill")
        try:
            act()
        except Killed:
            return True
    return False


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
        assert "contains two models" in str(error)
        return set()


SIZES = list(itertools.product((10**9, 200, 170), repeat=2))
"""Bytes of a file, of the weights before and of those after: one file and several, in either order."""


def test_weights_are_never_mixed(tmp_path: Path) -> None:
    """A kill at every call; and the old ones, the new ones, or an error when the machine is switched off."""
    for before, after in SIZES:
        start, seen = tmp_path / f"{before}-{after}", {}
        write_weights(model_of(1.0), start, max_shard_size=before)
        (start / "tokenizer.json").write_text("{}")

        def write(folder: Path, value: float) -> None:
            write_weights(model_of(value), folder, max_shard_size=after)  # noqa: B023

        for number in itertools.count(1):
            folder = tmp_path / f"{before}-{after}-{number}"
            shutil.copytree(start, folder)
            if not killed(folder, number, lambda: write(folder, 2.0)):  # noqa: B023
                assert values_in(folder) == {2.0}
                break
            assert len(values_in(folder)) <= 1, (before, after, number)
            assert not killed(folder, 0, lambda: write(folder, 3.0))  # noqa: B023
            assert values_in(folder) == {3.0}
        left = {path.name for path in folder.iterdir()}
        with SafetensorsSource(folder) as source:
            held = {file for name in source.entries for file in source.files_of(name)}
        assert left == {"tokenizer.json", *held} | ({"model.safetensors.index.json"} if len(held) > 1 else set())

        def look(disk: Disk) -> None:
            seen.update({frozenset(tree.items()): tree for tree in disk.remains()})  # noqa: B023

        with Disk(start, look) as disk, disk.acting("it"):
            write(start, 2.0)
        for at, tree in enumerate(seen.values()):
            put(tree, tmp_path / f"off-{before}-{after}-{at}")
            assert len(values_in(tmp_path / f"off-{before}-{after}-{at}")) <= 1, sorted(tree)
        assert number > 10 and len(seen) > 10


def test_complex_weights_in_safetensors(tmp_path: Path) -> None:
    """Also conjugated ones, which are views of memory that holds something else."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.randn(3, dtype=torch.complex64).conj())
    write_weights(model, tmp_path)
    with SafetensorsSource(tmp_path) as source:
        assert torch.equal(source.read("model.weight"), model.weight.detach())
