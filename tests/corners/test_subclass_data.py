"""Tensor subclasses that are computed with as themselves and keep their data as attributes, as torchao's do.

`Scaled` is such a weight without rounding: values as rows of a mantissa and a scale per row, both trained through
`copy_` and `add_`. What it gathers becomes the unsharded weight; its attributes are its data, not a user's notes.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from drop_in import layers, shard, trains_as
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fullshard
import quantised
from quantised import StoredInt8
from training import LAYOUTS
from ways import on_ranks

aten = torch.ops.aten
WIDE = 16
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


class Scaled(Tensor):
    """[rows, columns] as `mantissa * scale`, kept in `__dict__`; `refill` says how `out=` is filled."""

    refill = "in place"

    @staticmethod
    def __new__(cls, mantissa: Tensor, scale: Tensor) -> Scaled:
        return Tensor._make_wrapper_subclass(
            cls, mantissa.size(), strides=mantissa.stride(), dtype=mantissa.dtype, device=mantissa.device
        )

    def __init__(self, mantissa: Tensor, scale: Tensor) -> None:
        self.mantissa, self.scale = mantissa, scale

    @classmethod
    def of(cls, values: Tensor) -> Scaled:
        scale = values.abs().amax(dim=1, keepdim=True).clamp_min(1e-12)
        return cls(values / scale, scale)

    def plain(self) -> Tensor:
        return self.mantissa * self.scale

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["mantissa", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], meta: Any, size: Any, stride: Any) -> Scaled:
        return cls(inner["mantissa"], inner["scale"])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, first = kwargs or {}, args[0]
        if func in (aten.split.Tensor, aten.slice.Tensor, aten.detach.default, aten.clone.default, aten.alias.default,
                    aten.narrow.default):  # fmt: skip
            mantissa, scale = (func(inner, *args[1:], **kwargs) for inner in (first.mantissa, first.scale))
            if isinstance(mantissa, (tuple, list)):
                return [cls(*pair) for pair in zip(mantissa, scale, strict=True)]
            return cls(mantissa, scale)
        if func in (aten.view.default, aten.as_strided.default) and tuple(args[1]) in (tuple(first.shape), (-1,)):
            return cls(first.mantissa, first.scale)
        if func is aten.new_zeros.default:
            return cls(first.mantissa.new_zeros(args[1]), first.scale.new_zeros(args[1][0], 1))
        plain = pytree.tree_map_only(cls, cls.plain, args)
        if func in (aten.copy_.default, aten.add_.Tensor, aten.mul_.Tensor):
            fresh = cls.of(func(torch.empty_like(plain[0]).copy_(plain[0]), *plain[1:], **kwargs))
            first.mantissa.copy_(fresh.mantissa)
            first.scale.copy_(fresh.scale)
            return first
        return func(*plain, **pytree.tree_map_only(cls, cls.plain, kwargs))

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any = None, outer_stride: Any = None, module: Any = None, mp_policy: Any = None
    ) -> tuple[tuple[Tensor, ...], Any]:
        return (self.mantissa, self.scale), None

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        if out is None:
            return type(self)(*outputs), outputs
        if self.refill == "attributes":
            out.mantissa, out.scale = outputs
        return None  # made of the outputs, which lie where they lay


class Reassigning(Scaled):
    """Its attributes are set anew at each gather, as torchao's int8 weight for training does with its scale."""

    refill = "attributes"


class Unlisted(Scaled):
    """Does not list its inner tensors: attributes are all there is to know it by."""

    __tensor_flatten__ = property()  # type: ignore[assignment]  # hasattr is False


CLASSES = {"in place": Scaled, "attributes": Reassigning, "unlisted": Unlisted}


def network(kind: type[Scaled]) -> nn.Sequential:
    """Two linear layers with weights of that class."""
    model = layers(width=WIDE)
    for layer in (model[0], model[2]):
        layer.weight = nn.Parameter(kind.of(layer.weight.detach().clone()))
        layer.weight.note = "a user's"
    return model


@every_layout
@pytest.mark.parametrize("kind", CLASSES)
@on_ranks
def test_trains_as_unsharded_and_the_whole_weight_is_let_go(kind: str, layout: str) -> None:
    """The original's inner tensors die with sharding; a user's attributes stay, on both forms."""
    for reshard in (True, False):
        model = network(CLASSES[kind])
        held = [weakref.ref(model[0].weight.mantissa), weakref.ref(model[0].weight.scale)]
        shard(model, layout=layout, reshard_after_forward=reshard)
        gc.collect()
        assert [ref() for ref in held] == [None, None], "inner tensors live"
        assert model[0].weight.note == "a user's"
        model[0].unshard()
        assert model[0].weight.note == "a user's"
        assert len(model[0].weight.mantissa) == len(model[0].weight.scale) == WIDE
        model[0].reshard()
        trains_as(model, layers(width=WIDE))


class Frozen(nn.Module):
    """A frozen int8 weight under a trained one."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = nn.Linear(WIDE, WIDE, bias=False)
        self.base.weight = nn.Parameter(StoredInt8(*quantised.quantise(self.base.weight.detach())), requires_grad=False)
        self.head = nn.Linear(WIDE, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.base(x))


@every_layout
@on_ranks
def test_frozen_weight_changed_after_the_first_gather(layout: str) -> None:
    """Loading another quantised weight into a model that already ran."""
    x = torch.randn(3, WIDE, generator=torch.Generator().manual_seed(1))
    model, other, plain = Frozen(1), Frozen(2), Frozen(2)
    plain.head.load_state_dict(model.head.state_dict())
    for each in (model, other):
        fullshard.fully_shard(each, layout=layout)
    with torch.no_grad():
        model(x)
        model.base.weight.to_local().copy_(other.base.weight.to_local())
        torch.testing.assert_close(model(x), plain(x), rtol=1e-5, atol=1e-6)
