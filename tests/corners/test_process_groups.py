"""Process groups as programs make them: without a backend, implemented in Python, ranks as threads; device_id."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

import fullshard
from fullshard import FullyShardedDataParallel
from models import TORCH

pytestmark = pytest.mark.gloo("about gloo's groups and threads")

FRONTS = ("rows", "flat", fullshard.Blocks("row"), "owner", "wrapper orig", "wrapper flat")
RENAMED = TORCH >= (2, 13)  # all_gather_single and its kin have been called _allgather_base and so on


def model() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3))


def shard(front: Any, group: Any, comm: Any = "torch") -> nn.Module:
    made = model()
    if front in ("wrapper orig", "wrapper flat"):
        options = {"process_group": group, "use_orig_params": front == "wrapper orig", "comm": comm}
        made[2] = FullyShardedDataParallel(made[2], **options)
        return FullyShardedDataParallel(made, **options)
    options = {"mesh": DeviceMesh.from_group(group, "cpu"), "layout": front, "comm": comm}
    fullshard.fully_shard(made[2], reshard_after_forward=True, **options)
    return fullshard.fully_shard(made, **options)


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def train(module: nn.Module, ranks: list[int], steps: int = 3) -> list[float]:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        loss = module(torch.cat([batch(step, rank) for rank in ranks])).square().mean()
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


def as_with_gloo(front: Any, backend: str) -> None:
    """The same calls (so the same layout, which costs decide), the same reduction, the same transient memory."""
    seen = {}
    for name in ("gloo", "gloo", backend):  # the first time in a process ranks tell each other who watches them
        recording = fullshard.RecordingComm(fullshard.TorchComm())
        made = shard(front, dist.new_group(backend=name), recording)
        train(made, [dist.get_rank()], steps=2)
        asked = collectives(made)
        calls = [(call.verb, call.world, call.nbytes) for call in recording.calls]
        seen[name] = (asked, calls, fullshard.memory_use(made).peak_transient)
    assert any("all_to_all" in name for name in seen["gloo"][0]), seen["gloo"][0]  # the fast reduction
    assert seen[backend] == seen["gloo"]


@pytest.mark.parametrize("front", FRONTS, ids=str)
@pytest.mark.parametrize("backend", ["undefined", "cpu:gloo"])  # the first: what a group without a backend is called
def test_a_group_without_a_backend_is_gloo_on_a_cpu(run_ranks, front, backend):
    run_ranks(as_with_gloo, front, backend, timeout=30)


def program(rank: int, folder: str) -> None:
    """A program's start, without a backend (the README's way) and with one; says what a step asked gloo for."""
    for backend in (None, "gloo"):
        dist.init_process_group(backend, store=dist.FileStore(f"{folder}/{backend}", 2), rank=rank, world_size=2)
        made = model()
        fullshard.fully_shard(made[2])
        fullshard.fully_shard(made)
        train(made, [rank])
        print(json.dumps(collectives(made)))
        dist.destroy_process_group()


def test_a_program_that_names_no_backend(tmp_path: Path) -> None:
    """It asks gloo for the same as one that names it: the fast reduction among others."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    call = "import sys, test_process_groups as t; t.program(int(sys.argv[1]), sys.argv[2])"
    running = [
        subprocess.Popen(
            [sys.executable, "-c", call, str(rank), str(tmp_path)],
            env=environment,
            cwd=Path(__file__).parent,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=90)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0]
    for lines in said:
        unnamed, named = map(json.loads, lines.splitlines())
        assert unnamed == named
        assert any("all_to_all" in name for name in named), named


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

    def _call(self, name: str, *args: Any) -> Any:
        self.calls.append(name)
        return getattr(self.inner, name)(*args)

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        return self._call("allreduce", tensors, opts or distributed_c10d.AllreduceOptions())

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self._call("allgather", outputs, inputs, opts or distributed_c10d.AllgatherOptions())

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        return self._call("broadcast", tensors, opts or distributed_c10d.BroadcastOptions())

    def barrier(self, opts: Any = None) -> Any:
        return self._call("barrier", opts or distributed_c10d.BarrierOptions())


def gather(self: Relay, output: Tensor, shard: Tensor, opts: Any = None) -> Any:
    return self._call("_allgather_base", output, shard, opts or distributed_c10d.AllgatherOptions())


def scatter(self: Relay, output: Tensor, buffer: Tensor, opts: Any = None) -> Any:
    return self._call("_reduce_scatter_base", output, buffer, opts or distributed_c10d.ReduceScatterOptions())


def exchange(self: Relay, output: Tensor, buffer: Tensor, out: Any, given: Any, opts: Any = None) -> Any:
    return self._call("alltoall_base", output, buffer, out, given, opts or distributed_c10d.AllToAllOptions())


def strict_gather(self: Relay, output: Tensor, shard: Tensor, opts: Any) -> Any:
    return gather(self, output, shard, opts)


OLD = {"_allgather_base": gather, "_reduce_scatter_base": scatter, "alltoall_base": exchange}
NEW = {"all_gather_single": gather, "reduce_scatter_single": scatter, "all_to_all_single": exchange}
KINDS = {
    "as this torch calls them": type("Public", (Relay,), NEW if RENAMED else OLD),
    "by both names": type("Both", (Relay,), {**OLD, **NEW}),
    "by the old names": type("Old", (Relay,), OLD),  # works since before the fallback, and goes on to
    "with options that are not left out": type("Strict", (Relay,), {**OLD, **NEW, "_allgather_base": strict_gather}),
}


