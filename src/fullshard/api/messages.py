"""The wording of errors of the functions that serve both front-ends, in the order of the code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import ArgumentTypeError, ConfigError, PhaseError, UsageError, message

# gathered.py


def entered_while_running(unit: str, summoned: bool, phase: str) -> PhaseError:
    """The error for `keep_gathered` of a unit that runs, or shows whole parameters."""
    return PhaseError(
        f"keep_gathered was entered while unit {unit or '(root)'!r} "
        f"{'shows whole parameters' if summoned else 'runs'}.",
        expected="a unit whose own forward and backward are over",
        got=f"phase {phase}",
        remedy="enter it around the call of the unit",
        topic="called-in-a-step",
    )


# gradient_settings.py


def not_divided_by_tokens(unit: str, reduction: str) -> ConfigError:
    """The error for a token count on a model whose gradients are not divided by tokens."""
    return ConfigError(
        "set_token_count is for models whose gradients are divided by a count of tokens.",
        expected='reduction="tokens"',
        got=f"unit {unit!r} with reduction={reduction!r}",
        remedy='pass reduction="tokens" to fully_shard or FullyShardedDataParallel',
        topic="token-counts",
    )


def counted_within_a_step(unit: str) -> UsageError:
    """The error for a token count while gradients that belong to the previous count are not reduced."""
    return UsageError(
        "set_token_count was called in the middle of a step.",
        expected="a call before the first backward, with the counts of all micro-batches of the step",
        got=f"gradients of unit {unit!r}, accumulated without sync and not yet reduced",
        remedy="call set_token_count(model, [count, ...]) once per step; pending gradients are dropped by zero_grad() "
        "in flat layouts and the wrapper, by model.reset_iter_state() in rows",
        topic="token-counts",
    )


def counted_within_backward() -> PhaseError:
    """The error for `set_token_count` within a backward."""
    return PhaseError(
        "set_token_count was called during a backward; call it before the step's first backward", topic="token-counts"
    )


def reduction_beside_scaling(reduction: str, kind: str) -> ConfigError:
    """The error for a `reduction` with a comm that scales gradients itself."""
    return ConfigError(
        f"reduction={reduction!r} cannot be combined with a comm that scales gradients itself.",
        got=f"comm of kind {kind!r}",
        remedy='leave reduction= at "mean", and let the comm apply the scaling',
    )


def divisor_beside_reduction(what: str, reduction: str, unit: str) -> ConfigError:
    """The error for a custom divisor where `reduction` determines the divisor."""
    return ConfigError(
        f"{what} cannot be combined with reduction={reduction!r}, which determines the divisor.",
        expected='reduction="mean"',
        got=f"reduction={reduction!r} of unit {unit!r}",
        remedy='omit the call; for a custom divisor, use reduction="mean", or reduction="sum" and scale the loss',
    )


def divisor_beside_hook(what: str, unit: str) -> ConfigError:
    """The error for a custom divisor where a communication hook averages."""
    return ConfigError(
        f"{what} cannot be combined with a communication hook, which averages.",
        got=f"a hook on unit {unit!r}",
        remedy="omit one of the two; the loss can be scaled as well",
    )


def power_sgd_without_state(state: object) -> ConfigError:
    """The error for `powerSGD_hook` with a state that is not a PowerSGDState."""
    return ConfigError(
        "powerSGD_hook must be registered together with a PowerSGDState.",
        expected="model.register_comm_hook(PowerSGDState(...), powerSGD_hook), or a function around it",
        got=f"state {state!r}",
    )


def second_hook() -> UsageError:
    """The error for a second communication hook."""
    return UsageError(
        "a communication hook is already registered",
        expected="a single hook per model",
        remedy="register a function that calls both",
    )


def hook_beside_hybrid(ways: int, copies: int) -> UsageError:
    """The error for a communication hook, other than PowerSGD, on a hybrid mesh."""
    return UsageError(
        "Communication hooks do not work with hybrid strategies.",
        expected="powerSGD_hook, which reduces between replicas only",
        got=f"another hook, and {ways} ways x {copies} replicas",
        remedy="use FULL_SHARD, SHARD_GRAD_OP or NO_SHARD",
    )


def no_replicas_to_hook() -> ConfigError:
    """The error for a hook that reduces between replicas, on a model without replicas."""
    return ConfigError(
        "PowerSGD reduces gradients between replicas, and this model has none.",
        expected="NO_SHARD, or a hybrid mesh (replicate, shard)",
        got="gradients that are reduced over the shard axis only",
        remedy="use a hybrid mesh; to send fewer bytes over the shard axis, MixedPrecisionPolicy(scatter_dtype=)",
    )


def hook_of_other_ranks(parameter: str, expected: Sequence[int], got: Sequence[int]) -> ConfigError:
    """The error for a hook whose process group is not that of the replicas."""
    return ConfigError(
        "The process group of the communication hook's state is not that of the replicas.",
        expected=f"ranks {list(expected)}, between which {parameter!r} is repeated",
        got=f"ranks {list(got)}",
        remedy='pass mesh["replicate"].get_group(), or None',
    )


def hook_beside_8_bits(parameter: str, dtype: str) -> ConfigError:
    """The error for a hook where the reduction that it replaces is in 8 bits; `dtype`: the policy's argument for it."""
    return ConfigError(
        f"A communication hook and MixedPrecisionPolicy({dtype}=) both determine how gradients are sent.",
        got=f"both for {parameter!r}",
        remedy="omit one of the two",
    )


