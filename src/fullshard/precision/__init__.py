"""Dtype policy and casts."""

from .policy import MixedPrecisionPolicy, cast_floating

__all__ = ["MixedPrecisionPolicy", "cast_floating"]
