"""The watcher: a thread of each rank that reports what ranks wait for, which rank is gone, and why.

Read in this order: `issued.py`, what a rank issued; `rank.py`, what it reports to its watcher and how it waits;
`roll_call.py`, the thread; `judge.py`, the verdict; `messages.py`, the wording; `process.py`, what a process is doing.
"""

from .issued import (
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
from .process import users_level
from .rank import RANK, SLICE, watch
from .roll_call import start

__all__ = [
    "BACKWARD", "CHECK", "COMPARE", "END", "FORWARD", "GATHER", "KEEP", "RANK", "REDUCE", "REGATHER", "SLICE", "TURN",
    "VERBS", "VERB_BITS", "start", "step_word", "users_level", "watch", "word",
]  # fmt: skip
