"""`fullshard.verify`: right programs are found right, whatever their way; planted faults are found and named."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fullshard
from fullshard import MixedPrecisionPolicy, fully_shard
from fullshard.cli.main import main
from fullshard.insight.verify.causes import gradient_cause
from models import EXAMPLES, Example, blocks_of
from ways import shard

pytestmark = pytest.mark.gloo("verify hooks all optimizers of a process")
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


def usual(
    model: nn.Module, optimizer: Any, batches: list[Tensor], loss_fn: Any = next_token, after: Any = None
) -> list:
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
    return fullshard.verify(example.make, lambda i, r, w: example.batch(i, r), example.loss, steps=1, **given)


# Right programs.


def right() -> dict[str, str]:
    """Reports of right programs that are not ok, by what was verified."""
    wrong: dict[str, str] = {}

    def check(what: str, report: Any) -> None:
        assert report.compared or not report.ok
        if not report.ok:
            wrong[what] = str(report)

    for way in ("rows", "owner", "wrapper", "originals"):
        sharded = partial(shard, way=way, units=blocks_of)
        given: dict[str, Any] = {"shard_fn": sharded, "steps": 1}
        check(f"{way} tied", verify_example(EXAMPLES["tied_within"], shard_fn=sharded))
        check(f"{way} tokens", verify_tied(micro_batches=2, no_sync=True, **TOKENS, **given))
        dropping = partial(Tied, 0.5, False)
        check(f"{way} dropout", fullshard.verify(dropping, tokens_of, next_token, micro_batches=2, **given))
    check("sum", verify_tied(reduction="sum", max_norm=0.5, micro_batches=2, shard_fn=by_blocks))
    for example in ("frozen", "unused", "batch_norm", "two_types", "shapes", "checkpoint_outside"):
        e = EXAMPLES[example]
        check(example, verify_example(e, shard_fn=partial(shard, way="rows", units=e.units)))
    policy = MixedPrecisionPolicy(param_dtype=torch.float16, output_dtype=torch.float32)
    check("float16", verify_tied(shard_fn=partial(by_blocks, mp_policy=policy)))
    check("bfloat16", fullshard.verify(lambda: Tied().bfloat16(), tokens_of, next_token, shard_fn=by_blocks))
    eight = MixedPrecisionPolicy(gather_dtype=torch.int8, scatter_dtype=torch.int8, all_reduce_dtype=torch.int8)
    for shape in ((1, 2), (2, 1)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        check(f"8 bits on {shape}", verify_tied(shard_fn=partial(by_blocks, mp_policy=eight, mesh=mesh)))
    low = fullshard.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    sharded = partial(shard, way="wrapper", units=blocks_of, mixed_precision=low)
    check("wrapper in low precision", verify_tied(shard_fn=sharded))
    check("the default way", verify_tied(train_step_fn=usual, optimizer_fn=momentum))
    for cleared in (usual, clears_the_model, None):  # the optimizer's gradients, all before the step, verify's own loop
        head = {"shard_fn": by_blocks, "optimizer_fn": without_head, "max_norm": 0.1}
        after = {"after": lambda model: fullshard.clip_grad_norm_(model.parameters(), 0.1)} if cleared is usual else {}
        given = {**head, "train_step_fn": partial(cleared, **after)} if cleared else head
        given |= {"max_norm": None} if cleared is clears_the_model else {}
        report = verify_tied(**{**given, "steps": 3})
        check(f"an optimizer without the head, {cleared}", report)
        assert ("first step only" in str(report)) == (cleared is not None), str(report)
    check(
        "a closure", verify_tied(train_step_fn=by_closure, optimizer_fn=momentum, micro_batches=2, shard_fn=by_blocks)
    )
    scheduled = partial(with_schedule, schedulers={})
    check("a schedule", verify_tied(train_step_fn=scheduled, optimizer_fn=momentum, shard_fn=by_blocks, steps=3))
    cycled = partial(with_one_cycle, schedulers={})
    check("betas cycled", verify_tied(train_step_fn=cycled, optimizer_fn=by_adamw, shard_fn=by_blocks, steps=4))
    check("views", verify_tied(shard_fn=by_blocks, optimizer_fn=of_views))
    check("compiled", verify_tied(shard_fn=compiled))
    check("drawn after sharding", verify_tied(shard_fn=drawn_again, initial="copy"))
    return wrong


def clears_the_model(model: nn.Module, optimizer: Any, batches: list[Tensor]) -> None:
    model.zero_grad()
    next_token(model, batches[0]).backward()
    optimizer.step()


def with_schedule(model: nn.Module, optimizer: Any, batches: list[Tensor], schedulers: dict) -> None:
    """Warms up, then decays."""
    usual(model, optimizer, batches)
    if optimizer not in schedulers:
        schedulers[optimizer] = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: [0.0, 0.3, 0.2][min(step, 2)])
    else:
        schedulers[optimizer].step()


def by_adamw(model: nn.Module) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def with_one_cycle(model: nn.Module, optimizer: Any, batches: list[Tensor], schedulers: dict) -> None:
    """Changes learning rate and betas in every step."""
    if optimizer not in schedulers:
        schedulers[optimizer] = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
    usual(model, optimizer, batches)
    schedulers[optimizer].step()


def by_closure(model: nn.Module, optimizer: Any, batches: list[Tensor], keyword: bool = False) -> Tensor:
    """The optimizer has the gradients computed; returns the loss with its graph."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = sum(next_token(model, batch) for batch in batches) / len(batches)
        loss.backward()
        return loss

    return optimizer.step(closure=closure) if keyword else optimizer.step(closure)


