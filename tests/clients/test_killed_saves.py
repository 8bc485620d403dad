"""A save that is killed while it writes: what was saved before is there, and is loaded."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small import STEPS, close, loader, net, reference
from test_accelerate import goes_on, train
from test_accelerate_sharded import accelerator_of, prepared
from test_hf_trainer import losses, sharded_trainer
from tiny import llama
from torch import nn

from fullshard.store import hashed
from ranks import RankFailure

WRITES = 3
"""Of the save that is killed, so many of a rank's writes are done."""


def die_writing() -> None:
    """From here on, at the next write but some."""
    write, count = hashed.Hashed.write, [0]

    def counted(self: Any, data: Any) -> int:
        count[0] += 1
        if count[0] > WRITES:
            os.kill(os.getpid(), signal.SIGKILL)
        return write(self, data)

    hashed.Hashed.write = counted  # type: ignore[method-assign]


def killed(run: Callable[..., Any], fn: Callable[[str], Any], folder: str) -> None:
    """`fn(folder)` on ranks that are killed in it; the next task has new ones."""
    with pytest.raises(RankFailure) as caught:
        run(fn, folder)
    assert f"died with exit code -{signal.SIGKILL.value}" in str(caught.value.__notes__)


def test_an_accelerators_state(run_clients, tmp_path):
    killed(run_clients, state_saved, str(tmp_path))
    assert all(run_clients(state_loaded, str(tmp_path)))


def state_saved(folder: str) -> None:
    """Half of the steps and a save; the other half, and another save into the same folder."""
    accelerator = accelerator_of()
    model, optimizer, data = prepared(accelerator)
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0))
    for half in (0, 1):
        train(accelerator, model, optimizer, data, half * STEPS // 2, (half + 1) * STEPS // 2)
        scheduler.step()
        if half:
            die_writing()
        accelerator.save_state(folder)


def state_loaded(folder: str) -> bool:
    """All of it is of the first save, the scheduler too."""
    accelerator = accelerator_of()
    model, optimizer, data = prepared(accelerator)
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0))
    done = goes_on(accelerator, model, optimizer, data, folder, reference()[0])
    return done and scheduler.state_dict()["last_epoch"] == 2  # one step a rank


def test_a_trainers_checkpoint(run_clients, tmp_path):
    """The unfinished one is passed over, with a warning."""
    whole = run_clients(uninterrupted, str(tmp_path / "whole"))[0]
    killed(run_clients, checkpointed, str(tmp_path / "killed"))
    assert (tmp_path / "killed" / f"checkpoint-{STEPS}").is_dir()
    for found in run_clients(resumed, str(tmp_path / "killed")):
        close(found, whole)


def uninterrupted(folder: str) -> list[float]:
    trainer = sharded_trainer(folder)
    trainer.train()
    return losses(trainer)


def checkpointed(folder: str) -> None:
    """Two saves, each into a folder of its own."""
    from transformers import TrainerCallback

    class Dies(TrainerCallback):
        def on_save(self, *_: Any, **__: Any) -> None:
            die_writing()

    trainer = sharded_trainer(folder, save_strategy="steps", save_steps=STEPS // 2)
    trainer.add_callback(Dies)
    trainer.train()


def resumed(folder: str) -> list[float]:
    model = llama()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()  # all of it comes from the checkpoint
    trainer = sharded_trainer(folder, model)
    with pytest.warns(UserWarning, match=rf"incomplete checkpoint(.|\n)*checkpoint-{STEPS}"):
        trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == STEPS
    return losses(trainer)


def test_a_checkpoint_of_fabrics(run_clients, tmp_path):
    pytest.importorskip("lightning", reason="needs the extra lightning: pip install -e '.[lightning]'")
    killed(run_clients, fabric_saved, str(tmp_path))
    assert all(run_clients(fabric_loaded, str(tmp_path)))


def fabricated() -> tuple[Any, Any, Any]:
    from lightning.fabric import Fabric

    from fullshard.integrations.lightning import NAME

    fabric = Fabric(accelerator="cpu", devices=2, strategy=NAME)
    fabric.launch()
    model = fabric.setup_module(net())
    return fabric, model, fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))


def stepped(fabric: Any, model: Any, optimizer: Any) -> float:
    x, y = next(iter(loader()))
    loss = nn.functional.cross_entropy(model(x), y)
    fabric.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def fabric_saved(folder: str) -> None:
    """Twice to one path."""
    fabric, model, optimizer = fabricated()
    for step in (1, 2):
        stepped(fabric, model, optimizer)
        if step == 2:
            die_writing()
        fabric.save(f"{folder}/one", {"model": model, "optimizer": optimizer, "step": step})


def fabric_loaded(folder: str) -> bool:
    """What was there after one step: the next ones are those of a run that was not killed."""
    fabric, model, optimizer = fabricated()
    expected = [stepped(fabric, model, optimizer) for _ in range(3)]
    fabric, model, optimizer = fabricated()
    state = {"model": model, "optimizer": optimizer, "step": 0}
    fabric.load(f"{folder}/one", state)
    close([stepped(fabric, model, optimizer) for _ in range(2)], expected[1:])
    return state["step"] == 1
