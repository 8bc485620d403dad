"""The wrapper together with checkpointing, compile, copies, casts, tensor parallelism, odd inputs, users' changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import fullshard
from fullshard import FullyShardedDataParallel as FSDP
from fullshard import state_dict as helpers
from parity.both_wrappers import batch, same, train, whole, wrap
from training import assert_same

both = pytest.mark.parametrize("originals", [True, False])
WRAPPINGS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


def blocks() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(Block(), Block(), Block())


def trained(model: nn.Module, **keywords: Any) -> dict[str, Tensor]:
    """The unsharded reference's parameters after training on all ranks' batches."""
    train(model, ranks=list(range(dist.get_world_size())), **keywords)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def clean(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    for part in WRAPPINGS:
        tensors = {name.replace(part, ""): tensor for name, tensor in tensors.items()}
    return tensors


def sharded(originals: bool, model: nn.Sequential | None = None, **keywords: Any) -> Any:
    """The blocks and the model around them, wrapped."""
    model = blocks() if model is None else model
    for i, block in enumerate(model):
        model[i] = wrap(fullshard, block, use_orig_params=originals, **keywords)
    return wrap(fullshard, model, use_orig_params=originals, **keywords)


# Activation checkpointing.


class Recomputing(nn.Module):
    """Calls its block through `torch.utils.checkpoint`."""

    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x.requires_grad_() if x.is_leaf else x, use_reentrant=self.reentrant)


def checkpointed(where: str, reentrant: bool, originals: bool) -> None:
    kind = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
    if where == "inside":
        model = sharded(originals, nn.Sequential(*(checkpoint_wrapper(b, checkpoint_impl=kind) for b in blocks())))
    elif where == "outside":
        model = blocks()
        for i, block in enumerate(model):
            inner = wrap(fullshard, block, use_orig_params=originals)
            model[i] = checkpoint_wrapper(inner, checkpoint_impl=kind)
        model = wrap(fullshard, model, use_orig_params=originals)
    elif where == "applied":
        model = sharded(originals)
        apply_activation_checkpointing(
            model,
            checkpoint_wrapper_fn=lambda m: checkpoint_wrapper(m, checkpoint_impl=kind),
            check_fn=lambda m: isinstance(m, Block),
        )
    else:
        model = blocks()
        for i, block in enumerate(model):
            model[i] = Recomputing(wrap(fullshard, block, use_orig_params=originals), reentrant)
        model = wrap(fullshard, model, use_orig_params=originals)
    train_first_leaf(model)
    found = {name.replace(".inner.", "."): t for name, t in clean(whole(fullshard, model)).items()}
    same(found, trained(blocks()))
    keys = [name.replace(".inner.", ".") for name in model.state_dict()]
    assert keys == list(blocks().state_dict())


def train_first_leaf(model: nn.Module) -> None:
    """As `train`, with inputs that need a gradient: reentrant checkpointing asks for that."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        model(batch(step, dist.get_rank()).requires_grad_()).square().mean().backward()
        optimizer.step()


@both
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("where", ["inside", "outside", "applied", "by function"])
def test_activation_checkpointing(run_ranks, where: str, reentrant: bool, originals: bool) -> None:
    run_ranks(checkpointed, where, reentrant, originals)


# Compiled blocks.


def compiled(originals: bool, backend: str) -> None:
    model = blocks()
    for block in model:
        block.compile(backend=backend)
    model = sharded(originals, model)
    train(model)
    same(whole(fullshard, model), trained(blocks()))


@both
def test_blocks_compiled_before_wrapping(run_ranks, originals: bool) -> None:
    run_ranks(compiled, originals, "aot_eager", timeout=120)


# Copies and casts.


