"""State dicts that do not fit a wrapped model, and settings that no state dict has: named, before anything changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fullshard
from fullshard import FullyShardedDataParallel as FSDP
from training import assert_same
from wrapped import differences, make_net, net_case, typed, wrap_net

ORIG = pytest.mark.parametrize("orig", [False, True], ids=["flat", "orig"])


def strictness(orig: bool) -> list[str]:
    problems = []
    for case in ("nested", "inside_plain", "tied", "tied_across", "ignored"):
        model, plain = net_case(case, orig, seed=4)
        state = make_net(3, tied=case.startswith("tied")).state_dict()
        for key in ("layers.1.up.weight", "layers.0.calls", "head.weight", "shift"):
            del state[key]
        state["layers.2.more"] = torch.zeros(2)
        state["other"] = torch.zeros(2)
        want_error = refused(plain, state, True)
        got_error = refused(model, state, True)
        for line in want_error.splitlines()[1:]:
            names = sorted(line.split(":", 1)[1].replace('"', "").replace(" ", "").strip(".").split(","))
            if not any(
                sorted(g.split(":", 1)[-1].replace('"', "").replace(" ", "").strip(".").split(",")) == names
                for g in got_error.splitlines()
            ):
                problems.append(f"{case}: {got_error} where {want_error}")
        plain = make_net(4, tied=case.startswith("tied"))
        want, got = plain.load_state_dict(state, strict=False), model.load_state_dict(dict(state), strict=False)
        if [sorted(k) for k in want] != [sorted(k) for k in got]:
            problems.append(f"{case}: {got} where {want}")
        problems += differences(f"{case} not strict", model.state_dict(), plain.state_dict())
    return problems


def refused(model: nn.Module, state: Any, strict: bool) -> str:
    try:
        model.load_state_dict(dict(state), strict=strict)
    except (RuntimeError, fullshard.CheckpointError) as error:
        return str(error)
    return ""


@ORIG
def test_missing_and_unexpected_keys_are_named_as_by_the_unwrapped_model(run_ranks, orig):
    assert_same(run_ranks(strictness, orig))


def wrong_shapes(orig: bool) -> list[str]:
    problems = []
    for case in ("nested", "ignored", "checkpoint_outside", "inside_plain"):
        for key in ("layers.2.up.weight", "layers.2.scale", "layers.1.up.weight"):
            if case == "inside_plain" and key.startswith("layers.2.s"):
                continue
            model, plain = net_case(case, orig, seed=4)
            state = make_net(3).state_dict()
            state[key] = torch.zeros(1, 4)
            error = refused(model, state, True)
            if key not in error or "(1, 4)" not in error:
                problems.append(f"{case} {key}: {error}")
            if case != "inside_plain":
                problems += differences(f"{case} {key}", model.state_dict(), plain.state_dict())
    return problems


@ORIG
def test_wrong_shapes_are_refused_before_anything_changes(run_ranks, orig):
    assert_same(run_ranks(wrong_shapes, orig))


def settings_faults() -> list[str]:
    model, _ = net_case("nested", True)
    with pytest.raises(fullshard.CheckpointError, match="FullStateDictConfig"):
        FSDP.set_state_dict_type(model, fullshard.StateDictType.SHARDED_STATE_DICT, fullshard.FullStateDictConfig())
    with pytest.raises(fullshard.CheckpointError, match="contains no"):
        FSDP.set_state_dict_type(nn.Linear(2, 2), fullshard.StateDictType.FULL_STATE_DICT)
    with typed("LOCAL", wrap_net(make_net(), strategy="NO_SHARD")) as _, pytest.raises(fullshard.FullshardError):
        model_no = wrap_net(make_net(), strategy="NO_SHARD")
        FSDP.set_state_dict_type(model_no, fullshard.StateDictType.LOCAL_STATE_DICT)
        model_no.state_dict()
    with FSDP.summon_full_params(model):
        if list(model.state_dict()) != list(make_net().state_dict()):
            return [f"summoned: {list(model.state_dict())}"]
        with pytest.raises(fullshard.PhaseError):
            model.load_state_dict(make_net().state_dict())
    seen = []

    def save_inside(*_: object) -> None:
        with pytest.raises(fullshard.PhaseError):
            model.state_dict()
        seen.append(1)

    model.module.layers[0].module.up.register_forward_hook(save_inside)
    model(torch.tensor([1]))
    return [] if seen else ["the hook did not run"]


def test_mistakes_are_refused(run_ranks):
    assert_same(run_ranks(settings_faults))