class Subclassed(torch.optim.SGD):
    """Its hooks run twice in a step: for its own and for that of its base. `calls`: of the closure."""

    def __init__(self, parameters: Any, calls: int = 1) -> None:
        super().__init__(parameters, lr=0.1)
        self.calls = calls

    def step(self, closure: Any = None) -> Any:
        for _ in range(self.calls - 1 if closure else 0):
            closure()
        return super().step(closure)


def momentum(model: nn.Module) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def of_views(model: nn.Module) -> Any:
    return torch.optim.AdamW(fullshard.optimizer_view(model) if is_sharded(model) else model.parameters())


def compiled(model: nn.Module) -> nn.Module:
    for block in model.blocks:
        block.compile(backend="eager")
    return by_blocks(model)


def drawn_again(model: nn.Module) -> nn.Module:
    by_blocks(model)
    for p in model.parameters():
        nn.init.normal_(p)
    return model


def on_a_mesh() -> list[Any]:
    """Two replicas of two shards, and two data-parallel ranks of two tensor-parallel ones."""
    sharded = partial(shard, way="flat", units=blocks_of, hybrid=True)
    dp = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["dp"]
    wide = fullshard.verify(Wide, vectors_of, square, shard_fn=parallel, data_mesh=dp, micro_batches=2, steps=1)
    return [verify_tied(shard_fn=sharded, micro_batches=2, no_sync=True), wide]


def test_on_meshes_of_two_dims(run_ranks):
    for reports in run_ranks(on_a_mesh, world=4, timeout=240):
        assert all(report.ok for report in reports), "\n".join(map(str, reports))


def test_right_programs_are_found_right(run_ranks):
    for wrong in run_ranks(right, timeout=240):
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


def decayed(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 - 1e-2)


def never_synchronised(model: Any, optimizer: Any, batches: list[Tensor]) -> list:
    model.set_requires_gradient_sync(False)
    return usual(model, optimizer, batches)


def adapter_on_first(model: nn.Module) -> nn.Module:
    if dist.get_rank() == 0:
        model.blocks[1].lora = nn.Linear(WIDTH, 2)
    return by_blocks(model)


def seeded_alike(model: nn.Module, optimizer: Any, batches: list[Tensor]) -> list:
    torch.manual_seed(3)
    return usual(model, optimizer, batches)


