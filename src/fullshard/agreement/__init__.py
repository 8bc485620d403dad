"""Whether all ranks do the same: hold one model, start from the same weights, issue the same, step alike.

`log.py` is what a rank issues. `model.py` and `weights.py` are asked at a model's first forward, `first_pass.py` along
the first pass of each kind, `position.py` before anything new is issued, `shared_order.py` where ranks may run
different units, `use.py` at the end of each backward, `stale.py` where a pass begins with gathered units. `meeting.py`
makes ranks' watchers known to each other.
"""

from .first_pass import FirstPass
from .log import LEAVE, NOTHING, VERB
from .meeting import arrive, meet
from .model import Line, check_same_model
from .position import Every, Position, checked
from .shared_order import SharedOrder
from .stale import Stale
from .start_alike import broadcast_states
from .use import UseAgreement
from .weights import check_same_weights

__all__ = [
    "LEAVE",
    "NOTHING",
    "VERB",
    "Every",
    "FirstPass",
    "Line",
    "Position",
    "SharedOrder",
    "Stale",
    "UseAgreement",
    "arrive",
    "broadcast_states",
    "check_same_model",
    "check_same_weights",
    "checked",
    "meet",
]
