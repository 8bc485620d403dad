"""Frozen weights of quantised tensor classes (torchao's int8, int4 and NF4, and similar), split over ranks.

Such a class is made of plain tensors: low-bit numbers, scales. It need not support splitting or gathering. Each of
these tensors is cut into as many pieces as the weight has rows, whatever the pieces mean, and the weight is rebuilt
from all of them for each use. So ranks store and send only quantised bytes, and compute with the original weight, bit
for bit.

                      weight, int8 [4, 8]             rank 0                   rank 1
    numbers           [4, 8] int8                     pieces 0, 1  [2, 8]      pieces 2, 3
    scales            [4, 1] float32                  pieces 0, 1  [2, 1]      pieces 2, 3
    levels of NF4     [16]  (not divisible by 4 rows, or tiny)                 entire on every rank

    from fullshard.integrations.quantised import by_rows

    by_rows(model)      # fullshard.integrations.hf.shard calls it
    fully_shard(model)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..errors import ConfigError, NotSupportedError
from ..forms import FlatShard

_WHOLE_AT_MOST = 1 / 16
"""Largest fraction of a weight's bytes that every rank may hold because they cannot be cut."""

aten: Any = torch.ops.aten


@dataclass(frozen=True)
class Recipe:
    """How to rebuild a weight from its pieces.

    Attributes:
        cls: the weight's class.
        context: what its class records besides tensors.
        size, stride, dtype: the weight's; the dtype is what it appears to have.
        parts: tensors that are cut, by name: shape and stride of each when complete.
        whole: tensors that are not cut, by name.
    """

    cls: Any
    context: Any
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    parts: Mapping[str, tuple[torch.Size, tuple[int, ...]]]
    whole: Mapping[str, torch.Tensor]

    def rebuild(self, pieces: Mapping[str, torch.Tensor]) -> Any:
        """The weight, over the memory of all pieces [rows, ...]."""
        tensors = {name: pieces[name].view(-1).as_strided(*shape) for name, shape in self.parts.items()}
        device = next(iter(tensors.values())).device
        tensors |= {name: tensor.to(device) for name, tensor in self.whole.items()}
        return self.cls.__tensor_unflatten__(tensors, _on_device(self.context, device), self.size, self.stride)


def _on_device(context: Any, device: torch.device) -> Any:
    """A weight's context for a different device, which NF4 records in it."""
    meta = context.get("tensor_meta") if isinstance(context, dict) else None
    if meta is None or getattr(meta, "device", device) == device:
        return context
    return {**context, "tensor_meta": dataclasses.replace(meta, device=device)}


class QuantisedRows(torch.Tensor):
    """This rank's rows of a quantised weight, as pieces: can be moved, cut, copied and gathered, but not computed with.

    Args:
        pieces: by name, [rows, ...] each.
        recipe: how to rebuild the weight.
    """

    pieces: dict[str, torch.Tensor]
    recipe: Recipe

    @staticmethod
    def __new__(cls, pieces: dict[str, torch.Tensor], recipe: Recipe) -> QuantisedRows:
        first = next(iter(pieces.values()))
        size = (first.shape[0], *recipe.size[1:])
        return torch.Tensor._make_wrapper_subclass(cls, size, dtype=recipe.dtype, device=first.device)

    def __init__(self, pieces: dict[str, torch.Tensor], recipe: Recipe) -> None:
        self.pieces, self.recipe = pieces, recipe
        for name, piece in pieces.items():
            setattr(self, f"piece_{name}", piece)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return [f"piece_{name}" for name in self.pieces], self.recipe

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> QuantisedRows:
        return QuantisedRows({name.removeprefix("piece_"): tensor for name, tensor in inner.items()}, context)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"QuantisedRows({tuple(self.shape)} of a {self.recipe.cls.__name__} {tuple(self.recipe.size)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        first, rest = args[0], args[1:]
        if isinstance(first, cls):
            if func is aten.copy_.default and isinstance(rest[0], cls):
                for name, piece in first.pieces.items():
                    piece.copy_(rest[0].pieces[name])
                return first
            if func in _BY_ROWS:
                plain, dim = dict(kwargs or {}), next(iter(rest[_BY_ROWS[func] :]), 0)
                if dim == 0 and plain.pop("dtype", None) in (None, first.dtype):
                    return first._each(func, *rest, **plain)
            if func in _SAME_SHAPE and list(rest[0]) in ([first.numel()], list(first.shape), [-1]):
                return first._each(aten.alias.default)
        raise NotSupportedError(
            "A quantised weight that is split can only be moved, cut and gathered outside of its unit's forward.",
            got=f"{func} of {first!r}",
            remedy="call the module through its unit's forward, after fully_shard; to merge adapters, save them "
            "(hf.save_pretrained) and merge them on one process into a base model of 16 bits or more",
        )

    def _each(self, func: Any, *rest: Any, **kwargs: Any) -> Any:
        """Apply `func` to each piece; returns rows like these, or a list of them if `func` splits."""
        results = {name: func(piece, *rest, **kwargs) for name, piece in self.pieces.items()}
        if func is not aten.split.Tensor:
            return QuantisedRows(results, self.recipe)
        parts = zip(*results.values(), strict=True)
        return [QuantisedRows(dict(zip(results, part, strict=True)), self.recipe) for part in parts]

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any = None, outer_stride: Any = None, module: Any = None, mp_policy: Any = None
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        """The pieces, unchanged: quantised bytes."""
        return tuple(self.pieces.values()), (self.recipe, tuple(self.pieces))

    def fsdp_post_all_gather(
        self, outputs: tuple[torch.Tensor, ...], metadata: Any, param_dtype: Any, *, out: Any = None
    ) -> Any:
        """The weight, over the gathered memory; it computes in its input's dtype, whatever `param_dtype` says."""
        if out is not None:
            return None  # the weight already uses the gathered memory
        recipe, names = metadata
        return recipe.rebuild(dict(zip(names, outputs, strict=True))), outputs


