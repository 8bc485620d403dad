"""What a nested state dict holds, under the names that checkpoints have here; and the nested state dict of such names.

{"model": {...}, "optimizer": {"state": {...}, "param_groups": [...]}, "epoch": 3, "rng": tensor}

model.layers.0.weight                           tensors of the model, however deep they were nested
optimizer.state.layers.0.weight.exp_avg         of the optimizer
values["optimizer"]["param_groups"]             settings of the optimizer's groups
values["optimizer"]["scalars"][parameter][key]  its state that is no tensor
values["step"]                                  a number of that name
values["state"]["epoch"]                        everything else, with the tensors that are in it
values["state"]["model.norm._extra_state"]      what a module adds to a state dict that is no tensor
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch

from ...errors import CheckpointError, DamagedCheckpointError
from ..source import MODEL, MOST_NAME, OPTIMIZER, state_path
from .built import Call, Global, Sharded, Stored

MODEL_KEYS = ("model", "state_dict", "model_state_dict", "module")
OPTIMIZER_KEYS = ("optimizer", "optimizer_state_dict", "optim", "optimizer_state", "optim_state_dict")
GROUPS = "param_groups"
DEEPEST = 64  # containers within containers
MOST = 2_000_000  # tensors and values: one dict may be in a pickle a million times, and each is one more name

UNNAMED = (
    "parameters of the optimizer's state have numbers in place of names, as the file does not say which is which; "
    "an optimizer that was made of model.named_parameters() does"
)


def nothing(made: Call) -> Any:
    """No class is understood."""
    return None


@dataclass(eq=False)
class State:
    """See the module's docstring.

    Args:
        what: the file, for errors.
        show: makes of a tensor in the file one for `values`.
        understand: what a class that a library wraps its tensors in stands for; None: it is refused.

    Attributes:
        tensors: by name.
        values: what is none of these.
    """

    what: str
    show: Callable[[str, Stored], torch.Tensor]
    understand: Callable[[Call], Any] = nothing
    tensors: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    count: int = 0

    def add_model(self, model: Mapping[Any, Any]) -> None:
        """A model's state dict, flat or nested."""
        self._flatten(model, MODEL.removesuffix("."), 0)

    def _flatten(self, tree: Mapping[Any, Any], path: str, depth: int) -> None:
        for key, value in tree.items():
            self.counted(depth)
            name = f"{path}.{key}"
            if isinstance(value, dict) and not str(key).endswith("_extra_state"):
                self._flatten(value, name, depth + 1)
            else:
                self.add(name, value)

    def add(self, name: str, value: Any) -> None:
        """A tensor, or what is in place of one."""
        if len(name) > MOST_NAME:
            raise CheckpointError(
                f"{self.what}: the name of a tensor is too long to be one.",
                parameter=f"{name[:100]}...",
                expected=f"at most {MOST_NAME} characters",
                got=len(name),
            )
        value = self.understood(value, name)
        if isinstance(value, Stored | Sharded):
            if name in self.tensors:
                raise CheckpointError(f"{self.what}: two tensors would have the same name.", parameter=name)
            self.tensors[name] = value
        else:
            self.values.setdefault("state", {})[name] = self.plain(value, name)

    def add_optimizer(self, optimizer: Mapping[Any, Any]) -> None:
        """An optimizer's state dict: `state`, by name or number, and `param_groups`."""
        names = _names_by_number(optimizer[GROUPS])
        into = self.values.setdefault("optimizer", {})
        for key, state in optimizer["state"].items():
            name = names.get(key, key)
            if not isinstance(state, dict):
                raise CheckpointError(f"{self.what}: the state of an optimizer is no dict.", parameter=str(name))
            if not isinstance(name, str):
                into["warning"] = UNNAMED
            left = self._state_of_one(state, f"{OPTIMIZER}{name}", 0)
            if left:
                into.setdefault("scalars", {})[str(name)] = left
        into[GROUPS] = []
        for index, group in enumerate(optimizer[GROUPS]):
            settings = {key: value for key, value in group.items() if key != "param_names" or not names}
            settings["params"] = [names.get(number, number) for number in group["params"]]
            into[GROUPS].append(self.plain(settings, f"optimizer.{GROUPS}.{index}"))
        for key in optimizer.keys() - {"state", GROUPS}:
            into[str(key)] = self.plain(optimizer[key], f"optimizer.{key}")

    def _state_of_one(self, state: Mapping[Any, Any], path: str, depth: int) -> dict[str, Any]:
        """Take the tensors, however nested; what is left."""
        left: dict[str, Any] = {}
        for key, value in state.items():
            self.counted(depth)
            name, value = f"{path}.{key}", self.understood(value, f"{path}.{key}")
            if isinstance(value, Stored | Sharded):
                self.add(name, value)
            elif isinstance(value, dict) and value:
                if inner := self._state_of_one(value, name, depth + 1):
                    left[str(key)] = inner
            else:
                left[str(key)] = self.plain(value, name)
        return left

    def add_other(self, key: str, value: Any) -> None:
        """Anything else of a checkpoint."""
        plain = self.plain(value, key)
        if key == "step" and type(plain) is int:
            self.values["step"] = plain
        else:
            self.values.setdefault("state", {})[key] = plain

    def plain(self, value: Any, path: str, depth: int = 0) -> Any:
        """A value with everything in it shown.

        Raises:
            CheckpointError: it holds a class, or is nested too deeply.
        """
        self.counted(depth)
        value = self.understood(value, path)
        if isinstance(value, Stored):
            return self.show(path, value)
        if isinstance(value, Sharded):
            raise CheckpointError(f"{self.what}: a sharded tensor that is of no model or optimizer.", parameter=path)
        if isinstance(value, dict):
            return {key: self.plain(item, f"{path}.{key}", depth + 1) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self.plain(item, f"{path}.{i}", depth + 1) for i, item in enumerate(value))
        return value

    def understood(self, value: Any, path: str) -> Any:
        """What a class stands for; all others as they are."""
        if isinstance(value, Call):
            if value.name == "argparse.Namespace" and isinstance(value.state, dict):
                return value.state
            meaning = self.understand(value)
            if meaning is None:
                raise refused(self.what, value.name, path)
            return meaning
        if isinstance(value, Global):
            raise refused(self.what, value.name, path)
        return value

    def counted(self, depth: int) -> None:
        """One more value, so deep."""
        self.count += 1
        if depth > DEEPEST or self.count > MOST:
            raise CheckpointError(f"{self.what} is nested too deeply, or holds too much, to be a checkpoint.")

    def add_all(self, root: Any) -> None:
        """What a file of `torch.save` holds.

        Raises:
            CheckpointError: it is no state dict, or holds classes.
        """
        root = self.understood(root, "")
        if not isinstance(root, dict):
            got = "a tensor" if isinstance(root, Stored | Sharded) else f"a {type(root).__name__}"
            raise CheckpointError(f"{self.what} holds no state dict.", expected="a dict", got=got)
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


