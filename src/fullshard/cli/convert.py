"""`fullshard convert SRC DST`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from ..errors import FullshardError
from . import terminal
from .main import refuse

if TYPE_CHECKING:
    from ..exchange.convert import Conversion

STYLES = {"^wrote .*": "bold green", "(?m)^left out: .*$": "yellow", "(?m)^note: .*$": "yellow"}


@dataclass(frozen=True)
class Arguments:
    """Write a checkpoint in another format, on this machine alone: no GPU, no other process, a tensor at a time.

    Reads folders of Fullshard and of torch.distributed.checkpoint, files of torch.save, safetensors files and folders,
    DeepSpeed's ZeRO-3 folders, and sharded files that FSDP1's ranks saved. Nothing in them is executed. Examples:

        fullshard convert runs/checkpoints model.safetensors --model-only

        fullshard convert pytorch_model.bin checkpoint --to fullshard

    What the new format has no place for is listed. Exit code: 0 written, 2 bad input; then nothing is at DST.
    """

    src: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SRC")]
    """the checkpoint to read: a file or a folder; its format is found out"""
    dst: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DST")]
    """where to write; nothing may be there yet"""
    to: Literal["fullshard", "dcp", "torch", "safetensors"] | None = None
    """the format to write; left out: torch for names that end in .pt, .pth or .bin, safetensors for .safetensors (a
    folder), fullshard for all others"""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """cast the model's floating-point tensors to it; optimizer state stays as it is"""
    model_only: bool = False
    """leave out optimizer state and everything else that is not the model's"""


def run(arguments: list[str]) -> int:
    """The command; its exit code."""
    given = terminal.parsed(Arguments, "convert", arguments)
    if isinstance(given, int):
        return given
    import torch

    from ..exchange.convert import convert

    try:
        with terminal.progress("converting") as progress:
            done = convert(
                given.src,
                given.dst,
                to=given.to,
                dtype=None if given.dtype is None else getattr(torch, given.dtype),
                model_only=given.model_only,
                progress=progress,
            )
    except FullshardError as error:
        return refuse(str(error))
    terminal.show(text_of(done), STYLES)
    return 0


def text_of(done: Conversion) -> str:
    """What was done, in lines."""
    from ..names import size

    lines = [
        f"wrote {done.target} ({done.target_kind}): {done.tensors:,} tensors, {size(done.nbytes)}, "
        f"from {done.source} ({done.source_kind})",
        *(f"left out: {one}" for one in done.left_out),
        *(f"note: {one}" for one in done.notes),
    ]
    return "\n".join(lines)
