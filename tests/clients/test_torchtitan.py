"""torchtitan's use of `fully_shard`: the calls of its helper functions, in their order, on adopted ranks.

Its programs take the names from `torch.distributed.fsdp`; so do these. Every run is held to one process on the batches
of all ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from decoder import Decoder, loss_of, plain_decoder, tokens_of
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd, reduce_scatter_tensor_autograd
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import fullshard
from ways import on_ranks

STEPS, MICRO, MAX_NORM = 3, 2, 0.5
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


# What torchtitan does to a model.


def parallelized(model: Any, *, policy: str = "default", ac: str = "none", compiled: bool = False, **given: Any) -> Any:
    """`apply_ac`, `apply_compile` and `apply_fsdp`, in this order."""
    for number, block in list(model.layers.named_children()):
        block = checkpointed(block, ac)
        if compiled:
            block = torch.compile(block, backend="aot_eager", fullgraph=True)
        model.layers.register_module(number, block)
    return sharded(model, policy, **given)


def checkpointed(block: nn.Module, ac: str) -> nn.Module:
    if ac == "full":
        return checkpoint_wrapper(block, preserve_rng_state=False)
    if ac == "selective":

        def choose(context: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
            kept = operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
            return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

        contexts = functools.partial(create_selective_checkpoint_contexts, choose)
        return checkpoint_wrapper(block, context_fn=contexts, preserve_rng_state=False)
    return block


def sharded(
    model: Any,
    policy: str = "default",
    param_dtype: torch.dtype = torch.float32,
    apart: bool = False,
    experts_mesh: Any = None,
    override: Callable[[nn.Parameter], torch.dtype | None] | None = None,
) -> Any:
    """`apart`: the head is a unit of its own; `experts_mesh`: of the experts, whose divisor is the data ranks'.

    Experts that have no mesh of their own are cut on their second dim, as where there are more ranks than experts.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    precision = MixedPrecisionPolicy(param_dtype, torch.float32, param_dtype_override_fn=override)
    config: dict[str, Any] = {"mesh": mesh, "mp_policy": precision}
    reshard = policy != "never"
    fully_shard(model.tok_embeddings, **config, reshard_after_forward=reshard)
    for block in model.layers.values():
        if block.moe_enabled:
            columns = None if experts_mesh is not None else lambda _: Shard(1)
            apart_from = {**config, "mesh": experts_mesh or mesh, "shard_placement_fn": columns}
            fully_shard(block.moe.experts, **apart_from, reshard_after_forward=reshard)
            block.moe.experts.set_gradient_divide_factor(dist.get_world_size())
        fully_shard(block, **config, reshard_after_forward=reshard)
    if apart:
        fully_shard(model.norm, **config)
        fully_shard(model.output, **config)
    else:
        fully_shard([model.norm, model.output], **config, reshard_after_forward=policy == "always")
    return fully_shard(model, **config)


def prefetched(model: Any) -> None:
    """`apply_moe_ep_tp`'s lists: each block gathers the next one and its experts, forwards and backwards."""
    blocks = list(model.layers.values())

    def with_experts(block: Any) -> list[Any]:
        return [block, block.moe.experts] if block.moe_enabled else [block]

    model.tok_embeddings.set_modules_to_forward_prefetch([blocks[0]])
    for block, following in zip(blocks, [*blocks[1:], None], strict=True):
        block.set_modules_to_forward_prefetch(with_experts(following) if following else [model.norm, model.output])
    blocks.reverse()
    model.output.set_modules_to_backward_prefetch([blocks[0]])
    for block, following in zip(blocks, [*blocks[1:], None], strict=True):
        block.set_modules_to_backward_prefetch(with_experts(following) if following else [model.tok_embeddings])


def materialized(model: Any) -> Any:
    """Of a model on meta that is sharded: values drawn by every rank for what it owns."""
    model.to_empty(device="cpu")
    with torch.no_grad():
        torch.manual_seed(10 + dist.get_rank())
        model.init_weights()
    model.train()
    return model


