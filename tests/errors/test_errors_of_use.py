"""Errors of what is done to parameters and graphs, and when; rank 0 of 2, on a group that moves no data."""

from __future__ import annotations

import contextlib
import copy
import gc

import pytest
import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward

import fullshard
from fullshard import fully_shard
from fullshard.comm import TorchComm
from fullshard.runtime.units import unit_of
from fullshard.shard.gradients import GradState
from raising import raises, sharded, two_layers, warns, wrapped

ONE = torch.ones(1, 4)


@pytest.fixture(autouse=True)
def _ranks(fake_world):
    fake_world(2)


# What is done to parameters, and when.


def test_two_parameters_of_one_memory():
    model = two_layers()
    model[1].weight = nn.Parameter(model[0].weight.data)
    with raises("L012"):
        fully_shard(model)


def test_a_parameter_of_another_shape_in_place_of_a_sharded_one():
    model = fully_shard(nn.Linear(4, 4))
    model.weight = nn.Parameter(torch.ones(4, 4))
    with raises("C096"):
        model(ONE)


def test_other_data_in_place_of_a_shard():
    model = fully_shard(nn.Linear(4, 4))
    with raises("C093"):
        model.weight.data = torch.ones(4, 4)


def test_a_parameter_that_was_added_later():
    model = sharded()
    model(ONE)
    model[0].scale = nn.Parameter(torch.ones(4))
    with raises("P031"):
        model(ONE)


def test_a_weight_that_is_changed_between_forward_and_backward():
    model = sharded()
    loss = model(ONE).sum()
    with torch.no_grad():
        model[0].weight.mul_(2)
    with raises("P001"):
        loss.backward()


class Writing(nn.Linear):
    """A layer that changes its own weight while it computes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.mul_(0.99)
        return super().forward(x)


def test_a_forward_that_writes_to_its_weight():
    model = fully_shard(Writing(4, 4))
    with raises("P057"):
        model(ONE)


def test_a_parameter_assigned_in_a_forward():
    model = sharded()

    def assign(module: nn.Module, *_: object) -> None:
        module.weight = nn.Parameter(torch.ones(4, 4))

    model[0].register_forward_pre_hook(assign)
    model[1].register_forward_pre_hook(assign)
    with raises("P058"):
        model(ONE)


def test_computing_with_a_weight_that_is_not_gathered():
    model = fully_shard(nn.Linear(4, 4))
    with raises("P027"):
        torch.nn.functional.linear(ONE, model.weight)


def test_a_matrix_product_of_a_flat_shard():
    model = fully_shard(nn.Linear(4, 4, bias=False), layout="flat")
    with raises("P026"):
        torch.nn.functional.linear(ONE, model.weight)


def test_pickling_a_flat_shard(tmp_path):
    model = fully_shard(nn.Linear(4, 4, bias=False), layout="flat")
    with raises("P025"):
        torch.save(model.weight, tmp_path / "weight.pt")


def test_calling_a_unit_under_vmap():
    model = fully_shard(nn.Linear(4, 4))
    with raises("P040"):
        torch.vmap(model)(torch.ones(2, 4))


def test_a_copy_in_the_middle_of_a_forward():
    model = sharded()
    model[0].register_forward_hook(lambda *_: copy.deepcopy(model))
    with raises("P034"):
        model(ONE)


def test_a_backward_that_names_what_did_not_run():
    model = sharded()
    with raises("P036"):
        ONE.requires_grad_().sum().backward(inputs=[model[0].weight])


def test_gradients_asked_of_autograd_itself():
    model = sharded()
    loss = model(ONE).sum()
    with raises("P038"):
        torch.autograd.grad(loss, [model[0].weight])


def test_a_forward_that_returns_a_view_of_its_weight_in_an_object():
    class Held:
        def __init__(self, weight: torch.Tensor) -> None:
            self.weight = weight

    class Shows(nn.Linear):
        def forward(self, x: torch.Tensor) -> Held:
            return Held(self.weight[0])

    model = nn.Sequential(fully_shard(Shows(4, 4)), nn.Identity())
    with raises("P039"):
        fully_shard(model)(ONE)


def test_a_sparse_gradient():
    model = fully_shard(nn.Embedding(4, 4, sparse=True))
    with raises("P052"):
        model(torch.tensor([1])).sum().backward()


def test_freeing_a_unit_twice_is_nothing():
    model = sharded()
    model.reshard()
    model.reshard()


def test_an_order_of_units_that_changes_is_told(monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_debug_level", lambda: torch.distributed.DebugLevel.DETAIL)
    model = two_layers()
    for layer in model:
        fully_shard(layer)

    class Turning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.turned = model, False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first, second = self.layers[::-1] if self.turned else self.layers
            return second(first(x))

    root = fully_shard(Turning())
    root(ONE).sum().backward()
    root.turned = True
    with warns("W010"):
        root(ONE)


def test_parking_while_gradients_wait():
    model = sharded()
    model.set_requires_gradient_sync(False)
    model(ONE).sum().backward()
    with raises("P049"):
        fullshard.park(model)


def test_counting_tokens_within_a_backward():
    model = sharded(reduction="tokens")
    fullshard.set_token_count(model, 8)
    out = model(ONE)
    out.register_hook(lambda _: fullshard.set_token_count(model, 8))
    with raises("P009"):
        out.sum().backward()


def test_a_shard_on_another_device():
    model = fully_shard(nn.Linear(4, 4))
    with raises("C094"):
        model.weight.data = model.weight.data.to("meta")


def test_a_hook_that_gives_something_else_than_a_gradient():
    model = fully_shard(nn.Linear(4, 4))
    model.weight.register_hook(lambda grad: torch.ones(4, 4))
    with raises("C178"):
        model(ONE).sum().backward()


def test_state_of_a_model_in_the_middle_of_a_step():
    model = wrapped()
    model.module[0].register_forward_hook(lambda *_: model.state_dict() and None)
    with raises("P017"):
        model(ONE)


# Graphs, copies and roots.


def test_a_copy_of_half_a_unit():
    first, second = two_layers()
    fully_shard([first, second])
    with raises("P035"):
        copy.deepcopy(first)


def test_a_copy_without_the_weight_that_it_shares():
    first, second = two_layers()
    second.weight = first.weight
    fully_shard(first)
    fully_shard(second)
    with raises("P047"):
        copy.deepcopy(first)


def test_an_optimizer_in_backward_from_before_sharding():
    model = nn.Linear(4, 4)
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    fully_shard(model)
    with raises("P033"):
        model(ONE).sum().backward()


KEPT: list[torch.Tensor] = []


class Keeps(nn.Linear):
    """Leaves a part of what it computes in a list."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        KEPT.append(torch.tanh(x @ self.weight).exp() @ self.weight)
        return super().forward(x)


