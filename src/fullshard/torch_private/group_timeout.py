"""The timeout of a process group.

Private torch API: `ProcessGroup._get_backend(device).options._timeout`. There is no public alternative: a group's
timeout can be set (`new_group(timeout=)`) but not read. If it is missing torch's default is assumed.
`tests/test_private_api.py` fails when it is gone.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

DEFAULT = timedelta(minutes=30)


def timeout_of(group: dist.ProcessGroup, device_type: str = "cpu") -> timedelta:
    """The time limit of the group's collectives."""
    try:
        timeout = group._get_backend(torch.device(device_type)).options._timeout
    except (RuntimeError, AttributeError):  # no such backend, or a backend without options
        return DEFAULT
    return timeout if isinstance(timeout, timedelta) else DEFAULT
