"""Errors of `verify`, the doctor, `watch`, and what commands are given; in one process."""

from __future__ import annotations

import itertools
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fullshard
from fullshard.cli.main import main
from fullshard.cli.target import function_at
from fullshard.insight.doctor import doctor
from fullshard.layout import ParameterSpec, plan_blocks, plan_flat, plan_owner, plan_rows
from fullshard.reference.find import find
from fullshard.reference.write import LIST, write
from fullshard.watcher.rank import Rank
from raising import raises, two_layers, warns

GIVEN = {"model_fn": two_layers, "batch_fn": lambda *_: torch.ones(1, 4), "loss_fn": lambda model, x: model(x).sum()}


def test_a_model_in_place_of_a_function_that_makes_one():
    with raises("C123"):
        fullshard.verify(**{**GIVEN, "model_fn": None})


def test_a_step_that_is_no_function():
    with raises("C124"):
        fullshard.verify(**GIVEN, train_step_fn="step")


def test_no_steps():
    with raises("C125"):
        fullshard.verify(**GIVEN, steps=0)


def test_a_reduction_that_there_is_not():
    with raises("C126"):
        fullshard.verify(**GIVEN, reduction="max")


def test_sums_by_tokens_without_counting_them():
    with raises("C127"):
        fullshard.verify(**GIVEN, reduction="tokens")


def test_no_sync_in_a_step_of_ones_own():
    with raises("C128"):
        fullshard.verify(**GIVEN, train_step_fn=lambda model, optimizer, batches: None, no_sync=True)


def test_another_way_to_begin():
    with raises("C118"):
        fullshard.verify(**GIVEN, initial="random")


def test_clipping_the_norm_of_some_modules():
    with raises("C116"):
        fullshard.verify(**GIVEN, modules=["0"], max_norm=1.0)


def test_a_batch_that_cannot_be_made():
    def broken(*_: int) -> torch.Tensor:
        raise FileNotFoundError("tokens.bin")

    with raises("C119"):
        fullshard.verify(**{**GIVEN, "batch_fn": broken})


def test_counts_of_no_tokens():
    with raises("C130"):
        fullshard.verify(**GIVEN, reduction="tokens", tokens_fn=lambda batch: 0)


# Commands.


