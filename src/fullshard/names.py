"""Names as users wrote them, without what wrapping put into them."""

from __future__ import annotations

WRAPPED = "_fsdp_wrapped_module"
"""The name under which a `FullyShardedDataParallel` instance holds the module it wraps."""
_INSERTED = (f"{WRAPPED}.", "_checkpoint_wrapped_module.")


def clean_name(name: str) -> str:
    """A parameter's name (or a prefix that ends in a dot) without what instances and checkpoint wrappers put in."""
    for part in _INSERTED:
        name = name.replace(part, "")
    return name


def clean_path(path: str) -> str:
    """A module's name, likewise."""
    return clean_name(f"{path}.")[:-1]
