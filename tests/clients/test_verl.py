"""verl's use of both front-ends: the calls of its helper functions, in their order, on adopted ranks.

Its workers park a model and an optimizer on the CPU while others compute, and give weights to engines that generate.
"""

from __future__ import annotations

import functools
from abc import ABC
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from small import close, joined
from tiny import LENGTH, Sentences, llama
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import _or_policy, lambda_auto_wrap_policy, transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.nn.utils.clip_grad import _clip_grads_with_norm_, _get_total_norm

import fullshard
from ways import on_ranks

STEPS, MAX_NORM = 3, 0.5
SENTENCES = Sentences(4 * STEPS)
every_version = pytest.mark.parametrize("version", [1, 2])


# What verl does to a model.


def version_of(model: nn.Module) -> int:
    """`fsdp_version`."""
    return 1 if isinstance(model, FullyShardedDataParallel) else 2 if isinstance(model, FSDPModule) else 0


@contextmanager
def patched_for_abstract_classes(module: nn.Module) -> Any:
    """`maybe_patch_fsdp_module`, whose way around a metaclass is not needed: it must do no harm."""
    import torch.distributed.fsdp._fully_shard._fully_shard as functional

    before = functional.FSDPModule

    class FSDPModuleABC(ABC, before):
        pass

    try:
        if isinstance(module, ABC):
            functional.FSDPModule = FSDPModuleABC
        yield
    finally:
        functional.FSDPModule = before


def apply_fsdp2(model: Any, settings: dict[str, Any]) -> None:
    chosen = getattr(model, "_no_split_modules", None) or ["LlamaDecoderLayer"]
    apart = (nn.Embedding,) if not model.config.tie_word_embeddings else ()
    modules = [one for one in model.modules() if one.__class__.__name__ in chosen or isinstance(one, apart)]
    for module in [*modules, model]:
        with patched_for_abstract_classes(module):
            fully_shard(module, **settings)


def trains_alone(module: nn.Module) -> bool:
    leaf = len(list(module.named_children())) == 0
    return bool(leaf and getattr(module, "weight", None) is not None and module.weight.requires_grad)


def wrap_policy(is_lora: bool = False) -> Any:
    """`get_fsdp_wrap_policy`: adapters in instances of their own, and each decoder layer."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    policies = [functools.partial(lambda_auto_wrap_policy, lambda_fn=trains_alone)] if is_lora else []
    policies.append(functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer}))
    return functools.partial(_or_policy, policies=policies)


def init_fn(module: nn.Module) -> nn.Module:
    if dist.get_rank() != 0:
        module = module.to_empty(device="cpu", recurse=False)
    return module


def made(version: int, **more: Any) -> Any:
    """The model with values on the first rank alone, on meta elsewhere (not tied weights); sharded, and sent to all."""
    with nullcontext() if dist.get_rank() == 0 or more.get("tie_word_embeddings") else torch.device("meta"):
        model = llama(**more)
    return sharded(model, version)


def sharded(model: Any, version: int, is_lora: bool = False, **settings: Any) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    if version == 1:
        settings.setdefault("use_orig_params", False)
        return FullyShardedDataParallel(
            model,
            cpu_offload=None,
            param_init_fn=init_fn,
            auto_wrap_policy=wrap_policy(is_lora),
            device_id=torch.device("cpu"),
            sharding_strategy=ShardingStrategy.FULL_SHARD,
            mixed_precision=MixedPrecision(*[torch.float32] * 3),
            sync_module_states=True,
            device_mesh=mesh,
            forward_prefetch=False,
            **settings,
        )
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32, cast_forward_inputs=True)
    whole = model.state_dict()
    apply_fsdp2(model, {"mesh": mesh, "mp_policy": policy, "offload_policy": None, "reshard_after_forward": True})
    load_full_state_dict(model, whole)
    return model


def load_full_state_dict(model: nn.Module, whole: dict[str, Any]) -> None:
    """`fsdp2_load_full_state_dict`."""
    model = model.to(device="cpu", non_blocking=True) if dist.get_rank() == 0 else model.to_empty(device="cpu")
    options = StateDictOptions(full_state_dict=True, cpu_offload=False, broadcast_from_rank0=True)
    set_model_state_dict(model, whole, options=options)
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)


def clipped(version: int, model: Any) -> Tensor:
    """`fsdp2_clip_grad_norm_`, or the wrapper's own."""
    if version == 1:
        return model.clip_grad_norm_(MAX_NORM)
    parameters = list(model.parameters())
    total = _get_total_norm([p.grad for p in parameters if p.grad is not None], 2.0, False, None)
    total = total.to("cpu", non_blocking=True)
    _clip_grads_with_norm_(parameters, MAX_NORM, total, None)
    return total.full_tensor() if hasattr(total, "full_tensor") else total


@torch.no_grad()
def moved(model: Any, way: str, back: bool) -> None:
    """`offload_fsdp_model_to_cpu`, `load_fsdp_model_to_gpu`; of `fully_shard` in its older and its newer form."""
    if version_of(model) == 1:
        moved_flat(model)
    elif way == "data":
        for parameter in model.parameters():
            parameter.data = parameter.data.to("cpu" if back else torch.device("cpu"), copy=True)
    else:
        model.to("cpu") if back else model.cpu()


