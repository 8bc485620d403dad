"""Converts nested state dicts of training scripts to entries and values of a `Source`, and back.

{"model": {...}, "optimizer": {"state": {...}, "param_groups": [...]}, "epoch": 3, "rng": tensor}

model.layers.0.weight                           tensors of the model, at any depth of nesting
optimizer.state.layers.0.weight.exp_avg         tensors of the optimizer
values["optimizer"]["param_groups"]             settings of the optimizer's groups
values["optimizer"]["scalars"][parameter][key]  optimizer state that is not a tensor
values["step"]                                  an integer of that name
values["state"]["epoch"]                        everything else, including its tensors
values["state"]["model.norm._extra_state"]      a module's extra state that is not a tensor
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch

from ...errors import CheckpointError, DamagedCheckpointError
from ..names import MODEL, MODEL_KEYS, MOST_NAME, OPTIMIZER, OPTIMIZER_KEYS, state_path
from ..pickles import PickledCall, PickledName, PickledTensor

GROUPS = "param_groups"
DEEPEST = 64  # containers within containers
MOST = 2_000_000  # tensors and values: a pickle can refer to the same dict a million times

UNNAMED = (
    "optimizer state has numbers in place of names, because the file does not record the names; "
    "it does if the optimizer is created from model.named_parameters(). fullshard.load loads such a model, but "
    "refuses to load the optimizer"
)

_NOT_DENSE = {
    "torch._utils._rebuild_sparse_tensor": ("sparse", "tensor.to_dense()"),
    "torch._utils._rebuild_nested_tensor": ("nested", "the list of its tensors (tensor.unbind())"),
}
"""torch's functions for tensors that are not one array of elements: the kind, and what to save instead."""


