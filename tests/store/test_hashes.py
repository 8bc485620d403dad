"""How files are hashed: XXH3 where its package is there, else SHA-256; what was written with either loads."""

from __future__ import annotations

import ctypes
import importlib.util
import io
import json
import os
import sys
from collections import Counter
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar
from unittest import mock

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from torch import nn

import fullshard
from forged import outcome, save_small
from fullshard import CheckpointError
from fullshard.exchange.inspect import inspect
from fullshard.store import hashed
from fullshard.store.hashed import BLOCK, CHUNK, Hashed

NEWEST = "step-000000003"
WITHOUT = MappingProxyType({**hashed.KINDS, "xxh3_128": None})


def test_either_kind_loads_and_says_which_it_is(tmp_path, monkeypatch):
    save_small(tmp_path / "fast")
    with monkeypatch.context() as without:
        without.setattr(hashed, "KINDS", WITHOUT)
        save_small(tmp_path / "slow")
        assert outcome(tmp_path / "slow")[0] is None
    for kind, key in (("fast", "xxh3_128"), ("slow", "sha256")):
        manifest = json.loads((tmp_path / kind / NEWEST / "manifest.json").read_bytes())["manifest"]
        assert outcome(tmp_path / kind)[0] is None
        assert all(set(facts) == {"bytes", key} for facts in manifest["files"].values())


def test_without_the_package_it_is_named(tmp_path, monkeypatch):
    save_small(tmp_path)
    monkeypatch.setattr(hashed, "KINDS", WITHOUT)
    error, unchanged, _ = outcome(tmp_path)
    assert isinstance(error, CheckpointError) and unchanged
    assert "pip install xxhash" in str(error) and "check=False" in str(error) and "xxh3_128" in str(error)
    assert outcome(tmp_path, check=False)[0] is None
    with pytest.raises(CheckpointError, match="--no-hashes"):
        inspect(tmp_path)
    assert inspect(tmp_path, hashes=False).tensors


@pytest.mark.parametrize("length", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, BLOCK, BLOCK + 3])
def test_hashes_are_those_of_the_bytes(length):
    """However they are cut when they are written."""
    data = (bytes(range(251)) * (length // 251 + 1))[:length]
    kept = io.BytesIO()
    stream = Hashed(kept)
    for begin in range(0, length, 700_001):
        stream.write(data[begin : begin + 700_001])
    facts, wanted = stream.facts(), []
    assert kept.getvalue() == data and facts.nbytes == length
    for begin in range(0, length, BLOCK):
        wanted.append(hashed.new_hash(facts.kind, ""))
        wanted[-1].update(data[begin : begin + BLOCK])
    assert list(facts.hashes) == [found.hexdigest() for found in wanted]


def test_other_systems_import_it(monkeypatch):
    """Where there is neither the C library under no name nor a fork."""
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(ctypes, "CDLL", mock.Mock(side_effect=TypeError("no library of no name")))
    monkeypatch.delattr(os, "register_at_fork")
    for name in ("fullshard.store.hashed", "fullshard.store.background"):
        spec = importlib.util.find_spec(name)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)


class Counting(LocalFileSystem):
    """A disk behind an address, which counts the bytes that are read of each file."""

    protocol = "counting"
    read: ClassVar[Counter[str]] = Counter()

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(str(path).removeprefix("counting://"))

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        file = super()._open(path, mode, **options)
        inner = file.readinto

        def readinto(target: Any) -> int:
            Counting.read[Path(path).name] += (count := inner(target))
            return count

        file.readinto = readinto
        return file


@pytest.mark.parametrize("room", [True, False])
def test_bytes_behind_an_address_are_read_once(tmp_path: Path, monkeypatch: Any, room: bool) -> None:
    """Compared with their hashes, and what was compared is used; without room for it, they are read again."""
    fsspec.register_implementation("counting", Counting, clobber=True)
    models = [nn.Sequential(nn.Linear(300, 500), nn.Linear(500, 7)) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), momentum=0.9) for model in models]
    models[0](torch.ones(1, 300)).sum().backward()
    optimizers[0].step()
    fullshard.save(tmp_path, models[0], optimizers[0], step=1)
    files = {path.name: path.stat().st_size for path in (tmp_path / "step-000000001").iterdir()}
    if not room:
        monkeypatch.setattr(os, "pwrite", lambda *_: 0)
    Counting.read.clear()
    fullshard.load(f"counting://{tmp_path}", models[1], optimizers[1])
    assert all(torch.equal(a, b) for a, b in zip(*(model.parameters() for model in models), strict=True))
    if room:
        assert {name: Counting.read[name] for name in files} == files
    else:
        assert all(Counting.read[name] <= 2 * size + 2**12 for name, size in files.items())
