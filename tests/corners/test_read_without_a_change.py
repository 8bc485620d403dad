"""What only reads weights is no change of them: whole values between a forward and its backward, parametrizations."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from fullshard import FullyShardedDataParallel as FSDP
from fullshard import PhaseError, ShardingStrategy
from ways import (
    PER_PARAMETER,
    WRAPPERS,
    assert_equal,
    batch,
    but_last,
    example_of,
    layers,
    loss_of,
    mine,
    on_ranks,
    shard,
    sharded,
    whole_gradients,
    whole_parameters,
)

NO_SHARD = ShardingStrategy.NO_SHARD


def read(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.detach().norm()


def write(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


@on_ranks
def test_whole_values_are_read_between_a_forward_and_its_backward() -> None:
    """`writeback` is on by default; only a write is a change."""
    plain = layers()
    loss_of(plain, batch(0)).backward()
    wanted = {name: p.grad for name, p in plain.named_parameters()}
    for way in WRAPPERS:
        for settings in ({}, {"sharding_strategy": NO_SHARD}):
            for options in ({}, {"with_grads": True}, {"offload_to_cpu": True}, {"recurse": False}):
                model = shard(layers(), way, but_last, **settings)
                loss = loss_of(model, mine(0))
                with FSDP.summon_full_params(model, **options):
                    read(model)
                loss.backward()
                assert_equal(whole_gradients(model), wanted, f"{way} {settings} {options}")
            loss = loss_of(model, mine(0))
            with FSDP.summon_full_params(model):
                write(model)
            with pytest.raises(PhaseError, match="were changed between a forward and its backward"):
                loss.backward()


@on_ranks
def test_what_is_not_split_is_written_to_inside_summon_full_params() -> None:
    """One FlatParameter over a shard that is the whole: what is shown is its memory."""
    for way in WRAPPERS:
        for writeback in (True, False):
            model = shard(layers(), way, but_last, sharding_strategy=NO_SHARD)
            for _ in range(2):
                with FSDP.summon_full_params(model, writeback=writeback):
                    for parameter in model.parameters():
                        parameter.detach().add_(1.0) if parameter.dim() > 1 else parameter.data.zero_()
            for name, value in whole_parameters(model).items():
                expected = layers().get_parameter(name) + 2 if value.dim() > 1 else torch.zeros_like(value)
                assert torch.allclose(value, expected), f"{way} writeback={writeback} {name}"
            loss_of(model, mine(0)).backward()


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


class Inverted(Doubled):
    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight / 2


class Emptied(Doubled):
    """In place: a change."""

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight.zero_()


@contextlib.contextmanager
def doubled(layer: nn.Module, parametrization: nn.Module) -> Iterator[None]:
    parametrize.register_parametrization(layer, "weight", parametrization)
    try:
        yield
    finally:
        parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)


class Experts(nn.Module):
    """Weights of three dims, which its forward computes with doubled."""

    def __init__(self, parametrization: Callable[[], nn.Module] = Doubled) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.weight = nn.Parameter(torch.randn(3, 5, 5))
        self.outer = nn.Linear(5, 5)
        self.parametrization = parametrization

    def forward(self, x: Tensor) -> Tensor:
        with doubled(self.inner, self.parametrization()):
            x = torch.tanh(torch.einsum("ni,eio->no", x, self.inner.weight))
        return self.outer(x)


def two_experts(parametrization: Callable[[], nn.Module]) -> nn.Sequential:
    return nn.Sequential(Experts(parametrization), Experts(parametrization))


@on_ranks
def test_a_parametrization_in_a_forward_is_no_change() -> None:
    """PEFT's LoRA with `target_parameters` does this, around experts."""
    example = example_of(partial(two_experts, Doubled), "0", "1")
    plain = example.make(torch.float64)
    loss_of(plain, batch(0)).backward()
    for way in PER_PARAMETER:  # a FlatParameter's are not registered on their modules, in PyTorch either
        for keep in (False, True):
            model = sharded(example, way, keep=keep)
            for _ in range(2):
                loss_of(model, mine(0)).backward()
            wanted = {name: 2 * p.grad for name, p in plain.named_parameters()}
            assert_equal(whole_gradients(model), wanted, f"{way} keep={keep}")
            assert_equal(whole_parameters(model), dict(plain.named_parameters()), f"{way} keep={keep}")
        for parametrization in (Inverted, Emptied):
            model = sharded(example_of(partial(two_experts, parametrization), "0", "1"), way)
            with pytest.raises(PhaseError, match="was written to"):
                model(mine(0))
