"""Whether the checkpoint that is being planned goes to a writer that keeps one tensor for each name and rank.

Private torch API: `FileSystemWriter.serialization_format`, and the name `storage_writer` of a local variable of
`torch.distributed.checkpoint.save`. There is no public alternative: a tensor that says which pieces of it are to be
written is not told by whom, and the safetensors format of torch 2.13 overwrites all pieces of one name but the last,
without a word. `tests/corners/test_saving_shards.py` says when this goes.
"""

from __future__ import annotations

import sys
from typing import Any


def writes_safetensors() -> bool:
    """Whether a caller of this function saves through a writer of safetensors files (Hugging Face's)."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        writer = frame.f_locals.get("storage_writer")
        if writer is not None:
            return getattr(getattr(writer, "serialization_format", None), "value", None) == "safetensors"
        frame = frame.f_back
    return False
