"""Waits for gloo's threads to become idle before the interpreter exits.

A gloo thread releases a collective's tensors a moment after the waiting thread continues, and takes the interpreter's
lock for that. If the interpreter is shutting down by then, it ends the thread in the middle of C++, which ends the
process: "terminate called without an active exception", exit code -6, after all work was done. Seen with plain torch
2.13 in 1 of 10 programs of two ranks on a loaded machine, whatever they train with.

Private torch API: the threads' name, and only as Linux reports it. The public alternative is `destroy_process_group`,
which waits for the threads if nothing else refers to the group, but units do. `tests/test_private_api.py` fails when
the name changes.
"""

from __future__ import annotations

import atexit
import os
import time

GLOO_THREAD = "pt_gloo_runloop"
_TASKS = "/proc/self/task"
_POLL = 0.001  # seconds
_POLLS = 3  # consecutive polls without a running thread: one may wait for another for an instant


def rest_at_exit() -> None:
    """At exit, wait until gloo's threads have released their tensors."""
    atexit.unregister(wait_for_rest)
    atexit.register(wait_for_rest)


def wait_for_rest(limit: float = 2.0) -> bool:
    """Wait until no gloo thread runs; threads that wait for other ranks do not count as running.

    Args:
        limit: seconds after which to stop waiting.

    Returns:
        Whether all are idle. True at once if there are none, or if they cannot be seen.
    """
    deadline, quiet = time.monotonic() + limit, 0
    while quiet < _POLLS:
        states = gloo_states()
        if not states:
            return True
        quiet = 0 if "R" in states else quiet + 1
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL)  # releases the interpreter's lock, for which they may wait
    return True


def gloo_states() -> list[str]:
    """The state of each gloo thread as Linux reports it: "R" runs or is about to, "S" waits."""
    states = []
    for task in os.listdir(_TASKS) if os.path.isdir(_TASKS) else ():
        try:
            with open(f"{_TASKS}/{task}/stat") as file:
                name, _, rest = file.read().partition("(")[2].rpartition(")")
        except OSError:  # it has ended
            continue
        if name == GLOO_THREAD:
            states.append(rest.split()[0])
    return states
