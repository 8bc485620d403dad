"""Starts runs of `program.py` by forking: importing torch takes longer than most of them.

Reads a line of JSON from stdin: a list of runs, {"front_end", "scenario", "world", "folder", "limit", "patience"}. Some
are under way at once, as ranks mostly wait. A process per rank, whose output goes to `FOLDER/out.RANK`; those that are
stopped when all others have ended are killed. Prints {"folder", "exits": [status of each rank]} for each run that is
over: a number, as of `subprocess`, or None for a rank that had to be killed when `patience` seconds were over.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import program

AT_ONCE = 3


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


class Run:
    """One run's ranks, begun on construction."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.folder, self.world = str(order["folder"]), int(order["world"])
        self.deadline = time.monotonic() + float(order["patience"])
        self.exits: dict[int, int | None] = {}
        self.ranks: dict[int, int] = {}
        for rank in range(self.world):
            argv = [order["front_end"], order["scenario"], rank, self.world, self.folder, order["limit"]]
            self.ranks[rank] = start([str(each) for each in argv], f"{self.folder}/out.{rank}")

    def is_over(self) -> bool:
        """Looks after the ranks: who has ended, and who has to be killed."""
        late = time.monotonic() > self.deadline
        for rank, pid in self.ranks.items():
            if rank not in self.exits:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    self.exits[rank] = os.waitstatus_to_exitcode(status)
        left = [rank for rank in self.ranks if rank not in self.exits]
        if late or (left and all(is_stopped(self.ranks[rank]) for rank in left)):
            for rank in left:
                os.kill(self.ranks[rank], signal.SIGKILL)
                if late:
                    os.waitpid(self.ranks[rank], 0)
                    self.exits[rank] = None
        return len(self.exits) == self.world

    def answer(self) -> str:
        return json.dumps({"folder": self.folder, "exits": [self.exits[rank] for rank in range(self.world)]})


def is_stopped(pid: int) -> bool:
    text = Path(f"/proc/{pid}/stat").read_text()
    return text[text.rindex(")") + 2] == "T"


def main() -> bool:
    """Serve the runs; returns whether this is a rank now."""
    waiting, running = json.loads(sys.stdin.readline()), []
    try:
        while waiting or running:
            while waiting and len(running) < AT_ONCE:
                running.append(Run(waiting.pop(0)))
            time.sleep(0.05)
            for run in [run for run in running if run.is_over()]:
                running.remove(run)
                print(run.answer(), flush=True)
    except RankStarts:
        return True
    return False


if __name__ == "__main__":
    if main():
        program.main()
