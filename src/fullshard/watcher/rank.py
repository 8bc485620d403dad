"""A rank's side of its watcher: starts it, tells it what the rank does, and raises what it finds.

Everything is of the process, not of a model: a process has one board and one watcher, whatever it trains.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import math
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import IO, Any

from ..errors import ConfigError, DivergenceError, FullshardError, message
from .board import AGREEMENT, MOST_ROOTS, ROOT, Board, word
from .calls import Frame

_SIGNAL = signal.SIGRTMAX - 3 if hasattr(signal, "SIGRTMAX") else signal.SIGUSR2
"""By which a watcher asks its rank for its Python stacks; one that programs do not use."""
_BOOT = (
    "import sys, types; p = types.ModuleType('fullshard_watcher'); p.__path__ = [sys.argv.pop(1)]; "
    "sys.modules[p.__name__] = p; from fullshard_watcher.process import main; main()"
)
TALKS = (
    *("texts", "the same model", "the first pass", "shared order", "counts of tokens", "starting states", "batches"),
    *("values of all ranks", "whole values", "a checkpoint", "optimizers' state", "verification"),
)
"""What ranks may exchange that is no unit's."""
SLICE = 0.25
"""Seconds after which a wait for a collective looks up."""
_SLICE = timedelta(seconds=SLICE)


Address = tuple[str, str, int, str]
"""Where a rank's watcher listens: host name, address, port; and the secret by which it answers."""


@dataclass(frozen=True)
class WatchSettings:
    """What users set by `watch`.

    Attributes:
        enabled: whether there is a watcher.
        limit: seconds that a rank waits before ranks are compared; None: a third of the group's timeout, 300 at most.
        grace: seconds within which a rank has to raise what was found, before its process is ended.
        folder: where reports are written; None: nowhere.
    """

    enabled: bool = True
    limit: float | None = None
    grace: float = 15.0
    folder: str | None = None