_BY_ROWS = {
    aten.split.Tensor: 1,
    **dict.fromkeys((aten.slice.Tensor, aten.narrow.default, aten.detach.default, aten.alias.default), 0),
    **dict.fromkeys((aten.clone.default, aten._to_copy.default), 0),
}
"""Operations that can be applied to each piece, and where `dim`, if any, is among the arguments after the tensor."""

_SAME_SHAPE = {aten.view.default, aten.as_strided.default, aten._unsafe_view.default}


def by_rows(model: nn.Module) -> list[str]:
    """Prepare frozen quantised weights for sharding, so that each rank stores only its share of their bytes.

    Call it before `fully_shard`, and after code that checks the weights' class (PEFT). Tied weights stay tied.
    Trainable weights are left alone, and so are weights whose class defines its own gathering (`fsdp_pre_all_gather`),
    except NF4, whose own gathering requires rows in multiples of its blocks.

    Args:
        model: not sharded yet, or partly.

    Returns:
        The names of the prepared weights.

    Raises:
        ConfigError: a weight is not made of plain tensors, or cannot be split. Nothing has changed.
    """
    quantised = {
        name: parameter
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad and _is_quantised(parameter)
    }
    replace_parameters(model, {weight: rows_of(name, weight) for name, weight in quantised.items()})
    return list(quantised)


def replace_parameters(model: nn.Module, tensors: Mapping[nn.Parameter, torch.Tensor]) -> None:
    """Replace parameters by new ones, wherever the model has them: tied parameters stay tied."""
    new = {id(old): nn.Parameter(tensor, requires_grad=old.requires_grad) for old, tensor in tensors.items()}
    for module in model.modules():
        for name, old in module._parameters.items():
            if id(old) in new:
                module._parameters[name] = new[id(old)]


def _is_quantised(parameter: Any) -> bool:
    if isinstance(parameter, (DTensor, FlatShard, QuantisedRows)) or not hasattr(parameter, "__tensor_flatten__"):
        return False
    return not hasattr(parameter, "fsdp_pre_all_gather") or type(parameter).__name__ == "NF4Tensor"


def rows_of(name: str, weight: Any) -> QuantisedRows:
    """View a complete quantised weight as pieces that share its memory.

    Args:
        name: for errors.
        weight: an instance of a class with `__tensor_flatten__`.

    Raises:
        ConfigError: see `by_rows`.
    """
    names, context = weight.__tensor_flatten__()
    rows = weight.shape[0] if weight.dim() else 0
    pieces: dict[str, torch.Tensor] = {}
    parts: dict[str, Any] = {}
    whole: dict[str, torch.Tensor] = {}
    total = 0
    for inner in names:
        tensor: Any = getattr(weight, inner)
        if type(tensor) is not torch.Tensor:
            raise _cannot_split(name, weight, f"{inner}, a {type(tensor).__name__}")
        total += tensor.nbytes
        dense = aten.is_non_overlapping_and_dense(tensor)  # contiguous, in any order of dims
        if rows and tensor.numel() >= rows and tensor.numel() % rows == 0 and dense:
            pieces[inner] = tensor.detach().as_strided((rows, tensor.numel() // rows), (tensor.numel() // rows, 1))
            parts[inner] = (tensor.shape, tensor.stride())
        else:
            whole[inner] = tensor.detach()
    uncut = sum(tensor.nbytes for tensor in whole.values())
    if not pieces or (uncut > total * _WHOLE_AT_MOST and uncut > 4096):
        shapes = ", ".join(f"{inner} {tuple(tensor.shape)}" for inner, tensor in whole.items())
        raise _cannot_split(name, weight, f"{shapes}: {uncut} bytes")
    cls = next(cls for cls in type(weight).__mro__ if cls is not nn.Parameter)
    return QuantisedRows(pieces, Recipe(cls, context, weight.shape, weight.stride(), weight.dtype, parts, whole))


def _cannot_split(name: str, weight: Any, obstacle: str) -> ConfigError:
    return ConfigError(
        f"A quantised weight of class {type(weight).__name__} cannot be split over ranks.",
        parameter=name,
        expected=f"plain tensors, most of which can be cut into {weight.shape[0] if weight.dim() else 0} pieces",
        got=obstacle,
        remedy="add it to ignored_params, so that every rank holds it; or quantise it in another layout "
        "(Int8WeightOnlyConfig, IntxWeightOnlyConfig, NF4)",
    )
