"""Ranks as threads of this process, over collectives in memory: for all that needs no sockets and no kill.

    issue   the inputs are copied; outputs hold poison from here on
    meet    once every rank of the group has issued its k-th collective, the results are computed from the copies
    wait    inputs must be what they were and outputs still poison; only now the results appear

Poison is a signalling NaN, which arithmetic turns into a quiet one, and -1 in integers. Who reads a result before its
wait computes NaN; who writes to a buffer in flight gets an error; so does a rank that never waits. One thread runs at
a time and the next one is chosen only where a rank waits for others, so that a run is the same every time, and what is
global in a process (random numbers, warnings, the default dtype, stdout, patches by `mock`) can be each rank's own.
Ranks that all wait are reported at once, with what they wait for.
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
POLLS = 8  # questions whether a work is completed, after which other ranks run
POISON = 0xFF  # of memory whose dtype is not known, by bytes
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
SIGNALLING = {
    torch.float64: 0x7FF4 << 48,
    torch.float32: 0x7FA0 << 16,
    torch.float16: 0x7D00,
    torch.bfloat16: 0x7FA0,
}
"""NaN that arithmetic makes quiet, so that its bytes change. Floats of one byte have none."""
REDUCE: dict[Any, Callable[[list[Tensor]], Tensor]] = {
    dist.ReduceOp.SUM: lambda of_ranks: functools.reduce(torch.add, of_ranks),
    dist.ReduceOp.AVG: lambda of_ranks: functools.reduce(torch.add, of_ranks) / len(of_ranks),
    dist.ReduceOp.MIN: lambda of_ranks: functools.reduce(torch.minimum, of_ranks),
    dist.ReduceOp.MAX: lambda of_ranks: functools.reduce(torch.maximum, of_ranks),
    dist.ReduceOp.PRODUCT: lambda of_ranks: functools.reduce(torch.mul, of_ranks),
    dist.ReduceOp.BAND: lambda of_ranks: functools.reduce(torch.bitwise_and, of_ranks),
    dist.ReduceOp.BOR: lambda of_ranks: functools.reduce(torch.bitwise_or, of_ranks),
    dist.ReduceOp.BXOR: lambda of_ranks: functools.reduce(torch.bitwise_xor, of_ranks),
}
"""Rank by rank, in the tensors' own precision, as gloo does."""
HERE = threading.local()
"""`.rank`, `.ranks` and `.patches` on a rank's thread."""


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
        self.first: BaseException | None = None  # that a rank raised
        self.passed_on = 0  # how often another rank's turn came
        self.state = get_state()  # of a rank that begins

    def begin(self, rank: int) -> None:
        with self.changed:
            self._until_my_turn(rank)
        set_state(self.state)

    def end(self, rank: int) -> None:
        with self.changed:
            self.ended[rank] = True
            self._pass_on(rank)

    def fail(self, error: BaseException) -> None:
        """A rank raised: all that wait for it are let go."""
        with self.changed:
            self.first = self.first or error
            self.failed = True
            self.changed.notify_all()

    def step_aside(self, ready: Callable[[], bool], what: str) -> bool:
        """Others run once, if any can. Whether the calling rank is alone: all others ended or wait."""
        rank = getattr(HERE, "rank", None)
        if rank is None:
            return False
        with self.changed:
            others, seen = [self._can_run(other) for other in range(self.world) if other != rank], self.passed_on
            alone = not any(others) and not any(self.away)
        if any(others):
            self.wait(lambda: ready() or self.passed_on > seen + 1, what)
        return alone

    def wait(self, ready: Callable[[], bool], what: str) -> None:
        """The calling thread goes on once `ready()`; other ranks run meanwhile."""
        rank = getattr(HERE, "rank", None)
        if rank is None:  # a thread that a rank began
            with self.changed:
                self.changed.wait_for(lambda: ready() or self.failed, PATIENCE)
            return
        if ready():
            return
        state = leave()
        with self.changed:
            self.waits[rank] = (ready, what)
            self._pass_on(rank)
            self._until_my_turn(rank)
            self.waits[rank] = None
        come_back(state)

    @contextlib.contextmanager
    def elsewhere(self) -> Iterator[None]:
        """The calling rank blocks in something that is not ours; other ranks run meanwhile."""
        rank = getattr(HERE, "rank", None)
        if rank is None:
            yield
            return
        state = leave()
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
            come_back(state)

    def notify(self) -> None:
        with self.changed:
            self.changed.notify_all()

    def _can_run(self, rank: int) -> bool:
        waiting = self.waits[rank]
        return not self.ended[rank] and not self.away[rank] and (waiting is None or waiting[0]())

    def _pass_on(self, rank: int) -> None:
        order = [(rank + 1 + k) % self.world for k in range(self.world)]
        self.passed_on += 1
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
                    error = Disagreement(f"all ranks wait: {self.what_waits()}")
                    self.fail(error)
                    raise error
        if self.failed and raises and self.current != rank:
            raise LeftAlone

    def what_waits(self) -> str:
        words = ["ended" if e else w[1] if w else "runs" for e, w in zip(self.ended, self.waits, strict=True)]
        return ", ".join(f"rank {rank}: {word}" for rank, word in enumerate(words))


