"""Networks of convolutions and batch norms, sharded: against a whole copy on each rank; averages of both.

Batch norm takes the statistics of its rank's samples, so that ranks are the reference and one process is not.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

import fullshard
from training import assert_same
from ways import differences, inner, shard, some_ways, whole_parameters, whole_state

STEPS = 4
CHANNELS, CLASSES, SIZE = 6, 3, 8


class Residual(nn.Module):
    """Depthwise and pointwise convolutions, each with a batch norm, around which the input goes."""

    def __init__(self) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, groups=CHANNELS, bias=False)
        self.first, self.second = nn.BatchNorm2d(CHANNELS), nn.BatchNorm2d(CHANNELS)
        self.pointwise = nn.Conv2d(CHANNELS, CHANNELS, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.first(self.depthwise(x)))
        return torch.relu(x + self.second(self.pointwise(y)))


class Network(nn.Module):
    """Images [batch, 3, SIZE, SIZE] -> [batch, CLASSES]."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, CHANNELS, 3, stride=2, padding=1), nn.BatchNorm2d(CHANNELS), nn.ReLU())
        self.blocks = nn.Sequential(Residual(), Residual())
        self.head = nn.Linear(CHANNELS, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def network() -> Network:
    """The same on every rank; double precision."""
    torch.manual_seed(2)
    return Network().double()


def images(step: int, rank: int, samples: int = 4) -> tuple[Tensor, Tensor]:
    """A rank's images and their classes."""
    source = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(samples, 3, SIZE, SIZE, generator=source, dtype=torch.float64)
    return x, torch.randint(CLASSES, (samples,), generator=source)


def units(model: nn.Module) -> list[nn.Module]:
    """What is sharded apart, besides the whole."""
    return [model.stem, *model.blocks]  # type: ignore[union-attr,list-item,misc]


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, whole: bool) -> dict[str, Tensor]:
    """A step on this rank's batch; `whole`: of a model that every rank holds, whose gradients are averaged here."""
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    for parameter in model.parameters() if whole else ():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    optimizer.step()
    optimizer.zero_grad()
    return {"loss": loss.detach()}


@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels-last"])
@some_ways
def test_trains_as_a_whole_copy_on_each_rank(run_ranks, way, channels_last):
    assert_same(run_ranks(trained, way, torch.channels_last if channels_last else torch.contiguous_format))


def trained(way: str, form: torch.memory_format) -> list[str]:
    """Losses, weights, and this rank's own running statistics, in training and in evaluation; the memory format."""
    plain, model = network().to(memory_format=form), shard(network().to(memory_format=form), way, units)
    shown: list[bool] = []
    inner(inner(model).blocks[0]).depthwise.register_forward_hook(
        lambda conv, _, out: shown.append(all(t.is_contiguous(memory_format=form) for t in (conv.weight, out)))
    )
    ours, theirs = (torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (model, plain))
    problems: list[str] = []
    for step in range(STEPS):
        x, y = images(step, dist.get_rank())
        x = x.to(memory_format=form)
        problems += differences("step", step_of(model, ours, x, y, False), step_of(plain, theirs, x, y, True))
    problems += differences("trained", whole_parameters(model), dict(plain.named_parameters()))
    found = {name.replace("_fsdp_wrapped_module.", ""): buffer for name, buffer in model.named_buffers()}
    problems += differences("statistics", found, dict(plain.named_buffers()))
    problems += [] if all(shown) and len(shown) == STEPS else [f"the memory format was lost: {shown}"]
    model.eval(), plain.eval()
    with torch.no_grad():
        x, _ = images(9, dist.get_rank())
        return problems + differences("evaluated", {"": model(x)}, {"": plain(x)})


@some_ways
def test_averages_of_a_sharded_model(run_ranks, way):
    assert_same(run_ranks(averaged, way))


def kinds() -> dict[str, dict[str, Any]]:
    return {
        "ema": {"multi_avg_fn": get_ema_multi_avg_fn(0.8)},
        "swa": {},
        "own": {"avg_fn": lambda average, now, count: average + (now - average) / (count + 2)},
    }


def averaged(way: str) -> list[str]:
    """Copied after sharding; averaged each step; statistics of the data taken anew; evaluated; loaded and gone on."""
    problems: list[str] = []
    mine = [images(step, dist.get_rank()) for step in range(STEPS)]
    for kind, given in kinds().items():
        plain, model = network(), shard(network(), way, units)
        averages = [AveragedModel(one, **given) for one in (plain, model)]
        optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (plain, model)]
        rates = [SWALR(optimizer, swa_lr=0.02, anneal_epochs=2) for optimizer in optimizers]
        for x, y in mine:
            for one, optimizer, average, rate in zip((plain, model), optimizers, averages, rates, strict=True):
                step_of(one, optimizer, x, y, one is plain)
                average.update_parameters(one)
                rate.step()
        want, found = averages
        assert rates[0].get_last_lr() == rates[1].get_last_lr() and int(found.n_averaged) == STEPS
        problems += differences(f"{kind} model", whole_parameters(model), dict(plain.named_parameters()))
        problems += differences(f"{kind} average", whole_parameters(found.module), dict(want.module.named_parameters()))
        again = AveragedModel(shard(network(), way, units), **given)
        again.load_state_dict(found.state_dict())
        for average in (found, again):
            average.update_parameters(model)
        problems += differences(f"{kind} loaded", whole_state(again.module), whole_state(found.module))
        want.update_parameters(plain)
        for one in averages:
            update_bn([x for x, _ in mine], one)
            one.eval()
        problems += differences(f"{kind} statistics", whole_state(found.module), dict(want.module.state_dict()))
        with torch.no_grad():
            x, _ = images(9, dist.get_rank())
            problems += differences(f"{kind} evaluated", {"": found(x)}, {"": want(x)})
    return problems


@pytest.mark.parametrize("way", ["rows", "wrapper"])
def test_synchronised_batch_norms_are_sharded_and_evaluated(run_ranks, way):
    """In training PyTorch's SyncBatchNorm takes inputs on accelerators only; its parameters are as a batch norm's."""
    assert_same(run_ranks(synchronised, way))


def synchronised(way: str) -> list[str]:
    plain, model = (nn.SyncBatchNorm.convert_sync_batchnorm(network()) for _ in range(2))
    model = shard(model, way, units)
    for one in (plain.eval(), model.eval()):
        step_of(one, torch.optim.SGD(one.parameters(), lr=0.1), *images(0, dist.get_rank()), one is plain)
    return differences("evaluated", whole_state(model), plain.state_dict())


def test_batch_norms_stay_in_float32_in_mixed_precision(fake_world):
    """The wrapper gives batch norms instances of their own, as PyTorch's does."""
    fake_world(2)
    with pytest.warns(UserWarning, match="BatchNorm"):
        model: Any = fullshard.FullyShardedDataParallel(
            network().float(),
            device_id=torch.device("cpu"),
            mixed_precision=fullshard.MixedPrecision(param_dtype=torch.bfloat16),
            auto_wrap_policy=fullshard.wrap.ModuleWrapPolicy({Residual}),
        )
    dtypes: list[torch.dtype] = []
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.register_forward_hook(lambda norm, i, o: dtypes.append(norm.weight.dtype))
    model(images(0, 0)[0].float())
    assert dtypes == [torch.float32] * 5
