"""Dtypes of reductions and of `.grad`: the rules of torch 2.15 on every torch, and on 2.15 compared with its own."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn

import fullshard
from fullshard.api.functional import reduce_dtype
from fullshard.torch_private.releases import REDUCES_AS_COMPUTED
from ways import on_ranks

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64


class Layer(nn.Module):
    """A linear layer that computes in its weight's dtype, whatever the bias has."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.bias = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x.to(self.weight.dtype), self.weight) + self.bias


class Reduce:
    """A reduce-scatter that notes the dtypes it is given."""

    def __init__(self) -> None:
        self.seen: list[torch.dtype] = []

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> None:
        self.seen.append(input_tensor.dtype)
        whole = input_tensor.clone()
        dist.all_reduce(whole, group=group)
        if op == dist.ReduceOp.AVG:
            whole /= dist.get_world_size()
        output_tensor.copy_(whole.view(dist.get_world_size(), -1)[dist.get_rank()].view_as(output_tensor))


def setting(*dtypes: Any) -> Callable[[nn.Module], None]:
    """Sets `grad_dtype` of weight and bias; "-": not."""

    def prepare(model: nn.Module) -> None:
        for parameter, dtype in zip(model.parameters(), dtypes, strict=True):
            if dtype != "-":
                parameter.grad_dtype = dtype

    return prepare


def cast(model: nn.Module) -> None:
    model.bfloat16()


def assign(model: nn.Module) -> None:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


# Policy; what happens before and after fully_shard; dtypes of reductions, of `.grad` and of `.grad_dtype`.
CASES: dict[str, tuple[dict[str, Any], Any, Any, Any, Any, Any]] = {
    "unset": ({"param_dtype": BF16}, None, None, FP32, [FP32, FP32], [FP32, FP32]),
    "low parameters": ({}, cast, None, BF16, [BF16, BF16], [BF16, BF16]),
    "low parameters, computed in fp32": ({"param_dtype": FP32}, cast, None, BF16, [BF16, BF16], [BF16, BF16]),
    "asked for": ({"param_dtype": BF16, "reduce_dtype": BF16}, None, None, BF16, [FP32, FP32], [FP32, FP32]),
    "any": ({"param_dtype": BF16}, setting(None, None), None, BF16, [BF16, BF16], [None, None]),
    "one of any": ({"param_dtype": BF16}, setting(None, "-"), None, FP32, [FP32, FP32], [None, FP32]),
    "low": ({}, setting(BF16, BF16), None, BF16, [BF16, BF16], [BF16, BF16]),
    "low, reduced in fp32": ({"reduce_dtype": FP32}, setting(BF16, BF16), None, FP32, [BF16, BF16], [BF16, BF16]),
    "any, reduced in bf16": ({"reduce_dtype": BF16}, setting(None, None), None, BF16, [BF16, BF16], [None, None]),
    "high of one": ({}, lambda m: (cast(m), setting(FP32, "-")(m)), None, FP32, [FP32, BF16], [FP32, BF16]),
    "set afterwards": ({}, cast, setting(FP32, FP32), FP32, [FP32, FP32], [FP32, FP32]),
    "set, cast afterwards": ({}, setting(FP64, FP64), cast, FP64, [FP64, FP64], [FP64, FP64]),
    "set afterwards, then cast": (
        {},
        None,
        lambda m: (setting(FP64, FP64)(m), cast(m)),
        FP64,
        [FP64, FP64],
        [FP64, FP64],
    ),
    "set, cast, not set": ({}, None, cast, BF16, [BF16, BF16], [BF16, BF16]),
    "set, assigned afterwards": ({}, setting(BF16, BF16), assign, BF16, [BF16, BF16], [BF16, BF16]),
}


def run(library: types.ModuleType, name: str, **settings: Any) -> tuple[Any, ...]:
    policy, before, after, *_ = CASES[name]
    model = Layer()
    if before is not None:
        before(model)
    library.fully_shard(model, mp_policy=library.MixedPrecisionPolicy(**policy), **settings)
    if after is not None:
        after(model)
    comm = Reduce()
    model.set_custom_reduce_scatter(comm)
    for step in range(2):  # set, then added to
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
        model(x).float().square().mean().backward()
    grads = [p.grad for p in model.parameters()]
    dtypes = set(comm.seen), [g.dtype for g in grads], [p.grad_dtype for p in model.parameters()]
    return *dtypes, [g.full_tensor() for g in grads] if library is torch_fsdp or not settings else None


@pytest.mark.parametrize("layout", ["rows", "flat"])
@on_ranks
def test_gradients_are_reduced_in_grad_dtype(layout: str) -> None:
    """And as PyTorch's are, where it has these rules."""
    for name, case in CASES.items():
        ours = run(fullshard, name, **({} if layout == "rows" else {"layout": layout}))
        assert ours[:3] == ({case[3]}, *case[4:]), name
        if layout == "rows" and not REDUCES_AS_COMPUTED:
            theirs = run(torch_fsdp, name)
            assert ours[:3] == theirs[:3], name
            for mine, other in zip(ours[3], theirs[3], strict=True):
                torch.testing.assert_close(mine, other, rtol=2e-2, atol=1e-2, msg=name)


