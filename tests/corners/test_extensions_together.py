"""Extensions of a unit: one collective gathers what they send, one reduces their gradients, and each stays its own."""

from __future__ import annotations

import copy
import importlib
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import fullshard
from fullshard.shard import units_of
from fullshard.shard.offload import Home
from happens_before import muted, watched
from quantised import GatheredInt8, dequantise, quantise
from test_kernels import Kernels
from test_parking import moving
from training import LAYOUTS, live_bytes
from ways import on_ranks

SUBCLASS = importlib.import_module("fullshard.forms.subclass")
layouts = pytest.mark.parametrize("layout", LAYOUTS)


class Float8(GatheredInt8):
    """8-bit floats and a scale per row on the wire."""

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any = None, outer_stride: Any = None, module: Any = None, mp_policy: Any = None
    ) -> tuple[tuple[Tensor, ...], Any]:
        return eight_bits(self.values), None


class Wide(GatheredInt8):
    """Sends more bytes than it makes of them, in complex numbers, and nothing that is kept."""

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any = None, outer_stride: Any = None, module: Any = None, mp_policy: Any = None
    ) -> tuple[tuple[Tensor, ...], Any]:
        return (self.values.to(torch.complex128),), None

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        made = outputs[0].real.to(self.dtype).contiguous()
        if out is None:
            return made, (made,)
        with torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(made)
        return None


def eight_bits(values: Tensor) -> tuple[Tensor, Tensor]:
    scale = values.float().abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / 448
    return (values / scale).to(torch.float8_e4m3fn), scale


SENT: dict[type, Callable[[Tensor], Tensor]] = {  # what each class computes with
    GatheredInt8: lambda w: dequantise(*quantise(w), w.dtype),
    Float8: lambda w: dequantise(*eight_bits(w), w.dtype),
    Wide: lambda w: w,
}
SIZES = (4, 6, 7, 8, 5, 1, 3, 3)  # rows that 2 and 4 ranks cannot share evenly, and ranks that have none


class Block(nn.Module):
    """Seven weights; on one process, weights rounded as they are sent, with gradients of those that are not."""

    def __init__(self, classes: tuple[type, ...] | type, sizes: tuple[int, ...] = SIZES, plain: bool = False) -> None:
        super().__init__()
        kinds = classes if isinstance(classes, tuple) else (classes,)
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=False).double() for a, b in pairwise(sizes))
        self.kinds = [kinds[index % len(kinds)] for index in range(len(self.layers))]
        self.plain = plain
        for layer, kind in zip(self.layers, self.kinds, strict=True):
            if not plain:
                layer.weight = nn.Parameter(kind(layer.weight.detach().clone()))

    def forward(self, x: Tensor) -> Tensor:
        for layer, kind in zip(self.layers, self.kinds, strict=True):
            w = layer.weight
            x = torch.tanh(F.linear(x, w + (SENT[kind](w) - w).detach())) if self.plain else torch.tanh(layer(x))
        return x


MIXED = (GatheredInt8, Float8, Wide)


def network(classes: Any = MIXED, plain: bool = False, sizes: tuple[int, ...] = SIZES) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        Block(classes, sizes, plain), nn.Linear(sizes[-1], sizes[0]).double(), Block(classes, sizes, plain)
    )


def shard(model: nn.Sequential, library: Any = fullshard, **settings: Any) -> nn.Sequential:
    for module in (model[0], model[2], model):
        library.fully_shard(module, **settings)
    return model


def bucket_of(module: nn.Module) -> Any:
    (bucket,) = units_of(module)[0].buckets
    return bucket


# How many.


