"""Wrap policies, under the names of `torch.distributed.fsdp.wrap`, and `plan_wrapping`, which applies them."""

from .api.wrapping import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    enable_wrap,
    lambda_auto_wrap_policy,
    plan_wrapping,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
)
from .api.wrapping import (
    or_policy as _or_policy,
)

__all__ = [
    "CustomPolicy",
    "ModuleWrapPolicy",
    "_or_policy",
    "always_wrap_policy",
    "enable_wrap",
    "lambda_auto_wrap_policy",
    "plan_wrapping",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "wrap",
]
