"""The private torch API that Fullshard leans on, one test each: a failure here says which module to mend."""

from __future__ import annotations

import gc
import hashlib
import secrets
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode

import fullshard
from fullshard.store.metadata import read_index
from fullshard.torch_private import collectives as direct
from fullshard.torch_private import (
    dcp_files,
    dispatch_modes,
    foreach,
    graph_nodes,
    local_tensor,
    pipelines,
    store,
    tensor_hooks,
    transforms,
    versions,
)
from fullshard.torch_private.assigning import is_assigning
from fullshard.torch_private.autograd_task import BackwardEnd
from fullshard.torch_private.gloo_group import HAS_GLOO, gloo_group, listening
from fullshard.torch_private.gloo_threads import GLOO_THREAD, gloo_states, wait_for_rest
from fullshard.torch_private.group_timeout import timeout_of
from fullshard.torch_private.holders import holders
from fullshard.torch_private.profiler import in_range, recording
from fullshard.torch_private.step_hooks import step_part, without_step_hooks

pytestmark = pytest.mark.gloo("about gloo's groups and threads")


def test_pipelines_ask_for_gradients_of_inputs_by_the_known_function() -> None:
    from torch.distributed.pipelining import _backward

    assert _backward.__name__ == pipelines._MODULE, "torch_private/pipelines.py recognizes its frames"
    asks = getattr(_backward, pipelines._FUNCTION, None)
    assert asks is not None, "torch_private/pipelines.py recognizes its frames"
    x = torch.ones(2, requires_grad=True)
    seen: list[bool] = []
    original = torch.autograd.grad

    def grad(*args: Any, **kwargs: Any) -> Any:
        seen.append(pipelines.splits_backward())
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.autograd, "grad", grad)
        asks([(x * 2).sum()], None, [x], iter(()))
        torch.autograd.grad(x.sum(), x)
    assert seen == [True, False]


def test_process_groups_have_the_methods_that_collectives_are_called_on() -> None:
    direct_calls = ["_allgather_base", "_reduce_scatter_base", "alltoall_base", "_get_backend"]
    direct_calls += ["allgather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced", "allreduce", "broadcast"]
    for name in direct_calls:
        assert hasattr(dist.ProcessGroup, name), f"torch_private/collectives.py calls ProcessGroup.{name}"
    assert hasattr(torch._C, "_AutoDispatchBelowADInplaceOrView"), "torch_private/collectives.py enters it"


def test_views_know_their_base() -> None:
    base = torch.ones(4) * 2
    assert not local_tensor.is_view(base) and local_tensor.view_base(base) is None
    view = base[1:][1:]
    assert local_tensor.is_view(view) and local_tensor.view_base(view) is base


def test_torch_functions_can_be_switched_off_and_on() -> None:
    class Asked(torch.Tensor):
        calls = 0

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            cls.calls += 1
            return torch._C._disabled_torch_function_impl(func, types, args, kwargs or {})

    tensor = torch.ones(2).as_subclass(Asked)
    before = Asked.calls
    with torch._C.DisableTorchFunctionSubclass():
        _ = tensor + 1
        assert Asked.calls == before
        with torch._C._EnableTorchFunction():
            _ = tensor + 1
    assert Asked.calls == before + 1


def test_whether_a_profiler_records_is_known() -> None:
    assert not recording()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
        assert recording()
        assert in_range("gather", "block", lambda: torch.ones(1)) == 1
    assert "fullshard: gather block" in [event.name for event in recorded.events()]


def test_a_profile_names_what_a_unit_does(fake_world: Callable[..., None]) -> None:
    fake_world(4)
    model = fullshard.fully_shard(nn.Linear(4, 4))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
        model(torch.ones(1, 4)).sum().backward()
    ranges = ["gather", "wait for gather", "reduce", "wait for reduce"]
    found = [event.name for event in recorded.events() if event.name.startswith("fullshard: ")]
    assert found == [f"fullshard: {name} (root)" for name in ranges]


