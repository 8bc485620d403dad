"""`FullshardAccelerator`, without adopting: the numbers of one process on the joined batch, and of DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from small import ACCUMULATE, BATCH, ROWS, STEPS, close, net, reference, rows
from test_accelerate import goes_on, train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

import fullshard
from fullshard.integrations import hf
from fullshard.integrations.accelerate import FullshardAccelerator, take_over
from fullshard.runtime import runners_in
from ways import on_ranks

UNITS = {"units": ["Block"]}


def fresh() -> None:
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)


def accelerator_of(cls: type = FullshardAccelerator, **more: Any) -> Any:
    fresh()
    sharding = {} if cls is not FullshardAccelerator else {"sharding": {**UNITS, **more.pop("sharding", {})}}
    return cls(gradient_accumulation_steps=ACCUMULATE, **sharding, **more)


def prepared(accelerator: Any) -> tuple[Any, Any, Any]:
    """The optimizer is built before, on the whole parameters."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return accelerator.prepare(model, optimizer, DataLoader(rows(ROWS), batch_size=BATCH))


def is_ours(model: nn.Module) -> bool:
    return isinstance(model, fullshard.FSDPModule) and all(isinstance(m, fullshard.FSDPModule) for m in model.blocks)


@pytest.mark.parametrize("layout", ["rows", "flat"])
@on_ranks(by="run_clients")
def test_trains_as_one_process_and_as_ddp(layout):
    from accelerate import Accelerator

    losses, alone = reference()
    weights = alone.state_dict()
    plain = accelerator_of(Accelerator)
    model, optimizer, loader = prepared(plain)
    assert isinstance(model, nn.parallel.DistributedDataParallel)
    close(train(plain, model, optimizer, loader), losses)
    accelerator = accelerator_of(sharding={"layout": layout})
    model, optimizer, loader = prepared(accelerator)
    assert is_ours(model) and model is accelerator.unwrap_model(model)
    close(train(accelerator, model, optimizer, loader), losses)
    state = accelerator.get_state_dict(model)
    assert state.keys() == (weights.keys() if dist.get_rank() == 0 else set())
    close(dict(state), {name: value for name, value in weights.items() if name in state})


@on_ranks(by="run_clients")
def test_micro_batches_are_not_reduced():
    accelerator = accelerator_of()
    model, _, loader = prepared(accelerator)
    counts = []
    for x, y in list(loader)[:ACCUMULATE]:
        with fullshard.record_events() as events, accelerator.accumulate(model):
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            counts.append(sum(event.verb == "reduce" for event in events))
    assert counts == [0, 4], counts


@on_ranks(by="run_clients", world=4)
def test_micro_batches_are_not_reduced_between_replicas():
    """On a mesh (replicate, shard) they are reduced within a replica: accumulated gradients take a shard's memory."""
    plain = accelerator_of()
    other, optimizer, loader = prepared(plain)
    losses = train(plain, other, optimizer, loader)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    accelerator = accelerator_of(sharding={"mesh": mesh})
    model, optimizer, loader = prepared(accelerator)
    counts = []
    for x, y in list(loader)[:ACCUMULATE]:
        with fullshard.record_events() as events, accelerator.accumulate(model):
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            counts.append(tuple([sum(event.verb == verb for event in events) for verb in ("reduce", "all_reduce")]))
        shards = [bucket.layout.shard_numel * 4 for runner in runners_in(model) for bucket in runner.unit.buckets]
        assert fullshard.memory_use(model).gradients <= sum(shards)
    assert counts == [(4, 0)] * (ACCUMULATE - 1) + [(4, 4)], counts
    optimizer.zero_grad()
    close(train(accelerator, model, optimizer, loader), losses)
    for parameter, expected in zip(model.parameters(), other.parameters(), strict=True):
        close([parameter.full_tensor()], [expected.full_tensor()])


@on_ranks(by="run_clients")
def test_bf16():
    from accelerate import Accelerator

    found = []
    for cls in (Accelerator, FullshardAccelerator):
        accelerator = accelerator_of(cls, mixed_precision="bf16")
        model, optimizer, loader = prepared(accelerator)
        found.append(train(accelerator, model, optimizer, loader))
        assert {p.dtype for p in model.parameters()} == {torch.float32}
    torch.testing.assert_close(found[1], found[0], rtol=2e-2, atol=2e-2)


def test_saves_and_loads_on_other_numbers_of_ranks(run_clients, tmp_path):
    assert all(run_clients(saved, str(tmp_path)))
    assert all(run_clients(loaded, str(tmp_path)))
    assert all(run_clients(loaded, str(tmp_path), world=1))


