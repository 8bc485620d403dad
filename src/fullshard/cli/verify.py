"""`fullshard verify SCRIPT-OR-MODULE:FUNCTION`.

FUNCTION takes nothing and returns the arguments of `fullshard.verify` as a dictionary (model_fn, batch_fn, loss_fn, and
others by name), or a Report that it made itself. It is called once there is a process group.
"""

from __future__ import annotations

import inspect
import os
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import tyro

from ..errors import ConfigError, class_to_catch
from . import terminal
from .main import refuse
from .ranks import MOST_RANKS, run_ranks
from .target import function_at

if TYPE_CHECKING:
    from ..insight.verify import Report

STYLES = {"^verify: ok": "bold green", "^verify: DIFFERENT": "bold red", "(?m)^  cause:.*$": "yellow"}


@dataclass(frozen=True)
class Arguments:
    """Train a few steps sharded and unsharded on the same batches, and report the first difference.

    The same by fullshard.verify in a program of yours. Example:

        fullshard verify train.py:check --ranks 2

    Exit code: 0 no difference, 1 a difference, 2 bad input. Under torchrun, each process is a rank; else use --ranks.
    """

    target: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SCRIPT-OR-MODULE:FUNCTION")]
    """a path to a .py file, or an importable module, and a function in it that returns the arguments of
    fullshard.verify (model_fn, batch_fn, loss_fn, ...) as a dictionary"""
    ranks: int = 1
    """processes to start on this machine"""
    steps: int | None = None
    """in place of the function's"""
    seed: int | None = None
    """in place of the function's"""
    tolerance: float | None = None
    """in place of the one by dtype"""


def run(arguments: list[str]) -> int:
    """The command; its exit code."""
    given = terminal.parsed(Arguments, "verify", arguments)
    if isinstance(given, int):
        return given
    if not 1 <= given.ranks <= MOST_RANKS:
        return refuse(f"--ranks must be from 1 to {MOST_RANKS}, got {given.ranks}; more need torchrun")
    if given.ranks > 1 and "RANK" not in os.environ:
        return _start_ranks(given.ranks, arguments)
    import torch.distributed as dist

    first = os.environ.get("RANK", "0") == "0"
    try:
        report = _verified(given)
    except ConfigError as error:
        return refuse(str(error)) if first else 2
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    if first:
        terminal.show(str(report), STYLES)
    return 0 if report.ok else 1


def _verified(given: Arguments) -> Report:
    import torch
    import torch.distributed as dist

    from ..insight.verify import Report, verify

    function = function_at(given.target)
    if "RANK" in os.environ and not dist.is_initialized():
        if torch.accelerator.is_available():
            torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group()
    try:
        found = function()
    except ConfigError:
        raise
    except Exception as error:
        raised = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f"{given.target} raised {class_to_catch(error)} at {raised.filename}:{raised.lineno}: {error}"
        ) from error
    if isinstance(found, Report):
        return found
    if not isinstance(found, Mapping):
        raise ConfigError(
            f"{given.target} must return a dictionary of fullshard.verify's arguments, or its report",
            got=type(found).__name__,
        )
    known = inspect.signature(verify).parameters
    unknown = [name for name in found if name not in known]
    missing = [name for name in ("model_fn", "batch_fn", "loss_fn") if name not in found]
    if unknown or missing:
        wrong = f"unknown: {', '.join(map(str, unknown))}" if unknown else f"missing: {', '.join(missing)}"
        raise ConfigError(f"{given.target} returned arguments that fullshard.verify cannot take ({wrong})")
    own = {"steps": given.steps, "seed": given.seed, "tolerance": given.tolerance}
    return verify(**{**found, **{name: value for name, value in own.items() if value is not None}})


def _start_ranks(ranks: int, arguments: list[str]) -> int:
    """This command as `ranks` processes; the worst of their exit codes."""
    codes = run_ranks(["-m", "fullshard", "verify", *arguments], ranks)
    broken = [f"rank {rank} ended with exit code {code}" for rank, code in codes.items() if code not in (0, 1, 2)]
    return refuse("; ".join(broken)) if broken else max(codes.values())
