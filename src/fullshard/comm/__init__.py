"""Communication: the `Comm` protocol and its implementations."""

from ..errors import invalid_argument
from .custom import AllGather, ReduceScatter, custom, custom_of, separate_group
from .group_memory import GatherInGroupMemory, ReduceInGroupMemory
from .hook import HookComm
from .lanes import (
    ONE_STREAM,
    Lanes,
    OneStream,
    Turns,
    begin_copy_to_host,
    captures,
    copy_to_host,
    has_streams,
    host_buffer,
    lanes_of,
    timed_event,
    turns_on,
)
from .meeting import apart_of, can_open, new_name, own_lines
from .objects import object_from, objects_of_all, objects_to_first
from .packing import Packing, packed, packed_bytes, rounded
from .power_sgd import PowerSGDState, Residuals, powerSGD_hook
from .protocol import (
    DONE,
    Comm,
    Costs,
    Gathers,
    NullComm,
    Pending,
    Several,
    exchange_of,
    gathers_of,
    reduction_of,
)
from .torch_comm import TorchComm
from .values import largest_value, reduce_value, values_of_all
from .watched import Watched


def make_comm(kind: "str | Comm") -> Comm:
    """The `Comm` of that name ("torch" or "null"), or `kind` itself if it is a `Comm` already.

    Raises:
        ConfigError: unknown name.
    """
    if kind == "torch":
        return TorchComm()
    if kind == "null":
        return NullComm()
    if isinstance(kind, str) or not hasattr(kind, "gather"):
        raise invalid_argument("comm", kind, '"torch", "null" or an object with the methods of fullshard.Comm')
    return kind
