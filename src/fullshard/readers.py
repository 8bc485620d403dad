"""What reads parameters and optimizer state beside training: a snapshot that a thread copies (`store/background.py`).

Whoever is about to change them calls `wait_for_readers` first: an optimizer's step, an operation on a sharded
parameter, a load. Imports nothing of the package, so that every floor can call it.
"""

from __future__ import annotations

from collections.abc import Callable

READERS: dict[Callable[[], object], None] = {}
"""Functions that wait for the end of a reader. Empty, except after a save until the first wait."""


def wait_for_readers() -> None:
    """Wait until nothing reads parameters and optimizer state beside training. From any thread."""
    for wait in [*READERS]:
        wait()
        READERS.pop(wait, None)
