"""Whether a sharded model trains as the unsharded one does: a few steps of both, compared value by value."""

from .findings import Finding, Report
from .run import verify

__all__ = ["Finding", "Report", "verify"]
