"""Short texts of all ranks, for errors and addresses."""

from __future__ import annotations

import torch

from ..comm import Comm
from ..mesh import Axis
from ..watcher import RANK

_ROOM = 512  # bytes


def texts_of_all(text: str, axis: Axis, comm: Comm, device: torch.device, room: int = _ROOM) -> list[str]:
    """Every rank's text, in the order of the axis; cut after `room` bytes. Collective over the axis."""
    data = text.encode()[:room].ljust(room, b"\0")
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    found = torch.empty(axis.size * room, dtype=torch.uint8, device=device)
    RANK.talks("texts")
    comm.gather(axis, found, mine).wait()
    return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in found.view(axis.size, room).tolist()]
