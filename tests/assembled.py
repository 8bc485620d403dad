"""A checkpoint read without Fullshard, as docs/checkpoints.md says: by headers, and the shapes in the manifest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor


def manifest_of(folder: Path) -> Any:
    """What the manifest says."""
    return json.loads((folder / "manifest.json").read_text())["manifest"]


def rectangles(folder: Path) -> list[tuple[str, str, tuple[slice, ...], Tensor]]:
    """All there are: the file, the tensor's name, where in it, and the values."""
    found = []
    for file in manifest_of(folder)["files"]:
        with safe_open(folder / file, "pt") as opened:
            for key in opened.keys():  # noqa: SIM118 - it is no dict
                name, _, corners = key.removesuffix("]").rpartition("[")
                where = tuple(slice(*map(int, corner.split(":"))) for corner in corners.split(",") if corner)
                found.append((file, name, where, opened.get_tensor(key)))
    return found


def assembled(folder: Path) -> dict[str, Tensor]:
    """All tensors, whole."""
    manifest = manifest_of(folder)
    whole = {
        name: torch.zeros(facts["shape"], dtype=getattr(torch, facts["dtype"]))
        for name, facts in manifest["tensors"].items()
    }
    for _, name, where, values in rectangles(folder):
        whole[name][where] = values.flatten().view(whole[name].dtype).view(whole[name][where].shape)
    return whole | {name: whole[first] for name, first in manifest["ties"].items()}
