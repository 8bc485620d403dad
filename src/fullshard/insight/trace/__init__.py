"""The events of all ranks on one timeline: why a step is slow, and which rank is late."""

from .analyse import Analysis, analyse
from .merge import Run, read
from .picture import draw_step
from .record import Recording, trace
from .timeline import chrome_trace, html_page, report

__all__ = [
    "Analysis", "Recording", "Run", "analyse", "chrome_trace", "draw_step", "html_page", "read", "report", "trace",
]  # fmt: skip
