"""Errors of what is called around a training step, for either front-end; rank 0 of 2, on a group that moves no data."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import fullshard
from fullshard import fully_shard, keep_gathered, optimizer_view, owner_of, set_token_count
from fullshard.optim import guard
from raising import ONE, assert_raises, raises, run, sharded, step, two_layers, unit, warns


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


CALLS = {
    # Gradients: counts of tokens, sums, norms.
    "C032": lambda: set_token_count(8, 8),
    "C033": (sharded, lambda m: set_token_count(m, 8), 'reduction="tokens"', "'mean'"),
    "C034": (lambda: set_token_count(nn.Linear(4, 4), 8), "no units"),
    "C035": lambda: set_token_count(counting(), 8.5),
    "C036": lambda: set_token_count(counting(), []),
    "P008": (counting, lambda m: set_token_count(m, 8), run, lambda m: set_token_count(m[0], 8)),
    "P053": (counting, step),
    "P007": (
        counting,
        lambda m: set_token_count(m, [8, 8]),
        lambda m: m.set_requires_gradient_sync(False),
        step,
        lambda m: set_token_count(m, [8, 8]),
    ),
    "C037": lambda: fullshard.set_check_nonfinite(nn.Linear(4, 4), True),
    "C161": lambda: fullshard.nonfinite_gradients(nn.Linear(4, 4)),
    "C154": lambda: fullshard.clip_grad_norm_(sharded().parameters(), 1.0, norm_type=0),
    "C275": lambda: fullshard.clip_grad_norm_(sharded(), 1.0),
    "N001": (
        lambda: nn.Parameter(torch.ones(4)),
        lambda parameter: setattr(parameter, "grad", torch.full((4,), torch.nan)),
        lambda parameter: fullshard.clip_grad_norm_([parameter], 1.0, error_if_nonfinite=True),
    ),
    # Batches of unequal number.
    "C041": lambda: fullshard.join(nn.Linear(4, 4), [ONE]),
    "C042": lambda: fullshard.join(sharded(), 8),
    # What stays gathered, and what is parked.
    "C030": lambda: keep_gathered("model").__enter__(),
    "C031": lambda: fullshard.free(nn.Linear(4, 4)),
    "P005": (sharded, lambda m: m[0].register_forward_hook(lambda *_: keep(m)), run),
    "P006": (sharded, lambda m: m[0].register_forward_hook(lambda *_: fullshard.free(m)), run),
    "C046": (lambda: fullshard.park(nn.Linear(4, 4)), "without units"),
    "C047": (sharded, lambda m: fullshard.park(m, m.parameters())),
    "C048": (lambda: fullshard.park(sharded(), sgd(two_layers())), "no parameter"),
    "P010": (sharded, fullshard.park, fullshard.park),
    "P012": (lambda: fullshard.resume(sharded()), "not parked"),
    "P051": (sharded, fullshard.park, run),
    # Who owns what.
    "C107": lambda: owner_of("model", nn.Linear(4, 4)),
    "C108": (two_layers, lambda m: owner_of(m, m[0])),
    "C109": lambda: owner_of(sharded(), "0.weight"),
    "C110": (two_layers, lambda m: fully_shard(m[0]), lambda m: owner_of(m, m[1])),
    "C111": lambda: owner_of(sharded(), nn.Linear(4, 4)),
    "C112": (lambda: (sharded(), sharded()), lambda both: owner_of(both[0], both[1][0].weight), "another model"),
    "C113": lambda: owner_of(sharded(), torch.ones(4)),
    "C114": (two_layers, lambda m: fully_shard(m, ignored_params={m[0].weight}), lambda m: owner_of(m, m[0].weight)),
    "C115": (sharded, lambda m: setattr(m, "scale", nn.Parameter(torch.ones(4))), lambda m: owner_of(m, m.scale)),
    # Optimizers.
    "C162": lambda: optimizer_view(nn.Linear(4, 4)),
    "C163": lambda: optimizer_view(sharded(layout="flat"), [torch.ones(4)]),
    "C179": lambda: optimizer_view(fully_shard(nn.Linear(4, 4, device="meta"), layout="flat")),
    "C277": lambda: optimizer_view(two_layers().parameters()),
}


@pytest.mark.parametrize("code", CALLS)
def test_calls(code):
    assert_raises(code, CALLS[code])


def test_joining_within_a_join():
    torch.distributed.destroy_process_group()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    model = sharded()
    with raises("C043"):
        for _ in fullshard.join(model, [ONE]):
            for _ in fullshard.join(model, [ONE]):
                pass


def test_resuming_without_the_optimizer():
    model = sharded()
    optimizer = sgd(model)
    fullshard.park(model, optimizer)
    with raises("C045"):
        fullshard.resume(model)


def test_parking_what_is_kept_gathered():
    model = sharded()
    with keep_gathered(model), raises("P011", words=["inside keep_gathered"]):
        fullshard.park(model)


def test_a_backward_of_a_parked_model_names_the_unit():
    model = sharded()
    loss = model(torch.ones(1, 4, requires_grad=True)).sum()
    fullshard.park(model)
    with pytest.raises(fullshard.PhaseError, match="parked units 1\n") as caught:
        loss.backward()
    assert caught.value.code == "P051"


def test_a_root_that_was_forgotten():
    model = nn.Sequential(unit(), nn.Linear(4, 4))  # and never fully_shard(model)
    optimizer = sgd(model)
    step(model)
    with mock.patch.object(guard, "_warned", set()), warns("W032"):  # said once in a process
        optimizer.step()


def test_clipping_of_names_and_parameters():
    with raises("C275"):
        fullshard.clip_grad_norm_(sharded().named_parameters(), 1.0)


def test_two_views_of_one_parameter():
    model = sharded(layout="flat")
    view = optimizer_view(model)
    with raises("C180"):
        optimizer_view(model)
    assert view


def test_an_optimizer_that_was_built_while_a_unit_was_gathered():
    model = unit()
    model.unshard()
    optimizer = sgd(model)
    model.reshard()
    step(model)
    with raises("C159"):
        optimizer.step()


def test_an_optimizer_that_looks_at_whole_tensors():
    model = fully_shard(nn.Linear(4, 4, bias=False), layout="flat")
    optimizer = torch.optim.Adafactor(optimizer_view(model))
    step(model)
    with raises("C160"):
        optimizer.step()