class Rank:
    """This process, as its watcher sees it. See the module's docstring.

    Attributes:
        board: shared with the watcher.
        settings: see there.
        record: notes what is issued now; raises what the watcher found, if it did.
    """

    def __init__(self) -> None:
        self.board = Board(condemned=self.raise_verdict)
        self.record = self.board.record
        self.settings = WatchSettings()
        self.timeout = 1800.0  # of the process groups
        self._process: subprocess.Popen[bytes] | None = None
        self._sending = threading.Lock()
        self._unsent = b""  # of orders to the watcher, which has not read for a while
        self._stacks: IO[bytes] | None = None
        self._last_root = 0
        self._roots: set[int] = set()  # numbers in use
        self._searching: threading.Event | None = None  # set: stop looking for the other ranks' watchers
        self._has_met = False  # whether the ranks have exchanged addresses, at a first forward
        self.address: Address | None = None
        self.known: dict[int, Address] = {}  # by rank: where watchers listen, this one's too
        self.break_off: Callable[[], None] = lambda: None  # ends what is in flight; set by `comm`
        self.find_others: Callable[[], list[tuple[int, Address | None]]] = list

    # What the rank does.

    def talks(self, what: str) -> None:
        """The ranks exchange something that is no unit's; `what` is one of `TALKS`."""
        self.record(word(AGREEMENT, TALKS.index(what)))

    @contextlib.contextmanager
    def files(self) -> Iterator[None]:
        """Within this the rank reads or writes files, which may take as long as it will: on a slow disk nothing moves.

        Only a wait of 0.8 of the process group's timeout ends it; and what ends or stops this process.
        """
        if self._process is None:
            yield
            return
        over = threading.Event()

        def tick() -> None:
            while not over.wait(SLICE):
                self.board.tick()

        ticking = _started(tick, "fullshard-files")
        try:
            yield
        finally:
            over.set()
            if ticking is not None:
                ticking.join()

    def new_root(self, root: object, names: list[str], nbytes: list[int]) -> int:
        """A root, its units' names and the bytes they gather; returns what to add to an index in records.

        Args:
            root: its number is free again when this is gone.
        """
        count = MOST_ROOTS - 1  # 0 is of no root
        numbers = ((self._last_root + each) % count + 1 for each in range(count))  # as late as can be again
        number = next((each for each in numbers if each not in self._roots), count)
        self._last_root = number
        self._roots.add(number)
        weakref.finalize(root, self._roots.discard, number).atexit = False
        self._send({"names": {number: names}, "bytes": {number: nbytes}})
        return number * ROOT

    def note(self, error: BaseException) -> None:
        """The rank raises this."""
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__, limit=-12))
        self.board.note(text)

    def catches(self, error: BaseException) -> None:
        """A pass raised this. If the program goes on, other ranks wait for the rest of the pass, and are told why."""
        if not isinstance(error, Exception) or isinstance(error, FullshardError):
            return
        frames = [
            Frame(frame.f_code.co_filename, str(line), frame.f_code.co_name)
            for frame, line in traceback.walk_tb(error.__traceback__)
        ]
        at = next((f" ({os.path.basename(each.path)}:{each.line})" for each in frames[::-1] if each.is_users), "")
        text = str(error).strip().partition("\n")[0][:200]
        self.board.note(f"{type(error).__name__}{': ' if text else ''}{text}{at}", over=True)

    # Waits.

    def wait(self, work: Any, label: int) -> None:
        """Go on waiting for a collective that did not arrive within a slice.

        Raises:
            DivergenceError: the watcher found that it never will.
            RuntimeError: it failed.
        """
        if not work.is_completed():
            self.board.waits(label)
            if not self._has_met:
                self._tell_peers(self.find_others())
            try:
                while not work.is_completed():
                    if self.board.condemned():
                        self.raise_verdict()
                    # That the slice is over tells nothing: the collective may have ended since.
                    with contextlib.suppress(RuntimeError):
                        work.wait(_SLICE)
            finally:
                self.board.waits_no_more()
        work.wait()  # has ended: raises if it failed

    def explain(self, error: BaseException) -> BaseException:
        """Why a collective failed: what the watcher says if it says something soon, else `error`."""
        if self._process is None:
            return error
        if not self._has_met:
            others = self.find_others()
            absent = [str(rank) for rank, address in others if address is None]
            if absent:
                self.leave()
                return DivergenceError(
                    f"a connection to another rank broke before the first forward ({error}).",
                    got=f"no unit on rank {', '.join(absent)}, which ended or raised before it made one",
                    remedy="look at what that rank printed",
                    code="D014",
                )
            self._tell_peers(others)
        self.board.waits(self.board.number)
        try:
            deadline = time.monotonic() + 10.0
            while time.monotonic() < deadline:
                if self.board.condemned():
                    return self._verdict()
                time.sleep(0.05)
        finally:
            self.board.waits_no_more()
        self.leave()
        return DivergenceError(
            f"a connection to another rank broke ({error}).",
            got="no word from that rank's watcher, nor from others, on why",
            remedy="look at what the other ranks printed",
            code="D015",
        )

    def leave(self) -> None:
        """The rank cannot go on, and knows why."""
        self.board.leave()
        self.break_off()

    def raise_verdict(self) -> None:
        """Raise what the watcher found."""
        raise self._verdict()

    def _verdict(self) -> DivergenceError:
        self.leave()
        report = self.board.verdict or ""
        return DivergenceError(
            report,
            remedy="let every rank make the same calls in the same order; with unequal numbers of batches, train in "
            "fullshard.join(model, loader); end all ranks when one fails; the time allowed is set by "
            "fullshard.watch(limit=...)",
            code="D016",
        )

    # The watcher.

    def start(self, rank: int, timeout: float) -> Address | None:
        """Start the watcher, once; returns its address for the other ranks, or None if there is none."""
        self.timeout = timeout
        if not self.settings.enabled or not sys.executable:
            return None
        if self.address is None:
            self.address = self._launch(rank)
            self.known = {} if self.address is None else {rank: self.address}
        return self.address

    def _launch(self, rank: int) -> Address | None:
        try:
            return self._launched(rank)
        except (OSError, RuntimeError, ValueError, MemoryError) as error:  # short of descriptors, processes or memory
            warnings.warn(
                message(f"no watcher could be started ({error}): hangs will not be explained", code="W015"),
                stacklevel=2,
            )
            self._process = None
            return None

    def _launched(self, rank: int) -> Address:
        if self.board.fd < 0:
            raise OSError("no file descriptor was left when Fullshard was imported")
        listener = socket.create_server(("", 0), backlog=256)
        self._stacks = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process
        faulthandler.register(_SIGNAL, file=self._stacks, all_threads=True, chain=False)
        secret = secrets.token_hex(16)
        options = {
            "board": self.board.fd,
            "pid": os.getpid(),
            "rank": rank,
            "secret": secret,
            "stacks": self._stacks.fileno(),
            "signal": int(_SIGNAL),
            "listener": listener.fileno(),
            **self._limits(),
        }
        command = [sys.executable, "-I", "-S", "-c", _BOOT, os.path.dirname(__file__)]
        with listener:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=(self.board.fd, self._stacks.fileno(), listener.fileno()),
                start_new_session=True,
                cwd="/",
            )
            port = listener.getsockname()[1]
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        self._send(options)
        atexit.register(self.board.end)
        _excepthook_notes(self)
        self._send({"names": {0: list(TALKS)}})
        return socket.gethostname(), _own_address(), port, secret

    def _limits(self) -> dict[str, Any]:
        limit = self.settings.limit or min(300.0, self.timeout / 3)
        hard = max(limit, 0.8 * self.timeout)
        return {"limit": limit, "hard": hard, "grace": self.settings.grace, "folder": self.settings.folder}

    def search(self) -> None:
        """Look for the other ranks' watchers in the store now and then, until ranks meet at a first forward.

        Before that they may be stuck in collectives of the program's own, where nothing here is called.
        """
        if self.address is None or self._searching is not None:
            return
        self._searching = over = threading.Event()
        pause = max(1.0, self._limits()["limit"] / 4)

        def look() -> None:
            while not over.wait(pause):
                with contextlib.suppress(RuntimeError, ValueError):  # the process group is gone
                    others = self.find_others()
                    if others and all(address for _, address in others):
                        self._tell_peers(others)
                        return

        thread = _started(look, "fullshard-meeting")
        if thread is not None:
            atexit.register(thread.join)  # not within the store's native code when the interpreter ends
            atexit.register(over.set)

    def meet(self, known: dict[int, Address]) -> None:
        """The ranks have exchanged the addresses of their watchers."""
        self._has_met = True
        if self._searching is not None:
            self._searching.set()
        self.known |= known
        self._tell_peers(list(known.items()))

    def _tell_peers(self, peers: Sequence[tuple[int, Address | None]]) -> None:
        """Make other ranks' watchers known to this rank's; those without an address have not begun."""
        here = self.address[0] if self.address is not None else None
        told: list[tuple[int, str, int, str]] = []
        for rank, address in peers:
            host, at, port, key = address or ("", "", 0, "")
            told.append((rank, "127.0.0.1" if host == here else at, port, key))
        self._send({"peers": told})

    def waits_on_device(self) -> None:
        """Collectives are waited for by the device, of which the host knows nothing: silence is a wait."""
        self._send({"options": {"idle": True}})

    def reprieve(self) -> None:
        """Process groups were made anew: what was found of the old ones is of no more account."""
        self.board.reprieve()
        self._has_met = False
        self.known = {rank: address for rank, address in self.known.items() if address == self.address}
        self._send({"forget": True})

    def configure(self, **changes: Any) -> None:
        """Change settings; also while the watcher runs."""
        self.settings = replace(self.settings, **changes)
        self._send({"options": self._limits()})

    def _send(self, order: dict[str, Any]) -> None:
        """Give the watcher an order. One that does not read (stopped, or starved) is not waited for."""
        process = self._process
        if process is None or process.stdin is None:
            return
        with self._sending:
            self._write(process.stdin.fileno(), order)

    def _write(self, pipe: int, order: dict[str, Any]) -> None:
        patience = 0.0 if self._unsent else _PATIENCE
        self._unsent += json.dumps(order).encode() + b"\n"
        try:
            while self._unsent:
                try:
                    self._unsent = self._unsent[os.write(pipe, self._unsent) :]
                except BlockingIOError:
                    if len(self._unsent) > _MOST_UNSENT:
                        raise OSError("it does not read what it is sent") from None
                    if patience <= 0.0:
                        return  # with what is sent next
                    time.sleep(0.01)  # a long order, larger than a pipe
                    patience -= 0.01
        except OSError as error:
            warnings.warn(
                message(f"the watcher of this rank has ended ({error}): hangs will not be explained", code="W016"),
                stacklevel=2,
            )
            self._process = None


