"""`wrapper.module` gathers nothing, and does not know how it is split: refused where parts of weights would be used."""

from __future__ import annotations

import copy
import io
from collections.abc import Generator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)

import fullshard
from fullshard import FullyShardedDataParallel, ShardingStrategy
from fullshard import FullyShardedDataParallel as FSDP
from fullshard.errors import PhaseError, UsageError
from fullshard.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict, set_model_state_dict
from ways import (
    WIDE,
    Block,
    batch,
    but_last,
    error_of,
    every_wrapper,
    layers,
    loss_of,
    named,
    named_error,
    on_ranks,
    shard,
    wide_batch,
)

REFUSED = "called directly"


def fitting() -> nn.Linear:
    """Two ranks hold a row each, which `F.linear` takes for a whole weight of one output."""
    torch.manual_seed(0)
    return nn.Linear(4, 2, bias=False)


@on_ranks
def test_a_forward_that_passes_the_instance_by_is_refused() -> None:
    x = torch.randn(3, 4)
    for wrapped in (fitting(), checkpoint_wrapper(fitting())):
        model = FSDP(wrapped, use_orig_params=True)
        for _ in range(2):  # before the first forward and after it
            with pytest.raises(UsageError, match=REFUSED) as error:
                model.module(x)
            assert "weight" in str(error.value)
            model(x).sum().backward()
        copied = copy.deepcopy(model)
        copied(x)
        with pytest.raises(UsageError, match=REFUSED):
            copied.module(x)


class Later(nn.Module):
    """Calls `inner` again and again, after its forward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> Generator[torch.Tensor, float | None, str]:
        factor = yield x
        yield self.inner(x * (factor or 1.0))
        return "end"


class Interrupted(nn.Module):
    """Its forward returns a generator that can be thrown into, and closed."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.ended = nn.Linear(2, 2), False

    def forward(self, x: torch.Tensor) -> Generator[str, None, None]:
        word = "begun"
        try:
            while True:
                try:
                    yield word
                except KeyError:
                    word = "caught"
        finally:
            self.ended = True


def test_a_generator_gets_what_is_thrown_into_it(fake_world) -> None:
    fake_world(2)
    model = fullshard.fully_shard(Interrupted())
    results = model(torch.ones(1, 2))
    assert [next(results), results.throw(KeyError("x")), next(results)] == ["begun", "caught", "caught"]
    with pytest.raises(ValueError, match="thrown"):
        results.throw(ValueError("thrown"))
    results, model.ended = model(torch.ones(1, 2)), False
    next(results)
    results.close()
    assert model.ended


@on_ranks
def test_a_generator_that_runs_after_its_unit_was_freed_is_refused() -> None:
    x = torch.randn(3, 4)
    model = FSDP(Later(fitting()), use_orig_params=True)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            results = model(x)
            assert next(results) is x  # nothing is computed with parameters
            with pytest.raises(PhaseError, match=r"inner\.weight"):
                next(results)
    for inside in (FSDP(Later(FSDP(fitting(), use_orig_params=True))), Later(fitting())):
        results = inside(x)
        next(results)
        assert torch.equal(results.send(2.0), fitting()(2 * x))
        with pytest.raises(StopIteration, match="end"):
            next(results)
    with FSDP.summon_full_params(model), torch.no_grad():
        assert torch.equal(list(model(x))[1], fitting()(x))
    results = model(x)
    with FSDP.summon_full_params(model), torch.no_grad():
        assert torch.equal(list(results)[1], fitting()(x))


@on_ranks
def test_what_else_is_done_with_the_wrapped_module_works() -> None:
    plain = layers()
    x = batch(0)
    for nested in (False, True):
        model = shard(layers(), "originals", but_last)
        if nested:  # the instances around it have no parameters: those inside gather theirs
            model = FSDP(nn.Sequential(model), use_orig_params=True)
            model(x)
            assert torch.allclose(model.module(x), plain(x))
        loss_of(model, x).backward()
        assert len(model.module.state_dict()) == len(list(model.module.named_parameters())) == 10
        model.module.eval()
        with FSDP.summon_full_params(model), torch.no_grad():
            assert torch.allclose(model.module(x), plain(x))
    model = FSDP(layers(), use_orig_params=True)
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, nn.Linear))
    loss_of(model, x).backward()
    model = FSDP(layers(), use_orig_params=True)
    with FSDP.summon_full_params(model):
        whole = copy.deepcopy(model.module)
        torch.save(whole, file := io.BytesIO())
    file.seek(0)
    for taken in (whole, torch.load(file, weights_only=False)):
        assert torch.allclose(taken(x), plain(x))
    unsplit = FSDP(layers(), use_orig_params=True, sharding_strategy=ShardingStrategy.NO_SHARD)
    assert torch.allclose(unsplit.module(x), plain(x))
    both = FSDP(checkpoint_wrapper(layers()), use_orig_params=True)
    loss_of(both, x).backward()