@dataclass(frozen=True)
class TensorShards:
    """One rank's part of a tensor that is split over several files.

    Attributes:
        shape, dtype: of the whole tensor.
        parts: the rectangles in this file: the first index on every dim, and the tensor that holds the elements.
        world: the number of parts in all files.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[tuple[tuple[int, ...], PickledTensor], ...]
    world: int


@dataclass(eq=False)
class StateContents:
    """See the module's docstring.

    Args:
        file: its name, for error messages.
        read: reads a tensor in the file, for `values`.
        decode_call: the value of an instance of a library's tensor class; None: the class is refused.

    Attributes:
        tensors: by name.
        values: everything else, see `Source`.
    """

    file: str
    read: Callable[[str, PickledTensor], torch.Tensor]
    decode_call: Callable[[PickledCall], Any] = lambda call: None
    tensors: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    count: int = 0

    def add_model(self, model: Mapping[Any, Any], prefix: str = MODEL, depth: int = 0) -> None:
        """Add a model's state dict, flat or nested."""
        for key, value in model.items():
            self._count(depth)
            name = f"{prefix}{key}"
            if isinstance(value, dict) and not str(key).endswith("_extra_state"):
                self.add_model(value, f"{name}.", depth + 1)
            else:
                self._add(name, value)

    def _add(self, name: str, value: Any) -> None:
        """Add a tensor, or a value in place of one."""
        if len(name) > MOST_NAME:
            raise CheckpointError(
                f"{self.file}: the name of a tensor is too long.",
                parameter=f"{name[:100]}...",
                expected=f"at most {MOST_NAME} characters",
                got=len(name),
            )
        value = self._decoded(value, name)
        if isinstance(value, PickledTensor | TensorShards):
            if name in self.tensors:
                raise CheckpointError(f"{self.file}: two tensors have the same name.", parameter=name)
            self.tensors[name] = value
        else:
            self.values.setdefault("state", {})[name] = self.plain(value, name)

    def add_optimizer(self, optimizer: Mapping[Any, Any]) -> None:
        """Add an optimizer's state dict: `state`, by name or number, and `param_groups`."""
        names = _names_by_number(optimizer[GROUPS])
        values = self.values.setdefault("optimizer", {})
        for key, state in optimizer["state"].items():
            name = names.get(key, key)
            if not isinstance(state, dict):
                raise CheckpointError(f"{self.file}: the state of an optimizer is not a dict.", parameter=str(name))
            if not isinstance(name, str):
                values["warning"] = UNNAMED
            if scalars := self._add_state(state, f"{OPTIMIZER}{name}", 0):
                values.setdefault("scalars", {})[str(name)] = scalars
        values[GROUPS] = []
        for index, group in enumerate(optimizer[GROUPS]):
            settings = {key: value for key, value in group.items() if key != "param_names" or not names}
            settings["params"] = [names.get(number, number) for number in group["params"]]
            values[GROUPS].append(self.plain(settings, f"optimizer.{GROUPS}.{index}"))
        for key in optimizer.keys() - {"state", GROUPS}:
            values[str(key)] = self.plain(optimizer[key], f"optimizer.{key}")

    def _add_state(self, state: Mapping[Any, Any], path: str, depth: int) -> dict[str, Any]:
        """Add the tensors of a parameter's state, at any depth; returns the values that are not tensors."""
        scalars: dict[str, Any] = {}
        for key, value in state.items():
            self._count(depth)
            name, value = f"{path}.{key}", self._decoded(value, f"{path}.{key}")
            if isinstance(value, PickledTensor | TensorShards):
                self._add(name, value)
            elif isinstance(value, dict) and value:
                if inner := self._add_state(value, name, depth + 1):
                    scalars[str(key)] = inner
            else:
                scalars[str(key)] = self.plain(value, name)
        return scalars

    def add_other(self, key: str, value: Any) -> None:
        """Add any other value of a checkpoint."""
        plain = self.plain(value, key)
        if key == "step" and type(plain) is int:
            self.values["step"] = plain
        else:
            self.values.setdefault("state", {})[key] = plain

    def plain(self, value: Any, path: str, depth: int = 0) -> Any:
        """A value as plain Python objects and tensors.

        Raises:
            CheckpointError: it contains an instance of a class, or is nested too deeply.
        """
        self._count(depth)
        value = self._decoded(value, path)
        if isinstance(value, PickledTensor):
            return self.read(path, value)
        if isinstance(value, TensorShards):
            raise CheckpointError(
                f"{self.file}: a sharded tensor belongs to neither the model nor the optimizer.", parameter=path
            )
        if isinstance(value, dict):
            return {key: self.plain(item, f"{path}.{key}", depth + 1) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self.plain(item, f"{path}.{i}", depth + 1) for i, item in enumerate(value))
        return value

    def _decoded(self, value: Any, path: str) -> Any:
        """The value of an instance of a supported class; any other value unchanged."""
        if isinstance(value, PickledCall):
            if value.name == "argparse.Namespace" and isinstance(value.state, dict):
                return value.state
            try:
                decoded = self.decode_call(value)
            except Exception as error:  # its state may be anything
                reason = f"{type(error).__name__}: {error}"
                raise CheckpointError(f"{self.file}: {value.name} is damaged ({reason}).", parameter=path) from error
            if decoded is not None:
                return decoded
        if isinstance(value, PickledCall) and value.name in _NOT_DENSE:
            kind, remedy = _NOT_DENSE[value.name]
            raise CheckpointError(
                f"{self.file} contains a {kind} tensor, which is not supported.",
                parameter=path or None,
                expected="dense tensors",
                got=value.name,
                remedy=f"save {remedy} instead",
            )
        if isinstance(value, PickledCall | PickledName):
            raise CheckpointError(
                f"{self.file} contains {value.name}, not a tensor or plain value. Loading it would execute code.",
                parameter=path or None,
                topic="not-plain-values",
            )
        return value

    def _count(self, depth: int) -> None:
        """Count a value at this depth, and limit both."""
        self.count += 1
        if depth > DEEPEST or self.count > MOST:
            raise CheckpointError(f"{self.file} is nested too deeply, or contains too many values, for a checkpoint.")

    def add_all(self, root: Any) -> None:
        """Add the contents of a file of `torch.save`.

        Raises:
            CheckpointError: it is not a state dict, or contains instances of classes.
        """
        root = self._decoded(root, "")
        if not isinstance(root, dict):
            got = "a tensor" if isinstance(root, PickledTensor | TensorShards) else f"a {type(root).__name__}"
            raise CheckpointError(f"{self.file} does not contain a state dict.", expected="a dict", got=got)
        model = next((key for key in MODEL_KEYS if isinstance(root.get(key), dict)), None)
        optimizer = next((key for key in OPTIMIZER_KEYS if _is_optimizer(root.get(key))), None)
        if _is_optimizer(root):
            self.add_optimizer(root)
        elif model is None and optimizer is None:
            self.add_model(root)
        else:
            for key, value in root.items():
                if key == model:
                    self.add_model(value)
                elif key == optimizer:
                    self.add_optimizer(value)
                else:
                    self.add_other(str(key), value)


