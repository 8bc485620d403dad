"""Errors of what is called around a training step, for either front-end; rank 0 of 2, on a group that moves no data."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import fullshard
from fullshard import fully_shard, keep_gathered, optimizer_view, owner_of, set_token_count
from fullshard.optim import guard
from raising import NOT_CLIPPED, ONE, assert_raises, raises, run, sharded, step, two_layers, unit, warns, words_of


@pytest.fixture(autouse=True)
def _ranks(fake_world):
    fake_world(2)


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def counting() -> Any:
    """Two layers whose gradients are divided by tokens."""
    return sharded(reduction="tokens")


def keep(m: nn.Module) -> None:
    with keep_gathered(m):
        pass


CALLS = [
    # Gradients: counts of tokens, sums, norms.
    (lambda: set_token_count(8, 8), "ConfigError: set_token_count takes a module. ... a torch.nn.Module ... 8"),
    (
        sharded,
        lambda m: set_token_count(m, 8),
        "ConfigError: set_token_count is for models whose gradients are ... reduction=\"tokens\" ... 'mean'",
    ),
    (
        lambda: set_token_count(nn.Linear(4, 4), 8),
        "ConfigError: set_token_count takes a sharded model, and this Linear has ... call fully_shard(model)",
    ),
    (
        lambda: set_token_count(counting(), 8.5),
        "ConfigError: set_token_count(counts=) is invalid ... a sequence of them",
    ),
    (lambda: set_token_count(counting(), []), "ConfigError: set_token_count(counts=) is invalid ... each backward"),
    (
        counting,
        lambda m: set_token_count(m, 8),
        run,
        lambda m: set_token_count(m[0], 8),
        "PhaseError: set_token_count is for the root",
    ),
    (counting, step, 'UsageError: A backward with reduction="tokens" began before its tokens were'),
    (
        counting,
        lambda m: set_token_count(m, [8, 8]),
        lambda m: m.set_requires_gradient_sync(False),
        step,
        lambda m: set_token_count(m, [8, 8]),
        "UsageError: set_token_count was called in the middle of a step",
    ),
    (
        lambda: fullshard.set_check_nonfinite(nn.Linear(4, 4), True),
        "ConfigError: set_check_nonfinite takes a sharded model",
    ),
    (lambda: fullshard.nonfinite_gradients(nn.Linear(4, 4)), "ConfigError: Linear has no units: neither front-end was"),
    (lambda: fullshard.nonfinite_gradients("model"), "ConfigError: nonfinite_gradients takes a module ... 'model'"),
    *(
        (lambda given=given: fullshard.clip_grad_norm_(sharded().parameters(), *given), words)
        for given, words in NOT_CLIPPED
    ),
    (lambda: fullshard.clip_grad_norm_(sharded(), 1.0), "ArgumentTypeError: clip_grad_norm_ takes parameters"),
    (
        lambda: nn.Parameter(torch.ones(4)),
        lambda parameter: setattr(parameter, "grad", torch.full((4,), torch.nan)),
        lambda parameter: fullshard.clip_grad_norm_([parameter], 1.0, error_if_nonfinite=True),
        "NonfiniteError: the total norm of order 2.0 of the gradients is nan, not finite",
    ),
    # Batches of unequal number.
    (lambda: fullshard.join(nn.Linear(4, 4), [ONE]), "ConfigError: join takes a sharded model"),
    (lambda: fullshard.join(sharded(), 8), "ConfigError: join(batches=) is invalid ... as an iterable"),
    # What stays gathered, and what is parked.
    (lambda: keep_gathered("model").__enter__(), "ConfigError: keep_gathered takes a module."),
    (lambda: fullshard.free(nn.Linear(4, 4)), "ConfigError: free takes a sharded model, and this Linear has no"),
    (
        sharded,
        lambda m: m[0].register_forward_hook(lambda *_: keep(m)),
        run,
        "PhaseError: keep_gathered was entered while unit '(root)' runs",
    ),
    (
        sharded,
        lambda m: m[0].register_forward_hook(lambda *_: fullshard.free(m)),
        run,
        "PhaseError: free was called while a forward or backward through unit",
    ),
    (lambda: fullshard.park(nn.Linear(4, 4)), "ConfigError: park takes a sharded model, and this Linear has no"),
    (sharded, lambda m: fullshard.park(m, m.parameters()), "ConfigError: park takes a model and its optimizers, got"),
    (
        lambda: fullshard.park(sharded(), sgd(two_layers())),
        "ConfigError: This SGD has no parameters of the model that is being parked",
    ),
    (sharded, fullshard.park, fullshard.park, "PhaseError: park was called for a model that is already parked"),
    (lambda: fullshard.resume(sharded()), "PhaseError: resume was called for a model ... not parked"),
    (sharded, fullshard.park, run, "PhaseError: A model whose shards are parked in host memory was asked to"),
    # Who owns what.
    (lambda: owner_of("model", nn.Linear(4, 4)), "ConfigError: owner_of takes a module. ... 'model'"),
    (two_layers, lambda m: owner_of(m, m[0]), "ConfigError: Sequential has no units: neither front-end was applied"),
    (lambda: owner_of(sharded(), "0.weight"), "ConfigError: owner_of takes a module or a parameter"),
    (two_layers, lambda m: fully_shard(m[0]), lambda m: owner_of(m, m[1]), "ConfigError: No unit runs the module"),
    (
        lambda: owner_of(sharded(), nn.Linear(4, 4)),
        "ConfigError: This Linear is not a module of the model passed to owner_of",
    ),
    (
        lambda: (sharded(), sharded()),
        lambda both: owner_of(both[0], both[1][0].weight),
        "ConfigError: This parameter belongs to a unit of another model",
    ),
    (
        lambda: owner_of(sharded(), torch.ones(4)),
        "ConfigError: This tensor is not a parameter of the model passed to owner_of",
    ),
    (
        two_layers,
        lambda m: fully_shard(m, ignored_params={m[0].weight}),
        lambda m: owner_of(m, m[0].weight),
        "ConfigError: No unit owns this parameter: it is ignored",
    ),
    (
        sharded,
        lambda m: setattr(m, "scale", nn.Parameter(torch.ones(4))),
        lambda m: owner_of(m, m.scale),
        "ConfigError: No unit owns this parameter ... a parameter that",
    ),
    # Optimizers.
    (lambda: optimizer_view(nn.Linear(4, 4)), "ConfigError: optimizer_view needs a model that fully_shard was applied"),
    (
        lambda: optimizer_view(sharded(), "weights"),
        "ArgumentTypeError: optimizer_view(params=) is invalid ... 'weights'",
    ),
    (
        lambda: optimizer_view(sharded(layout="flat"), [torch.ones(4)]),
        "ConfigError: optimizer_view: a tensor in params is not",
    ),
    (
        lambda: optimizer_view(fully_shard(nn.Linear(4, 4, device="meta"), layout="flat")),
        "ConfigError: An optimizer view was requested while parameters are on",
    ),
    (lambda: optimizer_view(two_layers().parameters()), "ArgumentTypeError: optimizer_view takes the model"),
]


@pytest.mark.parametrize(("max_norm", "norm_type"), [(torch.tensor(0.5), 2), (torch.tensor(1), "inf"), (math.inf, "2")])
def test_numbers_that_clip_grad_norm_takes_as_pytorchs_does(max_norm, norm_type):
    found = []
    for clip in (fullshard.clip_grad_norm_, torch.nn.utils.clip_grad_norm_):
        parameter = nn.Parameter(torch.ones(4))
        parameter.grad = torch.arange(4.0)
        found.append((clip([parameter], max_norm, norm_type), parameter.grad))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("row", CALLS, ids=words_of)
def test_calls(row):
    assert_raises(row)


def test_joining_within_a_join():
    torch.distributed.destroy_process_group()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    model = sharded()
    with raises("ConfigError: join is used inside another join of the same model"):
        for _ in fullshard.join(model, [ONE]):
            for _ in fullshard.join(model, [ONE]):
                pass


def test_resuming_without_the_optimizer():
    model = sharded()
    optimizer = sgd(model)
    fullshard.park(model, optimizer)
    with raises("ConfigError: An optimizer that was parked with the model was not passed to resume"):
        fullshard.resume(model)


def test_parking_what_is_kept_gathered():
    model = sharded()
    with keep_gathered(model), raises("PhaseError: park was called inside ... inside keep_gathered"):
        fullshard.park(model)


def test_a_backward_of_a_parked_model_names_the_unit():
    model = sharded()
    loss = model(torch.ones(1, 4, requires_grad=True)).sum()
    fullshard.park(model)
    with raises("PhaseError: A model whose shards are parked in host memory was asked to compute ... parked units 1\n"):
        loss.backward()


def test_a_root_that_was_forgotten():
    model = nn.Sequential(unit(), nn.Linear(4, 4))  # and never fully_shard(model)
    optimizer = sgd(model)
    step(model)
    once = mock.patch.object(guard, "_warned", set())  # said once in a process
    with once, warns("UserWarning: An optimizer steps parameters that no"):
        optimizer.step()


def test_clipping_of_names_and_parameters():
    with raises("ArgumentTypeError: clip_grad_norm_ takes parameters"):
        fullshard.clip_grad_norm_(sharded().named_parameters(), 1.0)


def test_two_views_of_one_parameter():
    model = sharded(layout="flat")
    view = optimizer_view(model)
    with raises("ConfigError: A parameter already has an optimizer view"):
        optimizer_view(model)
    assert view


def test_an_optimizer_that_was_built_while_a_unit_was_gathered():
    model = unit()
    model.unshard()
    optimizer = sgd(model)
    model.reshard()
    step(model)
    with raises("ConfigError: This SGD was built while a unit was gathered"):
        optimizer.step()


def test_an_optimizer_that_looks_at_whole_tensors():
    model = fully_shard(nn.Linear(4, 4, bias=False), layout="flat")
    optimizer = torch.optim.Adafactor(optimizer_view(model))
    step(model)
    with raises("ConfigError: Adafactor needs whole tensors"):
        optimizer.step()
