"""torchmetrics beside sharded models: metrics as attributes of a model that is sharded, and their sync over ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from small import Block, net, rows
from torch import nn

import fullshard
from ways import on_ranks

pytest.importorskip("torchmetrics", reason="needs torchmetrics, of the extra lightning: pip install -e '.[lightning]'")


class Scored(nn.Module):
    """A network that counts how right it is: metrics are modules without parameters or buffers."""

    def __init__(self) -> None:
        from torchmetrics import MetricCollection
        from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

        super().__init__()
        self.net = net()
        self.scores = MetricCollection([MulticlassAccuracy(5), MulticlassConfusionMatrix(5)])

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        found = self.net(x)
        self.scores.update(found, y)
        return nn.functional.cross_entropy(found, y)


@pytest.mark.parametrize("way", ["functional", "wrapper", "auto"])
@on_ranks(by="run_adopted")
def test_metrics_of_a_sharded_model_are_those_of_one_process(way):
    data = rows(24)
    x, y = (torch.stack(column) for column in zip(*data, strict=True))
    plain, model = Scored(), sharded(Scored(), way)
    mine = slice(dist.get_rank(), None, 2)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.5) for one in (plain, model)]
    inner = getattr(model, "module", model) if way == "wrapper" else model
    for one, inputs, targets in ((plain, x, y), (model, x[mine], y[mine])):
        for _ in range(2):
            one(inputs, targets).backward()
            optimizer = optimizers[one is model]
            optimizer.step()
            optimizer.zero_grad()
    # The plain model's metrics are this process's alone: the same data on both ranks would count twice.
    want = {name: metric._computed_without_ranks() for name, metric in alone(plain.scores).items()}
    found = inner.scores.compute()
    for name, value in want.items():
        torch.testing.assert_close(found[name], value)
    inner.scores.reset()
    with torch.no_grad():
        model.eval()
        model(x[mine], y[mine])
    assert int(inner.scores.compute()["MulticlassConfusionMatrix"].sum()) == len(data)


def alone(scores: Any) -> dict[str, Any]:
    """Metrics that are computed without other ranks."""
    for metric in scores.values():
        metric._to_sync = False
        metric._computed_without_ranks = metric.compute
    return dict(scores.items())


def sharded(model: Any, way: str) -> Any:
    if way == "wrapper":
        policy = fullshard.wrap.ModuleWrapPolicy({Block})
        return fullshard.FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device("cpu"))
    if way == "auto":
        return fullshard.fully_shard(model, auto_wrap_policy="auto")
    for block in model.net.blocks:
        fullshard.fully_shard(block)
    return fullshard.fully_shard(model)
