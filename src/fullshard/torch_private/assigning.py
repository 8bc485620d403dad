"""Whether a `load_state_dict` that runs now was given `assign=True`.

Private torch API: the key `assign_to_params_buffers` of the metadata that load pre-hooks are given. There is no public
alternative: hooks are not told. `tests/test_private_api.py` says when it goes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def is_assigning(local_metadata: Mapping[str, Any]) -> bool:
    """Whether the load whose pre-hook was given `local_metadata` puts tensors in the place of parameters."""
    return bool(local_metadata.get("assign_to_params_buffers", False))
