"""A small checkpoint that can be changed at will: with its hashes made right again, as an attacker would."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fullshard

STEP = "step-000000003"
DATA = "rank-0.safetensors"
DCP_DATA = "__0_0.distcp"
ORDER = [2, 0, 1]
"""Saved as state."""
DOTS = "a." * 500_000
"""A name whose beginnings take 250 GB."""
ONE_HASH = [n * (2**61 - 1) for n in range(2, 10_200)]


def small(seed: int, hidden: int = 4, names: tuple[str, str] = ("0", "1")) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Two linear maps and a counter, and their AdamW, which has stepped once."""
    torch.manual_seed(seed)
    model = nn.Sequential()
    for name, module in zip(names, (nn.Linear(3, hidden), nn.Linear(hidden, 2)), strict=True):
        model.add_module(name, module)
    model.register_buffer("counter", torch.tensor([seed, 7]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 + seed)
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def save_small_dcp(root: Path, seed: int = 0) -> tuple[Path, dict[str, Tensor]]:
    """The same as a folder of DCP's, in a folder that is made; the folder, and what all was."""
    want = save_small(root / "ours", seed)
    fullshard.convert(root / "ours", root / "dcp", to="dcp")
    return root / "dcp", want


def all_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Values of everything that a load fills."""
    found = {f"model.{name}": value.detach().clone() for name, value in model.state_dict().items()}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for parameter, state in optimizer.state.items():
        found |= {f"{names[id(parameter)]}.{k}": torch.as_tensor(v).clone() for k, v in state.items()}
    found["lr"] = torch.tensor(optimizer.param_groups[0]["lr"])
    return found


def same(got: dict[str, Tensor], want: dict[str, Tensor]) -> bool:
    return got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)


def save_small(root: Path, seed: int = 0) -> dict[str, Tensor]:
    """Saves it as ROOT/STEP; what all was."""
    model, optimizer = small(seed)
    fullshard.save(root, model, optimizer, step=3, state={"order": ORDER, "weights": torch.arange(6.0)})
    return all_of(model, optimizer)


class Forged:
    """A checkpoint of which everything can be changed, and written again with hashes that are right.

    Attributes:
        folder: the checkpoint.
        manifest: the JSON within the hash.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest: Any = json.loads((folder / "manifest.json").read_bytes())["manifest"]

    def tensor(self, name: str) -> Any:
        """What the manifest says of a tensor."""
        return self.manifest["tensors"][name]

    def sign(self) -> None:
        """Write the manifest with the hashes of what is there."""
        for path in self.folder.iterdir():
            if path.name != "manifest.json" and path.is_file() and path.stat().st_size < 2**30:
                self.manifest["files"][path.name] = facts(path)
        self.write_manifest(json.dumps(self.manifest, separators=(",", ":")).encode())

    def write_manifest(self, body: bytes) -> None:
        digest = hashlib.sha256(body).hexdigest()
        (self.folder / "manifest.json").write_bytes(b'{"sha256":"%s",\n"manifest":%s}\n' % (digest.encode(), body))


class ForgedDcp:
    """The same of a folder of DCP's, which has no hashes.

    Attributes:
        folder: it.
        metadata: what `.metadata` holds.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.metadata: Any = pickle.loads((folder / ".metadata").read_bytes())

    def place(self, name: str) -> Any:
        """Where the first record of a tensor lies: DCP's storage info."""
        return next(info for index, info in self.metadata.storage_data.items() if index.fqn == name)

    def record(self, name: str) -> bytes:
        """The bytes of that record."""
        at = self.place(name)
        return (self.folder / at.relative_path).read_bytes()[at.offset : at.offset + at.length]

    def put_record(self, name: str, data: bytes) -> None:
        """Another record in its place, at the end of the file."""
        at, path = self.place(name), self.folder / self.place(name).relative_path
        at.offset, at.length = path.stat().st_size, len(data)
        path.write_bytes(path.read_bytes() + data)

    def sign(self, metadata: bytes | None = None) -> None:
        """Write the metadata."""
        (self.folder / ".metadata").write_bytes(pickle.dumps(self.metadata) if metadata is None else metadata)


def facts(path: Path) -> dict[str, Any]:
    """What a manifest says of a file of at most 16 MiB."""
    data = path.read_bytes()
    return {"bytes": len(data), "sha256": [hashlib.sha256(data).hexdigest()] if data else []}


def copied(folder: Path, to: Path) -> Path:
    """A copy of a folder of checkpoints, with its times."""
    shutil.copytree(folder, to, symlinks=True)
    return to


def saved(value: Any) -> bytes:
    """What `torch.save` makes of it."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def outcome(root: Path, **given: Any) -> tuple[Exception | None, bool, dict[str, Tensor]]:
    """Loads into a model of other numbers: what was raised, whether all is as before, and what all is."""
    model, optimizer = small(seed=1)
    before, numbers = all_of(model, optimizer), torch.get_rng_state()
    error: Exception | None = None
    try:
        fullshard.load(root, model, optimizer, **given)
    except Exception as found:
        error = found
    after = all_of(model, optimizer)
    return error, same(after, before) and torch.equal(numbers, torch.get_rng_state()), after


Change = Callable[[Any], None]