def refused(what: str, name: str, path: str) -> CheckpointError:
    """What is said of a class or function that a file names and that is not loaded."""
    return CheckpointError(
        f"{what} holds more than tensors and plain values: {name}, which is not loaded, as that would execute it.",
        parameter=path or None,
        topic="not-plain-values",
    )


def _is_optimizer(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("state"), dict):
        return False
    groups = value.get(GROUPS)
    return isinstance(groups, list) and all(
        isinstance(group, dict) and _are_names(group.get("params")) for group in groups
    )


def _are_names(names: Any) -> TypeGuard[list[int | str]]:
    """Whether these are a group's parameters: names or numbers."""
    return isinstance(names, list) and all(type(name) in (int, str) for name in names)


def _names_by_number(groups: Iterable[Mapping[str, Any]]) -> dict[Any, str]:
    """Names of parameters by the numbers that plain PyTorch gives them; empty where a group does not say."""
    names: dict[Any, str] = {}
    for group in groups:
        numbers, its_names = group["params"], group.get("param_names")
        if not _are_names(its_names) or len(its_names) != len(numbers):
            return {}
        names |= {number: name for number, name in zip(numbers, its_names, strict=True) if isinstance(name, str)}
    return names if len(set(names.values())) == len(names) else {}


def nested(tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any]) -> dict[str, Any]:
    """The state dict that `torch.save` is given: a plain one of the model if there is nothing else.

    Args:
        tensors: by name; ties are the same tensor.
        values: what is none of these, with the tensors that are in it.

    Raises:
        CheckpointError: a value of a name that means something else in such a file.
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
        raise CheckpointError("A file of torch.save has no place for a value of this name.", parameter=min(taken))
    return root | state


def _optimizer(values: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], model: Iterable[str]) -> dict[str, Any]:
    groups = [dict(group) for group in values.get(GROUPS, [])]
    listed = [one for group in groups for one in group.get("params", [])]
    known = {*model, *map(str, listed)}
    state: dict[Any, dict[str, Any]] = {name: dict(own) for name, own in values.get("scalars", {}).items()}
    for name, tensor in tensors.items():
        last_dot = name.removeprefix(OPTIMIZER).rpartition(".")[::2]
        parameter, key = state_path(name, known) or last_dot
        put_nested(state, [parameter, *key.split(".")], tensor)
    numbers = {str(one): one for one in listed if isinstance(one, int)}
    other = {key: value for key, value in values.items() if key not in (GROUPS, "scalars", "warning")}
    return {"state": {numbers.get(name, name): own for name, own in state.items()}, GROUPS: groups, **other}


def put_nested(tree: dict[Any, Any], path: Sequence[Any], value: Any) -> None:
    """Put a value into nested dicts.

    Raises:
        DamagedCheckpointError: on its path there is a value.
    """
    *outer, last = path
    for key in outer:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            raise DamagedCheckpointError("Two values of a checkpoint have one name.", got=".".join(path))
    tree[last] = value


def leaves(root: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Everything in nested dicts, lists and tuples, with the keys that lead to it."""
    if isinstance(root, dict):
        for key, value in root.items():
            yield from leaves(value, (*path, key))
    elif isinstance(root, list | tuple):
        for index, value in enumerate(root):
            yield from leaves(value, (*path, index))
    else:
        yield path, root


def replaced(root: Any, tensor: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same nested dicts, lists and tuples, with other tensors."""
    if isinstance(root, torch.Tensor):
        return tensor(root)
    if isinstance(root, dict):
        return {key: replaced(value, tensor) for key, value in root.items()}
    if type(root) in (list, tuple):
        return type(root)(replaced(value, tensor) for value in root)
    return root
