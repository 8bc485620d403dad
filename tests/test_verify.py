"""`fullshard.verify`: right programs are found right, whatever their way; planted faults are found and named."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fullshard
from fullshard import MixedPrecisionPolicy, fully_shard
from models import EXAMPLES, Example, blocks_of
from ways import WAYS, shard

WIDTH = 6


class Tied(nn.Module):
    """Two blocks with dropout between a tied embedding and head, a frozen gain, and a buffer that no state dict has."""

    def __init__(self, rate: float = 0.0, freeze: bool = True) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(rate)) for _ in range(2)
        )
        self.gain = nn.Parameter(torch.full((WIDTH,), 1.5), requires_grad=not freeze)
        self.register_buffer("shift", 0.1 + torch.arange(WIDTH) / 7, persistent=False)
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = x + block(x).to(x.dtype)
        return self.head((x * self.gain + self.shift).to(self.head.weight.dtype))


class Forgets(torch.autograd.Function):
    """A product whose backward forgets the weight."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor) -> Tensor:
        context.save_for_backward(weight)
        return x @ weight.t()

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad @ context.saved_tensors[0], None


class Forgetful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.weight = nn.Parameter(torch.randn(1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return Forgets.apply(x, self.weight)


def tokens_of(index: int, rank: int, world: int) -> Tensor:
    """Rank 1 has more of them."""
    return torch.randint(11, (2 + 3 * rank, 4))


def vectors_of(index: int, rank: int, world: int) -> Tensor:
    return torch.randn(4, WIDTH)


def next_token(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def square(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x.sum(1, keepdim=True)).square().mean()


def by_blocks(model: nn.Module, **settings: Any) -> Any:
    for block in model.blocks:
        fully_shard(block, **settings)
    return fully_shard(model, **settings)


def usual(model: nn.Module, optimizer: Any, batches: list[Tensor], loss_fn: Any = next_token, after: Any = None) -> list:
    """A training step as users write it, with something to do before the optimizer's step."""
    losses = []
    for batch in batches:
        loss = loss_fn(model, batch)
        (loss / len(batches)).backward()
        losses.append(loss.item())
    if after is not None:
        after(model)
    optimizer.step()
    optimizer.zero_grad()
    return losses


verify_tied = partial(fullshard.verify, partial(Tied, freeze=False), tokens_of, next_token, steps=2)


def verify_example(example: Example, **given: Any) -> Any:
    return fullshard.verify(example.make, lambda i, r, w: example.batch(i, r), example.loss, steps=2, **given)


# Right programs.


def right(name: str) -> dict[str, str]:
    """Reports of right programs that are not ok, by what was verified."""
    wrong: dict[str, str] = {}

    def check(what: str, report: Any) -> None:
        assert report.compared or not report.ok
        if not report.ok:
            wrong[what] = str(report)

    if name == "ways":
        for way in WAYS:
            for example in ("tied_within", "unused" if way == "wrapper" else "frozen"):
                e = EXAMPLES[example]  # the wrapper refuses the frozen one: a FlatParameter is frozen as a whole
                sharded = partial(shard, way=way, units=blocks_of)
                check(f"{way} {example}", verify_example(e, shard_fn=sharded))
    if name == "settings":
        for way in ("rows", "flat", "wrapper", "originals"):
            sharded = partial(shard, way=way, units=blocks_of)
            given: dict[str, Any] = {"shard_fn": sharded, "steps": 2}
            check(f"{way} micro", verify_tied(micro_batches=3, **given))
            check(f"{way} no_sync", verify_tied(micro_batches=3, no_sync=True, **given))
            count = {"reduction": "tokens", "tokens_fn": Tensor.numel}
            check(f"{way} tokens", verify_tied(micro_batches=2, no_sync=True, **count, **given))
            check(f"{way} sum and clipping", verify_tied(reduction="sum", max_norm=0.5, **given))
            check(f"{way} dropout", fullshard.verify(partial(Tied, 0.5, False), tokens_of, next_token, micro_batches=2, **given))
        for example in ("batch_norm", "two_types", "shapes", "checkpoint_outside", "dataclass", "odd_mlp"):
            e = EXAMPLES[example]
            sharded = partial(shard, way="rows", units=e.units)
            check(example, verify_example(e, shard_fn=sharded))
        for policy in (
            MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
            MixedPrecisionPolicy(param_dtype=torch.bfloat16),
            MixedPrecisionPolicy(param_dtype=torch.float16, output_dtype=torch.float32),
        ):
            check(str(policy), verify_tied(shard_fn=partial(by_blocks, mp_policy=policy)))
        check("bfloat16", fullshard.verify(lambda: Tied().bfloat16(), tokens_of, next_token, shard_fn=by_blocks))
        check("default", verify_tied(train_step_fn=usual, optimizer_fn=lambda m: torch.optim.SGD(m.parameters(), 0.1, 0.9)))
        check("views", verify_tied(shard_fn=by_blocks, optimizer_fn=lambda m: torch.optim.AdamW(
            fullshard.optimizer_view(m) if isinstance(m, fullshard.FSDPModule) else m.parameters(), lr=1e-3)))
        check("drawn after sharding", verify_tied(shard_fn=drawn_again, initial="copy"))
    return wrong


def drawn_again(model: nn.Module) -> nn.Module:
    by_blocks(model)
    for p in model.parameters():
        nn.init.normal_(p)
    return model


@pytest.mark.parametrize("name", ["ways", "settings"])
def test_right_programs_are_found_right(run_ranks, name):
    for wrong in run_ranks(right, name):
        assert not wrong, "\n".join(f"{what}: {text}" for what, text in wrong.items())


# Planted faults: what verify is given, and what it must say.


def materialised(model: nn.Module, tie: bool, buffers: bool) -> nn.Module:
    """Sharded by way of the meta device, as large models are."""
    state = {name: value.clone() for name, value in model.state_dict().items()}
    shift = model.shift.clone()
    if not tie:
        model.to("meta").to_empty(device="cpu")
        model.load_state_dict(state)
        model.shift.copy_(shift)
        return by_blocks(model)
    model.to("meta")
    model.head.weight = model.tokens.weight
    by_blocks(model)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.distributed.tensor.distribute_tensor(state[name], p.device_mesh, p.placements))
    if buffers:
        model.shift.copy_(shift)
    return model


def optimizer_before(model: nn.Module) -> tuple[nn.Module, Any]:
    optimizer = torch.optim.AdamW(model.parameters())
    return by_blocks(model), optimizer


def without_head(model: nn.Module) -> Any:
    return torch.optim.AdamW([p for name, p in model.named_parameters() if "blocks.1" not in name])


def unfrozen(model: nn.Module) -> nn.Module:
    return by_blocks(model.requires_grad_(True))


def decayed(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 - 1e-2)


def never_synchronised(model: Any, optimizer: Any, batches: list[Tensor]) -> list:
    model.set_requires_gradient_sync(False)
    return usual(model, optimizer, batches)


def without_joining(model: Any, optimizer: Any, batches: list[Tensor]) -> None:
    """Gradients of all micro-batches but the last are kept apart, and added without a reduction."""
    kept = {}
    for number, batch in enumerate(batches):
        if number == len(batches) - 1:
            kept = {n: None if p.grad is None else p.grad.full_tensor() for n, p in model.named_parameters()}
            model.zero_grad()
        (next_token(model, batch) / len(batches)).backward()
        if number < len(batches) - 1:
            for p in model.parameters():
                if p.grad is not None and dist.get_rank() == 1:
                    p.grad.zero_()
    for name, p in model.named_parameters():
        if kept[name] is not None:
            p.grad.add_(torch.distributed.tensor.distribute_tensor(kept[name], p.device_mesh, p.placements))
    optimizer.step()
    optimizer.zero_grad()


def adapter_on_first(model: nn.Module) -> nn.Module:
    if dist.get_rank() == 0:
        model.blocks[1].lora = nn.Linear(WIDTH, 2)
    return by_blocks(model)


def seeded_alike(model: nn.Module, optimizer: Any, batches: list[Tensor]) -> list:
    torch.manual_seed(3)
    return usual(model, optimizer, batches)


def frozen_on_second(model: nn.Module) -> nn.Module:
    return by_blocks(model.requires_grad_(dist.get_rank() == 0))


def ignoring(model: nn.Module) -> nn.Module:
    """A parameter that no unit shards, and nobody averages."""
    return by_blocks(model, ignored_params={model.blocks[0][0].weight})


TOKENS = {"reduction": "tokens", "tokens_fn": Tensor.numel}
SHARDED = {"shard_fn": by_blocks}
FAULTS: dict[str, tuple[dict[str, Any], str, str | None, str]] = {
    # name: arguments, kind of the first finding, its parameter, what the cause says
    "tie": ({"shard_fn": partial(materialised, tie=False, buffers=True)}, "tie", "head.weight", "to_empty"),
    "optimizer": ({"shard_fn": optimizer_before}, "error", "gain", "built before its model was sharded"),
    "master": ({"shard_fn": lambda m: by_blocks(m.bfloat16())}, "dtype", "gain", "no full-precision master"),
    "unfrozen": ({"shard_fn": unfrozen}, "gradient", "gain", "a frozen parameter is trained"),
    "decayed": ({**SHARDED, "train_step_fn": partial(usual, after=decayed)}, "parameter", "gain", "a frozen parameter was"),
    "stale": ({**SHARDED, "optimizer_fn": lambda m: without_head(m) if is_sharded(m) else torch.optim.AdamW(m.parameters())},
              "parameter", "blocks.1.0.weight", "no rank updates it"),
    "tokens": ({**SHARDED, **TOKENS, "train_step_fn": usual}, "gradient", "tokens.weight", "unequal token counts"),
    "never reduced": ({**SHARDED, "train_step_fn": never_synchronised, "micro_batches": 2}, "gradient", "tokens.weight",
                      "every micro-batch ran under no_sync"),
    "buffer": ({"shard_fn": partial(materialised, tie=True, buffers=False)}, "buffer", "shift", "left uninitialised"),
    "adapter": ({"shard_fn": adapter_on_first}, "structure", "blocks.1.lora.weight", "LoRA"),
    "alike": ({**SHARDED, "train_step_fn": seeded_alike, "rate": 0.5}, "draws", None, "dropout is the same on every rank"),
    "summed": ({**SHARDED, "train_step_fn": partial(usual, after=lambda m: [p.grad.mul_(2) for p in m.parameters() if
               p.grad is not None])}, "gradient", "tokens.weight", "summed over ranks"),
    "not stepped": ({**SHARDED, "train_step_fn": lambda m, o, b: [next_token(m, one).backward() for one in b] and None},
                    "step", None, "was not called"),
    "rate": ({**SHARDED, "optimizer_fn": lambda m: torch.optim.SGD(m.parameters(), lr=0.2 if is_sharded(m) else 0.1)},
             "parameter", "tokens.weight", "2 times the expected"),
    "unaveraged": ({"shard_fn": ignoring}, "gradient", "blocks.0.0.weight", "never reduced over ranks"),
}  # fmt: skip


def is_sharded(model: nn.Module) -> bool:
    return isinstance(model, fullshard.FSDPModule)


def hooked(model: nn.Module) -> nn.Module:
    model.blocks[1][0].register_forward_hook(lambda module, args, output: output * 1.5)
    return by_blocks(model)


def parallel(model: nn.Module) -> nn.Module:
    """Two ranks that compute one batch together, tensor-parallel, one data-parallel rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


class Wide(nn.Module):
    """Blocks that tensor parallelism splits, with dropout on what all its ranks have whole."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH), nn.Dropout(0.5)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def seeded_by_rank(model: nn.Module, optimizer: Any, batches: list[Tensor]) -> list:
    torch.manual_seed(dist.get_rank())
    return usual(model, optimizer, batches, square)


def planted(names: list[str]) -> dict[str, Any]:
    found = {}
    for name in names:
        given = dict(FAULTS[name][0])
        rate = given.pop("rate", 0.0)
        found[name] = fullshard.verify(partial(Tied, rate), tokens_of, next_token, steps=2, **given)
    verify_wide = partial(fullshard.verify, Wide, vectors_of, square, shard_fn=parallel, steps=1)
    found["forgets"] = fullshard.verify(Forgetful, vectors_of, square, shard_fn=by_blocks)
    dp = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))["dp"]
    found["parallel"] = verify_wide(data_mesh=dp)
    found["parallel dropout"] = verify_wide(data_mesh=dp, train_step_fn=seeded_by_rank)
    parts = {"modules": ["blocks.0", "blocks.1.0"], "steps": 2}
    found["parts"] = fullshard.verify(partial(Tied, 0.5), tokens_of, next_token, micro_batches=2, **{**SHARDED, **parts})
    found["parts, output"] = fullshard.verify(Tied, tokens_of, next_token, shard_fn=hooked, **parts)
    unsynchronised = {**SHARDED, "train_step_fn": never_synchronised}
    found["parts, gradient"] = fullshard.verify(Tied, tokens_of, next_token, **{**unsynchronised, **parts})
    return found


def test_planted_faults_are_found_and_named(run_ranks):
    first, second = run_ranks(planted, list(FAULTS))
    for name in first:
        assert first[name] == second[name], f"reports differ between ranks: {first[name]}\n{second[name]}"
    for name, (_, kind, parameter, cause) in FAULTS.items():
        expect(first[name], kind, parameter, cause)
    expect(first["forgets"], "autograd", "weight", "custom autograd.Function")
    assert first["parallel"].ok, first["parallel"]
    expect(first["parallel dropout"], "draws", None, "inside a tensor-parallel group")
    assert first["parts"].ok and first["parts"].compared > 8, first["parts"]
    expect(first["parts, output"], "output", "blocks.1.0", "computes something else")
    expect(first["parts, gradient"], "gradient", "blocks.0.0.weight", "no_sync")


def expect(report: Any, kind: str, parameter: str | None, cause: str) -> None:
    assert not report.ok and report.first.kind == kind, str(report)
    named = [one for one in report.findings if one.parameter == parameter]
    assert named and all(cause in (one.cause or "") for one in named), str(report)
    assert cause in str(report)
