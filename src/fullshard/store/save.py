"""`save`: every rank writes what it owns, and the checkpoint is whole or not there."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from ..errors import CheckpointError, ConfigError
from .background import WRITER, Order, Saving, settle_background
from .contents import check_given
from .entries import RNG, Generators
from .folder import Folder
from .plan import Request, Written, end, plan_save, write
from .ranks import Ranks
from .remote import folder_at
from .source import MODEL


def save(
    folder: str | os.PathLike[str] | Folder,
    model: nn.Module,
    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] = (),
    *,
    step: int = 0,
    state: Mapping[str, Any] | None = None,
    rng: bool = True,
    keep_last: int | None = None,
    keep_every: int | None = None,
    asynchronous: bool = False,
    if_saving: Literal["wait", "refuse"] = "wait",
    patience: float = 10.0,
    process_group: dist.ProcessGroup | None = None,
) -> Saving:
    """Write a model, its optimizers and `state` into a new folder in `folder`. Collective.

    Every rank writes the pieces that it owns into one file, from its shard's memory; replicas share the writing.
    Nothing is gathered; besides the model it takes the memory of one tensor's piece at most, and that only of those
    that are not contiguous or not in host memory. The files are safetensors; `fullshard convert --to dcp` makes of them
    what `torch.distributed.checkpoint` reads.
    The folder takes its place, and `latest` names it, only when all ranks have written and their files are synced:
    a save that is broken off, whenever and however, leaves what was there before.

    Args:
        folder: where checkpoints are kept, on all ranks the same: a path that all machines share, or an address that
            fsspec knows (`s3://...`), or a `Folder`. The checkpoint is `folder/step-000000100`.
        model: sharded by either front-end, in any layout, or not at all.
        optimizers: of its parameters; their state is saved by the parameters' names.
        step: how many steps were taken: the checkpoint's name, the same on all ranks.
        state: by name, what else is to be saved: objects with `state_dict` and `load_state_dict` (schedulers, a
            scaler, a data loader), and plain values (numbers, text, tensors, lists, dicts of them). What differs
            between ranks is kept of each.
        rng: keep the state of the random generators of Python, NumPy, torch and the accelerator.
        keep_last: remove all but as many of the newest checkpoints. None: remove none.
        keep_every: keep those whose step is a multiple of it, too.
        asynchronous: return as soon as the pieces are copied to shared memory; a process beside each rank writes them.
            At most one copy is held. What goes wrong is raised by `Saving.wait`; without it the next save or load
            warns, and goes on.
        if_saving: while a save goes on in the background: "wait" for it, or "refuse".
        patience: seconds to wait for another process that saves into the same folder.
        process_group: the ranks that save; None: all. They must hold the whole model together.

    Returns:
        The save: `wait()` gives where the checkpoint is.

    Raises:
        CheckpointError: a rank could not write (the disk is full, ...), does not see the folder, or holds something
            that cannot be saved; on every rank, with what the first rank that failed says. Nothing is left of it.
        DivergenceError: ranks save other steps or other models than each other, or one does not come.
        ConfigError: an argument that cannot be used.
    """
    ranks = Ranks(process_group)

    def look() -> tuple[Folder, Request]:
        where = folder_at(folder)
        request = _request(model, optimizers, step, state, rng, keep_last, keep_every, if_saving)
        if asynchronous and not where.on_disk:
            raise ConfigError(
                "asynchronous=True requires a local or shared file system, not a remote address.",
                expected="a path",
                got=str(where),
                remedy="save there without asynchronous=True, or save to a disk and copy",
            )
        return where, request

    where, request = ranks.together("looking at the arguments", look)
    if if_saving == "refuse" and any(ranks.all(WRITER.part is not None and not WRITER.poll())):
        raise CheckpointError(
            "A save is still going on in the background.",
            remedy="save less often, wait() for it, or pass if_saving='wait'",
        )
    settle_background(ranks)
    with ExitStack() as opened:
        lock = ranks.together("locking the folder", lambda: _lock(opened, where, patience, ranks), files=True)
        plan = plan_save(request, ranks)
        name = _begin(where, step, ranks)
        try:
            if asynchronous:
                order = Order.of(where, name, plan, ranks.rank, ranks.size)
                part = ranks.together("copying what is to be saved", lambda: WRITER.start(order, plan.pieces, lock))
                return Saving(where, ranks, step, part)
            written = ranks.together("writing", lambda: write(where, name, ranks.rank, plan.pieces), files=True)
            everyone: list[Written] = ranks.gather(written)
            final = ranks.first("finishing", lambda: end(where, name, plan.ending, everyone), files=True)
            return Saving(where, ranks, step, final)
        except BaseException:
            if ranks.is_first:
                where.discard(name)
            WRITER.abandon()
            raise


def _lock(opened: ExitStack, where: Folder, patience: float, ranks: Ranks) -> int:
    """The descriptor of the folder's lock, which the first rank holds until `opened` ends; -1 on the others."""
    if not ranks.is_first:
        return -1
    lock = opened.enter_context(where.locked(patience))
    where.clean()
    return lock


def _begin(where: Folder, step: int, ranks: Ranks) -> str:
    """The name of a folder to write into, which the first rank makes and all see. Collective.

    Raises:
        CheckpointError: a rank does not see it.
    """
    name = ""

    def make() -> str:
        nonlocal name
        name = where.begin(step)
        return name

    def look() -> None:
        if not where.sees(name):
            raise CheckpointError(
                "A rank cannot see the folder that rank 0 created.",
                rank=ranks.rank,
                expected=f"{name} in {where}",
                remedy="save into a folder that all ranks share, on every machine under the same path",
                topic="folders-differ",
            )

    try:
        name = ranks.first("planning the save", make, files=True)
        ranks.together("looking for the folder that the first rank made", look, files=True)
    except BaseException:
        if ranks.is_first and name:
            where.discard(name)
        raise
    return name


def _request(
    model: Any, optimizers: Any, step: Any, state: Any, rng: bool, keep_last: Any, keep_every: Any, if_saving: Any
) -> Request:
    """The arguments of `save`, if they can be used.

    Raises:
        ConfigError: one cannot.
    """
    for what, value, least in (("step", step, 0), ("keep_last", keep_last, 1), ("keep_every", keep_every, 1)):
        is_count = isinstance(value, int) and not isinstance(value, bool) and value >= least
        if not is_count and not (value is None and what != "step"):
            raise ConfigError(
                f"save({what}=) is a count.",
                expected=f"an int of at least {least}",
                got=repr(value),
                remedy=f"pass an int, as in {what}={max(least, 1)}",
            )
    if if_saving not in ("wait", "refuse"):
        raise ConfigError("save(if_saving=) has an invalid value.", expected="'wait' or 'refuse'", got=repr(if_saving))
    listed = check_given("save", model, optimizers, state)
    values = dict(state or {})
    for name in values:
        if not isinstance(name, str) or not name or name == RNG or name.startswith((MODEL, "$")):
            raise ConfigError("save(state=) has a name that cannot be used.", got=repr(name))
    if rng:
        values[RNG] = Generators()
    return Request(model, listed, step, values, keep_last, keep_every)
