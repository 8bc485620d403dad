"""The functions of `torch.distributed.checkpoint.state_dict`, for models that Fullshard shards."""

from torch.distributed.checkpoint.state_dict import StateDictOptions

from .checkpoint.functions import (
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

__all__ = [
    "StateDictOptions",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
]
