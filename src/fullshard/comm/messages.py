"""The wording of this package's errors, in the order of the code."""

from __future__ import annotations

from ..errors import ConfigError

# protocol.py


def no_exchange(kind: str) -> ConfigError:
    """The error for 8-bit reductions with collectives that cannot exchange packed gradients."""
    return ConfigError(
        "MixedPrecisionPolicy(scatter_dtype=, all_reduce_dtype=) needs collectives that exchange bytes between ranks.",
        expected='comm="torch", or a fullshard.Comm with a method exchange(axis, out, buffer)',
        got=f"comm {kind!r}",
        remedy="set both to None, or remove the custom reduce-scatter or comm",
    )


# custom.py


def wrong_buffer(collective: str, expected: object, got: object) -> ConfigError:
    """The error for an `allocate()` that returns a different tensor than requested."""
    return ConfigError(
        f"allocate() of the custom collective {collective} returned a different tensor than requested.",
        expected=f"{expected}",
        got=f"{got}",
        remedy="return torch.empty(size, dtype=dtype, device=device) from memory of your own",
    )


# group_memory.py


def no_group_memory(backend: str, device: object) -> ConfigError:
    """The error for a backend without memory of its own for communication."""
    return ConfigError(
        f"The {backend} backend does not allocate its own memory for communication.",
        expected="a backend with its own memory, such as nccl with NVLink SHARP or multicast",
        got=f"{backend} on {device}",
        remedy="do not call set_allocate_memory_from_process_group_for_comm(True) on this backend",
    )
