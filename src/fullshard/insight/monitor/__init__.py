"""Monitors a running training loop: `Monitor` measures and gathers, `report` computes, `report_writer` writes."""

from .monitor import Monitor
from .report import Report

__all__ = ["Monitor", "Report"]
