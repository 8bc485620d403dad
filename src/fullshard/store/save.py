"""`save`: every rank writes its own pieces, and the checkpoint is complete or does not exist."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any, Literal, SupportsIndex

import torch
import torch.distributed as dist
from torch import nn

from ..errors import CheckpointError, ConfigError, invalid_argument
from ..generators import Generators
from ..torch_private.fake_group import is_pretended, unwritten
from .background import WRITER, SavedPart, Saving, settle_background
from .contents import checked_count, checked_optimizers
from .entries import RNG
from .folder import Folder
from .names import MODEL
from .plan import outline_of, plan_save
from .ranks import Ranks
from .remote import folder_at
from .write import Order, Written, publish, write


def save(
    folder: str | os.PathLike[str] | Folder,
    model: nn.Module,
    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] = (),
    *,
    step: SupportsIndex = 0,
    state: Mapping[str, Any] | None = None,
    rng: bool = True,
    keep_last: SupportsIndex | None = None,
    keep_every: SupportsIndex | None = None,
    asynchronous: bool | Literal["until_step"] = False,
    if_saving: Literal["wait", "refuse"] = "wait",
    patience: float = 10.0,
    process_group: dist.ProcessGroup | None = None,
) -> Saving:
    """Write a model, its optimizers and `state` into a new folder in `folder`. Collective.

    Every rank writes the pieces that it owns into a file, from its shard's memory; replicas share the work. Nothing is
    gathered. Beyond the model, a save needs memory for at most one piece of a tensor, if it is not contiguous or not in
    host memory. The files are safetensors; `fullshard convert --to dcp` converts them for
    `torch.distributed.checkpoint`.
    The checkpoint appears, and `latest` names it, only after all ranks have written and synced their files. A save that
    is interrupted, at any time and in any way, leaves existing checkpoints unchanged.

    Args:
        folder: the folder of checkpoints, the same on all ranks: a path that all machines share, an fsspec address
            (`s3://...`), or a `Folder`. The checkpoint is `folder/step-000000100`.
        model: sharded by either front-end, in any layout, or not at all.
        optimizers: of its parameters; their state is saved under the parameters' names.
        step: the number of steps taken, which names the checkpoint; the same on all ranks.
        state: other values to save, by name: objects with `state_dict` and `load_state_dict` (schedulers, a scaler, a
            data loader), and plain values (numbers, text, tensors, lists, dicts of them). Values that differ between
            ranks are saved for each rank.
        rng: save the state of the random generators of Python, NumPy, torch and the accelerator.
        keep_last: remove all but this many of the newest checkpoints. None: remove none.
        keep_every: never remove checkpoints whose step is a multiple of it.
        asynchronous: return as soon as the pieces are copied to shared memory; a process beside each rank writes them.
            There is at most one copy. `Saving.wait` raises errors; if it is not called, the next save or load warns,
            and goes on. With "until_step", return before that: a thread copies units' parameters and their optimizer
            state in host memory while the next forward and backward read them. Optimizers' steps, operations on sharded
            parameters, and loads wait for it. Call `Saving.copied` before you change them in any other way; most of
            such changes are detected, and make the save fail.
        if_saving: if a background save is running: "wait" for it, or "refuse".
        patience: seconds to wait for another process that is saving into the same folder.
        process_group: the ranks that save; None: all. Together they must have the whole model.

    Returns:
        The save: `wait()` returns the checkpoint's path or address.

    Raises:
        CheckpointError: a rank could not write (the disk is full, ...), cannot see the folder, or has something that
            cannot be saved. On every rank, with the error of the first rank that failed; nothing is left of the save.
        DivergenceError: ranks save different steps or models, or a rank does not take part.
        ConfigError: an argument is invalid.
    """
    ranks = Ranks(process_group)

    def check_arguments() -> tuple[Folder, int, int | None, int | None, list[torch.optim.Optimizer], dict[str, Any]]:
        where = folder_at(folder)
        number = checked_count("save", "step", step, 0)
        last = None if keep_last is None else checked_count("save", "keep_last", keep_last, 1)
        every = None if keep_every is None else checked_count("save", "keep_every", keep_every, 1)
        if if_saving not in ("wait", "refuse"):
            remedy = "omit it to wait for a background save that still runs"
            raise invalid_argument("save(if_saving=)", if_saving, "'wait' or 'refuse'", remedy)
        listed = checked_optimizers("save", model, optimizers, state)
        values = dict(state or {})
        for name in values:
            if not isinstance(name, str) or not name or name == RNG or name.startswith((MODEL, "$")):
                raise ConfigError(
                    "save(state=) has an invalid name.",
                    expected=f"names that are not empty, not {RNG!r}, and do not begin with {MODEL!r} or '$'",
                    got=repr(name),
                    remedy='rename the entry, as in state={"scheduler": scheduler}',
                )
        if not isinstance(asynchronous, bool) and asynchronous != "until_step":
            raise invalid_argument(
                "save(asynchronous=)",
                asynchronous,
                "True, False or 'until_step'",
                "pass True to write in the background, or omit it to wait",
            )
        if asynchronous and not where.on_disk:
            raise ConfigError(
                "asynchronous=True requires a local or shared file system, not a remote address.",
                expected="a path",
                got=str(where),
                remedy="save there without asynchronous=True, or save to a disk and copy",
            )
        kind = type(where)
        if asynchronous and (kind.__module__ in ("__main__", "__mp_main__") or "<locals>" in kind.__qualname__):
            raise ConfigError(
                "asynchronous=True requires a class of the folder that the writing process can import.",
                expected="a class at the top level of a module",
                got=f"{kind.__module__}.{kind.__qualname__}",
                remedy="move the class from the program's own file into a module that it imports",
            )
        return where, number, last, every, listed, values | ({RNG: Generators()} if rng else {})

    where, number, last, every, listed, values = ranks.together("checking the arguments", check_arguments)
    if is_pretended():  # `fullshard dry-run`: the other ranks' pieces do not exist
        unwritten.append(str(where))
        return Saving(where, ranks, number, SavedPart(publishes=False, over=True, name=f"step-{number:09d}"))
    if if_saving == "refuse" and any(ranks.all(WRITER.part is not None and not WRITER.poll())):
        raise CheckpointError(
            "A background save is still running.",
            remedy="save less often, wait() for it, or pass if_saving='wait'",
        )
    settle_background(ranks)
    with ExitStack() as opened:
        lock = ranks.together("locking the folder", lambda: _lock(opened, where, patience, ranks))
        reading = "reading the model to save"
        outline = ranks.together(reading, lambda: outline_of(model, listed, number, values, ranks.is_first))
        pieces, manifest = plan_save(outline, number, ranks)
        name = ranks.first("planning the save", lambda: where.begin(number))
        order = Order(where, name, ranks.rank, ranks.size, manifest, last, every)
        try:
            looking = "looking for the folder that rank 0 created"
            ranks.together(looking, lambda: _check_visible(where, name, ranks.rank))
            if asynchronous:
                until_step = asynchronous == "until_step"
                part = ranks.together("copying to the snapshot", lambda: WRITER.start(order, pieces, lock, until_step))
                return Saving(where, ranks, number, part)
            of_ranks: list[Written] = ranks.gather(ranks.together("writing", lambda: write(order, pieces)))
            final = ranks.first("publishing", lambda: publish(order, of_ranks))
            return Saving(where, ranks, number, SavedPart(publishes=False, over=True, name=final))
        except BaseException:
            if ranks.is_first:
                where.discard(name)
            WRITER.abandon()
            raise


def _lock(opened: ExitStack, where: Folder, patience: float, ranks: Ranks) -> int:
    """Lock and clean the folder, on the first rank, until `opened` closes; returns the lock's descriptor, or -1."""
    if not ranks.is_first:
        return -1
    lock = opened.enter_context(where.locked(patience))
    where.clean()
    return lock


def _check_visible(where: Folder, name: str, rank: int) -> None:
    """Check that this rank sees the folder to write into.

    Raises:
        CheckpointError: it does not.
    """
    if not where.sees(name):
        raise CheckpointError(
            "A rank cannot see the folder that rank 0 created.",
            rank=rank,
            expected=f"{name} in {where}",
            remedy="save into a folder that all ranks share, under the same path on every machine",
            topic="folders-differ",
        )
