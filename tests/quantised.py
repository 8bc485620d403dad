"""Tensor subclasses of the kind that users bring: block-quantised int8 weights, for tests of extensions.

`GatheredInt8` keeps fp32 values and is gathered as int8 with a scale per row; `StoredInt8` is int8 itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

aten = torch.ops.aten
CALLS: list[str] = []


def quantise(values: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, columns] as int8 and a scale per row."""
    scale = values.float().abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / 127
    return (values / scale).round().to(torch.int8), scale


def dequantise(data: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (data.to(torch.float32) * scale).to(dtype)


class GatheredInt8(Tensor):
    """fp32 values; int8 on the wire. What is computed with is a plain tensor of the compute dtype."""

    @staticmethod
    def __new__(cls, values: Tensor, requires_grad: bool = False) -> GatheredInt8:
        return Tensor._make_wrapper_subclass(
            cls, values.size(), strides=values.stride(), dtype=values.dtype, device=values.device,
            requires_grad=requires_grad,
        )  # fmt: skip

    def __init__(self, values: Tensor, requires_grad: bool = False) -> None:
        self.values = values

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["values"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], meta: Any, size: Any, stride: Any) -> GatheredInt8:
        return GatheredInt8(inner["values"])

    def __repr__(self) -> str:
        return f"GatheredInt8({self.values})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        unwrapped = pytree.tree_map_only(cls, lambda t: t.values, (args, kwargs or {}))
        out = func(*unwrapped[0], **unwrapped[1])
        if func in IN_PLACE:
            return args[0]
        if func in KEEPS:
            return pytree.tree_map_only(Tensor, cls, out)
        return out

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any = None, outer_stride: Any = None, module: Any = None, mp_policy: Any = None
    ) -> tuple[tuple[Tensor, ...], Any]:
        CALLS.append(f"pre {tuple(self.shape)} of {tuple(outer_size)} {type(module).__name__} {mesh.size()}")
        data, scale = quantise(self.values)
        return (data, scale), (tuple(outer_size),)

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        data, scale = outputs
        CALLS.append(f"post {tuple(data.shape)} {tuple(scale.shape)} out={out is not None}")
        if out is not None:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):  # PyTorch leaves these to it
                out.copy_(dequantise(data, scale, out.dtype))
            return None
        made = dequantise(data, scale, param_dtype or self.dtype)
        return made, (made,)


class BlockInt8(GatheredInt8):
    """As `GatheredInt8`, with a scale for every block of `ROWS` rows of a rank's chunk; the last may be shorter."""

    ROWS = 4

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any = None, outer_stride: Any = None, module: Any = None, mp_policy: Any = None
    ) -> tuple[tuple[Tensor, ...], Any]:
        blocks = self.values.split(self.ROWS)
        pairs = [quantise(block.reshape(1, -1)) for block in blocks if block.numel()]
        data = [data.view(-1, self.shape[1]) for data, _ in pairs]
        empty = self.values.new_zeros(0, self.shape[1])
        sent = torch.cat([empty.to(torch.int8), *data]), torch.cat([empty[:, :1], *[scale for _, scale in pairs]])
        return sent, -(-outer_size[0] // mesh.size())

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        (data, scales), chunk = outputs, metadata
        row = torch.arange(data.shape[0], device=data.device)
        block = row // chunk * -(-chunk // self.ROWS) + row % chunk // self.ROWS
        return super().fsdp_post_all_gather((data, scales[block]), metadata, param_dtype, out=out)


KEEPS = {
    aten.detach.default, aten.empty_like.default, aten.zeros_like.default, aten.new_zeros.default, aten.slice.Tensor,
    aten.split.Tensor, aten.clone.default, aten.view.default, aten.as_strided.default, aten._to_copy.default,
    aten.new_empty.default, aten._pin_memory.default, aten.narrow.default, aten.alias.default,
}  # fmt: skip
IN_PLACE = {aten.copy_.default, aten.add_.Tensor, aten.mul_.Tensor, aten.addcdiv_.default, aten.zero_.default}


class StoredInt8(Tensor):
    """int8 values and a scale per row, frozen; computed with as itself, by `linear` (QLoRA's kind)."""

    @staticmethod
    def __new__(cls, data: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> StoredInt8:
        return Tensor._make_wrapper_subclass(
            cls, data.size(), strides=data.stride(), dtype=dtype, device=data.device, requires_grad=False
        )

    def __init__(self, data: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> None:
        self.quantised, self.scale = data, scale

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["quantised", "scale"], self.dtype

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], meta: Any, size: Any, stride: Any) -> StoredInt8:
        return StoredInt8(inner["quantised"], inner["scale"], meta)

    def __repr__(self) -> str:
        return f"StoredInt8({tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (aten.mm.default, aten.addmm.default, aten.t.default, aten.linear.default):
            args = pytree.tree_map_only(cls, lambda t: dequantise(t.quantised, t.scale, t.dtype), args)
            return func(*args, **kwargs)
        first = args[0]
        if func is aten.copy_.default:
            source = args[1]
            first.quantised.copy_(source.quantised)
            first.scale.copy_(source.scale)
            return first
        if func in (aten.split.Tensor, aten.slice.Tensor, aten.detach.default, aten.clone.default, aten.alias.default,
                    aten._to_copy.default, aten.narrow.default):  # fmt: skip
            kwargs = {k: v for k, v in kwargs.items() if k != "dtype"}
            data = func(first.quantised, *args[1:], **kwargs)
            scale = func(first.scale, *args[1:], **kwargs)
            if isinstance(data, (tuple, list)):
                return [cls(d, s, first.dtype) for d, s in zip(data, scale, strict=True)]
            return cls(data, scale, first.dtype)
        if func in (aten.view.default, aten.as_strided.default, aten.new_zeros.default):
            size = list(args[1])
            if func is aten.new_zeros.default:
                rows = size[0]
                return cls(first.quantised.new_zeros(size), first.scale.new_zeros(rows, 1), first.dtype)
            if size in ([first.numel()], list(first.shape), [-1]):
                return cls(first.quantised, first.scale, first.dtype)
        raise NotImplementedError(f"StoredInt8 does not know {func} of {[getattr(a, 'shape', a) for a in args]}")

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any = None, outer_stride: Any = None, module: Any = None, mp_policy: Any = None
    ) -> tuple[tuple[Tensor, ...], Any]:
        return (self.quantised, self.scale), self.dtype

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        data, scale = outputs
        if out is not None:
            return None  # it is made of the outputs, which lie where they lay
        return StoredInt8(data, scale, param_dtype or metadata), (data, scale)