def averaged_at_last(model: Any, optimizer: Any, batches: list[Tensor]) -> None:
    """By hand, and of the last micro-batch only: what was kept before that is never reduced."""
    weight = model.blocks[0][0].weight
    for number, batch in enumerate(batches, 1):
        model.set_requires_gradient_sync(number == len(batches))
        if number == len(batches):
            weight.register_hook(mean_over_ranks)
        (next_token(model, batch) / len(batches)).backward()
    optimizer.step()


def mean_over_ranks(grad: Tensor) -> Tensor:
    mean = grad / dist.get_world_size()
    dist.all_reduce(mean)
    return mean


def doubled(model: nn.Module) -> None:
    for p in model.parameters():
        if p.grad is not None:
            p.grad.mul_(2)


def clamped(model: nn.Module) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 0.02)


def summed_losses(model: nn.Module, optimizer: Any, batches: list[Tensor]) -> float:
    return sum(usual(model, optimizer, batches))


def last_loss(model: nn.Module, optimizer: Any, batches: list[Tensor]) -> float:
    return usual(model, optimizer, batches)[-1]


def loss_of_all_ranks(model: nn.Module, optimizer: Any, batches: list[Tensor]) -> float:
    losses = usual(model, optimizer, batches)
    mean = torch.tensor(sum(losses) / len(losses))
    dist.all_reduce(mean)
    return float(mean) / dist.get_world_size()


def clipped_at(model: nn.Module, norm: float) -> None:
    fullshard.clip_grad_norm_(model.parameters(), norm)


def twice_by_closure(model: nn.Module, optimizer: Any, batches: list[Tensor]) -> None:
    by_closure(model, optimizer, batches)
    by_closure(model, optimizer, batches)


def frozen_late(model: nn.Module) -> nn.Module:
    by_blocks(model).blocks[0].requires_grad_(False)
    return model


def without_step(model: nn.Module, optimizer: Any, batches: list[Tensor]) -> None:
    for batch in batches:
        next_token(model, batch).backward()


def forgets_to_step(model: nn.Module, optimizer: Any, batches: list[Tensor]) -> None:
    without_step(model, optimizer, batches)
    optimizer.zero_grad()


def never_clears(model: nn.Module, optimizer: Any, batches: list[Tensor]) -> None:
    without_step(model, optimizer, batches)
    optimizer.step()


def hooked(model: nn.Module) -> nn.Module:
    model.blocks[1][0].register_forward_hook(lambda module, args, output: output * 1.5)
    return by_blocks(model)


def by_optimizer(make: Any) -> dict[str, Any]:
    return {"shard_fn": by_blocks, "optimizer_fn": make}


def step(function: Any, **more: Any) -> dict[str, Any]:
    return {"shard_fn": by_blocks, "train_step_fn": function, **more}


PARTS = {"modules": ["blocks.0", "blocks.1.0"]}


def first_rank_alone(model: Any, optimizer: Any, batches: list[Tensor]) -> None:
    for batch in batches:
        (next_token(model, batch) / len(batches) * (dist.get_rank() == 0)).backward()
    optimizer.step()


