"""Which modules become units: policies, and the wrapping plan that follows from a policy."""

from .plan import Planned, plan_wrapping, post_order, repeated_blocks
from .policies import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    enable_wrap,
    lambda_auto_wrap_policy,
    or_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
)

__all__ = [
    "CustomPolicy",
    "ModuleWrapPolicy",
    "Planned",
    "always_wrap_policy",
    "enable_wrap",
    "lambda_auto_wrap_policy",
    "or_policy",
    "plan_wrapping",
    "post_order",
    "repeated_blocks",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "wrap",
]