def test_a_loss_of_what_was_kept_elsewhere():
    model = nn.Sequential(fully_shard(Keeps(4, 4)), nn.Linear(4, 4))
    fully_shard(model)(ONE)
    with raises("P037"):
        KEPT.pop().sum().backward()


def test_freeing_in_the_middle_of_a_forward():
    model = fully_shard(nn.Linear(4, 4))
    model.register_forward_pre_hook(lambda *_: model.reshard())
    with raises("P041"):
        model(ONE)


def test_a_unit_of_two_roots_that_run():
    shared = fully_shard(nn.Linear(4, 4))
    first = fully_shard(nn.Sequential(shared, nn.Linear(4, 4)))
    second = fully_shard(nn.Sequential(shared, nn.Linear(4, 4)))
    first(ONE)
    first[1].register_forward_hook(lambda *_: second(ONE) and None)
    with raises("P044"):
        first(ONE)


def test_a_backward_whose_root_is_gone():
    model = sharded()
    layer, loss = model[0], model(ONE).sum()
    del model
    gc.collect()
    with raises("P046"):
        loss.backward()
    assert layer


class Half(nn.Sequential):
    """Does not use the bias of its first layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self[1](x @ self[0].weight)


def test_a_parameter_without_a_gradient_in_a_view():
    model = fully_shard(Half(*two_layers()), layout="flat")
    optimizer = torch.optim.SGD(fullshard.optimizer_view(model), lr=0.1)
    with warns("W011"):
        model(torch.ones(1, 4)).sum().backward()
    optimizer.step()


def test_a_parameter_of_a_view_that_is_frozen_later():
    model = fully_shard(nn.Sequential(*two_layers()), layout="flat")
    optimizer = torch.optim.AdamW(fullshard.optimizer_view(model), lr=0.1)
    for trains in (True, False):
        model[0].bias.requires_grad_(trains)
        with contextlib.nullcontext() if trains else warns("W011"):
            model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


# What units ask of themselves: of a unit in another state they stop, and change nothing.


def test_freeing_what_is_not_gathered():
    unit = unit_of(fully_shard(nn.Linear(4, 4)))
    with raises("P056"):
        unit.free()


def test_waiting_for_a_gather_that_was_not_issued():
    unit = unit_of(fully_shard(nn.Linear(4, 4)))
    with raises("P055"):
        unit.finish_gather()


def test_gathering_what_is_gathered():
    model = fully_shard(nn.Linear(4, 4))
    model.unshard()
    with raises("P054"):
        unit_of(model).issue_gather(TorchComm())


def test_taking_a_parameter_out_of_a_unit_that_lacks_it():
    unit = unit_of(fully_shard(nn.Linear(4, 4)))
    with raises("P059"):
        unit.give_up(torch.ones(4))


def test_collecting_gradients_that_are_being_reduced():
    unit = unit_of(fully_shard(nn.Linear(4, 4)))
    unit.gradients[0].state = GradState.REDUCING
    with raises("P048"):
        unit.gradients[0].collect()
