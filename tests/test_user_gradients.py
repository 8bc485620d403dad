"""What users do with gradients: anomaly detection, penalties, parameters frozen late."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard import fully_shard
from fullshard.integrations.sharding import accumulating
from fullshard.state_dict import set_model_state_dict
from models import EXAMPLES
from training import Options, full, full_parameters, shard


def steps(model: nn.Module, example, after, count: int = 3) -> dict[str, Tensor]:
    for index in range(count):
        example.loss(model, example.batch(index, dist.get_rank())).backward()
        after()
    return full_parameters(model)


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name
    return True


def anomaly() -> bool:
    example = EXAMPLES["gpt"]
    model, checked = (shard(fullshard, example.make(), example, Options(layout="flat")) for _ in range(2))

    def go(m: nn.Module) -> dict[str, Tensor]:
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        return steps(m, example, lambda: (optimizer.step(), optimizer.zero_grad()))

    want = go(model)
    with torch.autograd.detect_anomaly(check_nan=True):
        got = go(checked)
        with torch.no_grad():
            next(iter(checked.parameters())).fill_(float("nan"))
        with pytest.raises(RuntimeError, match="nan"):
            example.loss(checked, example.batch(0, dist.get_rank())).backward()
    return same(got, want)


def without_gradients() -> bool:
    """A unit whose output nobody can differentiate leaves nothing gathered, and later steps are right."""
    torch.manual_seed(0)
    chooser, body = nn.Linear(4, 4), nn.Linear(4, 4)

    class Chooses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.chooser, self.body = chooser, body

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x * (1.0 + self.chooser(x).argmax()))

    model = Chooses()
    for unit in (model.chooser, model.body, model):
        fully_shard(unit)
    for _ in range(3):
        model.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        assert model.chooser.weight.grad is None
        assert model.body.weight.grad is not None
        use = fullshard.memory_use(model)
        assert (use.gathered, use.reducing) == (0, 0)
    return True


def test_moving_to_another_device_than_the_mesh_is_refused(fake_world):
    fake_world(2)
    model = fully_shard(nn.Linear(4, 4))
    model.to("meta")
    with pytest.raises(fullshard.FullshardError, match="meta"):
        model(torch.ones(1, 4))


# Parameters that are frozen and trained again, and inputs that need a gradient in some steps only.


def two_layers() -> nn.Sequential:
    """A unit of two layers, so that one of them can be frozen, and the root."""
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(2, 5), nn.GELU(), nn.Linear(5, 5))
    return nn.Sequential(inner, nn.Tanh(), nn.Linear(5, 1)).double()


def sharded_two_layers(layout: str) -> nn.Sequential:
    model = two_layers()
    fully_shard(model[0], layout=layout)
    return fully_shard(model, layout=layout)


def gradients_equal(model: nn.Module, x: Tensor, reference: nn.Module, same_x: Tensor) -> bool:
    """The gradients of both models' parameters and inputs, which were given the same batch on every rank."""
    for got, want in zip((*model.parameters(), x), (*reference.parameters(), same_x), strict=True):
        assert (got.grad is None) == (want.grad is None)
        if want.grad is not None:
            whole = got.grad.full_tensor() if hasattr(got.grad, "full_tensor") else got.grad
            torch.testing.assert_close(whole, want.grad, rtol=1e-12, atol=1e-14)
    return True


def second_backward() -> bool:
    """A gradient penalty beside another backward, over gloo; in all orders and with frozen layers: tests/property."""
    model, reference = sharded_two_layers("flat"), two_layers()
    for each in (model, reference):
        list(each[0].parameters())[2].requires_grad_(False)
    x = torch.randn(3, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    same_x = x.detach().clone().requires_grad_()
    for each, batch in ((model, x), (reference, same_x)):
        loss = each(batch).square().mean()
        (slope,) = torch.autograd.grad(loss, batch, create_graph=True)
        other = each(2 * batch).mean()
        for one in (other, loss + slope.square().sum()):
            one.backward()
    return gradients_equal(model, x, reference, same_x)


def frozen_while_seen() -> bool:
    for when in ("after an error", "after unshard"):
        model, x = sharded_two_layers("flat"), torch.ones(3, 2, dtype=torch.float64)
        if when == "after unshard":
            model[0].unshard()
        else:
            handle = model[0][0].register_forward_hook(
                lambda m, a, output: output.register_hook(lambda grad: {}[0]) and None
            )
            with pytest.raises(KeyError):
                model(x).sum().backward()
            handle.remove()
            model.zero_grad()
        model[0][2].weight.requires_grad_(False)
        for _ in range(2):
            model(x).sum().backward()
            trained = {name for name, p in model.named_parameters() if p.grad is not None}
            assert trained == {name for name, _ in model.named_parameters()} - {"0.2.weight"}, when
            model.zero_grad()
    return True


@pytest.mark.parametrize(
    "rule",
    [
        anomaly,
        without_gradients,
        pytest.param(second_backward, marks=pytest.mark.gloo("gloo sums: the mean is made by the engine")),
        frozen_while_seen,
    ],
)
def test_on_two_ranks(run_ranks, rule):
    assert all(run_ranks(rule))


def loaded_from_the_first_rank() -> float:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    layer = fully_shard(nn.Linear(4, 4), mesh=mesh)
    whole = {"weight": torch.ones(4, 4), "bias": torch.ones(4)} if dist.get_rank() == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(layer, whole, options=options)
    return float(full(layer.weight).sum())


def test_a_state_dict_of_the_first_rank_reaches_all_groups_of_a_mesh(run_ranks):
    """Of four ranks, two are in the shard group of which the first is not."""
    assert run_ranks(loaded_from_the_first_rank, world=4) == [16.0] * 4


def test_a_context_without_sync_leaves_the_one_around_it_alone(fake_world) -> None:
    """As when a client accumulates (`Accelerator.accumulate`) within a `no_sync` of the program's own."""
    fake_world(2)
    model = fully_shard(nn.Linear(4, 4))

    def reduces() -> tuple[bool, bool]:
        reduce = model._runner().settings.reduce
        return reduce.sync, reduce.all_reduce

    with accumulating(model):
        for enabled in (True, False):
            with accumulating(model, enabled):
                assert reduces() == (False, False)
            assert reduces() == (False, False)
    assert reduces() == (True, True)
