"""`fullshard dry-run`: one rank of a program, in a world of any size."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fullshard.mesh.axes import device_type_of
from fullshard.text import size
from fullshard.torch_private.fake_group import pretended

ROOT = Path(__file__).parents[2]


def dry_run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fullshard", "dry-run", *words], capture_output=True, text=True, cwd=ROOT, check=False
    )


def test_the_example():
    """128 ranks: each has a 128th; a unit is gathered twice and reduced once."""
    ran = dry_run("--world", "128", "examples/dry_run.py")
    assert ran.returncode == 0, ran.stderr
    assert "128 ranks: sharded 128 ways; gradients: mean over 128" in ran.stdout
    assert "all-gathers in a step: 9," in ran.stdout and "reduce-scatters in a step: 5," in ran.stdout
    assert "One process cannot show" in ran.stdout


SHARDED = """
import sys, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from fullshard import fully_shard
dist.init_process_group("nccl", init_method="env://")
mesh = init_device_mesh("cpu", (4, dist.get_world_size() // 4), mesh_dim_names=("replicate", "shard"))
print("group", dist.new_group([0, 1], backend="gloo").size(), "arguments", sys.argv[1:])
model = fully_shard(torch.nn.Linear(8, 8), mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(int(sys.argv[1])):
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
"""


def test_a_script_that_asks_for_nccl_and_a_mesh(tmp_path):
    (tmp_path / "train.py").write_text(SHARDED)
    ran = dry_run("--world=16", "--steps", "3", f"{tmp_path}/train.py", "5")
    assert ran.returncode == 0, ran.stderr
    assert "group 2 arguments ['5']" in ran.stdout
    assert "sharded 4 ways x 4 replicas" in ran.stdout and "all-reduces of replicas in a step: 1," in ran.stdout
    ran = dry_run("--world=16", "--steps", "3", f"{tmp_path}/train.py", "2")
    assert ran.returncode == 1 and "ended before step 3" in ran.stderr


def test_what_it_sends_and_what_it_saves(tmp_path):
    """Half of each buffer in a world of two, as a plan says; nothing alone. A save writes nothing."""
    script = tmp_path / "train.py"
    saves = f"import fullshard; print(fullshard.save({str(tmp_path / 'saved')!r}, model, optimizer).wait())\n"
    body = SHARDED.replace("(4, dist.get_world_size() // 4)", "(1, dist.get_world_size())").replace("[0, 1]", "[0]")
    script.write_text(f"{body}    {saves}")
    ran = dry_run("--world=2", str(script), "5")
    assert ran.returncode == 0, ran.stderr
    nbytes = (8 * 8 + 8) * 4 // 2
    assert f"all-gathers in a step: 1, in which this rank sends {nbytes} B" in ran.stdout, ran.stdout
    assert f"reduce-scatters in a step: 1, in which this rank sends {nbytes} B" in ran.stdout
    assert "step-000000000" in ran.stdout and not (tmp_path / "saved").exists()
    alone = dry_run("--world=1", str(script), "5")
    assert alone.returncode == 0 and "this rank sends" not in alone.stdout, alone.stderr


SEVERAL = """
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch import nn
import fullshard
dist.init_process_group("gloo", store=dist.TCPStore("localhost", 0, 8, True), rank=0)
dist.monitored_barrier()
model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
for layer in model:
    fullshard.fully_shard(layer)
fullshard.fully_shard(model)
matrices, vectors = ([p for p in model.parameters() if (p.ndim == 2) == two] for two in (True, False))
OPTIMIZERS
for step in range(10):
    model(torch.randn(4, 64)).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    print("trained step", step)
    SAVES
"""
NBYTES = 2 * (64 * 64 + 64) * 4
STEPPED = {
    "several": "optimizers = torch.optim.AdamW(matrices), torch.optim.AdamW(vectors)",
    "one inside another": "optimizers = [fullshard.OwnerOptimizer(model.parameters(), torch.optim.AdamW)]",
    "a class of its own, whose first step fails": """
class Own(torch.optim.AdamW):
    def step(self, closure=None):
        return closure.fails if closure else super().step()

torch.optim.AdamW(model.parameters())  # torch then runs its hooks in `super().step`, too
optimizers = [Own(model.parameters())]
try:
    optimizers[0].step(print)
except AttributeError:
    pass
""",
}


@pytest.mark.parametrize("name", STEPPED)
def test_a_training_step_of_more_than_one_optimizer(tmp_path, name):
    """All of them step, their state is counted, and so is what the step sends: each unit's gathers and reduction."""
    (tmp_path / "train.py").write_text(SEVERAL.replace("OPTIMIZERS", STEPPED[name]).replace("SAVES", ""))
    ran = dry_run("--world=8", "--steps=3", f"{tmp_path}/train.py")
    assert ran.returncode == 0, ran.stderr
    assert "trained step 1" in ran.stdout and "trained step 2" not in ran.stdout
    assert "all-gathers in a step: 4," in ran.stdout and "reduce-scatters in a step: 2," in ran.stdout, ran.stdout
    whole = next(line for line in ran.stdout.splitlines() if line.startswith("one process without sharding"))
    assert whole.split()[-2:] == size(4 * NBYTES + 16).split(), ran.stdout
    if name == "several":
        state = next(line for line in ran.stdout.splitlines() if line.startswith("optimizer state"))
        assert state.split()[-2:] == size(2 * NBYTES // 8 + 16).split(), ran.stdout


def test_no_checkpoint_is_written(tmp_path):
    """Neither torch's nor ours, over one that exists either; an error after it says so."""
    where = str(tmp_path / "saved")
    saves = f"""
    dcp.save({{"model": model.state_dict()}}, checkpoint_id={where!r})
    dcp.async_save({{"model": model.state_dict()}}, checkpoint_id={where!r}).result()
    torch.save(model.state_dict(), {where + ".pt"!r})
    fullshard.save({where!r}, model)
    if step:
        fullshard.load({where!r}, model)
"""
    Path(where + ".pt").write_text("precious")
    script = SEVERAL.replace("OPTIMIZERS", STEPPED["several"]).replace("    SAVES", saves)
    (tmp_path / "train.py").write_text(script)
    ran = dry_run("--world=8", f"{tmp_path}/train.py")
    assert ran.returncode == 0, ran.stderr
    assert Path(where + ".pt").read_text() == "precious" and not Path(where).exists()
    ran = dry_run("--world=8", "--steps=3", f"{tmp_path}/train.py")
    assert ran.returncode == 1 and f"In a dry run no checkpoint is written: {where}, " in ran.stderr, ran.stderr


PYTORCHS = SHARDED.replace("from fullshard import", "from torch.distributed.fsdp import").replace("mesh=mesh", "")
PLAIN = SHARDED.replace("fully_shard(torch.nn.Linear(8, 8), mesh=mesh)", "torch.nn.Linear(8, 8)")


@pytest.mark.parametrize(("text", "words"), [(PYTORCHS, "it with --adopt"), (PLAIN, "before the optimizer is built")])
def test_a_program_that_shards_nothing_here(tmp_path, text, words):
    (tmp_path / "train.py").write_text(text)
    ran = dry_run("--world=16", f"{tmp_path}/train.py", "5")
    assert ran.returncode == 1 and words in ran.stderr
    assert "fullshard: No model was sharded by Fullshard" in ran.stderr and "Traceback" not in ran.stderr


def test_a_program_of_pytorchs_is_adopted(tmp_path):
    """With `--` before its arguments or without."""
    (tmp_path / "train.py").write_text(PYTORCHS)
    for flags, words in (([], ["5"]), (["--lenient"], ["--", "5"])):
        ran = dry_run("--world=16", "--adopt", *flags, f"{tmp_path}/train.py", *words)
        assert ran.returncode == 0 and "arguments ['5']" in ran.stdout, ran.stderr
        assert "16 ranks: sharded 16 ways" in ran.stdout


@pytest.mark.parametrize(
    ("mesh", "said"),
    [
        ('init_device_mesh("cpu", (4,))', "over more than 4 of the 16 ranks"),
        ('init_device_mesh("cpu", (4, 4), mesh_dim_names=("dp", "tp"))["dp"]', ""),
    ],
)
def test_a_mesh_smaller_than_the_world_is_told_of(tmp_path, mesh, said):
    """But not a slice of one that covers it."""
    lines = [f"mesh = {mesh}" if line.startswith("mesh =") else line for line in SHARDED.splitlines()]
    (tmp_path / "train.py").write_text("\n".join(lines))
    ran = dry_run("--world=16", f"{tmp_path}/train.py", "5")
    assert ran.returncode == 0, ran.stderr
    assert said in ran.stdout and ("of the 16 ranks" in ran.stdout) is bool(said)


def test_errors_of_the_program_are_shown(tmp_path):
    """A world that no mesh of the program's divides is found before a cluster is booked."""
    (tmp_path / "train.py").write_text(SHARDED.replace("// 4)", "// 4 + 1)"))
    ran = dry_run("--world", "16", f"{tmp_path}/train.py", "5")
    assert ran.returncode == 1
    assert "Traceback" in ran.stderr and "the program raised an error as rank 0 of 16" in ran.stderr


def test_a_program_that_exits_early(tmp_path):
    (tmp_path / "train.py").write_text("import sys; sys.exit(4)")
    ran = dry_run("--world", "16", f"{tmp_path}/train.py")
    assert ran.returncode == 1
    assert "the program ended with sys.exit(4) before step 2: optimizers of this process took 0" in ran.stderr


UNEVEN = ["--world", "12", "--ranks-per-node", "8", "examples/dry_run.py"]


@pytest.mark.parametrize(
    "words",
    [
        ["nothing.py"],
        ["--world", "0", "x.py"],
        ["--world", "many", "x.py"],
        ["--colour"],
        ["--adopt=yes", "examples/dry_run.py"],
        ["--world"],
        ["--steps=2"],
        UNEVEN,
    ],
)
def test_bad_arguments(words):
    ran = dry_run(*words)
    assert ran.returncode == 2
    assert ran.stderr.startswith("fullshard: ") and len(ran.stderr.splitlines()) == 1


def test_help_fits_a_screen():
    for words in ([], ["--help"]):
        assert "usage: fullshard dry-run" in dry_run(*words).stdout
    assert len(dry_run("--help").stdout.splitlines()) <= 40


def test_a_group_over_gloo_is_for_the_host(monkeypatch):
    """As a real one: units stay on the CPU where there is an accelerator. With NCCL, or nothing said, they do not."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: torch.device("cuda"))
    for backend, kind in (("gloo", "cpu"), ("nccl", "cuda"), (None, "cuda"), ("cpu:gloo,cuda:nccl", "cuda")):
        with pretended(8):
            dist.init_process_group(backend)
            assert device_type_of(None) == device_type_of(dist.new_group([0, 1])) == kind
