"""Methods that change how a unit communicates: the user's collectives, groups, memory, and order of waiting."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard import fully_shard
from fullshard.comm import Costs, torch_comm
from fullshard.mesh import resolve_mesh
from fullshard.torch_private.collectives import all_gather_many, reduce_scatter_many
from models import EXAMPLES
from training import LAYOUTS, Options, full_gradients, full_parameters, shard

both_layouts = pytest.mark.parametrize("layout", LAYOUTS)


class Counted:
    """What a user's collectives have in common: memory of their own, and a count of calls."""

    def __init__(self, asynchronous: bool = True) -> None:
        self.calls: list[int] = []  # the ranks of each
        self.allocated: list[int] = []
        self.asynchronous = asynchronous

    def allocate(self, size, *, dtype, device):
        tensor = torch.full(tuple(size), 7, dtype=dtype, device=device)
        self.allocated.append(tensor.data_ptr())
        return tensor

    def note(self, group):
        self.calls.append(group.size())

    def run(self, collective, output_tensor, input_tensor, mine, group, **how):
        self.note(group)
        assert mine.data_ptr() in self.allocated
        work = collective(output_tensor, input_tensor, group=group, **how)
        return work if self.asynchronous else work.wait() and None


class MyGather(Counted):
    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        gather = dist.all_gather_into_tensor
        return self.run(gather, output_tensor, input_tensor, output_tensor, group, async_op=async_op)


class MyReduce(Counted):
    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        reduce = dist.reduce_scatter_tensor
        return self.run(reduce, output_tensor, input_tensor, input_tensor, group, op=op, async_op=async_op)


def gradients_of(library, name: str, options: Options, prepare=None) -> dict[str, torch.Tensor]:
    example = EXAMPLES[name]
    model = shard(library, example.make(), example, options)
    if prepare is not None:
        prepare(model)
    inputs, targets = example.batch(0, dist.get_rank())
    for _ in range(2):
        model.zero_grad()
        example.loss_of(model(inputs), targets).backward()
    return full_gradients(model)


def close(got, want) -> None:
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-5, atol=1e-7)


@both_layouts
@pytest.mark.parametrize("mesh", ["default", "hybrid"])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_custom_collectives(run_ranks, layout, mesh, asynchronous):
    world = 4 if mesh == "hybrid" else 2
    for gathers, reduces in run_ranks(with_custom_collectives, layout, mesh, asynchronous, world=world):
        assert len(gathers) >= 4  # two steps of forward and backward
        assert len(reduces) == 2
        assert set(gathers + reduces) == {2}


def with_custom_collectives(layout: str, mesh: str, asynchronous: bool):
    options = Options(layout=layout, mesh=mesh)
    gather, reduce = MyGather(asynchronous), MyReduce(asynchronous)

    def use(model: nn.Module) -> None:
        model.blocks[0].set_custom_all_gather(gather)  # of this unit alone, as in PyTorch
        model.blocks[0].set_custom_reduce_scatter(reduce)

    close(gradients_of(fullshard, "gpt", options, use), gradients_of(fullshard, "gpt", options))
    return gather.calls, reduce.calls


def test_custom_collectives_as_pytorch_calls_them(run_ranks):
    """The same object serves PyTorch's fully_shard: same calls, same numbers."""
    for ours, theirs in run_ranks(as_pytorch_calls_them):
        assert ours == theirs


def as_pytorch_calls_them():
    counts = []
    for library in (fullshard, torch_fsdp):
        gather, reduce = MyGather(), MyReduce()

        def use(model: nn.Module, gather=gather, reduce=reduce) -> None:
            model.blocks[0].set_custom_all_gather(gather)
            model.blocks[0].set_custom_reduce_scatter(reduce)

        counts.append((gradients_of(library, "gpt", Options(), use), len(gather.calls), len(reduce.calls)))
    close(counts[0][0], counts[1][0])
    return counts[0][1:], counts[1][1:]


@both_layouts
def test_separate_reduce_scatter_group(run_ranks, layout):
    for separate, shared, again in run_ranks(groups_of_reductions, layout):
        assert separate != shared
        assert again == shared


def groups_of_reductions(layout: str):
    """The group that each reduction of the first block uses: as the custom reduction is told."""
    seen = []

    def run(enable: bool | None) -> dict[str, torch.Tensor]:
        reduce = MyReduce()
        reduce.note = lambda group: seen.append(group.group_name)

        def use(model: nn.Module) -> None:
            if enable is not None:
                model.set_separate_reduce_scatter_group(True)
                model.set_separate_reduce_scatter_group(enable)
            model.blocks[0].set_custom_reduce_scatter(reduce)

        return gradients_of(fullshard, "gpt", Options(layout=layout), use)

    first, second, third = run(True), run(None), run(False)
    close(first, second)
    close(second, third)
    assert len(set(seen[0:2])) == 1  # one group, made once
    return seen[0], seen[2], seen[4]


