"""The watcher: a small process beside each rank, which lives on when the rank is stuck, stopped or dead.

It does nothing while its rank gets on. When the rank has waited for a second it asks the first reachable watcher, by
rank, whether anybody is gone; when the rank has waited for the limit, that one (the judge) asks all others what their
ranks do, and tells all of them what it found. A rank that issues nothing for a while is asked for its stack now and
then: it may wait in a collective of the program's own, or for a device within a pass. A watcher that is told that the
ranks are stuck gives its rank the verdict, which the rank raises at its next wait or collective; a rank that does not
within `grace` (it waits in code of somebody else) is ended.

Watchers talk by JSON lines over TCP, a connection per question, with a secret that ranks exchanged. Only the standard
library is loaded, and nothing else of this package.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from . import proc
from .board import COMPARE, Board, Record
from .calls import Call, Frame, call_of, frames_of, readable
from .report import Status, stuck, sure, told, words
from .talk import ANSWER, MOST, Peer, ask, exchange, say, unreachable

ASK_AFTER = 1.0  # seconds of a wait before the first question
_TICK = 0.2
_NEWS = 3  # watchers, by rank, that are told of an end
_LOOKS = 2  # more than one at which nobody got on, unless somebody is gone for good
_SAMPLES = 4  # of a rank's stack, in a look
_TOLD = 256  # of a rank's records, in a look
_LINGER = 20.0  # seconds for which a watcher answers after its rank's end


@dataclass(frozen=True)
class Options:
    """What a rank tells its watcher when it starts it.

    Attributes:
        board, stacks, listener: descriptors: of the shared memory, of the file that the rank writes its stacks to when
            it gets `signal`, of the socket to answer at.
        pid, rank: the rank's.
        secret: by which others may ask.
        limit, hard: seconds of a wait before ranks are compared, and before they are told in any case.
        grace: seconds that a rank has to raise what was found.
        folder: for reports; None: none are written.
        idle: whether the device waits for collectives, and not the host: a rank that issues nothing within a pass may
            wait.
    """

    board: int
    stacks: int
    listener: int
    signal: int
    pid: int
    rank: int
    secret: str
    limit: float
    hard: float
    grace: float
    folder: str | None = None
    idle: bool = False


class Silence(NamedTuple):
    """A rank that issues nothing, and does not wait for a collective of ours.

    Attributes:
        frames: its stack.
        call: read from that.
        since: when this stack was first seen, without another one or new records since; seconds since the epoch.
        issued: how many records there were.
    """

    frames: list[Frame]
    call: Call | None
    since: float
    issued: int


class Watcher:
    """See the module's docstring.

    Attributes:
        names: of units, by the number of their root.
        nbytes: that units gather or reduce, by the number of their root.
        peers: the ranks' watchers, this one too, by rank.
        gone: how the rank ended.
        news: the last statuses of ranks that ended.
        before: all ranks' statuses at the last look.
        report: what was found.
    """

    def __init__(self, options: Options) -> None:
        self.options, self.board = options, Board(options.board)
        self.names: dict[int, list[str]] = {}
        self.nbytes: dict[int, list[int]] = {}
        self.peers: list[Peer] = []
        self.gone: str | None = None
        self.news: dict[int, Status] = {}
        self.before: list[Status] = []
        self.report: str | None = None
        self._look = asyncio.Lock()
        self._condemned = 0.0  # when
        self._said = False
        self._alike = 0  # looks in a row at which nothing moved
        self._partial = b""  # of a line that the rank writes
        self._silence: Silence | None = None
        self._woken = 0  # how often the rank woke because it was asked for its stack
        self._sampling = asyncio.Lock()  # one signal at a time

    async def run(self) -> None:
        """Until the rank has ended, and for a while after."""
        server = await asyncio.start_server(self._serve, sock=socket.socket(fileno=self.options.listener), limit=MOST)
        loop = asyncio.get_running_loop()
        control = os.fdopen(0, "rb", buffering=0)
        os.set_blocking(0, False)
        loop.add_reader(0, self._obey, control)
        ended = asyncio.Event()
        pidfd = None
        with contextlib.suppress(ProcessLookupError, AttributeError):  # it has ended already; not on this system
            pidfd = os.pidfd_open(self.options.pid)
        if pidfd is not None:
            loop.add_reader(pidfd, self._ended, pidfd, ended)
        async with server:
            asked = looked = 0.0
            while not ended.is_set():
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(ended.wait(), _TICK)
                self.board.look()
                if pidfd is None and os.getppid() != self.options.pid:
                    self._ended(None, ended)
                now = time.time()
                if self.gone is None and not self.board.condemned():
                    if self.board.waiting is not None:
                        self._silence = None
                    elif now - max(looked, self.board.moved) > self._pause(0.0) and len(self.peers) > 1:
                        await self._look_into_silence()
                        looked = time.time()
                    waited = self._waited()
                    if waited is not None and waited > ASK_AFTER and now - asked > self._pause(waited):
                        asked = now
                        try:
                            await self._ask()
                        except Exception:  # a fault of ours: said, and the rank is watched on
                            traceback.print_exc()
                self._end_if_deaf()
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # whoever reads the rank's output waits for its end
            await self._tell()
            await asyncio.sleep(_LINGER)

    def _pause(self, waited: float) -> float:
        """Seconds between two questions: rarely, while a wait is short of the limit."""
        return (
            max(0.5, self.options.limit / 5)
            if waited > self.options.limit
            else min(5.0, max(1.0, self.options.limit / 5))
        )

    # The rank.

    def _waiting(self) -> tuple[int, float] | None:
        """What of ours the rank waits for, by number, and since when; on a device, where its stack stands in a pass."""
        waiting, silence = self.board.waiting, self._silence
        if waiting is not None or not self.options.idle or silence is None or silence.call is None:
            return waiting
        stands = silence.call.in_pass and silence.issued == self.board.count
        return (silence.issued, silence.since) if stands else None

    def _in_own_collective(self) -> float | None:
        """Seconds for which the rank has stood in a collective of the program's own; None if it does not."""
        silence = self._silence
        if silence is None or silence.call is None or not silence.call.waits or silence.issued != self.board.count:
            return None
        return time.time() - silence.since

    def _waited(self) -> float | None:
        """Seconds for which the rank has waited for anything that other ranks have to do."""
        waiting, own = self._waiting(), self._in_own_collective()
        if waiting is not None:
            return time.time() - waiting[1]
        if self.news and (silent := self._silent()) is not None:
            return silent
        return own if own is not None and own > self.options.limit else None  # what fails before says so itself

    def _silent(self) -> float | None:
        """Seconds for which a rank whose device waits has stood at one place; None if it does not."""
        silence = self._silence
        stands = self.options.idle and silence is not None and silence.issued == self.board.count
        return time.time() - silence.since if stands and silence is not None else None

    async def _look_into_silence(self) -> None:
        """See where a rank stands that issues nothing."""
        count, before = self.board.count, self._silence
        frames = await self._sample()
        if self.board.waiting is not None or self.board.count != count or not frames:
            self._silence = None
        elif before is None or before.issued != count or before.frames != frames:
            self._silence = Silence(frames, call_of(frames), time.time(), count)

    def _obey(self, control: Any) -> None:
        """Lines of JSON from the rank: names of units, and peers."""
        data = control.read(1 << 20)
        if not data:
            asyncio.get_running_loop().remove_reader(0)
            return
        self._partial += data
        *lines, self._partial = self._partial.split(b"\n")
        for line in lines:
            order = json.loads(line)
            self.names |= {int(root): names for root, names in order.get("names", {}).items()}
            self.nbytes |= {int(root): nbytes for root, nbytes in order.get("bytes", {}).items()}
            if "forget" in order:
                self.report, self.peers, self.before = None, [], []
                self.news.clear()
            if "peers" in order:
                known = {peer[0] for peer in order["peers"]}
                self.peers = sorted([tuple(p) for p in order["peers"]] + [p for p in self.peers if p[0] not in known])
            self.options = replace(self.options, **order.get("options", {}))

    def _ended(self, pidfd: int | None, ended: asyncio.Event) -> None:
        how = proc.ending(self.options.pid)  # first of all: somebody else is about to wait for it
        if pidfd is not None:
            asyncio.get_running_loop().remove_reader(pidfd)
        if how is None:
            how = "it ended by itself" if self.board.ended else "killed, or ended by os._exit"
        elif how == "exit code 0":
            how = "it ended by itself (exit code 0)" if self.board.ended else "os._exit(0)"
        self.gone = how
        ended.set()

    def _end_if_deaf(self) -> None:
        """End a rank that does not raise the verdict; not one that is stopped, which somebody may be looking at."""
        if self.gone is not None or not self.board.condemned() or self.board.leaves:
            self._condemned = 0.0
            return
        now = time.time()
        self._condemned = self._condemned or now
        if now - self._condemned > self.options.grace and proc.state(self.options.pid) != "T":
            late = now - self._condemned > self.options.grace + 5
            if not self._said:
                self._said = True
                text = self.board.verdict or ""
                sys.stderr.write(
                    f"fullshard: rank {self.options.rank} has not raised this within {self.options.grace:.0f} s (it is "
                    f"in code that is not the engine's), and is ended:\n{text}\n"
                )
                sys.stderr.flush()
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.options.pid, signal.SIGKILL if late else signal.SIGTERM)

    async def status(self, full: bool = True) -> Status:
        """What the rank does."""
        alive = self.gone is None
        samples, runs = [], alive and full
        for _ in range(_SAMPLES if alive and full else 0):
            runs = runs and proc.state(self.options.pid) == "R"
            samples.append(await self._sample())
        frames = samples[-1] if samples else []
        self.board.look()
        waiting, records = self._waiting(), self.board.records()
        by_number = {record.number: record for record in records}
        waits_for = by_number.get(waiting[0]) if waiting else None
        call = call_of(frames)
        own = self._in_own_collective() if waiting is None else None
        return {
            "rank": self.options.rank,
            "host": socket.gethostname(),
            "pid": self.options.pid,
            "time": time.time(),
            "gone": self.gone or ("it ended by itself" if self.board.ended else None),
            "state": proc.state(self.options.pid) if alive else "gone",
            "raised": self.board.raised,
            "caught": self._caught(records),
            "idle": self.options.idle,
            "waited": time.time() - waiting[1] if waiting and alive else None,
            "waits_for": self._told(waits_for) if waits_for else None,
            "last": {**self._told(records[-1]), "time": self.board.moved} if records else None,
            "count": self.board.count,
            "steps": self.board.steps,
            "ticks": self.board.ticks,
            "cpu": proc.cpu_seconds(self.options.pid) if alive else 0.0,
            "children": proc.children_seconds(self.options.pid) if alive else 0.0,
            "io": self._moved_bytes() if alive else 0,
            "records": [self._told(record) for record in records[-_TOLD:]] if full else [],
            "stack": readable(frames),
            "samples": ["\n".join(map(str, each)) for each in samples],
            "call": call._asdict() if call is not None else None,
            "silent": self._silent() if alive else None,
            "own": own if call is not None and call.waits else None,
            "runs": runs,
            "wakes": proc.wakes(self.options.pid) - self._woken if alive else 0,
        }

    def _caught(self, records: Sequence[Record]) -> str | None:
        """What a pass of this step or the last raised, and the program caught."""
        found = self.board.caught
        steps = [record.step for record in records if found is not None and record.number == found[0]]
        return found[1] if found is not None and steps and records[-1].step - steps[0] <= 1 else None

    def _moved_bytes(self) -> int:
        """Bytes that the rank has read and written of its own accord: the stacks that it was asked for left out."""
        return proc.moved_bytes(self.options.pid) - os.fstat(self.options.stacks).st_size

    def _told(self, record: Record) -> dict[str, Any]:
        return told(record, self.names, self.nbytes)

    async def _sample(self) -> list[Frame]:
        """The rank's Python stack: `faulthandler` writes it when a signal arrives, whoever holds the GIL."""
        options = self.options
        async with self._sampling:
            if proc.state(options.pid) == "T" or not proc.catches(options.pid, options.signal):
                return []  # it would end a process that is past its own end, or runs another program now
            before, awoke = os.fstat(options.stacks).st_size, proc.wakes(options.pid)
            try:
                os.kill(options.pid, options.signal)
            except ProcessLookupError:
                return []
            size, deadline = before, time.monotonic() + 0.5
            while time.monotonic() < deadline:
                await asyncio.sleep(0.01)
                grown = os.fstat(options.stacks).st_size
                if grown == size and grown > before:
                    break
                size = grown
            self._woken += min(2, proc.wakes(options.pid) - awoke)
            await asyncio.sleep(0.05)  # between this sample and the next
            return frames_of(os.pread(options.stacks, 1 << 16, before).decode(errors="replace"))

    # Other watchers.

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one question."""
        question = None
        with contextlib.suppress(OSError, ValueError, asyncio.TimeoutError):  # of whoever asks: gone, or not one of us
            question = json.loads(await asyncio.wait_for(reader.readline(), ANSWER))
        try:
            if isinstance(question, dict) and question.get("secret") == self.options.secret:
                await self._answer(question, reader, writer)
        except (TimeoutError, OSError, json.JSONDecodeError):  # the one who asked is gone
            pass
        except Exception:
            traceback.print_exc()  # a fault of ours, which must not be taken for silence
        writer.close()

    async def _answer(
        self, question: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        kind = question["kind"]
        if kind == "ended":
            self.news[question["status"]["rank"]] = question["status"]
        elif kind == "judge":
            await say(writer, {"report": await self._judge(question["waited"], question["compares"])})
        elif kind == "status":
            await say(writer, await self.status(question["full"]))
            verdict = json.loads(await asyncio.wait_for(reader.readline(), 4 * ANSWER))
            if verdict["report"]:
                self._receive(verdict["report"])

    async def _ask(self) -> None:
        """Ask the first watcher that answers whether the ranks are stuck; that may be this one."""
        waited = self._waited()
        if waited is None:
            return
        last = self.board.last
        compares = last is not None and last.verb == COMPARE
        for peer in self.peers:
            if peer[0] == self.options.rank:
                report = await self._judge(waited, compares)
            else:
                answer = await exchange(peer, {"kind": "judge", "waited": waited, "compares": compares}, 8 * ANSWER)
                if answer is None:
                    continue
                report = answer["report"]
            if report:
                self._receive(report)
            return

    async def _judge(self, waited: float, compares: bool) -> str | None:
        """Find out whether the ranks are stuck; returns the report if they are. All ranks are told.

        Args:
            waited: how long the rank that asks has.
            compares: whether it has left the order that ranks share.
        """
        async with self._look:
            if self.report is not None:
                return self.report
            over = waited >= self.options.limit or bool(self.news) or self.gone is not None
            if not over and not compares:
                return None
            report, statuses = await self._look_around(over)
            if report is None and not over and stuck(statuses, [], self.options.limit, self.options.hard):
                report, statuses = await self._look_around(True)  # with all that is to be told
            if report is not None:
                self._keep(report, statuses)
                self._receive(report)
            return report

    async def _look_around(self, full: bool) -> tuple[str | None, list[Status]]:
        """Ask all ranks what they do. Returns a report if they are stuck, of which all are told, and their statuses.

        Args:
            full: ask for records and stacks, too; without these nothing is reported.
        """
        others = [peer for peer in self.peers if peer[0] != self.options.rank]
        question = {"kind": "status", "full": full}
        own, *talks = await asyncio.gather(self.status(full), *[ask(peer, question) for peer in others])
        statuses = [own]
        for peer, (found, _) in zip(others, talks, strict=True):
            statuses.append(found or self.news.get(peer[0]) or unreachable(peer))
        report = None
        if full:
            is_stuck = stuck(statuses, self.before, self.options.limit, self.options.hard)
            self.before, self._alike = statuses, self._alike + 1 if is_stuck else 0
            if is_stuck and (self._alike >= _LOOKS or sure(statuses)):
                report = words(statuses)
        for _, writer in talks:
            if writer is not None:
                with contextlib.suppress(OSError):
                    await say(writer, {"report": report})
                writer.close()
        return report, statuses

    def _receive(self, report: str) -> None:
        if self.report is None:
            self.report = report
            if self.gone is None:
                self.board.condemn(report)

    def _keep(self, report: str, statuses: Sequence[Status]) -> None:
        """Write the report down, whole or not at all."""
        if self.options.folder is None:
            return
        folder = Path(self.options.folder)
        text = json.dumps({"format": 1, "time": time.time(), "report": report, "ranks": statuses}, indent=1)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            beside = folder / f".{os.getpid()}.partial"
            beside.write_text(text, encoding="utf-8")
            beside.replace(folder / f"stuck-{time.strftime('%Y%m%d-%H%M%S')}-rank{self.options.rank}.json")
        except OSError as error:
            sys.stderr.write(f"fullshard: the report could not be written to {folder}: {error}\n")

    async def _tell(self) -> None:
        """Tell the first watchers that this rank has ended, and how."""
        status = await self.status()
        self.news[self.options.rank] = status
        first = [peer for peer in self.peers if peer[0] != self.options.rank][:_NEWS]
        await asyncio.gather(*[exchange(peer, {"kind": "ended", "status": status}, 0.0) for peer in first])


def main() -> None:
    """Run the watcher of which the first line of stdin tells (a command line could be read by other users)."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # meant for the rank; the watcher ends after it
    line = b""
    while not line.endswith(b"\n"):
        read = os.read(0, 1)  # no more than the line: the rest is for `_obey`
        if not read:
            return
        line += read
    asyncio.run(Watcher(Options(**json.loads(line))).run())
