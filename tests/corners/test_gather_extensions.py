"""Subclasses with gathers of their own that PyTorch's `fully_shard` takes: uneven rows, methods set late, any mesh."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from drop_in import batch, layers, shard, trains_as
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils import _pytree as pytree

import fullshard
import quantised
from fullshard import fully_shard
from fullshard.torch_private.local_tensor import local_of, plain_tensors
from quantised import IN_PLACE, KEEPS, BlockInt8, StoredInt8
from training import LAYOUTS
from ways import on_ranks


def make_class() -> Any:
    """A new subclass that only holds a tensor; it has no gather of its own yet."""

    class Held(Tensor):
        @staticmethod
        def __new__(cls, values: Tensor, requires_grad: bool = False) -> Any:
            return Tensor._make_wrapper_subclass(
                cls, values.size(), strides=values.stride(), dtype=values.dtype, device=values.device,
                requires_grad=requires_grad,
            )  # fmt: skip

        def __init__(self, values: Tensor, requires_grad: bool = False) -> None:
            self.values = values

        def __tensor_flatten__(self) -> tuple[list[str], Any]:
            return ["values"], None

        @staticmethod
        def __tensor_unflatten__(inner: dict[str, Tensor], meta: Any, size: Any, stride: Any) -> Any:
            return Held(inner["values"])

        def __repr__(self) -> str:
            return f"Held({self.values})"

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            unwrapped = pytree.tree_map_only(cls, lambda t: t.values, (args, kwargs or {}))
            out = func(*unwrapped[0], **unwrapped[1])
            if func in IN_PLACE:
                return args[0]
            return pytree.tree_map_only(Tensor, cls, out) if func in KEEPS else out

    return Held


def padded(values: Tensor, rows: int) -> Tensor:
    return torch.cat([values, values.new_zeros(rows - values.shape[0], *values.shape[1:])])


def gather_methods(outputs: str) -> tuple[Callable, Callable]:
    """Both methods. The subclass pads its rows itself: all ranks must send the same number.

    Args:
        outputs: what the unsharded tensor is: "copied" from what was gathered; that memory itself, "declared" as inner
            tensor or "undeclared"; "kept": a copy, where the first outputs are declared and looked at again; "padded":
            a copy with the padding, which the engine cuts off; or "sent as its class": what is sent is no plain tensor.
    """
    first: list[Tensor] = []

    def pre(self: Any, mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> Any:
        sent = padded(self.values, -(-size[0] // mesh.size()))
        return (type(self)(sent) if outputs == "sent as its class" else sent,), size[0]

    def post(self: Any, gathered: Any, rows: int, dtype: Any, *, out: Any = None) -> Any:
        assert type(gathered[0]) is Tensor
        whole = gathered[0] if outputs == "padded" else gathered[0][:rows]
        if out is None:
            first[:] = [gathered[0]]
            made = whole if outputs in ("declared", "undeclared") else whole.clone()
            return made, {"undeclared": (), "kept": (gathered[0], made)}.get(outputs, (made,))
        here = whole.untyped_storage().data_ptr() == out.untyped_storage().data_ptr()
        assert here == (outputs in ("declared", "undeclared"))
        if outputs == "kept":
            assert torch.equal(first[0], gathered[0])
        if not here:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(whole)
        return None

    return pre, post


def put_on(kind: Any, methods: tuple[Callable, Callable]) -> None:
    kind.fsdp_pre_all_gather, kind.fsdp_post_all_gather = methods


def sharded(kind: Any, width: int, **keywords: Any) -> nn.Module:
    model = layers(width=width)
    model[0].weight = nn.Parameter(kind(model[0].weight.detach()))
    return shard(model, **keywords)


def block_scaled(rows: int) -> list[str]:
    """What differs from one process with the quantised weights, over two steps."""
    world, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    model, plain = (nn.Sequential(nn.Linear(6, rows), nn.Linear(rows, 3)) for _ in range(2))
    model.load_state_dict(plain.state_dict())
    model[0].weight = nn.Parameter(BlockInt8(model[0].weight.detach()))
    fully_shard(model)
    masters = plain[0].weight.detach().clone()
    optimizer, wrong = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(2):
        with torch.no_grad():
            parts = [block for chunk in masters.chunk(world) for block in chunk.split(BlockInt8.ROWS)]
            pairs = [quantised.quantise(block.reshape(1, -1)) for block in parts]
            values = [
                quantised.dequantise(*pair, torch.float32).view_as(b) for pair, b in zip(pairs, parts, strict=True)
            ]
            plain[0].weight.copy_(torch.cat(values))
        batches = torch.randn(world, 5, 6, generator=torch.Generator().manual_seed(step))
        output, expected = model(batches[rank]), plain(batches[rank])
        wrong += [] if torch.allclose(output, expected, atol=1e-5) else [f"output of step {step}"]
        output.square().sum().backward()
        plain.zero_grad()
        (sum(plain(batch).square().sum() for batch in batches) / world).backward()
        gradient = model[0].weight.grad.full_tensor()
        wrong += [] if torch.allclose(gradient, plain[0].weight.grad, atol=1e-4) else [f"gradient of step {step}"]
        masters -= 0.1 * plain[0].weight.grad
        for parameter in list(plain.parameters())[1:]:
            parameter.data -= 0.1 * parameter.grad
        optimizer.step()
        optimizer.zero_grad()
    return wrong


@pytest.mark.parametrize(("rows", "world"), [(19, 4), (9, 4), (5, 3), (1, 2), (17, 2), (16, 2)])
def test_scales_of_blocks_of_uneven_rows_are_gathered(run_ranks, rows, world):
    """Of 19 rows, ranks send 2, 2, 2 and 1 scales; of 9 they send 1, 1, 1 and none."""
    assert run_ranks(block_scaled, rows, world=world) == [[]] * world


OUTPUTS = ["copied", "declared", "undeclared", "kept", "padded", "sent as its class"]


def trains_with_all_outputs(widths: list[int], **mesh: Any) -> None:
    for outputs, width in itertools.product(OUTPUTS, widths):
        put_on(kind := make_class(), gather_methods(outputs))
        for layout, reshard in (("rows", True), ("rows", False), ("flat", True)):
            model = sharded(kind, width, layout=layout, reshard_after_forward=reshard, **mesh)
            trains_as(model, layers(width=width))


@on_ranks
def test_rows_and_outputs() -> None:
    trains_with_all_outputs([6, 5, 1])


@on_ranks(world=4)
def test_rows_and_outputs_on_a_hybrid_mesh() -> None:
    trains_with_all_outputs([5], mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


@pytest.mark.parametrize("where", ["class", "tensor"])
@pytest.mark.parametrize("width", [6, 5])
@on_ranks
def test_methods_set_after_sharding(width: int, where: str) -> None:
    """As a program does that patches the class, or the chunk, of a model that is built: asked at the gather."""
    kind = make_class()
    model = sharded(kind, width)
    pre, post = gather_methods("copied")
    if where == "tensor":
        chunk = model[0].weight._local_tensor
        put_on(chunk, (pre.__get__(chunk), post.__get__(chunk)))
    else:
        put_on(kind, (pre, post))
    trains_as(model, layers(width=width))


@pytest.mark.parametrize("first_form", ["five arguments", "one argument"])
@on_ranks
def test_methods_replaced_by_those_of_the_other_form(first_form: str) -> None:
    """The older form is `fsdp_pre_all_gather(self, mesh)`; which one is called is asked at the gather."""
    kind, (pre, post) = make_class(), gather_methods("copied")

    def short(self: Any, mesh: Any) -> Any:
        return (self.values,), self.values.shape[0] * mesh.size()

    forms = [pre, short] if first_form == "five arguments" else [short, pre]
    put_on(kind, (forms[0], post))
    model, reference = sharded(kind, 6), layers(width=6)
    trains_as(model, reference)
    kind.fsdp_pre_all_gather = forms[1]
    trains_as(model, reference)


@on_ranks
def test_what_is_sent_changes_its_dtype() -> None:
    """Modules are shown the unsharded parameter of the last gather, whatever it was before."""
    for outputs in OUTPUTS:
        for layout, reshard in (("rows", True), ("rows", False), ("flat", True)):
            kind, dtypes = make_class(), [torch.float64]
            pre, post = gather_methods(outputs)

            def send(
                self: Any, mesh: Any, size: Any, stride: Any, module: Any, policy: Any, made: Any = (pre, dtypes)
            ) -> Any:
                (values,), rows = made[0](self, mesh, size, stride, module, policy)
                return (values.to(made[1][0]),), rows

            put_on(kind, (send, post))
            whole = torch.arange(24.0, dtype=torch.float64).view(6, 4)  # the same in each of these dtypes
            model = nn.Linear(4, 6, bias=False)
            model.weight = nn.Parameter(kind(whole))
            fully_shard(model, layout=layout, reshard_after_forward=reshard)
            for dtype in (torch.float64, torch.float32, torch.float32, torch.bfloat16, torch.float64):
                dtypes[0] = dtype
                x = torch.ones(2, 4, dtype=dtype)
                with torch.no_grad():
                    assert torch.equal(model(x), x @ whole.to(dtype).T), (outputs, layout, dtype)
                model(x.requires_grad_()).sum().backward()
                assert x.grad is not None and torch.equal(x.grad, whole.to(dtype).sum(0).expand(2, 4))


# Those that are computed with as themselves and keep their data as attributes, as torchao's do.


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


@on_ranks
def test_a_weight_that_does_not_list_its_inner_tensors_is_parked() -> None:
    model, x = network(Unlisted), batch(0, 0)
    shard(model)
    before = model(x)
    local = local_of(model[0].weight)
    assert [*map(id, plain_tensors(model[0].weight))] == [id(local.mantissa), id(local.scale)]
    assert fullshard.park(model).stayed
    fullshard.resume(model)
    assert torch.equal(model(x), before)


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
