"""Plain Python values to JSON and back: schedulers' states, settings, positions. Nothing is ever executed.

JSON has dicts with text keys, lists, text, numbers, true, false and null. Other types become a dict with one key:

    {"$tuple": [...]}   {"$set": [...]}   {"$frozenset": [...]}   {"$pairs": [[key, value], ...]}   a dict of any keys
    {"$counter": [[key, count], ...]}     {"$bytes": base64}      {"$float": "nan" | "inf" | "-inf"}
    {"$complex": [real, imaginary]}       {"$dtype": "float32"}   {"$size": [3, 4]}                 {"$device": "cpu"}
    {"$tensor": name}                     a tensor, stored among the checkpoint's tensors
    {"$array": name}                      the same, for a NumPy array
    {"$data": name}                       the same, for long bytes

NumPy's scalars become Python's. Anything else is an error that names its path.
"""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Any, cast

import numpy as np
import torch

from ..dtypes import dtype_name
from ..errors import CheckpointError

_MOST_DEEP = 64
"""The deepest nesting of containers in a manifest; only an attack or an accident is deeper."""
_OUTSIDE = 4  # levels of it that the manifest itself takes
_MOST_BYTES = 2**16  # the longest bytes that are stored in JSON
HUGE = 2**61 - 1
"""The modulus of Python's hash: two integers have the same hash only if one is at least this large."""
_MOST_ALIKE = 10_000  # the most keys with the same hash in one dict or set: many more take hours


def to_json(value: Any, path: str, tensors: dict[str, torch.Tensor], depth: int = 0) -> Any:
    """Convert `value` to JSON's types, and add the tensors in it to `tensors`, by path.

    Args:
        path: the name of the value, in error messages and in the names of tensors.

    Raises:
        CheckpointError: a value is not of a plain class, or `from_json` would refuse it.
    """
    if depth > _MOST_DEEP - _OUTSIDE:
        raise CheckpointError(
            "A value cannot be saved in a checkpoint: it is nested too deeply, or contains itself.",
            parameter=f"{path[:100]}...",
            expected=f"at most {_MOST_DEEP - _OUTSIDE} nested containers",
        )
    if isinstance(value, (bytes, bytearray)) and len(value) > _MOST_BYTES:
        return {"$data": _tensor_out(np.frombuffer(value, np.uint8), path, tensors)["$array"]}
    for kind, tag, write, _ in _ATOMS:
        if isinstance(value, kind):
            return write(value) if tag is None else {tag: write(value)}
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return _tensor_out(value, path, tensors)
    if isinstance(value, Mapping):
        return _dict_out(value, path, tensors, depth)
    for kind, tag in _SEQUENCES.items():
        if type(value) is kind:
            if kind in (set, frozenset):
                _check_keys(cast(Any, value), path)
            items: Any = sorted(cast(Any, value), key=repr) if kind in (set, frozenset) else value
            items_as_json = [to_json(item, f"{path}.{i}", tensors, depth + 1) for i, item in enumerate(items)]
            return items_as_json if tag is None else {tag: items_as_json}
    raise _refused(value, path, "numbers, text, tensors, and plain tuples, lists, sets and dicts of them")


def _tensor_out(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    first_path = path
    while path in tensors:  # {"a.b": ...} and {"a": {"b": ...}} have the same path
        path = f"{first_path}~{len(tensors)}"
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "biufc":
            raise _refused(value, path, "an array of numbers")
        try:
            tensors[path] = torch.from_numpy(np.array(value, copy=True))
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                "An array cannot be saved in a checkpoint: torch has no such dtype.",
                parameter=path,
                got=f"dtype {value.dtype}, of {value.dtype.itemsize} bytes, in {value.dtype.byteorder!r} order",
                remedy="convert it, as in array.astype(numpy.float64)",
            ) from error
        return {"$array": path}
    if type(value) not in (torch.Tensor, torch.nn.Parameter) and not hasattr(value, "full_tensor"):
        raise _refused(value, path, "a plain or a sharded tensor")
    tensors[path] = value.detach()
    return {"$tensor": path}


def _dict_out(value: Mapping[Any, Any], path: str, tensors: dict[str, torch.Tensor], depth: int) -> Any:
    plain = all(type(key) is str and not key.startswith("$") for key in value)
    if type(value) is Counter or not plain:
        _check_keys(value, path)
        tag = "$counter" if type(value) is Counter else "$pairs"
        return {
            tag: [
                [to_json(key, f"{path}.{i}", tensors, depth + 1), to_json(item, f"{path}.{i}", tensors, depth + 1)]
                for i, (key, item) in enumerate(value.items())
            ]
        }
    return {key: to_json(item, f"{path}.{key}", tensors, depth + 1) for key, item in value.items()}


def _check_keys(keys: Collection[Hashable], path: str) -> None:
    try:
        refuse_alike(keys)
    except ValueError as error:
        raise CheckpointError(
            "A dict or set cannot be saved in a checkpoint: a load would refuse its keys.",
            parameter=path,
            expected=f"at most {_MOST_ALIKE} keys with the same hash",
            got=str(error),
            remedy="save the keys as a list",
        ) from None


