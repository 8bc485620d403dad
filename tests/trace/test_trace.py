"""Traces of real ranks: the late one is named; and what is written when a block raises or a path is bad."""

from __future__ import annotations

import json
import re
from statistics import median

import pytest
import torch
import torch.distributed as dist
from late import DELAY, SLOW, late_steps, stack

import fullshard
from fullshard.comm import lanes
from fullshard.errors import ConfigError
from fullshard.events import Ledger, record_events, stream
from fullshard.insight.trace import analyse, read
from fullshard.insight.trace.event_file import Recording

pytestmark = pytest.mark.gloo("ranks are processes: each has clocks, and an event stream, of its own")


@pytest.mark.parametrize("marks", [False, True])
def test_the_rank_that_sleeps_is_named_with_unit_and_delay(marks, run_ranks, tmp_path):
    run_ranks(late_steps, str(tmp_path), 1, 4, marks, world=2)
    run = read([tmp_path])
    assert [trace.rank for trace in run.ranks] == [0, 1] and 0 < run.error < 0.2 * DELAY
    analysis = analyse(run)
    late = analysis.late_ranks[0]
    assert len(analysis.steps) == 4 and (late.rank, late.place) == (1, str(SLOW))
    waited = [max((w for w in analysis.waits if (w.rank, w.step) == (0, n)), key=lambda w: w.late) for n in range(4)]
    assert {wait.late_rank for wait in waited} == {1}
    delay = median(wait.late for wait in waited)  # of the steps: in one of them the machine may have done other things
    assert delay == pytest.approx(DELAY, rel=0.2) and late.worst >= 0.8 * DELAY


def test_ranks_of_a_mesh_wait_for_those_of_their_groups(run_ranks, tmp_path):
    """Rank 3 of (2, 2) sleeps: of its shard group rank 2 waits, of its replicas rank 1."""
    run_ranks(late_steps, str(tmp_path), 3, 3, False, (2, 2), world=4)
    analysis = analyse(read([tmp_path]))
    groups = {(c.kind, c.ranks) for c in analysis.issues}
    assert groups == {(kind, r) for kind in ("gather", "reduce") for r in ((0, 1), (2, 3))} | {
        ("all_reduce", r) for r in ((0, 2), (1, 3))
    }
    assert all(set(times) == set(collective.ranks) for collective, times in analysis.issues.items())
    late = analysis.late_ranks[0]
    assert (late.rank, late.place) == (3, str(SLOW))
    for wait in analysis.waits:
        if wait.late > 0.8 * DELAY and wait.kind == "gather":
            assert (wait.rank, wait.late_rank) == (2, 3)


def test_gathers_after_a_reshard_to_fewer_ranks_are_among_these(run_ranks, tmp_path):
    run_ranks(late_steps, str(tmp_path), None, 2, False, (), 2, world=4)
    issues = analyse(read([tmp_path])).issues
    assert {c.ranks for c in issues if c.kind == "gather" and c.unit == "0"} == {(0, 1, 2, 3), (0, 1), (2, 3)}
    assert all(set(times) == set(collective.ranks) for collective, times in issues.items())


def two_models(folder: str) -> None:
    models = [stack(), stack(blocks=2)]
    with fullshard.trace(folder):
        for model in models:
            model(torch.ones(8, 128)).sum().backward()
    new = stack(blocks=2)
    with fullshard.trace(f"{folder}/one"):
        new[0].unshard()  # before there is a root, whose class is the model's name
        new(torch.ones(8, 128)).sum().backward()


def test_units_of_several_models_are_told_apart(run_ranks, tmp_path):
    run_ranks(two_models, str(tmp_path), world=2)
    issues = analyse(read([tmp_path])).issues
    names = {collective.unit for collective in issues}
    models = {name.rpartition(" (")[2] for name in names}  # "Sequential)" and one with a number
    of_each = [{name.rpartition(" (")[0] for name in names if name.endswith(f" ({model}")} for model in models]
    assert sorted(map(len, of_each)) == [3, 6], names  # blocks and the root
    assert all(set(times) == {0, 1} for times in issues.values())
    of_one = {collective.unit for collective in analyse(read([tmp_path / "one"])).issues}
    assert of_one == {"0", "1", "(root)", "(Sequential)"}  # before there is a root, a unit is called by its class


