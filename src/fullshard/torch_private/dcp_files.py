"""The files of `torch.distributed.checkpoint`: the locations of pieces, and the classes in metadata.

Private torch API: `filesystem._StorageInfo` (which file, where, how long), and the classes whose names are in
`.metadata`, which is a pickle. The public alternative is `FileSystemReader.read_metadata`, which executes what that
pickle says. `tests/test_private_api.py` says when one goes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata

StorageInfo: Any = filesystem._StorageInfo
CURRENT_DCP_VERSION: str = getattr(filesystem, "CURRENT_DCP_VERSION", "1.0.0")

NAMED_IN_METADATA: dict[tuple[str, str], Any] = {
    **{
        (metadata.__name__, name): getattr(metadata, name)
        for name in (
            *("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
            *("TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING"),
        )
    },
    (filesystem.__name__, "_StorageInfo"): StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("collections", "OrderedDict"): dict,
    **{("torch", name): dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)},
}
"""What the pickle may name: classes without side effects, by module and name."""
