"""How often the host waits for the device in a steady step, and reads a value of its: never, but where it must."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard import fully_shard
from fullshard.agreement import exchange
from fullshard.errors import UsageError
from simulated import Device, Event, ReadTooEarly, Stream, by_nccl, simulated

WIDTH, BLOCKS, WARM_UP, STEPS = 4, 4, 5, 4


def sharded(mesh: Any = None, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS)))
    for block in model:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def backward(model: nn.Module, number: int = 0) -> None:
    data = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(number))
    model(data).square().sum().backward()


Step = Callable[[], object]
"""One step, without the optimizer's."""


def default() -> tuple[nn.Module, Step]:
    model = sharded()
    return model, lambda: backward(model)


def flat() -> tuple[nn.Module, Step]:
    model = sharded(layout="flat")
    return model, lambda: backward(model)


def wrapper() -> tuple[nn.Module, Step]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS)))
    made = fullshard.FullyShardedDataParallel(model, auto_wrap_policy={nn.Sequential}, use_orig_params=True)
    return made, lambda: backward(made)


def accumulation() -> tuple[nn.Module, Step]:
    """Of 64 micro-batches, of which the last is reduced."""
    model: Any = sharded()

    def step() -> None:
        for part in range(64):
            model.set_requires_gradient_sync(part == 63)
            backward(model, part)

    return model, step


def kept_units() -> tuple[nn.Module, Step]:
    """As pipeline stages do it: gathered once for all micro-batches."""
    model: Any = sharded(reshard_after_forward=False)
    model.set_reshard_after_backward(False)

    def step() -> None:
        for part in range(3):
            model.set_requires_gradient_sync(part == 2)
            backward(model, part)

    return model, step


def kept_for_tokens() -> tuple[nn.Module, Step]:
    """Generation of some tokens in every step, with parameters that stay gathered."""
    model = sharded()

    def step() -> None:
        with fullshard.keep_gathered(model), torch.no_grad():
            for number in range(6):
                model(torch.ones(1, WIDTH) * number)
        backward(model)

    return model, step


def undone() -> tuple[nn.Module, Step]:
    """Steps in the backward, with copies that undo them; each is undone."""
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    steps = fullshard.step_in_backward(optimizer, max_norm=1.0, clip="redo")

    def step() -> None:
        backward(model)
        steps.undo()

    return model, step


def evaluation() -> tuple[nn.Module, Step]:
    model = sharded()

    def step() -> None:
        backward(model)
        model.eval()
        with torch.no_grad():
            model(torch.ones(2, WIDTH)), model(torch.ones(2, WIDTH))
        model.train()

    return model, step