def raising(folder: str) -> tuple[int, list[str]]:
    model, problems = stack(), []
    try:
        with fullshard.trace(folder):
            model(torch.ones(8, 128)).sum().backward()
            raise KeyError("of the block")
    except KeyError as error:
        problems.append(str(error))
    return len(stream.listeners), problems


def test_a_block_that_raises_leaves_its_file_and_no_listener(run_ranks, tmp_path):
    assert run_ranks(raising, str(tmp_path), world=2) == [(0, ["'of the block'"])] * 2
    run = read([tmp_path])
    assert [trace.raised for trace in run.ranks] == ["KeyError: 'of the block'"] * 2
    assert all(trace.events for trace in run.ranks)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-0.json", "rank-1.json"]


def entering(folders: list[str]) -> str:
    try:
        with fullshard.trace(folders[dist.get_rank()]):
            return "entered"
    except ConfigError as error:
        return str(error)


def test_a_bad_path_of_one_rank_is_refused_on_all_when_entering(run_ranks, tmp_path):
    (tmp_path / "file").touch()
    answers = run_ranks(entering, [str(tmp_path / "folder"), str(tmp_path / "file" / "below")], world=2)
    assert all("cannot write" in answer and re.search("rank: +1$", answer, re.M) for answer in answers), answers


@pytest.mark.parametrize("path", [None, 3, ""])
def test_what_is_no_path_is_refused(path):
    with pytest.raises(ConfigError, match="needs a folder"), fullshard.trace(path):
        pass


class FakeEvent:
    """Stands for a device's event: the device is 1 s behind the host's record of it."""

    recorded = 0

    def __init__(self, device: torch.device, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        FakeEvent.recorded += 1
        self.time = 1000.0 * FakeEvent.recorded  # ms

    def elapsed_time(self, other: FakeEvent) -> float:
        return other.time - self.time


def test_on_a_device_times_are_its_streams_and_what_is_captured_is_left_out(monkeypatch):
    """Simulated: each event takes the device a second."""
    capturing = [False]
    monkeypatch.setattr(FakeEvent, "recorded", 0)
    monkeypatch.setattr(torch, "Event", FakeEvent)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda device: 77)
    monkeypatch.setattr(lanes, "captures", lambda device: capturing[0])
    recording = Recording(torch.device("cuda", 0))
    with record_events(recording.listen) as recording.events:
        for verb in ("gather", "wait_gather", "gathered"):
            stream.emit(verb, "a", 8, 0, Ledger(8), (0, 1) if verb == "gather" else ())
        recording.step()
        capturing[0] = True
        stream.emit("free", "a", 8, 0, Ledger())
        recording.step()
    start = recording.clock.host_start
    written = recording.as_json()
    assert [row[0] for row in written["events"]] == [0, 1, 2] and written["verbs"] == [
        "gather",
        "wait_gather",
        "gathered",
    ]
    assert [row[5] - start for row in written["events"]] == pytest.approx([1, 2, 3])
    assert [row[6] for row in written["events"]] == [-1, -1, 77]
    assert [mark - start for mark in written["steps"]] == pytest.approx([4])


def test_one_process_without_a_group(tmp_path):
    with fullshard.trace(tmp_path / "new"):
        assert len(stream.listeners) == 1
    assert not stream.listeners
    assert json.loads((tmp_path / "new" / "rank-0.json").read_text())["world"] == 1
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot write"), fullshard.trace(tmp_path / "file"):
        raise AssertionError("entered")
    assert not stream.listeners


def test_files_of_a_larger_world_are_removed(tmp_path):
    """The run that follows in the same folder is one of its own."""
    for number in (0, 1, 7):
        (tmp_path / f"rank-{number}.json").write_text("{}")
    (tmp_path / "rank-notes.json").write_text("{}")
    with fullshard.trace(tmp_path):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-0.json", "rank-notes.json"]
