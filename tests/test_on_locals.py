"""Element-wise operations in place on sharded parameters of the rows layout run on their local tensors."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard

from fullshard import fully_shard
from fullshard.forms import row_shard
from fullshard.forms.elementwise import is_elementwise
from ways import on_ranks

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    "AdamW, amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False, amsgrad=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, foreach=False),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1, foreach=False),
}


def sharded() -> nn.Module:
    """Of 5 and 1 rows over the ranks: parts are uneven, and empty."""
    torch.manual_seed(0)
    return fully_shard(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1)))


def trained(make: Callable[[Any], torch.optim.Optimizer]) -> tuple[list[Tensor], int]:
    """Local weights and state after three steps, and how many operations went through DTensor's dispatch."""
    model, calls = sharded(), []
    optimizer, by_torch = make(model.parameters()), row_shard.plain_call
    optimizer.register_step_pre_hook(lambda *_: None)  # a step without hooks is one of local tensors: `plain_step`

    def counted(func: Any, *rest: Any) -> Any:
        calls.append(getattr(func, "__name__", ""))
        return by_torch(func, *rest)

    for step in range(3):
        model(torch.full((2, 3), 1.0 + step)).square().sum().backward()
        with mock.patch.object(row_shard, "plain_call", counted):
            optimizer.step()
        optimizer.zero_grad()
    kept = [*model.parameters(), *(v for state in optimizer.state.values() for v in state.values())]
    in_place = [name for name in calls if name.endswith("_") and is_elementwise(name)]
    return [one.to_local().clone() if isinstance(one, DTensor) else one for one in kept], len(in_place)


@pytest.mark.parametrize("name", OPTIMIZERS)
@on_ranks(world=3)
def test_an_optimizer_computes_what_it_does_through_dtensor(name: str) -> list[str]:
    got, dispatched = trained(OPTIMIZERS[name])
    with mock.patch.object(row_shard, "on_locals", lambda *given: NotImplemented):
        want, through_dtensor = trained(OPTIMIZERS[name])
    problems = [f"{dispatched} of {through_dtensor} operations in place were DTensor's"] * (dispatched > 0)
    problems += ["nothing was DTensor's before"] * (not through_dtensor)
    return problems + [
        f"value {i} differs" for i, pair in enumerate(zip(got, want, strict=True)) if not torch.equal(*pair)
    ]


@on_ranks(world=3)
def test_fused_sgd_which_dtensor_does_not_know() -> list[str]:
    def sgd(fused: bool) -> Callable[[Any], torch.optim.Optimizer]:
        return lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, fused=fused)

    (got, _), (want, _) = trained(sgd(True)), trained(sgd(False))
    return [f"value {i} differs" for i, pair in enumerate(zip(got, want, strict=True)) if not torch.allclose(*pair)]


@on_ranks(world=2)
def test_what_is_split_differently_is_dtensors() -> list[str]:
    """By other rows, not at all, or a sum over ranks: DTensor redistributes, or refuses."""
    problems: list[str] = []
    mesh = init_device_mesh("cpu", (2,))
    weight: Any = sharded()[0].weight
    whole = weight.full_tensor()
    columns = DTensor.from_local(
        torch.ones(5, 2 if dist.get_rank() == 0 else 1), mesh, [Shard(1)], shape=(5, 3), stride=(3, 1)
    )
    sums = DTensor.from_local(torch.ones(5, 3), mesh, [Partial()])
    with torch.no_grad():
        for other, added in ((columns, 1.0), (sums, 2.0)):
            weight.add_(other)
            whole = whole + added
            if not torch.equal(weight.full_tensor(), whole):
                problems.append(f"{other.placements}: {weight.full_tensor()}, wanted {whole}")
        longer = DTensor.from_local(
            torch.ones(3, 3), mesh, [Shard(0)], run_check=False
        )  # 6 rows; rank 0 has 3 of 5, too
        try:
            weight.add_(longer)
            problems.append("a tensor of another shape was added")
        except RuntimeError as error:
            problems += [] if "match" in str(error) else [str(error)]
        for call in (lambda: weight.add_(torch.ones(5, 3)), lambda: torch._foreach_add_([weight], [torch.ones(5, 3)])):
            try:
                call()
                problems.append("a plain tensor was added")
            except Exception as error:
                if "while its unit" not in str(error) and "mixed" not in str(error) and "unit" not in str(error):
                    problems.append(f"{type(error).__name__}: {error}")
    return problems


