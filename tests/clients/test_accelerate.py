"""Accelerate's FSDP plugin, both versions, on adopted CPU ranks: the numbers of one process on the joined batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from small import ACCUMULATE, BATCH, MAX_NORM, ROWS, STEPS, close, net, reference, rows
from torch import nn
from torch.utils.data import DataLoader

import fullshard
from ways import on_ranks


def accelerator_of(version: int, state: str = "SHARDED_STATE_DICT", **more: Any) -> Any:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=version,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        state_dict_type=state,
        **({"use_orig_params": True, **more} if version == 1 else more),
    )
    return Accelerator(fsdp_plugin=plugin, gradient_accumulation_steps=ACCUMULATE)


def prepared(accelerator: Any) -> tuple[Any, Any, Any]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return accelerator.prepare(model, optimizer, DataLoader(rows(ROWS), batch_size=BATCH))


def train(accelerator: Any, model: Any, optimizer: Any, loader: Any, first: int = 0, last: int = STEPS) -> list[float]:
    """Of steps `first` to `last`: losses over both ranks."""
    losses: list[float] = []
    micro: list[torch.Tensor] = []
    for number, (x, y) in enumerate(loader):
        if not first * ACCUMULATE <= number < last * ACCUMULATE:
            continue
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
        micro.append(accelerator.gather(loss.detach()).mean())
        if len(micro) == ACCUMULATE:
            losses.append(torch.stack(micro).mean().item())
            micro = []
    return losses


def is_ours(version: int, model: nn.Module) -> bool:
    if version == 1:
        return isinstance(model, fullshard.FullyShardedDataParallel) and len(model.fsdp_modules(model)) == 4
    return isinstance(model, fullshard.FSDPModule) and isinstance(model.blocks[0], fullshard.FSDPModule)


@pytest.mark.parametrize("version", [1, 2])
@on_ranks(by="run_adopted")
def test_trains_as_one_process(version):
    from accelerate.utils import DistributedType

    losses, plain = reference()
    weights = plain.state_dict()
    accelerator = accelerator_of(version)
    assert accelerator.distributed_type is DistributedType.FSDP and accelerator.device.type == "cpu"
    model, optimizer, loader = prepared(accelerator)
    assert is_ours(version, model)
    close(train(accelerator, model, optimizer, loader), losses)
    state = accelerator.get_state_dict(model)
    assert state.keys() == (weights.keys() if dist.get_rank() == 0 else set())
    close(dict(state), {name: value for name, value in weights.items() if name in state})
    inner = accelerator.unwrap_model(model)
    assert type(inner).__name__.endswith("Net") and not isinstance(inner, fullshard.FullyShardedDataParallel)


@pytest.mark.parametrize("state", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
@pytest.mark.parametrize("version", [1, 2])
@on_ranks(by="run_adopted")
def test_saves_and_loads(tmp_path, version, state):
    """Half of the steps, save_state; another model and optimizer, load_state, the other half."""
    from accelerate.state import AcceleratorState

    losses, _ = reference()
    accelerator = accelerator_of(version, state)
    model, optimizer, loader = prepared(accelerator)
    train(accelerator, model, optimizer, loader, 0, STEPS // 2)
    accelerator.save_state(tmp_path)
    assert any(Path(tmp_path).iterdir())
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerator_of(version, state, **({"sync_module_states": True} if version == 1 else {}))
    assert goes_on(accelerator, *prepared(accelerator), tmp_path, losses)


def goes_on(accelerator: Any, model: Any, optimizer: Any, loader: Any, folder: str, losses: list[float]) -> bool:
    """With weights of zero, what `save_state` wrote half-way, and the rest of the steps."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    accelerator.load_state(folder)
    close(train(accelerator, model, optimizer, loader, STEPS // 2, STEPS), losses[STEPS // 2 :])
    return True


@on_ranks(by="run_adopted")
def test_resumes_from_a_model_on_meta(tmp_path):
    """As TRL's fsdp2.yaml has it: only rank 0 has weights, and they are loaded before the model has run."""
    from accelerate.state import AcceleratorState

    losses, _ = reference()
    accelerator = accelerator_of(2, "FULL_STATE_DICT")
    model, optimizer, loader = prepared(accelerator)
    train(accelerator, model, optimizer, loader, 0, STEPS // 2)
    accelerator.save_state(tmp_path)
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerator_of(2, "FULL_STATE_DICT", cpu_ram_efficient_loading=True)
    model, optimizer, loader = prepared(accelerator)
    whole = accelerator.get_state_dict(model)
    close(dict(whole), {name: value for name, value in net().state_dict().items() if name in whole})
    accelerator.load_state(tmp_path)
    close(train(accelerator, model, optimizer, loader, STEPS // 2, STEPS), losses[STEPS // 2 :])
