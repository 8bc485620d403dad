"""`fullshard compare`: one program on PyTorch's FSDP and on Fullshard, and the first difference between the two."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from fullshard.cli.main import main
from fullshard.insight.comparison import PHASES, LossDifference, ParameterDifference, SideRecording, compare

pytestmark = pytest.mark.xdist_group("compare")
ROOT = Path(__file__).parents[1]

START = """
import sys
import torch, torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
torch.manual_seed(3)
model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))
"""
FUNCTIONAL = """
from torch.distributed.fsdp import fully_shard
for layer in (model[0], model[2]):
    fully_shard(layer)
fully_shard(model)
"""
WRAPPER = """
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
model = FullyShardedDataParallel(
    model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), device_id=torch.device("cpu"), use_orig_params=True
)
"""
TRAIN = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank())
for step in range(int(sys.argv[1])):
    for micro in range(2):
        model(torch.randn(4, 6)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
ON_FULLSHARD = 'on_fullshard = dist.fsdp.fully_shard.__module__.startswith("fullshard")\n'


def program(folder: Path, *parts: str) -> str:
    path = folder / "program.py"
    path.write_text("".join([START, *parts]))
    return str(path)


ONE_RANK = ("--ranks", "1")
"""For what does not depend on how many ranks there are: half of the processes, each of which imports torch."""


def compared(capfd: Any, script: str, *arguments: str, code: int = 0, ranks: str = "1") -> dict[str, Any]:
    """What `--json` prints, of three steps."""
    command = ["compare", script, "--steps", "3", "--json", "--ranks", ranks, "--", *arguments]
    assert main(command) == code, capfd.readouterr()
    found: dict[str, Any] = json.loads(capfd.readouterr().out)
    return found


@pytest.mark.parametrize("front_end", [FUNCTIONAL, WRAPPER], ids=["fully_shard", "wrapper"])
def test_the_same_program_gives_the_same_losses(capfd, tmp_path, front_end):
    """Micro-batches are losses of one step; the program is stopped, or it would run on for years."""
    found = compared(capfd, program(tmp_path, front_end, TRAIN), str(10**9), ranks="2")
    assert found["same"] is True and found["steps"] == 3
    assert [[len(rank) for rank in step] for step in found["fullshard"]["losses"]] == [[2, 2]] * 3
    assert found["torch"]["losses"] == found["fullshard"]["losses"] and found["torch"]["losses"][0][0][0] > 0
    for side in ("torch", "fullshard"):
        assert found[side]["units"] == 3 and found[side]["memory"] > 2**26
        seconds = found[side]["seconds"]
        assert 0 < seconds["optimizer"] < seconds["step"] and seconds["backward"] < seconds["step"]


@pytest.mark.parametrize(
    ("front_end", "got"),
    [
        ("", "no module that is an FSDP unit"),
        ("model = nn.parallel.DistributedDataParallel(model)\n", "no module that is an FSDP unit"),
        (FUNCTIONAL.replace("torch.distributed.fsdp", "fullshard"), "a model that Fullshard shards"),
    ],
    ids=["plain", "ddp", "fullshard"],
)
def test_a_program_without_units_of_pytorch_is_refused(capfd, tmp_path, front_end, got):
    """Nothing would be compared, and all of it would be the same in every bit."""
    assert main(["compare", program(tmp_path, front_end, TRAIN), "--steps", "2", *ONE_RANK, "--", "4"]) == 2
    assert got in capfd.readouterr().err


def test_paths_that_both_sides_write_are_pointed_out(capfd, tmp_path):
    made = f"from pathlib import Path\nif dist.get_rank() == 0: Path({str(tmp_path / 'out')!r}).mkdir()\n"
    assert main(["compare", program(tmp_path, FUNCTIONAL, made, TRAIN), "--steps", "2", *ONE_RANK, "--", "4"]) == 2
    assert "both sides run at once, and write to the same paths" in capfd.readouterr().err


def test_losses_that_are_not_finite_are_null(capfd, tmp_path):
    script = program(tmp_path, FUNCTIONAL, TRAIN.replace(".mean()", ".mean().mul(float('nan'))"))
    assert compared(capfd, script, "4", code=0)["torch"]["losses"][0][0] == [None, None]


def test_differences_are_named(capfd, tmp_path):
    """On Fullshard this program has another learning rate, so the first losses are equal, and no parameter after."""
    changed = TRAIN.replace("lr=0.1", "lr=0.1 + 0.1 * on_fullshard")
    script = program(tmp_path, FUNCTIONAL, ON_FULLSHARD, changed)
    found = compared(capfd, script, "9", code=1, ranks="2")
    assert found["same"] is False
    different = found["loss_that_differs"]
    assert (different["step"], different["micro_batch"], different["rank"]) == (2, 1, 0)
    losses = [found[side]["losses"][1][0][0] for side in ("torch", "fullshard")]
    assert losses == [different["torch"], different["fullshard"]] and losses[0] != losses[1]
    assert (found["parameter_that_differs"]["step"], found["parameter_that_differs"]["name"]) == (1, "0.weight")
    assert found["parameter_that_differs"]["by"] > 0
    assert main(["compare", script, "--steps", "2", "--", "9"]) == 1
    said = capfd.readouterr().out
    first = "losses: DIFFERENT from step 2 on, first in micro-batch 1 of 2 on rank 0: "
    assert re.search(first + r"[\d.]+ on PyTorch's FSDP, ", said), said
    assert "parameters: DIFFERENT after step 1, first 0.weight: by up to" in said


def test_a_program_that_ends_by_itself(capfd, tmp_path):
    """After two of the three steps: parameters of the last one are not there any more. Two optimizers are one step."""
    two = TRAIN.replace("optimizer.step()", "optimizer.step()\n    other.step()")
    script = program(
        tmp_path,
        FUNCTIONAL,
        "other = torch.optim.SGD(model.parameters(), lr=0.1)",
        two,
        "dist.destroy_process_group()\n",
    )
    assert main(["compare", script, "--steps", "3", *ONE_RANK, "--", "2"]) == 0
    said = capfd.readouterr().out
    assert "losses of 2 steps: the same in every bit" in said and "parameters after step 1: the same" in said


def test_an_optimizer_that_steps_within_backward(capfd, tmp_path):
    steps = """
