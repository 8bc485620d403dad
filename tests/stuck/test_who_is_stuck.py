"""Who counts as stuck: a rank that gets on in any way goes on, whatever the limit; one that does not is found.

Of statuses as watchers send them, and of single processes as a watcher and its neighbours see them. Whole runs:
`test_stuck.py`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from fullshard.watcher import issued
from fullshard.watcher.judge import Status, may_sleep, stuck, sure, unheard, verdict
from fullshard.watcher.messages import report, sentence
from fullshard.watcher.process import DUMPS_ARE_SAFE, call_of, frames_of, look_at
from fullshard.watcher.rank import Rank
from fullshard.watcher.roll_call import Silence, Watcher
from stores import Store

LIMIT, HARD = 10.0, 100.0
POINT = {"number": 9, "root": 1, "verb": "gather", "unit": "blocks.2", "bytes": 64, "turn": 9, "step": 3, "time": 0.0}
FORWARD = {"did": "ran the model's forward", "at": "train.py:80", "waits": False, "in_pass": True}


def status(rank: int, **known: Any) -> Status:
    """A rank that waits for a gather for longer than the limit; with `waited=None` one that is elsewhere."""
    found = {"rank": rank, "host": "a", "pid": 100 + rank, "clock": 0.0, "gone": None, "state": "S", "raised": None}
    found |= {"idle": False, "waited": LIMIT + 1, "waits_for": POINT, "last": POINT, "count": 9, "steps": 3, "ticks": 0}
    found |= {"cpu": 1.0, "children": 0.0, "io": 5, "records": [POINT], "stack": "", "samples": ["line 1"]}
    return {**found, "call": None, "own": None, "runs": False, "wakes": 5, "silent": None, **known}


def elsewhere(rank: int, **known: Any) -> Status:
    return status(rank, **{"waited": None, "waits_for": None, **known})


def still(rank: int, **known: Any) -> Callable[[int], Status]:
    """The same in every look."""
    return lambda look: elsewhere(rank, **known)


def judged(*ranks: Callable[[int], Status]) -> list[Status] | None:
    """The second of two looks, a minute apart, if ranks are found stuck by then."""
    before, now = ([{**rank(look), "clock": 60.0 * look} for rank in ranks] for look in range(2))
    return now if stuck(now, before, LIMIT, HARD) else None


HEALTHY: dict[str, Callable[[int], Status]] = {
    "evaluates": lambda look: elsewhere(1, samples=[f"line {look}"]),
    "computes in one native call": lambda look: elsewhere(1, runs=True, state="R", cpu=1.0 + look),
    "is starved of the processor": lambda look: elsewhere(1, runs=True, state="R", cpu=1.0),
    "uploads from one line": lambda look: elsewhere(1, wakes=5 + 6000 * look),
    "has children that generate": lambda look: elsewhere(1, children=50.0 * look),
    "reads": lambda look: elsewhere(1, io=5 + (look << 20)),
    "says that it writes files": lambda look: elsewhere(1, ticks=look),
    "issues something": lambda look: elsewhere(1, count=9 + look),
    "compiles in its first step": lambda look: elsewhere(1, steps=0, cpu=1.0 + 30 * look),
    "has a watcher that answers now and then": lambda look: elsewhere(1) if look else lost(1),
    "has not answered for less than the limit": lambda look: lost(1, unheard=LIMIT - 1),
    "does not answer in its first step": lambda look: lost(1, steps=0),
    "holds the interpreter and computes, as its neighbour sees": lambda look: seen(1, runs=True, state="R"),
    "holds the interpreter and its children compute": lambda look: seen(1, children=50.0 * look),
}
STUCK: dict[str, Callable[[int], Status]] = {
    "sleeps": lambda look: elsewhere(1),
    "sleeps in its first step": lambda look: elsewhere(1, steps=0),
    "stands in a collective of the program's own, whose threads do a little": lambda look: elsewhere(
        1, steps=0, cpu=1.0 + look, own=50.0, call={**FORWARD, "did": "called torch.distributed.barrier"}
    ),
    "has a watcher that never answers": lambda look: lost(1),
    "holds the interpreter, and its neighbour sees that it stands still": lambda look: seen(1, samples=["line 1"]),
}


def lost(rank: int, **known: Any) -> Status:
    """One that has not answered for longer than the limit."""
    return {**unheard(rank, status(rank), LIMIT + 1), "steps": 3, **known}


def seen(rank: int, **known: Any) -> Status:
    """One that does not answer, and of which a neighbour tells."""
    return {**lost(rank, unheard=0.0), "state": "S", "seen_by": 0, **known}


def waits(look: int) -> Status:
    return status(0, waited=2 * LIMIT, call=FORWARD)


def waits_longer(look: int) -> Status:
    return status(0, waited=5 * LIMIT, call=FORWARD)


def test_devices_that_wait_for_each_other_do_not_sleep() -> None:
    """Their hosts are in a forward or backward; one that is outside of both may sleep."""
    apart = [{**POINT, "turn": turn, "unit": f"blocks.{turn}"} for turn in (3, 4)]
    inside = [status(rank, idle=True, waited=5 * LIMIT, call=FORWARD, last=apart[rank]) for rank in range(2)]
    assert not may_sleep(inside, HARD)
    assert may_sleep([inside[0], elsewhere(1, idle=True)], HARD)


@pytest.mark.parametrize("case", HEALTHY)
def test_a_rank_that_gets_on_is_waited_for(case: str) -> None:
    assert not judged(waits if "does not answer in its first" in case else waits_longer, HEALTHY[case])


@pytest.mark.parametrize("case", STUCK)
def test_a_rank_that_does_not_is_reported(case: str) -> None:
    now = judged(waits_longer, STUCK[case])
    assert now and verdict(now).ranks == (1,), now
    assert may_sleep(now, HARD) is case.startswith(("sleeps", "holds the interpreter"))
    assert not may_sleep(now, 4 * LIMIT), "the wait is too long in any case"


def test_no_answer_is_no_proof() -> None:
    """Before the limit it means nothing, and one look is never enough."""
    waits = status(0, waited=LIMIT - 1)
    assert not stuck([waits, lost(1)], [waits, lost(1)], LIMIT, HARD)
    assert not sure([waits, lost(1)])
    late = status(0)
    assert not stuck([late, lost(1)], [], LIMIT, HARD)
    assert stuck([late, lost(1)], [late, lost(1)], LIMIT, HARD)
    assert "no answer from rank 1's watcher" in report([late, lost(1)])


def test_no_answer_ends_what_a_broken_connection_has_ended_already() -> None:
    """Before the limit, as nothing can come of it; but not at one look, as a last word may be on its way."""
    broken = status(0, waited=3.0, broken=True)
    assert stuck([broken, lost(1)], [], 300.0, 1000.0) and not sure([broken, lost(1)])
    assert not stuck([broken, elsewhere(1)], [elsewhere(1)], 300.0, 1000.0)
    absent = unheard(1, None)
    assert stuck([broken, absent], [], 300.0, 1000.0) and sure([broken, absent])
    assert "rank 1 ended or raised before it sharded a model" in report([broken, absent])
    assert not stuck([{**broken, "broken": False}, absent], [], 300.0, 1000.0)


def test_where_a_rank_is_that_does_not_answer_is_not_known() -> None:
    text = report([status(0), seen(1, state="T")])
    assert "stopped by a signal (SIGSTOP; its position is unknown)" in text and "last: unknown" in text


def test_ranks_whose_device_waits_are_stuck_within_a_pass_only() -> None:
    """Eight minutes of generation, evaluation on one rank, or an upload: nothing is issued, and nothing is wrong."""
    outside, silent = still(0, idle=True), still(0, idle=True, silent=5.0)
    in_pass = still(1, idle=True, waited=5 * HARD, waits_for=POINT)
    assert not judged(outside, still(1, idle=True))
    assert not judged(lambda look: elsewhere(0, idle=True, samples=[f"line {look}"]), in_pass)  # beyond `hard`, too
    assert judged(outside, in_pass)
    assert judged(silent, still(1, gone="killed by signal 9 (SIGKILL)", state="gone"))
    done = still(1, gone="it ended by itself (exit code 0)", state="gone")
    assert not judged(silent, done), "one rank is done, and the other uploads the model"


@pytest.fixture
def watcher() -> Iterator[Watcher]:
    """Of a rank of its own in this process, as number 0 of two."""
    watcher = Watcher(Rank(), 0, 2, Store)
    yield watcher
    watcher.end(announce=False)


def test_silence_on_a_device_is_a_wait_only_where_a_pass_stands(watcher: Watcher) -> None:
    watcher.end(announce=False)
    rank = watcher.rank
    rank.idle = True
    rank.record(issued.TURN)
    inside, outside = call_of(frames_of(stack("train.py", OURS, MODEL))), call_of(frames_of(stack("train.py")))
    assert inside is not None and outside is not None and inside.in_pass and not outside.in_pass
    for call, waits in ((None, False), (outside, False), (inside, True)):
        watcher._silence = Silence([], call, time.monotonic() - 1000, rank.log[-1])
        assert (watcher._waited() is not None) == waits, call
    rank.record(2 * issued.TURN)  # it goes on
    assert watcher._waited() is None


def test_ranks_in_collectives_of_their_own_are_stuck_only_if_all_are() -> None:
    """Where one is elsewhere (asleep until a server answers, say), theirs is to end: they have a timeout."""
    reduces = {**FORWARD, "did": "called torch.distributed.all_reduce", "in_pass": False}
    gathers = {**reduces, "did": "called full_tensor", "at": "train.py:79"}
    all_reduce = [still(rank, own=50.0, call=reduces) for rank in range(3)]
    gather = still(1, own=50.0, call=gathers)
    now = judged(all_reduce[0], gather, all_reduce[2])
    assert now and sentence(verdict(now)) == (
        "rank 1 called full_tensor (train.py:79) while ranks 0, 2 called torch.distributed.all_reduce (train.py:80)."
    )
    for healthy in (still(1), lambda look: {**gather(look), "io": look << 20}):
        assert not judged(all_reduce[0], healthy, all_reduce[2])
    assert not judged(*all_reduce), "all are in the same call, which may be slow"


def test_the_innocent_are_not_blamed() -> None:
    """Rank 0 saves; the others come to a forward that is new to them, and compare."""
    compares = {**POINT, "verb": "compare", "unit": "(root)"}
    saves = {**FORWARD, "did": "called fullshard.save", "at": "train.py:79"}
    ranks = [status(0, call=saves)] + [status(n, call=FORWARD, last=compares, waits_for=compares) for n in (1, 2, 3)]
    found = verdict(ranks)
    assert sentence(found) == (
        "rank 0 called fullshard.save (train.py:79) while ranks 1-3 ran the model's forward (train.py:80)."
    )
    assert (found.kind, found.ranks) == ("calls", (0,))
    assert verdict([elsewhere(0), *ranks[1:]]).ranks == (0,), "rank 0 sleeps, for which the others wait"


def test_every_verdict_names_the_others_call() -> None:
    """Whatever one rank is found in, the report says in which line of the program the others wait for it."""
    waits = [status(rank, call=FORWARD) for rank in (1, 2)]
    raised = {"raised": "Traceback\nValueError: bad", "state": "gone"}
    ends = {"gone": "it ended by itself", "state": "gone"}
    for known in (
        {"call": {**FORWARD, "did": "was in train"}},
        {**raised, "gone": "exit code 1"},
        {"gone": "killed by signal 9 (SIGKILL)", "state": "gone"},
        {"state": "T"},
        ends,
    ):
        found = verdict([elsewhere(0, **known), *waits])
        assert found.ranks == (0,), found
        assert sentence(found).endswith(" while ranks 1-2 ran the model's forward (train.py:80)."), found
    assert sentence(verdict([lost(0), *waits])).endswith(" while ranks 1-2 ran the model's forward (train.py:80).")


def test_a_call_that_others_ended_without_is_named_and_not_their_end() -> None:
    saves = {**FORWARD, "did": "called fullshard.save", "at": "train.py:90"}
    ends = [elsewhere(rank, gone="it ended by itself", state="gone") for rank in (1, 2)]
    found = verdict([status(0, call=saves), *ends])
    assert (found.kind, found.ranks) == ("calls", (0,))
    assert sentence(found).startswith("rank 0 called fullshard.save (train.py:90) after the end of ranks 1-2 ("), found
    ended = verdict([status(0, call=FORWARD), *ends])
    assert ended.kind == "data", "they may lack batches"
    assert sentence(ended).startswith("ranks 1-2 are gone: the program ended by itself, without an error ("), (
        "or have called sys.exit(3)"
    )
    assert verdict([status(0, call=saves), status(3, call=saves), ends[0]]).ranks == (1,), "most ranks save"


def test_a_block_around_passes_is_a_part_of_training() -> None:
    """`no_sync` may wait, at first. Of two ranks, the one that saves is wrong."""
    saves, within = ({**FORWARD, "did": did} for did in ("called fullshard.save", "called no_sync"))
    assert verdict([status(0, call=within), status(1, call=saves)]).ranks == (1,)


def test_what_a_rank_caught_is_told_until_its_next_step_but_one(watcher: Watcher) -> None:
    rank = watcher.rank
    rank.record(issued.step_word(0, 3))
    rank.record(issued.TURN)
    rank.catches(ValueError("bad"))
    assert watcher.status(False)["raised"] is None, "the program may go on"
    rank.record(2 * issued.TURN)
    assert watcher.status(False)["caught"] == "ValueError: bad"
    found = verdict([status(0, call=FORWARD, caught="ValueError: bad (train.py:9)"), elsewhere(1)])
    assert "forward (train.py:80) after catching ValueError: bad (train.py:9)." in sentence(found), found
    rank.record(issued.step_word(0, 5))
    rank.record(3 * issued.TURN)
    assert watcher.status(False)["caught"] is None


def test_steps_are_counted_by_root_to_tell_what_a_rank_caught(watcher: Watcher) -> None:
    """The other root has finished fewer steps: that says nothing of how long ago the error was."""
    rank, other = watcher.rank, issued.word(0, issued.ROOT)
    rank.record(issued.step_word(0, 30))
    rank.record(issued.TURN)
    rank.catches(ValueError("bad"))
    for step in (7, 8):
        rank.record(issued.step_word(issued.ROOT, step))
        rank.record(other + step * issued.TURN)
        assert watcher.status(False)["caught"] == "ValueError: bad"
    rank.record(issued.step_word(issued.ROOT, 9))
    rank.record(other + 9 * issued.TURN)
    assert watcher.status(False)["caught"] is None, "two steps of the other root are long enough, too"


def test_what_a_rank_caught_is_not_told_after_several_models_of_one_step_each(watcher: Watcher) -> None:
    rank = watcher.rank
    rank.record(issued.step_word(0, 0))
    rank.record(issued.TURN)
    rank.catches(ValueError("bad"))
    for root, told in ((1, True), (2, True), (3, False)):
        rank.record(issued.step_word(root * issued.ROOT, 0))
        rank.record(issued.word(0, root * issued.ROOT) + issued.TURN)
        assert (watcher.status(False)["caught"] == "ValueError: bad") is told, root


# What a stack says.

OURS = [frame.format(os.path.dirname(os.path.dirname(issued.__file__ or ""))) for frame in (
    '  File "{}/watcher/rank.py", line 3 in wait',
    '  File "{}/runtime/step.py", line 3 in before_forward',
    '  File "{}/api/functional/module.py", line 52 in __call__',
)]  # fmt: skip
MODEL = [
    '  File "/home/me/model.py", line 33 in forward',
    '  File "/x/site-packages/torch/nn/modules/module.py", line 9 in _call_impl',
    OURS[2],
]


def stack(program: str, *parts: list[str]) -> str:
    frames = [*(frame for part in parts for frame in part), f'  File "/home/me/{program}", line 80 in train']
    return "Stack (most recent call first):\n" + "\n".join(frames) + "\n"


def test_a_stack_tells_the_call_and_the_users_line() -> None:
    torchs = "/x/lib/site-packages/torch"
    reduce = [f'  File "{torchs}/distributed/distributed_c10d.py", line 3 in all_reduce',
              f'  File "{torchs}/distributed/c10d_logger.py", line 83 in wrapper']  # fmt: skip
    gather = [
        f'  File "{torchs}/_ops.py", line 8 in redispatch',
        f'  File "{torchs}/_library/autograd.py", line 4 in forward',
        f'  File "{torchs}/distributed/_functional_collectives.py", line 3 in all_gather_tensor',
        OURS[0].replace("watcher/rank.py", "forms/row_shard.py").replace("in wait", "in full_tensor"),
    ]
    save = [OURS[0], OURS[0].replace("watcher/rank.py", "store/save.py").replace("in wait", "in save")]
    backward = [OURS[0], f'  File "{torchs}/autograd/graph.py", line 3 in _engine_run_backward',
                f'  File "{torchs}/_tensor.py", line 3 in backward']  # fmt: skip
    dcp = [*reduce, f'  File "{torchs}/distributed/checkpoint/state_dict_saver.py", line 3 in save',
           f'  File "{torchs}/distributed/checkpoint/utils.py", line 3 in inner_func']  # fmt: skip
    said = {
        "called torch.distributed.checkpoint.save (train.py:80)": [dcp],
        "ran the model's forward (train.py:80)": [OURS],
        "ran the model's forward (train.py:80) ": [OURS, MODEL],
        "called torch.distributed.all_reduce (train.py:80)": [reduce],
        "called torch.distributed.all_reduce (model.py:33)": [reduce, MODEL],
        "called full_tensor (train.py:80)": [gather],
        "called fullshard.save (train.py:80)": [save],
        "ran a backward (train.py:80)": [backward],
        "was in train (train.py:80)": [],
    }
    for what, parts in said.items():
        call = call_of(frames_of(stack("train.py", *parts)))
        assert str(call) == what.strip()
        assert call is not None and call.waits == (parts[:1] in ([reduce], [gather], [dcp])), what
        assert call.in_pass == (OURS in parts or MODEL in parts or backward in parts), what
    assert call_of(frames_of("")) is None


# What a watcher sees of its own process, and neighbours of one that does not answer.

BEGINS = f"""
import ctypes, hashlib, json, os, socket, sys, threading, time
package = type(sys)("fullshard")  # without torch, which takes seconds
package.__path__ = [{os.path.dirname(os.path.dirname(issued.__file__))!r}]
sys.modules["fullshard"] = package
sys.path.insert(0, {os.path.dirname(os.path.dirname(__file__))!r})
from stores import Store
from fullshard.watcher.rank import Rank
from fullshard.watcher.roll_call import Watcher
rank = Rank()
rank.watcher = watcher = Watcher(rank, 1, 2, Store)
watcher.end(announce=False)
def statuses():
    for _ in range(2):
        time.sleep(1.0)
        print(json.dumps(watcher.status(True)), flush=True)
