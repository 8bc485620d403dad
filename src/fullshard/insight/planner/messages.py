"""The texts of the planner's errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...errors import ConfigError, invalid_argument

MOST_CHARACTERS = 160
"""The longest reason that a paragraph quotes."""


def not_positive(name: str, value: object, least: int = 1, function: str = "plan") -> ConfigError:
    kind = "a positive integer" if least else "an integer of at least 0"
    expected = f"{least}, {least + 1}, {least + 2}, ..."
    return ConfigError(f"{function}(): {name} must be {kind}.", expected=expected, got=repr(value))


def invalid(name: str, expected: str, value: object) -> ConfigError:
    """The error for an argument, or a field of a strategy, with an invalid value."""
    return invalid_argument(f"plan(): {name}", value, expected)


def too_many_ranks(ranks: int, most: int) -> ConfigError:
    return ConfigError("plan(): too many ranks.", expected=f"at most {most:,}", got=f"{ranks:,}")


def fixed_and_solved_for() -> ConfigError:
    return ConfigError(
        "solve(): the micro-batch is what is solved for.", got="a micro_batch in fixed", remedy="leave it out"
    )


def nothing_to_offload(name: str) -> ConfigError:
    return ConfigError(
        "plan(): on a CPU there is nothing to offload.",
        expected=f"{name}=False",
        remedy='leave it out, or plan for device="cuda"',
    )


def not_a_divisor(name: str, value: int, whole: str, total: int) -> ConfigError:
    divisors = [size for size in range(1, total + 1) if total % size == 0]
    shown = ", ".join(map(str, divisors if len(divisors) < 12 else [*divisors[:10], "...", total]))
    return ConfigError(f"plan(): {name} must divide {whole}.", expected=f"one of {shown}", got=value)


def unknown_field(name: str, known: Sequence[str]) -> ConfigError:
    return ConfigError(f"plan(): a strategy has no field {name!r}.", expected="one of " + ", ".join(known))


def fixed_without_search(fixed: Mapping[str, object]) -> ConfigError:
    return ConfigError(
        "plan(): fixed is for a search, but a strategy was passed.",
        got=f"fixed={dict(fixed)}",
        remedy="set these fields in the strategy",
    )


def not_a_model(value: object) -> ConfigError:
    return ConfigError(
        "plan() needs a model, or a function that returns one.",
        expected="an nn.Module, or a callable without arguments",
        got=type(value).__name__,
    )


def sharded_already(name: str) -> ConfigError:
    return ConfigError(
        "plan() needs the model before it is sharded.",
        parameter=name,
        remedy="pass a function that builds the model; fullshard.describe and memory_use show a sharded one",
    )


def unknown_optimizer(name: str, known: list[str]) -> ConfigError:
    return ConfigError(
        f"plan(): torch.optim has no optimizer {name!r}.",
        expected=", ".join(known),
        remedy="or pass a function: optimizer=lambda parameters: MyOptimizer(parameters)",
    )


def needs_whole_tensors(name: str) -> ConfigError:
    return ConfigError(
        f"plan(): torch.optim.{name} needs whole tensors, and a rank has shards.",
        remedy="pass a function: "
        f"optimizer=lambda parameters: fullshard.OwnerOptimizer(parameters, torch.optim.{name})",
    )


class StepFailed(ConfigError):
    """The model's step raised an error on fake tensors."""


def step_failed(error: Exception, micro_batch: int, sequence: int, checkpointing: bool) -> StepFailed:
    recomputes = "plan with checkpointing=False (--fix checkpointing=false); or " if checkpointing else ""
    return StepFailed(
        f"plan() could not run one step of the model on fake tensors: {type(error).__name__}: {error}",
        got=f"micro_batch={micro_batch}, sequence={sequence}" + (", checkpointing=True" if checkpointing else ""),
        remedy=f"{recomputes}pass step=, a function (model, micro_batch, sequence) -> loss that makes a batch and runs "
        "the model, or let the function that builds the model return both: model, step; by default the model gets "
        "token ids [micro_batch, sequence] and returns logits or an object with .logits. "
        "Values of fake tensors cannot be read: no .item(), no branches on values. Some kernels take one dtype only: "
        "build the model in it (--dtype bfloat16)",
    )


def nothing_trains() -> ConfigError:
    return ConfigError(
        "plan(): no parameter of the model requires a gradient, so there is no backward to plan.",
        expected="at least one parameter that trains",
        remedy="call requires_grad_(True) on what the optimizer trains, or plan the model before it is frozen",
    )


def took_too_long() -> ConfigError:
    """The error for a plan with a time limit: at the end of a program, whose other ranks may be waiting for it."""
    return ConfigError("planning takes too long here", remedy="call explain_memory(), which has no limit")


