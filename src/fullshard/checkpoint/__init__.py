"""State dicts and checkpoints."""

from .functions import load_optimizer_state_dict, optimizer_state_dict

__all__ = ["load_optimizer_state_dict", "optimizer_state_dict"]