looks = threading.Thread(target=statuses, daemon=True)
a, b = socket.socketpair()
def slowly():
    while b.recv(1 << 16):
        time.sleep(0.01)
print(json.dumps(watcher.status(False)), flush=True)
looks.start()
"""
DOES = {
    "computes": ("hashlib.pbkdf2_hmac('sha512', b'x', b'y', 1 << 30)", True),
    "computes in Python": ("while True: pass", True),
    "uploads": ("threading.Thread(target=slowly, daemon=True).start(); a.sendall(bytes(1 << 30))", True),
    "sleeps": ("time.sleep(600)", False),
    "waits for a lock": ("lock = threading.Lock(); lock.acquire(); lock.acquire()", False),
}
HOLDS = {
    "computes, and holds the interpreter": ("sum(range(1 << 60))", True),
    "waits, and holds the interpreter": (
        "mutex, lib = ctypes.create_string_buffer(128), ctypes.PyDLL(None); "
        "lib.pthread_mutex_lock(mutex); lib.pthread_mutex_lock(mutex)",
        False,
    ),
}


@contextmanager
def process(program: str) -> Iterator[Callable[[], Status]]:
    """A process that does this; gives a function that reads what its watcher says next."""
    rank = subprocess.Popen([sys.executable, "-c", BEGINS + program], stdout=subprocess.PIPE)
    try:
        assert rank.stdout is not None
        yield lambda: json.loads(rank.stdout.readline())
    finally:
        rank.kill()
        rank.communicate()


@pytest.mark.parametrize("name", DOES)
def test_what_a_process_does_in_one_line_counts(name: str) -> None:
    program, gets_on = DOES[name]
    with process(program) as status_of:
        _, before, now = status_of(), status_of(), status_of()
    assert before["stack"] and before["steps"] == 0
    # In its first step, too: that its watcher looks is no work of the rank's.
    for steps in (3,) if gets_on else (0, 3):
        looks = [{**before, "steps": steps}, {**now, "steps": steps}]
        waits = status(0, waited=5 * LIMIT)
        assert stuck([waits, looks[1]], [waits, looks[0]], LIMIT, HARD) != gets_on, (name, *looks)


@pytest.mark.parametrize("name", HOLDS)
def test_what_a_process_does_that_holds_the_interpreter_its_neighbour_sees(name: str) -> None:
    program, gets_on = HOLDS[name]
    with process(program) as status_of:
        begins = status_of()
        time.sleep(0.5)
        looks = []
        for _ in range(2):
            looks.append({**unheard(1, begins), **look_at(begins), "steps": 3})
            time.sleep(1.0)
        waits = status(0, waited=5 * LIMIT)
        assert ("<string>" in looks[1]["samples"][0]) is DUMPS_ARE_SAFE, "its stack is known all the same"
        assert stuck([waits, looks[1]], [waits, looks[0]], LIMIT, HARD) != gets_on, (name, *looks)
        os.kill(begins["pid"], signal.SIGSTOP)
        time.sleep(0.2)
        assert look_at(begins)["state"] == "T"
    assert look_at(begins)["gone"] == "killed, or ended by os._exit"