def clipped(parameters: list[Any], max_norm: float = MAX_NORM) -> Tensor:
    """`clip_grad_norm_` of its `distributed/utils.py`."""
    grads = [p.grad for p in parameters if p.grad is not None]
    total = torch.nn.utils.get_total_norm(grads, 2.0, False, True)
    total = total.full_tensor() if hasattr(total, "full_tensor") else total
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total, True)
    return total


class ModelWrapper(Stateful):
    """Takes the state dict once and saves it again and again: its tensors have to stay those that train."""

    def __init__(self, model: nn.Module) -> None:
        self.model = [model]
        self.cache_state_dict = self._get_state_dict()

    def _get_state_dict(self) -> dict[str, Any]:
        return {name: value for state in map(get_model_state_dict, self.model) for name, value in state.items()}

    def state_dict(self) -> dict[str, Any]:
        return self.cache_state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        options = StateDictOptions(strict=False)
        load = functools.partial(set_model_state_dict, model_state_dict=state_dict, options=options)
        list(map(load, self.model))
        self.cache_state_dict = self._get_state_dict()


class OptimizersContainer(Stateful):
    """One optimizer a part of the model, as one, with flat names."""

    def __init__(self, model: nn.Module) -> None:
        self.model_parts = [model]
        self.optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, foreach=True)]

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        found = map(functools.partial(get_optimizer_state_dict, options=FLAT), self.model_parts, self.optimizers)
        return {name: value for state in found for name, value in state.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        load = functools.partial(set_optimizer_state_dict, optim_state_dict=state_dict, options=FLAT)
        list(map(load, self.model_parts, self.optimizers))


# One process.


def twin(model: Any, **settings: Any) -> Any:
    """The unsharded model with the same values. Collective."""
    plain = plain_decoder(**settings)
    found = {clean(name): p.full_tensor().detach() for name, p in model.named_parameters()}
    plain.load_state_dict(found)
    return plain


def clean(name: str) -> str:
    """Without what wrappers of blocks put into names."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


def same(model: Any, plain: Any, what: Callable[[Any], Any] = lambda p: p, **tolerance: Any) -> None:
    """Whole values, or gradients, of both."""
    ours = {clean(name): what(p).full_tensor() for name, p in model.named_parameters()}
    theirs = {name: what(p) for name, p in plain.named_parameters()}
    torch.testing.assert_close(ours, theirs, **{"rtol": 1e-4, "atol": 1e-6, **tolerance})


def gradient(parameter: Any) -> Any:
    return parameter.grad


def mean_over_ranks(value: Tensor) -> Tensor:
    value = value.detach().clone()
    dist.all_reduce(value)
    return value / dist.get_world_size()


def backward_of_all(plain: Any, step: int, loss: Callable[[Any, Tensor], Tensor] = loss_of) -> Tensor:
    """Gradients of one process, of the mean over ranks; the loss."""
    total = torch.zeros(())
    for rank in range(world := dist.get_world_size()):
        one = loss(plain, tokens_of(step, rank)) / world
        one.backward()
        total += one.detach()
    return total


def step_of(*optimizers: Any) -> None:
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


TRAININGS = [("default", "none", False), ("always", "full", False), ("never", "selective", False)]
TRAININGS += [("default", "full", True), ("default", "none", True)]


@pytest.mark.parametrize(("policy", "ac", "compiled"), TRAININGS)
@on_ranks(by="run_adopted")
def test_trains_as_one_process(policy, ac, compiled):
    """Made on meta; gradients added up in shards over micro-batches, each reduced; clipped by the whole norm."""
    with torch.device("meta"):
        model: Any = Decoder()
    model = materialized(parallelized(model, policy=policy, ac=ac, compiled=compiled))
    assert isinstance(model, fullshard.FSDPModule) and isinstance(model.layers["1"], fullshard.FSDPModule)
    plain = twin(model)
    optimizers = [OptimizersContainer(one) for one in (model, plain)]
    for step in range(STEPS):
        for seed in range(step * MICRO, step * MICRO + MICRO):
            ours = loss_of(model, tokens_of(seed, dist.get_rank()))
            (ours / MICRO).backward()
            theirs = backward_of_all(plain, seed, lambda m, t: loss_of(m, t) / MICRO)
            torch.testing.assert_close(mean_over_ranks(ours) / MICRO, theirs, rtol=1e-5, atol=1e-6)
        norms = [clipped(list(one.parameters())) for one in (model, plain)]
        torch.testing.assert_close(*norms, rtol=1e-4, atol=1e-6)
        assert norms[0] > MAX_NORM or step
        step_of(*optimizers)
    same(model, plain)


@pytest.mark.parametrize("but_norms", [False, True])
@on_ranks(by="run_adopted")
def test_bfloat16_is_gathered_and_float32_reduced(but_norms):
    """To the bit: bfloat16 gradients of two ranks, of the same computation, added in float32.

    Norms stay in float32 by `param_dtype_override_fn`; and a request for symmetric memory, of which a CPU has none,
    changes nothing.
    """
    given = {"override": lambda parameter: parameter.dtype if parameter.dim() == 1 else None} if but_norms else {}
    model, plain = sharded(plain_decoder(), param_dtype=torch.bfloat16, **given), plain_decoder()
    if but_norms:
        model.set_symm_mem_for_comm()
    loss_of(model, tokens_of(0, dist.get_rank())).backward()
    for rank in range(2):
        cast = plain_decoder().to(torch.bfloat16)
        cast.angles.data = plain.angles
        for norm in [module for module in cast.modules() if but_norms and isinstance(module, nn.RMSNorm)]:
            norm.float()
        loss_of(cast, tokens_of(0, rank)).backward()
        for parameter, other in zip(plain.parameters(), cast.parameters(), strict=True):
            added = other.grad.float() / 2
            parameter.grad = added if parameter.grad is None else parameter.grad + added
    same(model, plain, gradient, rtol=0, atol=0)


@pytest.mark.parametrize("ep", [1, 2])
@on_ranks(by="run_adopted")
def test_experts_on_a_mesh_of_their_own_with_lists_of_what_comes_next(ep):
    """`ep` ranks hold different experts of which each gets the tokens of all; the divisor is the data ranks'."""
    model, plain = plain_decoder(experts=True), plain_decoder(experts=True)
    experts_mesh = None
    if ep > 1:
        mesh = init_device_mesh("cpu", (2 // ep, ep), mesh_dim_names=("dp_shard_mod_ep", "ep"))
        experts_mesh = mesh["dp_shard_mod_ep"]
        for block in list(model.layers.values())[1:]:
            over_ranks(block.moe, mesh["ep"])
    parallelized(model, experts_mesh=experts_mesh)
    prefetched(model)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-2, eps=1e-3, foreach=False) for one in (model, plain)]
    for step in range(STEPS):
        with fullshard.record_events() as events:
            loss_of(model, tokens_of(step, dist.get_rank())).backward()
        if step:
            ahead = [event.unit for event in events if event.verb == "gather"]
            assert ahead.index("layers.1.moe.experts") < ahead.index("layers.2"), ahead
        backward_of_all(plain, step)
        same(model, plain, gradient)
        apart = [[], []]
        for name, parameter in model.named_parameters():
            apart["ep" in parameter.device_mesh.mesh_dim_names].append(parameter)
            assert ("ep" in parameter.device_mesh.mesh_dim_names) == (ep > 1 and ".experts." in name)
        norms = [torch.nn.utils.get_total_norm([p.grad for p in some]) for some in apart if some]
        total = torch.stack([norm.full_tensor() for norm in norms]).norm()
        for some in apart:
            torch.nn.utils.clip_grads_with_norm_(some, MAX_NORM, total)
        torch.testing.assert_close(total, clipped(list(plain.parameters())), rtol=1e-4, atol=1e-6)
        step_of(*optimizers)
    same(model, plain)


def over_ranks(moe: Any, mesh: Any) -> None:
    """Expert parallelism: each rank holds some, and all tokens come to it."""
    for name, parameter in list(moe.experts.named_parameters()):
        moe.experts.register_parameter(name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))

    def around(experts: Any, flat: Tensor, weights: Tensor) -> Tensor:
        group = mesh.get_group()
        everybody = all_gather_tensor_autograd(flat, 0, group).wait()
        mine = all_gather_tensor_autograd(weights, 0, group).wait().chunk(mesh.size(), 1)[mesh.get_local_rank()]
        return reduce_scatter_tensor_autograd(experts(everybody, mine), "sum", 0, group).wait()

    moe.around = around


