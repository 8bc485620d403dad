"""How watchers talk: a line of JSON each way, over a connection per question."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from .report import Status

ANSWER = 3.0
"""Seconds within which a watcher has to answer."""
MOST = 8 << 20
"""Bytes of a line."""

Peer = tuple[int, str, int, str]
"""A rank's watcher: rank, host, port, secret."""


def unreachable(peer: Peer) -> Status:
    """What is known of a rank whose watcher does not answer; one without a port has not begun."""
    known: Status = dict.fromkeys(("gone", "raised", "caught", "waited", "waits_for", "last"))
    known |= {"rank": peer[0], "host": peer[1], "state": "unreachable" if peer[2] else "absent", "idle": False}
    known |= {"count": 0, "steps": 0, "cpu": 0.0, "io": 0, "records": [], "time": time.time(), "pid": 0}
    known |= {"stack": "", "samples": [], "children": 0.0, "call": None, "own": None, "runs": False, "wakes": 0}
    return known


async def say(writer: asyncio.StreamWriter, what: dict[str, Any]) -> None:
    writer.write(json.dumps(what).encode() + b"\n")
    await writer.drain()


async def ask(
    peer: Peer, question: dict[str, Any], patience: float = ANSWER
) -> tuple[Any, asyncio.StreamWriter | None]:
    """Ask, and leave the connection open; (None, None) if there is no answer."""
    _, host, port, secret = peer
    try:
        opened = asyncio.open_connection(host, port, limit=MOST)
        reader, writer = await asyncio.wait_for(opened, ANSWER)
        await say(writer, question | {"secret": secret})
        if not patience:
            writer.close()
            return None, None
        line = await asyncio.wait_for(reader.readline(), patience)
        return json.loads(line), writer
    except (TimeoutError, OSError, ValueError):
        return None, None


async def exchange(peer: Peer, question: dict[str, Any], patience: float) -> Any:
    """Ask, and hang up."""
    answer, writer = await ask(peer, question, patience)
    if writer is not None:
        writer.close()
    return answer
