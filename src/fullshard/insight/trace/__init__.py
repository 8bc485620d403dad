"""The events of all ranks on one timeline: why a step is slow, and which rank is late."""

from .analyse import Analysis, analyse
from .chrome import chrome_trace
from .html import html_page, report
from .merge import Run, read
from .picture import draw_step
from .record import Recording, trace

__all__ = [
    "Analysis",
    "Recording",
    "Run",
    "analyse",
    "chrome_trace",
    "draw_step",
    "html_page",
    "read",
    "report",
    "trace",
]
