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
from fullshard.layout import ParameterSpec, plan_flat
from fullshard.watcher import rank as rank_module
from fullshard.watcher import start
from fullshard.watcher.rank import Rank
from raising import assert_raises, put, raises, reads, two_layers, warns, words_of
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


CALLS = [
    (lambda: verify(model_fn=None), "ConfigError: verify(model_fn=) is invalid ... a function ... None"),
    (lambda: verify(train_step_fn="step"), "ConfigError: verify(train_step_fn=) is invalid ... a function"),
    (lambda: verify(steps=0), "ConfigError: verify(steps=) is invalid ... an int of at least 1 ... 0"),
    (lambda: verify(reduction="max"), 'ConfigError: verify(reduction=) is invalid ... "mean", "sum" or "tokens"'),
    (lambda: verify(reduction="tokens"), 'ConfigError: verify: reduction="tokens" and tokens_fn require each other'),
    (
        lambda: verify(train_step_fn=lambda model, optimizer, batches: None, no_sync=True),
        "ConfigError: verify: no_sync is for",
    ),
    (lambda: verify(initial="random"), 'ConfigError: verify: initial must be "compare" or "copy"'),
    (lambda: verify(modules=["0"], max_norm=1.0), "ConfigError: verify: max_norm needs the gradients of the whole"),
    (
        lambda: verify(reduction="tokens", tokens_fn=lambda batch: 0),
        "ConfigError: tokens_fn returned negative numbers, or",
    ),
    (lambda: verify(modules=["layers.7"]), "ConfigError: modules= must be names of the model's modules"),
    (lambda: verify(shard_fn=lambda model: 1), "ConfigError: shard_fn must return a module, or a module and its"),
    (lambda: verify(optimizer_fn=lambda model: 1), "ConfigError: verify: optimizer_fn must return an optimizer or a"),
    (lambda: verify(batch_fn=lambda *_: Path("no tokens.bin").read_bytes()), "ConfigError: verify could not begin"),
    # What commands and `watch` are given.
    (lambda: "train.py", function_at, "ConfigError: there is no train.py"),
    (lambda: function_at("no.such.module:check"), "ConfigError: no.such.module cannot be imported"),
    (lambda: fullshard.watch(limit=0), "ConfigError: watch(limit=) is invalid ... seconds"),
    (lambda: fullshard.watch(enabled="yes"), "ConfigError: watch(enabled=) is invalid ... True or False"),
    (lambda: fullshard.watch(folder=""), "ConfigError: watch(folder=) is invalid ... the path of a folder"),
    # Layouts, planned without tensors: what they assert of themselves.
    (
        lambda: plan_flat([WEIGHT, BIAS], 2, 4),
        lambda layout: replace(layout, slots=(layout.slots[0], replace(layout.slots[1], full_offset=8))),
        "AssertionError: parameters weight and bias overlap in the full bucket",
    ),
    (
        lambda: replace(plan_flat([WEIGHT], 2, 4), full_numel=8),
        "AssertionError: parameter weight ends at 16",
    ),
    (
        lambda: plan_flat([WEIGHT], 2, 4),
        lambda layout: replace(layout, slots=(replace(layout.slots[0], full_offset=2),), full_numel=32),
        "AssertionError: parameter weight begins at 2, not a multiple of 4",
    ),
    # A rank and its watcher.
    (
        Rank,
        lambda rank: rank.condemn("Rank 1 has ended (killed by signal 9)."),
        lambda rank: rank.record(0),
        "DivergenceError: Rank 1 has ended (killed by signal 9)",
    ),
]
FOLDERS = [
    (lambda f: function_at(script(f, "pass")), "ConfigError: there is no function 'check' in"),
    (lambda f: function_at(f"{f / 'train.py'}:check"), "ConfigError: there is no file"),
    (lambda f: doctor(f / "reports"), "ConfigError: there is no file or folder"),
    (put("stuck-1.json", "{"), lambda f: doctor(f / "stuck-1.json"), "ConfigError: cannot be read: it ends in the"),
    (doctor, "ConfigError: there is neither a"),
    (
        put("reports"),
        lambda f: fullshard.watch(folder=f / "reports"),
        "ConfigError: watch(folder=) is invalid ... the path of a folder (not of a file",
    ),
    (
        put("reports"),
        lambda f: fullshard.watch(folder=f / "reports" / "of" / "today"),
        "ConfigError: watch(folder=) is invalid ... nor below one",
    ),
]
COMMANDS = [
    (lambda f: ["verify", script(f, "def check(): raise KeyError('lr')")], "ConfigError: raised KeyError at"),
    (lambda f: ["verify", script(f, "def check(): return 1")], "ConfigError: must return a dictionary of"),
    (lambda f: ["verify", script(f, "def check(): return {'model': 1}")], "ConfigError: returned arguments that"),
]


@pytest.mark.parametrize("row", CALLS, ids=words_of)
def test_calls(row):
    assert_raises(row)


@pytest.mark.parametrize("row", FOLDERS, ids=words_of)
def test_in_a_folder(tmp_path, row):
    assert_raises(row, tmp_path)


@pytest.mark.parametrize("row", COMMANDS, ids=words_of)
def test_commands(tmp_path, capsys, row):
    """The command says this, and nothing after it."""
    arguments, words = row
    assert main(arguments(tmp_path)) == 2
    assert reads(capsys.readouterr().err.replace("fullshard", "ConfigError", 1), words)


# What `verify` quotes of what it was given.


def on_meta() -> torch.nn.Module:
    """Shapes without values."""
    with torch.device("meta"):
        return two_layers()


ONLY = two_layers()
QUOTED = [
    ({"model_fn": lambda: ONLY}, "model_fn must make a new module at each call"),
    (
        {"model_fn": on_meta, "shard_fn": lambda model: fullshard.fully_shard(two_layers())},
        "model_fn returned parameters on the meta device",
    ),
]


@pytest.mark.parametrize("row", QUOTED, ids=words_of)
def test_what_verify_quotes(row):
    functions, words = row
    with raises(f"ConfigError: verify could not begin ... {words}"):
        verify(**functions)


# A rank and its watcher.


def test_a_watcher_that_cannot_be_started():
    def refuse() -> None:
        raise OSError("no more descriptors")

    with warns("UserWarning: no watcher could be started (no more descriptors)"):
        start(Rank(), 0, 2, 60.0, refuse)


def test_a_rank_that_went_without_a_word(monkeypatch):
    rank = Rank()
    start(rank, 0, 2, 60.0, Store)
    monkeypatch.setattr(rank_module, "_EXPLAINED", 0.1)
    with raises("DivergenceError: a connection to another rank broke (Connection closed by peer)"):
        raise rank.explain(RuntimeError("Connection closed by peer"))
    rank.watcher.end(announce=False)
