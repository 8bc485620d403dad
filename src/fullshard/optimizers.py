"""What an optimizer's groups hold beside its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NOT_SETTINGS = frozenset({"params", "param_names"})
"""The keys of a group that are not settings."""
SCHEDULED = frozenset({"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"})
"""Settings that torch's schedulers add to groups."""


def group_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a parameter group."""
    return {key: value for key, value in group.items() if key not in NOT_SETTINGS}
