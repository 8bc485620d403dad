"""Training an Example sharded or not, and an exact comparison of what came out.

Records hold what a user can see: losses, full gradients, full parameters and buffers. AdamW runs with
eps=1e-3: with its default of 1e-8 the first steps are nearly the sign of the gradient, which turns rounding
in an element close to zero into a whole step. Gradients are compared on their own, so that eps hides nothing.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fullshard
from fullshard.shard import Unit
from models import EXAMPLES, Batch, Example, concatenate

PRECISIONS = {  # param_dtype, reduce_dtype
    "bf16": (torch.bfloat16, torch.float32),
    "bf16_reduce": (torch.bfloat16, None),
    "fp16_reduce": (None, torch.float16),
}
OPTIMIZER = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1}
LAYOUTS = ("rows", "flat")
BatchOf = Callable[[int], Batch]  # the step's batch of that number
Scenario = Callable[[nn.Module, Example, BatchOf], Tensor]  # leaves gradients, returns the loss
FP32 = 5e-6  # relative difference of norms, per tensor: sums of another order, on any processor
FP64 = 1e-13


@dataclass(frozen=True)
class Options:
    """How a model is sharded and stepped. Hashable, so that records can be kept."""

    layout: str | fullshard.Blocks = "rows"
    reshard: bool | int | None = None
    mesh: str = "default"  # "default": all ranks; "hybrid": 2 replicas of world / 2
    prefetch: int = 1  # units ahead; of Fullshard only
    precision: str = "none"  # or one of PRECISIONS
    micro_batches: int = 1
    sync: bool = True  # whether every micro-batch is reduced, or only a step's last one
    clip: str = "none"  # "torch" or "fullshard"
    max_norm: float = 0.5
    norm_type: float = 2.0
    dtype: torch.dtype = torch.float32
    steps: int = 3
    scenario: Scenario | None = None  # what a step does instead of one forward and backward


@dataclass
class Record:
    """What training left. Losses of every step; whole tensors, which cost a collective each, of a few."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)  # of all gradients, where clipped
    gradients: dict[int, dict[str, Tensor | None]] = field(default_factory=dict)  # of the first and last step
    parameters: dict[str, Tensor] = field(default_factory=dict)  # after the last step
    buffers: dict[str, Tensor] = field(default_factory=dict)  # after the last step


def full(tensor: Tensor) -> Tensor:
    """The whole tensor, on every rank, detached and of its own storage."""
    tensor = tensor.detach()
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()
    return tensor.clone()


def full_gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else full(p.grad) for name, p in model.named_parameters()}


def full_parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: full(p) for name, p in model.named_parameters()}


def mesh_of(kind: str) -> DeviceMesh | None:
    """A mesh of that name over all ranks."""
    world = dist.get_world_size()
    if kind == "hybrid":
        return init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    return {"default": None, "1d": init_device_mesh("cpu", (world,))}[kind]


def shard(library: types.ModuleType, model: nn.Module, example: Example, options: Options) -> nn.Module:
    """`model` sharded unit by unit, bottom-up, by `library.fully_shard` (Fullshard's, or PyTorch's)."""
    keywords: dict[str, object] = {"reshard_after_forward": options.reshard, "mesh": mesh_of(options.mesh)}
    if options.precision != "none":
        computed, reduced = PRECISIONS[options.precision]
        if library is not fullshard:
            reduced = reduced or computed  # what None means here and up to torch 2.14; from 2.15 on the parameter's
        keywords["mp_policy"] = library.MixedPrecisionPolicy(param_dtype=computed, reduce_dtype=reduced)
    if library is fullshard:
        keywords |= {"layout": options.layout, "prefetch": options.prefetch}
    for unit in [*example.units(model), model]:
        library.fully_shard(unit, **keywords)
    return model


def mean_over_ranks(loss: Tensor) -> float:
    loss = loss.detach().double() / dist.get_world_size()
    dist.all_reduce(loss)
    return loss.item()


