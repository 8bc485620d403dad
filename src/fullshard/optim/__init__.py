"""Optimizer views, gradient clipping and scaling."""

from .clip import clip_grad_norm_, total_norm
from .scaler import ShardedGradScaler
from .views import optimizer_view

__all__ = ["ShardedGradScaler", "clip_grad_norm_", "optimizer_view", "total_norm"]