def refused(code: str, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The command says this, and nothing after it."""
    assert main(arguments) == 2
    assert capsys.readouterr().err.split()[-2:] == ["code:", code]


def script(folder: Path, text: str) -> str:
    """A script that a command is given, and the function in it."""
    (folder / "train.py").write_text(text)
    return f"{folder / 'train.py'}:check"


def test_a_target_without_a_function():
    with raises("C077"):
        function_at("train.py")


def test_a_module_that_cannot_be_imported():
    with raises("C078"):
        function_at("no.such.module:check")


def test_a_function_that_there_is_not(tmp_path):
    with raises("C079"):
        function_at(script(tmp_path, "pass"))


def test_a_script_that_there_is_not(tmp_path):
    with raises("C080"):
        function_at(f"{tmp_path / 'train.py'}:check")


def test_a_script_that_raises(tmp_path, capsys):
    refused("C081", ["verify", script(tmp_path, "def check(): raise KeyError('lr')")], capsys)


def test_a_script_that_returns_no_arguments(tmp_path, capsys):
    refused("C082", ["verify", script(tmp_path, "def check(): return 1")], capsys)


def test_a_code_that_there_is_not(capsys):
    refused("C207", ["explain", "C999"], capsys)


def test_a_script_that_returns_other_arguments(tmp_path, capsys):
    refused("C083", ["verify", script(tmp_path, "def check(): return {'model': 1}")], capsys)


# The doctor, and what it is to find.


def test_a_folder_that_there_is_not(tmp_path):
    with raises("C104"):
        doctor(tmp_path / "reports")


def test_a_report_that_cannot_be_read(tmp_path):
    (tmp_path / "stuck-1.json").write_text("{")
    with raises("C105"):
        doctor(tmp_path / "stuck-1.json")


def test_a_folder_without_reports(tmp_path):
    with raises("C106"):
        doctor(tmp_path)


def test_a_time_that_is_not_positive():
    with raises("C203"):
        fullshard.watch(limit=0)


def test_watching_is_a_switch():
    with raises("C204"):
        fullshard.watch(enabled="yes")


def test_a_folder_for_reports_that_is_none():
    with raises("C205"):
        fullshard.watch(folder="")


def test_a_folder_for_reports_that_is_a_file(tmp_path):
    (tmp_path / "reports").touch()
    with raises("C206"):
        fullshard.watch(folder=tmp_path / "reports")


# Layouts, planned without tensors.

WEIGHT = ParameterSpec("weight", (4, 4), (0, 1))


def test_rows_over_no_ranks():
    with raises("L001"):
        plan_rows([WEIGHT], 0, 4, 1024)


def test_blocks_over_no_ranks():
    with raises("L006"):
        plan_blocks([WEIGHT], [4], 0, 4, 1024, "blocks")


def test_owners_among_no_ranks():
    with raises("L007"):
        plan_owner([WEIGHT], 0, 4)


def test_rows_of_a_dim_that_there_is_not():
    with raises("L003"):
        plan_rows([ParameterSpec("weight", (4, 4), (0, 1), dim=2)], 2, 4, 1024)


def test_slots_that_overlap():
    layout = plan_flat([WEIGHT, ParameterSpec("bias", (4,), (0,))], 2, 4)
    with raises("L008"):
        replace(layout, slots=(layout.slots[0], replace(layout.slots[1], full_offset=8)))


def test_a_slot_beyond_the_bucket():
    with raises("L009"):
        replace(plan_flat([WEIGHT], 2, 4), full_numel=8)


def test_a_slot_that_is_not_aligned():
    layout = plan_flat([WEIGHT], 2, 4)
    with raises("L010"):
        replace(layout, slots=(replace(layout.slots[0], full_offset=2),), full_numel=32)


# The process beside a rank.


def test_what_the_watchers_found():
    rank = Rank()
    rank.board.condemn("Rank 1 has ended (killed by signal 9).")
    with raises("D016"):
        rank.raise_verdict()


def test_a_watcher_that_cannot_be_started(monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with warns("W015"):
        Rank().start(0, 60.0)


def test_a_watcher_that_has_ended():
    rank = Rank()
    rank.start(0, 60.0)
    process = rank._process
    process.kill()
    process.wait()
    with warns("W016"):
        rank.configure(limit=30.0)


# The reference of a package: `fullshard docs`.


def test_a_package_that_is_not_installed():
    with raises("C224"):
        find("no_such_package")


def test_a_folder_without_python(tmp_path):
    with raises("C225"):
        find(str(tmp_path))


def test_a_file_that_is_no_python(tmp_path):
    (tmp_path / "notes.txt").touch()
    with raises("C226"):
        find(str(tmp_path / "notes.txt"))


PAGES = [("index.html", "a page")]


def test_pages_over_a_file_of_ones_own(tmp_path):
    write(tmp_path, [("other.html", "a page")])
    (tmp_path / "index.html").write_text("mine")
    with raises("C227"):
        write(tmp_path, PAGES)


def test_pages_beside_another_list(tmp_path):
    (tmp_path / LIST).write_text("{}")
    with raises("C228"):
        write(tmp_path, PAGES)


def test_pages_in_a_folder_that_is_not_empty(tmp_path):
    (tmp_path / "notes.txt").touch()
    with raises("C229"):
        write(tmp_path, PAGES)


def test_pages_in_a_file(tmp_path):
    (tmp_path / "reference").touch()
    with raises("C230"):
        write(tmp_path / "reference", PAGES)


def test_pages_where_no_folder_can_be(tmp_path):
    (tmp_path / "reference").touch()
    with raises("C231"):
        write(tmp_path / "reference" / "pages", PAGES)


# What `verify` quotes of what it was given.


def test_no_modules_to_verify():
    with raises("C119", quoting="C117"):
        fullshard.verify(**GIVEN, modules=["layers.7"])


def test_a_sharding_that_gives_a_number():
    with raises("C119", quoting="C122"):
        fullshard.verify(**GIVEN, shard_fn=lambda model: 1)


def test_an_optimizer_that_is_a_number():
    with raises("C119", quoting="C129"):
        fullshard.verify(**GIVEN, optimizer_fn=lambda model: 1)


def test_one_model_for_both():
    model = two_layers()
    with raises("C119", quoting="C131"):
        fullshard.verify(**{**GIVEN, "model_fn": lambda: model})


def on_meta() -> torch.nn.Module:
    """Shapes without values."""
    with torch.device("meta"):
        return two_layers()


def test_a_model_without_values():
    with raises("C119", quoting="C132"):
        fullshard.verify(**{**GIVEN, "model_fn": on_meta}, shard_fn=lambda model: fullshard.fully_shard(two_layers()))


def broken(rank: Rank) -> Exception:
    """What a rank makes of a connection that broke."""
    rank.start(0, 60.0)
    return rank.explain(RuntimeError("Connection closed by peer"))


def test_a_rank_that_ended_before_its_first_forward():
    rank = Rank()
    rank.find_others = lambda: [(1, None)]
    with raises("D014"):
        raise broken(rank)


def test_a_rank_that_went_without_a_word(monkeypatch):
    monkeypatch.setattr(time, "monotonic", itertools.count(step=5.0).__next__)
    with raises("D015"):
        raise broken(Rank())
