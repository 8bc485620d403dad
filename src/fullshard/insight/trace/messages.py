"""The wording of this package's errors, in the order of the code."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...errors import ConfigError
from ...text import counted

# event_file.py


def not_a_path(path: object) -> ConfigError:
    return ConfigError("trace() needs a folder.", expected="a path", got=repr(path))


def cannot_write(problems: dict[int, str]) -> ConfigError:
    """The error for a folder that a rank cannot write to; `problems`: rank -> reason."""
    rank, problem = next(iter(problems.items()))
    return ConfigError(
        f"trace(): {counted(len(problems), 'rank')} cannot write into the folder.",
        rank=rank,
        got=problem,
        remedy="pass a folder that exists, or can be created, on every rank, with room on its disk",
    )


# merge.py


def no_files(paths: list[Path]) -> ConfigError:
    """The error for paths without traces."""
    return ConfigError(f"no trace in {', '.join(map(str, paths))}: a folder of fullshard.trace has rank-*.json files")


def not_a_trace(path: Path, why: str) -> ConfigError:
    """The error for a file that is not a trace, or a damaged one."""
    return ConfigError(f"{path} is not a file of fullshard.trace: {why}")


def two_runs(first: Path, other: Path) -> ConfigError:
    """The error for files of different runs."""
    return ConfigError(f"{other} is from a different run than {first}: use a separate folder for each run")


def same_rank(first: Path, other: Path) -> ConfigError:
    """The error for two files of the same rank."""
    return ConfigError(f"{first} and {other} are from the same rank")


# picture.py


def unknown_picture(path: Path, kinds: Sequence[str]) -> ConfigError:
    """The error for a picture file with an unsupported suffix."""
    return ConfigError(f"{path}: the file name of a picture must end in {', '.join(kinds)}")


def nothing_to_draw() -> ConfigError:
    """The error for a picture of a trace without steps."""
    return ConfigError("no step to draw: the trace has no step that all ranks recorded from start to end")


def no_matplotlib() -> ConfigError:
    """The error for a picture where matplotlib is not installed."""
    return ConfigError("a picture needs matplotlib, which is not installed (pip install matplotlib)")