# What Fullshard, and PyTorch's FSDP, keep once a process.
OF_PROCESS: list[Any] = [
    fullshard.events.stream.listeners,
    importlib.import_module("fullshard.api.wrapper.summon")._open,
    importlib.import_module("fullshard.api.save_pretrained")._meetings,
    importlib.import_module("fullshard.agreement.start")._published,
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


def leave() -> list[Any]:
    """Before another rank's turn: this rank's patches are taken out; its state."""
    for patch in reversed(HERE.patches):
        patch.set_aside()
    return get_state()


def come_back(state: list[Any]) -> None:
    set_state(state)
    for patch in HERE.patches:
        patch.take_up()


class Patch:
    """What a rank patched by `mock`, in force while it is this rank's turn."""

    def __init__(self, patch: Any) -> None:
        self.patch, self.aside, self.content = patch, False, None

    def set_aside(self) -> None:
        patch = self.patch
        self.aside = True
        if isinstance(patch, mock._patch_dict):
            self.content = patch.in_dict.copy()
            patch._unpatch_dict()
            return
        self.content = vars(patch.target)[patch.attribute]
        if patch.is_local:
            setattr(patch.target, patch.attribute, patch.temp_original)
        else:
            delattr(patch.target, patch.attribute)

    def take_up(self) -> None:
        patch = self.patch
        self.aside = False
        if isinstance(patch, mock._patch_dict):
            patch.in_dict.clear(), patch.in_dict.update(self.content)
        else:
            setattr(patch.target, patch.attribute, self.content)


@contextlib.contextmanager
def patches_by_rank() -> Iterator[None]:
    """`mock.patch` on a rank's thread holds on that rank only, also where ranks leave it in a different order."""
    kinds = [mock._patch, mock._patch_dict]
    methods = [(kind, kind.__enter__, kind.__exit__) for kind in kinds]

    def entering(enter: Callable[..., Any]) -> Callable[..., Any]:
        def call(patch: Any) -> Any:
            result = enter(patch)
            if getattr(HERE, "rank", None) is not None:
                HERE.patches.append(Patch(patch))
            return result

        return call

    def leaving(exit: Callable[..., Any]) -> Callable[..., Any]:
        def call(patch: Any, *error: Any) -> Any:
            own = [one for one in getattr(HERE, "patches", ()) if one.patch is patch]
            if own:
                HERE.patches.remove(own[-1])
            return None if own and own[-1].aside else exit(patch, *error)

        return call

    for kind, enter, exit in methods:
        kind.__enter__, kind.__exit__ = entering(enter), leaving(exit)
    try:
        yield
    finally:
        for kind, enter, exit in methods:
            kind.__enter__, kind.__exit__ = enter, exit


def unseen(fn: Callable[..., Any]) -> Callable[..., Any]:
    """What a communicator does is not seen by modes of the program's."""

    @functools.wraps(fn)
    def call(*args: Any, **keywords: Any) -> Any:
        if not (torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack()):
            return fn(*args, **keywords)
        with _disable_current_modes():
            return fn(*args, **keywords)

    return call


class Meeting:
    """The k-th collective of a group: what each rank brought, and the results once all are here."""

    def __init__(self, name: str, members: list[int]) -> None:
        self.name, self.members = name, members
        self.brought: dict[int, tuple[str, str, list[Tensor]]] = {}
        self.results: list[list[Tensor]] = []  # by rank
        self.error = ""

    @unseen
    def bring(self, rank: int, kind: str, inputs: list[Tensor], option: Any) -> None:
        dtypes = " ".join(str(given.dtype) for given in inputs)
        self.brought[rank] = (f"{kind} {option}", dtypes, inputs)
        if len(self.brought) < len(self.members):
            return
        brought = [self.brought[rank] for rank in range(len(self.members))]
        self.brought.clear()
        several = {dtypes for _, dtypes, _ in brought if dtypes}  # one that only receives brings none
        if len({what for what, *_ in brought}) > 1 or len(several) > 1:
            self.error = f"ranks of {self.name} meet in {self.by_rank([f'{one} {two}' for one, two, _ in brought])}"
            return
        sizes = [[list(given.shape) for given in inputs] for *_, inputs in brought]
        if kind in EQUAL and any(size != sizes[0] for size in sizes):
            self.error = f"{kind} of {self.name}: different sizes, {self.by_rank(sizes)}"
            return
        with torch.no_grad():
            self.results = COMPUTE[kind]([inputs for *_, inputs in brought], option)

    def by_rank(self, of_ranks: list[Any]) -> str:
        return ", ".join(f"{rank}: {one}" for rank, one in zip(self.members, of_ranks, strict=True))

    def over(self) -> bool:
        return bool(self.results or self.error)


def all_reduced(inputs: list[list[Tensor]], op: Any) -> list[list[Tensor]]:
    return [[REDUCE[op](list(of_ranks)) for of_ranks in zip(*inputs, strict=True)]] * len(inputs)


def reduced_and_scattered(inputs: list[list[Tensor]], op: Any) -> list[list[Tensor]]:
    return [[REDUCE[op](list(of_ranks))] for of_ranks in zip(*inputs, strict=True)]


def gathered_at(inputs: list[list[Tensor]], root: int) -> list[list[Tensor]]:
    return [[brought[0] for brought in inputs] if rank == root else [] for rank in range(len(inputs))]


def reduced_at(inputs: list[list[Tensor]], option: tuple[int, Any]) -> list[list[Tensor]]:
    root, op = option
    return [result if rank == root else [] for rank, result in enumerate(all_reduced(inputs, op))]


# From what each rank brought, by rank, to what each rank gets, by rank. The option is an operation or the root's rank.
COMPUTE: dict[str, Callable[[list[list[Tensor]], Any], list[list[Tensor]]]] = {
    "barrier": lambda inputs, _: [[]] * len(inputs),
    "all_reduce": all_reduced,
    "reduce": reduced_at,
    "reduce_scatter": reduced_and_scattered,
    "all_gather": lambda inputs, _: [[tensor for brought in inputs for tensor in brought]] * len(inputs),
    "broadcast": lambda inputs, root: [inputs[root]] * len(inputs),
    "scatter": lambda inputs, root: [[part] for part in inputs[root]],
    "gather": gathered_at,
    "all_to_all": lambda inputs, _: [list(parts) for parts in zip(*inputs, strict=True)],
    "p2p": lambda inputs, _: [[], inputs[0]],
}
EQUAL = {"all_reduce", "reduce", "reduce_scatter", "all_gather", "gather"}
"""To which every rank brings the same sizes."""
PASSED = {"broadcast", "scatter", "gather", "all_gather"}
"""In which a rank's input that is also output does not change."""


class Pending(dist._Work):
    """A collective in flight. Results appear at `wait`."""

    @unseen
    def __init__(
        self, group: MemoryGroup, meeting: Meeting, place: int, kind: str, inputs: list[Tensor], outputs: list[Tensor]
    ):
        super().__init__()
        self.group, self.meeting, self.place, self.rank = group, meeting, place, meeting.members[place]
        self.what = f"{kind} of {meeting.name}"
        self.outputs = outputs
        self.copies = [given.detach().clone() for given in inputs]
        self.in_flight: list[tuple[str, Tensor, Tensor]] = []  # buffers, and what their bytes have to be at the wait
        for output in outputs:
            poison(output)
        for given, brought in zip(inputs, self.copies, strict=True):
            if any(overlap(given, output) for output in outputs):
                if kind not in PASSED:
                    continue
                given.data.copy_(brought)
            self.in_flight.append(("input", given, bits(brought)))
        self.in_flight += [("output", output, bits(output).clone()) for output in outputs]
        self.done = False
        self.polls, self.since = 0, time.monotonic()
        group.ranks.in_flight.append(self)

    def is_completed(self) -> bool:
        """A coin's answer, if it could be yes."""
        if self.done or self.meeting.over():
            return self.done or self.group.ranks.coin.random() < 0.5
        self.polls += 1
        if self.polls > POLLS:
            alone = self.group.ranks.turns.step_aside(self.meeting.over, f"asks for {self.what}")
            self.since = self.since if alone else time.monotonic()
            if self.polls > 1000 and time.monotonic() - self.since > UNMOVED:
                raise Disagreement(
                    f"all others wait: {self.group.ranks.turns.what_waits()}; this one asks for {self.what}"
                )
        return False

    def is_success(self) -> bool:
        return self.done

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self.done:
            return True
        self.group.ranks.turns.wait(self.meeting.over, self.what)
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
        for role, tensor, content in self.in_flight:
            self.check_alive(tensor, role)
            if not bits(tensor).equal(content):
                raise Disagreement(f"{self.what}: its {role} was written between issue and wait")
        results = self.meeting.results[self.place]
        there, here = ([(each.numel(), each.dtype) for each in side] for side in (results, self.outputs))
        if there != here:
            raise Disagreement(f"{self.what}: rank {self.rank} gets (size, dtype) {there}, and has room for {here}")
        for output, result in zip(self.outputs, results, strict=True):
            output.data.copy_(result.view_as(output))
        self.in_flight, self.copies = [], []

    def check_alive(self, tensor: Tensor, role: str) -> None:
        needed = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
        if tensor.numel() and tensor.untyped_storage().nbytes() < needed:
            raise Disagreement(f"{self.what}: the memory of its {role} was given back between issue and wait")

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


def bits(tensor: Tensor) -> Tensor:
    """As integers."""
    data = tensor.detach()
    return (torch.view_as_real(data) if data.is_complex() else data).view(INTEGERS[data.dtype.to_real().itemsize])


def poison(tensor: Tensor) -> None:
    """Written to without autograd noticing, as a backend would."""
    integers = bits(tensor.data)
    integers.fill_(SIGNALLING.get(tensor.dtype.to_real(), POISON if integers.dtype is torch.uint8 else -1))


def overlap(one: Tensor, other: Tensor) -> bool:
    """Whether they lie in the same memory; tensors are taken for dense."""
    start, begin = one.data_ptr(), other.data_ptr()
    return start < begin + other.nbytes and begin < start + one.nbytes


class MemoryGroup(multi_threaded_pg.ProcessLocalGroup):
    """A process group of threads. See the module's docstring."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__(rank, world)
        self.ranks: ThreadRanks = HERE.ranks
        # Asked for by torch functions that look for the device that a group communicates on.
        options = FakeProcessGroup.Options()
        options.error_on_collective = True  # what is not below
        backend = FakeProcessGroup._create_internal(rank, world, options)
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, backend)
        self._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)

    def getBackendName(self) -> str:
        return "gloo"

    def _issue(
        self, kind: str, inputs: list[Tensor], outputs: list[Tensor], option: Any = None, ends: tuple[int, ...] = ()
    ) -> Pending:
        """`ends`: who sends and who receives, where not all ranks of the group take part."""
        group = sorted(self._world().pg_group_ranks[self])  # ranks of the world
        members = [group[end] for end in ends] or group
        line = (self, *ends, option) if ends else self
        issued = self.ranks.issued
        issued[line] += 1
        if group[self._rank] == 0:
            self.ranks.counts[kind] += 1
        key = (self.pg_name, *members, *([kind, option] if ends else []), issued[line])
        name = f"group {self.pg_name} of ranks {group}, no. {issued[line]}"
        meeting = self.ranks.meeting(key, name, members)
        place = members.index(group[self._rank])
        pending = Pending(self, meeting, place, kind, inputs, outputs)
        meeting.bring(place, kind, pending.copies, option)
        if meeting.over():
            self.ranks.over(key)
        return pending

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Pending:
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        return self._issue("all_reduce", tensors, tensors, operation(opts))

    def reduce(self, tensors: list[Tensor], opts: Any) -> Pending:
        root = opts.rootRank == self._rank
        return self._issue("reduce", tensors, tensors if root else [], (opts.rootRank, operation(opts)))

    def barrier(self, opts: Any = None) -> Pending:
        return self._issue("barrier", [], [])

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> Pending:
        return self._issue("p2p", tensors, [], f"tag {tag}", (self._rank, to))

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> Pending:
        return self._issue("p2p", [], tensors, f"tag {tag}", (source, self._rank))

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


def missing(name: str) -> Callable[..., Any]:
    def call(self: MemoryGroup, *args: Any, **keywords: Any) -> Any:
        raise NotImplementedError(f"collectives in memory have no {name}")

    return call


NOT_HERE = ("allgather_coalesced", "monitored_barrier", "recv_anysource", "_start_coalescing", "_end_coalescing")
for _name in (*NOT_HERE, "split_group", "merge_remote_group"):
    setattr(MemoryGroup, _name, missing(_name))


def operation(opts: Any) -> Any:
    op = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
    op = getattr(op, "op", op)
    if op not in REDUCE:
        raise NotImplementedError(f"collectives in memory do not reduce by {op}")
    return op


class ThreadRanks:
    """`world` threads, each a rank of one default group. One instance at a time; a context that ends the threads.

    Attributes:
        counts: collectives in which the first rank takes part, by kind.
        coin: what `is_completed` of a work that could be completed answers.
        issued: how many collectives each rank's group issued, in this `run`; sends to each rank apart.
        in_flight: collectives, of all ranks, that nobody has waited for.
    """

    def __init__(self, world: int) -> None:
        self.world = world
        self.counts: Counter[str] = Counter()
        self.coin = random.Random(0)
        self.issued: Counter[Any] = Counter()
        self.in_flight: list[Pending] = []
        self.turns = Turns(world)
        self._meetings: dict[Any, Meeting] = {}
        self._tasks: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(world)]
        self._answers: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
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
        """`fn(rank, *args)` on every rank; the results by rank. Raises what was raised first."""
        __tracebackhide__ = True
        self.turns = Turns(self.world)
        self._meetings.clear(), self.issued.clear()  # ranks that raised issued fewer than others
        for tasks in self._tasks:
            tasks.put((fn, args))
        results: list[Any] = [None] * self.world
        try:
            for _ in range(self.world):
                rank, results[rank] = self._answer(patience)
        except BaseException as error:
            self.turns.fail(error)
            raise
        finally:
            set_state(self.turns.state)
        first, self.turns.first = self.turns.first, None
        if first is not None:
            self.in_flight.clear()
            raise first
        if self._meetings:
            raise Disagreement(f"a collective is left unmatched: {[m.name for m in self._meetings.values()]}")
        return results

    def _answer(self, patience: float) -> tuple[int, Any]:
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

    def meeting(self, key: Any, name: str, members: list[int]) -> Meeting:
        """Where the ranks of a group meet for one collective."""
        return self._meetings.setdefault(key, Meeting(name, members))

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
            HERE.patches = []
            answer = (rank, None)
            try:
                turns.begin(rank)
                answer = (rank, fn(rank, *args))
            except BaseException as error:  # raised by `run`
                turns.fail(error)
            turns.end(rank)
            self._answers.put(answer)
            del task, fn, args, answer  # while this thread waits it keeps nothing alive
        HERE.rank = None
        dist.destroy_process_group()


def leave_in_flight() -> None:
    """The calling rank will never wait for what it has in flight, and need not."""
    if getattr(HERE, "ranks", None) is not None:  # else ranks are processes
        HERE.ranks.in_flight[:] = [each for each in HERE.ranks.in_flight if each.rank != HERE.rank]


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
        stack.enter_context(patches_by_rank())
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
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(
            storage, start, (storage.nbytes() - start,)
        )

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
        results = ranks.run(act, patience=max(timeout, PATIENCE))
        if ranks.in_flight:
            raise Disagreement(f"never waited for: {', '.join(sorted({work.what for work in ranks.in_flight}))}")
        return [pickle.loads(result) for result in results]