TOKENS = {"reduction": "tokens", "tokens_fn": Tensor.numel}
BROKEN_TIE = partial(materialised, tie=False, buffers=True)
LEFT_BUFFER = partial(materialised, tie=True, buffers=False)
UNSTEPPED = by_optimizer(lambda m: without_head(m) if is_sharded(m) else torch.optim.AdamW(m.parameters()))
RATE = by_optimizer(lambda m: torch.optim.SGD(m.parameters(), lr=0.2 if is_sharded(m) else 0.1))
IGNORING = {"shard_fn": lambda m: by_blocks(m, ignored_params={m.blocks[0][0].weight})}  # nobody averages it
FAULTS: dict[str, tuple[dict[str, Any], str, str | None, str]] = {
    # name: arguments, kind of the first finding, its parameter, what the cause says
    "tie": ({"shard_fn": BROKEN_TIE}, "tie", "head.weight", "to_empty"),
    "optimizer": ({"shard_fn": optimizer_before}, "error", "gain", "build the optimizer after fully_shard"),
    "master": ({"shard_fn": lambda m: by_blocks(m.bfloat16())}, "dtype", "gain", "no full-precision master"),
    "unfrozen": (
        {"shard_fn": lambda m: by_blocks(m.requires_grad_(True))},
        "gradient",
        "gain",
        "a frozen parameter is trained",
    ),
    "decayed": (step(partial(usual, after=decayed)), "parameter", "gain", "a frozen parameter was"),
    "stale": (UNSTEPPED, "parameter", "blocks.1.0.weight", "no rank updates it"),
    "tokens": (step(usual, **TOKENS), "gradient", "tokens.weight", "unequal token counts"),
    "never reduced": (step(never_synchronised, micro_batches=2), "gradient", "tokens.weight", "under no_sync"),
    "buffer": ({"shard_fn": LEFT_BUFFER}, "buffer", "shift", "left uninitialized"),
    "adapter": ({"shard_fn": adapter_on_first}, "structure", "blocks.1.lora.weight", "LoRA"),
    "alike": (step(seeded_alike, rate=0.5), "draws", None, "dropout is the same on every rank"),
    "summed": (step(partial(usual, after=doubled)), "gradient", "tokens.weight", "summed over ranks"),
    "clamped": (step(partial(usual, after=clamped)), "gradient", "tokens.weight", "clamped to 0.02"),
    "summed losses": (
        step(summed_losses, micro_batches=3),
        *("loss", None, "multiplied by the number of micro-batches: return the mean"),
    ),
    "last loss": (step(last_loss, micro_batches=2), "loss", None, "returns the loss of its last micro-batch"),
    "loss of all ranks": (step(loss_of_all_ranks, micro_batches=2), "loss", None, "returns the mean over all ranks"),
    "not clipped": (step(usual, max_norm=0.01), "gradient", "tokens.weight", "gradients are not clipped"),
    "clipped more": (
        step(partial(usual, after=partial(clipped_at, norm=0.003)), max_norm=0.01),
        *(
            "gradient",
            "tokens.weight",
            "gradients are 0.3 times the expected ones: the step clips them to a norm other",
        ),
    ),
    "stepped twice": (step(twice_by_closure), "parameter", "tokens.weight", "or more than one step"),
    "frozen late": (
        {"shard_fn": frozen_late},
        *("gradient", "blocks.0.0.weight", "frozen in the sharded model and trained in the unsharded one"),
    ),
    "not stepped": (step(without_step), "step", None, "was not called"),
    "not stepped, and zeroed": (step(forgets_to_step), "gradient", "tokens.weight", "was not called"),
    "not zeroed": (step(never_clears), "gradient", "tokens.weight", "zero_grad() was not called"),
    "rate": (RATE, "parameter", "tokens.weight", "2 times the expected"),
    "no sync": (
        {**IGNORING, "train_step_fn": averaged_at_last, "micro_batches": 2},
        *("gradient", "blocks.0.0.weight", "a missing reduce in no_sync()"),
    ),
    "unaveraged": (IGNORING, "gradient", "blocks.0.0.weight", "never reduced over ranks"),
    "one rank's loss": (step(first_rank_alone), "gradient", "tokens.weight", "only the loss of rank 0 counts"),
    "clipped, not said": (
        step(partial(usual, after=partial(clipped_at, norm=0.003))),
        *("gradient", "tokens.weight", "pass the norm as max_norm="),
    ),
    "parts, output": ({"shard_fn": hooked, **PARTS}, "output", "blocks.1.0", "computes something different"),
    "parts, gradient": (step(never_synchronised, **PARTS), "gradient", "blocks.0.0.weight", "no_sync"),
}


