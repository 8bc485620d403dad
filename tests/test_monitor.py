"""`fullshard.Monitor`: its numbers are those that a test computes itself; steps it does not look at cost nothing."""

from __future__ import annotations

import gc
import json
import sys
import time
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import fullshard
from fullshard.comm import lanes
from fullshard.errors import ConfigError, DivergenceError, PhaseError
from fullshard.events import Ledger, stream
from fullshard.insight.monitor import monitor as module
from fullshard.insight.monitor.report import LATE, Measurements, late_rank
from raising import raises
from ways import on_ranks

BATCH, SLEEP = 6, 0.2


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(module, "now", clock := Clock())
    return clock


def blocks(count: int = 3) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(count)], nn.Linear(8, 2))


def sharded(front_end: str) -> nn.Module:
    model = blocks()
    if front_end == "wrapper":
        return fullshard.FullyShardedDataParallel(model, auto_wrap_policy={nn.Linear})
    for block in model[:-1]:
        fullshard.fully_shard(block)
    return fullshard.fully_shard(model)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    loss = model(torch.ones(BATCH, 8)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


# -- numbers


def test_speed_and_utilization_are_exact(clock, capsys):
    """20 steps of 0.25 s, of 512 tokens each but the last, which says that it has 1,024."""
    model = nn.Linear(10, 10, bias=False)
    frozen = nn.Linear(10, 3, bias=False).requires_grad_(False)
    monitor = fullshard.Monitor(nn.Sequential(model, frozen), tokens_per_step=512, peak_flops=1e7)
    reports = []
    for step in range(1, 21):
        clock.seconds += 0.25
        reports.append(monitor.step(tokens=1024 if step == 20 else None, loss=torch.tensor(step / 2), grad_norm=3.0))
    assert [step for step, report in enumerate(reports, 1) if report is not None] == [10, 20]
    assert [(report.step, report.steps, report.seconds_per_step, report.loss) for report in reports if report] == [
        (10, 10, 0.25, 5.0),
        (20, 10, 0.25, 10.0),
    ]
    rate = (9 * 512 + 1024) / 2.5
    assert reports[9].tokens_per_second == 2048 and reports[19].tokens_per_second == rate
    assert reports[19].mfu == rate * (6 * 100 + 2 * 30) / 1e7
    assert reports[19].exposed_communication is None and reports[19].late_rank is None
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and "step     20  loss 10.0000  gradient norm 3  250 ms/step  2,253 tokens/s" in lines[1]
    assert f"MFU {reports[19].mfu:.1%}" in lines[1]


def test_flops_per_token_and_unknown_numbers(clock):
    model = nn.Linear(10, 10)
    clocked = {"every": 1, "line": False}
    given = fullshard.Monitor(model, flops_per_token=5.0, peak_flops=100.0, tokens_per_step=4, **clocked)
    unknown = fullshard.Monitor(model, tokens_per_step=4, **clocked)
    without_tokens = fullshard.Monitor(model, peak_flops=100.0, **clocked)
    clock.seconds += 2.0
    assert given.step().mfu == 4 / 2.0 * 5.0 / 100.0
    assert unknown.step().mfu is None
    report = without_tokens.step()
    assert report.mfu is None and report.tokens_per_second is None and report.loss is None and report.grad_norm is None


def test_a_resumed_run_reports_the_same_steps(clock):
    monitor = fullshard.Monitor(nn.Linear(2, 2), every=4, start_step=6, tokens_per_step=1, line=False)
    reports = []
    for _ in range(6):
        clock.seconds += 1.0
        reports.append(monitor.step())
    assert [(report.step, report.steps, report.tokens_per_second) for report in reports if report] == [
        (8, 2, 1.0),
        (12, 4, 1.0),
    ]


@pytest.mark.parametrize("front_end", ["fully_shard", "wrapper"])
@on_ranks
def test_numbers_of_all_ranks(front_end):
    """Tokens are added up, the loss is the mean, memory the most of any rank, parameters are counted whole."""
    rank = dist.get_rank()
    model = sharded(front_end)
    for parameter in list(model.parameters())[:1]:
        parameter.requires_grad_(False)
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad])
    monitor = fullshard.Monitor(model, optimizer, every=2, line=False, peak_flops=1e6)
    for step in (1, 2):
        train_step(model, optimizer)
        report = monitor.step(tokens=10 * step + rank, loss=float(rank), grad_norm=torch.tensor(2.0))
    assert report is not None and report.loss == 0.5 and report.grad_norm == 2.0
    assert report.tokens_per_second == pytest.approx((30 + 30 + 2) / (2 * report.seconds_per_step))
    frozen = 64 if front_end == "fully_shard" else 64 + 8  # a weight; a whole `FlatParameter`
    flops = 6 * sum(parameter.numel() for parameter in blocks().parameters()) - 4 * frozen
    assert report.mfu == pytest.approx(report.tokens_per_second * flops / (2 * 1e6))
    optimizer.state[next(iter(optimizer.state))]["of one rank"] = torch.zeros(500 * rank)
    monitor.step()
    report = monitor.step()
    use = fullshard.memory_use(model, optimizer)
    both = torch.tensor([use.parameters, use.optimizer])
    dist.all_reduce(both, dist.ReduceOp.MAX)
    assert [report.memory.parameters, report.memory.optimizer] == both.tolist() and report.memory.peak_transient > 0


