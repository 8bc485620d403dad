"""The writer process of a rank's background saves; see `background.py`."""

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
from .background import GIVE_UP, HEADER, MESSAGE, PAGE, data_begin, note_written, tensor_in
from .hashed import FileFacts
from .piece import Piece
from .storage import Stored
from .write import Order, Written, file_of, publish, write

_POLL = 0.02  # seconds between two checks of the folder
_PATIENCE = 1800.0  # seconds to wait for another rank's writer
_ORPHAN_PATIENCE = 60.0  # seconds to wait for the writers of other ranks once this writer's own rank is gone


def main() -> None:
    """Serve the rank at the other end of a socket, whose descriptor is the last argument, until the rank closes it."""
    torch.set_num_threads(1)
    os.nice(5)  # training comes first
    serve(socket.socket(fileno=int(sys.argv[-1])))


def serve(channel: socket.socket) -> None:
    """Write the saves that come over the channel, until the other end closes it."""
    while True:
        try:
            message, descriptors, _, _ = socket.recv_fds(channel, MESSAGE.size, 2)
        except ConnectionResetError:  # the rank ended before it read an answer
            return
        if not message:
            return
        if message == GIVE_UP:  # sent after the save had ended
            continue
        length, nbytes = MESSAGE.unpack(message)
        memory = mmap.mmap(descriptors[0], nbytes)
        order, layout = pickle.loads(memory[PAGE : PAGE + length])  # safe: from this process's own rank
        answer = _serve(order, layout, memory, data_begin(length), channel)
        for descriptor in descriptors:  # the lock's, too
            os.close(descriptor)
        try:
            channel.sendall(json.dumps(answer).encode() + b"\n")
        except OSError:  # the rank is gone, and this was its last checkpoint
            return


def _serve(order: Order, layout: list[Any], memory: mmap.mmap, begin: int, channel: socket.socket) -> dict[str, Any]:
    path = order.folder.at(order.name)
    done = 0

    def progress(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        memory[: HEADER.size] = HEADER.pack(done, HEADER.unpack_from(memory)[1])

    try:
        pieces = [
            Piece(name, shape, offsets, sizes, tensor_in(memory, begin + at, dtype, sizes))
            for name, shape, offsets, sizes, dtype, at in layout
        ]
        written = write(order, pieces, progress)
        note_written(path, order.rank, _to_text(written))
        if order.manifest is None:
            return {}
        of_ranks = [wait_for(path, rank, channel) for rank in range(order.world)]
        for marker in path.glob("rank-*.written*"):
            marker.unlink()
        return {"name": publish(order, of_ranks)}
    except Exception as error:
        text = f"rank {order.rank}: {type(error).__name__}: {error}"
        if order.manifest is not None:
            order.folder.discard(order.name)
        elif not path.is_dir():
            return {}  # the first rank's writer removed the folder, and its rank reports why
        else:
            text += _note_failure(path, order, text)
        return {"error": text}


def _note_failure(path: Path, order: Order, text: str) -> str:
    """Report a failure to the first rank's writer; returns text to add to the error if that fails, too."""
    try:
        (path / file_of(order.rank)).unlink(missing_ok=True)  # the disk may be full
        note_written(path, order.rank, text, failed=True)
    except FileNotFoundError:  # the first rank's writer has failed, and discarded the folder
        return ""
    except OSError as report_error:
        try:
            (path / f"rank-{order.rank}.failed").touch()
        except OSError:  # the disk itself may have failed: the rank reports it at its next call
            return f" (and could not report it in the folder: {report_error})"
    return ""


def _to_text(written: Written) -> str:
    stored = [(s.name, s.offsets, s.sizes, s.file, s.begin, s.nbytes) for s in written.stored]
    return json.dumps({"stored": stored, "facts": {k: (f.nbytes, f.hashes, f.kind) for k, f in written.facts.items()}})


def _from_text(text: str) -> Written:
    report = json.loads(text)
    stored = [Stored(name, tuple(offsets), tuple(sizes), *place) for name, offsets, sizes, *place in report["stored"]]
    return Written(stored, {name: FileFacts(n, tuple(h), kind) for name, (n, h, kind) in report["facts"].items()})


def wait_for(path: Path, rank: int, channel: socket.socket, patience: float = _PATIENCE) -> Written:
    """Wait for another rank's writer; returns what it wrote.

    Raises:
        CheckpointError: it failed, or is late.
    """
    deadline, orphaned = time.monotonic() + patience, False
    while True:
        if (path / f"rank-{rank}.written").exists():
            return _from_text((path / f"rank-{rank}.written").read_text())
        if (path / f"rank-{rank}.failed").exists():
            raise CheckpointError(
                "Another rank's part failed.",
                rank=rank,
                got=(path / f"rank-{rank}.failed").read_text(),
                topic="save-failed",
            )
        if not path.is_dir():
            raise CheckpointError(
                "The folder of the save was removed: not all ranks could start.", got=str(path), topic="save-failed"
            )
        if time.monotonic() > deadline:
            raise CheckpointError(
                "Another rank's part is late.",
                rank=rank,
                expected=f"within {patience:g} s",
                topic="save-failed",
            )
        if not orphaned and select.select([channel], [], [], 0)[0]:
            if channel.recv(len(GIVE_UP)):
                raise CheckpointError("Another rank's part failed, as that rank reported.", topic="save-failed")
            orphaned, deadline = True, time.monotonic() + _ORPHAN_PATIENCE  # the rank is gone: this is its last save
        time.sleep(_POLL)