def test_post_optim_event_is_waited_for_once(fake_world):
    fake_world(2)

    class Event:
        waits = 0

        def wait(self, stream=None) -> None:
            self.waits += 1

    event = Event()
    model = nn.Sequential(nn.Linear(4, 4))
    fully_shard(model[0])
    fully_shard(model)
    model.set_post_optim_event(event)
    assert event.waits == 0
    for _ in range(3):
        model(torch.ones(1, 4)).sum().backward()
        assert event.waits == 1


@pytest.mark.gloo("about gloo")
def test_memory_that_gloo_does_not_have(run_ranks):
    for text in run_ranks(ask_gloo_for_memory):
        assert "gloo" in text and "does not allocate its own memory" in text


def ask_gloo_for_memory() -> str:
    model = fully_shard(nn.Linear(4, 4))
    model.set_allocate_memory_from_process_group_for_comm(False)  # nothing to undo
    with pytest.raises(fullshard.ConfigError) as caught:
        model.set_allocate_memory_from_process_group_for_comm(True)
    model(torch.ones(1, 4)).sum().backward()  # and nothing has changed
    return str(caught.value)


class FakeBackend:
    """A backend with memory of its own, as NCCL's is with NVLink SHARP."""

    def __init__(self) -> None:
        self.allocated = 0

    def supports_tensor_alloc(self, device) -> bool:
        return True

    def allocate_tensor(self, numel, *, dtype, device):
        self.allocated += 1
        return torch.empty(numel, dtype=dtype, device=device)


def test_memory_of_the_group_is_used_where_there_is_some(run_ranks):
    assert all(run_ranks(with_memory_of_the_group))


def with_memory_of_the_group() -> bool:
    backend = FakeBackend()

    def use(model: nn.Module) -> None:
        before = vars(dist.ProcessGroup)["_get_backend"]  # what binds itself, which the attribute no longer would
        dist.ProcessGroup._get_backend = lambda self, device: backend
        try:
            for unit in (*model.blocks, model):
                unit.set_allocate_memory_from_process_group_for_comm(True)
        finally:
            dist.ProcessGroup._get_backend = before
        with pytest.raises(fullshard.ConfigError, match="mutually exclusive"):
            model.blocks[0].set_custom_all_gather(MyGather())

    close(gradients_of(fullshard, "gpt", Options(), use), gradients_of(fullshard, "gpt", Options()))
    return backend.allocated > 4


def test_a_hook_does_not_silently_replace_another_reduction(fake_world) -> None:
    fake_world(4)
    flat, hybrid = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    unit = fullshard.fully_shard(nn.Linear(8, 8), mesh=flat)
    unit.set_custom_reduce_scatter(MyReduce())
    with pytest.raises(fullshard.ConfigError, match="custom reduce-scatter"):
        unit.register_comm_hook(None, print)
    unit = fullshard.fully_shard(nn.Linear(8, 8), mesh=flat)
    unit.set_custom_all_gather(MyGather())
    unit.register_comm_hook(None, print)
    with pytest.raises(fullshard.ConfigError, match="custom reduce-scatter"):
        unit.set_custom_reduce_scatter(MyReduce())
    with pytest.raises(fullshard.ConfigError, match="mutually exclusive"):  # behind the hook
        unit.set_allocate_memory_from_process_group_for_comm(True)

    def apart(parameter: nn.Parameter) -> Any:
        return fullshard.ShardPlacementResult(mesh=hybrid) if parameter.dim() == 1 else None

    unit = fullshard.fully_shard(nn.Linear(8, 8), mesh=flat, shard_placement_fn=apart)
    with pytest.raises(fullshard.errors.UsageError, match="hybrid"):  # the bias is, the unit is not
        unit.register_comm_hook(None, print)


def test_symmetric_memory_changes_nothing_and_says_so_once(fake_world, caplog, monkeypatch):
    """torchtitan asks for it always; PyTorch's takes it on any backend."""
    monkeypatch.setattr("fullshard.api.functional.module._logged_symm_mem", [])
    fake_world(2)
    model = fully_shard(nn.Linear(4, 4))
    with caplog.at_level("INFO", logger="fullshard"):
        for _ in range(2):
            model.set_symm_mem_for_comm()
    assert sum("symm_mem" in record.getMessage() for record in caplog.records) == 1


# Several collectives in one call of the group, as accelerators' backends have it: gloo's methods show it is right.