@on_ranks
def test_waits_are_those_between_the_events():
    model = sharded("fully_shard")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    waits = module.Waits(torch.device("cpu"))
    with fullshard.record_events() as events:
        begun = time.perf_counter()
        waits.begin()
        train_step(model, optimizer)
        listened, count, waited = waits.end()
        took = time.perf_counter() - begun
        train_step(model, optimizer)  # no longer listened to
    half = events[: len(events) // 2]
    pairs = [(begin.time, end.time) for begin, end in pairwise(half) if begin.verb in ("wait_gather", "wait_reduce")]
    gathers = sum(event.verb == "gathered" for event in half)
    assert count == len(pairs) == gathers + 4 and gathers >= 4
    assert waited == sum(end - begin for begin, end in pairs)
    assert 0 < waited < listened <= took


@pytest.mark.gloo("a rank sleeps, and others wait meanwhile")
@pytest.mark.parametrize("front_end", ["fully_shard", "wrapper"])
@on_ranks
def test_the_late_rank_is_named(front_end):
    model = sharded(front_end)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = fullshard.Monitor(model, optimizer, every=3, line=False)
    reports = []
    for step in range(1, 7):
        if dist.get_rank() == 1 and step > 3:
            time.sleep(SLEEP)
        train_step(model, optimizer)
        reports.append(monitor.step())
    report = reports[5]
    assert report.late_rank == 1 and report.late_reports[1] >= 1 and report.reports == 2
    assert 0.5 * SLEEP < report.late_seconds < 3 * SLEEP
    # Rank 0 waited nearly all of the step, rank 1 hardly at all.
    assert 0.25 < report.exposed_communication < 0.9
    assert f"late: rank 1 by {1000 * report.late_seconds:.3g} ms ({report.late_reports[1]} of 2 reports)" in str(report)


def row(waited: float, listened: float = 1.0) -> Measurements:
    return Measurements(1, 1, 1.0, 0, 0, 0.0, listened, 5, waited)


def test_a_rank_is_late_if_all_others_wait_for_it():
    assert late_rank([row(0.0)]) is None
    assert late_rank([row(0.3), row(0.1), row(0.4)]) == (1, pytest.approx(0.2))
    assert late_rank([row(0.3), row(0.1), row(0.1)]) is None, "two late ranks hide each other"
    assert late_rank([row(0.99 * LATE), row(0.0)]) is None and late_rank([row(1.01 * LATE), row(0.0)]) is not None


# -- what it costs


@on_ranks
def test_events_are_listened_to_in_one_step_out_of_every():
    """Also by a monitor that is given up, and by one that is closed: then by none."""
    model = sharded("fully_shard")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    listening: list[bool] = []
    model.register_forward_pre_hook(lambda *_: listening.append(bool(stream.listeners)))
    with fullshard.Monitor(model, optimizer, every=4, line=False) as monitor:
        for _ in range(9):
            train_step(model, optimizer)
            monitor.step()
    assert listening == [False, False, False, True] * 2 + [False]
    for ends in ("closed", "given up"):
        monitor = fullshard.Monitor(model, every=1, line=False)
        assert stream.listeners
        if ends == "closed":
            monitor.close()
            monitor.close()
        del monitor
        gc.collect()
        assert not stream.listeners, ends


def test_nothing_is_read_in_other_steps(clock):
    class Unread:
        def __float__(self) -> float:
            raise AssertionError("this waits for the device")

    monitor = fullshard.Monitor(nn.Linear(2, 2), every=3, line=False)
    for _ in range(2):
        assert monitor.step(loss=Unread(), grad_norm=Unread()) is None
    with pytest.raises(AssertionError, match="waits for the device"):
        monitor.step(loss=Unread())


def test_an_accelerator_is_asked_how_long_its_stream_waited(monkeypatch):
    """Marks lie in the stream, and are read once, at the end. The step, too, is measured there: hosts run ahead."""
    marks: list[Any] = []

    class Mark:
        def __init__(self, device: torch.device, *, enable_timing: bool) -> None:
            assert device.type == "cuda" and enable_timing
            self.read = False

        def record(self) -> None:
            marks.append(self)

        def synchronize(self) -> None:
            self.read = True

        def elapsed_time(self, end: Mark) -> float:
            assert marks[-1].read, "the last mark was not waited for"
            return 1000.0 * (marks.index(end) - marks.index(self))

    monkeypatch.setattr(torch, "Event", Mark)
    waits = module.Waits(torch.device("cuda", 0))
    waits.begin()
    for verb in ("gather", "wait_gather", "gathered", "collect", "wait_reduce", "reduced", "wait_reduce", "collect"):
        stream.emit(verb, "0", 0, 0, Ledger())
    assert waits.end() == (6.0, 2, 2.0)
    monkeypatch.setattr(lanes, "captures", lambda device: True)  # marks in a graph have no time
    waits.begin()
    for verb in ("wait_gather", "gathered"):
        stream.emit(verb, "0", 0, 0, Ledger())
    assert waits.end() == (0, 0, 0)


@pytest.mark.parametrize(
    ("name", "peak"),
    [("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H100 PCIe", 756e12), ("NVIDIA A100-SXM4-80GB", 312e12), ("T4", None)],
)
def test_known_peaks(monkeypatch, name, peak):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert module.device_peak_flops(torch.device("cuda", 0)) == peak
    assert module.device_peak_flops(torch.device("cpu")) is None


# -- outputs


def test_json_lines(clock, tmp_path):
    path = tmp_path / "runs" / "monitor.jsonl"
    for start in (0, 2):  # a resumed run appends
        with fullshard.Monitor(nn.Linear(2, 2), every=1, jsonl=path, line=False, start_step=start) as monitor:
            for _ in range(2):
                clock.seconds += 1.0
                monitor.step(loss=float("nan"))
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    assert [entry["step"] for entry in entries] == [1, 2, 3, 4]
    assert entries[0]["loss"] == "nan" and entries[0]["mfu"] is None
    assert entries[0]["memory"]["parameters"] == 4 * 6 and entries[0]["seconds_per_step"] == 1.0


def test_tensorboard(clock, monkeypatch, tmp_path):
    written: list[tuple[str, float, int]] = []

    class SummaryWriter:
        def __init__(self, folder: str) -> None:
            assert folder == str(tmp_path)

        def add_scalar(self, name: str, value: float, step: int) -> None:
            written.append((name, value, step))

        def close(self) -> None:
            written.append(("closed", 0, 0))

    fake = ModuleType("torch.utils.tensorboard")
    fake.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    with fullshard.Monitor(nn.Linear(2, 2), every=2, tensorboard=tmp_path, line=False) as monitor:
        for _ in range(2):
            clock.seconds += 1.0
            monitor.step(loss=0.5)
    assert ("fullshard/loss", 0.5, 2) in written and ("fullshard/memory/parameters", 24, 2) in written
    assert written[-1] == ("closed", 0, 0) and not any("mfu" in name for name, _, _ in written)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with raises("ConfigError: tensorboard= needs TensorBoard, which is not installed ... pip install tensorboard"):
        fullshard.Monitor(nn.Linear(2, 2), tensorboard=tmp_path)


def test_a_terminal_gets_colours_if_rich_is_there(clock, monkeypatch, capsys):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    coloured = fullshard.Monitor(nn.Linear(2, 2), every=1)
    clock.seconds += 1.0
    report = coloured.step(loss=1.0)
    said = capsys.readouterr().out
    assert "\x1b[" in said and "1000 ms/step" in said
    monkeypatch.setattr("fullshard.insight.monitor.report_writer.find_spec", lambda name: None)
    plain = fullshard.Monitor(nn.Linear(2, 2), every=1)
    clock.seconds += 1.0
    plain.step(loss=1.0)
    assert capsys.readouterr().out == f"{report}\n"


def test_one_rank_writes(run_ranks, tmp_path):
    run_ranks(writes, tmp_path)
    assert len((tmp_path / "monitor.jsonl").read_text().splitlines()) == 2


def writes(folder: Path) -> None:
    model = sharded("fully_shard")
    with fullshard.Monitor(model, every=1, jsonl=folder / "monitor.jsonl", line=False) as monitor:
        for _ in range(2):
            assert monitor.step() is not None


# -- what is refused

WRONG = [
    ({"model": "model"}, "takes a module ... 'model'"),
    ({"optimizer": "adam"}, "optimizer is invalid ... an optimizer or None"),
    ({"every": 0}, "every is invalid ... an int of at least 1 ... 0"),
    ({"every": True}, "every is invalid ... an int of at least 1"),
    ({"start_step": -1}, "start_step is invalid ... an int of at least 0"),
    ({"tokens_per_step": 0.5}, "tokens_per_step is invalid ... an int of at least 1 ... 0.5"),
    ({"flops_per_token": -1}, "flops_per_token is invalid ... a number above 0"),
    ({"peak_flops": float("inf")}, "peak_flops is invalid ... a number above 0 ... inf"),
    ({"line": "yes"}, "line is invalid ... True or False"),
    ({"jsonl": ""}, "jsonl is invalid ... a path ... ''"),
    ({"tensorboard": 3}, "tensorboard is invalid ... a path ... 3"),
    ({"group": "all"}, "group is invalid ... a process group or None"),
    ({"jsonl": "/dev/null/monitor.jsonl"}, "jsonl cannot be written"),
]


@pytest.mark.parametrize(("settings", "words"), WRONG, ids=[repr(settings) for settings, _ in WRONG])
def test_invalid_arguments(settings, words):
    with raises(f"ConfigError: Monitor ... {words}"):
        fullshard.Monitor(**{"model": nn.Linear(2, 2), **settings})


STEPS = [
    ({"tokens": -1}, "tokens is invalid ... an int of at least 0 ... -1"),
    ({"tokens": True}, "tokens is invalid ... an int of at least 0 ... True"),
    ({"tokens": 5.0}, "tokens is invalid ... an int of at least 0 ... 5.0"),
    ({"tokens": torch.tensor(True)}, "tokens is invalid ... an int of at least 0 ... tensor(True)"),
    ({"tokens": torch.tensor(5.0)}, "tokens is invalid ... an int of at least 0 ... tensor(5.)"),
    ({"tokens": torch.tensor([1, 2])}, "tokens is invalid ... an int of at least 0 ... tensor([1, 2])"),
    ({"tokens": torch.tensor(5, device="meta")}, "tokens must be an int of at least 0, or a tensor of one integer on"),
    ({"loss": "low"}, "loss is invalid ... a number, or a tensor of one element"),
    ({"loss": torch.ones(2)}, "loss is invalid ... a number, or a tensor of one element"),
    ({"loss": True}, "loss is invalid ... a number, or a tensor of one element ... True"),
    ({"loss": np.True_}, "loss is invalid ... a number, or a tensor of one element ... np.True_"),
    ({"loss": torch.tensor(True)}, "loss is invalid ... a number, or a tensor of one element ... tensor(True)"),
    ({"loss": torch.tensor(1 + 2j)}, "loss is invalid ... a number, or a tensor of one element ... tensor(1.+2.j)"),
    ({"loss": np.complex64(1)}, "loss is invalid ... a number, or a tensor of one element ... np.complex64"),
    ({"loss": np.ones(2)}, "loss is invalid ... a number, or a tensor of one element ... array"),
    ({"grad_norm": "low"}, "grad_norm is invalid ... a number, or a tensor of one element"),
]


@pytest.mark.parametrize(("given", "words"), STEPS, ids=[repr(given) for given, _ in STEPS])
def test_invalid_numbers_of_a_step(given, words):
    with fullshard.Monitor(nn.Linear(2, 2), every=1, line=False) as monitor, raises(f"ConfigError: Monitor: {words}"):
        monitor.step(**given)


@pytest.mark.parametrize(("given", "words"), STEPS, ids=[repr(given) for given, _ in STEPS])
def test_a_call_that_is_refused_counts_nothing(clock, given, words):
    monitor = fullshard.Monitor(nn.Linear(2, 2), every=2, tokens_per_step=3, line=False)
    assert monitor.step() is None
    for _ in range(2):
        with pytest.raises(ConfigError):
            monitor.step(**given)
    clock.seconds += 1.0
    report = monitor.step(loss=1.0)
    assert (report.step, report.steps, report.tokens_per_second) == (2, 2, 6.0)


def test_tokens_may_be_any_integer(clock):
    monitor = fullshard.Monitor(nn.Linear(2, 2), every=4, line=False)
    for tokens in (np.int64(5), torch.tensor([True, False, True]).sum(), torch.tensor([4], dtype=torch.int32)):
        assert monitor.step(tokens=tokens) is None
    clock.seconds += 1.0
    assert monitor.step(tokens=0).tokens_per_second == 5 + 2 + 4


def test_tokens_on_a_device_are_refused_with_the_remedy():
    with pytest.raises(ConfigError, match=r"(?s)a tensor on meta.*tokens\.item\(\)"):
        fullshard.Monitor(nn.Linear(2, 2), line=False).step(tokens=torch.tensor(5, device="meta"))


@pytest.mark.parametrize(
    ("loss", "text"),
    [(5.1e-05, "5.1e-05"), (-0.00012346, "-0.0001235"), (0.0, "0.0000"), (0.001, "0.0010"), (2.5, "2.5000")],
)
def test_small_losses_are_printed_with_four_digits(loss, text):
    report = fullshard.Monitor(nn.Linear(2, 2), every=1, line=False).step(loss=loss)
    assert f"  loss {text}  " in str(report)


def test_a_loss_of_a_graph_is_read_without_a_warning(recwarn):
    with fullshard.Monitor(nn.Linear(2, 2), every=1, line=False) as monitor:
        report = monitor.step(loss=torch.ones((), requires_grad=True) * 2)
    assert report.loss == 2.0 and not recwarn.list


def test_a_step_after_close_is_refused():
    monitor = fullshard.Monitor(nn.Linear(2, 2), line=False)
    monitor.close()
    with pytest.raises(PhaseError, match="after close"):
        monitor.step()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a file system without space: Linux has /dev/full")
def test_a_full_disk_closes_the_log_and_nothing_else(clock, capsys):
    model = blocks()
    monitor = fullshard.Monitor(model, tokens_per_step=2, every=1, jsonl="/dev/full")
    with pytest.warns(UserWarning, match="/dev/full cannot be written from now on: .*No space left"):
        assert monitor.step().step == 1
    assert monitor.step().step == 2
    monitor.close()
    assert capsys.readouterr().out.count("step") >= 2


def gather_that_fails(numbers: list[float]) -> None:
    raise RuntimeError("a rank has ended")


def test_a_report_that_fails_is_not_the_last(clock, monkeypatch):
    monitor = fullshard.Monitor(blocks(), tokens_per_step=2, every=2, line=False)
    assert monitor.step() is None
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="a rank has ended"):
        patch.setattr(monitor, "_gather", gather_that_fails)
        monitor.step()
    assert monitor.step() is None and monitor.step().steps == 2
    with raises("ConfigError: Monitor: optimizer is invalid ... an object of class list"):
        fullshard.Monitor(blocks(), [torch.optim.AdamW(blocks().parameters())])


@on_ranks
def test_ranks_that_count_differently_are_told():
    monitor = fullshard.Monitor(sharded("fully_shard"), every=5, start_step=5 * dist.get_rank(), line=False)
    with pytest.raises(DivergenceError, match="a different number of times") as raised:
        for _ in range(5):
            monitor.step()
    assert "rank 0: step 5, rank 1: step 10" in str(raised.value)
    assert "once per optimizer step on every rank" in str(raised.value)
