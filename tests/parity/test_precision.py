"""Mixed precision: numbers within bf16's rounding, and dtypes as PyTorch's fully_shard has them."""

from __future__ import annotations

import types
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn

import fullshard
from models import EXAMPLES
from training import LAYOUTS, Options, assert_same, compare, parity, reference, train_sharded

both_layouts = pytest.mark.parametrize("layout", LAYOUTS)


@both_layouts
@pytest.mark.parametrize("precision", ["bf16", "bf16_reduce"])
def test_bf16(run_ranks, precision, layout):
    """Computed in bf16 (8 bits of mantissa, so 2**-8 = 4e-3 a rounding), reduced in fp32 or in bf16."""
    assert_same(run_ranks(bf16_parity, Options(layout=layout, precision=precision)))


@both_layouts
@pytest.mark.parametrize("sync", [True, False], ids=["sync", "no_sync"])
def test_bf16_accumulation(run_ranks, sync, layout):
    assert_same(run_ranks(bf16_parity, Options(layout=layout, precision="bf16", micro_batches=3, sync=sync)))


def bf16_parity(options: Options) -> list[str]:
    """Against PyTorch's own within one rounding of bf16, against fp32 training within a few."""
    exact = reference("gpt", replace(options, layout="rows", precision="none"), dist.get_world_size())
    got = train_sharded(fullshard, EXAMPLES["gpt"], options)
    dtypes = {tensor.dtype for tensor in got.parameters.values()}
    problems = [] if dtypes == {torch.float32} else [f"parameters of {dtypes} where float32 is wanted"]
    problems += compare(got, exact, 5e-2, "fp32 in one process")
    if got.losses == exact.losses:
        problems.append("losses equal fp32's to the last bit: nothing was computed in bf16")
    return problems + parity("gpt", options, tolerance=5e-2, torch_tolerance=4e-3)


@both_layouts
def test_reduction_in_fp16(run_ranks, layout):
    """11 bits of mantissa: 5e-4 a rounding, a few of them in a sum over four ranks."""
    options = Options(layout=layout, precision="fp16_reduce")
    assert_same(run_ranks(fp16_parity, options, world=4))


def fp16_parity(options: Options) -> list[str]:
    exact = reference("odd_mlp", Options(), dist.get_world_size())
    got = train_sharded(fullshard, EXAMPLES["odd_mlp"], options)
    if not compare(got, exact, 1e-6, "fp32"):
        return ["equal to fp32 within its rounding: nothing was reduced in fp16"]
    return compare(got, exact, 2e-3, "fp32 in one process")


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
def test_dtypes_as_pytorch_has_them(run_ranks, layout):
    """Inputs in nested containers and keyword arguments, integers, buffers, outputs and gradients."""
    for ours, theirs in run_ranks(dtypes_under_each_policy, layout):
        for name, dtypes in theirs.items():
            assert ours[name] == dtypes, name


def dtypes_under_each_policy(layout: str) -> tuple[dict[str, list[object]], dict[str, list[object]]]:
    ours, theirs = (
        {name: dtypes_heard(library, layout, policy) for name, policy in POLICIES.items()}
        for library in (fullshard, torch_fsdp)
    )
    return ours, theirs
