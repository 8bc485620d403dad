"""What a step costs that can be counted on a CPU: roundings, bytes held, copies, collectives and waits for the host."""

from __future__ import annotations

import gc
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import fullshard
import fullshard.state_dict
from fullshard import MixedPrecisionPolicy, ShardingStrategy, fully_shard
from fullshard.state_dict import StateDictOptions
from ways import (
    WRAPPERS,
    adam,
    differences,
    gradient_problems,
    layers,
    loss_of,
    mine,
    on_ranks,
    shard,
    some_ways,
    whole_parameters,
)
from ways import batch as batch_of

rows_and_flat = pytest.mark.parametrize("way", ["rows", "flat"])


# An axis of one rank.


class Recorded:
    """A user's reduce-scatter, which notes what it is asked to do."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, Any]] = []

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        size = dist.get_world_size(group)
        self.asked.append((size, op))
        dist.all_reduce(whole := input_tensor.clone(), group=group)
        output_tensor.copy_(whole.chunk(size)[dist.get_rank(group)])
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(size)


@pytest.mark.parametrize("way", ["rows", "flat", "wrapper", "originals"])
@on_ranks
def test_an_axis_of_one_rank_divides_nothing(way: str) -> list[str]:
    """With a factor of the user's sums are asked for; and of one rank a sum, which every backend knows, by default."""
    problems: list[str] = []
    for shape, strategy in [((1, 2), "HYBRID_SHARD"), ((2, 1), "HYBRID_SHARD"), ((1, 2), "_HYBRID_SHARD_ZERO2")]:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        if way in WRAPPERS:
            given = {"device_mesh": mesh, "sharding_strategy": ShardingStrategy[strategy]}
            model, whole = shard(layers(), way, **given), layers()
            loss_of(model, mine(0)).backward(), loss_of(whole, batch_of(0)).backward()
            problems += gradient_problems(f"{shape} {strategy}", model, whole)
            continue
        for sums in (True, False):
            model, whole, seen, asked = shard(layers(), way, mesh=mesh), layers(), [], Recorded()
            for unit in model.modules():
                if isinstance(unit, fullshard.FSDPModule) and sums:
                    unit.set_gradient_divide_factor(1.0)
                    unit.set_all_reduce_hook(lambda gradient, seen=seen: seen.append(gradient))
                elif isinstance(unit, fullshard.FSDPModule):
                    unit.set_custom_reduce_scatter(asked)
            loss_of(model, mine(0)).backward()
            (loss_of(whole, batch_of(0)) * (2 if sums else 1)).backward()
            problems += gradient_problems(f"{shape} sums={sums}", model, whole)
            if sums and len(seen) != 3:
                problems.append(f"{shape}: {len(seen)} calls of a hook, wanted one for each unit with parameters")
            if not sums and (not asked.asked or any(s == 1 and op != dist.ReduceOp.SUM for s, op in asked.asked)):
                problems.append(f"{shape}: asked for {asked.asked}")
    return problems


# Loading from rank 0.


class Peak(TorchDispatchMode):
    """The most bytes of tensors of some size that were made inside it and alive at once."""

    def __init__(self, at_least: int) -> None:
        super().__init__()
        self.at_least, self.alive, self.most = at_least, {}, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (list, tuple)) else [out]:
            if type(tensor) is Tensor and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                if storage.nbytes() >= self.at_least:
                    self.alive[storage._cdata] = (storage._weak_ref(), storage.nbytes())
        self.alive = {
            key: (weak, size) for key, (weak, size) in self.alive.items() if not torch.UntypedStorage._expired(weak)
        }
        self.most = max(self.most, sum(size for _, size in self.alive.values()))
        return out


LAYERS, SIDE = 16, 64


@some_ways
def test_broadcast_from_rank_0_holds_a_tensor_at_a_time(run_ranks, way):
    """Of the model and of the optimizer; on the other ranks two whole tensors at once will do."""
    sharded = 3 * LAYERS * SIDE * SIDE * 8 // 2  # what is loaded, of which each rank has half
    peaks = run_ranks(loaded_from_rank_0, way)
    assert all(peak <= sharded + 4 * SIDE * SIDE * 8 for peak in peaks[1:]), peaks


def loaded_from_rank_0(way: str) -> int:
    def many() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False) for _ in range(LAYERS))).double()

    x = torch.ones(1, SIDE, dtype=torch.float64)
    plain, model = many(), shard(many(), way)
    theirs, ours = adam(plain.parameters()), adam(model.parameters())
    plain(x).sum().backward()
    theirs.step()
    plain.zero_grad()
    given = fullshard.state_dict.get_state_dict(plain, theirs) if dist.get_rank() == 0 else ({}, {})
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    gc.collect()
    with Peak(SIDE * SIDE * 8) as peak:
        fullshard.state_dict.set_state_dict(
            model, ours, model_state_dict=given[0], optim_state_dict=given[1], options=options
        )
    for trained, optimizer in ((plain, theirs), (model, ours)):
        trained(x).sum().backward()
        optimizer.step()
    assert not differences("", whole_parameters(model), {n: p.detach() for n, p in plain.named_parameters()})
    return peak.most


# Copies of many tensors in one call.


class Mixed(nn.Module):
    """Plain weights, and one that lies in another order in memory if `strided`."""

    def __init__(self, strided: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, width) for width in range(8, 24)])
        self.conv = nn.Conv2d(8, 8, 3)
        if strided:
            self.conv.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        total = self.conv(x.view(-1, 8, 1, 1).expand(-1, 8, 3, 3)).sum()
        return total + sum(layer(x).sum() for layer in self.layers)


