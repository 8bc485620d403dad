"""The text that examples/pretrain.py trains on: every .py file under a folder, as bytes, and batches of it.

Which files are held out follows from their paths, and which windows a step trains on from the seed and the
step's number. So nothing about the data has a position to save, and no number of ranks changes what is
trained on: rank r of W takes rows [r B / W, (r + 1) B / W) of a global batch of B that all ranks agree on.
"""

import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

HELD_OUT_ONE_IN = 20  # files
SMALLEST = 100_000  # bytes of training text below which there is nothing to learn from


class CorpusError(ValueError):
    """The folder holds too little Python source to train on."""


@dataclass(frozen=True)
class Corpus:
    """The two texts, each one long row of bytes (files joined in the order of their paths)."""

    training: Tensor  # [bytes], uint8
    held_out: Tensor  # [bytes], uint8
    fingerprint: int  # crc32 over both texts: ranks on different machines compare it
    description: str  # for people


def standard_library() -> Path:
    """Where this Python keeps the source of its own standard library."""
    return Path(sysconfig.get_path("stdlib"))


def is_held_out(relative_path: str) -> bool:
    """Whether a file is for validation: one in twenty, chosen by its path, the same everywhere."""
    return zlib.crc32(relative_path.encode()) % HELD_OUT_ONE_IN == 0


def read_corpus(folder: Path, context: int) -> Corpus:
    """Read all .py files under `folder` except installed packages. CorpusError if they are too little."""
    training, held_out = [], []
    for path in sorted(folder.rglob("*.py"), key=lambda path: path.relative_to(folder).as_posix()):
        relative = path.relative_to(folder)
        if {"site-packages", "dist-packages"} & set(relative.parts) or not path.is_file():
            continue
        (held_out if is_held_out(relative.as_posix()) else training).append(path.read_bytes())
    texts = bytearray(b"\n".join(training)), bytearray(b"\n".join(held_out))
    needed = max(SMALLEST, HELD_OUT_ONE_IN * context), max(SMALLEST // HELD_OUT_ONE_IN, 2 * context)
    if any(len(text) < least for text, least in zip(texts, needed, strict=True)):
        raise CorpusError(
            f"{folder} has {len(texts[0]):,} bytes of Python source to train on and {len(texts[1]):,} "
            f"held out; at least {needed[0]:,} and {needed[1]:,} are needed"
        )
    return Corpus(
        training=torch.frombuffer(texts[0], dtype=torch.uint8),
        held_out=torch.frombuffer(texts[1], dtype=torch.uint8),
        fingerprint=zlib.crc32(texts[1], zlib.crc32(texts[0])),
        description=f"{folder}, {len(training):,} files ({len(texts[0]):,} bytes) to train on, "
        f"{len(held_out):,} ({len(texts[1]):,}) held out",
    )


def rows_of_rank(offsets: Tensor, rank: int, world: int) -> Tensor:
    """This rank's part [B / W] of the offsets [B] of a global batch."""
    return offsets.view(world, -1)[rank]


def training_offsets(text: Tensor, context: int, batch: int, seed: int, step: int) -> Tensor:
    """Where the global batch of a step starts its windows, [B]: a function of the seed and the step alone."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} step {step}".encode()))
    return torch.randint(len(text) - context, (batch,), generator=generator)


def held_out_offsets(text: Tensor, context: int, count: int) -> Tensor:
    """Where the validation windows start, [count]: evenly spread over the held-out text, always the same."""
    return torch.linspace(0, len(text) - context - 1, count, dtype=torch.float64).long()


def windows(text: Tensor, offsets: Tensor, context: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Inputs and targets, each [rows, T] int64: the targets are the inputs shifted by one byte."""
    positions = offsets[:, None] + torch.arange(context + 1)  # [rows, T + 1]
    taken = text[positions].long().to(device)
    return taken[:, :-1], taken[:, 1:]
