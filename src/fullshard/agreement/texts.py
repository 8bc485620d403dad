"""Short texts of all ranks, for errors and addresses."""

from __future__ import annotations

import torch

from ..comm import Comm
from ..mesh import Axis

_ROOM = 512  # bytes


def texts_of_all(text: str, axis: Axis, comm: Comm, device: torch.device) -> list[str]:
    """Every rank's text, in the order of the axis; cut after 512 bytes. Collective over the axis."""
    data = text.encode()[:_ROOM].ljust(_ROOM, b"\0")
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    found = torch.empty(axis.size * _ROOM, dtype=torch.uint8, device=device)
    comm.gather(axis, found, mine).wait()
    return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in found.view(axis.size, _ROOM).tolist()]
