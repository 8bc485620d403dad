"""Plain Python values as JSON, and back: schedulers' states, settings, positions. Nothing is ever executed.

JSON knows dicts with text keys, lists, text, numbers, true, false and null. What else is needed is a dict of one key:

    {"$tuple": [...]}   {"$set": [...]}   {"$frozenset": [...]}   {"$pairs": [[key, value], ...]}   a dict of any keys
    {"$counter": [[key, count], ...]}     {"$bytes": base64}      {"$float": "nan" | "inf" | "-inf"}
    {"$complex": [real, imaginary]}       {"$dtype": "float32"}   {"$size": [3, 4]}                 {"$device": "cpu"}
    {"$tensor": name}                     kept among the checkpoint's tensors
    {"$array": name}                      the same, of NumPy's
    {"$data": name}                       the same, of bytes that are too many for JSON

NumPy's scalars become Python's. Anything else is refused, by its path.
"""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
import torch

from ..errors import CheckpointError
from .pickles import HUGE, refuse_alike

_MOST_DEEP = 64
"""Containers within containers; what is deeper comes from an attack or an accident."""
_OUTSIDE = 4  # of them are the manifest's own
_MOST_BYTES = 2**16  # of a value that are kept in JSON, as text


def to_json(value: Any, path: str, tensors: dict[str, torch.Tensor], depth: int = 0) -> Any:
    """`value` as JSON's types; tensors in it are added to `tensors`, by their paths.

    Args:
        path: what the value is called, in errors and in the names of tensors.

    Raises:
        CheckpointError: a value of a class that is not plain, or nested deeper than `from_json` reads.
    """
    if depth > _MOST_DEEP - _OUTSIDE:
        raise CheckpointError(
            "A value cannot be kept in a checkpoint: it is nested too deeply, or within itself.",
            parameter=f"{path[:100]}...",
            expected=f"at most {_MOST_DEEP - _OUTSIDE} containers within each other",
        )
    simple = _simple(value)
    if simple is not _OTHER:
        return simple
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return _tensor_out(value, path, tensors)
    if isinstance(value, (bytes, bytearray)) and len(value) > _MOST_BYTES:
        return {"$data": _tensor_out(np.frombuffer(value, np.uint8), path, tensors)["$array"]}
    if isinstance(value, Mapping):
        return _dict_out(value, path, tensors, depth)
    for kind, tag in _SEQUENCES.items():
        if type(value) is kind:
            items: Any = sorted(cast(Any, value), key=repr) if kind in (set, frozenset) else value
            items_as_json = [to_json(item, f"{path}.{i}", tensors, depth + 1) for i, item in enumerate(items)]
            return items_as_json if tag is None else {tag: items_as_json}
    for kind, tag, write, _ in _ATOMS:
        if isinstance(value, kind):
            return {tag: write(value)}
    raise _refused(value, path, "numbers, text, tensors, and plain tuples, lists, sets and dicts of them")


_OTHER = object()


def _simple(value: Any) -> Any:
    """What JSON has a type for; `_OTHER` if it has none."""
    simple: Any = _OTHER
    if value is None or isinstance(value, (bool, str)):
        simple = value
    elif isinstance(value, np.bool_):
        simple = bool(value)
    elif isinstance(value, (int, np.integer)):
        simple = int(value)
    elif isinstance(value, (float, np.floating)):
        simple = float(value) if math.isfinite(value) else {"$float": str(float(value))}
    return simple