def test_a_dtensor_is_made_of_a_local_tensor_and_a_specification(fake_world: Callable[..., None]) -> None:
    fake_world(2)
    like = distribute_tensor(torch.zeros(4, 3), init_device_mesh("cpu", (2,)), [Shard(0)])
    local = torch.ones(2, 3)
    made = local_tensor.with_spec(local, local_tensor.spec_of(like))
    assert type(made) is DTensor and not made.requires_grad and vars(made).keys() == vars(like).keys()
    assert local_tensor.local_of(made) is local and (made.shape, made.placements) == (like.shape, like.placements)


def test_foreach_copies_adds_zeroes_and_scales_with_casts() -> None:
    targets = [torch.ones(3), torch.ones(2, 2)]
    foreach.copy_all(targets, [torch.full((3,), 2.0, dtype=torch.bfloat16), torch.full((2, 2), 3.0)])
    assert targets[0].tolist() == [2.0] * 3
    foreach.add_all(targets, [torch.ones(3, dtype=torch.bfloat16), torch.ones(2, 2)])
    assert targets[1].sum() == 16 and targets[0].dtype == torch.float32
    foreach.zero_all(targets)
    assert not any(t.any() for t in targets)
    again = torch.ones(2)
    foreach.zeroes([again])()
    assert not again.any()
    foreach.copy_all([], [])
    tensors = [torch.ones(3), torch.ones(2, dtype=torch.bfloat16)]
    foreach.scale_all(tensors, 1.5)
    assert [tensor.tolist() for tensor in tensors] == [[1.5] * 3, [1.5] * 2]
    foreach.scale_all([], 2.0)


def test_columns_go_in_and_out_of_a_matrix_with_zeros_behind_rows_that_are_too_few() -> None:
    matrix = torch.full((2, 5), -1.0)
    tensors = [torch.arange(6, dtype=torch.bfloat16).view(3, 2), torch.full((), 7.0, dtype=torch.bfloat16).expand(2)]
    foreach.columns_in(matrix)(tensors)
    assert matrix.tolist() == [[0, 1, 2, 3, 7], [4, 5, 0, 0, 7]]
    out = [torch.empty(2, 4), torch.empty(2, 1)]
    foreach.columns_out(matrix, [4, 1], out)()
    assert out[0].tolist() == [[0, 1, 2, 3], [4, 5, 0, 0]] and out[1].tolist() == [[7], [7]]


def test_holders_sees_views_and_python_references() -> None:
    flat = torch.zeros(8)
    parts = [flat[:4], flat[4:]]
    storage = flat.untyped_storage()
    alone = holders(storage._cdata, parts)
    kept = parts[0]
    assert holders(storage._cdata, parts) != alone
    del kept
    assert holders(storage._cdata, parts) == alone
    alias = parts[1].detach()
    assert holders(storage._cdata, parts) != alone
    del alias
    assert holders(storage._cdata, parts) == alone


def begin_backward(in_the_middle: Callable[[list[BackwardEnd]], object]) -> tuple[torch.Tensor, list, list[str]]:
    """A loss; the ends that its backward notes, and their calls. `in_the_middle` is called with them."""
    calls: list[str] = []
    ends: list[BackwardEnd] = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: ends.append(BackwardEnd(lambda: calls.append("end"), 0)))
    x.register_hook(lambda grad: in_the_middle(ends) and None)
    return y.sum(), ends, calls


def test_backward_end_is_called_once_and_knows_when_it_is_over() -> None:
    ran: list[bool] = []
    loss, ends, calls = begin_backward(lambda ends: ran.append(ends[0].running()))
    loss.backward()
    assert ran == [True] and calls == ["end"] and not ends[0].running()


def test_backward_end_dies_with_a_backward_that_raises() -> None:
    loss, ends, calls = begin_backward(lambda ends: {}["broken off"])
    with pytest.raises(KeyError, match="broken off"):
        loss.backward()
    gc.collect()
    assert not calls and not ends[0].running() and ends[0].is_over()


def test_a_view_through_data_has_a_version_of_its_own() -> None:
    """A gather rewrites `full` between forward and backward without autograd taking it for a change."""
    full = torch.ones(4)
    weight = torch.nn.Parameter(full[:2].data)
    loss = (weight * weight.sin()).sum()
    full.copy_(torch.ones(4))
    loss.backward()
    assert weight.grad is not None


