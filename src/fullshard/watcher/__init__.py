"""The watcher: a thread of each rank that says what ranks wait for, who is gone, and why.

`log.py` is what a rank issued, `rank.py` what it tells and how it waits, `watcher.py` the thread, `report.py` what is
concluded and said, `calls.py` what stacks say, `proc.py` what the operating system does.
"""

from .log import (
    BACKWARD,
    CHECK,
    COMPARE,
    END,
    FORWARD,
    GATHER,
    KEEP,
    REDUCE,
    REGATHER,
    TURN,
    VERB_BITS,
    VERBS,
    step_word,
    word,
)
from .rank import RANK, SLICE, WatchSettings, watch
from .watcher import start

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
    "VERB_BITS",
    "WatchSettings",
    "start",
    "step_word",
    "watch",
    "word",
]
