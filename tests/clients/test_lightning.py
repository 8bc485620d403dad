"""Lightning's FSDP strategies and Fabric, on adopted CPU ranks: the numbers of one process on the joined batch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from small import BATCH, STEPS, Block, Net, close, joined, loader, net, reference
from torch import nn

import fullshard
from ways import on_ranks

pytest.importorskip("lightning", reason="needs the extra lightning: pip install -e '.[lightning]'")


DATA = {"count": 2 * BATCH * STEPS}


def alone(order: Sequence[int] = range(STEPS)) -> list[float]:
    """Losses of both ranks' rows together, by steps that take these batches."""
    return reference(order, 2 * BATCH, float("inf"))[0]


def loss_of(model: Any, data: Any) -> torch.Tensor:
    x, y = data
    return nn.functional.cross_entropy(model(x), y)


def shard(model: nn.Module, mesh: Any) -> nn.Module:
    """What `ModelParallelStrategy` calls: the program's own use of `fully_shard`."""
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


def fabric_of(kind: str) -> Any:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import FSDPStrategy, ModelParallelStrategy

    if kind == "wrapper":
        strategy: Any = FSDPStrategy(auto_wrap_policy={Block}, state_dict_type="sharded")
    else:
        strategy = ModelParallelStrategy(shard, data_parallel_size=2, tensor_parallel_size=1)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    return fabric


every_kind = pytest.mark.parametrize("kind", ["wrapper", "functional"])


def made(fabric: Any) -> tuple[Any, Any]:
    model = fabric.setup(net())
    return model, fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))


@every_kind
@on_ranks(by="run_adopted")
def test_fabric(tmp_path, kind):
    fabric, losses = fabric_of(kind), alone()

    def train(model: Any, optimizer: Any, first: int) -> list[float]:
        found = []
        for step, batch in enumerate(fabric.setup_dataloaders(loader(sampled=False, **DATA))):
            if step < first:
                continue
            with fullshard.record_events() as recorded, fabric.no_backward_sync(model, enabled=False):
                loss = loss_of(model, batch)
                fabric.backward(loss)
            assert any("reduce" in event.verb for event in recorded)
            optimizer.step()
            optimizer.zero_grad()
            found.append(joined(loss))
            if step == 1:
                fabric.save(f"{tmp_path}/half", {"model": model, "optimizer": optimizer})
        return found

    close(train(*made(fabric), 0), losses)
    model, optimizer = made(fabric)
    fabric.load(f"{tmp_path}/half", {"model": model, "optimizer": optimizer})
    close(train(model, optimizer, 2), losses[2:])


@every_kind
@on_ranks(by="run_adopted")
def test_no_backward_sync_skips_communication(kind):
    fabric = fabric_of(kind)
    model, _ = made(fabric)
    for step, batch in enumerate(loader(**DATA)):
        with fullshard.record_events() as recorded, fabric.no_backward_sync(model, enabled=step % 2 == 0):
            fabric.backward(loss_of(model, batch))
        reduced = [event for event in recorded if "reduce" in event.verb]
        assert bool(reduced) is (step % 2 == 1), reduced


def task(lightning: Any, strategy: str) -> Any:
    """A LightningModule of `Net` that keeps its losses."""

    class Task(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.losses: list[float] = []
            self.net: Net = net()

        def configure_model(self) -> None:
            if strategy == "functional" and not isinstance(self.net, fullshard.FSDPModule):
                shard(self.net, self.device_mesh)

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            loss = loss_of(self.net, batch)
            self.losses.append(joined(loss))
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    return Task()


@every_kind
@on_ranks(by="run_adopted")
def test_trainer(tmp_path, kind):
    losses = alone()
    trainer, model = trained(kind, tmp_path, STEPS)
    close(model.losses, losses)
    sharded = trainer.model if kind == "wrapper" else model.net
    assert isinstance(sharded, (fullshard.FullyShardedDataParallel, fullshard.FSDPModule))
    trained(kind, tmp_path, STEPS // 2)[0].save_checkpoint(f"{tmp_path}/half.ckpt")
    assert Path(f"{tmp_path}/half.ckpt").exists()
    _, model = trained(kind, tmp_path, STEPS, f"{tmp_path}/half.ckpt")
    close(model.losses, alone([0, 1, 0, 1])[2:])  # resumed within an epoch, Lightning begins with its first batches


def trained(kind: str, folder: str, steps: int, checkpoint: str | None = None) -> tuple[Any, Any]:
    import lightning
    from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy

    strategies: dict[str, Any] = {
        "wrapper": lambda: FSDPStrategy(auto_wrap_policy={Block}, state_dict_type="sharded"),
        "functional": lambda: ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
    }
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategies[kind](),
        max_steps=steps,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    model = task(lightning, kind)
    trainer.fit(model, loader(**DATA), ckpt_path=checkpoint)
    return trainer, model