def optimizer_failed(error: Exception) -> ConfigError:
    return ConfigError(
        f"plan() could not run the optimizer on fake tensors: {type(error).__name__}: {error}",
        remedy="name another of torch.optim, or pass a function of a list of parameters that returns one optimizer, "
        "or several: optimizer=lambda parameters: [fullshard.Muon(matrices), torch.optim.AdamW(others)]",
    )


def another_model(names: list[str]) -> ConfigError:
    return ConfigError(
        "explain_memory(): build makes a model with other parameters than the sharded one.",
        parameter=", ".join(names[:3]),
        expected="the function that built the model, before it was sharded",
    )


def cannot_repeat(reason: str, remedy: str = "pass step=", got: str | None = None) -> ConfigError:
    """The error for a last forward that is not known, or cannot be run again."""
    return ConfigError(f"explain_memory(): {reason}", got=got, remedy=remedy)


def in_few_words(error: Exception) -> str:
    """Why something cannot be planned, on one line: the error that the model's code raised, or the one of `plan`."""
    cause = error.__cause__ if isinstance(error, ConfigError) and error.__cause__ is not None else error
    line = next(iter(str(cause).splitlines()), "").rstrip(".")
    if cause is error:
        text = line.removeprefix("explain_memory(): ")
        remedy = error.remedy if isinstance(error, ConfigError) else None
        return text if remedy is None else f"{text}; {remedy}"
    text = f"{type(cause).__name__}: {line}"
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}..."


def owners_beside(what: str) -> ConfigError:
    return ConfigError(
        f"plan(): {what} does not go with an optimizer that has owners.",
        expected="steps of all parameters at once, on parameters that are split over the data-parallel ranks only",
        remedy=f"plan without {what}, or with an element-wise optimizer",
    )


def not_to_solve_for(value: object) -> ConfigError:
    return ConfigError(
        "solve() does not know what to solve for.", expected='"micro-batch", "sequence" or "world"', got=repr(value)
    )


def nothing_to_fit() -> ConfigError:
    return ConfigError("solve() needs the memory of a device.", remedy="pass device_memory=80 * 2**30, for example")


def not_a_rate(name: str, value: object) -> ConfigError:
    if name == "overlap":
        return ConfigError("Rates.overlap must be a number from 0 to 1.", got=repr(value))
    return ConfigError(
        f"Rates.{name} must be a positive number.", expected="units per second; seconds for latency", got=repr(value)
    )


def hook_without_replicas(ranks: int) -> ConfigError:
    return ConfigError(
        "plan(): PowerSGD reduces gradients between replicas, and this strategy has none.",
        got="replicate=1",
        remedy=f"set replicate, a divisor of {ranks} (--fix replicate=2)",
    )


def mesh_of_nothing(pattern: str, names: Sequence[str]) -> ConfigError:
    return ConfigError(
        f"plan(): no parameter's name matches meshes[{pattern!r}].",
        expected="a pattern of fnmatch, such as *.experts.*",
        got=", ".join([*names[:4], "..."]),
    )


def build_failed(error: BaseException) -> ConfigError:
    return ConfigError(
        f"plan() could not build the model: {type(error).__name__}: {error}",
        expected="a function without arguments that returns an nn.Module; its tensors are made on the meta device",
    )


def steps_in_every_backward(micro_batches: int) -> ConfigError:
    return ConfigError(
        "plan(): step_in_backward steps in every backward that reduces gradients, not once a batch.",
        got=f"{micro_batches} micro-batches that are all reduced",
        remedy='accumulate="whole", or micro_batch=batch',
    )


def placement_of_a_block(name: str) -> ConfigError:
    return ConfigError(
        f"plan(): the policy returns shard_placement_fn for {name!r}, which plan() does not know.",
        remedy="leave it out; meshes= says which parameters are split over other ranks",
    )


def nothing_to_parallelize(tensor: object, model_is_built: bool) -> ConfigError:
    if model_is_built:
        return ConfigError(
            "plan(): parallelize= would change the model.", remedy="pass a function that builds the model"
        )
    return ConfigError(
        "plan(): tensor_parallel and parallelize belong together.",
        expected="tensor_parallel=8, parallelize=function(model, mesh), which calls parallelize_module",
        got=f"tensor_parallel={tensor!r}",
    )


def parallelize_failed(error: Exception, tensor: int) -> ConfigError:
    return ConfigError(
        f"plan() could not parallelize the model: {type(error).__name__}: {error}",
        expected=f"a function (model, mesh) that calls parallelize_module with a 1-D mesh of {tensor} ranks",
    )
