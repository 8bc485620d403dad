"""Optimizers that people install, on every way to shard: each cell of the table in docs/optimizers.md."""

from __future__ import annotations

import contextlib
import importlib
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fullshard

PAGE = Path(__file__).parent.parent / "docs" / "optimizers.md"
STEPS = 12
EXACT = 1e-4
"""Of how far parameters move in all: rounding, which some optimizers divide by small numbers."""


def of(name: str, **settings: Any) -> Callable[[Any], torch.optim.Optimizer]:
    package, kind = name.rsplit(".", 1)
    return lambda params: getattr(importlib.import_module(package), kind)(params, **{"lr": 0.02, **settings})


def matrices_apart(name: str, **settings: Any) -> Callable[[Any], torch.optim.Optimizer]:
    """With settings for groups of matrices, as its readme has it."""

    def make(params: list[torch.Tensor]) -> torch.optim.Optimizer:
        matrices = [p for p in params if p.ndim == 2]
        others = [p for p in params if p.ndim != 2]
        if not matrices:
            return of(name)([{"params": others, **settings}])
        return of(name)([{"params": others}, {"params": matrices, **settings}])

    return make


def training(name: str) -> Callable[[Any], torch.optim.Optimizer]:
    def make(params: Any) -> torch.optim.Optimizer:
        optimizer: Any = of(name)(params)
        optimizer.train()
        return optimizer

    return make


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "torch.optim.SGD": of("torch.optim.SGD", momentum=0.9, nesterov=True),
    "torch.optim.SGD, fused": of("torch.optim.SGD", momentum=0.9, fused=True),
    "torch.optim.AdamW": of("torch.optim.AdamW"),
    "torch.optim.AdamW, fused": of("torch.optim.AdamW", fused=True),
    "torch.optim.Adagrad, fused": of("torch.optim.Adagrad", fused=True),
    "torch.optim.Rprop": of("torch.optim.Rprop"),
    "torch.optim.Adafactor": of("torch.optim.Adafactor"),
    "transformers.Adafactor": of("transformers.optimization.Adafactor", lr=None),
    "lion_pytorch.Lion": of("lion_pytorch.Lion"),
    "schedulefree.AdamWScheduleFree": training("schedulefree.AdamWScheduleFree"),
    "schedulefree.SGDScheduleFree": training("schedulefree.SGDScheduleFree"),
    "bitsandbytes.AdamW8bit": of("bitsandbytes.optim.AdamW8bit"),
    "pytorch_optimizer.AdEMAMix": of("pytorch_optimizer.AdEMAMix"),
    "pytorch_optimizer.ADOPT": of("pytorch_optimizer.ADOPT"),
    "pytorch_optimizer.Adan": of("pytorch_optimizer.Adan"),
    "pytorch_optimizer.Adan, foreach=False": of("pytorch_optimizer.Adan", foreach=False),
    "pytorch_optimizer.Tiger": of("pytorch_optimizer.Tiger"),
    "pytorch_optimizer.StableAdamW": of("pytorch_optimizer.StableAdamW"),
    "pytorch_optimizer.Lamb": of("pytorch_optimizer.Lamb"),
    "pytorch_optimizer.LARS": of("pytorch_optimizer.LARS"),
    "came_pytorch.CAME": of("came_pytorch.CAME"),
    "pytorch_optimizer.SOAP": of("pytorch_optimizer.SOAP"),
    "pytorch_optimizer.Shampoo": of("pytorch_optimizer.Shampoo"),
    "pytorch_optimizer.ScalableShampoo": of(
        "pytorch_optimizer.ScalableShampoo", start_preconditioning_step=4, preconditioning_compute_steps=1
    ),
    "galore_torch.GaLoreAdamW": matrices_apart(
        "galore_torch.GaLoreAdamW", rank=4, update_proj_gap=4, scale=0.25, proj_type="std"
    ),
    "apollo_torch.APOLLOAdamW": matrices_apart(
        *("apollo_torch.APOLLOAdamW",),
        rank=4,
        proj="random",
        scale_type="channel",
        scale=1,
        update_proj_gap=4,
        proj_type="std",
    ),
    "prodigyopt.Prodigy": of("prodigyopt.Prodigy", lr=1.0),
    "dadaptation.DAdaptAdam": of("dadaptation.DAdaptAdam", lr=1.0),
    "torch.optim.Muon": lambda params: of("torch.optim.Muon")([p for p in params if p.ndim == 2] or params),
}
WAYS = ["rows", "flat", "view", "owners"]


def build() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(12, 25), nn.Tanh(), nn.Linear(25, 12), nn.LayerNorm(12)) for _ in range(2)]
    return nn.Sequential(*blocks, nn.Linear(12, 8))


def whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def on_owners(make: Callable[[Any], torch.optim.Optimizer], params: list[torch.Tensor]) -> torch.optim.Optimizer:
    """The same class with the same settings and groups, on owners."""
    stand_ins = [nn.Parameter(torch.zeros(p.shape)) for p in params]
    template = make(stand_ins)
    sharded = dict(zip(map(id, stand_ins), params, strict=True))
    groups = [{**group, "params": [sharded[id(p)] for p in group["params"]]} for group in template.param_groups]
    known = importlib.import_module("inspect").signature(type(template)).parameters
    settings = {key: value for key, value in template.defaults.items() if key in known}
    return fullshard.OwnerOptimizer(groups, type(template), **settings)


def outcome(name: str, way: str) -> str:
    """A cell: how a training differs from one process', or that it is refused by an error of ours, or a warning."""
    make, plain, model = OPTIMIZERS[name], build(), build()
    for part in (*model[:2], model):
        fullshard.fully_shard(part, layout="flat" if way == "flat" else "rows")
    params = fullshard.optimizer_view(model) if way == "view" else list(model.parameters())
    start = [p.detach().clone() for p in plain.parameters()]
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer = on_owners(make, params) if way == "owners" else make(params)
            reference = make(list(plain.parameters()))
            for step in range(STEPS):
                x = torch.randn(6, 12, generator=torch.Generator().manual_seed(step))
                for module, stepped in ((model, optimizer), (plain, reference)):
                    module(x).square().mean().backward()
                    torch.manual_seed(step)
                    stepped.step()
                    module.zero_grad()
                    stepped.zero_grad()
    except (fullshard.ConfigError, fullshard.PhaseError) as error:
        changed = any(not torch.equal(whole(p).detach(), was) for p, was in zip(model.parameters(), start, strict=True))
        kind = name.partition(",")[0].rpartition(".")[2]
        named = kind.removeprefix("GaLore").removeprefix("APOLLO") in str(error)  # whose classes are named AdamW
        return "refused" if named and not changed else f"refused, too late or without a name: {error}"
    except ValueError:  # torch's Muon, of vectors: "only supports 2D parameters"
        return "refused"
    moved = sum(float((p - s).norm() ** 2) for p, s in zip(plain.parameters(), start, strict=True)) ** 0.5
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    apart = sum(float((whole(p) - q).detach().norm() ** 2) for p, q in pairs) ** 0.5
    warned = any("cannot be determined" in str(one.message) for one in caught)
    if apart <= EXACT * moved:
        return "exact, with a warning" if warned else "exact"
    return f"differs by {apart / moved:.0e}" if "Muon" not in name or apart > 0.1 * moved else "to bfloat16's rounding"


def outcomes(name: str) -> list[str]:
    return [outcome(name, way) for way in WAYS]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.gloo("optimizers of other libraries")
def test_the_table_says_what_happens(run_ranks, name):
    found = run_ranks(outcomes, name, world=2)
    assert found[0] == found[1]
    row = "| " + " | ".join([f"`{name.split(', ')[0]}`" + name[len(name.split(", ")[0]) :], *found[0]]) + " |"
    assert row in PAGE.read_text(), row


def test_the_table_has_no_other_rows():
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert len(rows) == len(OPTIMIZERS)


DeepSpeedCPUAdam = type("DeepSpeedCPUAdam", (torch.optim.Adam,), {"__module__": "deepspeed.ops.adam.cpu_adam"})
"""In place of DeepSpeed's, whose kernel ends the process where it is given a tensor subclass."""


def refusals(way: str) -> list[str]:
    model = fullshard.fully_shard(build(), layout=way)
    params = list(model.parameters())
    optimizer, errors = DeepSpeedCPUAdam(params), []
    before = [whole(p).detach().clone() for p in params]
    model(torch.ones(2, 12)).sum().backward()
    for attempt in (optimizer.step, lambda: fullshard.step_in_backward(optimizer)):
        try:
            attempt()
        except fullshard.ConfigError as error:
            errors.append(str(error))
    assert all(torch.equal(whole(p), was) for p, was in zip(params, before, strict=True)), "nothing was stepped"
    viewed = DeepSpeedCPUAdam(fullshard.optimizer_view(model))
    model(torch.ones(2, 12)).sum().backward()
    viewed.step()
    return errors


@pytest.mark.parametrize("way", ["rows", "flat"])
def test_kernels_that_take_plain_tensors_are_refused(run_ranks, way):
    for errors in run_ranks(refusals, way, world=2):
        assert len(errors) == 2, errors
        assert all("DeepSpeedCPUAdam(optimizer_view(model), ...)" in error for error in errors), errors
