"""Ranks that a command starts on this machine, as torchrun would."""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

GRACE = 20.0  # seconds that the other ranks get to end once one has failed
MOST_RANKS = 64
"""Processes that a command starts on one machine: each imports torch and takes about 300 MB."""


def run_ranks(arguments: list[str], ranks: int, logs: Path | None = None) -> dict[int, int]:
    """Run `python ARGUMENTS` as `ranks` processes until all have ended.

    Once one has failed the others get some seconds, as they may wait for it in vain; then they are killed.

    Args:
        arguments: of the Python interpreter.
        ranks: how many processes.
        logs: a folder for their outputs, `rank-0.log` and so on; None: they print where this process does.

    Returns:
        Exit codes by rank, of those that ended by themselves.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    common |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    processes: list[subprocess.Popen[bytes]] = []
    deadline = math.inf
    try:
        for rank in range(ranks):
            environment = {**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            output = None if logs is None else (logs / f"rank-{rank}.log").open("wb")
            command = [sys.executable, *arguments]
            processes.append(subprocess.Popen(command, env=environment, stdout=output, stderr=output))
            if output is not None:
                output.close()
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            if any(process.poll() for process in processes):
                deadline = min(deadline, time.monotonic() + GRACE)
            time.sleep(0.05)
        return {rank: code for rank, process in enumerate(processes) if (code := process.poll()) is not None}
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
