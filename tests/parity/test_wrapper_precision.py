"""The wrapper's mixed precision: dtypes that modules, gradients and buffers have, against PyTorch's wrapper."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fullshard
from ways import on_ranks
from wrapped import LIBRARIES, batch, same, train, whole, wrap

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PRECISIONS: dict[str, dict[str, Any]] = {
    "param": {"param_dtype": BF16},
    "param and reduce": {"param_dtype": BF16, "reduce_dtype": FP32},
    "reduce": {"reduce_dtype": BF16},
    "buffer": {"buffer_dtype": FP16},
    "all": {"param_dtype": BF16, "reduce_dtype": BF16, "buffer_dtype": BF16},
    "kept": {"param_dtype": BF16, "keep_low_precision_grads": True},
    "kept reduce": {"reduce_dtype": BF16, "keep_low_precision_grads": True},
    "no root cast": {"param_dtype": BF16, "cast_root_forward_inputs": False},
    "kept, reduced in another": {"param_dtype": BF16, "reduce_dtype": FP32, "keep_low_precision_grads": True},
    "casts": {"param_dtype": BF16, "cast_forward_inputs": True},
}


class Block(nn.Module):
    """A block that notes the dtypes it computes with."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("offset", torch.full((6,), 0.3))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.seen.append((x.dtype, self.linear.weight.dtype, self.offset.dtype, self.count.dtype))
        return self.linear(x.to(self.linear.weight.dtype)).tanh() + self.offset


def blocks() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(Block(), Block(), Block())


def grad_dtypes(model: nn.Module) -> set[torch.dtype]:
    return {p.grad.dtype for p in model.parameters() if p.grad is not None and p.numel()}


def run_precision(library: types.ModuleType, options: dict[str, Any], originals: bool) -> dict[str, Any]:
    mixed = library.MixedPrecision(**options)
    model = blocks()
    model[1] = wrap(library, model[1], mixed_precision=mixed, use_orig_params=originals)
    model = wrap(library, model, mixed_precision=mixed, use_orig_params=originals)
    inner = [model.module[0], model.module[1].module, model.module[2]]
    losses = train(model)
    grads = grad_dtypes(model)
    norm = model.clip_grad_norm_(0.1)
    clipped = grad_dtypes(model)
    shown = whole(library, model)
    state = {k: v.dtype for k, v in model.state_dict().items()}
    with torch.no_grad():
        out = model(batch(9, dist.get_rank()))
    return {
        "losses": losses,
        "seen": [block.seen for block in inner],
        "grads": grads,
        "clipped": clipped,
        "norm": norm,
        "whole": shown,
        "sharded": {p.dtype for p in model.parameters()},
        "state": state,
        "out": out,
    }


