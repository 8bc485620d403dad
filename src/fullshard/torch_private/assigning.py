"""Whether the running `load_state_dict` was called with `assign=True`.

Private torch API: the key `assign_to_params_buffers` of the metadata that load pre-hooks receive. There is no public
alternative: nothing else informs hooks. `tests/test_private_api.py` fails when it is gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def is_assigning(local_metadata: Mapping[str, Any]) -> bool:
    """Whether the load whose pre-hook received `local_metadata` replaces parameters by the loaded tensors."""
    return bool(local_metadata.get("assign_to_params_buffers", False))
