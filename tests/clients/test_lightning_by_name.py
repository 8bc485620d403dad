"""`fullshard.integrations.lightning`, without adopting: a Trainer's and Fabric's strategy by the name "fullshard"."""

from __future__ import annotations

import os
import re
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from small import ACCUMULATE, BATCH, MAX_NORM, ROWS, STEPS, Net, close, joined, loader, net, reference, rows
from torch import nn

import fullshard
from ways import on_ranks

pytest.importorskip("lightning", reason="needs the extra lightning: pip install -e '.[lightning]'")


def task(by_hand: bool = False, meta: bool = False) -> Any:
    """A LightningModule that keeps its losses; `by_hand`: it shards its blocks itself; `meta`: it is made there."""
    import lightning

    class Task(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.losses: list[float] = []
            self.events: list[list[str]] = []
            self.net: Any = None if meta else net()

        def configure_model(self) -> None:
            if self.net is None:
                with torch.device("meta"):
                    self.net = net()
            if by_hand and not isinstance(self.net.blocks[0], fullshard.FSDPModule):
                for block in self.net.blocks:
                    fullshard.fully_shard(block, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: Any) -> torch.Tensor:
            loss = self.loss_of(batch)
            self.losses.append(joined(loss))
            return loss

        def loss_of(self, batch: Any) -> torch.Tensor:
            x, y = batch
            return nn.functional.cross_entropy(self.net(x), y)

        def validation_step(self, batch: Any, _: int) -> None:
            self.log("val_loss", self.loss_of(batch), sync_dist=True)

        test_step = validation_step

        def predict_step(self, batch: Any) -> torch.Tensor:
            return self.net(batch[0])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    return Task()


def trainer_of(folder: str, steps: int = STEPS, strategy: Any = None, **more: Any) -> Any:
    import lightning

    from fullshard.integrations.lightning import NAME  # which registers it

    return lightning.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=strategy or NAME,
        max_steps=steps,
        accumulate_grad_batches=ACCUMULATE,
        gradient_clip_val=MAX_NORM,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=folder,
        **{"enable_checkpointing": False, "use_distributed_sampler": False, **more},
    )


@pytest.mark.parametrize("by_hand", [False, True], ids=["found", "by hand"])
@on_ranks(by="run_clients")
def test_trains_accumulates_and_clips_as_one_process(tmp_path, by_hand):
    """The reductions are counted: one of each unit a step, none for micro-batches but the last."""
    from small import Block

    from fullshard.integrations.lightning import FullshardStrategy

    losses, plain = reference()
    # Units are ignored where the module has sharded its blocks itself.
    trainer, model = trainer_of(tmp_path, strategy=FullshardStrategy([Block]) if by_hand else None), task(by_hand)
    with fullshard.record_events() as events:
        trainer.fit(model, loader())
    assert isinstance(model, fullshard.FSDPModule) and isinstance(model.net.blocks[0], fullshard.FSDPModule)
    assert type(trainer.strategy).__name__ == "FullshardStrategy"
    micro = torch.tensor(model.losses).view(STEPS, ACCUMULATE)
    close(micro.mean(1).tolist(), losses)
    reduced = [event.unit for event in events if event.verb == "reduce"]
    assert reduced.count("net.blocks.0") == STEPS and len(reduced) == 4 * STEPS, reduced
    close(
        {n.removeprefix("net."): p.full_tensor() for n, p in model.named_parameters()}, dict(plain.named_parameters())
    )


@on_ranks(by="run_clients")
def test_other_layouts_and_precision(tmp_path):
    """Flat shards, clipped by a norm that torch's function does not know; bfloat16 by policy and by the Trainer."""
    from fullshard.integrations.lightning import FullshardStrategy
    from fullshard.wrap import ModuleWrapPolicy

    losses, _ = reference()
    from small import Block

    strategy = FullshardStrategy(ModuleWrapPolicy({Block}), layout="flat")
    model = task()
    trainer_of(tmp_path, strategy=strategy).fit(model, loader())
    close(torch.tensor(model.losses).view(STEPS, ACCUMULATE).mean(1).tolist(), losses)
    for precision, seen in (("bf16-true", torch.bfloat16), ("bf16-mixed", torch.float32)):
        model = task()
        dtypes: set[torch.dtype] = set()
        model.net.head.register_forward_hook(lambda m, i, o, to=dtypes: to.update({m.weight.dtype, o.dtype}))
        trainer_of(tmp_path, precision=precision).fit(model, loader())
        assert dtypes == {seen, torch.bfloat16} and all(p.dtype == seen for p in model.parameters()), dtypes
        torch.testing.assert_close(
            torch.tensor(model.losses).view(STEPS, ACCUMULATE).mean(1).tolist(), losses, rtol=0.05, atol=0.05
        )