def _is_optimizer(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("state"), dict):
        return False
    groups = value.get(GROUPS)
    return isinstance(groups, list) and all(
        isinstance(group, dict) and _are_names(group.get("params")) for group in groups
    )


def _are_names(names: Any) -> TypeGuard[list[int | str]]:
    """Whether this is a list of parameter names or numbers."""
    return isinstance(names, list) and all(type(name) in (int, str) for name in names)


def _names_by_number(groups: Iterable[Mapping[str, Any]]) -> dict[Any, str]:
    """Parameter names by PyTorch's parameter numbers; empty if any group lacks names."""
    names: dict[Any, str] = {}
    for group in groups:
        numbers, group_names = group["params"], group.get("param_names")
        if not _are_names(group_names) or len(group_names) != len(numbers):
            return {}
        names |= {number: name for number, name in zip(numbers, group_names, strict=True) if isinstance(name, str)}
    return names if len(set(names.values())) == len(names) else {}


def nested(tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any]) -> dict[str, Any]:
    """The state dict to pass to `torch.save`: the model's own if there is nothing else.

    Args:
        tensors: by name; ties are the same tensor.
        values: everything else, see `Source`; may contain tensors.

    Raises:
        CheckpointError: a value has a name that is reserved in such a file.
    """
    state = dict(values.get("state", {}))
    model: dict[str, Any] = {n.removeprefix(MODEL): t for n, t in tensors.items() if n.startswith(MODEL)}
    for name in [name for name in state if name.startswith(MODEL)]:
        model[name.removeprefix(MODEL)] = state.pop(name)
    further = {key: value for key, value in values.items() if key not in ("state", "optimizer")}
    optimizer = values.get("optimizer") or {}
    rest = {name: tensor for name, tensor in tensors.items() if not name.startswith(MODEL)}
    if model and not (state or further or optimizer or rest):
        return model
    states = {name: tensor for name, tensor in rest.items() if name.startswith(OPTIMIZER)}
    others = {name: tensor for name, tensor in rest.items() if name not in states}
    root = {"model": model} if model else {}
    if optimizer or states:
        root["optimizer"] = _optimizer(optimizer, states, model)
    root |= others | further
    if taken := root.keys() & state.keys():
        raise CheckpointError("A file of torch.save has no place for a value with this name.", parameter=min(taken))
    return root | state


def _optimizer(values: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], model: Iterable[str]) -> dict[str, Any]:
    groups = [dict(group) for group in values.get(GROUPS, [])]
    listed = [parameter for group in groups for parameter in group.get("params", [])]
    parameters = {*model, *map(str, listed)}
    state: dict[Any, dict[str, Any]] = {name: dict(scalars) for name, scalars in values.get("scalars", {}).items()}
    for name, tensor in tensors.items():
        last_dot = name.removeprefix(OPTIMIZER).rpartition(".")[::2]
        parameter, key = state_path(name, parameters) or last_dot
        put_nested(state, [parameter, *key.split(".")], tensor)
    numbers = {str(number): number for number in listed if isinstance(number, int)}
    other = {key: value for key, value in values.items() if key not in (GROUPS, "scalars", "warning")}
    return {"state": {numbers.get(name, name): entries for name, entries in state.items()}, GROUPS: groups, **other}


def put_nested(tree: dict[Any, Any], path: Sequence[Any], value: Any) -> None:
    """Put a value into nested dicts.

    Raises:
        DamagedCheckpointError: its path leads through a value that is not a dict.
    """
    *outer, last = path
    for key in outer:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            raise DamagedCheckpointError("Two values of a checkpoint have the same name.", got=".".join(path))
    tree[last] = value


def leaves(root: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The leaves of nested dicts, lists and tuples, with their paths."""
    if isinstance(root, dict):
        for key, value in root.items():
            yield from leaves(value, (*path, key))
    elif isinstance(root, list | tuple):
        for index, value in enumerate(root):
            yield from leaves(value, (*path, index))
    else:
        yield path, root


def replaced(root: Any, tensor: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A copy of nested dicts, lists and tuples in which `tensor` replaces each tensor."""
    if isinstance(root, torch.Tensor):
        return tensor(root)
    if isinstance(root, dict):
        return {key: replaced(value, tensor) for key, value in root.items()}
    if type(root) in (list, tuple):
        return type(root)(replaced(value, tensor) for value in root)
    return root