@on_ranks
def test_a_copy_keeps_grad_dtype() -> None:
    model = Layer()
    setting(FP64, None)(model)
    copy_of_it = copy.deepcopy(fullshard.fully_shard(model, mp_policy=fullshard.MixedPrecisionPolicy(BF16)))
    copy_of_it(torch.ones(2, 4)).float().sum().backward()
    grads = [(p.grad_dtype, p.grad.dtype) for p in copy_of_it.parameters()]
    assert grads == [(FP64, FP64), (None, FP64)]  # one unit: both are reduced in the promoted dtype


@on_ranks
def test_one_buffer_has_one_grad_dtype() -> None:
    """In a unit, and on all ranks."""
    model = fullshard.fully_shard(Layer())
    model.bias.grad_dtype = BF16
    with pytest.raises(fullshard.ConfigError, match=r"(?s)(?=.*grad_dtype)(?=.*bias).*different values of"):
        model(torch.ones(2, 4))
    model = Layer()
    if dist.get_rank():
        setting(BF16, BF16)(model)
    fullshard.fully_shard(model)
    with pytest.raises(fullshard.DivergenceError, match="reduced in bfloat16"):
        model(torch.ones(2, 4)).sum().backward()


def keeps_bias(parameter: nn.Parameter) -> torch.dtype | None:
    return parameter.dtype if parameter.dim() == 1 else None


@on_ranks
def test_a_parameter_may_keep_its_dtype() -> None:
    """Computed in its own dtype, beside others in `param_dtype`; as PyTorch's from 2.15 on."""
    results = []
    for library in (fullshard, fullshard if REDUCES_AS_COMPUTED else torch_fsdp):
        asked: list[tuple[int, ...]] = []

        def override(parameter: nn.Parameter, asked: Any = asked) -> torch.dtype | None:
            asked.append(tuple(parameter.shape))
            return keeps_bias(parameter)

        model, dtypes = Layer(), []
        policy = library.MixedPrecisionPolicy(param_dtype=BF16, param_dtype_override_fn=override)
        library.fully_shard(model, mp_policy=policy)
        comm = Reduce()
        model.set_custom_reduce_scatter(comm)
        model.register_forward_pre_hook(lambda m, _, dtypes=dtypes: dtypes.extend(p.dtype for p in m.parameters()))
        model(torch.randn(2, 4, generator=torch.Generator().manual_seed(dist.get_rank()))).square().mean().backward()
        assert asked == [(4, 4), (4,)]
        results.append((dtypes, set(comm.seen), [p.grad.full_tensor() for p in model.parameters()]))
    ours, theirs = results
    assert ours[:2] == ([BF16, FP32], {FP32})
    for mine, other in zip(ours[2], theirs[2], strict=True):
        torch.testing.assert_close(mine, other)


@on_ranks
def test_what_an_override_may_not_answer() -> None:
    for param_dtype, answer in ((BF16, FP64), (BF16, "bf16"), (None, BF16)):
        policy = fullshard.MixedPrecisionPolicy(param_dtype, param_dtype_override_fn=lambda _, a=answer: a)
        model = Layer()
        with pytest.raises(ValueError, match="weight") as error:
            fullshard.fully_shard(model, mp_policy=policy)
        assert "param_dtype_override_fn returned" in str(error.value) and type(model.weight) is nn.Parameter
    with pytest.raises(ValueError, match="callable"):
        fullshard.MixedPrecisionPolicy(BF16, param_dtype_override_fn=BF16)
    with pytest.raises(TypeError):
        fullshard.MixedPrecisionPolicy(BF16, None, None, True, keeps_bias)


def test_adopted_programs_reduce_as_the_installed_torch(run_ranks, monkeypatch):
    monkeypatch.setattr(reduce_dtype._Rule, "as_computed", reduce_dtype._Rule.as_computed)  # put back afterwards
    reduce_dtype.follow_torch()
    for ours, theirs in run_ranks(adopted):
        assert ours == theirs == {BF16 if REDUCES_AS_COMPUTED else FP32}


def adopted() -> tuple[set[torch.dtype], set[torch.dtype]]:
    before = reduce_dtype._Rule.as_computed
    reduce_dtype.follow_torch()  # also where ranks are processes
    try:
        return run(fullshard, "unset")[0], run(torch_fsdp, "unset")[0]
    finally:
        reduce_dtype._Rule.as_computed = before


@pytest.mark.parametrize("rank", [0, 1])
def test_a_result_that_changes_is_said_once(fake_world, rank):
    fake_world(2, rank)
    assert logged() == (1 if REDUCES_AS_COMPUTED and rank == 0 else 0)


def logged() -> int:
    import logging

    records: list[Any] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("fullshard").addHandler(handler)
    reduce_dtype._Rule.logged = False
    try:
        for _ in range(2):
            fullshard.fully_shard(Layer(), mp_policy=fullshard.MixedPrecisionPolicy(BF16))
        fullshard.fully_shard(Layer(), mp_policy=fullshard.MixedPrecisionPolicy(BF16, BF16))
    finally:
        logging.getLogger("fullshard").removeHandler(handler)
    return sum("reduce_dtype" in record.getMessage() for record in records)