def copied(when: str, originals: bool) -> None:
    model = sharded(originals)
    if when == "after":
        train(model, steps=1)
    before = whole(fullshard, model)
    twin = copy.deepcopy(model)
    same(whole(fullshard, twin), before, 0, 0)
    assert [n for n, _ in twin.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert not {id(p) for p in twin.parameters()} & {id(p) for p in model.parameters()}
    train(model)
    same(whole(fullshard, twin), before, 0, 0)
    train(twin)
    same(whole(fullshard, twin), whole(fullshard, model), 0, 0)
    if when == "before":
        same(whole(fullshard, twin), trained(blocks()))
    assert list(twin.state_dict()) == list(model.state_dict())


@both
@pytest.mark.parametrize("when", ["before", "after"])
def test_deep_copies(run_ranks, when: str, originals: bool) -> None:
    run_ranks(copied, when, originals)


def cast(how: str, originals: bool) -> None:
    change: Callable[[nn.Module], nn.Module] = {
        "to": lambda m: m.to(torch.float64),
        "half": lambda m: m.half(),
        "back": lambda m: m.half().float(),
    }[how]
    model = sharded(originals)
    model(batch(0, 0)).sum().backward() if how == "to" else None
    model.zero_grad()
    change(model)
    dtype = {"to": torch.float64, "half": torch.float16, "back": torch.float32}[how]
    assert {p.dtype for p in model.parameters()} == {dtype}
    train(model, dtype=dtype)
    reference = change(blocks())
    tolerance = 3e-2 if how == "half" else 1e-5
    same(whole(fullshard, model), trained(reference, dtype=dtype), tolerance, tolerance)


@both
@pytest.mark.parametrize("how", ["to", "half", "back"])
def test_casting_the_wrapped_model(run_ranks, how: str, originals: bool) -> None:
    run_ranks(cast, how, originals)


# Inputs and outputs of any form.


@dataclass
class Pair:
    first: Tensor
    second: Any


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, given: Any, *, scale: float = 1.0) -> Any:
        x, y = given["x"], given["rest"][0].first
        return {"out": [self.a(x) * scale, (Pair(self.b(y), "kept"),)], "none": None}


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.entry = nn.Linear(6, 6)
        self.inner = Structured()

    def forward(self, x: Tensor) -> Any:
        x = self.entry(x)
        return self.inner({"x": x, "rest": (Pair(x, 3), "text")}, scale=0.5)


def structured(originals: bool) -> None:
    def loss(out: Any) -> Tensor:
        assert out["none"] is None and out["out"][1][0].second == "kept"
        return (out["out"][0] + out["out"][1][0].first).square().mean()

    model = Outer()
    model.inner = wrap(fullshard, model.inner, use_orig_params=originals)
    model = wrap(fullshard, model, use_orig_params=originals)
    train(model, loss=loss)
    same(whole(fullshard, model), trained(Outer(), loss=loss))


@both
def test_structured_inputs_and_outputs(run_ranks, originals: bool) -> None:
    run_ranks(structured, originals)


def several_roots(originals: bool) -> None:
    first, second = sharded(originals), sharded(originals)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.05, momentum=0.9)
    one, two = blocks(), blocks()
    reference = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.05, momentum=0.9)
    for step in range(3):
        for a, b, opt, ranks in (
            (first, second, optimizer, [dist.get_rank()]),
            (one, two, reference, range(dist.get_world_size())),
        ):
            opt.zero_grad()
            x = torch.cat([batch(step, rank) for rank in ranks])
            (b(a(x)) + b(x)).square().mean().backward()  # the second twice, once after the first
            opt.step()
    same(whole(fullshard, first), dict(one.named_parameters()))
    same(whole(fullshard, second), dict(two.named_parameters()))
    assert first.check_is_root() and second.check_is_root()


@both
def test_several_roots_and_several_forwards(run_ranks, originals: bool) -> None:
    run_ranks(several_roots, originals)


def evaluated(originals: bool) -> None:
    model, reference = sharded(originals), blocks()
    x = batch(0, dist.get_rank())
    for _ in range(2):
        for grad in (False, True):
            with torch.set_grad_enabled(grad):
                torch.testing.assert_close(model.eval()(x), reference.eval()(x))
        with torch.inference_mode():
            torch.testing.assert_close(model(x), reference(x))
    train(model.train())
    same(whole(fullshard, model), trained(reference.train()))


@both
def test_eval_and_no_grad_around_training(run_ranks, originals: bool) -> None:
    run_ranks(evaluated, originals)


# What users change between steps.


