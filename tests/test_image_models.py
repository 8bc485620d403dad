"""Networks of convolutions and batch norms, sharded, against `DistributedDataParallel` on the same ranks.

Batch norm takes the statistics of its rank's samples, there as here, so that ranks are the reference and one process is
not. The memory format of weights and images is kept.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fullshard
from image_models import images, network, units
from training import assert_same
from ways import differences, every_way, inner, shard, whole_parameters, whole_state

STEPS = 3
formats = pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels-last"])


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, channels_last: bool) -> torch.Tensor:
    x, y = images(step, dist.get_rank())
    x = x.to(memory_format=torch.channels_last) if channels_last else x
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@formats
@every_way
def test_trains_as_ddp(run_ranks, way, channels_last):
    assert_same(run_ranks(trained, way, channels_last))


def trained(way: str, channels_last: bool) -> list[str]:
    """Losses, weights, and this rank's own running statistics, in training and in evaluation."""
    made = [network(), network()]
    if channels_last:
        made = [model.to(memory_format=torch.channels_last) for model in made]
    plain = DistributedDataParallel(made[0], broadcast_buffers=False)
    model: Any = shard(made[1], way, units)
    shown: list[bool] = []
    kernel = inner(inner(model).blocks[0]).pointwise
    inner(inner(model).blocks[0]).depthwise.register_forward_hook(
        lambda conv, _, output: shown.append(
            conv.weight.is_contiguous(memory_format=torch.channels_last)
            and output.is_contiguous(memory_format=torch.channels_last)
        )
    )
    ours, theirs = optimizer_of(model), optimizer_of(plain)
    problems: list[str] = []
    for step in range(STEPS):
        found = step_of(model, ours, step, channels_last)
        problems += differences(f"step {step}", {"loss": found}, {"loss": step_of(plain, theirs, step, channels_last)})
    problems += differences("trained", whole_parameters(model), dict(made[0].named_parameters()))
    problems += differences(
        "statistics", {clean(n): b for n, b in model.named_buffers()}, dict(made[0].named_buffers())
    )
    if channels_last and (not all(shown) or len(shown) != STEPS):
        problems.append(f"channels-last was lost: {shown}")
    model.eval(), made[0].eval()
    with torch.no_grad():
        x, _ = images(9, dist.get_rank())
        problems += differences("evaluated", {"": model(x)}, {"": made[0](x)})
    return problems + ([] if kernel is not None else ["no kernel"])


def clean(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "")


@pytest.mark.parametrize("way", ["rows", "flat", "wrapper", "originals"])
def test_synchronised_batch_norms_are_sharded_and_evaluated(run_ranks, way):
    """In training PyTorch's SyncBatchNorm takes inputs on accelerators only; its parameters are as a batch norm's."""
    assert_same(run_ranks(synchronised, way))


def synchronised(way: str) -> list[str]:
    plain = nn.SyncBatchNorm.convert_sync_batchnorm(network())
    model = shard(nn.SyncBatchNorm.convert_sync_batchnorm(network()), way, units)
    plain.eval(), model.eval()
    x, y = images(0, dist.get_rank())
    for one in (plain, model):
        nn.functional.cross_entropy(one(x), y).backward()
    for parameter in plain.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    for one in (plain, model):
        optimizer_of(one).step()
    return differences("evaluated", whole_state(model), plain.state_dict())


def test_batch_norms_stay_in_float32_in_mixed_precision(run_ranks):
    assert all(run_ranks(mixed))


def mixed() -> bool:
    """The wrapper gives batch norms instances of their own, as PyTorch's does."""
    policy = fullshard.MixedPrecision(param_dtype=torch.bfloat16)
    with pytest.warns(UserWarning, match="BatchNorm"):
        model: Any = fullshard.FullyShardedDataParallel(
            network().float(),
            device_id=torch.device("cpu"),
            mixed_precision=policy,
            auto_wrap_policy=fullshard.wrap.ModuleWrapPolicy({type(network().blocks[0])}),
        )
    dtypes: dict[str, torch.dtype] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.BatchNorm2d):
            module.register_forward_hook(lambda m, i, o, name=name: dtypes.update({name: m.weight.dtype}))
    x, y = images(0, dist.get_rank())
    nn.functional.cross_entropy(model(x.float()).float(), y).backward()
    assert len(dtypes) == 5 and set(dtypes.values()) == {torch.float32}, dtypes
    return True