def test_an_optimizer_step_changes_the_version_of_the_shard() -> None:
    """What `Form.version` goes by; fused steps do not change it, which is why optimizers' steps are noted besides."""
    shard = torch.ones(4)
    view = torch.nn.Parameter(shard[:2])
    view.grad = torch.ones(2)
    for kwargs in ({"foreach": True}, {"foreach": False}):
        before = shard._version
        torch.optim.AdamW([view], **kwargs).step()
        assert shard._version > before, kwargs


def test_backends_of_a_group_can_be_asked_for_memory(fake_world) -> None:
    fake_world(2)
    assert hasattr(dist.ProcessGroup, "_get_backend"), "comm/group_memory.py refuses memory from any process group"
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert hasattr(backend, "supports_tensor_alloc") and hasattr(backend, "allocate_tensor")


def test_hooks_on_tensors_join_those_of_the_user() -> None:
    seen: list[str] = []
    leaf = torch.ones(2, requires_grad=True)
    tensor = leaf * 3
    handle = tensor.register_hook(lambda grad: seen.append("user, before"))
    tensor_hooks.on_gradient(tensor, lambda grad: seen.append("ours, after"))
    other = leaf * 2
    tensor_hooks.on_gradient(other, lambda grad: seen.append("ours, before"))
    later = other.register_hook(lambda grad: grad * 10)
    handle.remove()
    (tensor + other).sum().backward()
    assert sorted(seen) == ["ours, after", "ours, before"]
    assert leaf.grad is not None and leaf.grad.tolist() == [23.0, 23.0]
    later.remove()
    tensor_hooks.on_gradient(leaf, lambda grad: seen.append("leaf"))
    leaf.sum().backward()
    assert seen[-1] == "leaf"
    changed = leaf * 2
    tensor_hooks.on_gradient(changed, lambda grad: seen.append("of what it was"))
    hooks = tensor_hooks.hooks_of(changed)
    changed.view_as(changed).mul_(3)
    tensor_hooks.put_first(hooks, lambda grad: seen.append(f"first, {grad.tolist()}"))
    changed.sum().backward()
    assert seen[-3:] == ["first, [3.0, 3.0]", "of what it was", "leaf"]


def test_hooks_that_join_the_one_that_is_there() -> None:
    seen: list[str] = []
    tensor, other = torch.ones(2, requires_grad=True) * 3, torch.ones(2, requires_grad=True) * 3
    tensor_hooks.on_gradient(tensor, lambda grad: seen.append("begins"))
    assert tensor_hooks.join(tensor, lambda grad: seen.append("ends"))
    assert not tensor_hooks.join(tensor, lambda grad: seen.append("late")), "somebody else's is in front already"
    assert not tensor_hooks.join(other, lambda grad: seen.append("none there"))
    tensor.sum().backward()
    assert seen == ["ends", "begins"]
    tensor_hooks.on_gradient(other, lambda grad: seen.append("of what it was"))
    other.mul_(2)
    assert not tensor_hooks.join(other, lambda grad: seen.append("of what it is"))


