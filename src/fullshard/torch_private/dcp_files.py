"""The locations of pieces in the files of `torch.distributed.checkpoint`.

Private torch API: `filesystem._StorageInfo` (which file, where, how long), which `.metadata` contains for every piece.
The public alternative is to write with `torch.distributed.checkpoint.save`, which has all tensors in memory at once.
`tests/test_private_api.py` says when it goes.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint import filesystem

StorageInfo: Any = filesystem._StorageInfo
CURRENT_DCP_VERSION: str = getattr(filesystem, "CURRENT_DCP_VERSION", "1.0.0")
