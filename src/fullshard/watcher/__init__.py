"""The watcher: a thread of each rank that says what ranks wait for, who is gone, and why.

To be read in this order: `log.py` is what a rank issued, `rank.py` what it tells its watcher and how it waits,
`roll_call.py` the thread, `judge.py` what is concluded, `messages.py` what is said; `process.py` what a process does.
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
from .rank import RANK, SLICE, watch
from .roll_call import start

__all__ = [
    "BACKWARD", "CHECK", "COMPARE", "END", "FORWARD", "GATHER", "KEEP", "RANK", "REDUCE", "REGATHER", "SLICE", "TURN",
    "VERBS", "VERB_BITS", "start", "step_word", "watch", "word",
]  # fmt: skip