@on_ranks(world=4)
def test_norms_of_lists_are_those_of_dtensor() -> list[str]:
    """Uneven and empty parts, replicas, split in two ways; of any order. DTensor makes one result of each."""
    problems: list[str] = []
    torch.manual_seed(0)
    meshes = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "fsdp"))
    for mesh in meshes:
        model = fully_shard(nn.Sequential(nn.Linear(3, 9), nn.Linear(9, 1)), mesh=mesh)
        model(torch.ones(2, 3)).square().sum().backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        half = [gradient.to(torch.bfloat16) for gradient in gradients]
        split = [[DTensor.from_local(torch.ones(2, 3) * n, mesh, [Shard(0)] * mesh.ndim)] * 3 for n in (1, 2)]
        sums = [DTensor.from_local(torch.ones(3) * dist.get_rank(), mesh, [Partial()] * mesh.ndim)]
        lists = gradients, half, [*split[0], *split[1]], [*gradients, *half], [*gradients, *sums], sums * 2
        for number, tensors in enumerate(lists):
            for order in (2.0, 1, 3.5):
                tensors = [row_shard.as_row_shard(tensor) for tensor in tensors]
                with torch.no_grad():
                    with mock.patch.object(row_shard, "plain_call", side_effect=row_shard.plain_call) as dispatched:
                        got = torch._foreach_norm(tensors, order)
                    with mock.patch.object(row_shard, "on_locals", lambda *given: NotImplemented):
                        want = torch._foreach_norm(tensors, order)
                    total = torch.linalg.vector_norm(torch.stack(got), order).full_tensor()
                    wanted = torch.linalg.vector_norm(torch.stack(want), order).full_tensor()
                case = f"{mesh.ndim}, list {number}, order {order}"
                if bool(dispatched.called) is not (number > 2):
                    problems.append(f"{case}: dispatched {dispatched.called}")
                for mine, theirs in zip(got, want, strict=True):
                    same = torch.equal(mine.to_local(), theirs.to_local()) and type(mine) is type(theirs)
                    if not same or (mine.placements, mine.dtype) != (theirs.placements, theirs.dtype):
                        problems.append(f"{case}: {mine}, not {theirs}")
                problems += [] if torch.equal(total, wanted) else [f"{case}: {total}, not {wanted}"]
    return problems


@on_ranks(world=3)
def test_the_largest_absolute_value_where_a_rank_has_no_part() -> list[str]:
    """Torch knows none of an empty tensor: that rank would raise, and the others wait for it in the all-reduce."""
    problems: list[str] = []
    for rows in (7, 2, 1):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, rows), nn.Linear(rows, 1))
        whole = copy.deepcopy(model)
        fully_shard(model)
        for each in (whole, model):
            each(torch.ones(2, 3)).square().sum().backward()
        for foreach in (True, False):
            want = nn.utils.clip_grad_norm_(whole.parameters(), 1e9, norm_type=math.inf)
            got: Any = nn.utils.clip_grad_norm_(model.parameters(), 1e9, norm_type=math.inf, foreach=foreach)
            if not torch.allclose(got.full_tensor(), want):
                problems.append(f"{rows} rows, foreach {foreach}: {got.full_tensor()}, not {want}")
    return problems


@on_ranks(world=2)
def test_autograd_hears_of_the_change() -> list[str]:
    """A graph over a sharded parameter itself saved the old values."""
    weight: Any = sharded()[0].weight
    loss = (weight * weight).sum().full_tensor()
    with torch.no_grad():
        weight.mul_(2.0)
    try:
        loss.backward()
        return ["a backward with values that are gone"]
    except RuntimeError as error:
        return [] if "modified by an inplace operation" in str(error) else [str(error)]


def test_which_operations_are_element_wise() -> None:
    yes = ("mul_", "add_", "lerp_", "addcdiv_", "_foreach_lerp_", "_foreach_copy_", "_fused_adamw_", "clamp_", "sqrt_")
    no = (
        "normal_",
        "uniform_",
        "bernoulli_",
        "copy_",
        "__imul__",
        "t_",
        "cumsum_",
        "_foreach_max",
        "resize_",
        "requires_grad_",
    )
    assert [name for name in yes if not is_elementwise(name)] == []
    assert [name for name in no if is_elementwise(name)] == []
