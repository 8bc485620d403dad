"""The benchmarks' verdicts: a fast step with other losses, or one that leaves memory behind, is no success."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
SAME = "[2.0, 1.5, 1.0]"


def run(code: str) -> subprocess.CompletedProcess[str]:
    """`code` where the benchmarks' own modules are, in a process of its own: their `models` is not the tests'."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(BENCHMARKS), *sys.path])}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    ("losses", "differs"),
    [(SAME, False), ("[2.0, 1.5, 1.1]", True), ("[2.0, float('nan'), 1.0]", True), ("[float('nan'), 1.5, 1.0]", True)],
)
def test_losses_that_differ_end_in_a_failure(losses, differs):
    quantity = f"throughput.loss_deviation({{'ddp': {SAME}, 'rows': {losses}}})"
    done = run(f"import throughput, report; report.hand_back([{quantity}], None)")
    assert done.returncode == (1 if differs else 0), done.stderr
    assert ("differs: throughput: loss, distance from DDP's: rows" in done.stderr) == differs
    assert ("DIFFERS" in done.stdout) == differs


@pytest.mark.parametrize(("peer", "fails"), [("wrapper-flat", True), ("fsdp2", False)])
def test_memory_that_grows_ends_in_a_failure(peer, fails):
    """Only Fullshard's own is its fault."""
    code = f"""
import live_memory, report
live_memory.peak = lambda name, mesh: (10**8, 512 if name == {peer!r} else 0)
report.hand_back(live_memory.measure(True), None)
"""
    done = run(code)
    assert done.returncode == (1 if fails else 0), done.stderr
    said = f"grows: live_memory: peak live memory: {peer} (grows 512 B a step)"
    assert (said in done.stderr) == fails and ("GROWS" in done.stdout) == fails


@pytest.mark.parametrize("differs", [False, True])
def test_the_whole_suite_fails_where_one_differs(tmp_path, differs):
    """Through the samples' file, as from a benchmark's process to run.py's."""
    samples = tmp_path / "samples.json"
    made = f"[report.Quantity('b', 'q', 's', 'm', (report.Series('rows', (1.0,), differs={differs}),))]"
    written = run(f"import report, pathlib; report.hand_back({made}, pathlib.Path({str(samples)!r}))")
    assert written.returncode == 0, written.stderr
    assert json.loads(samples.read_text())[0]["series"][0]["differs"] is differs
    code = f"""
import json, pathlib, sys, run
run.run = lambda name, quick: run.load(json.loads(pathlib.Path({str(samples)!r}).read_text()))
sys.argv = ["run.py", "--only", "traffic"]
sys.exit(run.main())
"""
    done = run(code)
    assert done.returncode == (1 if differs else 0), done.stderr
    assert ("differs: b: q: rows" in done.stdout) == differs
