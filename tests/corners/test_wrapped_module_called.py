"""`wrapper.module` gathers nothing, and does not know how it is split: refused where parts of weights would be used."""

from __future__ import annotations

import copy
import io
from collections.abc import Generator

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)

from fullshard import FullyShardedDataParallel as FSDP
from fullshard import ShardingStrategy
from fullshard.errors import PhaseError, UsageError
from fullshard.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict, set_model_state_dict
from ways import batch, but_last, error_of, every_wrapper, layers, loss_of, named_error, on_ranks, shard

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
        problems += named_error(error_of(call), "give the FullyShardedDataParallel")
    got = {name: value.shape for name, value in get_model_state_dict(model, options=whole).items()}
    assert got == {name: value.shape for name, value in layers().state_dict().items()}
    return problems
