"""Pure plans of where parameters lie in a bucket, and which rank owns which elements."""

from .copies import Columns, columns_of, copies_out
from .kinds import plan_flat, plan_rows
from .pack import Blocks, least_slice, plan_blocks, plan_owner
from .plan import ALIGN_BYTES, Layout, ParameterSpec, Part, Piece, Segment, Slot, dense_strides, round_up
from .rectangles import Rectangle, rectangles
from .windows import Window, window_of

__all__ = [
    "ALIGN_BYTES",
    "Blocks",
    "Columns",
    "Layout",
    "ParameterSpec",
    "Part",
    "Piece",
    "Rectangle",
    "Segment",
    "Slot",
    "Window",
    "columns_of",
    "copies_out",
    "dense_strides",
    "least_slice",
    "plan_blocks",
    "plan_flat",
    "plan_owner",
    "plan_rows",
    "rectangles",
    "round_up",
    "window_of",
]
