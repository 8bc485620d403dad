"""Each method of a unit by what it does: events, bytes, and numbers against PyTorch's where it has the method."""

from __future__ import annotations

from collections import Counter

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn

import fullshard
from fullshard import fully_shard
from models import EXAMPLES
from training import Options, full_gradients, mesh_of, shard


class Chain(nn.Module):
    """Three layers, units "0", "1" and "2"."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        for index in range(3):
            self.add_module(str(index), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = torch.tanh(layer(x))
        return x


def chain(layout: str = "rows", **settings: object) -> Chain:
    model = Chain()
    for layer in model.children():
        fully_shard(layer, layout=layout, **settings)
    return fully_shard(model, layout=layout, **settings)


def step(model: nn.Module) -> None:
    model(torch.ones(2, 4)).sum().backward()


def verbs(model: nn.Module, *names: str, steps: int = 1) -> list[tuple[str, str]]:
    """The events of those names in a step, as (verb, unit), the model having taken two."""
    for _ in range(2):
        step(model)
        model.zero_grad()
    with fullshard.record_events() as events:
        for _ in range(steps):
            step(model)
    return [(event.verb, event.unit) for event in events if event.verb in names]


@pytest.mark.parametrize(
    ("recurse", "where", "kept"), [(True, "", "012"), (False, "0", "0"), (True, "1", "1"), (False, "", "")]
)
def test_set_reshard_after_forward(fake_world, recurse, where, kept):
    fake_world(4)
    model = chain()
    model.get_submodule(where).set_reshard_after_forward(False, recurse=recurse)
    gathers = Counter(unit for _, unit in verbs(model, "gather"))
    assert gathers == {unit: 1 if unit in kept else 2 for unit in "012"}
    model.set_reshard_after_forward(True)
    assert Counter(unit for _, unit in verbs(model, "gather")) == dict.fromkeys("012", 2)


def test_set_reshard_after_backward(fake_world):
    fake_world(4)
    model = chain()
    model.set_reshard_after_backward(False)
    model.set_reshard_after_forward(False)
    assert verbs(model, "gather", steps=2) == []  # nothing changes the shards, so nothing is gathered again
    model.set_reshard_after_backward(True)
    model.set_reshard_after_forward(True)
    step(model)
    assert fullshard.memory_use(model).gathered == 0


def test_setters_of_prefetch_decide_what_is_gathered_when(fake_world):
    fake_world(4)
    model = chain(prefetch=0)
    plain = verbs(model, "gather", "gathered", "free", "reduce")
    assert plain[:6] == [(v, u) for u in "01" for v in ("gather", "gathered", "free")]
    first, second, third = model.children()
    first.set_modules_to_forward_prefetch([second, third])
    third.set_modules_to_backward_prefetch([second])
    order = verbs(model, "gather", "free", "reduce")
    assert order[:4] == [("gather", "0"), ("gather", "1"), ("gather", "2"), ("free", "0")]
    backward = order[order.index(("free", "2")) + 1 :]
    assert backward[:3] == [("gather", "2"), ("gather", "1"), ("free", "2")]


def test_set_unshard_in_backward(fake_world):
    fake_world(4)
    vocabulary = nn.Embedding(8, 4)
    model = nn.Sequential(vocabulary, nn.Linear(4, 4))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    vocabulary.set_unshard_in_backward(False)
    for _ in range(2):
        model(torch.tensor([1, 2])).sum().backward()
    with fullshard.record_events() as events:
        model(torch.tensor([1, 2])).sum().backward()
    assert Counter(event.unit for event in events if event.verb == "gather") == {"0": 1, "1": 2}
    assert vocabulary.weight.grad is not None


class NeverSaysDone:
    """Communication that cannot tell whether it is complete, as a slow network's would."""

    def __init__(self, inner: object) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def reduce(self, axis, out, buffer, mean):
        pending = self.inner.reduce(axis, out, buffer, mean)

        class Pending:
            wait = staticmethod(pending.wait)
            is_completed = staticmethod(lambda: False)

        return Pending()


