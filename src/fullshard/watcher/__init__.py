"""The watcher: a process beside each rank that says what ranks wait for, who is gone, and why.

`board.py` is the memory that rank and watcher share, `rank.py` the rank's side, `process.py` the watcher's, `report.py`
what is concluded and said, `proc.py` what the operating system tells.
"""

from .board import BACKWARD, CHECK, COMPARE, END, FORWARD, GATHER, KEEP, REDUCE, REGATHER, TURN, VERBS, word
from .rank import RANK, SLICE, Address, WatchSettings, watch

__all__ = [
    "BACKWARD",
    "CHECK",
    "COMPARE",
    "END",
    "FORWARD",
    "GATHER",
    "KEEP",
    "RANK",
    "REDUCE",
    "REGATHER",
    "SLICE",
    "TURN",
    "VERBS",
    "Address",
    "WatchSettings",
    "watch",
    "word",
]