def python_group(kind: str) -> Any:
    name = "relay" + "".join(word[0] for word in kind.split())
    if name not in dist.Backend.backend_list:
        dist.Backend.register_backend(name, KINDS[kind], devices=["cpu"])
    return dist.new_group(backend=name)


def trains_on_a_python_group(kind: str, front: Any) -> None:
    group = python_group(kind)
    assert isinstance(group, Relay)
    want = torch.tensor(train(model(), list(range(dist.get_world_size()))), dtype=torch.float64)
    losses = torch.tensor(train(shard(front, group), [dist.get_rank()]), dtype=torch.float64)
    dist.all_reduce(losses)
    torch.testing.assert_close(losses / dist.get_world_size(), want, rtol=1e-5, atol=1e-6)
    assert group.calls, "nothing went through the group"


@pytest.mark.parametrize("front", FRONTS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_group_implemented_in_python(run_ranks, kind, front):
    run_ranks(trains_on_a_python_group, kind, front, timeout=20)


def synchronises_states(kind: str) -> None:
    made = model()
    if dist.get_rank():
        for parameter in made.parameters():
            parameter.data.zero_()
    wrapped = FullyShardedDataParallel(made, process_group=python_group(kind), sync_module_states=True)
    want = model().state_dict()
    with FullyShardedDataParallel.summon_full_params(wrapped, writeback=False):
        for name, parameter in wrapped.named_parameters():
            assert parameter.equal(want[name]), name


def test_states_are_broadcast_over_a_python_group(run_ranks):
    run_ranks(synchronises_states, "as this torch calls them", timeout=20)


def on_threads(fn: Callable[[int], Any], world: int) -> list[Any]:
    """`fn(rank)` on threads that are ranks of torch's threaded groups; the first exception of a rank is raised."""
    from torch.testing._internal.distributed import multi_threaded_pg as threaded

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
            thread.join(20)
        assert not any(thread.is_alive() for thread in threads), "a rank did not end"
    finally:
        threaded.ProcessLocalGroup.reset()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        threaded._uninstall_threaded_pg()
    if errors:
        raise errors[min(errors)]
    return results


SEEDING = threading.Lock()  # torch's random numbers are the process's


@pytest.mark.parametrize("front", FRONTS, ids=str)
def test_ranks_as_threads(front):
    want = train(model(), [0, 1])

    def rank(number: int) -> list[float]:
        with SEEDING:
            made = model()
        if front in ("wrapper orig", "wrapper flat"):
            wrapped = FullyShardedDataParallel(made, use_orig_params=front == "wrapper orig")
            return train(wrapped, [number])
        fullshard.fully_shard(made[2], layout=front)
        return train(fullshard.fully_shard(made, layout=front), [number])

    losses = on_threads(rank, 2)
    for step, wanted in enumerate(want):
        assert sum(each[step] for each in losses) / 2 == pytest.approx(wanted, rel=1e-5)


# device_id of the wrapper.


@pytest.fixture
def two_accelerators(fake_world, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process believes in accelerators of which the first is the current one."""
    fake_world(2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: torch.device("cuda"))


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (torch.device("cuda", 1), "cuda:1"),
        (torch.device("cuda", 0), "cuda:0"),
        (torch.device("cuda"), "cuda:0"),
        (1, "cuda:1"),
        (0, "cuda:0"),
        ("cuda:1", "cuda:1"),
        ("cuda", "cuda:0"),
        ("cpu", "cpu"),
        (torch.device("cpu"), "cpu"),
    ],
    ids=str,
)
def test_device_id_keeps_its_index(two_accelerators, given, wanted):
    """Without parameters nothing needs memory there, so that no accelerator is needed to see it."""
    assert FullyShardedDataParallel(nn.Identity(), device_id=given).compute_device == torch.device(wanted)


def test_device_ids_of_one_process_do_not_mix(two_accelerators):
    made = [FullyShardedDataParallel(nn.Identity(), device_id=index).compute_device.index for index in (0, 1, 0)]
    assert made == [0, 1, 0]


@pytest.mark.parametrize("given", ["gpu", "cuda:one", "", -1, True, 1.5], ids=repr)
def test_a_device_id_that_is_none_is_refused_by_name(two_accelerators, given):
    with pytest.raises(fullshard.ConfigError, match="device_id"):
        FullyShardedDataParallel(nn.Identity(), device_id=given)


def test_a_device_id_of_another_type_than_the_mesh(two_accelerators):
    mesh = DeviceMesh("cpu", [0, 1])
    with pytest.raises(fullshard.ConfigError, match="device"):
        FullyShardedDataParallel(nn.Identity(), device_mesh=mesh, device_id=1)
    assert FullyShardedDataParallel(nn.Identity(), device_mesh=mesh, device_id="cpu").compute_device.type == "cpu"


def trains_with_a_string(given: str) -> None:
    wrapped = FullyShardedDataParallel(model(), device_id=given)
    assert wrapped.compute_device == torch.device("cpu")
    train(wrapped, [dist.get_rank()])


def test_a_string_as_device_id(run_ranks):
    run_ranks(trains_with_a_string, "cpu", timeout=20)