class Seen(TorchDispatchMode):
    """Counts collectives, and kernels as `Kernels` does."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := func._schema.name).startswith("c10d::"):
            self.counts["gather" if "gather" in name else "reduce"] += 1
        return func(*args, **(kwargs or {}))


def steps_of(library: Any, mode: Callable[[], Any]) -> list[Any]:
    """A mode that watched a step of one block, and of three: of seven 8-bit weights each, and nothing else."""
    watched = []
    for blocks in (1, 3):
        torch.manual_seed(0)
        model = nn.Sequential(*[Block(Float8, (16,) * 8) for _ in range(blocks)])
        for module in (*model, model):
            library.fully_shard(module)
        for step in range(4):
            with mode() if step == 3 else torch.enable_grad() as seen:
                model(torch.ones(2, 16, dtype=torch.float64)).sum().backward()
            model.zero_grad()
        watched.append(seen)
    return watched


def test_a_unit_takes_no_more_collectives_than_fsdp2(fake_world):
    fake_world(8)
    ours, theirs = ([seen.counts for seen in steps_of(library, Seen)] for library in (fullshard, torch_fsdp))
    a_unit = {verb: (ours[1][verb] - ours[0][verb]) // 2 for verb in ours[1]}
    assert a_unit == {"gather": 2, "reduce": 1}
    assert a_unit == {verb: (theirs[1][verb] - theirs[0][verb]) // 2 for verb in theirs[1]}


def test_a_unit_takes_no_more_kernels_than_fsdp2(fake_world):
    """Beside those of the subclass: bytes in, gather and out, twice; gradients in, and a reduction."""
    fake_world(8)
    ours, theirs = ([seen.count for seen in steps_of(library, Kernels)] for library in (fullshard, torch_fsdp))
    assert ours[1] - ours[0] <= theirs[1] - theirs[0], (ours, theirs)


@on_ranks
def test_large_weights_share_both_collectives_too() -> None:
    """Of plain parameters of so many bytes gloo gathers and reduces each by itself: that saves a copy, here none."""
    comm = fullshard.RecordingComm(fullshard.TorchComm())
    model = fullshard.fully_shard(Block(Float8, (512, 512, 512, 512)), comm=comm, reshard_after_forward=True)
    for _ in range(2):
        comm.calls.clear()
        model(torch.ones(1, 512, dtype=torch.float64)).sum().backward()
    gathered = 3 * 512 * (512 + 4)
    calls = [(call.verb, call.dtype, call.nbytes) for call in comm.calls if call.dtype != torch.int64]  # comparisons
    assert calls == [
        *[("gather", torch.uint8, gathered)] * 2,
        ("reduce", torch.float64, 3 * 512 * 512 * 8),
    ]
    said = fullshard.describe(model, plans=True)
    assert "gathers 774.0 KiB in 1 collective, holds" in said, said


@on_ranks
def test_pieces_are_aligned() -> None:
    """Those of a multiple of 16 bytes lie at such multiples, whatever is between, and a rank's bytes end at one."""
    targets: list[Tensor] = []
    real = SUBCLASS.copy_all

    def noting(to: list[Tensor], come: list[Tensor]) -> None:
        assert {each.dtype for each in (*to, *come)} == {torch.uint8}  # accelerators copy many of few dtypes at once
        targets.extend(each for each in to if threading.get_ident() == mine)
        real(to, come)

    mine = threading.get_ident()
    with mock.patch.object(SUBCLASS, "copy_all", noting):
        fullshard.fully_shard(Block(Float8, (16, 10, 16, 16, 1, 32))).unshard()
    spans = sorted((each.storage_offset(), each.numel()) for each in targets)
    assert len(spans) == (10 if dist.get_rank() == 0 else 8), spans  # a rank has none of the weight of one row
    assert all(start % 16 == 0 for start, length in spans if length % 16 == 0), spans
    assert any(length % 16 for _, length in spans) and all(map(int.__le__, map(sum, spans), [s for s, _ in spans[1:]]))
    assert sum(spans[-1]) % 16 and targets[0]._base.numel() == -(-sum(spans[-1]) // 16) * 16


# What comes of it.


def losses_of(model: nn.Module, parameters: Any, ranks: list[int], parts: int = 1) -> list[float]:
    """Four steps of SGD on these ranks' batches at once; the mean loss of all ranks."""
    optimizer = torch.optim.SGD(parameters, lr=0.2, momentum=0.9, foreach=False)
    losses = []
    for step in range(4):
        value = torch.zeros((), dtype=torch.float64)
        for part in range(parts):
            seeds = [100 * step + 10 * part + rank for rank in ranks]
            draws = [torch.randn(3, SIZES[0], generator=torch.Generator().manual_seed(s)) for s in seeds]
            if parts > 1 and hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(part == parts - 1)
            loss = model(torch.cat(draws).double()).square().mean()
            loss.backward()
            value += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        if len(ranks) == 1:
            dist.all_reduce(value)
            value /= dist.get_world_size()
        losses.append(value.item())
    return losses


def trains_as_one_process(model: nn.Module, reference: nn.Module, parts: int = 1) -> None:
    got = losses_of(model, model.parameters(), [dist.get_rank()], parts)
    want = losses_of(reference, reference.parameters(), [*range(dist.get_world_size())], parts)
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=1e-9, atol=0.0)


