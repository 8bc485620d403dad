"""What a nested state dict holds, under the names that checkpoints have here; and the nested state dict of such names.

{"model": {...}, "optimizer": {"state": {...}, "param_groups": [...]}, "epoch": 3, "rng": tensor}

model.layers.0.weight                           tensors of the model, however deep they were nested
optimizer.state.layers.0.weight.exp_avg         of the optimizer
state.rng                                       other tensors
values["optimizer"]["param_groups"]             settings of the optimizer's groups
values["optimizer"]["scalars"][parameter][key]  its state that is no tensor
values["extra"]["model._extra_state"]           what the model holds that is no tensor
values["state"]["epoch"]                        everything else
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ...errors import CheckpointError
from ..source import MODEL, OPTIMIZER
from .built import Made, Named, Sharded, Stored

MODEL_KEYS = ("model", "state_dict", "model_state_dict", "module")
OPTIMIZER_KEYS = ("optimizer", "optimizer_state_dict", "optim", "optimizer_state", "optim_state_dict")
STATE = "state."
GROUPS = "param_groups"
DEEPEST = 64  # containers within containers
MOST = 5_000_000  # tensors and values: one dict may be in a pickle a million times, and each is one more name
_NOTHING = object()  # in place of what went to the tensors


@dataclass(eq=False)
class State:
    """See the module's docstring.

    Attributes:
        what: the file, for errors.
        tensors: by name.
        values: what is no tensor.
        understand: what a class that a library wraps its tensors in stands for; None: it is refused.
    """

    what: str
    tensors: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    count: int = 0
    understand: Callable[[Made], Any] = lambda made: None

    def add_model(self, model: Mapping[Any, Any]) -> None:
        """A model's state dict, flat or nested."""
        flat: dict[str, Any] = {}
        self._flatten(model, MODEL.removesuffix("."), flat, 0)
        for name, leaf in flat.items():
            plain = self.take(leaf, name)
            if plain is not _NOTHING:
                self.values.setdefault("extra", {})[name] = plain

    def _flatten(self, tree: Mapping[Any, Any], path: str, flat: dict[str, Any], depth: int) -> None:
        """Leaves by dotted names. A dict without any tensor in it is a leaf of extra state, and stays as it is."""
        self.counted(depth)
        for key, value in tree.items():
            name = f"{path}.{key}"
            if isinstance(value, dict) and not str(key).endswith("_extra_state"):
                self._flatten(value, name, flat, depth + 1)
            elif name in flat:
                raise CheckpointError(f"{self.what}: two tensors would have the same name.", parameter=name)
            else:
                flat[name] = value

    def add_optimizer(self, optimizer: Mapping[Any, Any]) -> None:
        """An optimizer's state dict: `state`, by name or number, and `param_groups`."""
        names = _names_by_number(optimizer[GROUPS])
        into = self.values.setdefault("optimizer", {})
        unnamed = False
        for key, state in optimizer["state"].items():
            name = names.get(key, key)
            unnamed |= not isinstance(name, str)
            if not isinstance(state, dict):
                raise CheckpointError(f"{self.what}: the state of an optimizer is no dict.", parameter=str(name))
            plain = self.take(state, f"{OPTIMIZER}{name}")
            if plain is not _NOTHING and plain:
                into.setdefault("scalars", {})[str(name)] = plain
        groups = []
        for index, group in enumerate(optimizer[GROUPS]):
            renamed = {key: value for key, value in group.items() if key != "param_names" or not names}
            renamed["params"] = [names.get(one, one) for one in group.get("params", [])]
            left = self.take(renamed, f"optimizer.{GROUPS}.{index}")
            groups.append({} if left is _NOTHING else left)
        into[GROUPS] = groups
        if unnamed:
            into["warning"] = (
                "Parameters of the optimizer's state have numbers in place of names: the file does not say which is "
                "which. Make the optimizer of model.named_parameters() before saving, and the file has param_names."
            )
        for key in optimizer.keys() - {"state", GROUPS}:
            plain = self.take(optimizer[key], f"optimizer.{key}")
            if plain is not _NOTHING:
                into[str(key)] = plain

    def add_other(self, key: str, value: Any) -> None:
        """Anything else of a checkpoint."""
        plain = self.take(value, f"{STATE}{key}")
        if plain is not _NOTHING:
            self.values.setdefault("state", {})[key] = plain

    def take(self, value: Any, path: str, depth: int = 0) -> Any:
        """Put the tensors of a value among `tensors`; what is left of it.

        Raises:
            CheckpointError: it holds a class, or is nested too deeply.
        """
        self.counted(depth)
        if isinstance(value, Made):
            value = self.understanding(value, path)
        if isinstance(value, Stored | Sharded):
            if path in self.tensors:
                raise CheckpointError(f"{self.what}: two tensors would have the same name.", parameter=path)
            self.tensors[path] = value
            return _NOTHING
        if isinstance(value, dict):
            left = {key: self.take(item, f"{path}.{key}", depth + 1) for key, item in value.items()}
            kept = {key: item for key, item in left.items() if item is not _NOTHING}
            return _NOTHING if left and not kept else kept
        if isinstance(value, list | tuple | set | frozenset):
            items = [self.take(item, f"{path}.{i}", depth + 1) for i, item in enumerate(value)]
            if _NOTHING in items:  # positions become keys, so that the rest keeps its own
                kept = {str(i): item for i, item in enumerate(items) if item is not _NOTHING}
                return kept or _NOTHING
            return type(value)(items)
        if isinstance(value, Named):
            raise refused(self.what, value.name, path)
        return value

    def understanding(self, made: Made, path: str) -> Any:
        """What a class stands for."""
        if made.name == "argparse.Namespace" and isinstance(made.state, dict):
            return made.state
        found = self.understand(made)
        if found is None:
            raise refused(self.what, made.name, path)
        return found

    def counted(self, depth: int) -> None:
        """One more value, so deep."""
        self.count += 1
        if depth > DEEPEST or self.count > MOST:
            raise CheckpointError(f"{self.what} is nested too deeply, or holds too much, to be a checkpoint.")


