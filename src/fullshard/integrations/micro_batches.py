"""Backwards that only add gradients up, as client libraries ask for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..api.functional.module import FSDPModule


@contextmanager
def without_sync(model: FSDPModule, enabled: bool = True) -> Iterator[None]:
    """A context whose backwards reduce nothing, unless it is not `enabled`; the next one after it reduces all."""
    model.set_requires_gradient_sync(not enabled)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)
