"""Errors of what is called around a training step, for either front-end; rank 0 of 2, on a group that moves no data."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import nn

import fullshard
from fullshard import fully_shard
from fullshard.optim import outside
from raising import raises, sharded, two_layers, warns

ONE = torch.ones(1, 4)


@pytest.fixture(autouse=True)
def _ranks(fake_world):
    fake_world(2)


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


# Gradients: counts of tokens, sums, norms.


def test_counting_tokens_of_no_model():
    with raises("C032"):
        fullshard.set_token_count(8, 8)


def test_counting_tokens_where_gradients_are_averaged():
    with raises("C033"):
        fullshard.set_token_count(sharded(), 8)


def test_counting_tokens_of_a_model_without_units():
    with raises("C034"):
        fullshard.set_token_count(nn.Linear(4, 4), 8)


def test_a_count_that_is_a_fraction():
    with raises("C035"):
        fullshard.set_token_count(sharded(reduction="tokens"), 8.5)


def test_no_counts():
    with raises("C036"):
        fullshard.set_token_count(sharded(reduction="tokens"), [])


def test_counting_tokens_below_the_root():
    model = sharded(reduction="tokens")
    fullshard.set_token_count(model, 8)
    model(ONE)
    with raises("P008"):
        fullshard.set_token_count(model[0], 8)


def test_a_backward_without_a_count():
    model = sharded(reduction="tokens")
    with raises("P053"):
        model(ONE).sum().backward()


def test_counting_tokens_in_the_middle_of_a_step():
    model = sharded(reduction="tokens")
    fullshard.set_token_count(model, [8, 8])
    model.set_requires_gradient_sync(False)
    model(ONE).sum().backward()
    with raises("P007"):
        fullshard.set_token_count(model, [8, 8])


def test_checking_gradients_of_a_model_without_units():
    with raises("C037"):
        fullshard.set_check_nonfinite(nn.Linear(4, 4), True)


def test_asking_for_gradients_of_a_model_without_units():
    with raises("C161"):
        fullshard.nonfinite_gradients(nn.Linear(4, 4))


def test_a_norm_of_order_zero():
    with raises("C154"):
        fullshard.clip_grad_norm_(sharded().parameters(), 1.0, norm_type=0)


def test_gradients_that_are_not_finite():
    parameter = nn.Parameter(torch.ones(4))
    parameter.grad = torch.full((4,), torch.nan)
    with raises("N001"):
        fullshard.clip_grad_norm_([parameter], 1.0, error_if_nonfinite=True)


# Batches of unequal number.


def test_joining_a_model_without_units():
    with raises("C041"):
        fullshard.join(nn.Linear(4, 4), [ONE])


def test_joining_over_something_that_is_no_batches():
    with raises("C042"):
        fullshard.join(sharded(), 8)


def test_joining_within_a_join(run_ranks):
    torch.distributed.destroy_process_group()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    model = sharded()
    with raises("C043"):
        for _ in fullshard.join(model, [ONE]):
            for _ in fullshard.join(model, [ONE]):
                pass


# What stays gathered, and what is parked.


def test_keeping_no_module_gathered():
    with raises("C030"), fullshard.keep_gathered("model"):
        pass


def test_freeing_a_model_without_units():
    with raises("C031"):
        fullshard.free(nn.Linear(4, 4))


def test_freeing_inside_a_forward():
    model = sharded()
    model[0].register_forward_hook(lambda *_: fullshard.free(model))
    with raises("P006"):
        model(ONE)


def test_keeping_what_runs():
    model = sharded()

    def keep(*_: object) -> None:
        with fullshard.keep_gathered(model):
            pass

    model[0].register_forward_hook(keep)
    with raises("P005"):
        model(ONE)


def test_parking_a_model_without_units():
    with raises("C046"):
        fullshard.park(nn.Linear(4, 4))


def test_parking_something_else_than_an_optimizer():
    model = sharded()
    with raises("C047"):
        fullshard.park(model, model.parameters())


def test_parking_the_optimizer_of_another_model():
    with raises("C048"):
        fullshard.park(sharded(), sgd(two_layers()))


def test_resuming_without_the_optimizer():
    model = sharded()
    optimizer = sgd(model)
    fullshard.park(model, optimizer)
    with raises("C045"):
        fullshard.resume(model)


def test_parking_twice():
    model = sharded()
    fullshard.park(model)
    with raises("P010"):
        fullshard.park(model)


def test_parking_what_is_kept_gathered():
    model = sharded()
    with fullshard.keep_gathered(model), raises("P011"):
        fullshard.park(model)


def test_resuming_what_is_not_parked():
    with raises("P012"):
        fullshard.resume(sharded())


def test_running_a_parked_model():
    model = sharded()
    fullshard.park(model)
    with raises("P051"):
        model(ONE)


def test_a_backward_of_a_parked_model_names_the_unit():
    model = sharded()
    loss = model(torch.ones(1, 4, requires_grad=True)).sum()
    fullshard.park(model)
    with pytest.raises(fullshard.PhaseError, match="parked units 1\n") as caught:
        loss.backward()
    assert caught.value.code == "P051"


# Who owns what.


def test_asking_who_owns_in_no_model():
    with raises("C107"):
        fullshard.owner_of("model", nn.Linear(4, 4))


def test_asking_who_owns_in_a_model_without_units():
    model = two_layers()
    with raises("C108"):
        fullshard.owner_of(model, model[0])


def test_asking_who_owns_a_name():
    with raises("C109"):
        fullshard.owner_of(sharded(), "0.weight")


def test_asking_who_runs_a_module_outside_of_all_units():
    model = two_layers()
    fully_shard(model[0])
    with raises("C110"):
        fullshard.owner_of(model, model[1])


def test_asking_who_runs_a_module_of_another_model():
    with raises("C111"):
        fullshard.owner_of(sharded(), nn.Linear(4, 4))


def test_asking_who_owns_a_parameter_of_another_model():
    model, other = sharded(), sharded()
    with raises("C112"):
        fullshard.owner_of(model, other[0].weight)


def test_asking_who_owns_a_tensor_that_is_no_parameter():
    with raises("C113"):
        fullshard.owner_of(sharded(), torch.ones(4))


def test_asking_who_owns_what_is_ignored():
    model = two_layers()
    fully_shard(model, ignored_params={model[0].weight})
    with raises("C114"):
        fullshard.owner_of(model, model[0].weight)


def test_asking_who_owns_what_was_added_later():
    model = sharded()
    model.scale = nn.Parameter(torch.ones(4))
    with raises("C115"):
        fullshard.owner_of(model, model.scale)


# Optimizers.


def test_a_root_that_was_forgotten():
    model = nn.Sequential(fully_shard(nn.Linear(4, 4)), nn.Linear(4, 4))  # and never fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(ONE).sum().backward()
    with mock.patch.object(outside, "LOOKED", []), warns("W032"):  # said once in a process
        optimizer.step()


def test_clipping_of_a_model():
    with raises("C275"):
        fullshard.clip_grad_norm_(sharded(), 1.0)


def test_clipping_of_names_and_parameters():
    with raises("C275"):
        fullshard.clip_grad_norm_(sharded().named_parameters(), 1.0)


def test_a_view_for_the_optimizer_of_a_model_without_units():
    with raises("C162"):
        fullshard.optimizer_view(nn.Linear(4, 4))


def test_a_view_of_a_tensor_that_is_no_parameter():
    with raises("C163"):
        fullshard.optimizer_view(sharded(layout="flat"), [torch.ones(4)])


def test_two_views_of_one_parameter():
    model = sharded(layout="flat")
    view = fullshard.optimizer_view(model)
    with raises("C180"):
        fullshard.optimizer_view(model)
    assert view


def test_a_view_before_there_are_values():
    model = fully_shard(nn.Linear(4, 4, device="meta"), layout="flat")
    with raises("C179"):
        fullshard.optimizer_view(model)


def test_an_optimizer_that_was_built_while_a_unit_was_gathered():
    model = fully_shard(nn.Linear(4, 4))
    model.unshard()
    optimizer = sgd(model)
    model.reshard()
    model(ONE).sum().backward()
    with raises("C159"):
        optimizer.step()


def test_an_optimizer_that_looks_at_whole_tensors():
    model = fully_shard(nn.Linear(4, 4, bias=False), layout="flat")
    optimizer = torch.optim.Adafactor(fullshard.optimizer_view(model))
    model(ONE).sum().backward()
    with raises("C160"):
        optimizer.step()


def test_a_view_of_parameters_in_place_of_the_model():
    with raises("C277"):
        fullshard.optimizer_view(two_layers().parameters())
