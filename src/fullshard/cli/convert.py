"""`fullshard convert SRC DST`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from . import terminal

STYLES = {"^wrote .*": "bold green", "(?m)^left out: .*$": "yellow", "(?m)^note: .*$": "yellow"}


@dataclass(frozen=True)
class ConvertArguments:
    """Write a checkpoint in a different format, on one machine, without a GPU, one tensor at a time.

    Reads folders of Fullshard and of torch.distributed.checkpoint, files of torch.save, safetensors files and folders,
    DeepSpeed's ZeRO-3 folders, and the sharded files of FSDP1's ranks. Executes no code in them. Examples:
        fullshard convert runs/checkpoints model.safetensors --model-only
        fullshard convert pytorch_model.bin checkpoint --to fullshard

    Lists what the new format cannot hold. Exit code: 0 written, 2 bad input, in which case nothing is left at DST.
    """

    src: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SRC")]
    """the checkpoint to read: a file or a folder, whose format is detected"""
    dst: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DST")]
    """the path to write, which must not exist"""
    to: Literal["auto", "fullshard", "dcp", "torch", "safetensors"] = "auto"
    """the format to write; auto: torch for names that end in .pt, .pth or .bin, safetensors for .safetensors (a
    folder), fullshard for all others"""
    dtype: Literal["unchanged", "float32", "bfloat16", "float16"] = "unchanged"
    """cast the model's floating-point tensors to this dtype; optimizer state is not cast"""
    model_only: bool = False
    """omit optimizer state and everything else that is not the model's"""


def run(arguments: list[str]) -> int:
    """Run the command; returns its exit code."""
    return terminal.run(ConvertArguments, "convert", arguments, _convert)


def _convert(options: ConvertArguments) -> int:
    terminal.check_exists(Path(options.src))
    import torch

    from ..exchange.convert import convert
    from ..text import size

    with terminal.progress("converting") as progress:
        conversion = convert(
            options.src,
            options.dst,
            to=None if options.to == "auto" else options.to,
            dtype=None if options.dtype == "unchanged" else getattr(torch, options.dtype),
            model_only=options.model_only,
            progress=progress,
        )
    lines = [
        f"wrote {conversion.target} ({conversion.target_kind}): {conversion.tensors:,} tensors, "
        f"{size(conversion.nbytes)}, from {conversion.source} ({conversion.source_kind})",
        *(f"left out: {content}" for content in conversion.left_out),
        *(f"note: {note}" for note in conversion.notes),
    ]
    terminal.show("\n".join(lines), STYLES)
    return 0