def is_sharded(model: nn.Module) -> bool:
    return isinstance(model, fullshard.FSDPModule)


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
        found[name] = fullshard.verify(partial(Tied, rate), tokens_of, next_token, **{"steps": 2, **given})
    found["forgets"] = fullshard.verify(Forgetful, vectors_of, square, shard_fn=by_blocks)
    dp = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))["dp"]
    verify_wide = partial(fullshard.verify, Wide, vectors_of, square, shard_fn=parallel, steps=1, data_mesh=dp)
    found["parallel"] = verify_wide()
    found["parallel dropout"] = verify_wide(train_step_fn=seeded_by_rank)
    parts = {"micro_batches": 2, "shard_fn": by_blocks, "steps": 2, **PARTS}
    found["parts"] = fullshard.verify(partial(Tied, 0.5), tokens_of, next_token, **parts)
    return found


def test_planted_faults_are_found_and_named(run_ranks):
    first, second = run_ranks(planted, list(FAULTS), timeout=240)
    for name in first:
        assert first[name] == second[name], f"reports differ between ranks: {first[name]}\n{second[name]}"
    for name, (_, kind, parameter, cause) in FAULTS.items():
        expect(first[name], kind, parameter, cause)
    expect(first["forgets"], "autograd", "weight", "custom autograd.Function")
    assert first["parallel"].ok, first["parallel"]
    expect(first["parallel dropout"], "draws", None, "inside a tensor-parallel group")
    assert first["parts"].ok and first["parts"].compared > 8, first["parts"]


def expect(report: Any, kind: str, parameter: str | None, cause: str) -> None:
    assert not report.ok and report.first.kind == kind, str(report)
    named = [one for one in report.findings if one.parameter == parameter]
    assert named and all(cause in (one.cause or "") for one in named), str(report)
    assert cause in str(report)


# Causes by themselves, what verify leaves behind, and the command line.


def test_a_wrong_gradient_is_told_by_what_it_is_made_of():
    torch.manual_seed(0)
    parts = [[torch.randn(50, dtype=torch.float64) for _ in range(3)] for _ in range(4)]
    counts = [[float(1 + rank * rank + 2 * micro) for micro in range(3)] for rank in range(4)]
    total = sum(map(sum, counts))
    weights = [[n / total for n in row] for row in counts]

    def cause(factor: Any) -> str:
        got = sum(factor(r, m) * parts[r][m] for r in range(4) for m in range(3))
        return gradient_cause(got, parts, weights, counts, 2) or "none"

    assert "micro-batches of all ranks count equally" in cause(lambda r, m: 1 / 12)
    assert "ranks count equally" in cause(lambda r, m: counts[r][m] / sum(counts[r]) / 4)
    assert "a missing reduce in no_sync()" in cause(lambda r, m: weights[r][m] * (m == 2 or r == 2))
    assert "a missing reduce in no_sync()" in cause(lambda r, m: weights[r][m] * (m == 2 or 4 * (r == 2)))
    assert "only the last micro-batch counts" in cause(lambda r, m: weights[r][m] * (m == 2))
    assert "the last micro-batch is missing" in cause(lambda r, m: weights[r][m] * (m < 2))
    assert "never reduced over ranks" in cause(lambda r, m: weights[r][m] * (r == 2))
    assert "summed over ranks" in cause(lambda r, m: 4 * weights[r][m])
    assert "one time too many" in cause(lambda r, m: weights[r][m] / 3)
    assert "65536 times" in cause(lambda r, m: 2**16 * weights[r][m])
    assert cause(lambda r, m: weights[r][m] * (r + m) ** 2) == "none"
    square = [row[:2] for row in parts[:2]], [[0.25, 0.25]] * 2, [[1.0, 1.0]] * 2
    bound = float(parts[2][0].abs().sort().values[-4])
    alone = [[parts[2][0]]], [[1.0]], [[1.0]], 0
    assert f"clamped to {bound:.4g}" in (gradient_cause(parts[2][0].clamp(-bound, bound), *alone) or "none")
    assert gradient_cause(parts[2][0].clamp(-bound, 2 * bound), *alone) is None
    either = gradient_cause(sum(0.5 * part for row in square[0] for part in row), *square, 0) or ""
    assert "summed over ranks" in either and "; or losses of micro-batches are summed" in either