def clip(model: nn.Module, options: Options) -> float:
    """Clips by the function that `options` names; the norm before, as that function returns it."""
    function = {"torch": nn.utils.clip_grad_norm_, "fullshard": getattr(fullshard, "clip_grad_norm_", None)}
    norm = function[options.clip](model.parameters(), options.max_norm, norm_type=options.norm_type)
    return full(norm).item()


def one_batch(model: nn.Module, example: Example, batch_of: BatchOf) -> Tensor:
    """The usual step: forward and backward once."""
    loss = example.loss(model, batch_of(0))
    loss.backward()
    return loss


def micro_batches(model: nn.Module, example: Example, batch_of: BatchOf, options: Options) -> Tensor:
    """Gradients summed over several batches, reduced for each of them or only for the last."""
    total = torch.zeros(())
    for index in range(options.micro_batches):
        if not options.sync and hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(index == options.micro_batches - 1)
        loss = example.loss(model, batch_of(index))
        loss.backward()
        total = total + loss.detach()
    return total


def take_step(model: nn.Module, example: Example, step: int, ranks: list[int], options: Options) -> Tensor:
    """Forward and backward on the concatenated batches of `ranks`, as the options say; the loss."""

    def batch_of(index: int) -> Batch:
        return concatenate([example.batch(10 * step + index, rank, options.dtype) for rank in ranks])

    if options.scenario is not None:
        return options.scenario(model, example, batch_of)
    if options.micro_batches > 1:
        return micro_batches(model, example, batch_of, options)
    return one_batch(model, example, batch_of)


def train_sharded(
    library: types.ModuleType, example: Example, options: Options, model: nn.Module | None = None
) -> Record:
    """Each rank on its own batches, with `model` as it is, or with the example's sharded by `library`."""
    if model is None:
        model = shard(library, example.make(options.dtype), example, options)
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIMIZER)
    record = Record()
    for step in range(options.steps):
        loss = take_step(model, example, step, [dist.get_rank()], options)
        finish_step(model, optimizer, record, mean_over_ranks(loss), options)
    return finish(model, record)


def train_reference(example: Example, options: Options, world: int, model: nn.Module | None = None) -> Record:
    """One process on all ranks' batches, concatenated (or rank by rank, where the example says so)."""
    model = example.make(options.dtype) if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIMIZER)
    record = Record()
    unclipped = options if options.clip == "none" else replace(options, clip="torch")
    groups = [[rank] for rank in range(world)] if example.per_rank else [list(range(world))]
    weighted = replace(example, weight=1 / len(groups))
    for step in range(options.steps):
        losses = [take_step(model, weighted, step, ranks, options).item() for ranks in groups]
        finish_step(model, optimizer, record, sum(losses), unclipped)
    return finish(model, record)


def finish_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, record: Record, loss: float, options: Options
) -> None:
    """Clips, writes down what there is to see, and steps."""
    step = len(record.losses)
    if options.clip != "none":
        record.norms.append(clip(model, options))
    record.losses.append(loss)
    if step in (0, options.steps - 1):
        record.gradients[step] = full_gradients(model)
    optimizer.step()
    optimizer.zero_grad()


def finish(model: nn.Module, record: Record) -> Record:
    record.parameters = full_parameters(model)
    record.buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return record


@lru_cache
def reference(name: str, options: Options, world: int) -> Record:
    """The named example's single-process record, computed once per process."""
    return train_reference(EXAMPLES[name], options, world)


@lru_cache
def pytorch(name: str, options: Options, world: int, rank: int) -> Record:
    """This rank's record of the named example from PyTorch's own fully_shard, computed once per rank."""
    return train_sharded(torch_fsdp, EXAMPLES[name], options)


def difference(got: Tensor, want: Tensor) -> float:
    """Norm of the difference, relative to the norm of what is wanted; 0 only where both are equal."""
    got, want = got.double(), want.double()
    if torch.equal(got, want):
        return 0.0
    return ((got - want).norm() / want.norm()).item()  # inf or nan where want is 0 or got is not finite