@on_ranks(by="run_adopted")
def test_losses_by_tokens_with_gradients_that_are_not_divided():
    """`disable_fsdp_gradient_division`: sums over tokens, divided by how many all ranks have."""
    model, plain = parallelized(plain_decoder()), plain_decoder()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
    for step in range(2):
        samples = [1 + step, 3]
        parts = [tokens_of(step, rank, samples[rank]) for rank in range(2)]
        count = sum(part[:, 1:].numel() for part in parts)
        (loss_of(model, parts[dist.get_rank()], "sum") / count).backward()
        (loss_of(plain, torch.cat(parts), "sum") / count).backward()
        same(model, plain, gradient)
        model.zero_grad(), plain.zero_grad()


@pytest.mark.parametrize("detached", [False, True], ids=["one graph", "cut before the head"])
@on_ranks(by="run_adopted")
def test_a_loss_in_chunks_gathers_the_head_once(detached):
    """The head gathered once and reduced once; with the graph cut, what is before it gets the summed gradient."""
    model, plain = parallelized(plain_decoder(), apart=True), plain_decoder()
    model.skip_output = True
    head = model.output
    head.set_reshard_after_forward(False, recurse=False)
    for step in range(STEPS):
        tokens = tokens_of(step, dist.get_rank())
        with fullshard.record_events() as events:
            hidden = model(tokens[:, :-1])
            cut = hidden.detach().requires_grad_() if detached else hidden
            head.unshard()
            head.set_reshard_after_backward(False)
            if detached:
                head.set_requires_gradient_sync(False)
            total: Any = 0
            for number in range(chunks := 3):
                rows = slice(2 * number, 2 * number + 2)
                scores = head(cut[:, rows]).flatten(0, 1)
                loss = nn.functional.cross_entropy(scores, tokens[:, 1:][:, rows].flatten()) / chunks
                if detached:
                    if number == chunks - 1:
                        head.set_requires_gradient_sync(True)
                    loss.backward()
                else:
                    total = total + loss
            (hidden if detached else total).backward(cut.grad if detached else None)
            head.reshard()
        told = [event.verb for event in events if event.unit == "output"]
        assert told.count("reduce") == 1 and told.count("gather") == 1, told
        backward_of_all(plain, step)
        same(model, plain, gradient)
        assert fullshard.memory_use(model).gathered == 0
        for one in (model, plain):
            torch.optim.SGD(one.parameters(), lr=0.1).step()
            one.zero_grad()


