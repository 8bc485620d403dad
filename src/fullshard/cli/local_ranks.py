"""Ranks that a command starts on this machine, as torchrun would."""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

GRACE = 20.0  # seconds for the other ranks to end after one has failed
MOST_RANKS = 64
"""The most processes that a command starts on one machine: each imports torch and takes about 300 MB."""


TURN = "FULLSHARD_TURN"
"""The environment variable with the number of a rank's socket, if it has one."""


def run_ranks(
    arguments: list[str],
    ranks: int,
    logs: Path | None = None,
    sockets: Sequence[socket.socket] | None = None,
    cancelled: threading.Event | None = None,
) -> dict[int, int]:
    """Run `python ARGUMENTS` in `ranks` processes until all have ended.

    After one has failed, the others may wait for it forever, so they are killed after a grace period.

    Args:
        arguments: arguments of the Python interpreter.
        ranks: number of processes.
        logs: a folder for their output, as `rank-0.log` and so on; None: they print to this process's output.
        sockets: one for each rank, which inherits it and finds it in `TURN`; closed here.
        cancelled: if it is set, all are killed.

    Returns:
        Rank -> exit code, in the order in which they ended, without the ranks that were killed.
    """
    cancelled = cancelled or threading.Event()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    common |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    processes: list[subprocess.Popen[bytes]] = []
    codes: dict[int, int] = {}
    deadline = math.inf
    try:
        for rank in range(ranks):
            environment = {**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            output = None if logs is None else (logs / f"rank-{rank}.log").open("wb")
            command = [sys.executable, *arguments]
            inherited = [] if sockets is None else [sockets[rank].fileno()]
            if inherited:
                environment[TURN] = str(inherited[0])
            processes.append(
                subprocess.Popen(command, env=environment, stdout=output, stderr=output, pass_fds=inherited)
            )
            if output is not None:
                output.close()
            if sockets is not None:
                sockets[rank].close()  # so that the rank's end closes the connection
        while len(codes) < ranks and time.monotonic() < deadline and not cancelled.is_set():
            for rank, process in enumerate(processes):
                if rank not in codes and (code := process.poll()) is not None:
                    codes[rank] = code
            if any(codes.values()):
                deadline = min(deadline, time.monotonic() + GRACE)
            time.sleep(0.01)
        return codes
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
