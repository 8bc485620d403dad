"""An error of memory that ends the program is explained by a plan: in the forward, the backward, or the optimizer."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch
from test_explained_changes import Model
from torch import nn

from fullshard import explain_memory, fully_shard
from fullshard.insight import last_words, memory
from fullshard.watcher.rank import Rank, note_at_the_end

PROGRAM = """
import sys, types
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
{first}
import fullshard

sys.path[:0] = {path!r}
from test_explained_changes import Model
from test_last_words import build, fails_in

before = sys.excepthook
dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
model = build()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(3):
    if step == 2:
        fails_in(model, optimizer, {where!r})
    {line}
"""
STEP = "model(torch.ones(4, 32, 7)).square().mean().backward(); optimizer.step(); optimizer.zero_grad()"
ASKED = "CUDA out of memory. Tried to allocate 20.00 KiB. GPU 0 has ..."
PLANNED = "at the peak of a step (fullshard.plan):"


def build(model: nn.Module | None = None) -> nn.Module:
    model = model or Model()
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=False)
    return fully_shard(model)


def fails_in(model: nn.Module, optimizer: torch.optim.Optimizer, where: str) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError(ASKED) if where != "other" else ZeroDivisionError

    if where == "backward":
        model.blocks[2].up.register_full_backward_hook(fail)
    elif where == "optimizer":
        optimizer.register_step_pre_hook(fail)
    else:
        model.blocks[2].up.register_forward_hook(fail)


def stderr_of(where: str, line: str = STEP, first: str = "") -> str:
    source = PROGRAM.format(path=[path for path in sys.path if path], where=where, line=line, first=first)
    ended = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)
    assert ended.returncode == 1, ended
    return ended.stderr


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_error_of_a_pass_is_printed_first_and_then_a_plan(where):
    """The error's note is the account of that moment; what follows is planned, with the optimizer's state."""
    said = stderr_of(where).replace("[rank0]: ", "")
    head, note, plan = said.partition("Fullshard: An allocation of 20.0 KiB failed.")
    assert "Traceback" in head and ASKED in head, said
    note, _, plan = plan.partition("Fullshard, rank 0: ")
    assert "units in use ((root), blocks.2)" in note and "would free now" in note, said
    assert re.match(r"[1-9][\d.]* [KM]iB of what this rank held were optimizer state\.\n", plan), said
    assert PLANNED in plan and "reshard_after_forward=True" in plan, said
    assert said.count("This rank holds") == said.count(PLANNED) == 1, said


def test_an_error_of_the_optimizers_step_is_explained_as_a_whole():
    said = stderr_of("optimizer")
    head, _, rest = said.partition("Fullshard, rank 0: ")
    assert "Traceback" in head and ASKED in head, said
    outside = "This was outside of a pass of the model. An allocation of 20.0 KiB failed. This rank holds "
    assert rest.startswith(outside), said
    assert re.search(r"[1-9][\d.]* [KM]iB in optimizer state", rest) and PLANNED in rest, said


def test_an_error_raised_from_it_is_explained_too():
    line = f"""
    try:
        {STEP}
    except RuntimeError as error:
        raise ValueError("step") from error
"""
    said = stderr_of("forward", line)
    assert PLANNED in said.partition("ValueError: step")[2], said


def test_other_errors_are_left_alone():
    first = "sys.excepthook = lambda kind, error, trace: print('theirs', kind.__name__, file=sys.stderr)"
    assert stderr_of("other", first=first).split("\n")[-2:] == ["[rank0]: theirs ZeroDivisionError", ""]


def test_hooks_of_others_are_called():
    first = "sys.excepthook = lambda kind, error, trace: print('theirs', *error.__notes__, file=sys.stderr)"
    said = stderr_of("forward", first=first)
    assert "theirs Fullshard: An allocation" in said and PLANNED in said, said


RANKS = """
import os, sys, time
import torch, torch.distributed as dist
import fullshard

sys.path[:0] = {path!r}
from test_explained_changes import Model
from test_last_words import build, fails_in

class Slow(Model):
    def forward(self, x):
        time.sleep(0.2)
        return super().forward(x)

