"""The words of a trace's errors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...errors import ConfigError


def cannot_write(path: Path, problems: dict[int, str]) -> ConfigError:
    rank, problem = next(iter(problems.items()))
    return ConfigError(f"trace(): cannot write to {str(path)!r} on rank {rank}.", rank=rank, got=problem)


def no_files(paths: list[Path]) -> ConfigError:
    return ConfigError(f"no trace in {', '.join(map(str, paths))}: a folder of fullshard.trace has rank-*.json files")


def not_a_trace(path: Path, why: str) -> ConfigError:
    return ConfigError(f"{path} is not a file of fullshard.trace: {why}")


def two_runs(first: Path, other: Path) -> ConfigError:
    return ConfigError(f"{other} is of another run than {first}: keep one folder for each run")


def same_rank(first: Path, other: Path) -> ConfigError:
    return ConfigError(f"{first} and {other} are of the same rank")


def unknown_picture(path: Path, kinds: Sequence[str]) -> ConfigError:
    """The error for a picture whose name has another ending."""
    return ConfigError(f"{path}: a picture's name ends in one of {', '.join(kinds)}")


def nothing_to_draw() -> ConfigError:
    """The error for a picture of a trace without steps."""
    return ConfigError("no step to draw: none was recorded on all ranks from its begin to its end")


def no_matplotlib() -> ConfigError:
    """The error for a picture where matplotlib is not installed."""
    return ConfigError("a picture needs matplotlib, which is not installed (pip install matplotlib)")