@pytest.mark.parametrize("most", [1, 2, 3])
def test_set_reduce_scatter_max_input_buffers(fake_world, most):
    fake_world(4)
    model = chain(comm=NeverSaysDone(fullshard.TorchComm()))
    model.set_reduce_scatter_max_input_buffers(most)
    flying, highest = 0, 0
    for verb, _ in verbs(model, "reduce", "reduced"):
        flying += 1 if verb == "reduce" else -1
        highest = max(highest, flying)
    assert (flying, highest) == (0, most)


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_reset_iter_state_frees_at_once(fake_world, phase):
    fake_world(4)
    model = chain()
    step(model)
    model.zero_grad()
    middle = model.get_submodule("1")
    register = middle.register_forward_pre_hook if phase == "forward" else middle.register_full_backward_hook
    handle = register(lambda *a: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        step(model)
    handle.remove()
    model.reset_iter_state()
    use = fullshard.memory_use(model)
    assert (use.gathered, use.reducing) == (0, 0)
    step(model)
    assert all(p.grad is not None for p in model.parameters())


# Numbers, against PyTorch's own.


def gradients_after(library, layout: str, mesh: str, use) -> dict[str, Tensor | None]:
    example = EXAMPLES["gpt"]
    model = shard(library, example.make(), example, Options(layout=layout, mesh=mesh))
    use(model, lambda index: example.loss(model, example.batch(index, dist.get_rank())).backward())
    return full_gradients(model)


def doubled_by_hook(model, backward) -> None:
    for block in model.blocks[:1]:  # of this unit alone
        block.set_all_reduce_hook(lambda reduced: reduced.mul_(2.0))
    backward(0)


def summed(model, backward, units=lambda model: (*model.blocks, model), factor=None) -> None:
    for unit in units(model):
        unit.set_force_sum_reduction_for_comms(True)
        if factor is not None:  # of sums, else PyTorch asks gloo for a reduction that it does not have
            unit.set_reduce_scatter_divide_factor(factor)
    backward(0)


def divided_by_three(model, backward) -> None:
    summed(model, backward, lambda model: model.blocks, 3.0)


def all_reduced_at_the_end(model, backward) -> None:
    model.set_requires_all_reduce(False)
    backward(0)
    backward(1)
    model.set_requires_all_reduce(True)
    backward(2)


def last_of_three(model, backward) -> None:
    for index in range(3):
        model.set_is_last_backward(index == 2)
        model.set_requires_gradient_sync(index == 2)
        model.set_reshard_after_backward(index == 2)
        backward(index)


def one_block_not_synchronised(model, backward) -> None:
    model.blocks[0].set_requires_gradient_sync(False)
    backward(0)
    model.blocks[0].set_requires_gradient_sync(True)
    backward(1)


def differences(cases: list[tuple], mesh: str) -> dict[str, tuple[float, float]]:
    """From PyTorch's gradients, and from those of a plain backward: the latter shows that the method did something."""
    found = {}
    for use, layout in cases:
        ours, theirs = (gradients_after(library, layout, mesh, use) for library in (fullshard, torch_fsdp))
        plain = gradients_after(fullshard, layout, mesh, lambda model, backward: backward(0))
        worst = [max(((t - o[n]).norm() / o[n].norm()).item() for n, t in ours.items()) for o in (theirs, plain)]
        found[use.__name__] = worst[0], worst[1]
    return found


TWO = [
    (doubled_by_hook, "rows"), (summed, "flat"), (divided_by_three, "rows"), (last_of_three, "flat"),
    (one_block_not_synchronised, "rows"),
]  # fmt: skip
FOUR = [(all_reduced_at_the_end, "rows"), (last_of_three, "flat")]


@pytest.mark.parametrize(("cases", "mesh"), [(TWO, "default"), (FOUR, "hybrid")], ids=["default", "hybrid"])
def test_numbers_are_pytorchs(run_ranks, cases, mesh):
    for found in run_ranks(differences, cases, mesh, world=4 if mesh == "hybrid" else 2):
        for use, (error, effect) in found.items():
            assert error < 2e-6, use
            assert effect > 1e-3 or use == "summed", use


def test_all_reduce_happens_when_asked_for(fake_world):
    fake_world(4)
    model = chain(mesh=mesh_of("hybrid"))
    for wanted, count in ((False, 0), (True, 3)):
        model.set_requires_all_reduce(wanted)
        with fullshard.record_events() as events:
            step(model)
        assert sum(event.verb == "all_reduce" for event in events) == count


def test_gradients_are_complete_after_a_backward_that_is_not_the_last(run_ranks):
    """Also of a backward that is not the last, `.grad` is whole when it returns."""
    run_ranks(complete_after_every_backward)


def complete_after_every_backward() -> None:
    after = []
    for says_so in (True, False):
        example = EXAMPLES["odd_mlp"]
        model = shard(fullshard, example.make(), example, Options())
        for index in range(3):
            if says_so:
                model.set_is_last_backward(index == 2)
            example.loss(model, example.batch(index, dist.get_rank())).backward()
            assert fullshard.memory_use(model).reducing == 0
            after.append(full_gradients(model))
    for got, want in zip(after[:3], after[3:], strict=True):
        assert all(got[name].equal(want[name]) for name in want)


class OneOfTwo(nn.Module):
    """Uses the first layer on even ranks, the second on odd ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[dist.get_rank() % 2](x)


def test_unused_on_one_rank_only(run_ranks):
    """Each parameter's gradient is the mean over ranks, one of which did not use it, on every rank."""
    run_ranks(unused_on_one_rank)


def unused_on_one_rank() -> None:
    model, whole = OneOfTwo(), OneOfTwo()
    fully_shard(model)
    model.set_reduce_scatter_unused_params(True)
    model(torch.full((2, 4), 1.0 + dist.get_rank())).square().sum().backward()
    for index, layer in enumerate(whole.layers):
        layer(torch.full((2, 4), 1.0 + index)).square().sum().backward()  # what the rank of that parity does
    for mine, theirs in zip(model.layers.parameters(), whole.layers.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad / dist.get_world_size())


@pytest.mark.parametrize("off", [False, 0, numpy.bool_(False)])
def test_switches_take_numpys_bools_and_0_and_1(fake_world, off):
    """A program decides by `step % 4 == 3`, NumPy or a flag of its command line."""
    fake_world(2)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for module in (*model, model):
        fully_shard(module)
    for value in (off, type(off)(1)):
        model.set_requires_gradient_sync(value)
        model.set_reshard_after_backward(value)
        model.set_reshard_after_forward(value)
        model(torch.ones(2, 4)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