class Apart(fullshard.TorchComm):
    """Says that one more collective costs nothing, so that every parameter has its own."""

    def costs(self, axis: Any) -> Costs:
        return Costs(latency=0.0, copy_bandwidth=1.0)


class Together(Apart):
    """In one call whatever the backend. Counts the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.gathers = self.reduces = 0

    def plan_gathers(self, axis: Any, outs: Any, shards: Any) -> Any:
        (gather,) = all_gather_many(outs, shards, axis.group)
        return [partial(self._count, "gathers", gather) if len(outs) > 1 else gather]

    def plan_reductions(self, axis: Any, outs: Any, buffers: Any, mean: bool) -> Any:
        (reduce,) = reduce_scatter_many(outs, buffers, axis.group, mean)
        return [partial(self._count, "reduces", reduce) if len(outs) > 1 else reduce]

    def _count(self, what: str, start: Any) -> Any:
        setattr(self, what, getattr(self, what) + 1)
        return start()


def test_many_at_once_are_as_one_after_the_other(run_ranks):
    assert all(run_ranks(at_once, world=2))


def at_once() -> bool:
    example, results = EXAMPLES["odd_mlp"], []
    for comm in (Apart(), Together()):
        model = example.make(torch.float64)
        for unit in (*example.units(model), model):
            fullshard.fully_shard(unit, comm=comm)
        inputs, targets = example.batch(0, dist.get_rank(), torch.float64)
        loss = example.loss_of(model(inputs), targets)
        loss.backward()
        results.append((loss.detach(), full_gradients(model), full_parameters(model)))
        if isinstance(comm, Together):
            assert comm.gathers and comm.reduces, "no bucket has several segments: this shows nothing"
    (loss, grads, values), (loss_too, grads_too, values_too) = results
    assert torch.equal(loss, loss_too)
    for name, value in values.items():
        assert torch.equal(value, values_too[name]), name
        assert torch.allclose(grads[name], grads_too[name], rtol=1e-12, atol=1e-15), name
    return True


class Adapted(nn.Module):
    """A frozen weight in bfloat16, and LoRA's two small ones in float32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(6, 5).requires_grad_(False).bfloat16()
        self.down, self.up = nn.Linear(6, 3, bias=False), nn.Linear(3, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x.bfloat16()).float() + self.up(self.down(x))


class Joined(fullshard.TorchComm):
    """Gathers in one call whatever the backend. Counts the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[int] = []

    def plan_gathers(self, axis: Any, outs: Any, shards: Any) -> Any:
        (gather,) = all_gather_many(outs, shards, axis.group)
        return [lambda: self.started.append(len(outs)) or gather()]


def test_a_unit_of_several_buckets_is_gathered_in_one_call(run_ranks):
    assert run_ranks(adapted, world=2) == [[2, 2]] * 2  # once in forward, once in backward, as with FSDP2


def adapted() -> list[int]:
    """Buckets gathered by each call of the last step, whose gradients are those of separate calls."""
    gradients = []
    for comm in (fullshard.TorchComm(), joined := Joined()):
        model = fully_shard(Adapted(), comm=comm, reshard_after_forward=True)
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(dist.get_rank()))
        for _ in range(3):
            model.zero_grad()
            joined.started.clear()
            model(x).square().sum().backward()
        gradients.append(full_gradients(model))
    assert gradients[0]["base.weight"] is None
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in ("down.weight", "up.weight"))
    return joined.started


@pytest.mark.gloo("about gloo")
def test_a_few_integers_are_summed_in_one_step(run_ranks):
    assert run_ranks(sums_of_integers, world=4) == [[True, False, False, False]] * 4


def sums_of_integers() -> list[bool]:
    """Of which sums no all-reduce of gloo's was made: few integers, many, a mean, and floats. All are right."""
    axis, made = resolve_mesh(None).shard, []
    sums = [
        (torch.arange(12).view(3, 4), False),
        (torch.arange(1 << 16), False),
        (torch.zeros(3, dtype=torch.int64), True),
        (torch.arange(3.0), False),
    ]
    reduce_all = torch_comm.all_reduce
    by_ring = mock.Mock(side_effect=lambda tensor, group, mean: reduce_all(tensor, group, False))  # gloo has no mean
    for tensor, mean in sums:
        expected = tensor * dist.get_world_size()
        with mock.patch.object(torch_comm, "all_reduce", by_ring):
            by_ring.reset_mock()
            pending = fullshard.TorchComm().all_reduce(axis, tensor, mean)
            pending.wait()
            pending.wait()
        assert torch.equal(tensor, expected)
        made.append(not by_ring.called)
    return made
