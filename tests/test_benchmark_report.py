"""The benchmarks' verdicts: a fast step with other losses, or one that leaves memory behind, is no success."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
CODE = """
import contextlib, io, json, pathlib, sys
import torch.distributed
import live_memory, report, run, throughput

def ended(act):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = act()
        except SystemExit as error:
            status = error.code
    words = status if isinstance(status, str) else ""  # sys.exit says them
    return int(bool(status)), out.getvalue(), err.getvalue() + words

same, nan = [2.0, 1.5, 1.0], float("nan")
for losses, differs in ((same, 0), ([2.0, 1.5, 1.1], 1), ([2.0, nan, 1.0], 1), ([nan, 1.5, 1.0], 1)):
    quantity = throughput.loss_deviation({"ddp": same, "rows": losses})
    status, out, err = ended(lambda: report.hand_back([quantity], None))
    assert status == differs, (losses, err)
    assert ("differs: throughput: loss, distance from DDP's: rows" in err) == ("DIFFERS" in out) == bool(differs), out

for peer, fails in (("wrapper-flat", 1), ("fsdp2", 0)):  # only Fullshard's own is its fault
    live_memory.peak = lambda name, mesh: (10**8, 512 if name == peer else 0)
    status, out, err = ended(lambda: report.hand_back(live_memory.measure(True), None))
    said = f"grows: live_memory: peak live memory: {peer} (grows 512 B a step)"
    torch.distributed.destroy_process_group()
    assert status == fails and (said in err) == ("GROWS" in out) == bool(fails), (peer, out, err)

samples = pathlib.Path(sys.argv[1])  # as from a benchmark's process to run.py's
for differs in (False, True):
    quantity = report.Quantity("b", "q", "s", "m", (report.Series("rows", (1.0,), differs=differs),))
    assert ended(lambda: report.hand_back([quantity], samples))[0] == 0
    assert json.loads(samples.read_text())[0]["series"][0]["differs"] is differs
    run.run = lambda name, quick: run.load(json.loads(samples.read_text()))
    sys.argv = ["run.py", "--only", "traffic"]
    status, out, err = ended(run.main)
    assert status == differs and ("differs: b: q: rows" in out) == differs, (out, err)
"""


def test_what_differs_or_grows_ends_in_a_failure(tmp_path: Path) -> None:
    """In a process of its own: the benchmarks' `models` is not the tests'."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(BENCHMARKS), *sys.path])}
    command = [sys.executable, "-c", CODE, str(tmp_path / "samples.json")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
