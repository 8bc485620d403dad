"""`fullshard doctor`: who is blamed, why, and what is read at all. Real runs are explained in tests/stuck."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fullshard.cli.doctor import show
from fullshard.cli.main import main
from fullshard.errors import ConfigError
from fullshard.insight.doctor import doctor

NOW = 1_795_301_800.0


def record(number: int, verb: str = "gather", unit: str = "blocks.2", step: int = 3) -> dict[str, Any]:
    event = {"verb": verb, "unit": unit, "bytes": 64, "step": step, "turn": number, "root": 1}
    return {"number": number, "time": NOW + number, **event}


def status(rank: int, last: dict[str, Any] | None = None, **known: Any) -> dict[str, Any]:
    """What is known of a rank that issued `last` and waits for it."""
    last = last or record(9)
    process = {"rank": rank, "host": f"host{rank // 2}", "pid": 100 + rank, "gone": None, "state": "S", "raised": None}
    waits = {"time": NOW + 20, "idle": False, "waited": 5.0, "waits_for": last, "call": None, "io": 5}
    did = {"last": last, "count": last["number"], "steps": last["step"], "records": [record(8), last]}
    return {**process, **waits, **did, "stack": 'File "train.py", line 7', **known}


def behind(rank: int, **known: Any) -> dict[str, Any]:
    """One that does not wait, and did not come to event 9."""
    last = record(8)
    return status(rank, last, waited=None, waits_for=None, records=[last], **known)


def lost(rank: int) -> dict[str, Any]:
    known = {"pid": 0, "state": "unreachable", "waits_for": None, "last": None, "count": 0, "records": [], "stack": ""}
    return status(rank, waited=None, **known)


def write(folder: Path, *ranks: dict[str, Any], time: float = NOW + 21, name: str = "stuck-1-rank0.json") -> Path:
    (folder / name).write_text(json.dumps({"format": 1, "time": time, "report": "", "ranks": list(ranks)}))
    return folder


REDUCES = {"did": "called torch.distributed.all_reduce", "at": "train.py:7", "waits": True, "in_pass": False}
ENDED = {"gone": "it ended by itself", "state": "gone"}
CAUSES = {
    "raised": (
        behind(2, raised="Traceback ...\nValueError: bad sample\n", **ENDED),
        "raised",
        ("bad sample", "Fix the error"),
    ),
    "memory": (behind(2, raised="torch.OutOfMemoryError: no\n"), "raised", ("OutOfMemoryError", "checkpointing")),
    "killed": (behind(2, gone="killed by signal 9 (SIGKILL)", state="gone"), "gone", ("SIGKILL", "dmesg", "oom_kill")),
    "aborted": (behind(2, gone="killed by signal 6 (SIGABRT)", state="gone"), "gone", ("SIGABRT", "stderr")),
    "exits": (behind(2, gone="exit code 7", state="gone"), "gone", ("exit code 7", "sys.exit")),
    "data": (behind(2, **ENDED), "data", ("by itself", "fewer batches", "DistributedSampler")),
    "stopped": (behind(2, state="T", stack=""), "stopped", ("stopped", "kill -CONT 102` on host1")),
    "unreachable": (lost(2), "unreachable", ("cannot be reached", "Is that machine up")),
    "departed": (status(2, record(9, "compare", "blocks.3")), "departed", ("left the order", "blocks.3", "an `if`")),
    "computes": (behind(2, state="R"), "elsewhere", ("computes", "endless loop")),
    "GIL": (behind(2), "elsewhere", ("sleeps", "GIL", "py-spy dump --native --pid 102")),
    "disk": (behind(2, state="D"), "elsewhere", ("cannot be interrupted", "/proc/102/stack")),
    "collective": (
        behind(2, call=REDUCES, stack='File "/x/torch/distributed/distributed_c10d.py", line 3 in all_reduce'),
        "elsewhere",
        ("collective that is not the engine's", "rank == 0"),
    ),
    "absent": (lost(2) | {"state": "absent"}, "absent", ("did not reach a first forward",)),
    "apart": (
        status(2, record(9, "reduce", "head")),
        "apart",
        ("something different from the others", "reduce of head"),
    ),
}


@pytest.mark.parametrize("case", CAUSES)
def test_who_is_to_blame_and_what_to_do(tmp_path: Path, case: str) -> None:
    wrong, kind, words = CAUSES[case]
    found = doctor(write(tmp_path, status(0), status(1), wrong, status(3)))
    assert (found.kind, found.ranks) == (kind, (2,)), found
    assert [word for word in words if word not in str(found)] == [], found
    assert "What to do next" in str(found) and "ranks 0-1, 3  wait for gather of blocks.2 (step 3)" in str(found)
    if kind in ("gone", "data"):
        assert "event 9: rank 2: nothing yet; ranks 0-1, 3: gather of blocks.2" in str(found)
        assert "2026-11-21 22:56:48.000  rank 2 issued its last event" in str(found)


def test_a_rank_that_computes_with_dtensors_is_in_no_collective(tmp_path: Path) -> None:
    """The doctor says of a rank what its watcher says of it."""
    frame = 'File "/x/torch/distributed/tensor/_dispatch.py", line 3 in dispatch'
    computing = behind(2, state="R", call={**REDUCES, "did": "was in train", "waits": False}, stack=frame)
    text = str(doctor(write(tmp_path, status(0), status(1), computing)))
    assert "rank 2 did not arrive, and computes elsewhere" in text and "in a collective" not in text


def test_nobody_is_blamed_where_nobody_can_be(tmp_path: Path) -> None:
    found = doctor(write(tmp_path, status(0), status(1)))
    assert (found.kind, found.ranks) == ("transport", ()) and "NCCL_DEBUG" in str(found)
    found = doctor(write(tmp_path, status(0), status(1, record(9, "reduce", "head"))))
    assert (found.kind, found.ranks) == ("apart", ()) and "no rank can be blamed" in str(found)


def test_the_first_failure_is_blamed_not_what_follows_from_it(tmp_path: Path) -> None:
    follows = behind(0, gone="exit code 1", state="gone", raised="fullshard.errors.DivergenceError: rank 1 is gone\n")
    killed = behind(1, gone="killed by signal 9 (SIGKILL)", state="gone")
    found = doctor(write(tmp_path, follows, killed, status(2)))
    assert (found.kind, found.ranks) == ("gone", (1,))
    write(tmp_path, behind(0, gone="killed by signal 9 (SIGKILL)", state="gone"), killed, status(2),
          time=NOW + 60, name="stuck-2-rank2.json")  # fmt: skip
    write(tmp_path, status(0), killed, status(2))
    assert doctor(tmp_path).ranks == (1,)  # rank 0 still lived when this was found


def test_halves_of_a_network_that_was_cut_are_put_together(tmp_path: Path) -> None:
    write(tmp_path, status(0), status(1), lost(2), lost(3), name="stuck-1-rank0.json")
    write(tmp_path, lost(0), lost(1), status(2), status(3), time=NOW + 25, name="stuck-1-rank2.json")
    found = doctor(tmp_path)
    assert (found.kind, found.ranks) == ("cut", ())
    assert found.summary == "the network is cut between ranks 0-1 (host0) and ranks 2-3 (host1)."
    # One that died is the cause, whoever could not reach it.
    gone = behind(3, gone="killed by signal 11 (SIGSEGV)", state="gone")
    write(tmp_path, lost(0), lost(1), status(2), gone, time=NOW + 25, name="stuck-1-rank2.json")
    assert (doctor(tmp_path).kind, doctor(tmp_path).ranks) == ("gone", (3,))


def test_reports_of_other_runs_are_left_alone(tmp_path: Path) -> None:
    write(tmp_path, behind(0, pid=7, state="T"), status(1, pid=8), time=NOW - 5, name="stuck-0-rank1.json")
    found = doctor(write(tmp_path, status(0), behind(1, state="T")))
    assert found.ranks == (1,) and "1 older report(s)" in str(found)
    assert doctor(tmp_path / "stuck-0-rank1.json").ranks == (0,)


def entry(number: int, what: str = "gloo:all_reduce", done: bool = True, **known: Any) -> dict[str, Any]:
    """As torch 2.13 writes it."""
    own = {"name": "main", "filename": "train.py", "line": 10 + number}
    inner = {"name": "all_reduce", "filename": "/site-packages/torch/distributed/distributed_c10d.py", "line": 1}
    group = {"pg_id": 0, "process_group": ["0", "default_pg"], "collective_seq_id": number, "p2p_seq_id": 0}
    tensors = {
        "input_sizes": [[4]],
        "input_dtypes": ["Float"],
        "is_p2p": False,
        "time_created_ns": int((NOW + number) * 1e9),
    }
    ends = {"retired": done, "state": "scheduled"}
    return {
        "frames": [inner, own],
        "record_id": number - 1,
        "profiling_name": what,
        **group,
        **tensors,
        **ends,
        **known,
    }


def dumps(folder: Path, *ranks: list[dict[str, Any]], world: int = 2) -> Path:
    for rank, entries in enumerate(ranks):
        group = {"name": "", "desc": "", "ranks": str(list(range(world)))}
        whole = {"version": "2.10", "pg_config": {"": group}, "pg_status": {}, "entries": entries}
        (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(whole, protocol=2))
    return folder


def test_the_flight_recorder_tells_who_did_not_come(tmp_path: Path) -> None:
    found = doctor(dumps(tmp_path, [entry(1), entry(2), entry(3, done=False)], [entry(1), entry(2)]))
    assert (found.kind, found.ranks) == ("recorder", (1,))
    assert "rank 1 did not issue collective 3 of group 0 (default_pg)" in found.summary
    assert 'issued by rank 1 from:\n    File "train.py", line 12 in main' in str(found)


def test_the_flight_recorder_tells_what_differs_and_who_left_no_dump(tmp_path: Path) -> None:
    other = entry(3, "nccl:_all_gather_base", done=False)
    found = doctor(dumps(tmp_path, [entry(3, done=False)], [other], [entry(3, done=False)], world=4))
    assert found.ranks == (1,) and "rank 1: _all_gather_base [[4]] Float" in str(found)
    assert "There is no dump of rank 3" in str(found)


def test_the_flight_recorder_forgets_and_may_have_nothing_to_say(tmp_path: Path) -> None:
    assert doctor(dumps(tmp_path, [entry(5), entry(6)], [entry(6), entry(7)])).kind == "nothing"
    stuck = doctor(dumps(tmp_path, [entry(6, done=False), entry(7, done=False)], [entry(6, done=False)]))
    assert stuck.ranks == () and "collective 6" in stuck.summary and "did not end" in stuck.summary
    for rank in range(2):  # as JSON, which says 0 for None and has no frames
        path = tmp_path / f"nccl_trace_rank_{rank}"
        whole = pickle.loads(path.read_bytes())
        path.unlink()
        [each.pop("frames") for each in whole["entries"]]
        (tmp_path / f"trace_{rank}.json").write_text(json.dumps(whole))
    assert doctor(tmp_path).summary == stuck.summary


def test_report_and_flight_recorder_together(tmp_path: Path) -> None:
    dumps(tmp_path, [entry(1), entry(2, done=False)], [entry(1)])
    found = doctor(write(tmp_path, status(0), behind(1, state="T")))
    assert found.kind == "stopped" and "group 0 (default_pg), collective 2" in str(found)


class Attack:
    """Makes a file when it is loaded by `pickle.load`."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.target),)


