"""Starts runs of `program.py` by forking: importing torch takes longer than most of them.

Reads a line of JSON per run from stdin: {"front_end", "scenario", "world", "folder", "limit", "patience"}; forks a
process per rank, whose output goes to `FOLDER/out.RANK`; waits until all have ended, but for those that are stopped
when all others have, which it kills; and prints {"exits": [status of each rank]}: a number, as of `subprocess`, or None
for a rank that had to be killed when `patience` seconds were over.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import program


def start(argv: list[str], out: str) -> int:
    """Fork a rank; returns its process id. In the rank it never returns."""
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    for fd, target in ((0, os.devnull), (1, out), (2, out)):
        opened = os.open(target, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, fd)
        os.close(opened)
    sys.argv[1:] = argv
    raise RankStarts


class RankStarts(BaseException):
    """Leaves the zygote's loop, so that a rank ends as any program does."""


def run(order: dict[str, str | int | float]) -> dict[str, object]:
    world, folder = int(order["world"]), str(order["folder"])
    began = time.monotonic()
    ranks = {}
    for rank in range(world):
        argv = [order["front_end"], order["scenario"], rank, world, folder, order["limit"]]
        ranks[rank] = start([str(each) for each in argv], f"{folder}/out.{rank}")
    exits: dict[int, int | None] = {}
    while len(exits) < world:
        time.sleep(0.05)
        for rank, pid in ranks.items():
            if rank not in exits:
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    exits[rank] = os.waitstatus_to_exitcode(status)
        left = [rank for rank in ranks if rank not in exits]
        late = time.monotonic() - began > float(order["patience"])
        if left and all(is_stopped(ranks[rank]) for rank in left):
            for rank in left:
                os.kill(ranks[rank], signal.SIGKILL)
        elif late:
            for rank in left:
                os.kill(ranks[rank], signal.SIGKILL)
                os.waitpid(ranks[rank], 0)
                exits[rank] = None
    return {"exits": [exits[rank] for rank in range(world)]}


def is_stopped(pid: int) -> bool:
    text = Path(f"/proc/{pid}/stat").read_text()
    return text[text.rindex(")") + 2] == "T"


def main() -> bool:
    """Serve runs until stdin ends; returns whether this is a rank now."""
    try:
        for line in sys.stdin:
            print(json.dumps(run(json.loads(line))), flush=True)
    except RankStarts:
        return True
    return False


if __name__ == "__main__":
    if main():
        program.main()
