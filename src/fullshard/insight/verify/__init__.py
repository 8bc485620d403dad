"""Whether a sharded model trains as the unsharded one does: a few steps of both, compared value by value."""

from .findings import Finding, VerifyReport
from .run import verify

__all__ = ["Finding", "VerifyReport", "verify"]
