"""Ranks as threads of this process, over collectives in memory: for all that needs no sockets and no kill.

    issue   the inputs are copied; outputs hold poison from here on
    meet    once every rank of the group has issued its k-th collective, the results are computed from the copies
    wait    inputs must be what they were and outputs still poison; only now the results appear

Poison is bytes of 0xFF: NaN in every floating-point dtype, -1 in integers. Who reads a result before its wait computes
NaN; who overwrites a buffer in flight gets an error (arithmetic on it leaves NaN, and is not seen). One thread runs at
a time and the next one is chosen only where a rank waits for others, so that a run is the same every time, and what is
global in a process (random numbers, warnings, the default dtype, stdout) can be each rank's own. Ranks that all wait
are reported at once, with what they wait for.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import pickle
import queue
import random
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeProcessGroup
from torch.distributed.fsdp import sharded_grad_scaler  # noqa: F401 -- an argument's default is the group of who imports it
from torch.testing._internal.distributed import multi_threaded_pg
from torch.utils._python_dispatch import _disable_current_modes

import fullshard
import fullshard.events

PATIENCE = 120.0  # seconds that a task may take
UNMOVED = 2.0  # seconds after which ranks that all wait, with no other thread to wake them, are reported
POISON = 0xFF
REDUCE: dict[Any, Callable[[list[Tensor]], Tensor]] = {
    dist.ReduceOp.SUM: lambda of_ranks: functools.reduce(torch.add, of_ranks),
    dist.ReduceOp.AVG: lambda of_ranks: functools.reduce(torch.add, of_ranks) / len(of_ranks),
    dist.ReduceOp.MIN: lambda of_ranks: functools.reduce(torch.minimum, of_ranks),
    dist.ReduceOp.MAX: lambda of_ranks: functools.reduce(torch.maximum, of_ranks),
    dist.ReduceOp.PRODUCT: lambda of_ranks: functools.reduce(torch.mul, of_ranks),
    dist.ReduceOp.BAND: lambda of_ranks: functools.reduce(torch.bitwise_and, of_ranks),
    dist.ReduceOp.BOR: lambda of_ranks: functools.reduce(torch.bitwise_or, of_ranks),
}
"""Rank by rank, in the tensors' own precision, as gloo does."""
HERE = threading.local()
"""`.rank` and `.ranks` on a rank's thread."""


class LeftAlone(SystemExit):
    """A rank was let go, because another one raised."""


class Disagreement(AssertionError):
    """Ranks met in different collectives, or a buffer in flight was touched."""


