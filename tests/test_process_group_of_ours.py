"""Sharding where the program has made no process group: torchrun's ranks, or one process alone, as in a notebook."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
import torch
from torch import nn
import fullshard

for front_end in ("fully_shard", "wrapper"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    if front_end == "wrapper":
        model = fullshard.FullyShardedDataParallel(model, use_orig_params=True)
    else:
        fullshard.fully_shard(model, auto_wrap_policy={nn.Linear})
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    folder = f"{sys.argv[1]}/{front_end}"
    fullshard.save(folder, model, optimizer, step=1)
    fullshard.load(folder, model, optimizer)
print("ranks:", torch.distributed.get_world_size())
"""


def output_of(tmp_path: Path, *launcher: str) -> str:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    command = [sys.executable, *launcher, str(script), str(tmp_path / "checkpoints")]
    done = subprocess.run(
        command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_one_process_trains_alone_and_is_told_so(tmp_path):
    output = output_of(tmp_path)
    assert "ranks: 1" in output
    assert output.count("W383") == 1


def test_torchruns_ranks_train_together(tmp_path):
    output = output_of(tmp_path, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    assert output.count("ranks: 2") == 2
    assert "W383" not in output
