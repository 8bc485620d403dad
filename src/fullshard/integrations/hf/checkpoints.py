"""Checkpoints of a `Trainer`: which of them are whole."""

from __future__ import annotations

import json
import os
import re
import warnings
from pathlib import Path

from ...errors import message

STATE = "trainer_state.json"
"""What Trainer writes into a checkpoint last, once all ranks have written their parts."""


def last_whole(folder: str | os.PathLike[str]) -> str | None:
    """The checkpoint with the highest step among those that were finished; others after it are warned of.

    Args:
        folder: a Trainer's `output_dir`.
    """
    named = [(re.fullmatch(r"checkpoint-(\d+)", one.name), one) for one in Path(folder).glob("checkpoint-*")]
    for _, checkpoint in sorted([(int(found[1]), one) for found, one in named if found is not None], reverse=True):
        if _is_whole(checkpoint):
            return str(checkpoint)
        warnings.warn(
            message(
                "A checkpoint was not finished, and is passed over: the run was broken off while it was written.",
                expected=f"{STATE}, which is written last",
                got=str(checkpoint),
                remedy="remove it",
            ),
            stacklevel=3,
        )
    return None


def _is_whole(checkpoint: Path) -> bool:
    try:
        return isinstance(json.loads((checkpoint / STATE).read_text()), dict)
    except (OSError, ValueError):
        return False
