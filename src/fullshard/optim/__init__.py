"""Optimizer views and gradient clipping."""

from .clip import clip_grad_norm_, total_norm
from .views import optimizer_view

__all__ = ["clip_grad_norm_", "optimizer_view", "total_norm"]