class Skips(nn.Module):
    """The second layer is used on the first rank alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always, self.sometimes = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.sometimes(self.always(x)) if dist.get_rank() == 0 else self.always(x)


def unused() -> tuple[nn.Module, Step]:
    model = fully_shard(Skips())
    return model, lambda: backward(model)


def unused_zeros() -> tuple[nn.Module, Step]:
    """Units of their own, one of which other ranks run."""
    model = Skips()
    for layer in (model.always, model.sometimes):
        fully_shard(layer, unused="zeros")
    made = fully_shard(model, unused="zeros")
    return made, lambda: backward(made)


def hybrid() -> tuple[nn.Module, Step]:
    model = sharded(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    return model, lambda: backward(model)


class Expert(nn.Sequential):
    """Belongs to two ranks of four: units of them lie between units of all ranks."""


def two_sizes() -> tuple[nn.Module, Step]:
    """Meshes of four ranks and of two, and units of each in turn: sums of both are on their way at once (G1)."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "edp"))
    model = nn.Sequential(*(kind(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for kind in (nn.Sequential, Expert) * 2))
    for block in model:
        fully_shard(block, mesh=mesh["edp"] if isinstance(block, Expert) else None)
    made = fully_shard(model)
    return made, lambda: backward(made)


def counted_tokens() -> tuple[nn.Module, Step]:
    model = sharded(reduction="tokens")

    def step() -> None:
        fullshard.set_token_count(model, 3)
        backward(model)

    return model, step


def joined() -> tuple[nn.Module, Step]:
    """Uneven numbers of batches: what tells of their end is read a batch after it was asked, on the host."""
    model = sharded()

    def step() -> None:
        for number in fullshard.join(model, range(1 + dist.get_rank())):
            backward(model, number)

    return model, step


ANSWER = "tolist of torch.int64 (4,) by use.py: _union"
INWARD, OUTWARD = "wait for inward by lanes.py: settle", "wait for outward by lanes.py: settle"

CASES: dict[str, tuple[int, Callable[[], tuple[nn.Module, Step]], bool, dict[str, int], dict[str, int]]] = {
    # ranks, what is trained, whether shards live on the host; waits in a step, and those of the last rank besides
    "default": (2, default, False, {}, {}),
    "flat": (2, flat, False, {}, {}),
    "wrapper": (2, wrapper, False, {}, {}),
    "accumulation": (2, accumulation, False, {}, {}),
    "kept units": (2, kept_units, False, {}, {}),
    "kept for tokens": (2, kept_for_tokens, False, {}, {}),
    "evaluation": (2, evaluation, False, {}, {}),
    "hybrid": (4, hybrid, False, {}, {}),
    "meshes of two sizes": (4, two_sizes, False, {}, {}),
    "tokens": (2, counted_tokens, False, {}, {}),
    "join": (2, joined, False, {}, {}),
    # Whether `.grad` is None is for the host to say, and for other ranks to know: the rank that had none asks, once a
    # backward, and the others do not wait.
    "unused": (2, unused, False, {}, {ANSWER: 1}),
    "unused zeros": (2, unused_zeros, False, {}, {ANSWER: 1}),
    # A step that is undone is one in which the copies are read; to record them nobody waits.
    "undone": (2, undone, False, {"wait for compute by undo.py: undo": BLOCKS}, {}),
    # Whoever writes a shard or reads a gradient comes after a pass, on the host: it waits once at the end of each, for
    # the last copy in, and at the end of a backward that reduces for the last copy out.
    "offload": (2, default, True, {INWARD: 2, OUTWARD: 1}, {}),
    "offload, wrapper": (2, wrapper, True, {INWARD: 2, OUTWARD: 1}, {}),
    "offload, evaluation": (2, evaluation, True, {INWARD: 4, OUTWARD: 1}, {}),
    "offload, accumulation": (2, accumulation, True, {INWARD: 128, OUTWARD: 1}, {}),
    "offload, kept units": (2, kept_units, True, {INWARD: 1, OUTWARD: 1}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_host_waits_nowhere_else(run_ranks: Callable, case: str) -> None:
    world, trained, offload, everywhere, on_the_last = CASES[case]
    every = {what: count * STEPS for what, count in everywhere.items()}
    last = {what: count * STEPS for what, count in on_the_last.items()}
    assert run_ranks(waits_of, trained, offload, world=world) == [*[every] * (world - 1), {**every, **last}]


def waits_of(trained: Callable[[], tuple[nn.Module, Step]], offload: bool) -> dict[str, int]:
    """How often the host waited in `STEPS` steady steps, by what and where."""
    with by_nccl(), simulated(offload) as device:
        model, step = trained()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(WARM_UP + STEPS):
            if number == WARM_UP:
                device.waits.clear()
            step()
            optimizer.step()
            optimizer.zero_grad()
        return dict(Counter(device.waits))


def weights_of(trained: Callable[[], tuple[nn.Module, Step]], offload: bool | None) -> list[torch.Tensor]:
    """Whole weights after some steps; `offload` None: without a device."""
    with contextlib.ExitStack() as stack:
        if offload is not None:
            stack.enter_context(by_nccl())
            stack.enter_context(simulated(offload))
        model, step = trained()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            step()
            optimizer.step()
            optimizer.zero_grad()
        return [(p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("case", [name for name in CASES if "wrapper" not in name])
def test_weights_are_those_of_a_cpu(run_ranks: Callable, case: str) -> None:
    """Poison that was read before it was overwritten would be seen here."""
    world, trained, offload, _, _ = CASES[case]
    for mine, expected in run_ranks(weights_of_both, trained, offload, world=world):
        for one, other in zip(mine, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


def weights_of_both(trained: Callable[[], tuple[nn.Module, Step]], offload: bool) -> Any:
    return weights_of(trained, offload), weights_of(trained, None)


@pytest.mark.parametrize("layout", ["rows", "flat"])
def test_a_captured_step_has_no_host_in_it(run_ranks: Callable, layout: str) -> None:
    """Neither waits, nor polls, nor copies for the host to read; ranks agree in the steps around it."""
    for waits, sent, same in run_ranks(captured, layout):
        assert waits == [] and sent == [1, 0, 0, 1] and same


def captured(layout: str) -> tuple[list[str], list[int], bool]:
    """The host's waits; how many sums it began in a step before, in two that are captured, and after; equal weights."""
    sent = []
    with by_nccl(), simulated() as device, mock.patch.object(exchange.LateSums, "send", counting_sums(sent)):
        model = sharded(layout=layout)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        counts = []
        for number in range(WARM_UP + 4):
            if number == WARM_UP:
                device.waits.clear()
            device.compute.capturing = WARM_UP < number < WARM_UP + 3
            before = len(sent)
            backward(model, number)
            optimizer.step()
            optimizer.zero_grad()
            counts.append(len(sent) - before)
        weights = [parameter.full_tensor() for parameter in model.parameters()]
        waits = list(device.waits)
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS)))
    plain.load_state_dict(sharded_values())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for number in range(WARM_UP + 4):
        backward(plain, number)
        optimizer.step()
        optimizer.zero_grad()
    same = all(torch.allclose(a, b) for a, b in zip(weights, plain.parameters(), strict=True))
    return waits, counts[WARM_UP:], same


def counting_sums(sent: list[int]) -> Callable[..., torch.Tensor]:
    send = exchange.LateSums.send

    def call(sums: exchange.LateSums, values: torch.Tensor, facts: Any) -> torch.Tensor:
        sent.append(values.numel())
        return send(sums, values, facts)

    return call


def sharded_values() -> dict[str, torch.Tensor]:
    """What `sharded` begins with."""
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS))
    return nn.Sequential(*blocks).state_dict()


def test_a_captured_step_uses_every_parameter(run_ranks: Callable) -> None:
    first, last = run_ranks(captured_with_an_unused_parameter)
    assert not first and "captured as a graph" in last and "sometimes.weight, sometimes.bias" in last


def captured_with_an_unused_parameter() -> str:
    with by_nccl(), simulated() as device:
        model, step = unused()
        step()
        model.zero_grad()
        device.compute.capturing = True
        try:
            step()
        except UsageError as error:
            return str(error)
        return ""


@pytest.mark.parametrize("case", ["default", "unused", "offload"])
def test_the_default_device_is_the_users_own(run_ranks: Callable, case: str) -> None:
    """`torch.set_default_device`: whatever the host keeps lies on the CPU. (On meta nothing has values.)"""
    world, trained, offload, *_ = CASES[case]
    assert all(run_ranks(elsewhere, trained, offload, world=world))


def elsewhere(trained: Callable[[], tuple[nn.Module, Step]], offload: bool) -> bool:
    with by_nccl(), simulated(offload):
        model, step = trained()

        def whole() -> None:
            with torch.device("meta"):
                fullshard.clip_grad_norm_(model.parameters(), 1.0)
                fullshard.nonfinite_gradients(model)

        real = torch.randn
        with mock.patch.object(torch, "randn", lambda *size, **given: real(*size, device="cpu", **given)):
            for _ in range(4):
                with torch.device("meta"):
                    step()
                whole()
        return all(bool(p.grad.to_local().isfinite().all()) for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("through", ["the parameter", ".data"])
def test_a_unit_that_its_forward_wrote_to_is_gathered_anew(run_ranks: Callable, through: str) -> None:
    """A root stays gathered after the forward that was refused; the next one is not, and computes with the shards."""
    for refused, (got, want) in run_ranks(written, through):
        assert refused and torch.equal(got, want)


class Writes(nn.Linear):
    writes = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.writes:
            with torch.no_grad():
                (self.weight.data if self.writes == ".data" else self.weight).mul_(0.5)
        return super().forward(x)


def written(through: str) -> tuple[bool, tuple[torch.Tensor, torch.Tensor]]:
    with by_nccl(), simulated():
        torch.manual_seed(0)
        plain = nn.Linear(WIDTH, WIDTH)
        model: Any = fully_shard(Writes(WIDTH, WIDTH))
        model.load_state_dict(plain.state_dict())
        model.writes = through
        with contextlib.suppress(fullshard.PhaseError):
            model(torch.ones(2, WIDTH))
            return False, (torch.empty(0), torch.empty(0))
        model.writes = ""
        return True, (model(torch.ones(2, WIDTH)).detach(), plain(torch.ones(2, WIDTH)).detach())


# What the simulated device sees, shown by what it is there to see.


def test_a_copy_is_read_too_early_where_its_event_is_not_waited_for(run_ranks: Callable) -> None:
    """G1: sums of the backwards before were read while their copies were on their way."""
    assert run_ranks(read_too_early) == ["tolist of torch.int64 (7,)"] * 2


def read_too_early() -> str:
    with by_nccl(), simulated(), mock.patch.object(Event, "synchronize", lambda event: None):
        model = sharded()
        with pytest.raises(ReadTooEarly) as raised:
            for number in range(4):
                backward(model, number)
        return str(raised.value)


def test_sums_that_are_read_a_backward_earlier_make_the_host_wait(run_ranks: Callable) -> None:
    with mock.patch.object(exchange, "_LATE", 1):
        for waits in run_ranks(waits_of, default, False):
            assert waits == {"wait for compute by exchange.py: due": STEPS}


def test_gradients_that_nobody_waited_for_are_poison(run_ranks: Callable) -> None:
    """With shards on the host: `settle` in vain."""
    assert run_ranks(poisoned) == [True] * 2


def poisoned() -> bool:
    with by_nccl(), simulated(offload=True), mock.patch.object(Stream, "synchronize", lambda stream: None):
        model = sharded()
        backward(model)
        return all(bool(p.grad.to_local().isnan().all()) for p in model.parameters() if p.grad.to_local().numel())


def test_an_event_that_is_polled_is_an_error() -> None:
    with pytest.raises(AssertionError, match="polled"):
        Device().compute.record_event().query()


# Addresses: what a graph of kernels holds on to.


def test_what_is_kept_and_delivered_has_one_address(run_ranks: Callable) -> None:
    """With `set_keep_unsharded_storage`; what users hold between steps is out of the allocator's hands."""
    for parameters, gradients, taken in run_ranks(addresses, True):
        assert len(set(parameters)) == 1 and len(set(gradients)) == 1
        assert len(set(taken)) == 1, taken


def test_a_steady_step_takes_memory_as_often_as_the_one_before(run_ranks: Callable) -> None:
    """Two gathers, their staging, a buffer and a slice of each unit; kept storage takes only the last four."""
    (_, _, default), (_, _, kept) = run_ranks(addresses, False)[0], run_ranks(addresses, True)[0]
    assert len(set(default)) == len(set(kept)) == 1, (default, kept)
    assert default[0] - kept[0] == 2 * BLOCKS


def addresses(keep: bool) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]], list[int]]:
    """Of gathered parameters and of gradients in every step, and how often a storage was given memory."""
    parameters: list[tuple[int, ...]] = []
    gradients: list[tuple[int, ...]] = []
    taken, resize = [0], torch.UntypedStorage.resize_

    def counting(storage: torch.UntypedStorage, nbytes: int) -> Any:
        taken[-1] += nbytes > storage.nbytes()
        return resize(storage, nbytes)

    with by_nccl(), simulated(), mock.patch.object(torch.UntypedStorage, "resize_", counting):
        model: Any = sharded()
        model.set_keep_unsharded_storage(keep)
        for block in model:
            block.register_forward_hook(lambda block, *_: seen.extend(p.data_ptr() for p in block.parameters()))
        for number in range(WARM_UP + STEPS):
            seen: list[int] = []
            backward(model, number)
            parameters.append(tuple(seen))
            gradients.append(tuple(parameter.grad.to_local().data_ptr() for parameter in model.parameters()))
            model.zero_grad(set_to_none=False)
            taken.append(0)
    return parameters[WARM_UP:], gradients[WARM_UP:], taken[WARM_UP:-1]