def compare_tensors(where: str, got: dict, want: dict, tolerance: float) -> list[str]:
    """One line for each name that is missing, None on one side only, or off by more than `tolerance`."""
    if got.keys() != want.keys():
        return [f"{where}: names differ: {sorted(got.keys() ^ want.keys())}"]
    problems = []
    for name, wanted in want.items():
        tensor = got[name]
        if tensor is None or wanted is None:
            if tensor is not wanted:
                problems.append(f"{where} {name}: {kind_of(tensor)} where {kind_of(wanted)} is wanted")
        elif tensor.shape != wanted.shape or tensor.dtype != wanted.dtype:
            problems.append(f"{where} {name}: {kind_of(tensor)} where {kind_of(wanted)} is wanted")
        elif not (found := difference(tensor, wanted)) <= tolerance:
            problems.append(f"{where} {name}: relative difference {found:.2e}, allowed {tolerance:.0e}")
    return problems


def kind_of(tensor: Tensor | None) -> str:
    return "None" if tensor is None else f"{tuple(tensor.shape)} {tensor.dtype}"


def compare(got: Record, want: Record, tolerance: float, against: str, buffers: bool = True) -> list[str]:
    """Every difference between two records, in the order in which training met them."""
    problems = []
    for kind in ("losses", "norms"):
        mine, theirs = getattr(got, kind), getattr(want, kind)
        if len(mine) != len(theirs):
            problems.append(f"against {against}: {len(mine)} {kind} where {len(theirs)} are wanted")
        for step, (value, wanted) in enumerate(zip(mine, theirs, strict=False)):
            if not abs(value - wanted) <= tolerance * abs(wanted):
                problems.append(f"against {against}: {kind} of step {step}: {value!r} where {wanted!r} is wanted")
    if got.gradients.keys() != want.gradients.keys():
        problems.append(f"against {against}: gradients of steps {[*got.gradients]}, wanted {[*want.gradients]}")
    for step in got.gradients.keys() & want.gradients.keys():
        where = f"against {against}: step {step}, gradient of"
        problems += compare_tensors(where, got.gradients[step], want.gradients[step], tolerance)
    problems += compare_tensors(f"against {against}: parameter", got.parameters, want.parameters, tolerance)
    if buffers:
        problems += compare_tensors(f"against {against}: buffer", got.buffers, want.buffers, tolerance)
    return problems


def parity(
    name: str, options: Options, tolerance: float = FP32, torch_tolerance: float | None = None, check_torch: bool = True
) -> list[str]:
    """Trains the named example with Fullshard on this rank and compares; the differences found."""
    example = EXAMPLES[name]
    got = train_sharded(fullshard, example, options)
    plain = replace(options, layout="rows", prefetch=1)
    one_process = reference(name, plain, dist.get_world_size())
    problems = compare(got, one_process, tolerance, "one process", buffers=not example.per_rank)
    if check_torch and example.torch_is_right:
        theirs = pytorch(name, plain, dist.get_world_size(), dist.get_rank())
        allowed = tolerance if torch_tolerance is None else torch_tolerance
        problems += compare(got, theirs, allowed, "PyTorch's fully_shard")
    return problems


def assert_same(problems_by_rank: list[list[str]]) -> None:
    """Fails with every rank's problems, the first of each in full."""
    __tracebackhide__ = True
    lines = [
        f"rank {rank}: {len(problems)} differences, the first:\n  " + "\n  ".join(problems[:6])
        for rank, problems in enumerate(problems_by_rank)
        if problems
    ]
    assert not lines, "\n" + "\n".join(lines)


def live_bytes(units: list[Unit]) -> int:
    """Bytes of gathered units, staging and reduction buffers, counted from their storages, as the ledger must count."""
    total = 0
    for unit in units:
        for bucket, gradients in zip(unit.buckets, unit.gradients, strict=True):
            total += 0 if bucket.full is None else bucket.full.live_bytes
            total += gradients.live_bytes + bucket.kept_bytes
    return total