def parity(layout: str, options: dict[str, Any]) -> None:
    settings = {"reshard_after_forward": options.get("reshard", True)}
    if options.get("hybrid"):
        settings["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = shard(network(), layout=layout, **settings)
    assert len(bucket_of(model[0]).members) == 7
    trains_as_one_process(model, network(plain=True), options.get("parts", 1))


@pytest.mark.parametrize("options", [{}, {"reshard": False}, {"parts": 2}], ids=["", "kept", "accumulated"])
@layouts
def test_trains_as_one_process(run_ranks, layout, options):
    run_ranks(parity, layout, options)


@pytest.mark.parametrize("options", [{}, {"hybrid": True}], ids=["", "hybrid"])
def test_trains_as_one_process_on_four_ranks(run_ranks, options):
    """Some have no rows of a weight."""
    run_ranks(parity, "rows", options, world=4)


@on_ranks
def test_frozen_ones_are_another_bucket() -> None:
    """And one that is frozen later stays in its bucket, without a gradient."""
    model, reference = network(), network(plain=True)
    for each in (model, reference):
        for layer in each[0].layers[::2]:
            layer.weight.requires_grad_(False)
    shard(model)
    assert [len(bucket.members) for bucket in units_of(model[0])[0].buckets] == [4, 3]
    for each in (model, reference):
        each[2].layers[3].weight.requires_grad_(False)
    before = model[2].layers[3].weight._local_tensor.values.clone()
    trains_as_one_process(model, reference)
    assert torch.equal(model[2].layers[3].weight._local_tensor.values, before)


def noting(calls: list[Any]) -> type[GatheredInt8]:
    """A class that notes what it is asked: with which tensors, and of which module."""

    class Noting(GatheredInt8):
        def fsdp_pre_all_gather(
            self, mesh: Any, outer_size: Any = None, outer_stride: Any = None, module: Any = None, mp_policy: Any = None
        ) -> tuple[tuple[Tensor, ...], Any]:
            calls.append(("pre", tuple(self.shape), tuple(outer_size), tuple(outer_stride), mesh.size(), module))
            return quantise(self.values), module

        def fsdp_post_all_gather(
            self, outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
        ) -> Any:
            calls.append(("post", [tuple(each.shape) for each in outputs], metadata, param_dtype, out is not None))
            return super().fsdp_post_all_gather(outputs, metadata, param_dtype, out=out)

    return Noting


@on_ranks
def test_each_is_asked_once_a_gather_with_what_is_its_own() -> None:
    calls: list[Any] = []
    model = network(noting(calls), sizes=(4, 6, 7))[0]
    fullshard.fully_shard(model, mp_policy=fullshard.MixedPrecisionPolicy(param_dtype=torch.float32))
    copied = copy.deepcopy(model)
    for each in (model, copied):
        first, second = each.layers
        rows = 4 - dist.get_rank()
        for gathers in range(3):
            calls.clear()
            each.unshard()
            each.reshard()
            assert calls == [
                ("pre", (3, 4), (6, 4), (4, 1), 2, first),
                ("pre", (rows, 6), (7, 6), (6, 1), 2, second),
                ("post", [(6, 4), (6, 1)], first, torch.float32, gathers > 0),
                ("post", [(7, 6), (7, 1)], second, torch.float32, gathers > 0),
            ], calls


@on_ranks
def test_what_one_sends_changes_and_the_others_go_on() -> None:
    """Of the others the tensors that they made are filled again."""
    dtypes = [torch.float64]

    class Changing(Wide):
        def fsdp_pre_all_gather(self, *args: Any) -> Any:
            return (self.values.to(dtypes[0]),), None

        def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
            made = outputs[0].to(torch.float64, copy=True)
            if out is None:
                return made, (made,)
            with torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(made)
            return None

    for reshard in (True, False):
        model = network((GatheredInt8, Float8))[0]
        model.layers[2].weight = nn.Parameter(Changing(model.layers[2].weight.values))
        reference = network((GatheredInt8, Float8), plain=True)[0]
        reference.kinds[2] = Wide
        fullshard.fully_shard(model, reshard_after_forward=reshard)
        made: list[Any] = []
        before = dtypes[0]
        for dtype in (torch.float64, torch.float64, torch.float32, torch.float64):
            dtypes[0] = dtype
            SENT[Wide] = lambda w: w.to(dtypes[0]).to(w.dtype)
            model.reshard()
            model.unshard()
            shown = [layer.weight for layer in model.layers]
            changed = [one is not other for one, other in zip(shown, made, strict=False)]
            assert changed in ([], [False] * 7, [False] * 2 + [True] + [False] * 4), changed
            assert not made or changed[2] is (dtype is not before)
            made, before = shown, dtype
            x = torch.ones(1, 4, dtype=torch.float64)
            torch.testing.assert_close(model(x), reference(x), rtol=1e-12, atol=0.0)


@on_ranks
def test_a_first_gather_under_inference_mode() -> None:
    """What is made then serves training later."""
    model, reference = shard(network()), network(plain=True)
    with torch.inference_mode():
        x = torch.ones(2, 4, dtype=torch.float64)
        torch.testing.assert_close(model(x), reference(x), rtol=1e-12, atol=0.0)
    trains_as_one_process(model, reference)


@on_ranks
def test_the_one_that_sends_wrong_rows_is_named() -> None:
    class Longer(GatheredInt8):
        def fsdp_pre_all_gather(self, *args: Any) -> Any:
            return (torch.ones(3 + dist.get_rank(), 4),), None

    model = network((GatheredInt8,), sizes=(7, 7, 7, 7))[0]
    model.layers[1].weight = nn.Parameter(Longer(model.layers[1].weight.values))
    fullshard.fully_shard(model)
    with pytest.raises(
        fullshard.DivergenceError,
        match=r"parameter: layers\.1\.weight\n.*\n.*as many rows as on the first rank.*\n.*\[\[3, 4\]\]",
    ):
        model(torch.ones(1, 7, dtype=torch.float64))


@on_ranks
def test_one_in_the_place_of_another_is_refused() -> None:
    model = network(sizes=(6, 6, 6))[0]
    fullshard.fully_shard(model)
    model.layers[1].weight = model.layers[0].weight
    with pytest.raises(fullshard.ConfigError, match=r"layers\.1\.weight"):
        model(torch.ones(1, 6, dtype=torch.float64))


class Saved(torch.autograd.Function):
    """`linear` of what a subclass keeps of the gather, which is saved for backward as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight.values)
        return x @ weight.values.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (values,) = ctx.saved_tensors
        return grad @ values, torch.ones_like(values)


class Keeps(GatheredInt8):
    """Is computed with as itself, over what was gathered, which it takes anew each time."""

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any = None, outer_stride: Any = None, module: Any = None, mp_policy: Any = None
    ) -> tuple[tuple[Tensor, ...], Any]:
        return (self.values,), None

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        if out is not None:
            out.values = outputs[0]
            return None
        return Keeps(outputs[0]), outputs


class Layer(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return Saved.apply(x, self.weight)


@on_ranks
def test_what_was_saved_for_backward_is_gathered_again_in_its_place() -> None:
    """Autograd does not take that for a change."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Layer(6, 6, bias=False).double() for _ in range(3)])
    wanted = torch.ones(2, 6, dtype=torch.float64)
    for layer in reversed(model):
        wanted = wanted @ layer.weight.detach()
        layer.weight = nn.Parameter(Keeps(layer.weight.detach().clone()))
    fullshard.fully_shard(model, reshard_after_forward=True)
    for _ in range(2):
        x = torch.ones(2, 6, dtype=torch.float64, requires_grad=True)
        model(x).sum().backward()
        torch.testing.assert_close(x.grad, wanted, rtol=1e-12, atol=0.0)


@on_ranks
def test_replaced_and_changed_values_of_one_are_noticed() -> None:
    """By another parameter, other data, or a write in place."""
    model, reference = network(), network(plain=True)
    shard(model)
    x = torch.ones(2, 4, dtype=torch.float64)
    model(x)
    unit = units_of(model[0])[0]
    with torch.no_grad():
        for index, layer in enumerate(reference[0].layers):
            layer.weight.mul_(1.5)
            mine = model[0].layers[index]
            local, version = mine.weight._local_tensor, unit.version()
            other = mine.weight.detach().clone()
            other._local_tensor.mul_(1.5)
            if index % 3 == 0:
                local.mul_(1.5)
                assert unit.version() != version
            elif index % 3 == 1:
                mine.weight.data = other
            else:
                mine.weight = nn.Parameter(other)
    torch.testing.assert_close(model(x), reference(x), rtol=1e-12, atol=0.0)
    trains_as_one_process(model, reference)


# Memory.


@on_ranks
def test_the_ledger_counts_what_is_alive() -> None:
    """At each event; and its peak covers the copy out of what was gathered, when most is alive."""
    for classes in ((GatheredInt8,), (Wide,), MIXED):
        model = shard(network(classes, sizes=(64,) * 8))
        units = units_of(model)
        x = torch.ones(2, 64, dtype=torch.float64)
        model(x).sum().backward()
        alive, wrong = [0], []

        def copy_out(real: Callable[[], object], units: Any = units, alive: list[int] = alive) -> None:
            real()
            alive.append(live_bytes(units))

        def compare(event: Any, units: Any = units, wrong: list[Any] = wrong) -> None:
            if event.live != live_bytes(units):
                wrong.append((event, live_bytes(units)))

        for module in (model[0], model[2]):
            full = bucket_of(module).full
            full._copy_out = partial(copy_out, full._copy_out)
        with fullshard.record_events(compare) as events:
            for _ in range(2):
                model(x).sum().backward()
        assert len(events) > 20 and not wrong, wrong[:3]
        assert events[-1].live == 0
        assert len(alive) == 9 and fullshard.memory_use(model).peak_transient >= max(alive), (
            fullshard.memory_use(model),
            alive,
        )


def test_no_two_streams_race(fake_world):
    """Buffers of the collective are given back once it was waited for."""
    fake_world(2)
    with watched() as world:
        with muted(world):
            model = shard(network(), fullshard)
        for _ in range(3):
            model(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
            model.zero_grad()
    assert not world.races, "\n".join(world.races[:8])
    assert world.kernels > 1000


# Elsewhere.


@on_ranks(world=4)
def test_values_are_copied_parked_loaded_and_cast() -> None:
    x = torch.ones(2, 4, dtype=torch.float64)
    model = shard(network())
    want = network(plain=True)(x)
    torch.testing.assert_close(model(x), want, rtol=1e-12, atol=0.0)

    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter._local_tensor.mul_(0.5)
    assert not torch.equal(model(x), want), "the factor changed nothing"
    torch.testing.assert_close(twin(x), want, rtol=1e-12, atol=0.0)

    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    (twin(x) * 3).sum().backward()
    use = fullshard.memory_use(twin, optimizer)
    chunks = [p._local_tensor for p in twin.parameters()]
    assert use.parameters == sum(8 * chunk.numel() for chunk in chunks) == use.host - use.gradients
    before = [p._local_tensor.values.data_ptr() for p in twin[0].parameters() if p._local_tensor.numel()]
    held = [p.grad._local_tensor.clone() for p in twin.parameters()]
    with moving(True):
        fullshard.park(twin, optimizer)
    now = [p._local_tensor.values.data_ptr() for p in twin[0].parameters() if p._local_tensor.numel()]
    assert before and not set(before) & set(now)
    for one, other in zip(copy.deepcopy(twin)[0].parameters(), twin[0].parameters(), strict=True):
        assert type(one._local_tensor) is type(other._local_tensor)
        assert torch.equal(one._local_tensor.values, other._local_tensor.values)
    fullshard.resume(twin, optimizer)
    assert all(map(torch.equal, [p.grad._local_tensor for p in twin.parameters()], held))
    torch.testing.assert_close(twin(x), want, rtol=1e-12, atol=0.0)

    whole = {name: parameter.detach() for name, parameter in network(plain=True).named_parameters()}
    model.load_state_dict(whole)
    torch.testing.assert_close(model(x), want, rtol=1e-12, atol=0.0)
    assert model.state_dict().keys() == whole.keys()

    model[0].float(), model[2].float(), model[1].float()
    assert {p._local_tensor.dtype for p in model.parameters()} == {torch.float32}
    torch.testing.assert_close(model(x.float()), want.float(), rtol=1e-3, atol=1e-5)


def test_other_memory_while_they_are_parked(fake_world):
    """On the device, say, which is not where parked ones lie."""
    fake_world(2)
    model = network()[0]
    fullshard.fully_shard(model)
    fullshard.park(model)
    chunks = [layer.weight.detach().clone() for layer in model.layers]
    for layer, chunk in zip(model.layers, chunks, strict=True):
        layer.weight.data = chunk
    with mock.patch.object(Home, "holds", lambda home, tensor: False):
        fullshard.resume(model)
    for layer, chunk in zip(model.layers, chunks, strict=True):
        assert type(layer.weight._local_tensor) is type(chunk._local_tensor)
        assert torch.equal(layer.weight._local_tensor.values, chunk._local_tensor.values)