@every_wrapper
@on_ranks
def test_values_of_a_part_are_asked_of_the_instance(way: str) -> list[str]:
    """A module inside of it does not hand out its values."""
    model = shard(layers(), way, lambda _: [])
    optimizer = torch.optim.Adam(model.parameters())
    part, whole = model.module, StateDictOptions(full_state_dict=True)
    problems = []
    for call in (
        lambda: get_model_state_dict(part, options=whole),
        lambda: get_model_state_dict(part),
        lambda: set_model_state_dict(part, {}, options=whole),
        lambda: get_optimizer_state_dict(part, optimizer, options=whole),
    ):
        problems += named_error(error_of(call), "pass the FullyShardedDataParallel")
    got = {name: value.shape for name, value in get_model_state_dict(model, options=whole).items()}
    assert got == {name: value.shape for name, value in layers().state_dict().items()}
    return problems


# Calls while only the instance's own parameters are summoned, as generation does.


summon = FullyShardedDataParallel.summon_full_params


class Net(nn.Module):
    """Two instances' modules between layers of the root's own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, 3)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))

    def features(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return x

    @torch.no_grad()
    def generate(self, x: Tensor) -> Tensor:
        """Some calls, each on what the one before gave."""
        for _ in range(3):
            x = self.features(x)
        return self(x)


class Both:
    """A wrapped model and its reference, which see the same, and their optimizers."""

    def __init__(self, way: str) -> None:
        self.model: Any = shard(Net(), way, named("blocks.0", "blocks.1"))
        self.reference = Net()
        self.optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (self.model, self.reference)]

    def step(self, number: int) -> None:
        self.model(wide_batch(number, dist.get_rank())).square().mean().backward()
        self.reference(wide_batch(number)).square().mean().backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(self.model(wide_batch(9, 0)), self.reference(wide_batch(9, 0)))

    def generates(self, x: Tensor) -> None:
        """And, with gradients enabled, computes a graph that nobody goes back over."""
        torch.testing.assert_close(self.model.module.generate(x), self.reference.generate(x))
        torch.testing.assert_close(self.model.module(x), self.reference(x))


@every_wrapper
@pytest.mark.parametrize("before", [0, 2])
@on_ranks
def test_generation_between_steps(way: str, before: int) -> None:
    """Before the first forward and after steps; training goes on as if there had been none."""
    both = Both(way)
    for step in range(before):
        both.step(step)
    for step in range(before, before + 3):
        with summon(both.model, recurse=False, writeback=step == 1):
            for rank in range(2):
                both.generates(wide_batch(step, rank))
        both.step(step)


@every_wrapper
@on_ranks
def test_generation_while_all_is_summoned(way: str) -> None:
    """Without gradients, as Transformers' `Seq2SeqTrainer` evaluates: of the model and of the wrapped module.

    PyTorch's wrapper loses its whole parameters in the first such call.
    """
    both, x = Both(way), wide_batch(9, 0)
    for step in range(3):
        with summon(both.model, writeback=step == 1):
            for _ in range(1 + dist.get_rank()):  # nothing is gathered: ranks may call as often as they like
                both.generates(wide_batch(step, dist.get_rank()))
                torch.testing.assert_close(both.model(x), both.reference(x))
        both.step(step)
    with summon(both.model, writeback=False, rank0_only=True), torch.no_grad():
        if dist.get_rank() == 0:
            torch.testing.assert_close(both.model(x), both.reference(x))
        else:
            with pytest.raises(UsageError, match="whole parameters"):
                both.model(x)


@every_wrapper
@on_ranks
def test_backwards_through_what_is_summoned_are_refused_by_name(way: str) -> None:
    """And of what is around it; forwards are right, and the model trains on."""
    both = Both(way)
    model, reference, x = both.model, both.reference, wide_batch(0, dist.get_rank())
    block = model.module.blocks[0]
    for step in range(2):
        # What is summoned, whether with what is below it, and what is called.
        cases = [(model, True, model), (model, True, model.module), (model, True, block), (model, False, model)]
        for what, recurse, call in [*cases, (model, False, model.module), (block, True, block), (block, True, model)]:
            if call is model and what is block and not step:
                continue
            with summon(what, recurse=recurse):
                output = call(x)
                torch.testing.assert_close(output, (reference.blocks[0] if call is block else reference)(x))
                with pytest.raises(UsageError, match="summon_full_params"):
                    output.sum().backward()
        with summon(model, recurse=False):
            output = model.module(x).sum()
        with pytest.raises(RuntimeError if way == "originals" else UsageError, match=r"size|summon_full_params"):
            output.backward()
        model.zero_grad()
        both.step(step)
