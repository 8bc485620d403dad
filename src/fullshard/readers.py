"""Readers of parameters and optimizer state beside training: a snapshot that a thread copies (`store/background.py`).

Whoever is about to change them calls `wait_for_readers` first: an optimizer's step, an operation on a sharded
parameter, a load. Imports nothing of the package, and calls nothing of it: every floor may wait, for a fact alone.
"""

from __future__ import annotations

import threading

READERS: dict[threading.Event, None] = {}
"""Set at the end of a reader. Empty, except after a save until the first wait."""


def wait_for_readers() -> None:
    """Wait until nothing reads parameters and optimizer state beside training. From any thread."""
    for ended in [*READERS]:
        ended.wait()
        READERS.pop(ended, None)
