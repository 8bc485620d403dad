"""A job of two ranks loses one and goes on with the other, to the loss of a run of both (`examples/elastic.py`)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fullshard

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "examples"))
from elastic import STEPS, build, share_of_loss  # noqa: E402 - it is found there


def in_one_process() -> float:
    """The last loss of a run that is not sharded."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(1, STEPS + 1):
        loss = share_of_loss(model, step, rank=0, world=1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


@pytest.mark.timeout(700)  # six processes import torch, on a machine that may be busy
def test_a_job_that_loses_a_rank_goes_on_with_the_others(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, ROOT / "examples" / "elastic.py", "--ranks", "2", "--out", tmp_path, "--lose", "1:7"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        check=False,
        text=True,
        timeout=500,
    )
    told = run.stdout + run.stderr
    assert run.returncode == 0 and "goes on with 1" in run.stdout, told
    assert "Signal 9 (SIGKILL)" in run.stderr, told  # torchrun's word of the rank that was lost
    found = re.search(r"1 ranks, from step 6: loss ([\d.]+)", run.stdout)
    assert found is not None, told
    assert float(found[1]) == pytest.approx(in_one_process(), rel=1e-5)
    assert fullshard.Folder(tmp_path).latest() == f"step-{STEPS:09d}"