def refused(what: str, name: str, path: str | None = None) -> CheckpointError:
    """What is said of a class or function that a file names and that is not loaded."""
    return CheckpointError(
        f"{what} holds more than tensors and plain values: {name}, which is not loaded, as that would execute it.",
        parameter=path,
    )


def state_of(root: Any, what: str, understand: Callable[[Made], Any] = lambda made: None) -> State:
    """What a file of `torch.save` holds.

    Args:
        root: as decoded from its pickle.
        what: the file, for errors.
        understand: see `State`.

    Raises:
        CheckpointError: it is no state dict, or holds classes.
    """
    if isinstance(root, Named | Made):
        raise refused(what, root.name)
    if not isinstance(root, dict):
        raise CheckpointError(f"{what} holds no state dict.", expected="a dict", got=type(root).__name__.lower())
    state = State(what, understand=understand)
    model = next((key for key in MODEL_KEYS if isinstance(root.get(key), dict)), None)
    optimizer = next((key for key in OPTIMIZER_KEYS if _is_optimizer(root.get(key))), None)
    if _is_optimizer(root):
        state.add_optimizer(root)
    elif model is None and optimizer is None:
        state.add_model(root)
    else:
        for key, value in root.items():
            if key == model:
                state.add_model(value)
            elif key == optimizer:
                state.add_optimizer(value)
            else:
                state.add_other(str(key), value)
    return state


def _is_optimizer(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("state"), dict):
        return False
    groups = value.get(GROUPS)
    return isinstance(groups, list) and all(isinstance(group, dict) for group in groups)


def _names_by_number(groups: Iterable[Mapping[str, Any]]) -> dict[Any, str]:
    """Names of parameters by the numbers that plain PyTorch gives them; empty where a group does not say."""
    names: dict[Any, str] = {}
    for group in groups:
        numbers, told = group.get("params"), group.get("param_names")
        if not isinstance(numbers, list) or not isinstance(told, list) or len(told) != len(numbers):
            return {}
        if not all(isinstance(name, str) for name in told):
            return {}
        names |= dict(zip(numbers, told, strict=True))
    return names if len(set(names.values())) == len(names) else {}


def nested(tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any]) -> dict[str, Any]:
    """The state dict that `torch.save` is given: a plain one of the model if there is nothing else.

    Args:
        tensors: by name; ties are the same tensor.
        values: what is no tensor.
    """
    model: dict[str, Any] = {n.removeprefix(MODEL): t for n, t in tensors.items() if n.startswith(MODEL)}
    model |= {name.removeprefix(MODEL): value for name, value in values.get("extra", {}).items()}
    told = {key: value for key, value in values.items() if key != "extra" and value not in ({}, [], None)}
    rest = {name: tensor for name, tensor in tensors.items() if not name.startswith(MODEL)}
    if not told and not rest:
        return model
    root: dict[str, Any] = {}
    state = told.pop("state", {})
    root |= state if isinstance(state, dict) and not {*MODEL_KEYS, *OPTIMIZER_KEYS} & state.keys() else {"state": state}
    optimizer = told.pop("optimizer", None)
    if optimizer is not None or any(name.startswith("optimizer.") for name in rest):
        root["optimizer"] = _optimizer(optimizer or {}, rest, model)
    for name, tensor in rest.items():
        if not name.startswith("optimizer."):
            _put(root, name.removeprefix(STATE).split("."), tensor)
    root |= told
    return {"model": model, **root} if model else root


def _optimizer(values: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], model: Iterable[str]) -> dict[str, Any]:
    groups = [dict(group) for group in values.get(GROUPS, [])]
    listed = [str(one) for group in groups for one in group.get("params", [])]
    known = {*model, *listed}
    state: dict[Any, dict[str, Any]] = {name: dict(own) for name, own in values.get("scalars", {}).items()}
    other: dict[str, Any] = {k: v for k, v in values.items() if k not in (GROUPS, "scalars", "warning")}
    for name, tensor in tensors.items():
        if name.startswith(OPTIMIZER):
            parameter, keys = split(name.removeprefix(OPTIMIZER), known)
            _put(state.setdefault(parameter, {}), keys, tensor)
        elif name.startswith(f"optimizer.{GROUPS}."):
            index, _, key = name.removeprefix(f"optimizer.{GROUPS}.").partition(".")
            _put(groups[int(index)], key.split("."), tensor)
        elif name.startswith("optimizer."):
            _put(other, name.removeprefix("optimizer.").split("."), tensor)
    numbers = {str(one): one for group in groups for one in group.get("params", []) if isinstance(one, int)}
    return {"state": {numbers.get(name, name): own for name, own in state.items()}, GROUPS: groups, **other}


def split(name: str, parameters: set[str]) -> tuple[str, list[str]]:
    """A parameter's name and the keys of its state: by the longest known name, else at the last dot."""
    parts = name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        if ".".join(parts[:count]) in parameters:
            return ".".join(parts[:count]), parts[count:]
    return ".".join(parts[:-1]), parts[-1:]


def _put(tree: dict[str, Any], keys: list[str], value: Any) -> None:
    for key in keys[:-1]:
        tree = tree.setdefault(key, {})
    tree[keys[-1]] = value
