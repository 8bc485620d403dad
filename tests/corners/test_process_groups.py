"""Process groups as programs make them: without a backend, implemented in Python, ranks as threads; device_id."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed import multi_threaded_pg as threaded

import fullshard
from fullshard import FullyShardedDataParallel
from models import TORCH
from ways import WRAPPERS, on_ranks, wide_batch
from ways import shard as sharded

pytestmark = pytest.mark.gloo("about gloo's groups and threads")

RENAMED = TORCH >= (2, 13)  # all_gather_single and its kin have been called _allgather_base and so on


def model() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3))


def shard(way: str, group: Any, comm: Any = "torch") -> nn.Module:
    of_group = {"process_group": group} if way in WRAPPERS else {"mesh": DeviceMesh.from_group(group, "cpu")}
    return sharded(model(), way, lambda made: [made[2]], comm=comm, **of_group)


def train(module: nn.Module, ranks: list[int], steps: int = 3) -> list[float]:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        loss = module(torch.cat([wide_batch(step, rank) for rank in ranks])).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# No backend named: torch takes gloo for the CPU, and calls the whole "undefined".


def collectives(module: nn.Module) -> list[str]:
    """What gloo was asked for in one step, in order of names."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        train(module, [dist.get_rank()], steps=1)
    return sorted(event.name for event in profile.events() if event.name.startswith("gloo:"))


@pytest.mark.parametrize(("way", "backend"), [("rows", "undefined"), ("wrapper", "cpu:gloo")])
@on_ranks
def test_a_group_without_a_backend_is_gloo_on_a_cpu(way: str, backend: str) -> None:
    """The same calls (so the same layout, which costs decide), the same reduction, the same transient memory."""
    seen = {}
    for name in ("gloo", "gloo", backend):  # the first time in a process ranks tell each other who watches them
        recording = fullshard.RecordingComm(fullshard.TorchComm())
        made = shard(way, dist.new_group(backend=name), recording)
        train(made, [dist.get_rank()], steps=2)
        asked = collectives(made)
        calls = [(call.verb, call.world, call.nbytes) for call in recording.calls]
        seen[name] = (asked, calls, fullshard.memory_use(made).peak_transient)
    assert any("all_to_all" in name for name in seen["gloo"][0]), seen["gloo"][0]  # the fast reduction
    assert seen[backend] == seen["gloo"]


@on_ranks
def test_a_program_that_names_no_backend(tmp_path: Path) -> None:
    """The README's way. It asks gloo for the same as one that names it: the fast reduction among others."""
    rank, world, asked = dist.get_rank(), dist.get_world_size(), []
    for backend in (None, "gloo"):
        dist.destroy_process_group()
        store = dist.FileStore(f"{tmp_path}/{backend}", world)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world)
        made = model()
        fullshard.fully_shard(made[2])
        fullshard.fully_shard(made)
        train(made, [rank])
        asked.append(collectives(made))
    assert asked[0] == asked[1] and any("all_to_all" in name for name in asked[1]), asked


# Groups implemented in Python.


class Relay(dist.ProcessGroup):
    """Hands every collective to a gloo group; knows the names that `torch.distributed` calls in this version."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self.inner = dist.ProcessGroupGloo(store, rank, size, timeout)
        self.calls: list[str] = []
        self.name = ""

    @property
    def group_name(self) -> str:
        self.name = distributed_c10d._world.pg_names.get(self, self.name)  # asked for once more when it has gone
        return self.name

    def getBackendName(self) -> str:
        return "relay"


def relaying(name: str, options: Callable[[], Any] | None) -> Callable[..., Any]:
    """A method that calls gloo's of that name; with `options` where the caller leaves them out."""

    def call(self: Relay, *args: Any) -> Any:
        self.calls.append(name)
        missing = options is not None and not isinstance(args[-1] if args else None, options)  # type: ignore[arg-type]
        given = [arg for arg in args if arg is not None] if missing else args
        return getattr(self.inner, name)(*given, *([options()] if missing and options is not None else []))

    return call


for _name, _options in (
    ("allreduce", distributed_c10d.AllreduceOptions),
    ("allgather", distributed_c10d.AllgatherOptions),
    ("broadcast", distributed_c10d.BroadcastOptions),
    ("barrier", distributed_c10d.BarrierOptions),
):
    setattr(Relay, _name, relaying(_name, _options))
gather = relaying("_allgather_base", distributed_c10d.AllgatherOptions)
scatter = relaying("_reduce_scatter_base", distributed_c10d.ReduceScatterOptions)
exchange = relaying("alltoall_base", distributed_c10d.AllToAllOptions)


def strict_gather(self: Relay, output: Tensor, shard: Tensor, opts: Any) -> Any:
    return gather(self, output, shard, opts)


