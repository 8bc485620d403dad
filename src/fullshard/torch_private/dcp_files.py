"""The files of `torch.distributed.checkpoint`: the locations of pieces, and the classes in metadata.

Private torch API: `filesystem._StorageInfo` (file, offset, length), `filesystem._StoragePrefix` (names of a rank's
files), `_fsspec_filesystem.FsspecWriter`, and the classes named in `.metadata`, which is a pickle. The public
alternative is `FileSystemReader.read_metadata`, which executes whatever that pickle contains.
`tests/test_private_api.py` fails when one is gone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata

StorageInfo: Any = filesystem._StorageInfo
StoragePrefix: Any = filesystem._StoragePrefix
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
"""The classes that the pickle may name, all without side effects, by module and name."""


def fsspec_writer() -> Any:
    """DCP's writer class for fsspec addresses, such as `s3://bucket/folder`."""
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

    return FsspecWriter
