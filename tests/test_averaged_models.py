"""`torch.optim.swa_utils` on sharded models: averages that are sharded themselves, their batch norms, and `SWALR`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

from image_models import images, network, units
from training import assert_same
from ways import differences, every_way, shard, whole_parameters, whole_state

STEPS = 4


def kinds() -> dict[str, dict[str, Any]]:
    return {
        "ema": {"multi_avg_fn": get_ema_multi_avg_fn(0.8)},
        "swa": {},
        "own": {"avg_fn": lambda average, now, count: average + (now - average) / (count + 2)},
    }


@every_way
def test_averages_of_a_sharded_model(run_ranks, way):
    assert_same(run_ranks(averaged, way, timeout=200))


def averaged(way: str) -> list[str]:
    """Copied after sharding; averaged each step; statistics of the data taken anew; evaluated; against DDP."""
    problems: list[str] = []
    for kind, given in kinds().items():
        inside = network()
        plain = DistributedDataParallel(inside, broadcast_buffers=False)
        model = shard(network(), way, units)
        averages = [AveragedModel(inside, **given), AveragedModel(model, **given)]
        optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (plain, model)]
        rates = [SWALR(optimizer, swa_lr=0.02, anneal_epochs=2) for optimizer in optimizers]
        mine = [images(step, dist.get_rank()) for step in range(STEPS)]
        for x, y in mine:
            for one, optimizer, average, rate in zip((plain, model), optimizers, averages, rates, strict=True):
                nn.functional.cross_entropy(one(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                average.update_parameters(inside if one is plain else one)
                rate.step()
        assert rates[0].get_last_lr() == rates[1].get_last_lr()
        want, found = averages
        assert int(found.n_averaged) == STEPS
        problems += differences(f"{kind} model", whole_parameters(model), dict(inside.named_parameters()))
        problems += differences(f"{kind} average", whole_parameters(found.module), dict(want.module.named_parameters()))
        for one in averages:
            update_bn([x for x, _ in mine], one)
        problems += differences(f"{kind} statistics", whole_state(found.module), dict(want.module.state_dict()))
        with torch.no_grad():
            for one in averages:
                one.eval()
            x, _ = images(9, dist.get_rank())
            problems += differences(f"{kind} evaluated", {"": found(x)}, {"": want(x)})
    return problems


@every_way
def test_an_average_is_loaded_again_and_goes_on(run_ranks, way):
    assert_same(run_ranks(loaded, way, timeout=200))


def loaded(way: str) -> list[str]:
    """By its own state dict, into an average of another model."""
    model, other = (shard(network(), way, units) for _ in range(2))
    average, again = (AveragedModel(one, **kinds()["ema"]) for one in (model, other))
    for step in range(2):
        x, y = images(step, dist.get_rank())
        nn.functional.cross_entropy(model(x), y).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        model.zero_grad()
        average.update_parameters(model)
    again.load_state_dict(average.state_dict())
    problems = [] if int(again.n_averaged) == 2 else [f"{again.n_averaged} averaged"]
    average.update_parameters(model)
    again.update_parameters(model)
    return problems + differences("loaded", whole_state(again.module), whole_state(average.module))
