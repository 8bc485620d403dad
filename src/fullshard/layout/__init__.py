"""Pure plans of where parameters lie in a bucket, and which rank owns which elements."""

from .copies import Columns, columns_of, copies_out
from .kinds import LITTLE_PADDING, SOME_PADDING, plan_flat, plan_rows
from .layout import ALIGN_BYTES, Layout, ParameterSpec, Part, Slot, StridedCopy, dense_strides, run_on_rank
from .pack import Blocks, least_slice, plan_blocks, plan_owner
from .rectangles import rectangles
from .windows import Window, window_of