dist.init_process_group("gloo")
model = build(Slow())
optimizer = torch.optim.AdamW(model.parameters())
for step in range(3):
    if step == 2 and dist.get_rank() == 1:
        fails_in(model, optimizer, "forward")
    {line}
"""


def test_a_rank_that_runs_out_of_memory_alone_plans(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(RANKS.format(path=[path for path in sys.path if path], line=STEP))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(program)]
    ended = subprocess.run(
        torchrun, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert ended.returncode == 1
    assert "Fullshard, rank 1: " in ended.stderr and PLANNED in ended.stderr, ended.stderr


@pytest.fixture
def failed(fake_world) -> tuple[nn.Module, torch.OutOfMemoryError]:
    fake_world(8)
    model = build()
    fails_in(model, torch.optim.SGD(model.parameters()), "forward")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        model(torch.ones(4, 32, 7))
    return model, caught.value


def test_the_changes_are_those_that_a_user_would_get(failed):
    """Of a model that no optimizer has stepped: those of `explain_memory`. The error's note stays."""
    model, error = failed
    notes = list(error.__notes__)
    said = memory.explained_at_the_end(error).split("\n")
    assert said == explain_memory(model).split("\n")[1:]
    assert error.__notes__ == notes


def test_a_plan_that_takes_long_is_given_up(failed, monkeypatch):
    _, error = failed
    monkeypatch.setattr(memory, "_SECONDS", 0.0)
    said = memory.explained_at_the_end(error)
    assert "could not be planned (planning takes too long here; call explain_memory(), which has no limit)" in said
    assert "What changes would free now" in said


@pytest.mark.parametrize("does", ["exits", "waits", "is interrupted"])
def test_a_forward_that_exits_or_waits_when_it_is_planned(does):
    """Neither the exit code nor the end of the program depends on it."""
    fails = {
        "exits": "sys.exit(0)",
        "waits": "time.sleep(600)",
        "is interrupted": "os.kill(os.getpid(), 2) or time.sleep(600)",
    }[does]
    line = f"""
    if step == 2:
        Model.go, Model.forward = Model.forward, lambda self, x: {fails} if self is not model else self.go(x)
    memory._SECONDS = {1.0 if does == "waits" else 120.0}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    {STEP}
"""
    first = "import os, signal, time; from fullshard.insight import memory"
    said = stderr_of("optimizer", line, first)
    words = {"exits": "SystemExit: 0", "waits": "takes too long", "is interrupted": "interrupted"}[does]
    assert "OutOfMemoryError" in said and words in said, said


def test_what_planning_says_nothing_of(fake_world):
    """A pass without a graph, and memory of the host that is asked for elsewhere (by the data, say)."""
    fake_world(8)
    model = build()
    fails_in(model, torch.optim.SGD(model.parameters()), "forward")
    with pytest.raises(torch.OutOfMemoryError) as caught, torch.no_grad():
        model(torch.ones(4, 32, 7))
    assert "This rank holds" in caught.value.__notes__[0]
    assert memory.explained_at_the_end(caught.value) is None
    assert memory.explained_at_the_end(MemoryError("Unable to allocate 256. TiB for an array")) is None


def test_the_error_is_recorded_after_the_last_words(monkeypatch):
    """Other ranks end once they know of it, and with them the job."""
    rank, recorded = Rank(), []
    rank.last_words.append(lambda error: recorded.append(rank.raised))
    monkeypatch.setattr(sys, "excepthook", lambda *_: recorded.append("printed"))
    note_at_the_end(rank)
    sys.excepthook(MemoryError, MemoryError(), None)
    assert recorded == ["printed", None] and rank.raised is not None


def test_a_host_without_memory_is_told_that_no_plan_follows(monkeypatch, capsys):
    monkeypatch.setattr(last_words, "_ROOM", 2**62)
    last_words._say(ZeroDivisionError())
    assert not capsys.readouterr().err
    last_words._say(torch.OutOfMemoryError(ASKED))
    assert "no plan of a step follows" in capsys.readouterr().err


def test_without_a_sharded_model_nothing_is_said(monkeypatch):
    monkeypatch.setattr(memory, "all_roots", list)
    assert memory.explained_at_the_end(torch.OutOfMemoryError(ASKED)) is None