for parameter in model.parameters():
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    parameter.register_post_accumulate_grad_hook(lambda p, step=optimizer.step: step())
while True:
    model(torch.ones(4, 6)).square().mean().backward()
    model.zero_grad()
"""
    found = compared(capfd, program(tmp_path, FUNCTIONAL, steps))
    assert found["same"] and found["steps"] == 3 and found["torch"]["losses"][2] < found["torch"]["losses"][0]


TWO_OPTIMIZERS = """
class Outer(torch.optim.SGD):
    def step(self):
        inner.step()
        with torch.no_grad():
            model[2].bias.add_(100 * (on_fullshard and step == 2))

class Own(torch.optim.SGD):
    def step(self):
        super().step()

matrices, vectors = ([p for p in model.parameters() if p.dim() == dims] for dims in (2, 1))
inner = torch.optim.SGD(vectors, lr=0.1)
first, second = Own(matrices, lr=0.1), Outer(vectors, lr=0.1)
try:
    first.step("no closure is taken")
except TypeError:
    pass
for step in range(3):
    model(torch.randn(4, 6)).square().mean().backward()
    first.step()
    second.step()
    model.zero_grad()
dist.destroy_process_group()
"""
THREE_MODELS = """
import copy
critic, average, empty = (copy.deepcopy(model) for _ in range(3))
for net in (average.requires_grad_(False), critic, model, empty.to("meta")):
    fully_shard(net[0])
    fully_shard(net)
first, second = (torch.optim.SGD(net.parameters(), lr=0.1) for net in (model, critic))
for step in range(1000):
    critic(model(torch.randn(4, 6)).detach().repeat(1, 3)).square().mean().backward()
    second.step()
    if step == 1:
        critic(model(torch.randn(4, 6)).repeat(1, 3)).mean().backward()
        with torch.no_grad():
            average[2].bias.add_(100 * on_fullshard)
        first.step()
    for net in (model, critic):
        net.zero_grad()
