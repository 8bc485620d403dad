"""Errors of `verify`, the doctor, `watch`, and what commands are given; in one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fullshard
from fullshard.cli.main import main
from fullshard.cli.target import function_at
from fullshard.insight.doctor import doctor
from fullshard.layout import ParameterSpec, plan_blocks, plan_flat, plan_owner, plan_rows
from fullshard.watcher import rank as rank_module
from fullshard.watcher import start
from fullshard.watcher.rank import Rank
from raising import assert_raises, put, raises, two_layers, warns
from stores import Store

GIVEN = {"model_fn": two_layers, "batch_fn": lambda *_: torch.ones(1, 4), "loss_fn": lambda model, x: model(x).sum()}
WEIGHT = ParameterSpec("weight", (4, 4), (0, 1))
BIAS = ParameterSpec("bias", (4,), (0,))


def verify(**given: object) -> object:
    return fullshard.verify(**{**GIVEN, **given})


def script(folder: Path, text: str) -> str:
    """A script that a command is given, and the function in it."""
    (folder / "train.py").write_text(text)
    return f"{folder / 'train.py'}:check"


CALLS = {
    "C123": lambda: verify(model_fn=None),
    "C124": lambda: verify(train_step_fn="step"),
    "C125": (lambda: verify(steps=0), "steps"),
    "C126": lambda: verify(reduction="max"),
    "C127": (lambda: verify(reduction="tokens"), "tokens_fn"),
    "C128": lambda: verify(train_step_fn=lambda model, optimizer, batches: None, no_sync=True),
    "C118": (lambda: verify(initial="random"), "initial"),
    "C116": lambda: verify(modules=["0"], max_norm=1.0),
    "C130": lambda: verify(reduction="tokens", tokens_fn=lambda batch: 0),
    "C119": lambda: verify(batch_fn=lambda *_: Path("no tokens.bin").read_bytes()),
    # What commands and `watch` are given.
    "C077": (lambda: "train.py", function_at, "is not SCRIPT-OR-MODULE:FUNCTION"),
    "C078": lambda: function_at("no.such.module:check"),
    "C203": lambda: fullshard.watch(limit=0),
    "C204": lambda: fullshard.watch(enabled="yes"),
    "C205": lambda: fullshard.watch(folder=""),
    # Layouts, planned without tensors.
    "L001": lambda: plan_rows([WEIGHT], 0, 4, 1024),
    "L006": lambda: plan_blocks([WEIGHT], [4], 0, 4, 1024, "blocks"),
    "L007": lambda: plan_owner([WEIGHT], 0, 4),
    "L003": lambda: plan_rows([replace(WEIGHT, dim=2)], 2, 4, 1024),
    "L008": (
        lambda: plan_flat([WEIGHT, BIAS], 2, 4),
        lambda layout: replace(layout, slots=(layout.slots[0], replace(layout.slots[1], full_offset=8))),
    ),
    "L009": lambda: replace(plan_flat([WEIGHT], 2, 4), full_numel=8),
    "L010": (
        lambda: plan_flat([WEIGHT], 2, 4),
        lambda layout: replace(layout, slots=(replace(layout.slots[0], full_offset=2),), full_numel=32),
    ),
    # A rank and its watcher.
    "D016": (Rank, lambda rank: rank.condemn("Rank 1 has ended (killed by signal 9)."), lambda rank: rank.record(0)),
}
FOLDERS = {
    "C079": (lambda f: function_at(script(f, "pass")), "no function 'check'"),
    "C080": (lambda f: function_at(f"{f / 'train.py'}:check"), "no file"),
    "C104": lambda f: doctor(f / "reports"),
    "C105": (put("stuck-1.json", "{"), lambda f: doctor(f / "stuck-1.json")),
    "C106": doctor,
    "C206": (put("reports"), lambda f: fullshard.watch(folder=f / "reports")),
}
COMMANDS = {
    "C081": lambda f: ["verify", script(f, "def check(): raise KeyError('lr')")],
    "C082": lambda f: ["verify", script(f, "def check(): return 1")],
    "C083": lambda f: ["verify", script(f, "def check(): return {'model': 1}")],
    "C207": lambda f: ["explain", "C999"],
}


@pytest.mark.parametrize("code", CALLS)
def test_calls(code):
    assert_raises(code, CALLS[code])


@pytest.mark.parametrize("code", FOLDERS)
def test_in_a_folder(tmp_path, code):
    assert_raises(code, FOLDERS[code], tmp_path)


@pytest.mark.parametrize("code", COMMANDS)
def test_commands(tmp_path, capsys, code):
    """The command says this, and nothing after it."""
    assert main(COMMANDS[code](tmp_path)) == 2
    assert capsys.readouterr().err.split()[-2:] == ["code:", code]


# What `verify` quotes of what it was given.


def on_meta() -> torch.nn.Module:
    """Shapes without values."""
    with torch.device("meta"):
        return two_layers()


ONLY = two_layers()
QUOTED = {
    "C117": {"modules": ["layers.7"]},
    "C122": {"shard_fn": lambda model: 1},
    "C129": {"optimizer_fn": lambda model: 1},
    "C131": {"model_fn": lambda: ONLY},
    "C132": {"model_fn": on_meta, "shard_fn": lambda model: fullshard.fully_shard(two_layers())},
}


@pytest.mark.parametrize("code", QUOTED)
def test_what_verify_quotes(code):
    with raises("C119", quoting=code):
        verify(**QUOTED[code])


# A rank and its watcher.


def test_a_watcher_that_cannot_be_started():
    def refuse() -> None:
        raise OSError("no more descriptors")

    with warns("W015"):
        start(Rank(), 0, 2, 60.0, refuse)


def test_a_rank_that_went_without_a_word(monkeypatch):
    rank = Rank()
    start(rank, 0, 2, 60.0, Store)
    monkeypatch.setattr(rank_module, "_EXPLAINED", 0.1)
    with raises("D015"):
        raise rank.explain(RuntimeError("Connection closed by peer"))
    rank.watcher.end(says_so=False)