_PATIENCE = 0.5  # seconds for which a watcher may leave a full pipe unread
_MOST_UNSENT = 16 << 20  # bytes


def _started(target: Callable[[], None], name: str) -> threading.Thread | None:
    """A thread that runs this; None if the system has none left."""
    thread = threading.Thread(target=target, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return None
    return thread


RANK = Rank()
"""This process."""


def _after_fork() -> None:
    """The board and the watcher are the parent's: a forked process begins anew."""
    settings, break_off = RANK.settings, RANK.break_off
    RANK.__init__()  # type: ignore[misc]
    RANK.settings, RANK.break_off = settings, break_off


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_fork)


def watch(
    limit: float | None = None,
    *,
    grace: float = 15.0,
    folder: str | os.PathLike[str] | None = None,
    enabled: bool = True,
) -> None:
    """Say how long ranks may wait for each other, and where reports go. Call it before the first forward, on all ranks.

    A watcher is a small process beside each rank. While ranks get on it does nothing. When a rank has waited for a
    collective of Fullshard's for `limit` seconds, or another rank is gone, the watchers find out what all ranks do, and
    every rank that waits raises a `DivergenceError` with the report: who waits for what, who is elsewhere, who is gone
    and how, the first difference in the order of units, and the Python stacks. A rank that is slow but gets on is
    waited for: in its first step for four times the limit, and as long as it computes, reads or writes; later as long
    as its Python stack moves, it or its children compute, or it sends, receives, reads or writes. On CPUs no wait for a
    collective of Fullshard's is longer than 0.8 of the process group's timeout. A watcher that does not answer is no
    proof that its rank is gone: it counts only after the limit.

    Args:
        limit: seconds. None: a third of the process group's timeout, 300 at most.
        grace: seconds within which a rank has to raise the report. One that does not, because it waits in code that is
            not Fullshard's, is ended (SIGTERM, 5 seconds later SIGKILL) after its watcher wrote the report to stderr.
        folder: where the first reachable rank's watcher writes the report, with all that was known, for
            `fullshard doctor`. None: nowhere.
        enabled: False: no watcher is started.

    Raises:
        ConfigError: an argument of another type, a time that is not positive, a folder that is a file.
    """
    for name, value in (("limit", limit), ("grace", grace)):
        fits = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf
        if not fits and not (name == "limit" and value is None):
            raise ConfigError(
                f"watch() takes {name} in seconds.", expected="a positive number", got=repr(value), code="C203"
            )
    if not isinstance(enabled, bool):
        raise ConfigError("watch(enabled=) is True or False.", got=repr(enabled), code="C204")
    if folder is not None and (not isinstance(folder, (str, os.PathLike)) or not os.fspath(folder)):
        raise ConfigError(
            "watch() takes the path of a folder, which is made when needed.", got=repr(folder), code="C205"
        )
    at = None if folder is None else os.path.abspath(folder)
    if at is not None and os.path.exists(at) and not os.path.isdir(at):
        raise ConfigError(
            "watch() takes the path of a folder, which is made when needed.", got=f"the file {at}", code="C206"
        )
    RANK.configure(limit=limit, grace=grace, folder=at, enabled=enabled)


def _excepthook_notes(rank: Rank) -> None:
    """Let what ends the program be known to the watcher."""
    before = sys.excepthook

    def hook(kind: Any, error: BaseException, trace: Any) -> None:
        rank.note(error)
        report = rank.board.verdict
        if report is not None and not isinstance(
            error, DivergenceError
        ):  # a backend's own error, after the others left
            error.add_note(f"fullshard had found before: {report}")
        before(kind, error, trace)

    sys.excepthook = hook


def _own_address() -> str:
    """An address of this machine that others reach it by: that of its default route. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.255.255.255", 1))
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"
