"""Optimizer views and Muon; gradient clipping, scaling, and a look for what is not finite."""

from .clip import clip_grad_norm_, total_norm
from .muon import Muon
from .nonfinite import NonfiniteGradient, nonfinite_gradients
from .scaler import ShardedGradScaler
from .views import optimizer_view

__all__ = [
    "Muon",
    "NonfiniteGradient",
    "ShardedGradScaler",
    "clip_grad_norm_",
    "nonfinite_gradients",
    "optimizer_view",
    "total_norm",
]
