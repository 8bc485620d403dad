"""Optimizer views, Muon and OwnerOptimizer; gradient clipping, gradient scaling, and detection of nonfinite values."""

from .clip import clip_grad_norm_
from .in_backward import StepsInBackward, step_in_backward
from .muon import Muon
from .nonfinite import NonfiniteGradient, nonfinite_gradients
from .optimizer_views import optimizer_view
from .owner_optimizer import OwnerOptimizer
from .scaler import ShardedGradScaler
from .state_on_host import StateOnHost, optimizer_state_on_host

__all__ = [
    "Muon",
    "NonfiniteGradient",
    "OwnerOptimizer",
    "ShardedGradScaler",
    "StateOnHost",
    "StepsInBackward",
    "clip_grad_norm_",
    "nonfinite_gradients",
    "optimizer_state_on_host",
    "optimizer_view",
    "step_in_backward",
]
