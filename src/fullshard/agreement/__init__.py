"""Checks that all ranks agree: same model, same initial weights, same collectives, same optimizer steps.

`start.py` runs when a model is new, at its first forward; `first_pass.py` during the first pass of each kind;
`position.py` before a rank issues anything that is new in its log (`log.py`); `shared_order.py` where ranks may run
different units; `stale.py` when a pass begins with gathered units; `use.py` at the end of each backward. They compare
integers by `exchange.py`.
"""

from .first_pass import FirstPass, largest_mesh
from .log import LEAVE, NOTHING, VERB
from .position import Every, Position, checked
from .shared_order import SharedOrder
from .stale import Stale
from .start import Line, arrive, broadcast_states, check_same_model, check_same_weights, meet, meet_jointly
from .use import UseAgreement