def hook_beside_collective(unit: str) -> ConfigError:
    """The error for a unit with both a communication hook and a custom reduce-scatter, which the hook replaces."""
    return ConfigError(
        "A communication hook and a custom reduce-scatter both reduce gradients.",
        got=f"both for unit {unit or '(root)'!r}",
        remedy="call the custom reduce-scatter in the hook",
    )


# join.py


def joined_twice() -> ConfigError:
    """The error for nested `join`s of the same model."""
    return ConfigError("join is used inside another join of the same model.", remedy="iterate over them in turn")


def no_batch(rank: int, has_batch: bool, lacking: int) -> ConfigError:
    """The error for ranks without any batch; `lacking`: the number of such ranks."""
    return ConfigError(
        "join: a rank has no batches, so it has none to repeat.",
        rank=rank,
        got="none here" if not has_batch else f"a batch here, none on {lacking} other rank(s)",
        remedy="give every rank a batch, or pass join(model, batches, example=...) a batch of the right shapes",
    )


# park.py


def parked_already(function: str, parked: Sequence[str]) -> PhaseError:
    """The error for `park` or `offload_by_budget` of a model with these parked units."""
    return PhaseError(
        f"{function} was called for a model that is already parked.",
        got=f"parked units {', '.join(parked)}" if parked else None,
        remedy="call fullshard.resume first",
    )


def moved_within_a_context(what: str, context: str, unit: str) -> PhaseError:
    """The error for `park` or `offload_by_budget` inside `keep_gathered` or `summon_full_params`."""
    return PhaseError(
        f"{what} was called inside {context} of unit {unit or '(root)'!r}.",
        remedy=f"call {what} after that context",
    )


def not_parked(parked: bool) -> PhaseError:
    """The error for `resume` of a module that was not parked; `parked`: units in it were."""
    return PhaseError(
        "resume was called for a model that is not parked.",
        got="units that were parked with a different module" if parked else None,
        remedy="pass resume the module that was passed to park" if parked else "call park first, or omit resume",
    )


def optimizer_left_out(kind: str) -> ConfigError:
    """The error for a parked optimizer that was not passed to `resume`."""
    return ConfigError(
        "An optimizer that was parked with the model was not passed to resume: its next step would mix devices.",
        got=f"{kind} missing",
        remedy="call resume(model, *optimizers) with all optimizers that were passed to park",
    )


def not_an_optimizer(kind: str) -> ConfigError:
    """The error for a value that is not an optimizer."""
    return ConfigError(f"park takes a model and its optimizers, got {kind}")


def optimizer_of_another_model(kind: str) -> ConfigError:
    """The error for an optimizer that has no parameter of the model."""
    return ConfigError(
        f"This {kind} has no parameters of the model that is being parked.",
        remedy="park it with the model that it was built for",
    )


# offloading.py


def offloaded_late(unit: str, stepped: bool) -> ConfigError:
    """The error for `offload_by_budget` of a model that has trained; `stepped`: an optimizer has stepped it."""
    return ConfigError(
        "offload_by_budget was called after training began: gradients and optimizer state may be on the device.",
        expected="a model that no backward and no optimizer has run on",
        got=f"unit {unit!r}, which {'an optimizer has stepped' if stepped else 'has had gradients'}",
        remedy="call it after fully_shard, and build the optimizer then; to move a model that trains, save and load it",
    )


