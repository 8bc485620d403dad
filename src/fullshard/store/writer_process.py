"""The process that writes checkpoints beside a rank; see `background.py`."""

from __future__ import annotations

import json
import mmap
import os
import pickle
import select
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError
from .background import GIVE_UP, HEADER, MESSAGE, PAGE, Order, data_begin, note_written
from .hashed import FileFacts
from .piece import Piece
from .plan import Written, end, write
from .storage import Stored
from .write import file_of

_POLL = 0.02  # seconds between two looks into the folder
_ORPHAN_PATIENCE = 60.0  # seconds that the writers of other ranks get when this one's rank is gone


def main() -> None:
    """Serve the rank at the other end of the socket whose number is the last argument, until it closes that."""
    torch.set_num_threads(1)
    os.nice(5)  # training comes first
    serve(socket.socket(fileno=int(sys.argv[-1])))


def serve(channel: socket.socket) -> None:
    """Write what comes over the channel, one save after the other, until the other end closes it."""
    while True:
        try:
            message, descriptors, _, _ = socket.recv_fds(channel, MESSAGE.size, 2)
        except ConnectionResetError:  # the rank ended before it had read an answer
            return
        if not message:
            return
        if message == GIVE_UP:  # it came when the save had ended
            continue
        length, nbytes = MESSAGE.unpack(message)
        memory = mmap.mmap(descriptors[0], nbytes)
        order: Order = pickle.loads(memory[PAGE : PAGE + length])  # of this process's own rank
        answer = _serve(order, memory, data_begin(length), channel)
        for descriptor in descriptors:  # the lock's, too
            os.close(descriptor)
        try:
            channel.sendall(json.dumps(answer).encode() + b"\n")
        except OSError:  # the rank is gone, and this was its last checkpoint
            return


def _serve(order: Order, memory: mmap.mmap, begin: int, channel: socket.socket) -> dict[str, Any]:
    path = order.folder.at(order.name)
    done = 0

    def progress(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        memory[: HEADER.size] = HEADER.pack(done, HEADER.unpack_from(memory)[1])

    try:
        pieces = _pieces(order, memory, begin)
        written = write(order.folder, order.name, order.rank, pieces, progress)
        note_written(path, order.rank, _told(written))
        if order.ending is None:
            return {}
        everyone = [wait_for(path, rank, order, channel) for rank in range(order.world)]
        for marker in path.glob("rank-*.written*"):
            marker.unlink()
        return {"name": end(order.folder, order.name, order.ending, everyone)}
    except Exception as error:
        text = f"rank {order.rank}: {type(error).__name__}: {error}"
        if order.ending is not None:
            order.folder.discard(order.name)
        elif not path.is_dir():
            return {}  # the first rank's writer removed the folder, and its rank tells why
        else:
            text += _note_failure(path, order, text)
        return {"error": text}


def _note_failure(path: Path, order: Order, text: str) -> str:
    """Let the first rank's writer know; what went wrong with that, for the rank's error."""
    try:
        (path / file_of(order.rank)).unlink(missing_ok=True)  # the disk may be full of it
        note_written(path, order.rank, text, failed=True)
    except FileNotFoundError:  # the first rank's writer has failed, and discarded the folder
        return ""
    except OSError as further:
        try:
            (path / f"rank-{order.rank}.failed").touch()
        except OSError:  # the disk may be what failed: the rank tells at its next call
            return f" (and could not say so in the folder: {further})"
    return ""


def _pieces(order: Order, memory: mmap.mmap, begin: int) -> list[Piece]:
    pieces = []
    for name, shape, offsets, sizes, dtype, place in order.pieces:
        numel = torch.Size(sizes).numel()
        if numel:
            tensor = torch.frombuffer(memory, dtype=dtype, count=numel, offset=begin + place).view(sizes)
        else:
            tensor = torch.empty(sizes, dtype=dtype, device="cpu")
        pieces.append(Piece(name, shape, offsets, sizes, tensor))
    return pieces


def _told(written: Written) -> str:
    """`written` as JSON, for the first rank's writer."""
    stored = [(s.name, s.offsets, s.sizes, s.file, s.begin, s.nbytes) for s in written.stored]
    return json.dumps({"stored": stored, "facts": {k: (f.nbytes, f.hashes, f.kind) for k, f in written.facts.items()}})


def _read(text: str) -> Written:
    report = json.loads(text)
    stored = [Stored(name, tuple(offsets), tuple(sizes), *place) for name, offsets, sizes, *place in report["stored"]]
    return Written(stored, {name: FileFacts(n, tuple(h), kind) for name, (n, h, kind) in report["facts"].items()})


def wait_for(path: Path, rank: int, order: Order, channel: socket.socket) -> Written:
    """What another rank's writer wrote, when it has.

    Raises:
        CheckpointError: it failed, or does not come.
    """
    deadline, orphaned = time.monotonic() + order.patience, False
    while True:
        if (path / f"rank-{rank}.written").exists():
            return _read((path / f"rank-{rank}.written").read_text())
        if (path / f"rank-{rank}.failed").exists():
            raise CheckpointError(
                "Another rank's part failed.",
                rank=rank,
                got=(path / f"rank-{rank}.failed").read_text(),
                topic="save-failed",
            )
        if not path.is_dir():
            raise CheckpointError(
                "The folder being written was removed: not all ranks could start.", got=str(path), topic="save-failed"
            )
        if time.monotonic() > deadline:
            raise CheckpointError(
                "Another rank's part did not come.",
                rank=rank,
                expected=f"within {order.patience:g} s",
                topic="save-failed",
            )
        if not orphaned and select.select([channel], [], [], 0)[0]:
            if channel.recv(len(GIVE_UP)):
                raise CheckpointError("Another rank's part failed, as that rank says.", topic="save-failed")
            orphaned, deadline = True, time.monotonic() + _ORPHAN_PATIENCE  # the rank is gone: its last checkpoint
        time.sleep(_POLL)