def saved(folder: str) -> bool:
    """Half of the steps, a save, and one over it; a hook and a scheduler take part."""
    accelerator = accelerator_of()
    model, optimizer, loader = prepared(accelerator)
    told: list[Any] = []
    accelerator.register_save_state_pre_hook(lambda models, weights, where: told.append((models, list(weights), where)))
    accelerator.save_state(folder)
    train(accelerator, model, optimizer, loader, 0, STEPS // 2)
    accelerator.save_state(folder)
    assert told == [([model], [{}], folder)] * 2
    names = {path.name for path in Path(folder).iterdir()}
    assert "fullshard" in names and not {"model.safetensors", "optimizer.bin"} & names
    accelerator.save_model(model, f"{folder}/whole")
    dist.barrier()
    from safetensors.torch import load_file

    whole = load_file(f"{folder}/whole/model.safetensors")
    expected = {name: value.full_tensor() for name, value in model.state_dict().items()}
    close(whole, expected)
    accelerator.save_model(model, f"{folder}/pickled", safe_serialization=False)
    dist.barrier()
    close(torch.load(f"{folder}/pickled/pytorch_model.bin", weights_only=True), expected)
    return True


def loaded(folder: str) -> bool:
    losses, _ = reference()
    fresh()
    ranks = dist.get_world_size()
    accelerator = FullshardAccelerator(gradient_accumulation_steps=ACCUMULATE, sharding=UNITS)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    loader = DataLoader(rows(ROWS), batch_size=BATCH * 2 // ranks)
    return goes_on(accelerator, *accelerator.prepare(model, optimizer, loader), folder, losses)


@on_ranks(by="run_clients")
def test_an_optimizer_of_plain_tensors_is_saved_too(tmp_path):
    """Built from `optimizer_view`: its momentum is in the state that is loaded."""
    accelerator = accelerator_of()
    model, loader = accelerator.prepare(net(), DataLoader(rows(ROWS), batch_size=BATCH))
    optimizer = accelerator.prepare(torch.optim.AdamW(fullshard.optimizer_view(model), lr=1e-2))
    train(accelerator, model, optimizer, loader, 0, 2)
    accelerator.save_state(tmp_path)
    expected = train(accelerator, model, optimizer, loader, 2, STEPS)
    accelerator.load_state(tmp_path)
    close(train(accelerator, model, optimizer, loader, 2, STEPS), expected)


@on_ranks(by="run_clients")
def test_two_models(tmp_path):
    """Each with its optimizer, prepared apart; saved and loaded together."""
    accelerator = accelerator_of()
    pairs = []
    for scale in (1.0, 2.0):
        model = net()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(scale)
        pairs.append(accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)))
    x, y = (torch.stack(column) for column in zip(*rows(4), strict=True))

    def step() -> list[float]:
        losses = []
        for model, optimizer in pairs:
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    step()
    accelerator.save_state(tmp_path)
    expected = step()
    accelerator.load_state(tmp_path)
    close(step(), expected)
    first, second = (model for model, _ in pairs)
    weights = [*first.parameters(), *second.parameters()]
    before = [parameter.to_local().clone() for parameter in weights]
    for models, where in (([first], tmp_path), ([second, first], f"{tmp_path}/one")):
        accelerator._models = [first]
        accelerator.save_state(f"{tmp_path}/one")
        accelerator._models = models
        with pytest.raises(fullshard.CheckpointError, match="a different number of models"):
            accelerator.load_state(where)
    assert all(torch.equal(old, new.to_local()) for old, new in zip(before, weights, strict=True))
    assert (Path(tmp_path) / "fullshard_1").is_dir()
    accelerator._models = [first]
    accelerator.save_state(tmp_path)  # over a state of two
    assert not (Path(tmp_path) / "fullshard_1").exists()
    accelerator.load_state(tmp_path)


class Factored(torch.optim.Optimizer):
    """Means over rows and columns in plain tensors of its own, as Transformers' Adafactor keeps them."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state.setdefault("rows", torch.zeros(parameter.shape[:-1]))
            state["rows"].add_(parameter.grad.mean(-1))


@pytest.mark.parametrize("layout", ["rows", "owner"])
@on_ranks(by="run_clients")
def test_an_optimizer_that_cannot_step_shards_is_named(layout):
    accelerator = accelerator_of(sharding={"layout": layout})
    model = net()
    model, optimizer, loader = accelerator.prepare(
        model, Factored(model.parameters()), DataLoader(rows(ROWS), batch_size=BATCH)
    )
    with pytest.raises(fullshard.ConfigError, match=r"Factored cannot step(.|\n)*optimizer_view") as caught:
        train(accelerator, model, optimizer, loader)
    assert caught.value.parameter in dict(net().named_parameters())


@on_ranks(by="run_clients")
def test_bad_inputs_are_named():
    from accelerate import Accelerator

    accelerator = accelerator_of()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(2, 12)).sum().backward()
    optimizer.step()
    with pytest.raises(fullshard.ConfigError, match="An optimizer stepped before"):
        accelerator.prepare(model, optimizer)
    plain = net()
    with pytest.raises(fullshard.ConfigError, match="has no parameter of any prepared model"):
        accelerator.prepare(plain, torch.optim.SGD(net().parameters(), lr=0.1))
    assert not isinstance(plain, fullshard.FSDPModule)
    model = accelerator.prepare(plain)
    view = fullshard.optimizer_view(model)
    for parameters in (view, [*model.parameters()], [model.head.bias, nn.Parameter(torch.zeros(1))]):
        accelerator.prepare(torch.optim.SGD(parameters, lr=0.1))
    for sharding, word in (
        ({"nonsense": 1}, "Unknown sharding argument 'nonsense'"),
        ({"layouts": "flat"}, "did you mean layout="),
        ({"auto_wrap_policy": {nn.Linear}}, "did you mean units="),
        ("full", "sharding is invalid"),
    ):
        with pytest.raises(fullshard.ConfigError, match=word):
            FullshardAccelerator(sharding=sharding)
    with pytest.raises(fullshard.ConfigError, match="a set of module classes"):
        hf.shard(net(), units=1000)
    fresh()
    plain = Accelerator()
    plain.prepare(net())
    for one in (plain, accelerator):
        with pytest.raises(fullshard.ConfigError, match="take_over"):
            take_over(one)
    fresh()
    assert type(take_over(Accelerator())) is FullshardAccelerator
