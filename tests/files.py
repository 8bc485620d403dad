"""A small model's state with everything that formats stumble over, and pickles that must not run."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ODD = {
    "empty": torch.empty(0, 3),
    "scalar": torch.tensor(2.5),
    "whole": torch.tensor(-7, dtype=torch.int64),
    "flags": torch.tensor([True, False, True]),
    "halves": torch.arange(5).half(),
    "brain": torch.arange(15).bfloat16().reshape(3, 5) / 7,
    "eight": torch.tensor([1.0, -0.5, 448.0]).to(torch.float8_e4m3fn),
    "eight_wide": torch.tensor([1.0, -0.5, 1024.0]).to(torch.float8_e5m2),
    "unsigned": torch.tensor([1, 2, 65535], dtype=torch.uint16),
    "octets": torch.arange(7, dtype=torch.uint8),
}


class Awkward(nn.Module):
    """Tied, frozen, of odd shapes; buffers of all dtypes, one of them not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 3)
        self.odd = nn.Linear(3, 13)
        self.frozen = nn.Linear(13, 3).requires_grad_(False)
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.embedding.weight
        for name, value in ODD.items():
            self.register_buffer(name, value.clone())
        self.register_buffer("turned", torch.arange(6.0).reshape(2, 3).t())

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.frozen(torch.tanh(self.odd(self.embedding(tokens)))))


def trained() -> tuple[Awkward, torch.optim.Optimizer]:
    """The model after a step of AdamW."""
    torch.manual_seed(0)
    model = Awkward()
    optimizer = torch.optim.AdamW(
        [(name, value) for name, value in model.named_parameters() if value.requires_grad], lr=torch.tensor(0.01)
    )
    model(torch.arange(7)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def program() -> dict[str, Any]:
    """What a training program saves."""
    model, optimizer = trained()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": 12,
        "epoch": 3,
        "settings": {"betas": (0.9, 0.99), "names": ["a", "b"], "best": float("inf"), "nothing": None},
        "generator": {"state": torch.arange(20, dtype=torch.uint8), "list": [torch.ones(2), 5]},
    }


def same(a: Tensor, b: Tensor) -> bool:
    """Bitwise, with shape and dtype."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    first, second = (one.detach().contiguous().reshape(-1).view(torch.uint8) for one in (a, b))
    return torch.equal(first, second)


class Runs:
    """Pickled, it creates a file when it is unpickled as pickles usually are."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        import os

        return os.system, (f"touch {self.witness}",)


def archive(path: Path, pickled: bytes, records: dict[str, bytes] | None = None, **given: Any) -> Path:
    """A file built as `torch.save` builds them, of any pickle and any records."""
    with zipfile.ZipFile(path, "w", **given) as made:
        made.writestr("archive/data.pkl", pickled)
        made.writestr("archive/byteorder", "little")
        for name, data in (records or {}).items():
            made.writestr(f"archive/data/{name}", data)
    return path


def tensor(numel: int, shape: tuple[int, ...], stride: tuple[int, ...], offset: int = 0) -> bytes:
    """The opcodes of a float32 tensor in record 0, as protocol 2 has them."""

    def whole(*values: int) -> bytes:
        return b"".join(b"\x8a\x08" + value.to_bytes(8, "little", signed=True) for value in values)

    storage = (
        b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu" + whole(numel) + b"tQ"
    )
    sizes = b"(" + whole(*shape) + b"t(" + whole(*stride) + b"t"
    hooks = b"\x89ccollections\nOrderedDict\n)R"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + whole(offset) + sizes + hooks + b"tR"


def under(name: str, value: bytes) -> bytes:
    """The pickle of a dict of one key."""
    return b"\x80\x02}" + b"X" + len(name).to_bytes(4, "little") + name.encode() + value + b"s."


def call(module: str, function: str, argument: Any) -> bytes:
    """The opcodes of a call."""
    given = pickle.dumps((argument,), protocol=2)[2:-1]
    return f"c{module}\n{function}\n".encode() + given + b"R"


def rewritten(file: Path, change: Callable[[Any], None]) -> None:
    """A file of DeepSpeed's with something changed; what weights_only does not load becomes a number."""
    names = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    with torch.serialization.safe_globals([(StandIn, name) for name in names]):
        content = torch.load(file, weights_only=True)
    if "optimizer_state_dict" in content:
        content["optimizer_state_dict"]["zero_stage"] = 3
        content["optimizer_state_dict"]["loss_scaler"] = None
    else:  # loading makes two of an empty tensor that had two names
        content["module"]["head.weight"] = content["module"]["emb.weight"]
    change(content)
    torch.save(content, file)


class StandIn:
    """In place of DeepSpeed's classes."""

    def __init__(self, *given: Any) -> None:
        self.given = given

    def __setstate__(self, state: Any) -> None:
        pass
