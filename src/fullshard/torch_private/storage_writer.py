"""Whether the checkpoint being planned goes to a writer that keeps only one tensor per name and rank.

Private torch API: `FileSystemWriter.serialization_format`, and the name `storage_writer` of a local variable of
`torch.distributed.checkpoint.save`. There is no public alternative: a tensor that lists its pieces to write does not
learn the writer, and the safetensors format of torch 2.13 silently overwrites all pieces of a name but the last.
`tests/corners/test_saving_shards.py` fails when this is gone.
"""

from __future__ import annotations

import sys
from typing import Any


def writes_safetensors() -> bool:
    """Whether a caller of this function is saving through a writer of safetensors files (Hugging Face's)."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        writer = frame.f_locals.get("storage_writer")
        if writer is not None:
            return getattr(getattr(writer, "serialization_format", None), "value", None) == "safetensors"
        frame = frame.f_back
    return False