def test_nothing_is_left_behind() -> None:
    """What is refused: tests/errors/test_errors_of_commands.py."""
    torch.manual_seed(5)
    random.seed(5)

    def state() -> list[Any]:
        return [torch.get_rng_state().tolist(), random.getstate(), torch.are_deterministic_algorithms_enabled()]

    before = state()
    report = verify_tied(micro_batches=2, no_sync=True)
    assert report.ok and report.world == 1 and "ok" in str(report)
    assert state() == before
    assert verify_tied(optimizer_fn=lambda m: torch.optim.SGD([], lr=0.1)).first.kind == "error"
    told = str(verify_tied(shard_fn=lambda m: fully_shard(fully_shard(m))))
    assert "raised ConfigError" in told and "already applied to this Tied" in told
    with pytest.raises(fullshard.ConfigError, match="modules") as raised:
        verify_tied(modules=["absent"])
    assert raised.value.args[0].startswith("modules= must be") and "remedy" not in str(raised.value)
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda model, batch: model(batch),
        lambda model, batch: 3.0,
        lambda model, batch: (model(batch).mean(), 1),
        lambda model, batch: model(batch).mean().detach(),
    ],
)
def test_what_the_unsharded_model_raises_too_is_no_difference(loss_fn: Any) -> None:
    with pytest.raises(fullshard.ConfigError, match=r"(?s)the unsharded model raised.*scalar tensor"):
        fullshard.verify(partial(Tied, freeze=False), tokens_of, loss_fn)


def test_an_error_is_told_with_the_line_that_raised_it():
    def failing(model: nn.Module, optimizer: Any, batches: list[Tensor]) -> None:
        raise KeyError("labels")

    (finding,) = verify_tied(train_step_fn=failing).findings
    assert finding.got == "'labels'" and "KeyError" in finding.what
    line = failing.__code__.co_firstlineno + 1
    assert finding.cause == f"raised at {__file__}:{line}"


@pytest.mark.parametrize("keyword", [False, True])
@pytest.mark.parametrize("optimizer_fn", [momentum, lambda model: Subclassed(model.parameters())])
def test_gradients_are_read_after_a_closure(optimizer_fn, keyword):
    step = partial(by_closure, keyword=keyword)
    report = verify_tied(train_step_fn=step, optimizer_fn=optimizer_fn, shard_fn=by_blocks)
    assert report.ok, report


def undetached(model: nn.Module, optimizer: Any, batches: list[Tensor]) -> list[Tensor]:
    losses = [next_token(model, batch) for batch in batches]
    sum(losses).backward()
    optimizer.step()
    optimizer.zero_grad()
    return losses


def test_a_loss_with_its_graph_is_read_without_a_warning(recwarn):
    torch.set_warn_always(True)
    try:
        assert verify_tied(train_step_fn=undetached).ok
    finally:
        torch.set_warn_always(False)
    assert not [warning for warning in recwarn if "requires_grad" in str(warning.message)]


def two_optimizers(model: nn.Module, optimizers: Any, batches: list[Tensor]) -> None:
    for optimizer in optimizers:
        by_closure(model, optimizer, batches)


def stepping_in_backward(model: nn.Module) -> tuple[nn.Module, Any]:
    optimizer = momentum(by_blocks(model))
    fullshard.step_in_backward(optimizer)
    return model, optimizer


SEVERAL = "which calls its closure several times in a step"
UNSUITABLE = {
    "LBFGS": ({"optimizer_fn": lambda model: torch.optim.LBFGS(model.parameters())}, f"LBFGS, {SEVERAL}"),
    "calls": ({"optimizer_fn": lambda model: Subclassed(model.parameters(), calls=2)}, f"Subclassed, {SEVERAL}"),
    "two": (
        {"optimizer_fn": lambda model: [momentum(model), momentum(model)], "train_step_fn": two_optimizers},
        "the closure of a second optimizer (SGD)",
    ),
    "in backward": ({"shard_fn": stepping_in_backward, "train_step_fn": without_step}, "verify without it"),
}