def step_after(model: Any, change: Callable[[Any], None]) -> dict[str, Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(batch(0, dist.get_rank())).square().mean().backward()
    change(model)
    optimizer.step()
    optimizer.zero_grad()
    return whole(fullshard, model)


def data_replaced(originals: bool) -> None:
    model = sharded(originals)
    train(model, steps=1)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone().mul_(2)
    doubled = whole(fullshard, model)
    plain = sharded(originals)
    train(plain, steps=1)
    same(doubled, {name: 2 * tensor for name, tensor in whole(fullshard, plain).items()})
    model(batch(0, 0)).sum().backward()  # and forward computes with them
    reference = blocks()
    reference.load_state_dict(doubled)
    torch.testing.assert_close(model(batch(0, 0)), reference(batch(0, 0)))


@both
def test_replaced_data_is_taken_over(run_ranks, originals: bool) -> None:
    run_ranks(data_replaced, originals)


def data_refused(originals: bool) -> None:
    model = sharded(originals)
    train(model, steps=1)
    victim = next(p for p in model.parameters() if p.numel())
    victim.data = torch.zeros(3, 3)
    with pytest.raises(ValueError, match=r"(?s)replaced.*parameter: +\S*(up|down)\."):
        model(batch(0, 0))


@both
def test_data_that_does_not_fit_is_refused_by_name(run_ranks, originals: bool) -> None:
    run_ranks(data_refused, originals)


def gradients_replaced(originals: bool) -> None:
    def negate(model: Any) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad = -parameter.grad.clone()

    start = whole(fullshard, sharded(originals))
    usual = step_after(sharded(originals), lambda model: None)
    turned = step_after(sharded(originals), negate)
    same(turned, {name: 2 * start[name] - usual[name] for name in start}, 1e-5, 1e-5)

    model, plain = sharded(originals), sharded(originals)  # a gradient of the user's is added to by the next backward
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for one in (model, plain):
        one(batch(0, dist.get_rank())).square().mean().backward()
    expected = whole_gradients(plain)
    for name, grad in whole_gradients(model).items():
        torch.testing.assert_close(grad, expected[name] + 1)


def whole_gradients(model: nn.Module) -> dict[str, Tensor]:
    with FSDP.summon_full_params(model, with_grads=True):
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@both
def test_replaced_gradients_count(run_ranks, originals: bool) -> None:
    run_ranks(gradients_replaced, originals)


def reassigned(originals: bool) -> None:
    model = sharded(originals)
    train(model, steps=1)
    inner = model.module[1].module
    if originals:
        inner.up.weight = nn.Parameter(torch.full((9, 6), 0.1))
    else:
        inner._flat_param = nn.Parameter(torch.full_like(inner._flat_param, 0.1))
    out = model(batch(0, 0))
    found = whole(fullshard, model)
    assert torch.equal(found["1.up.weight"], torch.full((9, 6), 0.1))
    reference = blocks()
    reference.load_state_dict(found)
    torch.testing.assert_close(out, reference(batch(0, 0)))
    train(model, steps=1)
    assert not torch.equal(whole(fullshard, model)["1.up.weight"], found["1.up.weight"])
    if originals:
        inner.up.weight = nn.Parameter(torch.zeros(4, 4))
        said = r"1\._fsdp_wrapped_module\.up\.weight|up\.weight"
    else:
        inner.up.weight = nn.Parameter(torch.zeros(9, 6))  # lies in the flat parameter: cannot be taken from here
        said = r"up\.weight"
    with pytest.raises(ValueError, match=said):
        model(batch(0, 0))


@both
def test_a_reassigned_parameter_is_taken_over_or_refused(run_ranks, originals: bool) -> None:
    run_ranks(reassigned, originals)


# Tensor parallelism within the wrapper: 2 x 2 ranks, against one process.


class Even(nn.Module):
    """A block whose hidden width two tensor-parallel ranks share evenly; its rows do not divide by two once more."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def even_blocks() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(Even(), Even(), nn.Linear(6, 3))


def tensor_parallel_of(originals: bool, with_mesh: bool = True) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = even_blocks()
    for block in model[:2]:
        parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    given = {"device_mesh": mesh["data"]} if with_mesh else {"process_group": mesh["data"].get_group()}
    return wrap(fullshard, model, use_orig_params=originals, auto_wrap_policy={Even}, **given)


def tensor_parallel(originals: bool, folder: str) -> list[str]:
    wrapper = fullshard.FullyShardedDataParallel
    model, plain, problems = tensor_parallel_of(originals).double(), even_blocks().double(), []
    adamw = [torch.optim.AdamW(one.parameters(), lr=0.02) for one in (model, plain)]
    data = dist.get_rank() // 2

    def step(one, optimizer, x, clip):
        loss = one(x).square().mean()
        loss.backward()
        norm = clip(0.05)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item(), norm.item()

    def steps(start, count, one=model, optimizer=adamw[0]):
        for number in range(start, start + count):
            random = torch.Generator().manual_seed(number)
            batches = [torch.randn(4, 6, generator=random, dtype=torch.float64) for _ in range(2)]
            want = step(plain, adamw[1], torch.cat(batches), lambda m: nn.utils.clip_grad_norm_(plain.parameters(), m))
            loss, norm = step(one, optimizer, batches[data], one.clip_grad_norm_)
            both_losses = torch.tensor(loss, dtype=torch.float64)
            dist.all_reduce(both_losses)
            got = (both_losses.item() / 4, norm)
            for mine, theirs in zip(got, want, strict=True):
                if abs(mine - theirs) > 1e-10 * abs(theirs):
                    problems.append(f"step {number}: {mine}, wanted {theirs}")

    def same(what, values):
        for name, parameter in plain.named_parameters():
            value = values[name]
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            if whole.shape != parameter.shape or not torch.allclose(whole, parameter, rtol=1e-10, atol=1e-12):
                problems.append(f"{what}: {name}")

    steps(0, 2)
    state = model.state_dict()
    same("FULL", state)
    problems.extend(name for name, value in state.items() if isinstance(value, DTensor))
    with wrapper.summon_full_params(model):
        same("summoned", dict(model.named_parameters()))
        if not isinstance(model.module[0].module.up.weight, DTensor):
            problems.append("not shown as the DTensor it was")
        with torch.no_grad():
            model.module[0].module.up.weight.mul_(2)
            plain[0].up.weight.mul_(2)
    steps(2, 1)
    with wrapper.state_dict_type(model, fullshard.StateDictType.SHARDED_STATE_DICT):
        sharded = model.state_dict()
        same("SHARDED", sharded)
        saved = {"model": sharded, "optim": wrapper.optim_state_dict(model, adamw[0])}
        dcp.save(saved, checkpoint_id=folder)
        again = tensor_parallel_of(not originals).double()
        optimizer = torch.optim.AdamW(again.parameters(), lr=0.02)
        loaded = helpers.get_state_dict(again, optimizer)
        into = {"model": loaded[0], "optim": loaded[1]}
        dcp.load(into, checkpoint_id=folder)
        helpers.set_state_dict(again, optimizer, model_state_dict=into["model"], optim_state_dict=into["optim"])
    steps(3, 2, again, optimizer)
    full = wrapper.optim_state_dict(again, optimizer)
    for i, (name, parameter) in enumerate(plain.named_parameters()):
        for key in ("exp_avg", "exp_avg_sq"):
            if not torch.allclose(full["state"][name][key], adamw[1].state[parameter][key], rtol=1e-9, atol=1e-14):
                problems.append(f"{key} of {name} ({i})")
    third = tensor_parallel_of(originals).double()
    third.load_state_dict(again.state_dict())
    optimizer = torch.optim.AdamW(third.parameters(), lr=0.02)
    optimizer.load_state_dict(wrapper.optim_state_dict_to_load(third, optimizer, full))
    steps(5, 2, third, optimizer)
    return problems


@both
def test_tensor_parallel_parameters(run_ranks, originals: bool, tmp_path) -> None:
    assert_same(run_ranks(tensor_parallel, originals, str(tmp_path / "checkpoint"), world=4))


def over_a_group(originals: bool) -> None:
    """Without a mesh of both kinds there are whole state dicts, and sharded ones are refused with the remedy."""
    model = tensor_parallel_of(originals, with_mesh=False)
    model(torch.ones(2, 6)).sum().backward()
    assert all(not isinstance(value, DTensor) for value in model.state_dict().values())
    fullshard.FullyShardedDataParallel.set_state_dict_type(model, fullshard.StateDictType.SHARDED_STATE_DICT)
    with pytest.raises(fullshard.CheckpointError, match="device_mesh"):
        model.state_dict()


@both
def test_tensor_parallel_parameters_over_a_process_group(run_ranks, originals: bool) -> None:
    run_ranks(over_a_group, originals, world=4)


def over_every_other_rank(originals: bool) -> None:
    """SHARDED state dicts name global ranks: here those of a group of every other one."""
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = pairs[dist.get_rank() % 2]
    models = []
    for seed in (5, 6):
        torch.manual_seed(seed)
        models.append(wrap(fullshard, nn.Linear(5, 3), process_group=mine, use_orig_params=originals))
        FSDP.set_state_dict_type(models[-1], fullshard.StateDictType.SHARDED_STATE_DICT)
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        FSDP.set_state_dict_type(model, fullshard.StateDictType.FULL_STATE_DICT)
    want, got = (model.state_dict() for model in models)
    assert all(torch.equal(want[name], got[name]) for name in want)


@both
def test_sharded_state_over_a_part_of_the_ranks(run_ranks, originals: bool) -> None:
    run_ranks(over_every_other_rank, originals, world=4)


def copied_with_cast_buffers(originals: bool) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    mixed = fullshard.MixedPrecision(buffer_dtype=torch.float64)
    model = wrap(fullshard, model, mixed_precision=mixed, use_orig_params=originals)
    assert model.check_is_root()  # settles the root, which casts buffers
    twin = copy.deepcopy(model)
    assert twin.module[1].running_mean.dtype == torch.float64
    assert twin.state_dict()["1.running_mean"].dtype == torch.float32


@both
def test_copies_know_the_dtypes_that_buffers_had(run_ranks, originals: bool) -> None:
    run_ranks(copied_with_cast_buffers, originals)
