"""An error of memory that ends the program is explained by a plan: in the forward, the backward, or the optimizer."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from test_explained_changes import Model
from torch import nn

from fullshard import explain_memory, fully_shard
from fullshard.insight import memory

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
PLANNED = "What changes would free at the peak of a step (fullshard.plan):"


def build() -> nn.Module:
    model = Model()
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


@pytest.mark.parametrize("where", ["forward", "backward", "optimizer"])
def test_the_error_that_ends_the_program_is_explained_by_a_plan(where):
    """Once, under the traceback, with the optimizer's state, and what the moment of the failure held."""
    said = stderr_of(where)
    head, _, rest = said.partition("Fullshard: ")
    assert "Traceback" in head and ASKED in head, said
    assert rest.startswith("An allocation of 20.0 KiB failed.") and rest.count("This rank holds") == 1, said
    assert PLANNED in rest and "reshard_after_forward=True" in rest and "(enough)" in rest, said
    assert "would free now" not in rest and "fullshard.explain_memory" not in rest, said
    assert "optimizer state" in rest and "0 B in optimizer state" not in rest, said
    assert ("units in use ((root), blocks.2)" in rest) == (where != "optimizer"), said


def test_an_error_raised_from_it_is_explained_too():
    line = f"""
    try:
        {STEP}
    except RuntimeError as error:
        raise ValueError("step") from error
"""
    said = stderr_of("forward", line)
    assert PLANNED in said and said.rstrip().endswith("ValueError: step"), said


def test_other_errors_are_left_alone():
    first = "sys.excepthook = lambda kind, error, trace: print('theirs', kind.__name__, file=sys.stderr)"
    assert stderr_of("other", first=first).split("\n")[-2:] == ["[rank0]: theirs ZeroDivisionError", ""]


def test_hooks_of_others_are_called():
    first = "sys.excepthook = lambda kind, error, trace: print('theirs', *error.__notes__, file=sys.stderr)"
    said = stderr_of("forward", first=first)
    assert "theirs Fullshard: An allocation" in said and PLANNED in said, said


@pytest.fixture
def failed(fake_world) -> tuple[nn.Module, torch.OutOfMemoryError]:
    fake_world(8)
    model = build()
    fails_in(model, torch.optim.SGD(model.parameters()), "forward")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        model(torch.ones(4, 32, 7))
    return model, caught.value


def test_the_paragraph_is_what_a_user_would_get(failed):
    """Of a model that no optimizer has stepped: the account of the failure, and the changes of `explain_memory`."""
    model, error = failed
    (account,) = error.__notes__
    memory.explain_at_the_end(error)
    (note,) = error.__notes__
    assert note.split("\n")[0] == account.split("\n")[0]
    freed = [line.removesuffix("  (enough)") for line in note.split("\n")[1:]]
    assert freed == explain_memory(model).split("\n")[1:]
    memory.explain_at_the_end(error)
    assert error.__notes__ == [note]


def test_a_plan_that_takes_long_is_given_up(failed, monkeypatch):
    _, error = failed
    monkeypatch.setattr(memory, "_SECONDS", 0.0)
    memory.explain_at_the_end(error)
    (note,) = error.__notes__
    assert "could not be planned (planning takes too long here; call explain_memory(), which has no limit)" in note
    assert "units in use ((root), blocks.2)" in note and "What changes would free now" in note


def test_without_a_sharded_model_nothing_is_said(monkeypatch):
    monkeypatch.setattr(memory, "all_roots", list)
    error = torch.OutOfMemoryError(ASKED)
    memory.explain_at_the_end(error)
    assert not hasattr(error, "__notes__")