def test_resumes_on_another_number_of_ranks(run_clients, tmp_path):
    """Two steps and a checkpoint on two ranks; the rest by two and by one, which has the whole batch."""
    run_clients(saved, str(tmp_path))
    run_clients(resumed, str(tmp_path))
    run_clients(resumed, str(tmp_path), world=1)


def saved(folder: str) -> None:
    """Twice to one path: what was there is replaced."""
    trainer = trainer_of(folder, STEPS // 2)
    trainer.fit(task(), loader())
    for _ in range(2):
        trainer.save_checkpoint(f"{folder}/half.ckpt")
    assert [path.name for path in Path(f"{folder}/half.ckpt").glob("step-*")] == [f"step-{STEPS // 2:09d}.2"]


def resumed(folder: str) -> None:
    """Resumed within an epoch, Lightning begins with its first batches."""
    model = task()
    trainer = trainer_of(folder)
    trainer.fit(model, loader(BATCH * 2 // dist.get_world_size()), ckpt_path=f"{folder}/half.ckpt")
    assert trainer.global_step == STEPS
    losses, _ = reference((0, 1, 0, 1))
    close(torch.tensor(model.losses).view(-1, ACCUMULATE).mean(1).tolist(), losses[2:])


@on_ranks(by="run_clients")
def test_validates_tests_predicts_and_keeps_the_best(tmp_path):
    """And files of its own checkpoint callback, of which the oldest are removed, are loaded for a test."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    best = ModelCheckpoint(f"{tmp_path}/best", monitor="val_loss", save_top_k=1, every_n_epochs=1)
    trainer = trainer_of(tmp_path, 2 * STEPS, enable_checkpointing=True, use_distributed_sampler=True, callbacks=[best])
    model = task()
    trainer.fit(model, loader(sampled=False), loader(sampled=False))
    first = trainer.validate(model, loader(sampled=False), verbose=False)[0]["val_loss"]
    x, y = (torch.stack(column) for column in zip(*rows(ROWS), strict=True))
    plain = net()
    plain.load_state_dict({n.removeprefix("net."): p.full_tensor() for n, p in model.named_parameters()})
    with torch.no_grad():
        close(first, nn.functional.cross_entropy(plain(x), y).item())
        close(torch.cat(trainer.predict(model, loader(sampled=False))), plain(x[dist.get_rank() :: 2]))
    assert len(list(Path(f"{tmp_path}/best").iterdir())) == 1
    other = task()
    again = trainer_of(tmp_path, use_distributed_sampler=True).test(
        other, loader(sampled=False), ckpt_path=best.best_model_path, verbose=False
    )[0]["val_loss"]
    close(again, best.best_model_score.item())


@on_ranks(by="run_clients")
def test_a_model_on_meta_gets_values_that_differ_between_ranks(tmp_path):
    model, initial = task(meta=True), list[torch.Tensor]()
    configure = model.configure_optimizers

    def configure_optimizers() -> Any:
        initial.append(model.net.blocks[0].up.weight.full_tensor())
        return configure()

    model.configure_optimizers = configure_optimizers
    trainer_of(tmp_path).fit(model, loader())
    (up,) = initial
    assert not any(p.is_meta for p in model.parameters()) and not torch.equal(up[: len(up) // 2], up[len(up) // 2 :])
    assert all(torch.isfinite(torch.tensor(model.losses)))


@on_ranks(by="run_clients")
def test_a_folder_that_fullshard_saved(tmp_path):
    """Fabric reads its model; a Trainer, which needs state of its own, names what is missing."""
    from lightning.fabric import Fabric

    from fullshard.integrations.lightning import NAME

    fabric = Fabric(accelerator="cpu", devices=2, strategy=NAME)
    fabric.launch()
    saved, loaded = (fabric.setup_module(net()) for _ in range(2))
    fullshard.save(tmp_path, saved.module)
    with torch.no_grad():
        loaded.module.head.weight.zero_()
    assert fabric.load(tmp_path, {"model": loaded}) == {}
    torch.testing.assert_close(loaded.module.head.weight.full_tensor(), saved.module.head.weight.full_tensor())
    with pytest.raises(fullshard.CheckpointError, match=r"no 'global_step'; nothing was loaded(.|\n)*fullshard.load"):
        trainer_of(tmp_path).fit(task(), loader(), ckpt_path=str(tmp_path))


@on_ranks(by="run_clients")
def test_fabric_by_name(tmp_path):
    from lightning.fabric import Fabric

    from fullshard.integrations.lightning import NAME  # which registers it

    losses, plain = reference()
    fabric = Fabric(accelerator="cpu", devices=2, strategy=NAME)
    fabric.launch()

    def made() -> tuple[Any, Any]:
        model = fabric.setup_module(net())
        return model, fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))

    def train(model: Any, optimizer: Any, first: int) -> list[float]:
        micro: list[float] = []
        for number, (x, y) in enumerate(fabric.setup_dataloaders(loader(sampled=False))):
            if number < first * ACCUMULATE:
                continue
            last = number % ACCUMULATE == ACCUMULATE - 1
            with fullshard.record_events() as events, fabric.no_backward_sync(model, enabled=not last):
                loss = nn.functional.cross_entropy(model(x), y)
                fabric.backward(loss / ACCUMULATE)
            assert bool([event for event in events if event.verb == "reduce"]) is last
            micro.append(joined(loss))
            if last:
                fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM)
                optimizer.step()
                optimizer.zero_grad()
                if number == 2 * ACCUMULATE - 1:
                    fabric.save(
                        f"{tmp_path}/half", {"model": model, "optimizer": optimizer, "step": 2, "more": [1, "a"]}
                    )
        return torch.tensor(micro).view(-1, ACCUMULATE).mean(1).tolist()

    close(train(*made(), 0), losses)
    model, optimizer = made()
    state = {"model": model, "optimizer": optimizer, "step": 0}
    assert fabric.load(f"{tmp_path}/half", state) == {"more": [1, "a"]} and state["step"] == 2
    close(train(model, optimizer, 2), losses[2:])
    close({n: p.full_tensor() for n, p in model.module.named_parameters()}, dict(plain.named_parameters()))
    full = mock.patch.object(torch, "save", side_effect=OSError("the disk is full"))
    with full, pytest.raises(fullshard.CheckpointError, match="the disk is full"):
        fabric.save(f"{tmp_path}/half", {"model": model, "optimizer": optimizer, "step": 4, "more": []})
    state = {"model": model, "optimizer": optimizer, "step": 0}
    assert fabric.load(f"{tmp_path}/half", state)["more"] == [1, "a"] and state["step"] == 2  # what was there is whole
    fabric.save(f"{tmp_path}/half", {"model": model, "optimizer": optimizer, "step": 3, "more": []})
    assert fabric.load(f"{tmp_path}/half", state) == {"more": []} and state["step"] == 3
    assert sorted(os.listdir(tmp_path)) == ["half"]
    close(train(model, optimizer, 2), losses[2:])
    with pytest.raises(fullshard.CheckpointError, match="lacking"):
        fabric.load(f"{tmp_path}/half", {"model": model, "lacking": 1})
    with pytest.raises(fullshard.ConfigError, match="0 models"):
        fabric.save(f"{tmp_path}/none", {"step": 1})
    close({n: p.full_tensor() for n, p in model.module.named_parameters()}, dict(plain.named_parameters()))


def test_arguments_that_there_are_not():
    from lightning.pytorch.strategies import StrategyRegistry

    from fullshard.integrations.lightning import NAME, FullshardFabricStrategy, FullshardStrategy

    for cls in (FullshardStrategy, FullshardFabricStrategy):
        for given, word in (
            ({"nonsense": 3}, "Unknown sharding argument 'nonsense'"),
            ({"prefetc": 3}, "did you mean prefetch="),
            ({"mesh": None}, "Unknown sharding argument 'mesh'"),
            ({"auto_wrap_policy": {Net}}, "did you mean units="),
        ):
            with pytest.raises(fullshard.ConfigError, match=word) as caught:
                cls(**given)
            assert isinstance(caught.value, TypeError)
        cls([Net], process_group_backend="gloo", timeout=timedelta(seconds=60), layout="flat", prefetch=2)
    assert type(StrategyRegistry.get(NAME)) is FullshardStrategy


PAGE = Path(__file__).parents[2] / "docs" / "clients" / "lightning.md"


@pytest.mark.parametrize("title", ["The Trainer", "Fabric"])
def test_the_programs_of_its_page_run(run_clients, tmp_path, title):
    run_clients(program, title, str(tmp_path))


@pytest.mark.parametrize("title", ["The Trainer", "Fabric"])
def test_the_programs_of_its_page_run_adopted(run_adopted, tmp_path, title):
    run_adopted(program, title, str(tmp_path))


def program(title: str, folder: str) -> None:
    """What stands in the page's section, with data of a few rows."""
    (section,) = [part for part in PAGE.read_text().split("\n## ") if part.startswith(title)]
    code = "\n".join(re.findall(r"```python\n(.*?)```", section, re.DOTALL))
    names: dict[str, Any] = {"__name__": "__main__", "Model": Net, "data": rows(8 * BATCH), "folder": folder}
    exec(compile(code, title, "exec"), names)
    shown = names["task"].net if title == "The Trainer" else names["model"].module
    units = [part for part in shown.modules() if isinstance(part, fullshard.FSDPModule)]
    assert len(units) >= 3 and (title == "The Trainer" or names["state"]["step"] == 2), units
