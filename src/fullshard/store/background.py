"""Background saves: each rank copies its pieces to shared memory, and a writer process stores them during training.

    this process                                   its writer process (writer_process.py)
    queues copies of its pieces into the snapshot
    a thread waits for the device, and
    sends the job (socket)                 ->      writes this rank's file, from the snapshot
                                                   creates rank-R.written in the new checkpoint's folder
    trains                                         the first rank's: waits for all of these, and publishes
    `finish`: at the next call             <-      the result

With `asynchronous="until_step"` the thread also copies the parameters of units and their optimizer state (`Beside`).

The writers of all ranks communicate through the folder alone, so they go on if training ends. The process and the
snapshot are reused by the next save. The snapshot is page-locked if there is a device: the device then copies
asynchronously, in order with its later work, so training may change weights and buffers at once.

The result of a rank's part is recorded in its `SavedPart`, without communication. Ranks can therefore exchange results
in any group: in the group that saved, by `Saving.wait`, or in that of the next save or load.
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
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..comm import lanes
from ..errors import CheckpointError, message
from ..readers import READERS, wait_for_readers
from ..watcher import RANK
from .folder import Folder
from .piece import Piece
from .ranks import Ranks
from .write import Order, bytes_of

PAGE = 4096  # bytes: the size of the header, and the alignment of the job and of the tensors' region
ALIGN = 64  # bytes: the alignment of a tensor in the snapshot
GRAIN = 1 << 16  # bytes: the least piece that is copied beside training, and the distance of samples of it
HEADER = struct.Struct("<QQ")  # bytes written so far, bytes to write: at the beginning of the snapshot
MESSAGE = struct.Struct("<QQ")  # length of the job, length of the snapshot
GIVE_UP = MESSAGE.pack(0, 0)  # see `Writer.give_up`
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from fullshard.store.writer_process import main; main()"
)


@dataclass
class SavedPart:
    """This rank's part of a save, and its result.

    Attributes:
        publishes: whether this rank's writer publishes the checkpoint; it ends after all others.
        over: whether it has ended.
        name: of the checkpoint, if this rank published it.
        error: of a part that failed.
    """

    publishes: bool
    over: bool = False
    name: str | None = None
    error: str | None = None


def note_written(path: Path, rank: int, text: str, failed: bool = False) -> None:
    """Report to the first rank's writer, by a file in the new checkpoint, that this rank's writer is done or failed."""
    kind = "failed" if failed else "written"
    fresh = path / f"rank-{rank}.{kind}.new"
    fresh.write_text(text)
    fresh.replace(path / f"rank-{rank}.{kind}")


class Beside:
    """Copies of pieces that a thread makes during the next forward and backward, in which they are only read.

    Changes wait for the copies (`wait_for_readers`). A change that does not, because it was made through other tensors
    over the same memory, is detected: in-place operations of torch by the version; other changes only if they touch the
    first 8 bytes of a block of 64 KiB.

    Args:
        memory: the snapshot.
        copies: pairs of an offset in it and a piece, contiguous and in host memory.

    Attributes:
        ended: set when the copies are made.
    """

    def __init__(self, memory: mmap.mmap, copies: Sequence[tuple[int, Piece]]) -> None:
        self._memory, self._copies = memory, copies
        self._versions = [piece.tensor._version for _, piece in copies]
        self._samples = [_sample(np.asarray(bytes_of(piece.tensor))).copy() for _, piece in copies]
        self.ended = threading.Event()

    def copy(self) -> None:
        """Make the copies.

        Raises:
            CheckpointError: a piece was changed meanwhile.
        """
        try:
            for (offset, piece), version, sample in zip(self._copies, self._versions, self._samples, strict=True):
                target = np.frombuffer(self._memory, np.uint8, piece.nbytes, offset)
                np.copyto(target, np.asarray(bytes_of(piece.tensor)))  # without Python's lock, nor torch's threads
                if piece.tensor._version != version or not np.array_equal(_sample(target), sample):
                    raise CheckpointError(
                        "A tensor was changed while a background save copied it.",
                        parameter=piece.name,
                        expected="values that stay until the next step of an optimizer, as asynchronous='until_step' "
                        "requires",
                        remedy="call copied() of the save before the change, or save with asynchronous=True",
                        topic="save-failed",
                    )
        finally:
            self._copies = ()
            self.ended.set()


def _sample(octets: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return octets[: len(octets) // 8 * 8].view(np.uint64)[:: GRAIN // 8]


class Writer:
    """The writer process, and the memory shared with it.

    Ownership: this class allocates the snapshot and enlarges it as needed; only `start` writes to it; the process reads
    it until it answers. Both live until this process ends.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._memory = -1  # file descriptor of the snapshot
        self._mapped: mmap.mmap | None = None
        self._locked = False  # whether the map is page-locked
        self._sender: threading.Thread | None = None  # waits for the device, then sends the job
        self._running: Order | None = None
        self._answer: dict[str, str] | None = None
        self._partial = b""  # the received part of an answer
        self.part: SavedPart | None = None

    def start(self, order: Order, pieces: Sequence[Piece], lock: int, until_step: bool = False) -> SavedPart:
        """Copy the pieces into the snapshot, and let the process write them.

        Args:
            lock: file descriptor of the folder's lock, which the process takes over; -1 if there is none.
            until_step: leave to a thread what training only reads until the next step of an optimizer.

        Raises:
            CheckpointError: the process cannot be started: a limit on processes, files or memory is reached.
        """
        while self._running is not None and not self.poll(1.0):  # an abandoned save still reads the snapshot
            pass
        offsets = [0, *accumulate(-(-piece.nbytes // ALIGN) * ALIGN for piece in pieces)]  # and the end of the last one
        layout = [(p.name, p.shape, p.offsets, p.sizes, p.dtype, at) for p, at in zip(pieces, offsets, strict=False)]
        text = pickle.dumps((order, layout))
        begin = data_begin(len(text))
        memory = self._room(begin + offsets[-1])
        memory[: HEADER.size] = HEADER.pack(0, sum(piece.nbytes for piece in pieces))
        memory[PAGE : PAGE + len(text)] = text
        self._launch()
        placed = [(begin + offset, piece) for piece, offset in zip(pieces, offsets, strict=False) if piece.nbytes]
        later = [(offset, piece) for offset, piece in placed if until_step and _can_wait(piece)]
        waits = {offset for offset, _ in later}
        beside = Beside(memory, later) if later else None
        at_once = [
            (tensor_in(memory, offset, piece.dtype, piece.sizes), piece.tensor)
            for offset, piece in placed
            if offset not in waits
        ]
        copied = lanes.copy_to_host(at_once, self._locked)
        del at_once
        message, lock = MESSAGE.pack(len(text), begin + offsets[-1]), os.dup(lock) if lock >= 0 else -1
        part = self.part = SavedPart(order.manifest is not None)
        self._running, self._answer = order, None  # from here on an answer comes
        send = partial(self._send, order, message, lock, copied, beside)
        if not copied and beside is None:
            send()
            return part
        sender = threading.Thread(target=send, name="fullshard-snapshot", daemon=True)
        try:
            sender.start()
        except RuntimeError:  # a limit on threads is reached
            send()
            return part
        self._sender = sender
        if beside is not None:
            READERS[beside.ended] = None
        return part

    def _send(
        self, order: Order, message: bytes, lock: int, copied: Sequence[torch.Event], beside: Beside | None
    ) -> None:
        """Send the job when everything is copied; an error becomes the save's answer."""
        try:
            if beside is not None:
                beside.copy()  # first: steps wait for its end
            for event in copied:
                event.synchronize()
            assert self._channel is not None
            socket.send_fds(self._channel, [message], [self._memory, *([lock] if lock >= 0 else [])])
        except BrokenPipeError:  # the process ended: `poll` reports it
            pass
        except Exception as error:  # devices may raise anything
            failure = f"rank {order.rank}: copying to the snapshot: {type(error).__name__}: {error}"
            self._fail(order, failure)
            self._answer = {"error": failure}
        finally:
            if lock >= 0:
                os.close(lock)

    def _room(self, nbytes: int) -> mmap.mmap:
        """The snapshot, of at least `nbytes` bytes."""
        if self._memory < 0:
            self._memory = os.memfd_create("fullshard-snapshot", os.MFD_CLOEXEC)
        if self._mapped is None or len(self._mapped) < nbytes:
            os.posix_fallocate(self._memory, 0, nbytes)  # raises if there is no room; writing would be a SIGBUS
            if self._mapped is not None and self._locked:
                lanes.page_unlock(_address(self._mapped))
            self._mapped = mmap.mmap(self._memory, nbytes)
            self._locked = lanes.page_lock(_address(self._mapped), nbytes)
        return self._mapped

    def _launch(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        try:
            ours, child = socket.socketpair()
            with child:
                command = [sys.executable, "-c", _BOOT, json.dumps(sys.path), str(child.fileno())]
                self._process = subprocess.Popen(command, pass_fds=[child.fileno()], start_new_session=True)
        except OSError as error:
            raise CheckpointError(
                "The process for background saves cannot be started.",
                expected="room for another process and its files",
                got=f"{type(error).__name__}: {error}",
                remedy="raise the limits on processes and open files (ulimit -u, ulimit -n), or save without "
                "asynchronous=True",
                topic="save-failed",
            ) from error
        self._channel = ours

    @property
    def progress(self) -> tuple[int, int]:
        """How many bytes of this rank's tensors the process has written, and their total."""
        if self._mapped is None or self.part is None:
            return (0, 0)
        done, total = HEADER.unpack_from(self._mapped)
        return min(done, total), total

    def poll(self, seconds: float | None = 0.0) -> bool:
        """Whether the save has ended; waits up to `seconds` for it, forever if None."""
        if self._sender is not None:
            self._sender.join(seconds)
            if self._sender.is_alive():
                return False
            self._sender = None
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
        except (TimeoutError, BlockingIOError):  # the latter if `seconds` is 0
            return False
        except OSError:  # the process ended without an answer, as below
            self._partial = b""
        text, self._partial = self._partial, b""
        self._answer = json.loads(text) if text.endswith(b"\n") else {"error": self._died()}
        return True

    def _died(self) -> str:
        """Report to the other writers that the process ended without an answer; returns the error."""
        assert self._process is not None and self._running is not None
        failure = f"the writer process ended with exit code {self._process.wait()}"
        self._process = None
        self._fail(self._running, failure)
        return failure

    @staticmethod
    def _fail(order: Order, failure: str) -> None:
        """Report a failure to the writers of other ranks."""
        with contextlib.suppress(OSError):  # if the folder is gone, so are the other writers
            note_written(order.folder.at(order.name), order.rank, failure, failed=True)

    def finish(self) -> None:
        """Wait for the end of the save, and record its result in its `part`."""
        if self.part is None:
            return
        while not self.poll(1.0):
            pass
        answer, part = self._answer, self.part
        self._running = self.part = None
        assert answer is not None
        part.over, part.name, part.error = True, answer.get("name"), answer.get("error")

    def give_up(self) -> None:
        """Stop the process from waiting for other writers: one of them failed, and may be unable to report it in the
        folder."""
        assert self._channel is not None
        if self._sender is not None:
            self._sender.join()  # the job must be sent first
        with contextlib.suppress(OSError):  # it has ended
            self._channel.sendall(GIVE_UP)

    def abandon(self) -> None:
        """Forget the current save: some ranks failed to start it.

        The process soon ends it, as the folder is gone. Until then it reads the snapshot, and `start` waits for it.
        """
        self.part = None

    def at_exit(self) -> None:
        """Wait for a save before this process ends, and print an error if it fails."""
        if self.part is None:
            return
        deadline = time.monotonic() + 600.0
        while not self.poll(1.0):
            if time.monotonic() > deadline:
                return
        if self._answer is not None and "error" in self._answer:
            print(f"fullshard: a background save failed: {self._answer['error']}", file=sys.stderr)


def _can_wait(piece: Piece) -> bool:
    """Whether a piece can be copied beside training."""
    if not piece.in_unit or piece.nbytes < GRAIN:
        return False
    tensor = piece.tensor
    return tensor.is_cpu and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def tensor_in(memory: mmap.mmap, offset: int, dtype: torch.dtype, sizes: tuple[int, ...]) -> torch.Tensor:
    """The tensor at byte `offset` of a snapshot; a new one if it is empty."""
    numel = torch.Size(sizes).numel()
    if not numel:
        return torch.empty(sizes, dtype=dtype, device="cpu")
    return torch.frombuffer(memory, dtype=dtype, count=numel, offset=offset).view(sizes)


def _address(memory: mmap.mmap) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr()


def data_begin(length: int) -> int:
    """Where tensors begin in a snapshot, in bytes, if its job has this length."""
    return PAGE + -(-length // PAGE) * PAGE


WRITER = Writer()
atexit.register(WRITER.at_exit)


def _after_fork() -> None:
    """Reset the writer in a child: the process and the snapshot belong to the parent."""
    WRITER.__init__()  # type: ignore[misc]
    READERS.clear()  # the thread that copies exists in the parent only


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_fork)


class Saving:
    """A save, which may still be running.

    Attributes:
        step: the step of the checkpoint.
    """

    def __init__(self, folder: Folder, ranks: Ranks, step: int, part: SavedPart) -> None:
        self.step = step
        self._folder, self._ranks, self._part = folder, ranks, part
        self._name = part.name
        self._error: CheckpointError | None = None

    @property
    def done(self) -> bool:
        """Whether this rank's part has ended, successfully or not. No communication."""
        return self._part.over or WRITER.poll()

    @property
    def progress(self) -> tuple[int, int]:
        """How many bytes this rank has written, and its total; (0, 0) when its part has ended."""
        return (0, 0) if self._part.over else WRITER.progress

    def copied(self) -> None:
        """Wait until parameters and optimizer state may be changed by anything, as after a step. No communication."""
        if not self._part.over:
            wait_for_readers()

    def wait(self) -> Path | str:
        """Wait until the checkpoint is complete; returns its path or address. Collective.

        Raises:
            CheckpointError: the save failed; quotes the error of the first rank that failed.
        """
        if self._error is None and self._name is None:
            self._name, self._error = _end_of_background(self._ranks, self._part)
        if self._error is not None:
            raise self._error
        assert self._name
        return self._folder.at(self._name)


def _end_of_background(ranks: Ranks, part: SavedPart) -> tuple[str, CheckpointError | None]:
    """Wait for the end of a save on all ranks; returns the checkpoint's name, and the error. Collective.

    The ranks that publish wait for the parts of the others. So the others report first, and if a part failed, the ranks
    that publish give up.

    Args:
        part: this rank's.
    """
    with RANK.files():
        if not part.publishes and not part.over:
            WRITER.finish()
    of_others = ranks.all(None if part.publishes else part.error)
    failed = any(error is not None for error in of_others)
    with RANK.files():
        if part.publishes and not part.over:
            if failed:
                WRITER.give_up()
            WRITER.finish()
    results: list[tuple[str | None, str | None]] = ranks.all(
        (part.name, part.error) if part.publishes else (None, None)
    )
    name = next((name for name, _ in results if name is not None), "")
    errors = [*enumerate(of_others), *((rank, error) for rank, (_, error) in enumerate(results))]
    rank, error = next(((rank, error) for rank, error in errors if error is not None), (0, None))
    if name or error is None:  # a process that died after writing its part does no harm
        return name, None
    failure = CheckpointError(
        "A background save failed; earlier checkpoints are unchanged.",
        rank=rank,
        got=error,
        topic="save-failed",
    )
    return name, failure


def settle_background(ranks: Ranks) -> None:
    """Wait for a background save, before anything else is saved or loaded. Collective.

    If it failed, warn and go on: the next save may succeed.
    """
    if not any(ranks.all(WRITER.part is not None)):
        return
    _, error = _end_of_background(ranks, WRITER.part or SavedPart(publishes=False, over=True))
    if error is not None and ranks.is_first:
        warnings.warn(
            message(
                "A background save failed; earlier checkpoints are unchanged, and training goes on.",
                rank=error.rank,
                got=error.got,
                remedy="free disk space or repair the disk; call wait() on a save to raise its failure",
                topic="save-failed",
            ),
            stacklevel=3,
        )
