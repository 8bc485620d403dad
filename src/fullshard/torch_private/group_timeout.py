"""The timeout of a process group.

Private torch API: `ProcessGroup._get_backend(device).options._timeout`. There is no public alternative: a group's
timeout can be set (`new_group(timeout=)`) and not be read. Where it is missing the default of torch's is assumed.
`tests/test_private_api.py` says when it goes.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

DEFAULT = timedelta(minutes=30)


def timeout_of(group: dist.ProcessGroup, device_type: str = "cpu") -> timedelta:
    """How long a collective of the group may take."""
    try:
        found = group._get_backend(torch.device(device_type)).options._timeout
    except (RuntimeError, AttributeError):  # no such backend, or one without options
        return DEFAULT
    return found if isinstance(found, timedelta) else DEFAULT
