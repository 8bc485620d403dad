"""The watcher: a thread of each rank. It calls the roll while its rank waits, and answers the roll calls of others.

Watchers communicate by keys in the process group's store, each over its own connection:

    came/R     how many default process groups rank R has had in this store; all other keys begin with this number
    rank/R     the last status of rank R (`Watcher.status`)
    roll       the latest round: its number, its caller, what it asks for; or the report that ends everything
    round/N    exists if there is a round N; threads check for it twice a second

The rank that called a round calls the next rounds too, and judges; a different waiting rank takes over if no round
follows. Ranks on the same machine look up a silent rank in `/proc`: it is gone, stopped, or alive and holding the
interpreter lock (they then get its Python stack by a signal, which `faulthandler` answers even so). A silent rank
without neighbours counts as gone only once its silence has lasted for the limit.

A watcher that cannot reach the store is alone: it judges by what is certain without the store, and retries
periodically.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import json
import math
import multiprocessing.util
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from . import messages, process
from .issued import ROOT, Record, records_of
from .judge import FORMAT, Status, may_sleep, stuck, sure, unheard
from .process import CurrentCall, Frame
from .rank import SLICE, Rank, Wait, note_at_the_end

ASK_AFTER = 1.0  # seconds of a wait before the first round
ANSWER = 3.0  # seconds for answers
RETRY = 5.0  # seconds between attempts to reach the store after a failure
_TICK = 0.5  # seconds between two looks at the store
_SOON = 0.1  # the same while answers are awaited
_LOOKS = 2  # looks without progress before a verdict, unless a rank is gone for good
_SAMPLES = 4  # samples of a rank's stack per look
_RECORDS = 256  # records of a rank per look
_MOST_SILENT = 16  # silent ranks that neighbours look at per round
_LINGER = 3.0  # seconds that the rank that may keep the store waits for others to read its last status
_KEPT = 8  # keys of rounds to keep
_KEEPER = 0  # the rank whose process keeps the store, unless the launcher does


class StoreGone(Exception):
    """The process group's store cannot be reached."""


class Silence(NamedTuple):
    """The position of a rank that issues nothing and does not wait for a collective of Fullshard's.

    Attributes:
        frames: its stack.
        call: the call in that stack.
        since: when this stack was first seen, unchanged and without new records since; by `time.monotonic`.
        issued: the integer of the log that it issued last.
    """

    frames: list[Frame]
    call: CurrentCall | None
    since: float
    issued: int


class Round(NamedTuple):
    """A round that this rank called and awaits the answers of.

    Attributes:
        number: the round's number.
        full: whether it asks for records and stacks.
        silent: rank that did not answer before -> the neighbour that looks at it.
        begun: its start, by `time.monotonic`.
    """

    number: int
    full: bool
    silent: dict[int, int]
    begun: float


