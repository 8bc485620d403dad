"""Monitors a running training loop: `Monitor` measures and gathers, `report` computes, `outputs` writes."""

from .monitor import Monitor
from .report import Report

__all__ = ["Monitor", "Report"]