def test_views_that_no_dispatch_mode_sees() -> None:
    class Counts(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen += 1
            return func(*args, **(kwargs or {}))

    leaf = torch.ones(2, requires_grad=True)
    assert not dispatch_modes.modes_active()
    with Counts() as mode:
        assert dispatch_modes.modes_active() == 1
        view = dispatch_modes.view_of(leaf)
    assert not mode.seen and view is not leaf and view.grad_fn is not None and view.data_ptr() == leaf.data_ptr()


def test_hooks_that_come_first_and_can_be_taken_back() -> None:
    seen: list[str] = []
    leaf = torch.ones(2, requires_grad=True)
    for users in (0, 2):
        tensor = leaf * 3
        for index in range(users):
            tensor.register_hook(lambda grad, index=index: seen.append(f"user's {index}"))  # type: ignore[misc]
        take_back = tensor_hooks.on_gradient_first(tensor, lambda grad: seen.append("first"))
        tensor.register_hook(lambda grad: seen.append("later"))
        total = tensor.sum()
        total.backward(retain_graph=True)
        of_the_user = [f"user's {index}" for index in range(users)]
        assert seen == ["first", *of_the_user, "later"]
        seen.clear()
        take_back()
        take_back()
        total.backward()
        assert seen == [*of_the_user, "later"]
        seen.clear()


def test_nodes_are_numbered_in_the_order_in_which_they_are_made() -> None:
    leaf = torch.ones(2, requires_grad=True)
    before, since = leaf * 2, graph_nodes.next_node()  # the first node of a thread has number 0
    after = leaf * 3
    assert graph_nodes.number_of(before.grad_fn) < since <= graph_nodes.number_of(after.grad_fn)


def test_versions_go_up_and_back() -> None:
    leaf = torch.ones(2, requires_grad=True)
    kept = versions.Versions([leaf])
    result = (leaf * leaf).sum()
    kept.spoil()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward(retain_graph=True)
    kept.restore()
    result.backward()
    assert leaf.grad is not None


def test_transforms_are_told() -> None:
    seen = []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append(transforms.current_transform() is not None)
        return x.sum()

    torch.func.grad(function)(torch.ones(2))
    torch.vmap(function)(torch.ones(2, 2))
    function(torch.ones(2))
    assert seen == [True, True, False]


def test_meshes_tell_their_root_and_strided_shards_exist() -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import _StridedShard

    for name in ("_get_root_mesh", "_concatenate"):
        assert hasattr(DeviceMesh, name), f"torch_private/root_mesh.py calls DeviceMesh.{name}"
    assert _StridedShard(0, split_factor=2).dim == 0, "shard/tensor_parallel.py cannot say how rows are split twice"


def test_a_grad_scaler_looks_at_gradients_in_one_overridable_place() -> None:
    """What optim/scaler.py overrides, and the kernel that it calls there."""
    calls = []

    class Scaler(torch.amp.GradScaler):
        def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16):
            calls.append((inv_scale.item(), found_inf.item()))
            return {found_inf.device: torch.ones_like(found_inf)}

    scaler = Scaler("cpu", init_scale=4.0)
    parameter = torch.nn.Parameter(torch.ones(2))
    for fused in (False, True):
        scaler.scale(parameter.sum()).backward()
        before = parameter.detach().clone()
        scaler.step(torch.optim.SGD([parameter], lr=1.0, fused=fused))
        assert torch.equal(parameter, before)
        scaler.update()
    assert calls == [(0.25, 0.0), (1.0, 0.0)] and scaler.get_scale() == 1.0
    grads, found = [torch.full((3,), 8.0), torch.tensor([torch.inf])], torch.zeros(())
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found, torch.tensor(0.25))
    assert grads[0].tolist() == [2.0] * 3 and found.item() == 1.0