@pytest.mark.parametrize(("given", "words"), UNSUITABLE.values(), ids=UNSUITABLE)
def test_steps_that_cannot_be_compared_are_refused_by_name(given: Any, words: str) -> None:
    with pytest.raises(fullshard.ConfigError) as raised:
        verify_tied(**{"train_step_fn": by_closure, "shard_fn": by_blocks, **given})
    assert "verify cannot compare" in str(raised.value) and words in str(raised.value)
    assert "\n" not in str(raised.value)


RETURNED = [
    (lambda losses: {"loss": losses[0]}, "got dict"),
    (lambda losses: "ok", "got str"),
    (lambda losses: True, "got bool"),
    (torch.tensor, "got Tensor of shape [2], float32"),
    (lambda losses: torch.tensor(1 + 2j), "got Tensor of shape [], complex64"),
    (lambda losses: (sum(losses) / 2, torch.ones(())), "got tuple of 2: float, Tensor"),
    (lambda losses: losses[:1], "got list of 1: float"),
    (lambda losses: ["a", "b"], "got list of 2: str, str"),
]


@pytest.mark.parametrize(("answer", "words"), RETURNED, ids=[words for _, words in RETURNED])
def test_what_a_step_may_not_return(answer: Any, words: str) -> None:
    with pytest.raises(fullshard.ConfigError) as raised:
        verify_tied(train_step_fn=lambda *given: answer(usual(*given)), micro_batches=2)
    assert "train_step_fn may return" in str(raised.value) and "each micro-batch (2)" in str(raised.value)
    assert str(raised.value).endswith(words) and "\n" not in str(raised.value)


class Turned(nn.Module):
    """A layer whose pairs of outputs are turned by a complex buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("turn", torch.polar(torch.ones(WIDTH // 2), torch.arange(WIDTH / 2)))

    def forward(self, x: Tensor) -> Tensor:
        pairs = self.inner(x).unflatten(-1, (-1, 2)).contiguous()
        return torch.view_as_real(torch.view_as_complex(pairs) * self.turn).flatten(-2)


def wrapped_blocks() -> nn.Module:
    """Blocks within a checkpoint's wrapper, as `model_fn` may give them."""
    model = nn.Module()
    model.blocks = nn.ModuleList(checkpoint_wrapper(Turned()) for _ in range(2))
    model.forward = lambda x: model.blocks[1](model.blocks[0](x))
    return model


def bent(model: nn.Module) -> nn.Module:
    model.blocks[1].turn[2] *= 2
    return by_blocks(model)


def test_names_are_plain_within_checkpoint_wrappers_and_buffers_may_be_complex():
    check = partial(fullshard.verify, wrapped_blocks, vectors_of, square, steps=1)
    for report in (check(), check(modules=["blocks.0", "blocks.1.inner"])):
        assert report.ok and report.compared > 8, report
    first = check(shard_fn=bent).first
    assert (first.kind, first.parameter, first.element) == ("buffer", "blocks.1.turn", (2,)), first


class Scaled(nn.Module):
    """By a random number of a library."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.inner, self.draw = nn.Linear(WIDTH, WIDTH), draw

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * (0.5 + self.draw())


@pytest.mark.parametrize("draw", [random.random, np.random.rand], ids=["python", "numpy"])
def test_chosen_modules_draw_the_same_numbers_again(draw):
    report = fullshard.verify(lambda: nn.Sequential(Scaled(draw)), vectors_of, square, steps=1, modules=["0"])
    assert report.ok, report


def adapted(model: nn.Module) -> nn.Module:
    model.blocks[0].adapter = nn.Parameter(torch.zeros(WIDTH))
    return by_blocks(model)


def halved_buffer(model: nn.Module) -> nn.Module:
    model.blocks[1].turn = model.blocks[1].turn.to(torch.complex32)
    return by_blocks(model)


def changes_of_shard_fn() -> tuple[str, str | None, bool]:
    check = partial(fullshard.verify, wrapped_blocks, vectors_of, square, steps=1)
    first = check(shard_fn=adapted, modules=["blocks.0"]).first
    return first.kind, first.parameter, check(shard_fn=halved_buffer, initial="copy").ok  # equal to its rounding


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_shard_fn_may_add_a_parameter_to_a_chosen_module_and_cast_a_buffer(run_ranks):
    assert run_ranks(changes_of_shard_fn, world=2) == [("structure", "blocks.0.adapter", True)] * 2


PROGRAM = """
import argparse
import sys

