"""Whether all ranks do the same: hold one model, start from the same weights, issue the same, step alike.

`model.py` and `weights.py` are asked at a model's first forward, `first_pass.py` along the first pass of each kind,
`position.py` before anything new is issued, `in_step.py` before everything in some backwards, `use.py` at the end of
each backward, `stale.py` where a pass begins with gathered units. `meeting.py` makes ranks' watchers known to each
other.
"""

from .course import NOTHING, VERB
from .guide import Guide
from .in_step import InStep
from .meeting import arrive, meet
from .model import Line, check_same_model
from .position import Every, Position, checked
from .stale import Stale
from .start_alike import broadcast_states
from .use import UseAgreement
from .weights import check_same_weights

__all__ = [
    "NOTHING",
    "VERB",
    "Every",
    "Guide",
    "InStep",
    "Line",
    "Position",
    "Stale",
    "UseAgreement",
    "arrive",
    "broadcast_states",
    "check_same_model",
    "check_same_weights",
    "checked",
    "meet",
]