def test_dynamo_says_whether_it_is_active() -> None:
    from fullshard.torch_private import dynamo as outside_compile

    assert not outside_compile.dynamo_is_active()
    seen: list[bool] = []

    def inner(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        seen.append(bool(outside_compile.dynamo_is_active()))
        return x + 1

    def block(x: torch.Tensor) -> torch.Tensor:
        return torch.compiler.disable(inner, recursive=False)(x * 2) * 3

    assert torch.equal(torch.compile(block, backend="eager")(torch.ones(2)), torch.full((2,), 9.0))
    assert seen == [True]
    assert not outside_compile.dynamo_is_active()


def test_the_sanitizer_orders_accesses_without_a_device() -> None:
    """Only tests use it: tests/happens_before.py."""
    from torch.cuda._sanitizer import EventHandler

    for waits in (False, True):
        handler = EventHandler()
        handler._handle_stream_creation(1)
        assert not handler._handle_kernel_launch(0, set(), {7}, set(), "write", {7: []})
        handler._handle_event_creation(2)
        handler._handle_event_record(2, 0)
        if waits:
            handler._handle_event_wait(2, 1)
        assert bool(handler._handle_kernel_launch(1, {7}, set(), set(), "read", {7: []})) is not waits


def test_groups_that_only_their_ranks_know(run_ranks) -> None:
    for timeout, total, sent in run_ranks(over_an_own_group):
        assert timeout == 30.0 and total == [3.0, 3.0] and sent == [5.0]


def over_an_own_group() -> tuple[float, list[float], list[float]]:
    rank, world = dist.get_rank(), dist.get_world_size()
    assert HAS_GLOO and dist.group.WORLD is not None
    names = [secrets.token_hex(4) if rank == 0 else None]
    dist.broadcast_object_list(names, 0)
    group = gloo_group(f"test/{names[0]}", rank, world, timedelta(seconds=30))
    assert group is not None
    total, sent, gathered = torch.full((2,), rank + 1.0), torch.full((1,), 5.0 + rank), torch.empty(world)
    direct.all_reduce(total, group, False).wait()
    direct.broadcast(sent, group, 0).wait()
    direct.all_gather(gathered, torch.full((1,), float(rank)), group)().wait()
    assert gathered.tolist() == [0.0, 1.0]
    before = threads_named("gloo_tcp_loop")
    second = gloo_group(f"test/{names[0]}/second", rank, world, timedelta(seconds=30), group)
    assert second is not None and threads_named("gloo_tcp_loop") == before
    where = listening(f"test/{names[0]}", world)
    both = (socket.inet_aton("127.0.0.1"), socket.inet_pton(socket.AF_INET6, "::1"))
    assert where and any(address in where for address in both), "connections are not told from those of others"
    assert listening(f"test/{names[0]}/unknown", world) == b""
    direct.all_gather(gathered, torch.full((1,), 2.0 + rank), second)().wait()
    assert gathered.tolist() == [2.0, 3.0]
    line, key = store.StoreLine(f"test/{names[0]}/"), f"key/{rank}"
    assert not line.has(key) and line.replace(key, "", "a") and not line.replace(key, "", "b")
    assert line.get([key]) == ["a"] and line.replace(key, "a", "c") and line.get([key]) == ["c"]
    line.put(key, "d")
    assert line.get([key, key]) == ["d", "d"] and line.add(f"{key}/came", 2) == 2
    line.remove(key)
    assert not line.has(key)
    return timeout_of(group).total_seconds(), total.tolist(), sent.tolist()


def test_a_line_sees_the_end_of_its_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it is asked: torch prints a trace for each question to a store that is gone."""
    keeper = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
    monkeypatch.setattr(store, "default_store", lambda: dist.PrefixStore("group", keeper[0]))
    line = store.StoreLine("test/")
    line.put("key", "a")
    assert line.get(["key"]) == ["a"] and not line.has_ended
    of_member = dist.TCPStore("127.0.0.1", keeper[0].port, is_master=False, wait_for_workers=False)
    keeper.clear()
    assert line.has_ended
    monkeypatch.setattr(store, "default_store", lambda: of_member)
    began = time.monotonic()
    with pytest.raises(OSError, match="refused"):
        store.StoreLine("test/")  # at once, not after the store's timeout, in which nobody could be told anything
    assert time.monotonic() - began < 20.0
    monkeypatch.setattr(store, "default_store", lambda: None)
    with pytest.raises(RuntimeError, match="no store"):
        store.StoreLine("test/")


def threads_named(name: str) -> int:
    return [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")].count(name)


@pytest.mark.skipif(sys.platform != "linux", reason="threads are seen in /proc")
def test_gloos_threads_have_the_name_by_which_they_are_found(run_ranks) -> None:
    assert min(run_ranks(threads_of_gloo)) > 0


def threads_of_gloo() -> int:
    dist.all_reduce(torch.ones(3))
    assert wait_for_rest(10.0)
    return len(gloo_states())


@pytest.mark.skipif(sys.platform != "linux", reason="threads are seen in /proc")
def test_the_end_waits_for_a_thread_of_gloos_that_still_runs() -> None:
    """Else it would be ended while it holds a collective's tensors, and the process with it."""
    begun, enough = threading.Event(), threading.Event()

    def busy() -> None:
        Path("/proc/thread-self/comm").write_text(GLOO_THREAD)
        begun.set()
        while not enough.is_set():
            hashlib.sha256(bytes(1 << 22))  # without the interpreter's lock

    thread = threading.Thread(target=busy)
    thread.start()
    begun.wait()
    assert not wait_for_rest(0.05)
    enough.set()
    assert wait_for_rest(10.0)
    thread.join()


ALONE = """
import torch.distributed as dist
from torch import nn
import fullshard
from fullshard.torch_private import gloo_threads
gloo_threads.wait_for_rest = lambda: print("waits for gloo's threads")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
fullshard.fully_shard(nn.Linear(2, 2))
"""


def test_the_end_of_a_program_of_one_rank_waits_too() -> None:
    """It opens no connections, and has collectives of its own: 1 of 66 runs of `examples/elastic.py` ended with -6."""
    ran = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=True)
    assert ran.stdout == "waits for gloo's threads\n"


