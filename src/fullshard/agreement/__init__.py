"""Checks that all ranks agree: same model, same initial weights, same collectives, same optimizer steps.

`log.py` records what a rank issues. `model.py` and `weights.py` run at a model's first forward, `first_pass.py` during
the first pass of each kind, `position.py` before a rank issues anything new, `shared_order.py` where ranks may run
different units, `use.py` at the end of each backward, `stale.py` when a pass begins with gathered units. `meeting.py`
starts the watchers and opens the engine's own connections.
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
