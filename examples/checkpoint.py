"""Checkpoints of examples/pretrain.py: `fullshard.save` and `fullshard.load`, and what the run has to remember besides.

    OUT/checkpoints/step-000000200/    the newest, and the one before it
    OUT/checkpoints/latest             which is the newest

A kill at any moment leaves the newest whole. All ranks must see the same folder: on several machines, a shared one.
"""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fullshard


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


def save(out: Path, model: nn.Module, optimizer: torch.optim.Optimizer, record: Record) -> None:
    """Every rank writes what it owns; the two newest are kept."""
    state = {"record": asdict(record)}
    fullshard.save(out / "checkpoints", model, optimizer, step=record.step, state=state, rng=False, keep_last=2)


def resume(out: Path, model: nn.Module, optimizer: torch.optim.Optimizer, new: Record) -> Record | None:
    """Go on from the newest checkpoint, however many ranks wrote it; None if there is none.

    Raises:
        CheckpointUnusable: it cannot be read, or is not of `new`'s model, seed and text.
    """
    try:
        loaded = fullshard.load(out / "checkpoints", model, optimizer, fall_back=True, missing_ok=True)
    except fullshard.CheckpointError as error:
        raise CheckpointUnusable(" ".join(str(error).split())) from error
    if loaded.path is None:
        return None
    record = Record(**loaded.state["record"])
    check_same_run(loaded.path, record, new)
    return record


def check_same_run(path: Any, found: Record, wanted: Record) -> None:
    """Raise CheckpointUnusable unless model, seed and text are the same."""
    for name in ("model", "seed", "fingerprint"):
        if getattr(found, name) != getattr(wanted, name):
            what = {"fingerprint": "training text"}.get(name, name)
            raise CheckpointUnusable(
                f"{path} was made with another {what}: {getattr(found, name)}, not {getattr(wanted, name)}"
            )
