"""Mixed precision: numbers within bf16's rounding, and dtypes as PyTorch's fully_shard has them."""

from __future__ import annotations

import types
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn

import fullshard
from models import EXAMPLES
from training import LAYOUTS, Options, compare, parity, reference, train_sharded
from ways import on_ranks

both_layouts = pytest.mark.parametrize("layout", LAYOUTS)


@on_ranks
def test_bf16() -> list[str]:
    """Computed in bf16 (8 bits of mantissa, so 2**-8 = 4e-3 a rounding), reduced in fp32."""
    options = Options(layout="flat", precision="bf16")
    exact = reference("gpt", replace(options, layout="rows", precision="none"), dist.get_world_size())
    got = train_sharded(fullshard, EXAMPLES["gpt"], options)
    dtypes = {tensor.dtype for tensor in got.parameters.values()}
    problems = [] if dtypes == {torch.float32} else [f"parameters of {dtypes} where float32 is wanted"]
    problems += compare(got, exact, 5e-2, "fp32 in one process")
    if got.losses == exact.losses:
        problems.append("losses equal fp32's to the last bit: nothing was computed in bf16")
    return problems + parity("gpt", options, tolerance=5e-2, torch_tolerance=4e-3)


@dataclass
class Note:
    x: Tensor
    word: str


class Listener(nn.Module):
    """Writes down the dtypes of what it is given and of its own tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.ones(4))
        self.heard: list[object] = []

    def forward(self, x: Tensor, pack: dict, *, note: Note, index: Tensor, flag: bool = True) -> dict[str, object]:
        tensors = [x, pack["list"][0], pack["tuple"][0], pack["index"], index, self.table, self.linear.weight]
        self.heard = [tensor.dtype for tensor in tensors]
        self.heard += [isinstance(pack["tuple"], tuple), note.word, flag]
        y = nn.functional.linear(x.to(self.linear.weight.dtype), self.linear.weight, self.linear.bias)
        return {"y": y, "nested": [y * 2, (index, "word")]}


def dtypes_heard(library: types.ModuleType, layout: str, policy: dict[str, object]) -> list[object]:
    """What a sharded Listener hears in its forward, what its caller gets back, and the gradients' dtypes."""
    keywords = {"layout": layout} if library is fullshard else {}
    model = library.fully_shard(Listener(), mp_policy=library.MixedPrecisionPolicy(**policy), **keywords)
    x, whole = torch.ones(2, 4, requires_grad=True), torch.ones(2, dtype=torch.int64)
    pack = {"list": [x * 1], "tuple": (x.double(), 3), "index": whole}
    out = model(x, pack, note=Note(x, "kept"), index=whole, flag=False)
    (out["y"].sum() + out["nested"][0].sum()).backward()
    got = [out["y"].dtype, out["nested"][0].dtype, out["nested"][1][0].dtype, x.grad.dtype]
    return [*model.heard, *got, *[(p.dtype, p.grad.dtype) for p in model.parameters()]]


POLICIES = {
    "nothing": {},
    "compute": {"param_dtype": torch.bfloat16},
    "compute_and_reduce": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
    "output": {"param_dtype": torch.bfloat16, "output_dtype": torch.float32},
    "output_only": {"output_dtype": torch.float64},
    "inputs_left_alone": {"param_dtype": torch.bfloat16, "cast_forward_inputs": False},
    "half": {"param_dtype": torch.float16, "reduce_dtype": torch.float16, "output_dtype": torch.bfloat16},
}


@both_layouts
@on_ranks
def test_dtypes_as_pytorch_has_them(layout: str) -> None:
    """Inputs in nested containers and keyword arguments, integers, buffers, outputs and gradients."""
    for name, policy in POLICIES.items():
        assert dtypes_heard(fullshard, layout, policy) == dtypes_heard(torch_fsdp, layout, policy), name


class Normed(nn.Module):
    """A block whose norm is a unit of its own, in fp32, while the rest computes in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)
        self.register_buffer("scale", torch.full((8,), 1.0 + 2.0**-10))
        self.heard: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        hidden = self.up(normed.to(self.up.weight.dtype))
        self.heard = [x.dtype, self.norm.weight.dtype, normed.dtype, self.up.weight.dtype, hidden.dtype]
        return x + self.down(torch.relu(hidden)) * self.scale.to(x.dtype)


def normed_model(library: types.ModuleType, layout: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(Normed(), Normed(), nn.Linear(8, 3))
    keywords = {"layout": layout} if library is fullshard else {}
    low = library.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    full = library.MixedPrecisionPolicy(param_dtype=torch.float32, output_dtype=torch.float32)
    reduced = None if library is fullshard else torch.float32  # what None means here, and in torch from 2.15 on
    last = library.MixedPrecisionPolicy(torch.bfloat16, reduced, output_dtype=torch.float32)
    for block in model[:2]:
        library.fully_shard(block.norm, mp_policy=full, **keywords)
        library.fully_shard(block, mp_policy=low, **keywords)
    library.fully_shard(model[2], mp_policy=last, **keywords)
    return library.fully_shard(model, **keywords)


@on_ranks
def test_norms_in_fp32_within_blocks_in_bf16() -> None:
    """Losses are alike to the last bit: the same dtypes at every operation."""
    results: list[Any] = []
    for library in (fullshard, torch_fsdp):
        model = normed_model(library, "flat")
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
        out = model(x)
        loss = out.square().mean()
        loss.backward()
        dtypes = [*model[0].heard, *model[1].heard, out.dtype, model[0].scale.dtype]
        gradients = [p.grad.full_tensor() for p in model.parameters()]
        dtypes += [gradient.dtype for gradient in gradients]
        results.append((dtypes, loss.item(), gradients))
    ours, theirs = results
    assert ours[:2] == theirs[:2]
    for mine, other in zip(ours[2], theirs[2], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("reduce_dtype", "layout"), [(torch.float32, "rows"), (torch.bfloat16, "flat")])
@on_ranks
def test_gradients_without_sync_are_added_up_in_the_dtype_of_the_reduction(
    reduce_dtype: torch.dtype, layout: str
) -> None:
    """1, and eight times 2**-9: bf16 has 8 bits, so there each addition of 2**-9 to 1 is lost, and fp32 loses none."""
    expected = 1.0 + 8 * 2.0**-9 if reduce_dtype == torch.float32 else 1.0
    policy = fullshard.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    model = fullshard.fully_shard(nn.Linear(4, 4, bias=False), mp_policy=policy, layout=layout)
    model.set_requires_gradient_sync(False)
    sizes = [1.0, *[2.0**-9] * 8]
    for index, size in enumerate(sizes):
        if index == len(sizes) - 1:
            model.set_requires_gradient_sync(True)
        model(torch.full((1, 4), size)).sum().backward()
    grad = model.weight.grad
    whole = grad.full_tensor()
    assert (whole == expected).all() and grad.dtype == torch.float32