def _refused(value: Any, path: str, expected: str) -> CheckpointError:
    return CheckpointError(
        f"A value cannot be saved in a checkpoint: loading a {type(value).__module__}.{type(value).__qualname__} would "
        "execute code that the checkpoint names.",
        parameter=path,
        expected=expected,
        remedy="return plain values from state_dict(), and rebuild the object from them in load_state_dict()",
        topic="not-plain-values",
    )


def from_json(value: Any, tensor: Callable[[str], torch.Tensor], path: str = "", depth: int = 0) -> Any:
    """Convert the JSON that `to_json` returned back to the value.

    Args:
        tensor: returns a tensor by its name.

    Raises:
        CheckpointError: it contains something that `to_json` does not write.
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
    except Exception as error:  # constructors may raise anything for invalid arguments
        raise _unknown(path, value) from error


def _tagged(tag: str, inner: Any, tensor: Callable[[str], torch.Tensor], path: str, depth: int) -> Any:
    if tag in ("$tensor", "$array", "$data"):
        stored = tensor(str(inner))
        return stored if tag == "$tensor" else stored.numpy() if tag == "$array" else stored.numpy().tobytes()
    if tag in ("$pairs", "$counter"):
        keys = [from_json(key, tensor, path, depth + 1) for key, _ in inner]
        refuse_alike(keys)
        pairs = {key: from_json(item, tensor, path, depth + 1) for key, (_, item) in zip(keys, inner, strict=True)}
        if len(pairs) != len(inner):
            raise ValueError("a duplicate key")
        return pairs if tag == "$pairs" else Counter(pairs)
    for kind, kind_tag in _SEQUENCES.items():
        if tag == kind_tag:
            items = [from_json(item, tensor, path, depth + 1) for item in inner]
            if kind in (set, frozenset):
                refuse_alike(items)
            return kind(items)
    for _, kind_tag, _, read in _ATOMS:
        if tag == kind_tag:
            return read(inner)
    if tag == "$float":
        return _float_in({tag: inner})
    raise _unknown(path, {tag: inner})


def refuse_alike(keys: Collection[Hashable]) -> None:
    """Refuse different keys so many of which have the same hash that they must have been chosen for it.

    Raises:
        ValueError: there are too many.
    """
    count = max(Counter(map(hash, keys)).values()) if len(keys) > _MOST_ALIKE else 0
    if count > _MOST_ALIKE:
        raise ValueError(f"{count} keys have the same hash")


def _unknown(path: str, value: Any) -> CheckpointError:
    return CheckpointError(
        "A checkpoint contains a value of a kind unknown to this version of Fullshard.",
        parameter=path,
        got=str(value)[:80],
        remedy="load it with the version of Fullshard that wrote it",
    )


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For `json.loads(object_pairs_hook=)`: a dict without duplicate keys.

    Raises:
        ValueError: a key is a duplicate.
    """
    result = dict(pairs)
    if len(result) != len(pairs):
        duplicate, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"{duplicate[:100]!r} is a duplicate key")
    return result


def dtype_named(name: Any) -> torch.dtype:
    """The reverse of `dtype_name`.

    Raises:
        ValueError: the dtype does not exist.
    """
    if not isinstance(name, str) or name not in DTYPES:
        raise ValueError(f"no dtype {name!r}")
    return DTYPES[name]


DTYPES = {dtype_name(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


def _float_out(value: Any) -> Any:
    return float(value) if math.isfinite(value) else {"$float": str(float(value))}


def _float_in(value: Any) -> float:
    """The reverse of `_float_out`; raises ValueError or KeyError for other values."""
    if isinstance(value, dict) and value["$float"] not in ("nan", "inf", "-inf"):
        raise ValueError("not a number")
    return float(value["$float"] if isinstance(value, dict) else value)


_SEQUENCES: dict[type, str | None] = {list: None, tuple: "$tuple", set: "$set", frozenset: "$frozenset"}
_ATOMS: tuple[tuple[Any, str | None, Callable[[Any], Any], Any], ...] = (
    ((bool, str, type(None)), None, lambda v: v, None),
    (np.bool_, None, bool, None),
    ((int, np.integer), None, int, None),
    ((float, np.floating), None, _float_out, None),
    (
        (bytes, bytearray),
        "$bytes",
        lambda v: base64.b64encode(v).decode(),
        lambda v: base64.b64decode(v, validate=True),
    ),
    (
        (complex, np.complexfloating),
        "$complex",
        lambda v: [_float_out(v.real), _float_out(v.imag)],
        lambda v: complex(*map(_float_in, v)),
    ),
    (torch.dtype, "$dtype", dtype_name, dtype_named),
    (torch.Size, "$size", list, lambda v: torch.Size([int(n) for n in v])),
    (torch.device, "$device", str, torch.device),
)
"""Classes, their tag (None: JSON has the type), and the functions that write and read a value."""
