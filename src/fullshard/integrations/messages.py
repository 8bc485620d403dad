"""The wording of errors of the integrations."""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import PhaseError, PrivateNameError

# adopt.py


def adopted_late(uses: Iterable[str]) -> PhaseError:
    """The error for `adopt` after the program imported what it replaces; `uses` says what, where."""
    return PhaseError(
        "This program uses PyTorch's FSDP already, which adopt() can only replace before it is imported.",
        got="; ".join(uses),
        remedy="start the program by: python -m fullshard adopt SCRIPT; or call fullshard.adopt() first, before these "
        "imports",
        code="P029",
    )


# private.py, adopted.py


def private_name(path: str, verb: str, where: str, instead: str) -> PrivateNameError:
    """The error for a program's use of a private name; `where` is its module, file and line."""
    return PrivateNameError(
        f"This program {verb} {path}, which is private in PyTorch and has no part in how Fullshard shards.",
        got=where,
        remedy=f"{instead}; or adopt leniently (--lenient), if the program can do without",
        code="C133",
    )


def memory_tracker() -> PrivateNameError:
    """The error for PyTorch's `FSDPMemTracker`."""
    return PrivateNameError(
        "FSDPMemTracker replaces private methods of PyTorch's units, which Fullshard's do not have.",
        remedy="fullshard.memory_use(model) before a step and after it; fullshard.record_events() for what comes "
        "and goes within one",
        code="C134",
    )