class Turns:
    """Which rank's thread runs: one at a time, chosen where the running one waits."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.changed = threading.Condition()
        self.current = 0
        self.waits: list[tuple[Callable[[], bool], str] | None] = [None] * world
        self.away = [False] * world  # blocks in something that is not ours, without the turn
        self.ended = [False] * world
        self.failed = False
        self.state = get_state()  # of a rank that begins

    def begin(self, rank: int) -> None:
        with self.changed:
            self._until_my_turn(rank)
        set_state(self.state)

    def end(self, rank: int) -> None:
        with self.changed:
            self.ended[rank] = True
            self._pass_on(rank)

    def fail(self) -> None:
        """A rank raised: all that wait for it are let go."""
        with self.changed:
            self.failed = True
            self.changed.notify_all()

    def wait(self, ready: Callable[[], bool], what: str) -> None:
        """The calling thread goes on once `ready()`; other ranks run meanwhile."""
        rank = getattr(HERE, "rank", None)
        if rank is None:  # a thread that a rank began
            with self.changed:
                self.changed.wait_for(lambda: ready() or self.failed, PATIENCE)
            return
        if ready():
            return
        state = get_state()
        with self.changed:
            self.waits[rank] = (ready, what)
            self._pass_on(rank)
            self._until_my_turn(rank)
            self.waits[rank] = None
        set_state(state)

    @contextlib.contextmanager
    def elsewhere(self) -> Iterator[None]:
        """The calling rank blocks in something that is not ours; other ranks run meanwhile."""
        rank = getattr(HERE, "rank", None)
        if rank is None:
            yield
            return
        state = get_state()
        with self.changed:
            self.away[rank] = True
            self._pass_on(rank)
        try:
            yield
        finally:
            with self.changed:
                self.away[rank] = False
                if self.current is None or self.ended[self.current]:
                    self.current = rank
                self._until_my_turn(rank, raises=False)
            set_state(state)

    def notify(self) -> None:
        with self.changed:
            self.changed.notify_all()

    def _can_run(self, rank: int) -> bool:
        waiting = self.waits[rank]
        return not self.ended[rank] and not self.away[rank] and (waiting is None or waiting[0]())

    def _pass_on(self, rank: int) -> None:
        order = [(rank + 1 + k) % self.world for k in range(self.world)]
        self.current = next((other for other in order if self._can_run(other)), None)
        self.changed.notify_all()

    def _until_my_turn(self, rank: int, raises: bool = True) -> None:
        since = time.monotonic()
        while self.current != rank and not self.failed:
            self.changed.wait(0.05 if self.current is None else 1.0)
            if self.current is None:
                if self._can_run(rank):
                    self.current = rank
                elif any(self.away) or any(self._can_run(other) for other in range(self.world)):
                    since = time.monotonic()
                elif time.monotonic() - since > UNMOVED:
                    self.failed = True
                    self.changed.notify_all()
                    raise Disagreement(f"all ranks wait: {self.what_waits()}")
        if self.failed and raises and self.current != rank:
            raise LeftAlone

    def what_waits(self) -> str:
        words = ["ended" if e else w[1] if w else "runs" for e, w in zip(self.ended, self.waits, strict=True)]
        return ", ".join(f"rank {rank}: {word}" for rank, word in enumerate(words))


# What Fullshard, and PyTorch's FSDP, keep once a process.
OF_PROCESS: list[Any] = [
    fullshard.events.stream.listeners,
    importlib.import_module("fullshard.api.wrapper.summon")._open,
    importlib.import_module("fullshard.api.whole")._meetings,
    importlib.import_module("fullshard.agreement.meeting")._published,
    importlib.import_module("fullshard.forms.row_shard")._warned,
    importlib.import_module("torch.distributed.fsdp._debug_utils").SimpleProfiler.profiling,
]


def get_state() -> list[Any]:
    """What is global in a process and each rank's own."""
    return [
        torch.get_rng_state(),
        random.getstate(),
        (warnings.filters, warnings.showwarning, warnings._showwarnmsg_impl),
        torch.get_default_dtype(),
        (sys.stdout, sys.stderr),
        (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        [copy.copy(each) for each in OF_PROCESS],
    ]


def set_state(state: list[Any]) -> None:
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    warnings.filters, warnings.showwarning, warnings._showwarnmsg_impl = state[2]
    warnings._filters_mutated()
    torch.set_default_dtype(state[3])
    sys.stdout, sys.stderr = state[4]
    torch.autograd.set_detect_anomaly(*state[5])
    for each, content in zip(OF_PROCESS, state[6], strict=True):
        each.clear()
        each.extend(content) if isinstance(each, list) else each.update(content)


def unseen(fn: Callable[..., Any]) -> Callable[..., Any]:
    """What a communicator does is not seen by modes of the program's."""

    @functools.wraps(fn)
    def call(*args: Any, **keywords: Any) -> Any:
        with _disable_current_modes():
            return fn(*args, **keywords)

    return call


class Meeting:
    """The k-th collective of a group: what each rank brought, and the results once all are here."""

    def __init__(self, name: str, world: int) -> None:
        self.name, self.world = name, world
        self.brought: dict[int, tuple[str, str, list[Tensor]]] = {}
        self.results: list[list[Tensor]] = []  # by rank
        self.error = ""

    @unseen
    def bring(self, rank: int, kind: str, inputs: list[Tensor], option: Any) -> None:
        dtypes = " ".join(str(given.dtype) for given in inputs)
        self.brought[rank] = (f"{kind} {option}", dtypes, inputs)
        if len(self.brought) < self.world:
            return
        kinds = {what for what, *_ in self.brought.values()}
        several = {dtypes for _, dtypes, _ in self.brought.values() if dtypes}  # one that only receives brings none
        if len(kinds) > 1 or len(several) > 1:
            said = [f"{rank}: {what} {dtypes}" for rank, (what, dtypes, _) in self.brought.items()]
            self.error = f"ranks of {self.name} meet in {', '.join(said)}"
            return
        try:
            with torch.no_grad():
                self.results = COMPUTE[kind]([self.brought[rank][2] for rank in range(self.world)], option)
        except RuntimeError as error:  # of other sizes
            self.error = f"{kind} of {self.name}: {error}"
        self.brought.clear()

    def over(self) -> bool:
        return bool(self.results or self.error)


def all_reduced(inputs: list[list[Tensor]], op: Any) -> list[list[Tensor]]:
    return [[REDUCE[op](list(of_ranks)) for of_ranks in zip(*inputs, strict=True)]] * len(inputs)


def reduced_and_scattered(inputs: list[list[Tensor]], op: Any) -> list[list[Tensor]]:
    return [[REDUCE[op](list(of_ranks))] for of_ranks in zip(*inputs, strict=True)]


def gathered_at(inputs: list[list[Tensor]], root: int) -> list[list[Tensor]]:
    return [[brought[0] for brought in inputs] if rank == root else [] for rank in range(len(inputs))]


# From what each rank brought, by rank, to what each rank gets, by rank. The option is an operation or the root's rank.
COMPUTE: dict[str, Callable[[list[list[Tensor]], Any], list[list[Tensor]]]] = {
    "all_reduce": all_reduced,
    "reduce_scatter": reduced_and_scattered,
    "all_gather": lambda inputs, _: [[tensor for brought in inputs for tensor in brought]] * len(inputs),
    "broadcast": lambda inputs, root: [inputs[root]] * len(inputs),
    "scatter": lambda inputs, root: [[part] for part in inputs[root]],
    "gather": gathered_at,
    "all_to_all": lambda inputs, _: [list(parts) for parts in zip(*inputs, strict=True)],
}


class Pending(dist._Work):
    """A collective in flight. Results appear at `wait`."""

    @unseen
    def __init__(self, group: MemoryGroup, meeting: Meeting, kind: str, inputs: list[Tensor], outputs: list[Tensor]):
        super().__init__()
        self.group, self.meeting, self.kind = group, meeting, kind
        self.outputs = outputs
        self.copies = [given.detach().clone() for given in inputs]
        apart = not any(overlap(given, output) for given in inputs for output in outputs)
        self.inputs = inputs if apart else []
        for output in outputs if apart or kind == "all_reduce" else ():
            poison(output)
        self.poisoned = apart or kind == "all_reduce"
        self.done = False
        group.ranks.in_flight.append(self)

    def is_completed(self) -> bool:
        """A coin's answer, if it could be yes."""
        return self.done or (self.meeting.over() and self.group.ranks.coin.random() < 0.5)

    def is_success(self) -> bool:
        return self.done

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self.done:
            return True
        self.group.ranks.turns.wait(self.meeting.over, f"{self.kind} of {self.meeting.name}")
        if self.meeting.error:
            raise Disagreement(self.meeting.error)
        if not self.meeting.over():
            raise LeftAlone
        self.done = True
        self.group.ranks.in_flight.remove(self)
        self.arrive()
        return True

    @unseen
    def arrive(self) -> None:
        for given, brought in zip(self.inputs, self.copies, strict=False):
            self.check_alive(given, "input")
            if not as_bytes(given).equal(as_bytes(brought)):
                raise Disagreement(f"{self.kind}: its input was written between issue and wait")
        results = self.meeting.results[self.group._rank]
        for output, result in zip(self.outputs, results, strict=True):
            self.check_alive(output, "output")
            if self.poisoned and not bool((as_bytes(output) == POISON).all()):
                raise Disagreement(f"{self.kind}: its output was written between issue and wait")
            output.data.copy_(result.view_as(output))
        self.inputs, self.copies = [], []

    def check_alive(self, tensor: Tensor, role: str) -> None:
        needed = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
        if tensor.numel() and tensor.untyped_storage().nbytes() < needed:
            raise Disagreement(f"{self.kind}: the memory of its {role} was given back between issue and wait")

    def result(self) -> list[Tensor]:
        return self.outputs

    def synchronize(self) -> None:
        self.wait()

    def exception(self) -> None:
        return None

    def get_future(self) -> torch.futures.Future:
        self.wait()
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(self.outputs)
        return future


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def poison(tensor: Tensor) -> None:
    """Written to without autograd noticing, as a backend would."""
    if tensor.is_contiguous():
        tensor.data.view(-1).view(torch.uint8).fill_(POISON)
    else:
        tensor.data.copy_(torch.full((tensor.element_size(),), POISON, dtype=torch.uint8).view(tensor.dtype))


def overlap(one: Tensor, other: Tensor) -> bool:
    """Whether they lie in the same memory; tensors are taken for dense."""
    start, begin = one.data_ptr(), other.data_ptr()
    return start < begin + other.nbytes and begin < start + one.nbytes


class MemoryGroup(multi_threaded_pg.ProcessLocalGroup):
    """A process group of threads. See the module's docstring."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__(rank, world)
        self.ranks: ThreadRanks = HERE.ranks
        # Never called. Asked for by torch functions that look for the device that a group communicates on.
        backend = FakeProcessGroup._create_internal(rank, world)
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, backend)
        self._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)

    def getBackendName(self) -> str:
        return "gloo"

    def _issue(self, kind: str, inputs: list[Tensor], outputs: list[Tensor], option: Any = None) -> Pending:
        members = sorted(self._world().pg_group_ranks[self])  # ranks of the world
        issued = self.ranks.issued
        issued[self] += 1
        if members[self._rank] == 0:
            self.ranks.counts[kind] += 1
        key = (self.pg_name, *members, issued[self])
        meeting = self.ranks.meeting(key, f"group {self.pg_name} of ranks {members}, no. {issued[self]}", len(members))
        pending = Pending(self, meeting, kind, inputs, outputs)
        meeting.bring(self._rank, kind, pending.copies, option)
        if meeting.over():
            self.ranks.over(key)
        return pending

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Pending:
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        return self._issue("all_reduce", tensors, tensors, operation(opts))

    def barrier(self, opts: Any = None) -> Pending:
        return self._issue("all_reduce", [torch.ones(1)], [torch.ones(1)], dist.ReduceOp.SUM)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Pending:
        return self._issue("all_gather", inputs, [part for parts in zip(*outputs, strict=True) for part in parts])

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> Pending:
        return self.allgather([self._parts(output)], [given])

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Pending:
        return self.allgather([self._parts(output) for output in outputs], inputs)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Pending:
        return self._issue("reduce_scatter", inputs[0], outputs, operation(opts))

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any = None) -> Pending:
        return self.reduce_scatter([output], [self._parts(given)], opts)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Pending:
        for output, given in zip(outputs[:-1], inputs[:-1], strict=True):
            self.reduce_scatter_single(output, given, opts).wait()
        return self.reduce_scatter_single(outputs[-1], inputs[-1], opts)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Pending:
        root = opts.rootRank == self._rank
        return self._issue("broadcast", tensors if root else [], tensors, opts.rootRank)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Pending:
        return self._issue("scatter", inputs[0] if inputs else [], outputs, opts.rootRank)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Pending:
        return self._issue("gather", inputs, outputs[0] if outputs else [], opts.rootRank)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Pending:
        return self._issue("all_to_all", inputs, outputs)

    def all_to_all_single(
        self, output: Tensor, given: Tensor, sizes_out: Any, sizes_in: Any, opts: Any = None
    ) -> Pending:
        return self.alltoall(self._parts(output, sizes_out), self._parts(given, sizes_in))

    def _parts(self, tensor: Tensor, sizes: Any = ()) -> list[Tensor]:
        """By rank; of equal sizes along the first dimension where none are given."""
        tensor = tensor if tensor.dim() else tensor.view(1)
        return list(tensor.split(list(sizes) or [tensor.shape[0] // self._world_size] * self._world_size))

    # as torch 2.11 calls them
    allreduce_coalesced = allreduce
    _allgather_base, allgather_into_tensor_coalesced = all_gather_single, all_gather_single_coalesced
    _reduce_scatter_base, reduce_scatter_tensor_coalesced = reduce_scatter_single, reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def operation(opts: Any) -> Any:
    op = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
    return getattr(op, "op", op)


class ThreadRanks:
    """`world` threads, each a rank of one default group. One instance at a time; a context that ends the threads.

    Attributes:
        counts: collectives in which the first rank takes part, by kind.
        coin: what `is_completed` of a work that could be completed answers.
        issued: how many collectives each rank's group issued, in this `run`.
        in_flight: collectives, of all ranks, that nobody has waited for.
    """

    def __init__(self, world: int) -> None:
        self.world = world
        self.counts: Counter[str] = Counter()
        self.coin = random.Random(0)
        self.issued: Counter[MemoryGroup] = Counter()
        self.in_flight: list[Pending] = []
        self.turns = Turns(world)
        self._meetings: dict[Any, Meeting] = {}
        self._tasks: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(world)]
        self._answers: queue.SimpleQueue[tuple[int, Any, BaseException | None]] = queue.SimpleQueue()
        self._closing = contextlib.ExitStack()

    def __enter__(self) -> ThreadRanks:
        self._closing.enter_context(threaded_world())
        store = dist.HashStore()
        self._threads = [
            threading.Thread(target=self._serve, args=(rank, store), daemon=True, name=f"rank {rank}")
            for rank in range(self.world)
        ]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for tasks in self._tasks:
            tasks.put(None)
        for thread in self._threads:
            thread.join(5.0)  # one that hangs is left behind
        self._meetings.clear(), self.issued.clear(), self.in_flight.clear()
        self._closing.close()

    def run(self, fn: Callable[..., Any], *args: Any, patience: float = PATIENCE) -> list[Any]:
        """`fn(rank, *args)` on every rank; the results by rank. Raises what the first rank that raised did."""
        __tracebackhide__ = True
        self.turns = Turns(self.world)
        self._meetings.clear(), self.issued.clear()  # ranks that raised issued fewer than others
        for tasks in self._tasks:
            tasks.put((fn, args))
        results: list[Any] = [None] * self.world
        errors: dict[int, BaseException] = {}
        try:
            for _ in range(self.world):
                rank, results[rank], error = self._answer(patience)
                if error is not None:
                    errors[rank] = error
        except BaseException:
            self.turns.fail()
            raise
        finally:
            set_state(self.turns.state)
        if errors:
            own = [rank for rank in sorted(errors) if not isinstance(errors[rank], LeftAlone)]
            raise errors[min(own or errors)]
        if self._meetings:
            raise Disagreement(f"a collective is left unmatched: {[m.name for m in self._meetings.values()]}")
        return results

    def _answer(self, patience: float) -> tuple[int, Any, BaseException | None]:
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                return self._answers.get(timeout=1.0)
            if not all(thread.is_alive() for thread in self._threads):
                raise RuntimeError("a rank's thread has ended; what it raised is on stderr")
        frames = sys._current_frames()
        stacks = [
            f"--- {thread.name}\n{''.join(traceback.format_stack(frames[thread.ident or 0]))}"
            for thread in self._threads
        ]
        raise TimeoutError(f"no answer within {patience:g} s\n{self.turns.what_waits()}\n" + "\n".join(stacks))

    def meeting(self, key: Any, name: str, world: int) -> Meeting:
        """Where the ranks of a group meet for one collective."""
        return self._meetings.setdefault(key, Meeting(name, world))

    def over(self, key: Any) -> None:
        """All ranks came: who waits may go on."""
        self._meetings.pop(key, None)
        self.turns.notify()

    def _serve(self, rank: int, store: dist.Store) -> None:
        HERE.rank, HERE.ranks = None, self
        dist.init_process_group("memory", rank=rank, world_size=self.world, store=store)
        HERE.rank = rank
        while (task := self._tasks[rank].get()) is not None:
            fn, args = task
            turns = self.turns
            try:
                turns.begin(rank)
                answer = (rank, fn(rank, *args), None)
            except BaseException as error:  # handed to whoever called `run`
                turns.fail()
                answer = (rank, None, error)
            turns.end(rank)
            self._answers.put(answer)
            del task, fn, args, answer  # while this thread waits it keeps nothing alive
        HERE.rank = None
        dist.destroy_process_group()


def create(store: dist.Store, rank: int, world: int, timeout: timedelta) -> MemoryGroup:
    return MemoryGroup(rank, world)


if not hasattr(multi_threaded_pg.ThreadLocalWorld, "comms"):  # which torch 2.11 asks for when groups end
    multi_threaded_pg.ThreadLocalWorld.comms = []
dist.Backend.register_backend("memory", create, devices=["cpu"])

BLOCKING = ("get", "wait", "multi_get")


@contextlib.contextmanager
def threaded_world() -> Iterator[None]:
    """torch keeps its process groups by thread, and who waits at a store lets other ranks run."""
    with contextlib.ExitStack() as stack:
        for name in BLOCKING:
            stack.enter_context(mock.patch.object(dist.Store, name, letting_others_run(getattr(dist.Store, name))))
        stack.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", poisoning(torch.UntypedStorage.resize_)))
        multi_threaded_pg._install_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(True)
        try:
            yield
        finally:
            torch._C._distributed_c10d._set_thread_isolation_mode(False)
            multi_threaded_pg._uninstall_threaded_pg()


def poisoning(resize: Callable[..., Any]) -> Callable[..., Any]:
    """Storages are poisoned when their memory goes and when it comes."""

    def tail(storage: torch.UntypedStorage, start: int) -> Tensor:
        return torch.empty(0, dtype=torch.uint8).set_(storage, start, (storage.nbytes() - start,))

    @unseen
    def resized(storage: torch.UntypedStorage, nbytes: int) -> Any:
        kept = min(storage.nbytes(), nbytes)
        if storage.device.type != "cpu":
            return resize(storage, nbytes)
        if nbytes < storage.nbytes():
            tail(storage, kept).fill_(POISON)
        result = resize(storage, nbytes)
        if nbytes > kept:
            tail(storage, kept).fill_(POISON)
        return result

    return resized


def letting_others_run(blocking: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **keywords: Any) -> Any:
        rank = getattr(HERE, "rank", None)
        if rank is None:
            return blocking(*args, **keywords)
        with HERE.ranks.turns.elsewhere():
            return blocking(*args, **keywords)

    return call


def run(fn: Callable[..., Any], *args: Any, world: int = 2, timeout: float = PATIENCE, **keywords: Any) -> list[Any]:
    """`fn(*args, **keywords)` on every rank of a world of threads; the results by rank.

    What is given and returned is copied by pickling, as between processes.
    """
    __tracebackhide__ = True
    task = pickle.dumps((args, keywords))

    def act(rank: int) -> Any:
        args, keywords = pickle.loads(task)
        random.seed(0)
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float32)
        return pickle.dumps(fn(*args, **keywords))

    with ThreadRanks(world) as ranks:
        return [pickle.loads(result) for result in ranks.run(act, patience=max(timeout, PATIENCE))]
