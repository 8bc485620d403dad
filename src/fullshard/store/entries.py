"""What is saved besides the model: schedulers, loaders, random generators, the user's own values.

Where all ranks have the same it is kept once; else each rank's is kept, and loads on as many ranks again.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from ..errors import CheckpointError
from .piece import Piece, value_pieces, whole_piece
from .tree import to_json
from .write import bytes_of

RNG = "rng"
"""The name of the random generators' state."""
MOST_JSON = 2**27
"""Of all values together, in bytes: half of what the longest manifest has (`MOST_WHOLE`)."""
STATE = "state."
"""What the names of tensors in users' values begin with."""


@runtime_checkable
class Stateful(Protocol):
    """What has a state to be saved: a scheduler, a scaler, a data loader; as DCP's protocol of this name."""

    def state_dict(self) -> dict[str, Any]:
        """Plain values, and tensors."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> object:
        """Take what `state_dict` gave."""


class Generators:
    """The random generators of this process: Python's, NumPy's, torch's, and the accelerator's."""

    def state_dict(self) -> dict[str, Any]:
        version, internal, gauss = random.getstate()
        name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
        found: dict[str, Any] = {
            "python": [version, torch.tensor(internal, dtype=torch.int64, device="cpu"), gauss],
            "numpy": [str(name), torch.from_numpy(np.asarray(keys, dtype=np.int64)), position, has_gauss, cached],
            "torch": torch.get_rng_state(),
        }
        if torch.accelerator.is_available():
            module = torch.get_device_module(torch.accelerator.current_accelerator())
            found["accelerator"] = module.get_rng_state()
        return found

    def check(self, state_dict: dict[str, Any]) -> None:
        """Raise, whatever it is, if `load_state_dict` would."""
        self._fill(state_dict, random.Random(), np.random.RandomState(), torch.Generator("cpu"))
        if "accelerator" in state_dict and torch.accelerator.is_available():
            torch.Generator(torch.accelerator.current_accelerator()).set_state(state_dict["accelerator"])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._fill(state_dict, random, np.random, torch.default_generator)
        if "accelerator" in state_dict and torch.accelerator.is_available():
            module = torch.get_device_module(torch.accelerator.current_accelerator())
            module.set_rng_state(state_dict["accelerator"])

    @staticmethod
    def _fill(state_dict: dict[str, Any], python: Any, numpy: Any, of_torch: torch.Generator) -> None:
        version, internal, gauss = state_dict["python"]
        python.setstate((version, tuple(internal.tolist()), gauss))
        name, keys, position, has_gauss, cached = state_dict["numpy"]
        numpy.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
        of_torch.set_state(state_dict["torch"])


Digest = tuple[str, int]
"""What tells whether ranks have the same value, and its length as JSON."""


@dataclass
class Values:
    """What this rank is to save of them, before it knows whether the others have the same.

    Attributes:
        json: by name.
        tensors: those in each value that are whole on this rank, by their names in the checkpoint.
        sharded: pieces of the others, which are one tensor of all ranks.
        digests: by name.
    """

    json: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    sharded: list[Piece] = field(default_factory=list)
    digests: dict[str, Digest] = field(default_factory=dict)


@dataclass
class Entries:
    """What one rank writes of them.

    Attributes:
        common: JSON of what all ranks have, by name.
        own: JSON of what is this rank's, by name.
        common_pieces, own_pieces: tensors in them, without those that are sharded.
        differ: whether any rank has values of its own; the same on all.
    """

    common: dict[str, Any]
    own: dict[str, Any]
    common_pieces: list[Piece]
    own_pieces: list[Piece]
    differ: bool


def values_of(state: Mapping[str, Callable[[], Any]], first: bool) -> Values:
    """The values of this rank. No communication.

    Args:
        state: by name, what gives a plain value.
        first: whether this is the first rank.

    Raises:
        CheckpointError: a value that is not plain.
    """
    values = Values()
    every: dict[str, torch.Tensor] = {}  # of all keys: no two get one name
    for key, give in state.items():
        before = len(every)
        values.json[key] = to_json(give(), f"{STATE}{key}", every)
        tensors = dict(list(every.items())[before:])
        values.tensors[key] = {name: tensor for name, tensor in tensors.items() if _is_whole(tensor)}
        values.digests[key] = _digest(values.json[key], values.tensors[key])
        for turn, (name, tensor) in enumerate(tensors.items()):
            if not _is_whole(tensor):
                values.sharded += value_pieces(name, tensor, turn, first)
    return values


def entries_of(values: Values, everyone: Sequence[Mapping[str, Digest]], rank: int) -> Entries:
    """What this rank writes of its values.

    Args:
        everyone: each rank's digests.

    Raises:
        CheckpointError: values that are too long.
    """
    _check_size(everyone)
    same = {key for key in values.json if all(other.get(key) == values.digests[key] for other in everyone)}
    common: list[Piece] = []
    own: list[Piece] = []
    for key, tensors in values.tensors.items():
        for name, tensor in tensors.items():
            if key in same:
                common.append(whole_piece(name, tensor, rank == 0))
            else:
                own.append(whole_piece(of_rank(rank, name), tensor, True))
    return Entries(
        {key: value for key, value in values.json.items() if key in same},
        {key: value for key, value in values.json.items() if key not in same},
        common,
        own,
        any(each != everyone[0] for each in everyone),
    )


def of_rank(rank: int, name: str) -> str:
    """The name of a tensor that is one rank's."""
    return f"ranks.{rank}.{name}"


def _is_whole(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, torch.nn.Parameter)


def _check_size(everyone: Sequence[Mapping[str, Digest]]) -> None:
    """Refuse values that make a manifest which is too long to be read; on all ranks alike.

    Raises:
        CheckpointError: names the longest.
    """
    lengths: dict[str, int] = {}
    for key in dict.fromkeys(key for one in everyone for key in one):
        of_ranks = [one[key] for one in everyone if key in one]
        same = len(set(of_ranks)) == 1 and len(of_ranks) == len(everyone)
        lengths[key] = of_ranks[0][1] if same else sum(length for _, length in of_ranks)
    if sum(lengths.values()) > MOST_JSON:
        longest = max(lengths, key=lambda key: lengths[key])
        raise CheckpointError(
            "Values to save are too long: what is no tensor, array or bytes is kept as text, and read as a whole.",
            parameter=longest,
            expected=f"at most {MOST_JSON} characters in all",
            got=f"{sum(lengths.values())}, {lengths[longest]} of them here",
            remedy="give long lists as tensors or NumPy arrays, and long texts as bytes: these are kept beside",
        )


def _digest(json_value: Any, tensors: Mapping[str, torch.Tensor]) -> Digest:
    text = json.dumps(json_value).encode()
    digest = hashlib.sha256(text)
    for name, tensor in tensors.items():
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(bytes_of(tensor) if tensor.numel() else b"")
    return digest.hexdigest(), len(text)
