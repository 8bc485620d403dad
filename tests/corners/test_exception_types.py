"""Exception types: whoever catches what PyTorch's FSDP raises for a mistake catches ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from drop_in import layers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import fullshard
from fullshard.wrap import ModuleWrapPolicy
from ways import error_of, wrap

X = torch.ones(2, 4, dtype=torch.float64)
OTHER_SHAPES = {"weight": torch.ones(7, 7), "bias": torch.ones(7)}


def hook(state: Any, gradient: Tensor) -> None:
    """A communication hook."""


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def mesh(*shape: int) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=("a", "b", "c")[: len(shape)])


def linear(lib: Any, columns: int = 4, **keywords: Any) -> Any:
    return lib.fully_shard(nn.Linear(columns, 4), **keywords)


def wrapped(lib: Any, **keywords: Any) -> Any:
    return wrap(layers(), lib, **keywords)


def nested(lib: Any) -> Any:
    parts = layers()
    parts[0] = wrap(parts[0], lib)
    return wrap(parts, lib), parts[0]


def below_the_root(lib: Any, call: Callable[[Any], Any]) -> None:
    model, inner = nested(lib)
    model(X)
    call(inner)


def in_forward(lib: Any, call: Callable[[Any], Any]) -> Any:
    model = wrapped(lib)
    model.module[0].register_forward_hook(lambda *_: call(model))
    return model(X)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters())


def summon(lib: Any, model: Any, inside: Callable[[Any], Any] = lambda _: None, **keywords: Any) -> None:
    with lib.FullyShardedDataParallel.summon_full_params(model, **keywords):
        inside(model)


def hybrid(lib: Any, **keywords: Any) -> Any:
    return wrapped(lib, sharding_strategy=lib.ShardingStrategy.HYBRID_SHARD, **keywords)


def replaced_and_run(lib: Any) -> Any:
    model = wrap(nn.Linear(4, 4), lib, use_orig_params=True)
    model.module.weight = nn.Parameter(torch.ones(3, 3))
    return model(torch.ones(2, 4))


def changed_before_backward(lib: Any) -> None:
    keep = lib.ShardingStrategy.SHARD_GRAD_OP
    model = wrap(nn.Sequential(nn.Linear(4, 4)), lib, use_orig_params=True, sharding_strategy=keep)
    loss = model(torch.ones(2, 4)).sum()
    model.module[0].weight.data = model.module[0].weight.detach().clone()
    loss.backward()


def settings(lib: Any, kind: str, *configs: str) -> None:
    given = [getattr(lib, config)() for config in configs]
    lib.FullyShardedDataParallel.set_state_dict_type(wrapped(lib), lib.StateDictType[f"{kind}_STATE_DICT"], *given)


MISTAKES: dict[str, Callable[[Any], Any]] = {
    "fully_shard twice": lambda lib: lib.fully_shard(linear(lib)),
    "fully_shard of what is no module": lambda lib: lib.fully_shard(3),
    "a mesh of three dims": lambda lib: linear(lib, mesh=mesh(1, 1, 2)),
    "a module list": lambda lib: lib.fully_shard(nn.ModuleList([nn.Linear(4, 4)])),
    "a scalar": lambda lib: lib.fully_shard(Scalar()),
    "uneven columns": lambda lib: linear(lib, 5, shard_placement_fn=lambda p: Shard(1) if p.dim() == 2 else None),
    "reshard to three of two": lambda lib: linear(lib, reshard_after_forward=3),
    "reshard to a string": lambda lib: linear(lib, reshard_after_forward="x"),
    "a forward on meta": lambda lib: lib.fully_shard(nn.Linear(4, 4, device="meta"))(X.to("meta")),
    "prefetch of what is no unit": lambda lib: linear(lib).set_modules_to_forward_prefetch([nn.Linear(4, 4)]),
    "backward prefetch of what is no unit": lambda lib: linear(lib).set_modules_to_backward_prefetch([nn.Linear(4, 4)]),
    "a forward method that is not there": lambda lib: lib.register_fsdp_forward_method(linear(lib), "nope"),
    "a shared context with what is no unit": lambda lib: lib.share_comm_ctx([nn.Linear(4, 4)]),
    "a state dict of other shapes": lambda lib: linear(lib).load_state_dict(OTHER_SHAPES),
    "a wrapped state dict of other shapes": lambda lib: wrap(nn.Linear(4, 4), lib).load_state_dict(OTHER_SHAPES),
    "group and mesh": lambda lib: wrapped(lib, process_group=dist.group.WORLD, device_mesh=mesh(2)),
    "hybrid on a 1-D mesh": lambda lib: hybrid(lib, device_mesh=mesh(2)),
    "hybrid on one group": lambda lib: hybrid(lib, process_group=dist.group.WORLD),
    "ignored modules and states": lambda lib: wrapped(lib, ignored_modules=[], ignored_states=[]),
    "ignored modules that are none": lambda lib: wrapped(lib, ignored_modules=[3]),
    "ignored modules in no list": lambda lib: wrapped(lib, ignored_modules=3),
    "ignored states of both kinds": lambda lib: wrapped(lib, ignored_states=[nn.Linear(4, 4), nn.Parameter(X)]),
    "an ignored instance": lambda lib: wrapped(lib, ignored_modules=[wrap(nn.Linear(4, 4), lib)]),
    "a policy that cannot be called": lambda lib: wrapped(lib, auto_wrap_policy=3),
    "a policy for what is wrapped": lambda lib: wrap(
        nested(lib)[0].module, lib, auto_wrap_policy=ModuleWrapPolicy({nn.Linear})
    ),
    "a param_init_fn that cannot be called": lambda lib: wrap(nn.Linear(4, 4, device="meta"), lib, param_init_fn=3),
    "two dtypes in a flat parameter": lambda lib: wrap(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).double()), lib),
    "clipping below the root": lambda lib: below_the_root(lib, lambda inner: inner.clip_grad_norm_(1.0)),
    "no_sync below the root": lambda lib: below_the_root(lib, lambda inner: inner.no_sync().__enter__()),
    "a second hook": lambda lib: [(m := wrapped(lib)).register_comm_hook(None, hook), m.register_comm_hook(None, hook)],
    "a hook below the root": lambda lib: below_the_root(lib, lambda inner: inner.register_comm_hook(None, hook)),
    "a hook that cannot be called": lambda lib: wrapped(lib).register_comm_hook(None, 3),
    "apply in a forward": lambda lib: in_forward(lib, lambda model: model.apply(lambda _: None)),
    "summon in a forward": lambda lib: in_forward(lib, lambda model: summon(lib, model)),
    "summon twice": lambda lib: summon(lib, wrapped(lib), lambda model: summon(lib, model)),
    "a backward in summon": lambda lib: summon(lib, wrapped(lib), lambda model: model(X).sum().backward()),
    "rank 0's written back": lambda lib: summon(lib, wrapped(lib), rank0_only=True),
    "settings of another kind": lambda lib: settings(lib, "SHARDED", "FullStateDictConfig"),
    "optimizer settings of another kind": lambda lib: settings(
        lib, "FULL", "FullStateDictConfig", "ShardedOptimStateDictConfig"
    ),
    "optimizer state without its keys": lambda lib: lib.FullyShardedDataParallel.optim_state_dict_to_load(
        m := wrapped(lib), adam(m), {}
    ),
    "rekeying to what is no key": lambda lib: lib.FullyShardedDataParallel.rekey_optim_state_dict(
        {"state": {}, "param_groups": []}, "x", wrapped(lib)
    ),
    "a parameter replaced by one of another shape": replaced_and_run,
    "weights changed between forward and backward": changed_before_backward,
    "indexing what has no items": lambda lib: wrap(nn.Linear(4, 4), lib)[0],
    "an attribute that is not there": lambda lib: wrap(nn.Linear(4, 4), lib).nope,
}
OWN_NOT_NEEDED = {"indexing what has no items", "an attribute that is not there"}  # Python's own will do


LATE = pytest.mark.cpu("refused at once on a CPU; on a device two backwards later")


@pytest.mark.parametrize(
    "mistake",
    [pytest.param(name, marks=LATE) if name.startswith("weights changed between") else name for name in MISTAKES],
)
def test_exception_types(run_ranks, mistake):
    """Whoever catches what PyTorch raises for a mistake catches ours, which tells what is wrong in its first line."""
    for theirs, ours, own, text in run_ranks(exceptions, mistake, timeout=20):
        assert theirs, "PyTorch takes it"
        assert ours, "nothing is raised"
        assert theirs in ours, f"{theirs} of PyTorch's is not among {ours}"
        assert own or mistake in OWN_NOT_NEEDED, text
        assert len(text.splitlines()[0]) > 10, text


def exceptions(mistake: str) -> tuple[str, list[str], bool, str]:
    theirs = error_of(lambda: MISTAKES[mistake](torch_fsdp))
    ours = error_of(lambda: MISTAKES[mistake](fullshard))
    bases = [kind.__name__ for kind in type(ours).__mro__] if ours else []
    return type(theirs).__name__ if theirs else "", bases, isinstance(ours, fullshard.FullshardError), str(ours)
