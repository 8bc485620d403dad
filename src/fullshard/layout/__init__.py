"""Pure plans of where parameters lie and which rank owns what."""

from .kinds import plan_flat, plan_rows
from .plan import ALIGN_BYTES, Layout, ParameterSpec, Part, Piece, Segment, Slot, dense_strides, round_up
from .rectangles import Rectangle, rectangles

__all__ = [
    "ALIGN_BYTES",
    "Layout",
    "ParameterSpec",
    "Part",
    "Piece",
    "Rectangle",
    "Segment",
    "Slot",
    "dense_strides",
    "plan_flat",
    "plan_rows",
    "rectangles",
    "round_up",
]
