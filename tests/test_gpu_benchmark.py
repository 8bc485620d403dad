"""`benchmarks/gpu.py` on a CPU, in tiny sizes: every mode and question runs, and nothing that was measured is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
CODE = """
import contextlib, io, itertools, json, pathlib, sys, warnings
from unittest import mock
import torch
import torch.distributed
import gpu

folder = pathlib.Path(sys.argv[1])
TINY = "--device cpu --size tiny --world 8 --rounds 1 --steps 1 --warm-up 1".split()

def run(name, *given):
    # Exit status, lines, what was printed.
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        status = gpu.main([*TINY, "--out", str(folder / name), *given])
    return status, lines_of(name), out.getvalue()

def lines_of(name):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]

# All modes.
status, lines, printed = run("steps", "--peers", "fsdp2", "rows")
assert status == 0, printed
expected = {(m, p) for m, mode in gpu.MODES.items() for p in ("fsdp2", "rows") if p == "rows" or not mode.is_ours}
assert {(line["mode"], line["peer"]) for line in lines} == expected and len(lines) == len(expected)
for line in lines:
    assert line["ask"] == "steps" and line["device"] == "cpu" and line["world"] == 8 and "caching" in line["cannot"]
    assert all(line[name] > 0 for name in ("ms", "fenced_ms", "issue_ms", "collectives", "kernels")), line
    assert "loss" not in line if line["mode"] == "muon" else line["loss"] > 0, line
of = {(line["mode"], line["peer"]): line for line in lines}
units = 3  # two blocks, and the root, which stays gathered; Fullshard's ranks agree besides
assert of["layouts", "fsdp2"]["collectives"] == 2 * units - 1 + units == of["layouts", "rows"]["collectives"] - 1
assert of["apart", "rows"]["collectives"] > 5 * of["layouts", "rows"]["collectives"]
assert of["hybrid", "rows"]["collectives"] > of["layouts", "rows"]["collectives"]
assert of["kept", "fsdp2"]["collectives"] < of["accumulation", "fsdp2"]["collectives"]

# The table, and the same from the file.
rows = [row.split("  ")[0] for row in printed[printed.index("ask "):].splitlines()]
assert rows.count("steps") == len(lines), printed
assert "not on a CPU: steps: no queue" in printed
again = io.StringIO()
with contextlib.redirect_stdout(again):
    assert gpu.main(["--table", str(folder / "steps")]) == 0
assert printed.endswith(again.getvalue()) and len(again.getvalue()) > 1000

# The other questions.
_, lines, printed = run("others", "--modes", "layouts", "--ask", "syncs", "oom", "captures")
found = {(line["ask"], line["peer"]): line for line in lines}
assert len(found) == 3 * 4
for peer in ("plain", "fsdp2", "rows", "flat"):
    assert found["oom", peer]["finding"] == "step: goes on; evaluation: goes on"
    assert found["syncs", peer]["cannot"] and found["captures", peer]["cannot"]

# What a CPU cannot be asked, with stand-ins for CUDA's functions.
class Steps:
    def step(self):
        warnings.warn("called a synchronizing CUDA operation")
        warnings.warn("something else")

with mock.patch("torch.cuda.set_sync_debug_mode") as switch:
    finding = gpu.ask_syncs(Steps(), None)["finding"]
assert finding == "<string>:%d x1" % (Steps.step.__code__.co_firstlineno + 1), finding
assert [call.args for call in switch.mock_calls] == [("warn",), ("default",)]