def _tensor_out(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    first_path = path
    while path in tensors:  # {"a.b": ...} and {"a": {"b": ...}} have one path
        path = f"{first_path}~{len(tensors)}"
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "biufc":
            raise _refused(value, path, "an array of numbers")
        tensors[path] = torch.from_numpy(np.array(value, copy=True))
        return {"$array": path}
    if type(value) not in (torch.Tensor, torch.nn.Parameter) and not hasattr(value, "full_tensor"):
        raise _refused(value, path, "a plain or a sharded tensor")
    tensors[path] = value.detach()
    return {"$tensor": path}


def _dict_out(value: Mapping[Any, Any], path: str, tensors: dict[str, torch.Tensor], depth: int) -> Any:
    plain = all(type(key) is str and not key.startswith("$") for key in value)
    if type(value) is Counter or not plain:
        tag = "$counter" if type(value) is Counter else "$pairs"
        return {
            tag: [
                [to_json(key, f"{path}.{i}", tensors, depth + 1), to_json(item, f"{path}.{i}", tensors, depth + 1)]
                for i, (key, item) in enumerate(value.items())
            ]
        }
    return {key: to_json(item, f"{path}.{key}", tensors, depth + 1) for key, item in value.items()}


def _refused(value: Any, path: str, expected: str) -> CheckpointError:
    return CheckpointError(
        f"A value cannot be kept in a checkpoint: loading a {type(value).__module__}.{type(value).__qualname__} would "
        "mean to execute what the checkpoint says.",
        parameter=path,
        expected=expected,
        remedy="let state_dict() return plain values, and make the object of them in load_state_dict()",
        topic="not-plain-values",
    )


def from_json(value: Any, tensor: Callable[[str], torch.Tensor], path: str = "", depth: int = 0) -> Any:
    """What `to_json` made JSON of.

    Args:
        tensor: gives those that are kept apart, by name.

    Raises:
        CheckpointError: something that `to_json` does not write.
    """
    if depth > _MOST_DEEP:
        raise CheckpointError("A checkpoint's values are nested too deeply.", parameter=path, expected=_MOST_DEEP)
    if isinstance(value, list):
        return [from_json(item, tensor, f"{path}.{i}", depth + 1) for i, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if not tag.startswith("$"):
        return {key: from_json(item, tensor, f"{path}.{key}", depth + 1) for key, item in value.items()}
    try:
        return _tagged(tag, value[tag], tensor, path, depth)
    except CheckpointError:
        raise
    except Exception as error:  # whatever constructors make of what is none of theirs
        raise _unknown(path, value) from error


def _tagged(tag: str, inner: Any, tensor: Callable[[str], torch.Tensor], path: str, depth: int) -> Any:
    if tag in ("$tensor", "$array", "$data"):
        found = tensor(str(inner))
        return found if tag == "$tensor" else found.numpy() if tag == "$array" else found.numpy().tobytes()
    if tag in ("$pairs", "$counter"):
        refuse_alike(sum(_is_huge(key) for key, _ in inner))
        pairs = {
            from_json(key, tensor, path, depth + 1): from_json(item, tensor, path, depth + 1) for key, item in inner
        }
        if len(pairs) != len(inner):
            raise ValueError("a key is there twice")
        return pairs if tag == "$pairs" else Counter(pairs)
    if tag in ("$set", "$frozenset"):
        refuse_alike(sum(map(_is_huge, inner)))
    for kind, known in _SEQUENCES.items():
        if tag == known:
            return kind(from_json(item, tensor, path, depth + 1) for item in inner)
    for _, known, _, read in _ATOMS:
        if tag == known:
            return read(inner)
    if tag == "$float" and inner in ("nan", "inf", "-inf"):
        return float(inner)
    raise _unknown(path, {tag: inner})


def _is_huge(value: Any) -> bool:
    """Whether a key is, or holds, integers that Python may hash alike."""
    values = next(iter(value.values())) if isinstance(value, dict) and len(value) == 1 else value
    return any(type(one) is int and abs(one) >= HUGE for one in (values if isinstance(values, list) else [values]))


def _unknown(path: str, value: Any) -> CheckpointError:
    return CheckpointError(
        "A checkpoint holds a value of a kind that this version does not know.",
        parameter=path,
        got=str(value)[:80],
        remedy="load it with the version of Fullshard that wrote it",
    )


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For `json.loads(object_pairs_hook=)`: a dict, of which no key may be there twice.

    Raises:
        ValueError: one is.
    """
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"{twice[:100]!r} is there twice")
    return result


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: Any) -> torch.dtype:
    """The reverse of `dtype_name`.

    Raises:
        ValueError: there is no such dtype.
    """
    dtype = getattr(torch, name, None) if isinstance(name, str) and name.isidentifier() else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"no dtype {name!r}")
    return dtype


_SEQUENCES: dict[type, str | None] = {list: None, tuple: "$tuple", set: "$set", frozenset: "$frozenset"}
_ATOMS: tuple[tuple[Any, str, Callable[[Any], Any], Callable[[Any], Any]], ...] = (
    (
        (bytes, bytearray),
        "$bytes",
        lambda v: base64.b64encode(v).decode(),
        lambda v: base64.b64decode(v, validate=True),
    ),
    (complex, "$complex", lambda v: [v.real, v.imag], lambda v: complex(*v)),
    (torch.dtype, "$dtype", dtype_name, dtype_named),
    (torch.Size, "$size", list, lambda v: torch.Size([int(n) for n in v])),
    (torch.device, "$device", str, torch.device),
)
