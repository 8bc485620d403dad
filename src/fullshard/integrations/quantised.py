"""Frozen weights of classes that quantise (torchao's int8, int4 and NF4, and their like), split over ranks.

Such a class is made of plain tensors: numbers of few bits, scales. It need not know how to be split or gathered: here
each of these tensors is cut into as many pieces as the weight has rows, whatever the pieces mean, and the weight is
made again of all of them for each use. So what travels and what is kept are the quantised bytes, and what is computed
with is, bit for bit, the weight that was there before.

                      weight, int8 [4, 8]             rank 0                   rank 1
    numbers           [4, 8] int8                     pieces 0, 1  [2, 8]      pieces 2, 3
    scales            [4, 1] float32                  pieces 0, 1  [2, 1]      pieces 2, 3
    levels of NF4     [16]  (no multiple of 4 rows, or next to nothing)        whole on every rank

    from fullshard.integrations.quantised import by_rows

    by_rows(model)      # fullshard.integrations.hf.shard does it by itself
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
"""Of a weight's bytes, those that may be on every rank because they cannot be cut."""

aten: Any = torch.ops.aten


@dataclass(frozen=True)
class Recipe:
    """How a weight is made again of its pieces.

    Attributes:
        cls: its class.
        context: what its class notes besides tensors.
        size, stride: its own.
        parts: of tensors that are cut, by name: shape and stride when whole.
        whole: tensors that are not cut, by name.
    """

    cls: Any
    context: Any
    size: torch.Size
    stride: tuple[int, ...]
    parts: Mapping[str, tuple[torch.Size, tuple[int, ...]]]
    whole: Mapping[str, torch.Tensor]

    def make(self, pieces: Mapping[str, torch.Tensor]) -> Any:
        """The weight, over the memory of all pieces [rows, ...]."""
        inner = {name: pieces[name].view(-1).as_strided(*shape) for name, shape in self.parts.items()}
        device = next(iter(inner.values())).device
        kept = {name: tensor.to(device) for name, tensor in self.whole.items()}
        return self.cls.__tensor_unflatten__({**inner, **kept}, _on(self.context, device), self.size, self.stride)


def _on(context: Any, device: torch.device) -> Any:
    """NF4 notes its device in there."""
    meta = context.get("tensor_meta") if isinstance(context, dict) else None
    if meta is None or getattr(meta, "device", device) == device:
        return context
    return {**context, "tensor_meta": dataclasses.replace(meta, device=device)}


class QuantisedRows(torch.Tensor):
    """Pieces of a quantised weight, as many as it has rows here: moved, cut, copied, gathered; not computed with.

    Args:
        pieces: by name, [rows, ...] each.
        recipe: of the weight.
        dtype: that the weight shows.
    """

    pieces: dict[str, torch.Tensor]
    recipe: Recipe

    @staticmethod
    def __new__(cls, pieces: dict[str, torch.Tensor], recipe: Recipe, dtype: torch.dtype) -> QuantisedRows:
        first = next(iter(pieces.values()))
        return torch.Tensor._make_wrapper_subclass(
            cls, (first.shape[0], *recipe.size[1:]), dtype=dtype, device=first.device, requires_grad=False
        )

    def __init__(self, pieces: dict[str, torch.Tensor], recipe: Recipe, dtype: torch.dtype) -> None:
        self.pieces, self.recipe = pieces, recipe
        for name, piece in pieces.items():
            setattr(self, f"piece_{name}", piece)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return [f"piece_{name}" for name in self.pieces], (self.recipe, self.dtype)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> QuantisedRows:
        recipe, dtype = context
        return QuantisedRows({name.removeprefix("piece_"): tensor for name, tensor in inner.items()}, recipe, dtype)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"QuantisedRows({tuple(self.shape)} of a {self.recipe.cls.__name__} {tuple(self.recipe.size)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        first, rest = args[0], args[1:]
        if func is aten.copy_.default and isinstance(first, cls) and isinstance(rest[0], cls):
            for name, piece in first.pieces.items():
                piece.copy_(rest[0].pieces[name])
            return first
        if func in _BY_ROWS and isinstance(first, cls):
            along = rest[1] if func in _CUT and len(rest) > (1 if func is aten.split.Tensor else 0) else 0
            dim = along if func is aten.split.Tensor else (rest[0] if func in _CUT and rest else 0)
            plain = {key: value for key, value in (kwargs or {}).items() if key != "dtype"}
            if dim == 0 and _same_dtype(first, kwargs):
                return first._each(func, rest, plain)
        if (
            func in _SAME_SHAPE
            and isinstance(first, cls)
            and list(rest[0]) in ([first.numel()], list(first.shape), [-1])
        ):
            return first._each(aten.alias.default, (), {})
        if func is aten.new_zeros.default and isinstance(first, cls):
            made = {name: one.new_zeros((rest[0][0], *one.shape[1:])) for name, one in first.pieces.items()}
            return cls(made, first.recipe, first.dtype)
        raise NotSupportedError(
            "Pieces of a quantised weight are moved, cut and gathered, and computed with where their unit is gathered.",
            got=f"{func} of {first!r}",
            remedy="call the module through its unit's forward, after fully_shard; to merge adapters, save them "
            "(hf.save_pretrained) and merge them on one process into a base of 16 bits or more",
        )

    def _each(self, func: Any, rest: Any, kwargs: Any) -> Any:
        """`func` of each piece; of what it gives, pieces again."""
        made = {name: func(piece, *rest, **kwargs) for name, piece in self.pieces.items()}
        one = next(iter(made.values()))
        if isinstance(one, (tuple, list)):
            numbers = range(len(one))
            return [type(self)({name: of[i] for name, of in made.items()}, self.recipe, self.dtype) for i in numbers]
        return type(self)(made, self.recipe, self.dtype)

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any = None, outer_stride: Any = None, module: Any = None, mp_policy: Any = None
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        """The pieces, as they are: quantised bytes."""
        return tuple(self.pieces.values()), (self.recipe, tuple(self.pieces))

    def fsdp_post_all_gather(
        self, outputs: tuple[torch.Tensor, ...], metadata: Any, param_dtype: Any, *, out: Any = None
    ) -> Any:
        """The weight, over what was gathered; it computes in the dtype of its input, whatever `param_dtype`."""
        if out is not None:
            return None  # it lies where the pieces were gathered to
        recipe, names = metadata
        return recipe.make(dict(zip(names, outputs, strict=True))), outputs