import torch
from torch import nn

AT_IMPORT = list(sys.argv)

def right():
    model_fn = lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    batch_fn = lambda index, rank, world: torch.randn(3, 4)
    return dict(model_fn=model_fn, batch_fn=batch_fn, loss_fn=lambda model, x: model(x).square().mean())

def wrong():
    def step(model, optimizer, batches):
        (3 * model(batches[0]).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {**right(), "train_step_fn": step}

def unasked():
    return {**right(), "batch_fn": lambda: torch.randn(3, 4)}

def incomplete():
    return {"model_fn": nn.Linear}

def parsed():
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=3)
    width = parser.parse_args().width
    sys.stdout.write(f"{AT_IMPORT} and {sys.argv}, width {width};\\n")  # at once: ranks write to one pipe
    return right()

def exits():
    sys.exit(3)
"""


def test_the_command_line(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("sys.path", list(sys.path))
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    assert main(["verify", f"{script}:right", "--steps", "1"]) == 0
    assert "verify: ok (1 rank, 1 step equal" in capfd.readouterr().out
    assert main(["verify", f"{script}:wrong"]) == 1
    assert "3 times the expected" in capfd.readouterr().out
    for given, text in (
        ([f"{script}:incomplete"], "missing: batch_fn, loss_fn"),
        ([f"{script}:unasked"], "batch_fn(index, rank, world)"),
        ([f"{script}:exits"], f"{script}:exits ended with sys.exit(3)"),
        ([f"{script}:parsed", "--", "--depth", "2"], f"fullshard: {script}:parsed does not accept its program's"),
        ([f"{script}:parsed", "--", "--width", "x"], "(after --): argument --width: invalid int value: 'x'"),
        ([f"{script}:right", "--ranks", "0"], "--ranks"),
        ([f"{script}:right", "--steps", "many"], "--steps"),
        ([], "SCRIPT-OR-MODULE:FUNCTION"),
    ):
        assert main(["verify", *given]) == 2
        out, error = capfd.readouterr()
        assert text in error and not out and "usage" not in error, error
    assert main(["other"]) == 2 and main([]) == 2
    assert not dist.is_initialized()


@pytest.mark.parametrize(("ranks", "own", "width"), [(1, [], 3), (2, ["--width", "4"], 4)])
def test_ranks_are_started_and_the_program_finds_its_own_arguments(tmp_path, capfd, monkeypatch, ranks, own, width):
    monkeypatch.setattr("sys.path", list(sys.path))
    (script := tmp_path / "program.py").write_text(PROGRAM)
    before, seen = sys.argv, [str(script), *own]
    command = ["verify", f"{script}:parsed", "--steps", "1", "--ranks", str(ranks)]
    assert main([*command, "--", *own] if own else command) == 0
    out = capfd.readouterr().out
    assert out.count(f"{seen} and {seen}, width {width};") == ranks and f"verify: ok ({ranks} rank" in out, out
    assert sys.argv is before


def test_the_rank_that_broke_is_named(capfd, monkeypatch):
    monkeypatch.setattr("fullshard.cli.local_ranks.GRACE", 0.0)
    program = "import os, time; os._exit(7) if os.environ['RANK'] == '1' else time.sleep(600)"
    start = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda _, env, **outputs: start([sys.executable, "-S", "-c", program], env=env)
    )
    assert main(["verify", "program.py:right", "--ranks", "2"]) == 2
    assert capfd.readouterr().err == "fullshard: rank 1 ended with exit code 7\n"


def test_without_the_extra_it_is_named(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "tyro", None)
    monkeypatch.delitem(sys.modules, "fullshard.cli.verify", raising=False)
    assert main(["verify", "program.py:right"]) == 2
    assert "pip install tyro rich" in capsys.readouterr().err
