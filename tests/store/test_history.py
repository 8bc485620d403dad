"""Saves that are broken off at any moment, in any way: what was acknowledged is there, and `latest` names a whole one.

A planted fault ends a rank, stops it, or lets a call fail; see `history_program.py`. `history.py` checks the folder.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from history import Zygote, check, lines, printed
from history_program import LIMIT

from fullshard.store.folder import step_and_turn

PHASES = {  # phase: how often it comes in one save, on the first rank and on the other
    "set-up": (1, 1),
    "plan": (1, 0),
    "begin": (1, 0),
    "write": (284, 156),
    "sync": (7, 1),
    "end": (1, 0),
    "rename": (1, 0),
    "replace": (1, 0),
    "finish": (1, 0),
}
OF_WRITERS = ("write", "sync", "end", "rename", "replace", "finish")
"""Phases that are the writer's in a save in the background; it has these besides."""
NOTE = (1, 1)
FAULTS = ("kill", "raise", "EIO", "ENOSPC", "short")
IN_TIME = 60.0  # seconds within which an error is raised, on a busy machine


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    made = Zygote()
    yield made
    made.close()


def orders(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Faults, spread evenly over phases, ranks and kinds, at random calls."""
    draw = random.Random(seed)
    found: list[dict[str, Any]] = []
    while len(found) < count:
        asynchronous = len(found) % 3 == 2
        phases = [*PHASES, *(["note"] if asynchronous else [])]
        phase = phases[(len(found) + draw.randrange(2)) % len(phases)]
        rank = draw.randrange(2)
        often = (PHASES | {"note": NOTE})[phase][rank]
        fault = draw.choice(FAULTS if phase == "write" else FAULTS[:-1])
        where = "writer" if asynchronous and phase in (*OF_WRITERS, "note") else "rank"
        if not often:
            continue
        if where == "writer" and fault == "kill" and draw.random() < 0.5:
            fault = "kill the rank"
        at = draw.randint(often + 1, 3 * often)
        keep_last = draw.choice([None, 1, 2])
        found.append(
            {"phase": phase, "fault": fault, "at": at, "rank": rank, "where": where, "asynchronous": asynchronous,
             "keep_last": keep_last}
        )  # fmt: skip
    return found


def names_of(found: list[dict[str, Any]]) -> list[str]:
    return [f"{i} {o['fault']} in {o['phase']} {o['at']} on {o['rank']} ({o['where']})" for i, o in enumerate(found)]


FEW, MANY = orders(18), orders(300, seed=1)


def cases() -> list[Any]:
    few = [pytest.param(order, id=name) for order, name in zip(FEW, names_of(FEW), strict=True)]
    marks = [pytest.mark.further]
    return few + [pytest.param(o, id=f"more {n}", marks=marks) for o, n in zip(MANY, names_of(MANY), strict=True)]


@pytest.mark.parametrize("order", cases())
def test_a_planted_fault(zygote: Zygote, tmp_path: Path, order: dict[str, Any]) -> None:
    exits = zygote.run(tmp_path, **order)
    told = printed(tmp_path)
    steps = check(tmp_path, order["keep_last"])
    assert None not in exits and 3 not in exits, (exits, told)
    errors = [lines(tmp_path, "errors", rank) for rank in range(2)]
    if order["fault"] in ("kill", "kill the rank") and (order["where"] == "rank" or order["fault"] != "kill"):
        assert exits[order["rank"]] == -9 and exits[1 - order["rank"]] == 1, (exits, told)
        assert [e["kind"] for e in errors[1 - order["rank"]]] == ["DivergenceError"], told
        assert f"rank {order['rank']}" in errors[1 - order["rank"]][0]["text"], told
        return
    assert exits == [0, 0] and 4 in steps, (exits, steps, told)
    if order["fault"] == "short" or "An old checkpoint could not be removed" in told:
        assert errors == [[], []], told
        return
    words = {"kill": "exit code -9", "raise": "planted", "EIO": "Input/output error", "ENOSPC": "No space left"}
    for of_rank in errors:
        assert len(of_rank) == 1 and of_rank[0]["kind"] == "CheckpointError", told
        assert words[order["fault"]] in of_rank[0]["text"], of_rank


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("number", [0, 1, *(pytest.param(n, marks=pytest.mark.further) for n in range(2, 50))])
def test_killed_at_any_moment(zygote: Zygote, tmp_path: Path, number: int, asynchronous: bool) -> None:
    draw = random.Random(number)
    order = {"rank": draw.randrange(2), "delay": draw.uniform(0.0, 0.6), "steps": 60, "keep_last": 3}
    exits = zygote.run(tmp_path, asynchronous=asynchronous, **order)
    check(tmp_path, 3)
    assert sorted(exits, key=str) == [-9, 1], (exits, printed(tmp_path))
    (error,) = lines(tmp_path, "errors", 1 - order["rank"])
    assert error["kind"] == "DivergenceError" and f"rank {order['rank']}" in error["text"], error


PUBLISHING = (("sync", 12), ("rename", 2), ("sync", 13), ("sync", 14), ("replace", 2), ("sync", 15))
"""The calls in which the first rank puts its second checkpoint in its place."""


@pytest.mark.parametrize(
    ("where", "phase", "at"),
    [*(("rank", *point) for point in PUBLISHING), ("writer", "rename", 2), ("writer", "replace", 2)],
)
def test_a_restart_after_a_kill_while_publishing(
    zygote: Zygote, tmp_path: Path, where: str, phase: str, at: int
) -> None:
    """Both ranks go on from one checkpoint, the old or the new one, and the next save leaves no rest.

    A writer whose rank was killed may still be publishing when the job starts again.
    """
    fault = "kill" if where == "rank" else "kill the rank"
    zygote.run(tmp_path, asynchronous=where == "writer", phase=phase, fault=fault, at=at, rank=0, where=where)
    (tmp_path / "store").unlink(missing_ok=True)
    assert zygote.run(tmp_path, resume=True, steps=1) == [0, 0], printed(tmp_path)
    (first,), (other,) = (lines(tmp_path, "resumed", rank) for rank in range(2))
    assert first == other == [first[0], True], (first, other)
    assert first[0] in ([2] if (phase, at) == PUBLISHING[-1] else [1] if where == "rank" else [1, 2])
    for path in (tmp_path / "run").iterdir():
        assert path.name in ("latest", "lock") or step_and_turn(path.name), path
    assert check(tmp_path)[-1] == first[0] + 1


@pytest.mark.parametrize(
    ("phase", "asynchronous"),
    [
        ("write", False),
        ("replace", False),
        ("set-up", True),
        *(pytest.param(p, False, marks=pytest.mark.further) for p in PHASES if p not in ("write", "replace")),
    ],
)
def test_a_stopped_rank_is_named_and_ends_when_it_goes_on(
    zygote: Zygote, tmp_path: Path, phase: str, asynchronous: bool
) -> None:
    order = {"phase": phase, "fault": "stop", "at": PHASES[phase][0] + 1, "rank": 0, "where": "rank"}
    exits = zygote.run(tmp_path, asynchronous=asynchronous, **order)
    steps = check(tmp_path)
    told = printed(tmp_path)
    assert 1 in steps and exits == [1, 1], (exits, told)
    (error,) = lines(tmp_path, "errors", 1)
    assert error["kind"] == "DivergenceError" and "rank 0 is stopped" in error["text"], told
    assert error["seconds"] < IN_TIME, told


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_slow_disk_is_waited_for(zygote: Zygote, tmp_path: Path, asynchronous: bool) -> None:
    """One call takes twice as long as ranks may wait for each other."""
    where = "writer" if asynchronous else "rank"
    order = {"phase": "replace", "fault": "slow", "seconds": 2.5 * LIMIT, "rank": 0, "where": where, "steps": 2}
    exits = zygote.run(tmp_path, asynchronous=asynchronous, **order)
    assert exits == [0, 0] and check(tmp_path) == [1, 2], printed(tmp_path)


@pytest.mark.further  # the others' processes are forked; one that imports torch is in test_save_and_load.py
def test_the_process_beside_a_rank_as_it_is(zygote: Zygote, tmp_path: Path) -> None:
    assert zygote.run(tmp_path, asynchronous=True, real_writer=True, steps=3) == [0, 0], printed(tmp_path)
    assert check(tmp_path) == [1, 2, 3]