class Watcher:
    """See the module's docstring. The thread runs from construction to `end`.

    Args:
        rank: this process.
        number, world: its rank in the default process group, and that group's size.
        connect: opens a separate connection to the group's store (`StoreLine`).

    Attributes:
        is_alone: whether the last attempt to reach the store failed.
        last_statuses: rank -> its last status, of the ranks that have sent a status.
        before: all ranks' statuses at the previous look.
    """

    def __init__(self, rank: Rank, number: int, world: int, connect: Callable[[], Any]) -> None:
        self.rank, self.number, self.world = rank, number, world
        self.last_statuses: dict[int, Status] = {}
        self.before: list[Status] = []
        self.is_alone = False
        self._connect, self._line = connect, connect()
        self._prefix = f"{self._line.add(f'came/{number}', 1)}/"
        self._home, self._task = threading.get_ident(), threading.get_native_id()
        self._stacks = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process
        # Of the thread that gets the signal, the main one. Stacks of others change while they are read: the handler may
        # end a healthy process (python/cpython#116008).
        if process.DUMPS_ARE_SAFE:
            faulthandler.register(process.SIGNAL, file=self._stacks, all_threads=False, chain=False)
        self._heard: dict[int, float] = {}  # rank -> time of its last answer
        self._roll: dict[str, Any] = {"round": 0, "by": None, "full": False, "silent": {}}
        self._roll_at = self._called = self._looked = 0.0  # times: roll seen; roll called here; own stack sampled
        self._since = 0.0  # start of the wait for which this rank called the roll
        self._warned = 0.0  # time at which a wait was last said to be long
        self._round: Round | None = None
        self._answers: dict[int, Status] = {}  # rank -> its answer to the current round
        self._issued, self._moved = 0, 0.0  # the rank's last record, and when it was first seen
        self._silence: Silence | None = None
        self._alike = 0  # consecutive looks without progress
        self._condemned: dict[int, float] = {}  # rank to terminate (this, or silent neighbours) -> time of the verdict
        self._printed: set[object] = set()  # keys of messages that are printed once
        self._silent: dict[int, int] = {}  # rank that did not answer the last round -> the neighbour that looks at it
        self._read_at = self._answered_store = time.monotonic()
        self._asked_store = self._tried_store = 0.0  # pending request's start (0: none); last failed attempt
        self._over, self._ends = threading.Event(), False
        self._put({"round": 0, **self.status(False)})
        self._ask("replace", f"{self._prefix}roll", "", json.dumps(self._roll))
        self._thread = threading.Thread(target=self._run, name="fullshard-watcher", daemon=True)
        self._thread.start()

    def hears_nothing_for(self, seconds: float) -> bool:
        """Whether the store has not answered for this long."""
        since = self._answered_store if self.is_alone else self._asked_store
        return since > 0.0 and time.monotonic() - since > seconds

    def end(self, announce: bool = True) -> None:
        """Stop the thread, which would crash the process if it ran native code while the interpreter ends.

        Args:
            announce: whether the rank ends, which is then announced to other ranks.
        """
        self._ends = announce
        self._over.set()
        patience = _LINGER + (self.rank.settings.grace + 6.0 if len(self._condemned) > 1 else 0.0)
        self._thread.join(patience)

    def _run(self) -> None:
        pause = 0.0
        while not self._over.wait(pause):
            try:
                self._tick()
            except StoreGone as error:
                self.is_alone, self._round, self._tried_store = True, None, time.monotonic()
                if _KEEPER not in self._gone:  # expected if its keeper is gone
                    self._print_once(StoreGone, messages.store_unreachable(self.number, error, RETRY))
            except Exception:  # a bug here must not look like a silent rank: keep watching
                fault = traceback.format_exc()
                self._print_once(fault, fault)
            pause = _SOON if self._round is not None else max(_TICK, self.world / 4000)
        if self._ends:
            if not self.is_alone:
                with contextlib.suppress(StoreGone):
                    self._last_word()
            while any(rank != self.number for rank in self._condemned):  # no other process terminates them
                self._end_if_deaf()
                time.sleep(_SOON)

    def _tick(self) -> None:
        last = self.rank.log[-1]
        if last != self._issued:
            self._issued, self._moved = last, time.monotonic()
        if self.is_alone and time.monotonic() - self._tried_store > RETRY:
            self._come_back()
        if not self.is_alone:
            self._read_roll()
        if self.rank.verdict is None:
            self._look_into_silence()
            if not self.is_alone:
                self._call_or_judge()
            elif (self._waited() or 0.0) > ASK_AFTER and time.monotonic() - self._called > 2 * _TICK:
                self._judge_alone()
        self._end_if_deaf()

    # The store.

    def _ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of the store's connection. While it does not answer, `hears_nothing_for` counts.

        Raises:
            StoreGone: the store cannot be reached. The next call reconnects, as a late answer to this call may follow.
        """
        self._asked_store = time.monotonic()
        try:
            if self._line is None:
                self._line = self._connect()
            if self._line.has_ended:
                raise StoreGone("its process has closed the connection")
            answer = getattr(self._line, method)(*arguments)
        except (RuntimeError, OSError, StoreGone) as error:
            self._line = None
            raise StoreGone(str(error)) from error
        finally:
            self._asked_store = 0.0
        self._answered_store = time.monotonic()
        return answer

    def _come_back(self) -> None:
        """Reconnect to the store. Silence in the meantime says nothing about other ranks, and is forgotten."""
        self._put({"round": self._roll["round"], **self.status(False)})
        self.is_alone, self._alike, self._read_at = False, 0, -math.inf
        self.before.clear()
        self._heard.clear()

    def _has(self, key: str) -> bool:
        return bool(self._ask("has", self._prefix + key))

    def _get(self, *keys: str) -> list[Any]:
        return [json.loads(text) for text in self._ask("get", [self._prefix + key for key in keys])]

    def _get_ranks(self, ranks: Sequence[int]) -> list[Status]:
        return self._get(*[f"rank/{rank}" for rank in ranks])

    def _put(self, status: Status) -> None:
        self._ask("put", f"{self._prefix}rank/{self.number}", json.dumps(status))

    @property
    def _gone(self) -> set[int]:
        """Ranks whose last status says that they ended."""
        return {rank for rank, status in self.last_statuses.items() if status["gone"] is not None}

    def _read_roll(self) -> None:
        """Answer a new round if there is one."""
        number, now = self._roll["round"], time.monotonic()
        if _KEEPER not in self.last_statuses and self._has(f"rank/{_KEEPER}"):
            (self.last_statuses[_KEEPER],) = self._get_ranks([_KEEPER])  # while its store still answers
        late = now - self._read_at > 20 * _TICK  # rounds may have passed, and their keys been removed
        self._read_at = now
        if not (self._has(f"round/{number + 1}") or late):
            return
        (roll,) = self._get("roll")
        if roll == self._roll:
            return
        self._roll, self._roll_at = roll, now
        gone = roll.get("gone")
        if gone is not None and gone != self.number:
            (self.last_statuses[gone],) = self._get_ranks([gone])
        if self.number in roll.get("ranks", ()):
            self._receive(roll["report"], roll["keeps"])
        if self._round is None or roll["by"] != self.number:
            self._round = None
            self._put({"round": roll["round"], **self.status(roll["full"]), **self._seen(roll["silent"])})

    def _next_roll(self, **fields: Any) -> bool:
        """Begin a new round; returns False if another rank was faster."""
        number = self._roll["round"] + 1
        roll = {"by": self.number, "full": False, "silent": {}, **fields, "round": number}
        if time.monotonic() - self._roll_at < ANSWER:  # answers to the previous round may still be on their way
            roll["full"] |= self._roll["full"]
        if not self._ask("replace", f"{self._prefix}roll", json.dumps(self._roll), json.dumps(roll)):
            self._read_at = -math.inf  # read it: the faster rank may have ended before it announced the round
            return False
        self._roll, self._roll_at = roll, time.monotonic()
        self._ask("put", f"{self._prefix}round/{number}", "")
        if number > _KEPT:
            self._ask("remove", f"{self._prefix}round/{number - _KEPT}")
        return True

    def _say_to_all(self, **fields: Any) -> None:
        """Add these fields to the roll in a new round, retrying whenever another rank is faster."""
        while not self._next_roll(**{**self._roll, **fields}):
            (self._roll,) = self._get("roll")

    # Rounds.

    def _call_or_judge(self) -> None:
        if self._round is not None:
            self._collect(self._round)
            return
        waited = self._waited()
        since = time.monotonic() - (waited or 0.0)
        if since - self._since > 1.0:  # a new wait: looks during the previous wait do not count
            self._since, self._alike = since, 0
            self.before.clear()
            self._heard.clear()
        if waited is None or waited <= ASK_AFTER:
            return
        pause, now = self._pause(waited), time.monotonic()
        by_peer = self._roll["by"] in self.rank.peers - {self.number} and now - self._roll_at < pause + 2 * ANSWER
        if not by_peer and now - self._called > pause:
            self._call(waited >= self.rank.limits()[0] or bool(self._gone), self._silent)

    def _call(self, full: bool, silent: dict[int, int]) -> None:
        """Call the roll in a new round."""
        if self._next_roll(full=full, silent=silent):
            self._called = time.monotonic()
            self._round = Round(self._roll["round"], full, silent, self._called)
            self._answers = {self.number: {**self.status(full), **self._seen(silent)}}

    def _collect(self, turn: Round) -> None:
        """Collect answers; conclude when all have arrived, or the time is up."""
        now = time.monotonic()
        present = {rank for rank in self.rank.peers if rank in self.last_statuses or self._has(f"rank/{rank}")}
        missing = sorted(present - set(self._answers))
        for rank, status in zip(missing, self._get_ranks(missing), strict=True):
            if status["round"] != self.last_statuses.get(rank, {}).get("round"):
                self._heard[rank] = now
            self._heard.setdefault(rank, now)
            self.last_statuses[rank] = status
            if status["round"] >= turn.number or status["gone"] is not None:
                self._answers[rank] = status
        pending = present - set(self._answers)
        patience = ANSWER if pending - set(turn.silent) else 2 * _TICK if pending else 0.0
        if now - turn.begun >= patience:
            self._round = None
            self._conclude(turn)

    def _conclude(self, turn: Round) -> None:
        """Judge the answers of a round: give the verdict, or call another round."""
        limit, hard = self.rank.limits()
        lookers = {rank: by for rank, by in turn.silent.items() if rank not in self._answers and by in self._answers}
        unseen = sorted(self.rank.peers & set(self.last_statuses) - set(self._answers) - set(lookers))
        if new := {rank: by for rank in unseen[:_MOST_SILENT] if (by := self._neighbour_of(rank)) is not None}:
            self._call(turn.full, lookers | new)
            return
        self._silent = lookers
        statuses = [self._status_of(rank) for rank in sorted(self.rank.peers)]
        # Ranks finish steps together: a silent rank has finished at least as many as the others.
        least = min([status["steps"] for status in statuses if status["waited"] is not None], default=0)
        statuses = [
            s if s.get("unheard") is None or s["state"] == "absent" else {**s, "steps": least} for s in statuses
        ]
        longest = max([status["waited"] or 0.0 for status in statuses])
        if not turn.full:
            if longest >= limit or stuck(statuses, [], limit, hard):
                self._call(True, lookers)
            return
        if report := self._report_on(statuses):
            keeps = {status["rank"]: status["seen_by"] for status in statuses if "seen_by" in status}
            self._say_to_all(report=report, keeps=keeps, ranks=[status["rank"] for status in statuses])
            self._receive(report, keeps)

    def _neighbour_of(self, rank: int) -> int | None:
        """The lowest rank on the same machine that has answered and is alive."""
        machine = self.last_statuses[rank]["machine"]
        neighbours = [peer for peer, s in self._answers.items() if s["machine"] == machine and s["gone"] is None]
        return min(neighbours, default=None)

    def _status_of(self, rank: int) -> Status:
        """The best status of a rank: its own answer, a neighbour's observation, or that of a silent rank."""
        last, now = self.last_statuses.get(rank), time.monotonic()
        if rank in self._answers:
            return self._answers[rank]
        if last is not None and last["gone"] is None:
            for peer, status in self._answers.items():
                if (seen := status["seen"].get(str(rank))) is not None:
                    if seen["gone"] is not None and not self.is_alone:  # it may have put a last status since
                        (last,) = self._get_ranks([rank])
                    return last if last["gone"] is not None else {**unheard(rank, last), **seen, "seen_by": peer}
        if last is not None and last["gone"] is not None:
            return last
        return unheard(rank, last, now - self._heard.get(rank, now))

    def _judge_alone(self) -> None:
        """Judge without the store, by the status of its keeper and of ranks that ended before."""
        self._called = time.monotonic()
        statuses = [self.status(True)]
        for rank in sorted({_KEEPER, *self._gone} & self.rank.peers - {self.number}):
            statuses.append(self._status_without_store(rank))
        # Whether a live rank waits too is unknown.
        certain = statuses[0]["broken"] or any([s["gone"] is not None or s["state"] == "T" for s in statuses])
        if certain and (report := self._report_on(statuses)):
            self._receive(report, {})

    def _status_without_store(self, rank: int) -> Status:
        last = self.last_statuses.get(rank)
        if last is not None and last["gone"] is not None:
            return last
        if last is not None and last["machine"] == process.machine():
            return {**unheard(rank, last), **process.look_at(last)}
        return unheard(rank, last or {}, time.monotonic() - self._answered_store)

    def word_on_keeper(self) -> str:
        """The activity of the rank that may keep the store, if it is on this machine; else empty."""
        status = self._status_without_store(_KEEPER)
        return "" if status["state"] in ("absent", "unreachable") else f"rank {_KEEPER} {messages.line_of(status)}"

    def _report_on(self, statuses: list[Status]) -> str:
        """The report, also written to the folder, if this look and the previous ones give a verdict; else empty."""
        limit, hard = self.rank.limits()
        is_stuck = stuck(statuses, self.before, limit, hard)
        self.before, self._alike = statuses, self._alike + 1 if is_stuck else 0
        if is_stuck and self.rank.settings.limit is None and may_sleep(statuses, hard):
            if self._warned < self._since:
                self._warned = time.monotonic()
                sys.stderr.write(messages.waits_long(statuses, hard))
            return ""
        if not is_stuck or not (self._alike >= _LOOKS or sure(statuses)):
            return ""
        report = messages.report(statuses)
        if self.rank.settings.folder is not None:
            self._write(Path(self.rank.settings.folder), report, statuses)
        return report

    def _write(self, folder: Path, report: str, statuses: Sequence[Status]) -> None:
        """Write the report to a file, whole or not at all."""
        text = json.dumps({"format": FORMAT, "time": time.time(), "report": report, "ranks": statuses}, indent=1)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            partial = folder / f".{os.getpid()}.partial"
            partial.write_text(text, encoding="utf-8")
            partial.replace(folder / f"stuck-{time.strftime('%Y%m%d-%H%M%S')}-rank{self.number}.json")
        except OSError as error:
            sys.stderr.write(messages.not_written(folder, error))

    def _receive(self, report: str, keeps: dict[Any, int]) -> None:
        """Accept a report that goes to all ranks; neighbours terminate the ranks that cannot receive it.

        Args:
            report: the report.
            keeps: silent rank -> the neighbour that terminates it.
        """
        if self.rank.verdict is None:
            self._condemned |= {int(rank): time.monotonic() for rank, keeper in keeps.items() if keeper == self.number}
            self._condemned[self.number] = time.monotonic()
            self.rank.condemn(report)

    # Ends.

    def _end_if_deaf(self) -> None:
        """Terminate ranks that do not raise the verdict, except stopped ones, which may be in a debugger."""
        for rank, since in list(self._condemned.items()):
            if rank == self.number:
                pid, is_over = os.getpid(), self.rank.leaves
            else:
                status = self.last_statuses[rank]
                pid = status["pid"]
                is_over = not process.lives(status) or process.state(pid) == "T"
            if is_over:
                del self._condemned[rank]
                continue
            grace = self.rank.settings.grace
            late = time.monotonic() - since - grace
            if late <= 0:
                continue
            self._print_once(rank, messages.ended_by_watcher(rank, grace, self.rank.verdict or ""))
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if late > 5.0 else signal.SIGTERM)

    def _print_once(self, key: object, text: str) -> None:
        if key not in self._printed:
            self._printed.add(key)
            sys.stderr.write(text)
            sys.stderr.flush()

    def _last_word(self) -> None:
        """Publish the rank's last status: that it ended, and the error it raised."""
        status = self.status(True)
        status["gone"] = "exit code 1" if status["raised"] is not None else "it ended by itself"
        self._put({"round": self._roll["round"], **status})
        if self.number == _KEEPER or (status["raised"] is not None and "DivergenceError" not in status["raised"]):
            self._say_to_all(gone=self.number)  # at once; the ends of other ranks are read by those that wait
        if self.number == _KEEPER:
            self._linger(self._roll["round"])

    def _linger(self, number: int) -> None:
        """Wait until all others have seen this round, or have ended."""
        deadline = time.monotonic() + _LINGER - 0.5
        pending = [rank for rank in range(self.world) if rank != self.number and self._has(f"rank/{rank}")]
        while pending and time.monotonic() < deadline:
            time.sleep(_SOON / 2)
            answers = zip(pending, self._get_ranks(pending), strict=True)
            pending = [rank for rank, status in answers if status["round"] < number and status["gone"] is None]

    # What this rank is doing.

    def _standing(self) -> Silence | None:
        """The rank's position since its last event; None if it has not been sampled since."""
        silence = self._silence
        return silence if silence is not None and silence.issued == self.rank.log[-1] else None

    def _waiting(self) -> Wait | None:
        """The host's oldest wait; without one, the device's wait if the host stands still in a pass."""
        silence = self._standing()
        if self.rank.waits[:1] or silence is None or silence.call is None:
            return next(iter(self.rank.waits), None)
        in_pass = self.rank.idle and silence.call.in_pass
        return Wait(silence.issued, silence.since, self._home) if in_pass else None

    def _in_own_collective(self) -> float | None:
        """Seconds for which the rank has been in a collective of the program's own; None if it is not."""
        silence = self._standing()
        return time.monotonic() - silence.since if silence is not None and silence.call and silence.call.waits else None

    def _waited(self) -> float | None:
        """Seconds for which the rank has waited for other ranks in any way; None if it does not wait."""
        waiting, in_own = self._waiting(), self._in_own_collective()
        if waiting is not None:
            return time.monotonic() - waiting.since
        if self._gone and (silent := self._silent_for()) is not None:
            return silent
        # Within the limit the program's own collectives report their failures themselves.
        return in_own if in_own is not None and in_own > self.rank.limits()[0] else None

    def _silent_for(self) -> float | None:
        """Seconds for which a rank whose device waits has been at the same position; None if it has not."""
        silence = self._standing()
        return time.monotonic() - silence.since if silence is not None and self.rank.idle else None

    def _pause(self, waited: float) -> float:
        """Seconds between two rounds."""
        limit = self.rank.limits()[0]
        if any([wait.broken for wait in self.rank.waits]):
            return 0.5
        return max(0.5, limit / 5) if waited > limit else min(5.0, max(1.0, limit / 5))

    def _look_into_silence(self) -> None:
        """Sample the rank's position if it issues nothing."""
        now = time.monotonic()
        if self.rank.waits:
            self._silence = None
        elif now - max(self._looked, self._moved) > self._pause(0.0):
            previous, frames, issued = self._silence, self._frames(), self.rank.log[-1]
            self._looked = now
            if previous is None or previous.issued != issued or previous.frames != frames:
                self._silence = Silence(frames, process.call_of(frames), now, issued)

    def _frames(self) -> list[Frame]:
        """The Python stack of the waiting thread, or else of the thread that built the first unit."""
        waits = self.rank.waits[:1]
        return process.frames_at(waits[0].thread if waits else self._home)

    def status(self, full: bool) -> Status:
        """This rank's status, as a dict that JSON can hold.

        Args:
            full: whether to include records and stacks.
        """
        rank, pid, states, samples = self.rank, os.getpid(), [], []
        for _ in range(_SAMPLES if full else 0):
            states.append(process.state(self._task))
            samples.append(self._frames())
            time.sleep(0.05)
        waiting, records = self._waiting(), records_of(rank.log, rank.steps)
        waits_for = next((record for record in records if waiting is not None and record.word == waiting.word), None)
        last, activity = records[-1] if records else None, process.activity(self._task, states, samples)
        now, clock = time.time(), time.monotonic()  # the former is only printed: it may jump
        return {
            "rank": self.number,
            "host": socket.gethostname(),
            "machine": process.machine(),
            "pid": pid,
            "start": process.started(pid),
            "stacks": self._stacks.fileno(),
            "time": now,
            "clock": clock,
            "gone": None,
            "raised": rank.raised[1] if rank.raised is not None and rank.raised[0] == rank.log[-1] else None,
            "caught": self._caught(records),
            "idle": rank.idle,
            "waited": clock - waiting.since if waiting is not None else None,
            "waits_for": self._named(waits_for) if waits_for is not None else None,
            "broken": waiting is not None and waiting.broken,
            "last": {**self._named(last), "time": now - (clock - self._moved)} if last is not None else None,
            "count": rank.log[-1],
            "steps": rank.steps,
            "ticks": int(clock / SLICE) if rank.reading else 0,
            "cpu": process.cpu_seconds(pid) - time.thread_time(),
            "children": process.children_seconds(pid),
            "io": process.moved_bytes_of_others(),
            "records": [self._named(record) for record in records[-_RECORDS:]] if full else [],
            "silent": self._silent_for(),
            "own": self._in_own_collective() if waiting is None and (activity["call"] or {}).get("waits") else None,
            "seen": {},
            **activity,
        }

    def _caught(self, records: Sequence[Record]) -> str | None:
        """The error that a pass raised and the program caught, until roots have finished two steps since; else None."""
        at, text = self.rank.caught or (0, "")
        since = [*itertools.dropwhile(lambda record: record.word != at, records)]
        first = {record.unit // ROOT: record.step for record in reversed(since)}
        last = {record.unit // ROOT: record.step for record in since}
        finished = sum(last.values()) - sum(first.values()) + max(len(last) - 2, 0)  # or models of one step each
        return text if since[1:] and finished <= 1 else None

    def _named(self, record: Record) -> dict[str, Any]:
        return record.named(self.rank.names, self.rank.nbytes)

    # What neighbours are doing.

    def _seen(self, silent: dict[Any, int]) -> dict[str, Any]:
        """This rank's observations of the silent ranks assigned to it, as a part of its status."""
        seen = {}
        for rank in [int(rank) for rank, looker in silent.items() if looker == self.number]:
            if rank not in self.last_statuses:
                (self.last_statuses[rank],) = self._get_ranks([rank])
            seen[str(rank)] = process.look_at(self.last_statuses[rank])
        return {"seen": seen}


def start(rank: Rank, number: int, world: int, timeout: float, connect: Callable[[], Any]) -> None:
    """Start to watch this process, by the current default process group.

    Args:
        rank: the process.
        number, world: its rank in that group, and the group's size.
        timeout: the process groups' timeout, seconds.
        connect: opens a separate connection to the group's store (`StoreLine`).
    """
    if rank.watcher is not None:
        rank.watcher.end(announce=False)
        rank.watcher = None
    rank.begin(timeout)
    if not rank.settings.enabled:
        return
    try:
        rank.watcher = Watcher(rank, number, world, connect)
    except (StoreGone, OSError, RuntimeError, ValueError, MemoryError, NotImplementedError) as error:
        warnings.warn(messages.no_watcher(error.__cause__ or error), stacklevel=2)
        return
    if not rank.records_its_end:
        rank.records_its_end = True
        note_at_the_end(rank)
        # Runs before the interpreter ends; `atexit` hooks do not run in the processes that `multiprocessing` makes.
        multiprocessing.util.Finalize(None, _end, (rank,), exitpriority=100)


def _end(rank: Rank) -> None:
    if rank.watcher is not None:
        rank.watcher.end()