@on_ranks(by="run_adopted")
def test_micro_batches_without_sync():
    """Nothing is reduced before the last micro-batch, of which the engine is told; gathered weights may stay."""
    for keep in (False, True):
        model, plain = parallelized(plain_decoder()), plain_decoder()
        for micro in range(3):
            last = micro == 2
            model.set_requires_gradient_sync(last)
            model.set_is_last_backward(last)
            if keep:
                model.set_reshard_after_backward(last)
            with fullshard.record_events() as events:
                loss_of(model, tokens_of(micro, dist.get_rank())).backward()
            assert ("reduce" in [event.verb for event in events]) == last
            backward_of_all(plain, micro)
        same(model, plain, gradient)


@pytest.mark.parametrize("mode", ["save", "async_save"])
def test_checkpoints_of_a_state_that_was_taken_once(run_adopted, tmp_path, mode):
    """Steps after the state was taken are in the file; resumed on two ranks and on one."""
    told = run_adopted(saved, str(tmp_path), mode)
    run_adopted(resumed, str(tmp_path), told[0])
    run_adopted(resumed, str(tmp_path), told[0], world=1)


def saved(folder: str, mode: str) -> list[float]:
    """Half of the steps and a checkpoint; the losses of the other half."""
    model = parallelized(plain_decoder(), ac="full")
    states: dict[str, Any] = {"model": ModelWrapper(model), "optimizer": OptimizersContainer(model)}
    losses = []
    for step in range(2 * STEPS):
        if step == STEPS and mode == "save":
            dcp.save(states, checkpoint_id=folder)
        elif step == STEPS:
            dcp.async_save(states, checkpoint_id=folder).result()
        loss = loss_of(model, tokens_of(step, dist.get_rank()))
        loss.backward()
        step_of(states["optimizer"])
        losses.append(mean_over_ranks(loss).item())
    return losses[STEPS:]


