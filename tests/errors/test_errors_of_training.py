"""Errors of what is called around a training step, for either front-end; rank 0 of 2, on a group that moves no data."""

from __future__ import annotations

import copy

import pytest
import torch
from raising import raises, sharded, two_layers, warns, wrapped
from torch import nn

import fullshard
from fullshard import fully_shard

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