@pytest.mark.parametrize(("name", "originals"), [(name, bool(n % 2)) for n, name in enumerate(PRECISIONS)])
@on_ranks
def test_dtypes_and_values_are_pytorchs(name: str, originals: bool) -> None:
    mine, expected = (run_precision(library, PRECISIONS[name], originals) for library in LIBRARIES.values())
    for key in ("seen", "grads", "clipped", "sharded", "state"):
        assert mine[key] == expected[key], (key, mine[key], expected[key])
    assert mine["norm"].dtype == expected["norm"].dtype
    low = any(isinstance(value, torch.dtype) for value in PRECISIONS[name].values())
    tolerance = 2e-2 if low else 1e-5
    torch.testing.assert_close(mine["losses"], expected["losses"], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(mine["norm"], expected["norm"], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(mine["out"], expected["out"], rtol=tolerance, atol=tolerance)
    same(mine["whole"], expected["whole"], tolerance, tolerance)


# Batch norms and other classes that mixed precision leaves alone.


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.inner = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh())
        self.norm = nn.LayerNorm(8)
        self.out = nn.Linear(8, 2)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        self.seen.append(x.dtype)
        return self.out(self.norm(x))


def run_ignored(library: types.ModuleType, ignored: tuple[type[nn.Module], ...] | None, originals: bool) -> Any:
    options: dict[str, Any] = {"param_dtype": BF16, "reduce_dtype": FP32}
    if ignored is not None:
        options["_module_classes_to_ignore"] = ignored
    policy = library.wrap.ModuleWrapPolicy({nn.Sequential})
    model = Normed()
    seen = model.seen
    norms: list[Any] = []

    def note(module: nn.Module, args: Any, out: Tensor) -> None:
        norms.append((type(module).__name__, args[0].dtype, module.weight.dtype, out.dtype))

    for module in (model.inner[1], model.norm):
        module.register_forward_hook(note)
    model = wrap(
        library,
        model,
        auto_wrap_policy=policy,
        mixed_precision=library.MixedPrecision(**options),
        use_orig_params=originals,
    )
    kind = library.FullyShardedDataParallel
    names = [name.replace("_fsdp_wrapped_module.", "") for name, m in model.named_modules() if isinstance(m, kind)]
    losses = train(model)
    return names, seen, norms, losses, whole(library, model)


@pytest.mark.parametrize(("ignored", "originals"), [(None, True), ((nn.BatchNorm1d, nn.LayerNorm), False)])
@on_ranks
def test_ignored_classes_get_instances_in_full_precision(
    ignored: tuple[type[nn.Module], ...] | None, originals: bool
) -> None:
    mine, expected = (run_ignored(library, ignored, originals) for library in LIBRARIES.values())
    assert mine[:3] == expected[:3], (mine[:3], expected[:3])
    torch.testing.assert_close(mine[3], expected[3], rtol=2e-2, atol=2e-2)
    same(mine[4], expected[4], 2e-2, 2e-2)


@on_ranks
def test_state_dicts_hold_buffers_in_their_own_dtype() -> None:
    model = blocks()
    model[1] = wrap(fullshard, model[1], mixed_precision=fullshard.MixedPrecision(), use_orig_params=False)
    mixed = fullshard.MixedPrecision(param_dtype=BF16, buffer_dtype=BF16)
    model = wrap(fullshard, model, mixed_precision=mixed, use_orig_params=False)
    assert model.module[0].offset.dtype == FP32  # before the first forward
    train(model, steps=1)
    found = {name: buffer.dtype for name, buffer in model.named_buffers()}
    assert [found[f"_fsdp_wrapped_module.{i}offset"] for i in ("0.", "1._fsdp_wrapped_module.", "2.")] == [
        BF16,
        FP32,
        BF16,
    ]
    state = model.state_dict()
    assert {state[f"{i}.offset"].dtype for i in range(3)} == {FP32}
    assert {state[f"{i}.count"].dtype for i in range(3)} == {torch.int64}
    assert model.module[0].offset.dtype == BF16  # and the model's are as they were
    state["0.offset"] = torch.full((6,), 0.7)
    model.load_state_dict(state)
    assert model.module[0].offset.dtype == BF16
    torch.testing.assert_close(model.module[0].offset.float(), torch.full((6,), 0.7), rtol=1e-2, atol=1e-2)


@on_ranks
def test_eval_in_full_precision() -> None:
    mixed = fullshard.MixedPrecision(param_dtype=BF16, reduce_dtype=BF16, buffer_dtype=BF16)
    model = blocks()
    model[1] = wrap(fullshard, model[1], mixed_precision=mixed, use_orig_params=True)
    model = wrap(fullshard, model, mixed_precision=mixed, use_orig_params=True, full_precision_in_eval=True)
    train(model, steps=2)
    reference = blocks()
    reference.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})
    seen = model.module[0].seen
    assert seen[-1][:3] == (BF16, BF16, BF16)
    for _ in range(2):
        model.eval()
        with torch.no_grad():
            out = model(batch(5, dist.get_rank()))
        assert seen[-1][:3] == (FP32, FP32, FP32)
        expected = reference(batch(5, dist.get_rank()))
        # The buffers went through bfloat16 and back, as PyTorch's do.
        torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-2)
        shown = whole(fullshard, model)
        model.train()
        train(model, steps=1)
        assert seen[-1][:3] == (BF16, BF16, BF16)
        assert not torch.equal(whole(fullshard, model)["0.linear.weight"], shown["0.linear.weight"])
        reference.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})
    model.eval()
    loss = model(batch(6, dist.get_rank())).square().mean()
    loss.backward()  # a backward in eval mode, in full precision
    assert grad_dtypes(model) == {FP32}


@on_ranks
def test_summoned_parameters_are_in_full_precision() -> None:
    model = wrap(
        fullshard,
        blocks(),
        mixed_precision=fullshard.MixedPrecision(param_dtype=BF16, reduce_dtype=BF16),
        use_orig_params=False,
    )
    initial = blocks().state_dict()
    model(batch(0, 0)).float().sum().backward()
    with fullshard.FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        for name, parameter in model.named_parameters():
            assert parameter.dtype == FP32 and parameter.grad.dtype == FP32
            assert torch.equal(parameter, initial[name])  # bits that bfloat16 would have lost
