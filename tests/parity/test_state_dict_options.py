"""`fullshard.state_dict`: every option on wrapped models, against PyTorch's functions on an unsharded one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as torch_functions

import fullshard
import fullshard.state_dict as helpers
from fullshard.state_dict import StateDictOptions
from ways import on_ranks
from wrapped import differences, make_net, train_net, whole_values, wrap_net

ORIG = pytest.mark.parametrize("orig", [False, True], ids=["flat", "orig"])
STEPS = 2


def adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.1)


def pair(orig: bool, **flags: bool) -> tuple[Any, Any, Any, Any]:
    """A wrapped model and its optimizer, and an unsharded one of the same numbers, both after the same steps."""
    model, plain = wrap_net(make_net(**flags), use_orig_params=orig), make_net(**flags)
    optimizer, other = adamw(model), adamw(plain)
    train_net(model, optimizer, range(STEPS))
    train_net(plain, other, range(STEPS), list(range(dist.get_world_size())))
    return model, optimizer, plain, other


def nested(state: dict[str, Any]) -> dict[str, Any]:
    flat = {f"{n} {k}": v for n in sorted(state["state"]) for k, v in sorted(state["state"][n].items())}
    return dict(whole_values(flat))


@ORIG
@on_ranks
def test_every_option_gives_what_pytorch_gives_of_an_unsharded_model(orig: bool) -> list[str]:
    problems = []
    model, optimizer, plain, other = pair(orig, frozen=True)
    rank = dist.get_rank()
    for options in (
        StateDictOptions(),
        StateDictOptions(full_state_dict=True),
        StateDictOptions(cpu_offload=True),
        StateDictOptions(full_state_dict=True, cpu_offload=True),
        StateDictOptions(ignore_frozen_params=True),
    ):
        want, want_state = torch_functions.get_state_dict(plain, other, options=options)
        got, got_state = helpers.get_state_dict(model, optimizer, options=options)
        if options.full_state_dict and options.cpu_offload and rank:
            problems += [f"{options}: rank {rank} has values"] if got or got_state else []
            continue
        problems += differences(f"{options}", whole_values(got), want, 3e-6)
        problems += differences(f"{options} optimizer", nested(got_state), nested(want_state), 3e-6)
        assert options.full_state_dict != any(type(v) is not torch.Tensor for v in got.values()), options
    flat = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
    want = torch_functions.get_optimizer_state_dict(plain, other, options=flat)
    got = helpers.get_optimizer_state_dict(model, optimizer, options=flat)
    trainable = {n for n, p in plain.named_parameters() if p.requires_grad}
    kept = {k: v for k, v in want.items() if any(f".{n}." in k for n in trainable) and k in got}
    problems += differences("flattened", {k: got[k] for k in sorted(kept)}, {k: kept[k] for k in sorted(kept)}, 3e-6)
    assert {k for k in want if k.startswith("state.")} == {k for k in got if k.startswith("state.")}
    for keep in (True, False):
        options = StateDictOptions(full_state_dict=True, keep_submodule_prefixes=keep)
        want = torch_functions.get_model_state_dict(plain, submodules={plain.layers[1]}, options=options)
        got = helpers.get_model_state_dict(model, submodules={model.module.layers[1]}, options=options)
        problems += differences(f"submodules keep={keep}", whole_values(got), want, 3e-6)
    return problems


@on_ranks
def test_what_is_missing_or_not_known_is_refused() -> None:
    model = wrap_net(make_net(), use_orig_params=False)
    part = {k: v for k, v in make_net(5).state_dict().items() if not k.startswith("side.")}
    keys = helpers.set_model_state_dict(model, part, options=StateDictOptions(strict=False))
    assert sorted(keys.missing_keys) == ["side.bias", "side.weight"], f"strict=False: {keys}"
    with pytest.raises(RuntimeError, match=r"side\.weight"):
        helpers.set_model_state_dict(model, part)
    with pytest.raises(fullshard.ConfigError, match="full_state_dict"):
        helpers.set_model_state_dict(model, part, options=StateDictOptions(broadcast_from_rank0=True))
    with pytest.raises(fullshard.ConfigError, match="dsd_fqn_modifiers"):
        helpers.get_model_state_dict(model, options=StateDictOptions(dsd_fqn_modifiers="other"))


@pytest.mark.parametrize("layout", ["rows", "flat"])
@on_ranks
def test_models_of_fully_shard_give_whole_values(layout: str) -> list[str]:
    """Without the wrapper: PyTorch's functions, and whole values of flat layouts, which those do not gather."""
    plain, model = make_net(), make_net()
    fullshard.fully_shard(model, layout=layout)
    optimizer, other = adamw(model), adamw(plain)
    train_net(model, optimizer, range(STEPS))
    train_net(plain, other, range(STEPS), list(range(dist.get_world_size())))
    options = StateDictOptions(full_state_dict=True)
    got, state = helpers.get_state_dict(model, optimizer, options=options)
    want, want_state = torch_functions.get_state_dict(plain, other, options=options)
    problems = differences("model", whole_values(got), want, 3e-6)
    problems += differences("optimizer", nested(state), nested(want_state), 3e-6)
    wrong = [key for key, value in got.items() if type(value) is not torch.Tensor]
    offloaded = helpers.get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return problems + ([f"not whole: {wrong}"] if wrong or bool(offloaded) != (dist.get_rank() == 0) else [])