OLD = {"_allgather_base": gather, "_reduce_scatter_base": scatter, "alltoall_base": exchange}
NEW = {"all_gather_single": gather, "reduce_scatter_single": scatter, "all_to_all_single": exchange}
KINDS = {
    "as this torch calls them": NEW if RENAMED else OLD,
    "by both names": OLD | NEW,
    "by the old names": OLD,  # works since before the fallback, and goes on to
    "with options that are not left out": OLD | NEW | {"_allgather_base": strict_gather},
}


def python_group(kind: str) -> Any:
    name = "relay" + "".join(word[0] for word in kind.split())
    if name not in dist.Backend.backend_list:
        dist.Backend.register_backend(name, type("Named", (Relay,), KINDS[kind]), devices=["cpu"])
    return dist.new_group(backend=name)


@pytest.mark.parametrize("kind", KINDS)
@on_ranks
def test_a_group_implemented_in_python(kind: str) -> None:
    """Trains, and sends rank 0's states."""
    want = torch.tensor(train(model(), list(range(dist.get_world_size()))), dtype=torch.float64)
    for way in ("rows", "flat", "wrapper"):
        group = python_group(kind)
        losses = torch.tensor(train(shard(way, group), [dist.get_rank()]), dtype=torch.float64)
        dist.all_reduce(losses)
        torch.testing.assert_close(losses / dist.get_world_size(), want, rtol=1e-5, atol=1e-6)
        assert group.calls, "nothing went through the group"
    made, want = model(), model().state_dict()
    if dist.get_rank():
        nn.utils.vector_to_parameters(torch.zeros(sum(p.numel() for p in made.parameters())), made.parameters())
    wrapped = FullyShardedDataParallel(made, process_group=python_group(kind), sync_module_states=True)
    with FullyShardedDataParallel.summon_full_params(wrapped, writeback=False):
        assert all(parameter.equal(want[name]) for name, parameter in wrapped.named_parameters())


# Ranks as threads of torch's own groups.


def on_threads(fn: Callable[[int], Any], world: int) -> list[Any]:
    """`fn(rank)` on threads that are ranks of torch's threaded groups; the first exception of a rank is raised."""
    results: list[Any] = [None] * world
    errors: dict[int, BaseException] = {}
    store = dist.HashStore()

    def work(rank: int) -> None:
        dist.init_process_group("threaded", rank=rank, world_size=world, store=store)
        try:
            results[rank] = fn(rank)
        except BaseException as error:
            errors[rank] = error
            threaded.ProcessLocalGroup.exception_handle(error)
        finally:
            dist.destroy_process_group()

    threaded._install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(world)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads), "a rank did not end"
    finally:
        threaded.ProcessLocalGroup.reset()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        threaded._uninstall_threaded_pg()
    if errors:
        raise errors[min(errors)]
    return results


SEEDING = threading.Lock()  # torch's random numbers are the process's


@pytest.mark.parametrize("way", ["rows", "wrapper"])
def test_ranks_as_threads(way):
    def rank(number: int) -> list[float]:
        with SEEDING:
            made = model()
        if way == "wrapper":
            return train(FullyShardedDataParallel(made), [number])
        fullshard.fully_shard(made[2])
        return train(fullshard.fully_shard(made), [number])

    losses = on_threads(rank, 2)
    for step, wanted in enumerate(train(model(), [0, 1])):
        assert sum(each[step] for each in losses) / 2 == pytest.approx(wanted, rel=1e-5)


# device_id of the wrapper.


@pytest.fixture
def two_accelerators(fake_world, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process believes in accelerators of which the first is the current one."""
    fake_world(2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: torch.device("cuda"))


def test_device_id_keeps_its_index(two_accelerators):
    """Without parameters nothing needs memory there, so that no accelerator is needed to see it."""
    cuda, cpu = (partial(torch.device, kind) for kind in ("cuda", "cpu"))
    given = [cuda(1), cuda(0), cuda(), 1, 0, "cuda:1", "cuda", "cpu", cpu(), 1]
    wanted = [cuda(1), cuda(0), cuda(0), cuda(1), cuda(0), cuda(1), cuda(0), cpu(), cpu(), cuda(1)]
    assert [FullyShardedDataParallel(nn.Identity(), device_id=each).compute_device for each in given] == wanted


@pytest.mark.parametrize("given", ["gpu", "cuda:one", "", -1, True, 1.5], ids=repr)
def test_a_device_id_that_is_none_is_refused_by_name(two_accelerators, given):
    with pytest.raises(fullshard.ConfigError, match="device_id"):
        FullyShardedDataParallel(nn.Identity(), device_id=given)


def test_a_device_id_of_another_type_than_the_mesh(two_accelerators):
    mesh = DeviceMesh("cpu", [0, 1])
    with pytest.raises(fullshard.ConfigError, match="device"):
        FullyShardedDataParallel(nn.Identity(), device_mesh=mesh, device_id=1)
    assert FullyShardedDataParallel(nn.Identity(), device_mesh=mesh, device_id="cpu").compute_device.type == "cpu"
