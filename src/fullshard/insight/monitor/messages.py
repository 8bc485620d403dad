"""The monitor's errors."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import ConfigError, DivergenceError, PhaseError


def tokens_on_device(device: object) -> ConfigError:
    """The error for a number of tokens that `Monitor.step` would have to wait for."""
    return ConfigError(
        "Monitor: tokens must be an int of at least 0, or a tensor of one integer on the CPU.",
        got=f"a tensor on {device}",
        remedy="pass tokens.item(), which waits for the device, or count the tokens before the batch is moved there",
    )


def cannot_write(name: str, path: object, error: OSError) -> ConfigError:
    """The error for an output that cannot be written."""
    return ConfigError(f"Monitor: {name} cannot be written.", got=f"{path}: {error.strerror or error}")


def no_tensorboard(error: ImportError) -> ConfigError:
    """The error for `tensorboard=` when TensorBoard is not installed."""
    return ConfigError(
        "Monitor: tensorboard= needs TensorBoard, which is not installed.",
        got=str(error),
        remedy="pip install tensorboard",
    )


def different_steps(ranks: Sequence[int], steps: Sequence[int]) -> DivergenceError:
    """The error for ranks whose step numbers differ in a report."""
    return DivergenceError(
        "Ranks called Monitor.step() a different number of times.",
        expected="the same step on all ranks",
        got=", ".join(f"rank {rank}: step {step:,}" for rank, step in list(zip(ranks, steps, strict=True))[:8]),
        remedy="call step() once per optimizer step on every rank, with the same start_step and every",
    )


def closed() -> PhaseError:
    """The error for a step after `close()`."""
    return PhaseError("Monitor.step() was called after close().")
