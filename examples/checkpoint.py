"""Checkpoints of examples/pretrain.py: whole or absent, and loadable on any number of ranks.

    OUT/checkpoint/         the newest whole checkpoint
        __0_0.distcp, ...   what each rank owned of parameters and AdamW state (torch.distributed.checkpoint)
        .metadata           which file holds which part of which tensor
        record.json         the Record below
    OUT/checkpoint.saving/  being written; never read
    OUT/checkpoint.old/     the one before, for the instant in which the new one takes its place

A kill at any moment leaves `checkpoint` or `checkpoint.old` whole. All ranks must see the same folder: on
several machines, one on a shared file system.
"""

import json
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from fullshard import load_optimizer_state_dict, optimizer_state_dict


class CheckpointUnusable(Exception):
    """A checkpoint is there, but it cannot be read, or belongs to another model, text or seed."""


@dataclass
class Record:
    """What a run has done so far. With the parameters and the optimizer state this is all it needs to go on.

    Neither generator state nor a position in the data is here: both follow from `seed` and `step`.
    """

    model: dict[str, int]  # GPTConfig
    seed: int
    fingerprint: int  # of the corpus
    step: int = 0  # optimizer steps done
    seconds: float = 0.0  # spent in them
    tokens: int = 0  # trained on
    losses: list[float] = field(default_factory=list)  # one per step, mean over the global batch, nats per byte
    validation: list[tuple[int, float]] = field(default_factory=list)  # (steps done, nats per byte)
    memory: list[dict[str, int]] = field(default_factory=list)  # one per rank, bytes, in the last step

    def add_step(self, loss: float, tokens: int, seconds: float) -> None:
        """One more optimizer step is done."""
        self.step += 1
        self.tokens += tokens
        self.seconds += seconds
        self.losses.append(loss)


def sharded_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Parameters and optimizer state as sharded tensors; nothing is gathered to make it."""
    return {"model": model.state_dict(), "optimizer": optimizer_state_dict(model, optimizer)}


def save(out: Path, model: nn.Module, optimizer: torch.optim.Optimizer, record: Record) -> None:
    """Every rank writes what it owns beside the last checkpoint; then rank 0 swaps the two."""
    newest, saving, old = out / "checkpoint", out / "checkpoint.saving", out / "checkpoint.old"
    first = dist.get_rank() == 0
    if first:
        shutil.rmtree(saving, ignore_errors=True)
        saving.mkdir(parents=True)
    dist.barrier()
    dcp.save(sharded_state(model, optimizer), checkpoint_id=saving)  # returns when all ranks have written
    if first:
        (saving / "record.json").write_text(json.dumps(asdict(record)))
        if newest.exists():
            shutil.rmtree(old, ignore_errors=True)
            newest.rename(old)
        saving.rename(newest)
        shutil.rmtree(old, ignore_errors=True)
    dist.barrier()


def find(out: Path) -> Path | None:
    """The newest whole checkpoint under `out`, if there is one."""
    return next((path for path in (out / "checkpoint", out / "checkpoint.old") if path.exists()), None)


def read_record(path: Path, expected: Record) -> Record:
    """The record in a checkpoint. Raises CheckpointUnusable unless model, seed and text are `expected`'s."""
    try:
        record = Record(**json.loads((path / "record.json").read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointUnusable(f"cannot read {path / 'record.json'}: {error}") from error
    for name in ("model", "seed", "fingerprint"):
        found, wanted = getattr(record, name), getattr(expected, name)
        if found != wanted:
            what = {"fingerprint": "training text"}.get(name, name)
            raise CheckpointUnusable(f"{path} was made with another {what}: {found}, not {wanted}")
    return record


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Read this rank's part of parameters and optimizer state in place, however many ranks wrote them."""
    state = sharded_state(model, optimizer)
    try:
        dcp.load(state, checkpoint_id=path)
    except dcp.api.CheckpointException as error:
        reasons = {str(reason).splitlines()[0] for reason, _ in error.failures.values()}
        raise CheckpointUnusable(f"cannot read {path}: {'; '.join(sorted(reasons))}") from error
    model.load_state_dict(state["model"])
    load_optimizer_state_dict(model, optimizer, state["optimizer"])
