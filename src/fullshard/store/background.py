"""Saves that go on while training does: a snapshot in shared memory, written by a process beside this one.

    this process                                   the writer beside it (writer_process.py)
    queues copies of its pieces into the snapshot
    a thread waits for the device, and
    sends the job (socket)                 ->      writes this rank's file, from the snapshot
                                                   says so in the folder being written: rank-R.written
    trains                                         the first rank's: waits for all, and puts the checkpoint in its place
    `finish`: at the next call             <-      how it ended

The writers of all ranks meet in the folder alone, without connections: they go on if training ends. One process and one
snapshot are kept for the next save. The snapshot is page-locked where there is a device, which copies while the host
goes on: before anything that it is given later, so that weights and buffers may change at once.

How this rank's part ended is kept in its `Part`, which takes no communication: so ranks can be told of it in any group,
by `Saving.wait` in the one that saved, or by the next save or load in theirs.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import mmap
import os
import pickle
import socket
import struct
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..comm import lanes
from ..errors import CheckpointError, message
from ..watcher import RANK
from .folder import Folder
from .piece import Piece
from .plan import Ending, Plan
from .ranks import Ranks

PAGE = 4096  # bytes: of the header, and what the job and the snapshot are aligned to
ALIGN = 64  # bytes, of a tensor in the snapshot
HEADER = struct.Struct("<QQ")  # bytes written so far, bytes to write: at the snapshot's beginning
MESSAGE = struct.Struct("<QQ")  # length of the job, length of everything
GIVE_UP = MESSAGE.pack(0, 0)  # see `Writer.give_up`
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from fullshard.store.writer_process import main; main()"
)


@dataclass
class Order:
    """What a writer is told.

    Attributes:
        folder: where checkpoints are kept.
        name: of the one being written, as `Folder.begin` gave it.
        rank, world: of the ranks that save.
        ending: see `Plan`.
        pieces: name, shape, offsets, sizes and dtype of each piece, and where in the snapshot it lies, in bytes.
        data_bytes: that the pieces take in the snapshot.
        patience: seconds that the first rank's writer waits for another one.
    """

    folder: Folder
    name: str
    rank: int
    world: int
    ending: Ending | None
    pieces: list[tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...], torch.dtype, int]]
    data_bytes: int
    patience: float = 1800.0

    @classmethod
    def of(cls, folder: Folder, name: str, plan: Plan, rank: int, world: int) -> Order:
        """The order to carry out a rank's plan."""
        pieces, at = [], 0
        for p in plan.pieces:
            pieces.append((p.name, p.shape, p.offsets, p.sizes, p.dtype, at))
            at += -(-p.nbytes // ALIGN) * ALIGN
        return cls(folder, name, rank, world, plan.ending, pieces, at)


@dataclass
class Part:
    """This rank's part of a save in the background, and how it ended.

    Attributes:
        publishes: whether this rank's process puts the checkpoint in its place: it ends after those of all others.
        over: whether it has ended.
        name: of the checkpoint, where this rank published it.
        error: what went wrong.
    """

    publishes: bool
    over: bool = False
    name: str | None = None
    error: str | None = None


def note_written(path: Path, rank: int, text: str, failed: bool = False) -> None:
    """Tell the first rank's writer, by a file, that this rank's has written, or failed."""
    kind = "failed" if failed else "written"
    fresh = path / f"rank-{rank}.{kind}.new"
    fresh.write_text(text)
    fresh.replace(path / f"rank-{rank}.{kind}")


class Writer:
    """The process beside this one, and the memory that both see.

    Ownership: the snapshot is allocated here, grows with what is saved, is written by `start` alone and read by the
    process until it answers; both live until this process ends.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._memory = -1  # file descriptor of the snapshot
        self._mapped: mmap.mmap | None = None
        self._locked = False  # whether the map is page-locked
        self._handing: threading.Thread | None = None  # it waits for the device, and sends the job
        self._running: Order | None = None
        self._answer: dict[str, str] | None = None
        self._partial = b""  # of an answer
        self.part: Part | None = None

    def start(self, order: Order, pieces: Sequence[Piece], lock: int) -> Part:
        """Copy the pieces that an order is of, and let the process write them.

        Args:
            lock: file descriptor of the folder's lock, which the process takes over; -1 if there is none.

        Raises:
            CheckpointError: the process cannot be started: the limit of processes, files or memory is reached.
        """
        while self._running is not None and not self.poll(1.0):  # an abandoned save has the snapshot
            pass
        text = pickle.dumps(order)
        begin = data_begin(len(text))
        memory = self._room(begin + order.data_bytes)
        memory[: HEADER.size] = HEADER.pack(0, sum(piece.nbytes for piece in pieces))
        memory[PAGE : PAGE + len(text)] = text
        self._launch()
        copies = [
            (_view(memory, begin + place, piece), piece.tensor)
            for piece, (*_, place) in zip(pieces, order.pieces, strict=True)
            if piece.nbytes
        ]
        copied = lanes.copy_to_host(copies, self._locked)
        del copies
        part = self.part = Part(order.ending is not None)
        self._running, self._answer = order, None
        message, lock = MESSAGE.pack(len(text), begin + order.data_bytes), os.dup(lock) if lock >= 0 else -1
        if not copied:
            self._hand_over(order, message, lock, copied)
            return part
        self._handing = threading.Thread(
            target=self._hand_over, args=(order, message, lock, copied), name="fullshard-snapshot", daemon=True
        )
        self._handing.start()
        return part

    def _hand_over(self, order: Order, message: bytes, lock: int, copied: Sequence[torch.Event]) -> None:
        """Send the job when the device has copied everything; what goes wrong is the save's answer."""
        assert self._channel is not None
        try:
            for event in copied:
                event.synchronize()
            socket.send_fds(self._channel, [message], [self._memory, *([lock] if lock >= 0 else [])])
        except BrokenPipeError:  # the process ended: `poll` tells
            pass
        except Exception as error:  # whatever devices raise
            failure = f"rank {order.rank}: copying what is to be saved: {type(error).__name__}: {error}"
            self._fail(order, failure)
            self._answer = {"error": failure}
        finally:
            if lock >= 0:
                os.close(lock)

    def _room(self, nbytes: int) -> mmap.mmap:
        """The snapshot, of at least so many bytes."""
        if self._memory < 0:
            self._memory = os.memfd_create("fullshard-snapshot", os.MFD_CLOEXEC)
        if self._mapped is None or len(self._mapped) < nbytes:
            os.posix_fallocate(self._memory, 0, nbytes)  # raises where writing would end the process (SIGBUS)
            if self._mapped is not None and self._locked:
                lanes.page_unlock(_address(self._mapped))
            self._mapped = mmap.mmap(self._memory, nbytes)
            self._locked = lanes.page_lock(_address(self._mapped), nbytes)
        return self._mapped

    def _launch(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        try:
            ours, theirs = socket.socketpair()
            with theirs:
                command = [sys.executable, "-c", _BOOT, json.dumps(sys.path), str(theirs.fileno())]
                self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True)
        except OSError as error:
            raise CheckpointError(
                "The process that writes checkpoints in the background cannot be started.",
                expected="room for one more process and its files",
                got=f"{type(error).__name__}: {error}",
                remedy="raise the limits of processes and open files (ulimit -u, ulimit -n), or save without "
                "asynchronous=True",
                topic="save-failed",
            ) from error
        self._channel = ours

    @property
    def progress(self) -> tuple[int, int]:
        """Bytes of tensors that the process has written of this rank's, and all there are."""
        if self._mapped is None or self.part is None:
            return (0, 0)
        done, total = HEADER.unpack_from(self._mapped)
        return min(done, total), total

    def poll(self, seconds: float | None = 0.0) -> bool:
        """Whether the save has ended; waits so long for it, None for ever."""
        if self._handing is not None:
            self._handing.join(seconds)
            if self._handing.is_alive():
                return False
            self._handing = None
        if self._running is None or self._answer is not None:
            return True
        assert self._channel is not None
        self._channel.settimeout(seconds)
        try:
            while not self._partial.endswith(b"\n"):
                more = self._channel.recv(65536)
                if not more:
                    break
                self._partial += more
        except (TimeoutError, BlockingIOError):  # the second where it waits for no time at all
            return False
        except OSError:  # the process ended without an answer, as below
            self._partial = b""
        text, self._partial = self._partial, b""
        self._answer = json.loads(text) if text.endswith(b"\n") else {"error": self._died()}
        return True

    def _died(self) -> str:
        assert self._process is not None and self._running is not None
        code = self._process.wait()
        self._process = None
        order = self._running
        failure = f"the process that writes in the background ended with exit code {code}"
        self._fail(order, failure)
        return failure

    @staticmethod
    def _fail(order: Order, failure: str) -> None:
        """Let the writers of other ranks know."""
        with contextlib.suppress(OSError):  # the folder may be gone, with the other writers
            note_written(order.folder.at(order.name), order.rank, failure, failed=True)

    def finish(self) -> None:
        """Wait for the end of the save that was started, and note in its `part` how it ended."""
        if self.part is None:
            return
        while not self.poll(1.0):
            pass
        answer, part = self._answer, self.part
        self._running = self.part = None
        assert answer is not None
        part.over, part.name, part.error = True, answer.get("name"), answer.get("error")

    def give_up(self) -> None:
        """Let the process not wait for the other ranks' any more: one of them failed, and may be unable to say so in
        the folder."""
        assert self._channel is not None
        if self._handing is not None:
            self._handing.join()  # the job comes first
        with contextlib.suppress(OSError):  # it has ended
            self._channel.sendall(GIVE_UP)

    def abandon(self) -> None:
        """Forget the save that was started: some ranks failed to start it.

        The process soon ends it, as the folder is gone; until then it has the snapshot, and `start` waits for it.
        """
        self.part = None

    def at_exit(self) -> None:
        """Let a save end before this process does, and say so if it fails."""
        if self.part is None:
            return
        deadline = time.monotonic() + 600.0
        while not self.poll(1.0):
            if time.monotonic() > deadline:
                return
        if self._answer is not None and "error" in self._answer:
            print(f"fullshard: a save in the background failed: {self._answer['error']}", file=sys.stderr)


def _view(memory: mmap.mmap, offset: int, piece: Piece) -> torch.Tensor:
    """Where a piece lies in the snapshot."""
    octets = torch.frombuffer(memory, dtype=torch.uint8, count=piece.nbytes, offset=offset)
    return octets.view(piece.dtype).view(piece.sizes)


def _address(memory: mmap.mmap) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr()


def data_begin(length: int) -> int:
    """Where tensors begin in a snapshot whose job has this length, in bytes."""
    return PAGE + -(-length // PAGE) * PAGE


WRITER = Writer()
"""This process's."""
atexit.register(WRITER.at_exit)


def _after_fork() -> None:
    """The process and the snapshot are the parent's."""
    WRITER.__init__()  # type: ignore[misc]


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_fork)


class Saving:
    """A save, which may still go on.

    Attributes:
        step: that is saved.
    """

    def __init__(self, folder: Folder, ranks: Ranks, step: int, written: str | Part) -> None:
        self.step = step
        self._folder, self._ranks = folder, ranks
        self._name = written if isinstance(written, str) else None
        self._part = Part(False, over=True) if isinstance(written, str) else written
        self._error: CheckpointError | None = None

    @property
    def done(self) -> bool:
        """Whether this rank's part is over, well or not. No communication."""
        return self._part.over or WRITER.poll()

    @property
    def progress(self) -> tuple[int, int]:
        """Bytes that this rank has written of its part, and all that there are; (0, 0) when it is over."""
        return (0, 0) if self._part.over else WRITER.progress

    def wait(self) -> Path | str:
        """Wait until the checkpoint is whole; where it is. Collective.

        Raises:
            CheckpointError: it failed: quotes what the first rank that failed says.
        """
        if self._error is None and self._name is None:
            self._name, self._error = _end_of_background(self._ranks, self._part)
        if self._error is not None:
            raise self._error
        assert self._name
        return self._folder.at(self._name)


def _end_of_background(ranks: Ranks, part: Part | None) -> tuple[str, CheckpointError | None]:
    """Wait for the end of a save on all ranks; the checkpoint's name, and what went wrong. Collective.

    Nothing is raised before all ranks know: those that publish wait for the parts of others, whose ranks know first
    when one fails.

    Args:
        part: this rank's; None if it had none.
    """
    publishes = part is not None and part.publishes
    with RANK.files():
        if not publishes and part is not None and not part.over:
            WRITER.finish()
    of_others = ranks.all(None if part is None or publishes else part.error)
    failed = any(error is not None for error in of_others)
    with RANK.files():
        if publishes and part is not None and not part.over:
            if failed:
                WRITER.give_up()
            WRITER.finish()
    ends: list[tuple[str | None, str | None]] = ranks.all(
        (part.name, part.error) if part is not None and publishes else (None, None)
    )
    name = next((name for name, _ in ends if name is not None), "")
    errors = [*enumerate(of_others), *((rank, error) for rank, (_, error) in enumerate(ends))]
    rank, error = next(((rank, error) for rank, error in errors if error is not None), (0, None))
    if name or error is None:  # it is whole, whatever became of a process that had written its part
        return name, None
    failure = CheckpointError(
        "A save in the background failed; the checkpoints before it are as they were.",
        rank=rank,
        got=error,
        topic="save-failed",
    )
    return name, failure


def settle_background(ranks: Ranks) -> None:
    """Before anything else is saved or loaded: wait for what goes on in the background. Collective.

    If it failed, a warning says so, and what comes next goes on: the next save may be well.
    """
    if not any(ranks.all(WRITER.part is not None)):
        return
    _, error = _end_of_background(ranks, WRITER.part)
    if error is not None and ranks.is_first:
        warnings.warn(
            message(
                "A save in the background failed; the checkpoints before it are as they were, and training goes on.",
                rank=error.rank,
                got=error.got,
                remedy="free room or mend the disk; wait() for a save to get its failure as an error",
                topic="save-failed",
            ),
            stacklevel=3,
        )