def moved_flat(model: Any) -> None:
    """Of the wrapper: each handle's parameter, looked at and moved."""
    from torch.distributed.fsdp._runtime_utils import _lazy_init

    _lazy_init(model, model)
    assert model._is_root
    for handle in model._all_handles:
        if handle._offload_params:
            continue
        flat = handle.flat_param
        assert flat.data.data_ptr() == flat._local_shard.data_ptr()
        assert id(flat.data) != id(flat._local_shard) and flat.data.size() == flat._local_shard.size()
        handle.flat_param_to(torch.device("cpu"), non_blocking=True)
        flat._local_shard = flat.data
        assert id(flat._local_shard) != id(flat.data)


@torch.no_grad()
def move_state(optimizer: torch.optim.Optimizer) -> None:
    """`offload_fsdp_optimizer` and `load_fsdp_optimizer`: other tensors in the place of those that were there."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    state[key] = value.to("cpu", non_blocking=True, copy=True)


# One process.


def loss_of(model: Any, rows: Tensor) -> Tensor:
    return model(input_ids=rows, labels=rows, use_cache=False).loss


def rows_of(step: int, rank: int | None = None) -> Tensor:
    """Two of a rank, in order; of both without."""
    both = SENTENCES.tokens[4 * step : 4 * step + 4]
    return both if rank is None else both[2 * rank : 2 * rank + 2]


def reference(steps: int = STEPS, **more: Any) -> tuple[list[float], list[float], Any]:
    """Losses and norms by step, and the trained model."""
    model = llama(**more)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    losses, norms = [], []
    for step in range(steps):
        loss = loss_of(model, rows_of(step))
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, model


def step_of(model: Any, optimizer: torch.optim.Optimizer, step: int) -> tuple[float, float]:
    loss = loss_of(model, rows_of(step, dist.get_rank()))
    loss.backward()
    norm = clipped(version_of(model), model).item()
    optimizer.step()
    optimizer.zero_grad()
    return joined(loss), norm


@pytest.mark.parametrize("tied", [False, True])
@every_version
@on_ranks(by="run_adopted")
def test_values_of_the_first_rank_reach_all(version, tied):
    """Of tied weights, too; then it trains as one process, clipped."""
    losses, norms, plain = reference(tie_word_embeddings=tied)
    model = made(version, tie_word_embeddings=tied)
    assert version_of(model) == version and not any(p.is_meta for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    for step in range(STEPS):
        close(step_of(model, optimizer, step), (losses[step], norms[step]))
    state = full_state_dict(model)
    assert bool(state) == (dist.get_rank() == 0)
    close({name: state[name] for name in state}, {n: v for n, v in plain.state_dict().items() if n in state})


def full_state_dict(model: Any, offload_to_cpu: bool = True, rank0_only: bool = True) -> dict[str, Any]:
    """`get_fsdp_full_state_dict`."""
    if version_of(model) == 1:
        config = FullStateDictConfig(offload_to_cpu=offload_to_cpu, rank0_only=rank0_only)
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, config, None):
            return model.state_dict()
    options = StateDictOptions(full_state_dict=True, cpu_offload=offload_to_cpu, broadcast_from_rank0=not rank0_only)
    return get_model_state_dict(model, options=options)


@every_version
@on_ranks(by="run_adopted")
def test_the_whole_state_on_every_rank(version):
    close(dict(full_state_dict(made(version), offload_to_cpu=False, rank0_only=False)), dict(llama().state_dict()))


@pytest.mark.parametrize(("version", "way"), [(1, "flat"), (2, "to"), (2, "data"), (1, "park"), (2, "park")])
@on_ranks(by="run_adopted")
def test_a_model_and_its_optimizer_on_the_cpu_and_back(version, way):
    """Between steps, and between a backward and its step; before the first forward, as workers do once built."""
    losses, norms, plain = reference()
    model = made(version)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)

    def away_and_back() -> None:
        if way == "park":
            fullshard.park(model, optimizer)
            full_state_dict(model)
            fullshard.resume(model, optimizer)
            return
        for back in (False, True):
            moved(model, way, back)
            move_state(optimizer)

    away_and_back()
    for step in range(STEPS):
        with torch.no_grad():  # log probabilities, and parked again before the update
            loss_of(model, rows_of(step, dist.get_rank()))
        away_and_back()
        loss = loss_of(model, rows_of(step, dist.get_rank()))
        loss.backward()
        close((joined(loss), clipped(version, model).item()), (losses[step], norms[step]))
        away_and_back()
        optimizer.step()
        optimizer.zero_grad()
        away_and_back()
    close(dict(full_state_dict(model)), dict(plain.state_dict()) if dist.get_rank() == 0 else {})


@every_version
@on_ranks(by="run_adopted")
def test_weights_for_an_engine_that_generates(version):
    """DTensors of the sharded state dict, made whole one by one, between steps that go on."""
    losses, _, _ = reference()
    model = made(version)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    if version == 1:
        FullyShardedDataParallel.set_state_dict_type(
            model, state_dict_type=StateDictType.SHARDED_STATE_DICT, state_dict_config=ShardedStateDictConfig()
        )
    for step in range(STEPS):
        state = model.state_dict()
        found = {n: v.to("cpu").full_tensor() if isinstance(v, DTensor) else v for n, v in state.items()}
        close(found, dict(reference(step)[2].state_dict()))
        close(step_of(model, optimizer, step)[0], losses[step])


@every_version
@on_ranks(by="run_adopted")
def test_adapters_layer_by_layer(version):
    """Those of one layer at a time, after a step that trained them as one process does."""
    plain = lora()
    model = sharded(lora(), version, is_lora=True, use_orig_params=False) if version == 1 else sharded(lora(), version)
    for one, rows in ((plain, rows_of(0)), (model, rows_of(0, dist.get_rank()))):
        optimizer = torch.optim.AdamW([p for p in one.parameters() if p.requires_grad], lr=1e-2, eps=1e-3)
        loss_of(one, rows).backward()
        optimizer.step()
    assert version == 2 or len(model.fsdp_modules(model)) == 1 + 2 + 8  # the root, two layers, adapters' matrices
    found = summon_lora_params(model)
    from peft.utils.save_and_load import get_peft_model_state_dict

    close(found, {n: v.detach() for n, v in get_peft_model_state_dict(plain).items()})
    loss_of(model, rows_of(1, dist.get_rank())).backward()  # what was summoned is usable again


def lora() -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(6)
    return get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))


def summon_lora_params(model: Any) -> dict[str, Tensor]:
    """`layered_summon_lora_params`, which writes to `_is_root` of what it summoned.

    It has PEFT pick adapters from a layer's own state dict, of whose names PEFT 0.21 knows none: they are picked here.
    """
    found: dict[str, Tensor] = {}
    wrapped = "_fsdp_wrapped_module."
    starts = ["base_model.model.", "base_model.model.model.", "base_model.model.model.layers."]
    for start in [*(wrapped + one for one in starts), *starts]:
        for name, part in list(model.named_modules()):
            if not name.startswith(start) or "." in name[len(start) :]:
                continue
            if name.endswith((".model", ".layers")) or version_of(part) == 0:
                continue
            clean = name.replace(wrapped, "")
            with FullyShardedDataParallel.summon_full_params(part, writeback=False):
                for key, value in part.state_dict().items():
                    if "lora_" in key:
                        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
                        found[f"{clean}.{key}".replace(".default", "")] = whole.detach().cpu()
                part._is_root = False
    return found


@every_version
@on_ranks(by="run_adopted")
def test_each_rank_saves_what_it_has(tmp_path, version):
    """The checkpoint manager: sharded states, one file a rank; another model goes on from them."""

    def states(model: Any) -> Any:
        if version == 2:
            return nullcontext()
        return FullyShardedDataParallel.state_dict_type(
            model,
            StateDictType.SHARDED_STATE_DICT,
            ShardedStateDictConfig(offload_to_cpu=True),
            ShardedOptimStateDictConfig(offload_to_cpu=True),
        )

    losses, norms, _ = reference()
    model = made(version)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    step_of(model, optimizer, 0)
    path = Path(tmp_path) / f"rank_{dist.get_rank()}.pt"
    with states(model):
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    dist.barrier()
    other = sharded(llama(), version)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)
    again = torch.optim.AdamW(other.parameters(), lr=1e-2, eps=1e-3)
    with torch.serialization.safe_globals(safe()), states(other):
        found = torch.load(path, weights_only=True)
        other.load_state_dict(found["model"])
        again.load_state_dict(found["optimizer"])
    for step in range(1, STEPS):
        close(step_of(other, again, step), (losses[step], norms[step]))
    scheduler.step()


def safe() -> list[Any]:
    """What a file of DTensors holds besides tensors."""
    return [DTensor, DTensorSpec, TensorMeta, DeviceMesh, Shard]


class Broken(Exception):
    """A reward that is not there, or memory that is not."""


@every_version
@on_ranks(by="run_adopted")
def test_goes_on_after_an_exception_in_an_update(version):
    """In the second micro-batch of a step; parked, brought back and run again, it is one process's step."""
    losses, norms, _ = reference()
    model = made(version)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    layers = (model.module if version == 1 else model).model.layers
    norm_of: Any = layers[1].module if version == 1 else layers[1]

    def fail(*_: Any) -> None:
        raise Broken

    for step in range(STEPS):
        for where in ("forward", "backward"):
            attention = norm_of.self_attn
            register = attention.register_forward_hook if where == "forward" else attention.register_full_backward_hook
            handle = register(fail)
            with pytest.raises(Broken):
                loss_of(model, rows_of(step, dist.get_rank())).backward()
            handle.remove()
            optimizer.zero_grad()
            fullshard.park(model, optimizer)
            fullshard.resume(model, optimizer)
        assert rows_of(step).shape == (4, LENGTH)
        close(step_of(model, optimizer, step), (losses[step], norms[step]))