def test_a_wait_that_is_over_can_be_gone_on_with(run_ranks, tmp_path) -> None:
    """`Work.wait(timeout)` leaves the collective as it is: `comm/watched.py` looks up in between."""
    assert run_ranks(wait_twice, tmp_path / "waited") == [True, True]


def wait_twice(waited: Path) -> bool:
    rank, tensor, early = dist.get_rank(), torch.ones(1), False
    while rank and not waited.exists():
        time.sleep(0.01)
    work = dist.all_reduce(tensor, async_op=True)
    try:
        work.wait(timedelta(seconds=0.1 if rank == 0 else 30))
    except RuntimeError:
        early = not work.is_completed()
        waited.touch()
        work.wait()
    return tensor.item() == 2.0 and early == (rank == 0)


def test_dcps_files_name_only_what_is_known(tmp_path: Path) -> None:
    """`.metadata` as this torch writes it, read by an unpickler that knows the names in `metadata.py` alone."""
    state = {"a": torch.ones(2, dtype=torch.bfloat16), "b": {"c": [1, "x"]}, "d": torch.ones(2, 2).T}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        dcp.save(state, checkpoint_id=tmp_path)
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    index = read_index((tmp_path / ".metadata").read_bytes(), sizes, "here")
    assert set(index.entries) == {"a", "d"} and index.entries["a"].dtype is torch.bfloat16 and index.values
    assert dcp_files.StorageInfo("file", 1, 2).relative_path == "file"


def test_a_name_in_metadata_imports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch imports some of its submodules when they are first looked up."""
    looked_up: list[str] = []
    monkeypatch.setattr(torch, "__getattr__", looked_up.append)
    with pytest.raises(fullshard.CheckpointError, match="nothing was executed"):
        read_index(b"\x80\x02ctorch\n_never_imported\n.", {}, "here")
    assert not looked_up


class CallsBase(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_a_step_can_run_without_the_hooks_that_programs_registered() -> None:
    calls: list[str] = []
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    optimizer.register_step_pre_hook(lambda *args: calls.append("before"))
    optimizer.register_step_post_hook(lambda *args: calls.append("after"))
    handle = register_optimizer_step_post_hook(lambda *args: calls.append("all"))
    try:
        with without_step_hooks(optimizer):
            optimizer.step()
        torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]).step()  # from now on its step runs hooks
        calls.clear()
        for each in (optimizer, CallsBase(optimizer.param_groups[0]["params"])):
            step_part(each, each.param_groups[0]["params"])
        assert not calls and type(optimizer).step.hooked
        optimizer.step()
        assert calls == ["before", "after", "all"]
    finally:
        handle.remove()


def test_a_load_pre_hook_can_tell_whether_tensors_are_assigned() -> None:
    found: list[bool] = []
    module = torch.nn.Linear(2, 2)
    module.register_load_state_dict_pre_hook(
        lambda module, state, prefix, metadata, *rest: found.append(is_assigning(metadata))
    )
    for assign in (False, True):
        module.load_state_dict(module.state_dict(), assign=assign)
    assert found == [False, True]


@pytest.mark.parametrize("layout", ["rows", "flat"])
def test_optimizers_and_clipping_take_sharded_parameters_as_lists(layout, fake_world, monkeypatch) -> None:
    """As plain tensors and DTensors where nothing is asked for: on a GPU; clipping on a CPU, too."""
    fake_world(2)
    model = fullshard.fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), layout=layout)
    optimizer = torch.optim.AdamW(model.parameters())
    chooser = sys.modules[torch.optim.Optimizer.__module__]  # torch hides it behind a name of its own
    monkeypatch.setattr(chooser, "_get_foreach_kernels_supported_devices", lambda: ["cpu"])
    model(torch.ones(2, 4)).sum().backward()
    seen = set()
    for name in ("_foreach_norm", "_foreach_addcdiv_"):
        original = getattr(torch, name)

        def counted(*args: Any, original: Any = original, name: str = name, **kwargs: Any) -> Any:
            seen.add(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(torch, name, counted)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    assert seen == {"_foreach_norm", "_foreach_addcdiv_"}