class Seen(TorchDispatchMode):
    """Counts what is dispatched below autograd, and pairs in a `_foreach_copy_` beside one of different strides."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.slow = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket._qualified_op_name
        self.counts[name] += 1
        if name == "aten::_foreach_copy_":
            alike = [a.stride() == b.stride() and fused(a) and fused(b) for a, b in zip(*args[:2], strict=True)]
            self.slow += sum(alike) if not all(alike) else 0
        return func(*args, **(kwargs or {}))


def fused(tensor: Tensor) -> bool:
    """Whether the fused path takes it: elements without gaps and without overlap."""
    return bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


@rows_and_flat
@pytest.mark.parametrize("precision", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_one_strided_parameter_costs_one_copy_more(fake_world, precision, way):
    """The copies of all others stay one fused call each: `_foreach_copy_` takes a slow loop if one pair is strided."""
    fake_world(2)
    copies = []
    for strided in (False, True):
        policy = MixedPrecisionPolicy(param_dtype=precision, cast_forward_inputs=False)
        model = fully_shard(Mixed(strided), layout=way, mp_policy=policy)
        x = torch.ones(2, 8, dtype=precision)
        for _ in range(2):
            model(x).backward()
        with Seen() as seen:
            model(x).backward()
        copies.append(seen.counts["aten::copy_"] + seen.counts["aten::_foreach_copy_"])
    assert not seen.slow, f"{seen.slow} pairs went through a copy of many that the strided one made slow"
    assert copies[1] <= copies[0] + 4, copies


# Collectives by the size of the axis.


def test_a_large_blocks_collectives_at_world_64(fake_world):
    """Whether a copy is dearer than a collective depends on how many ranks it takes: at 64 a block is one or two."""
    fake_world(64)
    counts, width = {}, 512
    for count in (2, 64):
        mesh = init_device_mesh("cpu", (64 // count, count), mesh_dim_names=("replicate", "shard"))
        block = fully_shard(nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True), mesh=mesh)
        block(torch.ones(1, 2, width)).sum().backward()  # in which ranks compare what they train
        with fullshard.record_events() as events, Seen() as seen:
            block(torch.ones(1, 2, width)).sum().backward()
        gathers = sum(n for name, n in seen.counts.items() if "allgather" in name or "all_gather" in name)
        counts[count] = gathers / max(sum(event.verb == "gather" for event in events), 1)
    assert 0 < counts[64] <= min(2, counts[2]), f"collectives a gather, by ranks of the axis: {counts}"


# Hybrid meshes: the slow link works beside what follows.


class Waits(fullshard.RecordingComm):
    """Notes when reductions of gradients are issued, and when they are waited for."""

    def __init__(self) -> None:
        super().__init__(fullshard.TorchComm())
        self.noted: list[str] = []

    def reduce(self, axis: Any, out: Tensor, buffer: Tensor, mean: bool) -> Any:
        return self.note("reduce", super().reduce(axis, out, buffer, mean))

    def all_reduce(self, axis: Any, tensor: Tensor, mean: bool) -> Any:
        pending = super().all_reduce(axis, tensor, mean)
        return self.note("all_reduce", pending) if tensor.is_floating_point() else pending

    def note(self, what: str, pending: Any) -> Any:
        name = f"{what} {sum(line.startswith(f'{what} ') for line in self.noted)}"
        self.noted.append(name)
        wait = lambda: self.noted.append(f"wait for {name}") or pending.wait()  # noqa: E731
        return SimpleNamespace(is_completed=lambda: False, wait=wait)


@pytest.mark.parametrize("in_flight", [1, 2])
def test_an_all_reduce_is_waited_for_after_the_next_reduction_was_issued(fake_world, in_flight):
    fake_world(4)
    comm, units = Waits(), 5
    model = shard(nn.Sequential(*(nn.Linear(4, 4) for _ in range(units))), "rows", hybrid=True, comm=comm)
    model.set_reduce_scatter_max_input_buffers(in_flight)
    for _ in range(2):
        comm.noted.clear()
        model(torch.ones(2, 4)).sum().backward()
    at = {line: place for place, line in enumerate(comm.noted)}
    assert len(at) == len(comm.noted) == 4 * units, comm.noted
    for unit in range(units):
        assert at[f"wait for reduce {unit}"] < at[f"all_reduce {unit}"] < at[f"wait for all_reduce {unit}"]
        if unit < units - 1:
            assert at[f"wait for all_reduce {unit}"] > at[f"reduce {unit + 1}"], comm.noted


# The host waits for nothing.


class Branches(nn.Module):
    """Uses as many of its heads as it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = nn.Linear(4, 4), nn.ModuleList([nn.Linear(4, 4) for _ in range(8)])
        self.used = [0]

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        return sum(self.heads[i](x).sum() for i in self.used)


@some_ways
@pytest.mark.parametrize("units", [lambda model: [], lambda model: list(model.heads)], ids=["one", "each head"])
def test_unused_parameters_make_the_host_wait_once_at_most(fake_world, units, way):
    fake_world(2)
    net = Branches()
    model = shard(net, way, units)
    for step in range(4):
        net.used = [step % 8, 7]
        loss = model(torch.ones(2, 4))
        with Seen() as seen:
            loss.backward()
        reads = {name: seen.counts[name] for name in ("_local_scalar_dense", "item", "is_nonzero", "nonzero")}
        waits = sum(seen.counts[f"aten::{name}"] for name in reads)
        assert waits <= 1, f"{waits} reads of a device value by the host in one backward ({seen.counts})"
        model.zero_grad()
