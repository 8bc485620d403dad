"""The threads of gloo's process groups, and their rest before the interpreter ends.

A thread of gloo's lets go of a collective's tensors a moment after whoever waited for it goes on, and takes the
interpreter's lock for it. Where the interpreter is being taken down by then, it ends the thread in the middle of C++,
and that the process: "terminate called without an active exception", exit code -6, after all was done. Seen with plain
torch 2.13 in 1 of 10 programs of two ranks on a loaded machine, whatever they train with.

Private torch API: the threads' name, and only as Linux tells it. The public alternative is `destroy_process_group`,
which waits for them if nothing else holds the group, as units do. `tests/test_private_api.py` tells a changed name.
"""

from __future__ import annotations

import atexit
import os
import time

GLOO_THREAD = "pt_gloo_runloop"
_TASKS = "/proc/self/task"
_POLL = 0.001  # seconds
_POLLS = 3  # in a row that find nothing running: a thread may wait for another one for an instant


def rest_at_exit() -> None:
    """Let the process end only once gloo's threads have let go of what they hold; for every call to come."""
    atexit.unregister(wait_for_rest)
    atexit.register(wait_for_rest)


def wait_for_rest(limit: float = 2.0) -> bool:
    """Wait until no thread of gloo's runs; those that wait for other ranks do not.

    Args:
        limit: seconds after which to go on all the same.

    Returns:
        Whether they rest. True at once where there are none, or they cannot be seen.
    """
    deadline, quiet = time.monotonic() + limit, 0
    while quiet < _POLLS:
        states = gloo_states()
        if not states:
            return True
        quiet = 0 if "R" in states else quiet + 1
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL)  # without the interpreter's lock, which is what they may wait for
    return True


def gloo_states() -> list[str]:
    """What each thread of gloo's does, as Linux tells it: "R" runs or is about to, "S" waits."""
    found = []
    for task in os.listdir(_TASKS) if os.path.isdir(_TASKS) else ():
        try:
            with open(f"{_TASKS}/{task}/stat") as file:
                name, _, rest = file.read().partition("(")[2].rpartition(")")
        except OSError:  # it has ended
            continue
        if name == GLOO_THREAD:
            found.append(rest.split()[0])
    return found