"""


@pytest.mark.parametrize(
    ("parts", "units", "name"),
    [
        ([FUNCTIONAL, ON_FULLSHARD, TWO_OPTIMIZERS], 3, "2.bias"),
        (["from torch.distributed.fsdp import fully_shard\n", ON_FULLSHARD, THREE_MODELS], 8, "model 2: 2.bias"),
    ],
    ids=["two optimizers, one with a third within, one whose first step failed", "three models, two alternate"],
)
def test_all_models_are_compared_after_all_optimizers(capfd, tmp_path, parts, units, name):
    """Something is spoilt in the last step, where the first optimizer does not see it; no loss does either."""
    found = compared(capfd, program(tmp_path, *parts), code=1)
    assert found["steps"] == 3 and found["loss_that_differs"] is None
    assert [len(rank) for step in found["torch"]["losses"] for rank in step] == [1] * 3
    assert found["torch"]["units"] == found["fullshard"]["units"] == units
    assert (found["parameter_that_differs"]["step"], found["parameter_that_differs"]["name"]) == (3, name)


REFUSED = [
    ("dist.barrier()\n", ONE_RANK, "ended before its first optimizer step on PyTorch's FSDP and on Fullshard"),
    (FUNCTIONAL + TRAIN, ["--steps", "0"], "--steps must be at least 1, got 0"),
    (FUNCTIONAL + TRAIN, ["--ranks", "65"], "--ranks must be from 1 to 64, got 65"),
    (
        f"{FUNCTIONAL}{ON_FULLSHARD}assert not on_fullshard, 'no'\n{TRAIN}",
        ONE_RANK,
        "failed on Fullshard: rank",
    ),
    (
        f"{FUNCTIONAL}if dist.get_rank() == 1: raise RuntimeError('its own error')\n{TRAIN}",
        [],
        "failed on PyTorch's FSDP: rank 1, exit code 1",  # rank 0 fails in a collective, because rank 1 has gone
    ),
    (
        f"{FUNCTIONAL}if dist.get_rank() == 1: sys.exit(0)\n{TRAIN}",
        [],
        "failed on PyTorch's FSDP: rank 0, exit code 1; rank 1 had ended before",
    ),
    (  # rank 1 ends first
        "import os, time; time.sleep(1 - int(os.environ['RANK'])); os._exit(0)",
        [],
        "failed on PyTorch's FSDP: rank 0, exit code 0\n",
    ),
]


@pytest.mark.parametrize(("text", "options", "words"), REFUSED, ids=[words for _, _, words in REFUSED])
def test_what_cannot_be_compared(capfd, tmp_path, text, options, words):
    assert main(["compare", program(tmp_path, text), *options, "--", "2"]) == 2
    said = capfd.readouterr()
    assert words in said.err and not said.out
    assert "failed" in words or said.err.count("\n") == 1
    assert "rank 1, exit" not in words or "RuntimeError: its own error" in said.err
    assert "failed on Fullshard" not in words or "AssertionError: no" in said.err


def test_a_program_that_hangs_is_told_of(capfd, monkeypatch, tmp_path):
    """And not ended: its first step may take as long."""
    hangs = "import time\nif dist.get_rank() == 1: time.sleep(6)\n"
    monkeypatch.setattr(importlib.import_module("fullshard.cli.compare"), "PATIENCE", 1.5)
    assert main(["compare", program(tmp_path, FUNCTIONAL, hangs, TRAIN), "--steps", "2", "--", "2"]) == 0
    said = capfd.readouterr().err
    assert "no rank has ended a step for" in said and "PyTorch's FSDP: rank 0 after 0, rank 1 after 0" in said


def test_a_script_that_is_missing_and_ranks_that_torchrun_started(capfd, tmp_path, monkeypatch):
    assert main(["compare", "missing.py"]) == 2
    assert capfd.readouterr().err == "fullshard: there is no file missing.py\n"
    monkeypatch.setenv("RANK", "0")
    assert main(["compare", program(tmp_path)]) == 2
    assert "run it without torchrun" in capfd.readouterr().err


def test_the_example_of_the_help_runs(capfd, monkeypatch):
    """The help fits a screen, and what it shows is a command that works."""
    monkeypatch.chdir(ROOT)
    assert main(["compare", "--help"]) == 0
    told = capfd.readouterr().out
    assert len(told.splitlines()) <= 40
    (example,) = re.findall(r"^ +fullshard (compare .*)$", told, re.M)
    assert main(example.split()) == 0
    said = capfd.readouterr().out
    assert "losses of 40 steps: the same in every bit" in said
    assert "parameters after step 1 and step 40: the same in every bit" in said
    assert re.search(r"step, median .* [\d.]+ ms .* [\d.]+ ms .* \d\.\d\d ", said), said


# -- recordings, without processes


def recording(
    folder: Path, seconds: list[float], losses: list[float], weights: dict[int, torch.Tensor]
) -> SideRecording:
    folder.mkdir()
    for step, weight in weights.items():
        torch.save({"weight": weight, "same": torch.ones(2)}, folder / f"{step}.pt")
    phases = {phase: [seconds, [0.0] * len(seconds)] for phase in PHASES}
    return SideRecording([[[loss], [loss]] for loss in losses], phases, 2**20, 2, ["torch"], "cpu", folder)


def test_medians_leave_out_the_first_quarter_and_take_the_slowest_rank(tmp_path):
    theirs = recording(tmp_path / "a", [9.0, 9.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6], [1.0] * 8, {1: torch.zeros(2)})
    ours = recording(tmp_path / "b", [9.0, 9.0, *[0.175] * 6], [1.0] * 8, {1: torch.zeros(2)})
    comparison = compare(theirs, ours)
    assert comparison.same and theirs.median("step") == pytest.approx(0.35)
    assert comparison.rows()[0] == ("step, median", "350.0 ms", "175.0 ms", "0.50")
    assert comparison.rows()[1] == ("step, quartiles", "225.0 to 475.0 ms", "175.0 to 175.0 ms", "")
    assert comparison.rows()[3] == ("forward, host, per unit", "175,000 us", "87,500 us", "0.50")
    assert comparison.rows()[2] == ("peak resident memory", "1.0 MiB", "1.0 MiB", "1.00")


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_the_first_step_is_left_out_wherever_there_is_another(tmp_path, steps):
    """Things are set up in it; a single step is named as what it is."""
    seconds = [9.0, *[0.1] * (steps - 1)]
    one = recording(tmp_path / "a", seconds, [1.0] * steps, {1: torch.zeros(2)})
    title, median, *_ = compare(one, one).rows()[0]
    assert (title, median) == (("the first step", "9000.0 ms") if steps == 1 else ("step, median", "100.0 ms"))


NAN = float("nan")
ONE = torch.ones(2)


@pytest.mark.parametrize(
    ("losses", "weights", "loss", "parameter"),
    [
        ([1.0, 2.0], {1: ONE, 2: ONE}, None, None),
        ([1.0, 2.5], {1: ONE, 2: ONE}, LossDifference(2, 1, 0, 2.0, 2.5), None),
        ([1.0, 2.0], {1: ONE, 2: 3 * ONE}, None, ParameterDifference(2, "weight", 2.0)),
        ([1.0, 2.0], {1: torch.ones(3), 2: ONE}, None, ParameterDifference(1, "weight", float("inf"))),
        ([1.0], {1: ONE}, None, None),
    ],
    ids=["same", "loss", "last parameter", "shape", "steps"],
)
def test_the_first_difference(tmp_path, losses, weights, loss, parameter):
    theirs = recording(tmp_path / "a", [1.0], [1.0, 2.0], {1: ONE, 2: ONE})
    comparison = compare(theirs, recording(tmp_path / "b", [1.0], losses, weights))
    assert (comparison.loss, comparison.parameter) == (loss, parameter)
    assert comparison.same is (loss is None and parameter is None and len(losses) == 2)


@pytest.mark.parametrize(
    ("first_rank", "second_rank", "difference", "words"),
    [
        (
            [1.0, 2.0, 4.0],
            [1.0, 2.5, 3.0],
            LossDifference(1, 2, 1, 2.0, 2.5),
            "first in micro-batch 2 of 3 on rank 1: 2.0 on PyTorch's FSDP, 2.5 on Fullshard (+0.5)",
        ),
        ([3.0, 2.0, 1.0], [1.0, 2.0, 3.0], LossDifference(1, 1, 0, 1.0, 3.0), "micro-batch 1 of 3 on rank 0: 1.0 on"),
        (
            [1.0, 2.0],
            [1.0, 2.0],
            LossDifference(1, 3, 0, 3.0, None),
            "first in micro-batch 3 of 3 on rank 0, which only PyTorch's FSDP has",
        ),
    ],
    ids=["earliest", "equal sums", "missing"],
)
def test_the_first_micro_batch_that_differs(tmp_path, first_rank, second_rank, difference, words):
    """With its own two losses, not their sums: those of [1, 2, 3] and [3, 2, 1] are equal."""
    theirs, ours = (recording(tmp_path / name, [1.0], [0.0], {1: ONE}) for name in "ab")
    theirs.losses[:] = [[[1.0, 2.0, 3.0]] * 2]
    ours.losses[:] = [[first_rank, second_rank]]
    comparison = compare(theirs, ours)
    assert comparison.loss == difference and words in comparison.verdict()


def test_bits_are_compared(tmp_path):
    """NaN equals itself, and minus zero is not zero."""
    theirs = recording(tmp_path / "a", [1.0], [NAN], {1: torch.tensor([NAN, 0.0])})
    assert compare(theirs, recording(tmp_path / "b", [1.0], [float("nan")], {1: torch.tensor([NAN, 0.0])})).same
    signed = compare(theirs, recording(tmp_path / "c", [1.0], [NAN], {1: torch.tensor([NAN, -0.0])}))
    assert signed.parameter is not None and signed.parameter.name == "weight"