start = mock.Mock(**{"elapsed_time.return_value": 10.0})  # milliseconds of 10 million cycles
stand_ins = dict(Stream=mock.Mock(), Event=mock.Mock(return_value=start), synchronize=mock.Mock(), _sleep=mock.Mock())
stand_ins |= dict(current_stream=mock.Mock(), stream=mock.MagicMock())
with mock.patch.multiple(torch.cuda, **stand_ins):
    link = gpu.Link(torch.device("cuda"), 100.0)
    out, shard, slept = torch.zeros(1000), torch.arange(500.0), torch.cuda._sleep
    sent = link.gather(out, shard)
    assert slept.call_args.args == (40,) and torch.equal(out.view(2, -1)[1], shard)  # 4000 bytes, a cycle a nanosecond
    link.stream.wait_stream.assert_called_once_with(torch.cuda.current_stream())
    torch.cuda.stream.assert_called_once_with(link.stream)
    sent.wait()
    torch.cuda.current_stream().wait_event.assert_called_once_with(link.stream.record_event())
    slept.reset_mock()
    link.gigabytes = float("inf")
    link.reduce(shard, out, False)
    assert not slept.called and torch.equal(shard, 2 * torch.arange(500.0))
    assert (link.collectives, link.kernels) == (2, 4)

class Pretends(gpu.Setting):
    cuda = True

levels = itertools.count(100, 10)
counters = dict(synchronize=mock.Mock(), reset_peak_memory_stats=mock.Mock(), memory_allocated=lambda: next(levels))
counters |= dict(memory_stats=lambda: {"num_alloc_retries": 3}, max_memory_allocated=lambda: 2e9)
counters |= dict(max_memory_reserved=lambda: 3e9)
asked = gpu.parse(TINY)
gpu.fake_world(8, "cpu")
seen = mock.MagicMock()
types = torch.autograd.DeviceType
events = [mock.Mock(device_type=one) for one in (types.CUDA, types.CPU)]
seen.return_value.__enter__.return_value.events.return_value = events
with mock.patch.multiple(torch.cuda, **counters), mock.patch.object(gpu, "profile", seen), gpu.quiet():
    cpu = torch.device("cpu")
    figures = gpu.turn("offload", "steps", "plain", False, Pretends(cpu, gpu.Link(cpu, 1.0), asked))
torch.distributed.destroy_process_group()
wanted = {"peak_gb": 2.0, "reserved_gb": 3.0, "retries": 0, "growth_bytes": 10, "kernels": 1}
assert {name: figures.get(name) for name in wanted} == wanted and "exposed_ms" in figures, figures

@contextlib.contextmanager
def graph(given, stream):
    Steps.step = lambda self: [].pop()
    try:
        yield
    finally:
        raise RuntimeError("operation failed due to a previous error during capture")

Steps.step = mock.Mock()
with mock.patch.multiple(torch.cuda, CUDAGraph=object, graph=graph, Stream=object, stream=contextlib.nullcontext):
    finding = gpu.ask_captures(Steps(), None)["finding"]
assert finding.startswith("IndexError at <string>:") and finding.endswith("pop from empty list"), finding

# A turn that fails is a line, and so are those after it; kernels beyond plain's.
status, lines, printed = run("fails", "--modes", "hybrid", "layouts", "--peers", "plain", "flat", "--world", "3")
assert status == 1 and len(lines) == 4
assert [(line["mode"], line["peer"]) for line in lines if "error" in line] == [("hybrid", "flat")], lines
assert sum("Error: " in row for row in printed.splitlines()) == 1, printed
plain, flat = sorted(lines[2:], key=lambda line: line["peer"] == "flat")
(row,) = [row for row in printed.splitlines() if "layouts" in row and "flat" in row and row.startswith("steps")]
assert row.split()[-1] == f"{(flat['kernels'] - plain['kernels']) / units:.1f}"

# Whoever ends it keeps what was measured.
turn, asked = gpu.turn, []
def ended(*given):
    asked.append(given)
    if len(asked) == 3:
        assert len(lines_of("ended")) == 2  # while it runs
        raise KeyboardInterrupt
    return {}
gpu.turn = ended
with contextlib.suppress(KeyboardInterrupt):
    run("ended", "--modes", "layouts")
assert len(lines_of("ended")) == 2
"""


def test_every_mode_runs_and_is_written_down(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(BENCHMARKS), *sys.path]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", CODE, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