# state_on_disk.py


def state_not_on_disk(rank: int, problem: str) -> ConfigError:
    """The error for an optimizer whose state cannot be on disk on some rank."""
    return ConfigError(
        "optimizer_state_on_disk: the state cannot be on disk.",
        rank=rank,
        expected="an optimizer of parameters in host memory, and a directory on a local disk with room for its state",
        got=problem,
    )


# whole.py


def ranks_missing(what: str, rank: int, world: int, here: int, seconds: float) -> PhaseError:
    """The error for a collective call that some ranks did not make."""
    return PhaseError(
        f"{what} of a sharded model gathers its weights, so every rank must call it.",
        rank=rank,
        expected=f"{world} ranks",
        got=f"{here} after {seconds:g} s",
        remedy=f"call {what} on every rank (only the main rank writes), or pass "
        "state_dict=accelerator.get_state_dict(model), called on every rank",
    )


# preconditions.py


def method_of_root(method: str, unit: str, topic: str | None = None) -> PhaseError:
    """The error for a method or function that acts on a root, called on a unit below it."""
    return PhaseError(
        f"{method} is for the root; unit {unit!r} is below it.",
        remedy="call it on the module whose forward is called from outside",
        topic=topic,
    )


def no_units(function: str, kind: str, has_parameters: bool) -> ConfigError:
    """The error for a module without units; `has_parameters`: it may be part of a unit around it."""
    return ConfigError(
        f"{function} takes a sharded model, and this {kind} has no units.",
        expected="a unit, or a module that contains units",
        got="a model that is not sharded, or a part of a unit" if has_parameters else "a module without parameters",
        remedy="call fully_shard(model) first, or pass the model that FullyShardedDataParallel returned; for a part of "
        "a unit, pass owner_of(model, module).module",
        topic="no-units",
    )


def called_within_a_pass(function: str, unit: str) -> PhaseError:
    """The error for a call within a forward or backward."""
    return PhaseError(
        f"{function} was called while a forward or backward through unit {unit or '(root)'!r} runs.",
        remedy=f"call {function} between steps",
        topic="called-in-a-step",
    )


# wrapping.py


def scripted(name: str) -> ConfigError:
    """The error for a ScriptModule in a model to be sharded."""
    return ConfigError(
        "A ScriptModule cannot be sharded: TorchScript has compiled it with whole parameters.",
        expected="modules in Python",
        got=f"{name or 'the module itself'}, a ScriptModule",
        remedy="pass the module that was scripted or traced, and use torch.compile to compile it",
    )


def not_classes(policy: object) -> ConfigError:
    """The error for an `auto_wrap_policy` that contains anything but classes."""
    return ConfigError(
        f"auto_wrap_policy must contain module classes, got {policy!r}",
        remedy="pass the classes of the model's blocks, {Block}, not instances or names of classes",
    )


def not_a_policy(policy: Any, is_class: bool) -> ArgumentTypeError:
    """The error for an invalid `auto_wrap_policy`; `is_class`: it is a class rather than a set of classes."""
    return ArgumentTypeError(
        'auto_wrap_policy must be "auto", a set of module classes, a ModuleWrapPolicy, a CustomPolicy or a callable, '
        f"got {policy!r}",
        remedy=f"pass a set: {{{policy.__name__}}}" if is_class else 'pass "auto", or {Block}',
    )


def nothing_chosen(auto: bool, kind: str, largest: str) -> str:
    """The warning for a policy that chose no module; `auto`: the policy is "auto"."""
    chose = 'Units are the repeated blocks of a model ("auto"), but this one repeats none' if auto else ""
    return message(
        f"{chose or 'auto_wrap_policy matched no module'}: the model becomes a single unit, gathered whole.",
        expected="modules of the classes that it names" if not auto else "blocks that the model repeats",
        got=f"{kind}, in which the largest classes are: {largest}",
        remedy="name the class of the model's blocks, {Block}; nothing, if a single unit is intended",
    )


def no_answer(kind: str, answer: object) -> ConfigError:
    """The error for a `CustomPolicy` whose function returns neither a bool nor a dict."""
    return ConfigError(
        f"CustomPolicy's lambda_fn returned an invalid value for a {kind}.",
        expected="False, True or a dict of arguments",
        got=repr(answer),
    )