_CUT = {aten.split.Tensor, aten.slice.Tensor, aten.narrow.default}
_BY_ROWS = _CUT | {aten.detach.default, aten.alias.default, aten.clone.default, aten._to_copy.default}
_SAME_SHAPE = {aten.view.default, aten.as_strided.default, aten._unsafe_view.default}


def _same_dtype(tensor: torch.Tensor, kwargs: Any) -> bool:
    return (kwargs or {}).get("dtype") in (None, tensor.dtype)


def by_rows(model: nn.Module) -> list[str]:
    """Make frozen quantised weights ready to be sharded: of each unit's, a rank keeps its share of the bytes.

    Call it before `fully_shard`, and after whatever looks at the weights' class (PEFT). A weight that is tied stays so.
    Weights whose class says itself how it is gathered (`fsdp_pre_all_gather`) are left to it, except NF4's, whose own
    way needs rows in multiples of its blocks; so are weights that train.

    Args:
        model: not sharded yet, or in part.

    Returns:
        The names of the weights.

    Raises:
        ConfigError: a weight that is not made of plain tensors, or of which no share can be taken. Nothing has changed.
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
    """A quantised weight, whole, as pieces that share its memory.

    Args:
        name: for errors.
        weight: of a class with `__tensor_flatten__`.

    Raises:
        ConfigError: see `by_rows`.
    """
    names, context = weight.__tensor_flatten__()
    inner: dict[str, Any] = {one: getattr(weight, one) for one in names}
    rows = weight.shape[0] if weight.dim() else 0
    pieces: dict[str, torch.Tensor] = {}
    parts: dict[str, Any] = {}
    whole: dict[str, torch.Tensor] = {}
    for one, tensor in inner.items():
        if type(tensor) is not torch.Tensor or tensor.is_meta:
            raise _not_cut(name, weight, f"{one}, a {'tensor on meta' if tensor.is_meta else type(tensor).__name__}")
        if rows and tensor.numel() >= rows and tensor.numel() % rows == 0 and _is_dense(tensor):
            pieces[one] = tensor.detach().as_strided((rows, tensor.numel() // rows), (tensor.numel() // rows, 1))
            parts[one] = (tensor.shape, tensor.stride())
        else:
            whole[one] = tensor.detach()
    total, kept = (sum(one.numel() * one.element_size() for one in group.values()) for group in (inner, whole))
    if not pieces or (kept > total * _WHOLE_AT_MOST and kept > 4096):
        raise _not_cut(
            name, weight, f"{', '.join(f'{one} {tuple(t.shape)}' for one, t in whole.items())}: {kept} bytes"
        )
    recipe = Recipe(_class_of(weight), context, weight.shape, weight.stride(), parts, whole)
    return QuantisedRows(pieces, recipe, weight.dtype)


def _class_of(weight: Any) -> Any:
    return next(cls for cls in type(weight).__mro__ if cls is not nn.Parameter)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements lie side by side, in whatever order of dims."""
    expected = 1
    for stride, extent in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if extent > 1:
            if stride != expected:
                return False
            expected *= extent
    return True


def _not_cut(name: str, weight: Any, what: str) -> ConfigError:
    return ConfigError(
        f"A quantised weight of class {type(weight).__name__} cannot be split over ranks.",
        parameter=name,
        expected=f"plain tensors of which most can be cut into {weight.shape[0] if weight.dim() else 0} pieces",
        got=what,
        remedy="put it in ignored_params, so that every rank holds it; or quantise it in another layout "
        "(Int8WeightOnlyConfig, IntxWeightOnlyConfig, NF4)",
    )