def one_hash() -> bytes:
    """A dictionary whose keys Python hashes alike, so that each is compared with all others."""
    return pickle.dumps({"entries": dict.fromkeys(n * (2**61 - 1) for n in range(2, 20_000))}, protocol=2)


def bad_files(folder: Path) -> dict[str, tuple[bytes, str]]:
    """By case: what is in the file, and what is said of it."""
    good = json.loads((write(folder, status(0), status(1)) / "stuck-1-rank0.json").read_text())
    text = json.dumps(good).encode()
    attack = pickle.dumps({"entries": [Attack(folder / "made")]}, protocol=2)
    return {
        "truncated": (text[: len(text) // 2], "ends in the middle"),
        "empty": (b"", "ends in the middle"),
        "not JSON": (b"{1: 2}", "not JSON"),
        "binary": (b"\xff\xfe\x00", "neither JSON nor a pickle"),
        "foreign": (b'{"traceEvents": []}', "neither a watcher's report nor"),
        "a list": (b"[1, 2]", "neither a watcher's report nor"),
        "newer": (json.dumps({**good, "format": 2}).encode(), "its format is 2; this version reads formats up to 1"),
        "no field": (json.dumps({**good, "ranks": [{"rank": 0}]}).encode(), "has no 'host'"),
        "wrong field": (json.dumps({**good, "ranks": [status(0, count="9")]}).encode(), "'count' of the status"),
        "wrong record": (json.dumps({**good, "ranks": [status(0, records=[1])]}).encode(), "should be a dictionary"),
        "wrong call": (json.dumps({**good, "ranks": [status(0, call=5)]}).encode(), "'call' of the status"),
        "call without a place": (json.dumps({**good, "ranks": [status(0, call={"did": "a"})]}).encode(), "has no 'at'"),
        "no rank": (json.dumps({**good, "ranks": []}).encode(), "has no ranks"),
        "deep": (b"[" * 200_000, "nested too deeply"),
        "attack": (attack, "asks for posix.mkdir"),
        "attack by protocol 4": (pickle.dumps(Attack(folder / "made"), protocol=4), "asks for posix.mkdir"),
        "getattr": (b"\x80\x02cbuiltins\ngetattr\n.", "asks for builtins.getattr"),
        "persistent": (b"\x80\x02X\x01\x00\x00\x00aQ.", "refers to something outside"),
        "truncated pickle": (attack[:12], "broken or truncated pickle"),
        "huge memo": (b"\x80\x02Nr\xff\xff\xff\xff.", "broken or truncated pickle"),
        "a memo of 2 GiB": (b"\x80\x02Nr\xff\xff\xff\x0f.", "broken or truncated pickle"),
        "bytes of 2 GiB": (b"\x80\x05\x96" + (2**31).to_bytes(8, "little") + b".", "broken or truncated pickle"),
        "keys of one hash": (one_hash(), "broken or truncated pickle"),
        "a set": (pickle.dumps({"entries": {1}}, protocol=4), "'entries' of a flight recorder's dump is set"),
    }


def test_bad_files_are_told_of_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, (case, (data, words)) in enumerate(bad_files(tmp_path).items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "trace_rank_0").write_bytes(data)
        for path in (folder, folder / "trace_rank_0"):
            assert main(["doctor", str(path)]) == 2, case
            told = capsys.readouterr().err
            assert words in told and re.fullmatch(r"fullshard: .+\n(  .+\n)*", told), (case, told)
    assert not (tmp_path / "made").exists()


def test_bad_paths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (tmp_path / "nowhere", tmp_path):
        assert main(["doctor", str(path)]) == 2
        printed = capsys.readouterr().err
        assert re.fullmatch(r"fullshard: .+\n(  .+\n)*", printed), printed
    for arguments in ([], ["a", "b"]):  # tyro's own words
        assert main(["doctor", *arguments]) == 2 and capsys.readouterr().err
    with pytest.raises(ConfigError, match="neither a watcher's report"):
        doctor(tmp_path)


def test_a_bad_file_beside_a_good_one_is_only_mentioned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, status(0), behind(1, state="T"))
    (tmp_path / "stuck-2-rank1.json").write_text("{")
    assert main(["doctor", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert out.startswith("rank 1 is stopped") and "left out: stuck-2-rank1.json: it ends in the middle" in out
    assert "\x1b[" not in out


def test_colours_on_a_terminal(tmp_path: Path) -> None:
    out = io.StringIO()
    show(doctor(write(tmp_path, status(0), behind(1, state="T"))), Console(file=out, force_terminal=True, width=80))
    assert "\x1b[1;31mrank 1 is stopped" in out.getvalue()
