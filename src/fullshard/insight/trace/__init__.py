"""The events of all ranks on one timeline: why a step is slow, and which rank is late.

Reading a recording needs no torch, so `event_file.py`, which does, is not imported here.
"""

from .analyse import Analysis, analyse
from .merge import RunTrace, read
from .picture import draw_step
from .timeline import chrome_trace, html_page, report

__all__ = ["Analysis", "RunTrace", "analyse", "chrome_trace", "draw_step", "html_page", "read", "report"]