def resumed(folder: str, expected: list[float]) -> None:
    with torch.device("meta"):
        model: Any = Decoder()
    model = materialized(parallelized(model))
    states: dict[str, Any] = {"model": ModelWrapper(model), "optimizer": OptimizersContainer(model)}
    dcp.load(states, checkpoint_id=folder)
    found = []
    for step in range(STEPS, 2 * STEPS):
        ranks = [dist.get_rank()] if dist.get_world_size() == 2 else range(2)
        loss = loss_of(model, torch.cat([tokens_of(step, rank) for rank in ranks]))
        loss.backward()
        step_of(states["optimizer"])
        found.append(mean_over_ranks(loss).item())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@on_ranks(by="run_adopted")
def test_export_with_the_names_of_hugging_face(tmp_path):
    """Renamed DTensors, in another dtype: by the DCP writer for safetensors, and whole by `full_tensor()`."""
    plain = plain_decoder()
    model = parallelized(plain_decoder(), ac="full")

    def renamed(state: dict[str, Any]) -> dict[str, Any]:
        return {"model." + name.replace("tok_embeddings", "embed_tokens"): value for name, value in state.items()}

    state = renamed(ModelWrapper(model).state_dict())
    cast = {name: value.to(torch.bfloat16) for name, value in state.items()}
    index = dict.fromkeys(cast, 1)
    writer = HuggingFaceStorageWriter(
        path=f"{tmp_path}/hf", save_distributed=True, fqn_to_index_mapping=index, enable_consolidation=False
    )
    dcp.save(cast, storage_writer=writer, checkpoint_id=f"{tmp_path}/hf")
    wanted = renamed(plain.state_dict())
    loaded = {name: torch.zeros_like(value) for name, value in cast.items()}
    dcp.load(loaded, storage_reader=HuggingFaceStorageReader(f"{tmp_path}/hf"), checkpoint_id=f"{tmp_path}/hf")
    for name, value in wanted.items():
        assert torch.equal(loaded[name].full_tensor(), value.to(torch.bfloat16)), name
    whole = {name: value.full_tensor() for name, value in state.items()}
    if dist.get_rank() == 0:
        save_file(whole, f"{tmp_path}/whole.safetensors")
        found = load_file(f"{tmp_path}/whole.safetensors")
        assert all(torch.equal(found[name], value) for name, value in wanted.items()) and len(found) == len(wanted)
        assert any(Path(f"{tmp_path}/hf").glob("**/*.safetensors"))


@on_ranks(by="run_adopted")
def test_a_step_that_was_broken_off_is_forgotten():
    """In a block's forward, and in its backward, in the second of two micro-batches; the step is run again."""
    model, plain = parallelized(plain_decoder(), ac="full"), plain_decoder()
    prefetched(model)

    def fail(*_: Any) -> None:
        raise Broken

    for where in ("forward", "backward"):
        model.zero_grad()
        loss_of(model, tokens_of(0, dist.get_rank())).backward()
        block: Any = model.layers["1"]
        register = block.register_forward_pre_hook if where == "forward" else block.register_full_backward_hook
        handle = register(fail)
        with pytest.raises(Broken):
            loss_of(model, tokens_of(1, dist.get_rank())).backward()
        handle.remove()
        model.zero_grad(), plain.zero_grad()
        for micro in range(2):
            loss_of(model, tokens_of(micro, dist.get_rank())).backward()
            backward_of_all(plain, micro)
        same(model, plain, gradient)
        clipped(list(model.parameters()))
        assert fullshard.memory_use(model).gathered == 0


class Broken(Exception):
    """What the data loader, or a kernel, may raise."""
