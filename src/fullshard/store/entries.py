"""Values saved beside the model: schedulers, loaders, random generators, the user's own values.

A value that is the same on all ranks is saved once. A value that differs is saved for each rank, and can be loaded on
the same number of ranks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch

from ..checkpoint.targets import is_whole
from ..errors import CheckpointError
from .piece import Piece, refuse_unsupported, value_pieces, whole_piece
from .tree import to_json
from .write import bytes_of

RNG = "rng"
"""The name of the random generators' state."""
MOST_JSON = 2**27
"""The most bytes of all values together: half of the longest manifest (`MOST_WHOLE`)."""
STATE = "state."
"""The prefix of tensors in users' values."""


@runtime_checkable
class Stateful(Protocol):
    """An object with state: a scheduler, a scaler, a data loader; like DCP's protocol of this name."""

    def state_dict(self) -> dict[str, Any]:
        """Plain values, and tensors."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> object:
        """Restore the state that `state_dict` returned."""


Digest = tuple[str, int]
"""A hash, by which ranks compare a value, and its length as JSON."""


@dataclass
class Values:
    """The values of this rank, before ranks have compared them.

    Attributes:
        json: values as JSON, by name.
        tensors: for each value, the tensors in it that are whole on this rank, by their names in the checkpoint.
        sharded: pieces of sharded tensors in the values.
        digests: by name.
    """

    json: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    sharded: list[Piece] = field(default_factory=list)
    digests: dict[str, Digest] = field(default_factory=dict)

    def pieces(self, common: Container[str], rank: int) -> tuple[list[Piece], list[Piece]]:
        """The whole tensors in the values named in `common`, which the first rank writes, and those in the others."""
        common_pieces: list[Piece] = []
        own_pieces: list[Piece] = []
        for key, tensors in self.tensors.items():
            for name, tensor in tensors.items():
                if key in common:
                    common_pieces.append(whole_piece(name, tensor, rank == 0))
                else:
                    own_pieces.append(whole_piece(name_of_rank(rank, name), tensor, True))
        return common_pieces, own_pieces


def values_of(getters: Mapping[str, Callable[[], Any]], first: bool) -> Values:
    """The values of this rank. No communication.

    Args:
        getters: functions that return the values, by name.
        first: whether this is the first rank.

    Raises:
        CheckpointError: a value is not plain, or a tensor is quantized or sparse.
    """
    values = Values()
    all_tensors: dict[str, torch.Tensor] = {}  # of all keys, so that names are unique
    for key, getter in getters.items():
        before = len(all_tensors)
        values.json[key] = to_json(getter(), f"{STATE}{key}", all_tensors)
        tensors = dict(list(all_tensors.items())[before:])
        values.tensors[key] = {name: tensor for name, tensor in tensors.items() if is_whole(tensor)}
        for name, tensor in values.tensors[key].items():
            refuse_unsupported(name, tensor)
        values.digests[key] = _digest(values.json[key], values.tensors[key])
        for turn, (name, tensor) in enumerate(tensors.items()):
            if not is_whole(tensor):
                values.sharded += value_pieces(name, tensor, turn, first)
    return values


def name_of_rank(rank: int, name: str) -> str:
    """The name under which a rank's own tensor is saved."""
    return f"ranks.{rank}.{name}"


def common_names(digests: Sequence[Mapping[str, Digest]]) -> set[str]:
    """The names of the values that are the same on all ranks.

    Args:
        digests: of every rank.

    Raises:
        CheckpointError: together the values would make the manifest too long to read; names the longest value.
    """
    common: set[str] = set()
    lengths: dict[str, int] = {}
    for key in dict.fromkeys(key for of_rank in digests for key in of_rank):
        of_key = [of_rank[key] for of_rank in digests if key in of_rank]
        if len(set(of_key)) == 1 and len(of_key) == len(digests):
            common.add(key)
            lengths[key] = of_key[0][1]
        else:
            lengths[key] = sum(length for _, length in of_key)
    if sum(lengths.values()) > MOST_JSON:
        longest = max(lengths, key=lambda key: lengths[key])
        raise CheckpointError(
            "Values to save are too long: all except tensors, arrays and bytes are stored as text in the manifest.",
            parameter=longest,
            expected=f"at most {MOST_JSON} characters in all",
            got=f"{sum(lengths.values())}, {lengths[longest]} of them here",
            remedy="pass long lists as tensors or NumPy arrays, and long texts as bytes: these are stored separately",
        )
    return common


def _digest(json_value: Any, tensors: Mapping[str, torch.Tensor]) -> Digest:
    text = json.dumps(json_value).encode()
    digest = hashlib.sha256(text)
    for name, tensor in tensors.items():
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(bytes_of(tensor) if tensor.numel() else b"")
    return digest.hexdigest(), len(text)
