"""`fullshard plan MODEL`."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from ..errors import ConfigError
from . import terminal
from .target import function_at

if TYPE_CHECKING:
    from ..insight.planner import Plan

STYLES = {
    r"(?m)^fits .*$": "green",
    r"(?m)^no .*$": "red",
    r"(?m)^best: .*$": "bold",
    r"\b(does not fit)\b": "bold red",
}
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
NO_FIT = 3


def argument(metavar: str, default: str = "") -> Any:
    """How the help shows an option, on one line where it can."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=f"(default: {default})" if default else "")


@dataclass(frozen=True)
class PlanArguments:
    """Predict a training step's memory, traffic and time: which strategy fits, and which is the fastest.

    MODEL is FILE.py:FUNCTION or MODULE:FUNCTION, which returns a model, or a model and a function that returns the
    loss of a step; or a Hugging Face config.json, or its folder. Searches strategies; --fix sets fields. Example:
        fullshard plan examples/model.py:demo_model --ranks 8 --batch 4 --sequence 128 --memory 2GiB

    Exit code: 0 it fits (or --memory is not set), 3 it does not fit, 2 bad input.
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """a function that builds it, or a config.json"""
    ranks: int = 8
    """over which data is split"""
    ranks_per_node: Annotated[int | None, argument("N", "8, or all if fewer")] = None
    """ranks on one machine"""
    tensor_parallel: Annotated[int, argument("N")] = 1
    """devices of a rank that split its tensors"""
    parallelize: Annotated[str, argument("FN")] = ""
    """FILE.py:FUNCTION of a model and a mesh"""
    batch: int = 1
    """sequences of a rank and step"""
    sequence: int = 1024
    """tokens per sequence"""
    memory: Annotated[str, argument("BYTES")] = ""
    """memory of one device, as 80GiB or 80GB"""
    device: Annotated[Literal["cuda", "cpu"], argument("DEVICE", "cuda")] = "cuda"
    """cuda or cpu"""
    optimizer: Annotated[str, argument("NAME", "AdamW")] = "AdamW"
    """a class of torch.optim, or FILE.py:FUNCTION of parameters or of named_parameters, which returns any"""
    power_sgd: Annotated[int | None, argument("N")] = None
    """rank of PowerSGD for the reduction of replicas"""
    dtype: Annotated[str, argument("DTYPE", "its own")] = ""
    """in which parameters are stored"""
    mixed: Annotated[tuple[str, ...], argument("D,D ...")] = ("",)
    """to compute and reduce in, as bf16,fp32; one or several"""
    fix: Annotated[tuple[str, ...], argument("K=V ...")] = ()
    """fields of Strategy, as layout=flat micro_batch=4"""
    rates: Annotated[tuple[str, ...], argument("K=V ...")] = ()
    """fields of Rates, as flops=4e14 bandwidth=5e10"""
    solve: Annotated[Literal["micro-batch", "sequence", "world"] | None, argument("WHAT"), tyro.conf.DisallowNone] = (
        None
    )
    """what fits at most, or at least: micro-batch, sequence, world"""
    json: bool = False
    """print one JSON object"""


def run(arguments: list[str]) -> int:
    """Run the command; returns its exit code."""
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning  # type: ignore[assignment]
        return terminal.run(PlanArguments, "plan", arguments, _plan)


def _show_warning(warning: Warning | str, *_: object) -> None:
    """Print a warning without the library's line that issued it."""
    print(f"fullshard: {warning}", file=sys.stderr)


def _plan(options: PlanArguments) -> int:
    from ..comm import PowerSGDState, powerSGD_hook
    from ..insight.planner import Strategy, assumed_rates, plan, solve
    from ..policies import MixedPrecisionPolicy

    assumed = assumed_rates(options.device)
    policies = [MixedPrecisionPolicy(*map(dtype_named, words.split(",", 1))) for words in options.mixed]
    common: dict[str, Any] = {
        "ranks": options.ranks,
        "ranks_per_node": options.ranks_per_node,
        "batch": options.batch,
        "sequence": options.sequence,
        "mp_policy": policies,
        "fixed": fields_of("--fix", options.fix, Strategy()),
        "optimizer": function_at(options.optimizer) if ":" in options.optimizer else options.optimizer,
        "comm_hook": None if options.power_sgd is None else (PowerSGDState(None, options.power_sgd), powerSGD_hook),
        "device": options.device,
        "device_memory": bytes_of(options.memory),
        "tensor_parallel": options.tensor_parallel,
        "parallelize": parallelizer(options),
        "rates": dataclasses.replace(assumed, **fields_of("--rates", options.rates, assumed)),
    }
    build = builder(options.model, dtype_named(options.dtype))
    if common["fixed"].get("units", "auto") not in ("auto", "model"):
        common["fixed"]["units"] = classes_named(common["fixed"]["units"], build)
    if options.solve:
        number, best = solve(build, options.solve, **common)
        show(number, best, options)
        return 0 if best is not None else NO_FIT
    plans = plan(build, **common)
    if options.json:
        values = {"model": plans.model, "ranks": plans.ranks, "plans": [p.as_json() for p in plans.ranked]}
        print(json.dumps(values | ({"left_out": plans.left_out} if plans.left_out else {})))
    else:
        terminal.show(str(plans), STYLES)
    return 0 if plans.fits else NO_FIT


def show(number: int, best: Plan | None, options: PlanArguments) -> None:
    """Print the result of `solve`."""
    if options.json:
        print(json.dumps({"solve": options.solve, "number": number, "plan": best and best.as_json()}))
        return
    titles = {
        "micro-batch": "largest micro-batch that fits",
        "sequence": "largest sequence that fits, to 1 part in 16",
        "world": "fewest ranks on which it fits, in whole machines",
    }
    text = "nothing fits; without --solve, the strategy that needs the least memory is shown"
    if best is not None:
        text = f"{titles[options.solve or '']}: {number:,}\n\n{best}"
    terminal.show(text, {r"\A.*": "bold"})


def builder(model: str, dtype: Any) -> Callable[[], Any]:
    """A function that builds the model that the command line names.

    Raises:
        ConfigError: the file, function or library does not exist.
    """
    path = Path(model)
    build = partial(from_configuration, path) if is_configuration(path) else function_at(model)
    if dtype is None:
        return build
    if not (dtype.is_floating_point or dtype.is_complex):
        raise ConfigError(f"--dtype {dtype} does not train", expected="bfloat16, float16, float32, ...")

    def cast() -> Any:
        model_or_tuple = build()
        (model_or_tuple[0] if isinstance(model_or_tuple, tuple) else model_or_tuple).to(dtype)
        return model_or_tuple

    return cast


def is_configuration(path: Path) -> bool:
    """Whether this names a Hugging Face configuration."""
    return path.is_dir() or path.suffix == ".json"


def from_configuration(path: Path) -> Any:
    """A Hugging Face causal language model, from its configuration.

    Raises:
        ConfigError: transformers is not installed or cannot read the file, or the configuration is that of another or
            of a quantised model.
    """
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise ConfigError(
            "a Hugging Face configuration needs transformers.", remedy="pip install transformers"
        ) from error
    if not path.exists():
        raise ConfigError(f"there is no file {path}")
    try:
        config = AutoConfig.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise ConfigError(f"{path} cannot be read: {_reason(error)}", remedy=_FUNCTION) from error
    try:
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:
        raise ConfigError(
            f"no causal language model can be built from {path}: {_reason(error)}", remedy=_FUNCTION
        ) from error
    known, built = getattr(config, "architectures", None) or [], type(model).__name__
    if known and built not in known:
        raise ConfigError(
            f"{path} is the configuration of another kind of model.",
            expected=f"a causal language model: {built}",
            got=", ".join(known),
            remedy=_FUNCTION,
        )
    if getattr(config, "quantization_config", None):
        raise ConfigError(
            f"{path} is the configuration of a quantised model, whose weights it does not give.",
            got=f"quantization_config={config.quantization_config}",
            remedy=f"take quantization_config out to plan the model before it is quantised; {_FUNCTION}",
        )
    return model, partial(_one_step, config)


_FUNCTION = "for other models pass a function that builds them: FILE.py:FUNCTION"


def _reason(error: Exception) -> str:
    """An error's text, on one line."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def _one_step(config: Any, model: Any, micro_batch: int, sequence: int) -> Any:
    """The default step, of a sequence that the model takes.

    Raises:
        ConfigError: the sequence is longer than a learned embedding of positions.
    """
    from ..insight.planner import tokens_to_loss

    most = getattr(config, "max_position_embeddings", None)
    learned = any(re.search(r"(wpe|pos\w*)\.weight$", name) for name, _ in model.named_parameters())
    if learned and isinstance(most, int) and sequence > most:
        raise ConfigError(
            "the sequence is longer than the model's embedding of positions.",
            expected=f"--sequence of at most {most}",
            got=sequence,
        )
    return tokens_to_loss(model, micro_batch, sequence)


def parallelizer(options: PlanArguments) -> Callable[[Any, Any], object] | None:
    """The function that splits the model over tensor-parallel ranks; None: it is not split."""
    if options.parallelize:
        return function_at(options.parallelize)
    return split_as_configured if options.tensor_parallel > 1 and is_configuration(Path(options.model)) else None


def split_as_configured(model: Any, mesh: Any) -> None:
    """Split a Hugging Face model by the plan of its configuration.

    Raises:
        ConfigError: it has no plan, or a plan with styles that `parallelize_module` lacks.
    """
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    gathered = ColwiseParallel(output_layouts=Replicate())
    styles = {
        "colwise": ColwiseParallel(),
        "rowwise": RowwiseParallel(),
        "colwise_rep": gathered,
        "colwise_gather_output": gathered,
        "embedding_colwise": gathered,
        "embedding_rowwise": RowwiseParallel(input_layouts=Replicate()),
    }
    whole = "replicated_with_grad_allreduce"
    plan = getattr(model, "tp_plan", None) or {}
    unknown = sorted(set(plan.values()) - {*styles, whole})
    if unknown or not plan:
        raise ConfigError(
            "the plan of the model's configuration cannot be used for --tensor-parallel.",
            expected=", ".join([*styles, whole]),
            got=", ".join(unknown) or "no plan",
            remedy="pass --parallelize FILE.py:FUNCTION",
        )
    parallelize_module(model, mesh, {name: styles[style] for name, style in plan.items() if style != whole})


def fields_of(option: str, words: Sequence[str], default: Any) -> dict[str, Any]:
    """Parse words such as "layout=flat" into fields of a dataclass, with the types of `default`'s (None: a float).

    Raises:
        ConfigError: a field is unknown, or its value has the wrong type.
    """
    values: dict[str, Any] = {}
    names = [field.name for field in dataclasses.fields(default) if field.name != "mp_policy"]  # --mixed
    for word in words:
        name, equals, text = word.partition("=")
        if name in values:
            raise ConfigError(f"{option} sets {name} twice")
        if name not in names or not equals:
            raise ConfigError(f"{option} has no {word!r}", expected="NAME=VALUE with one of " + ", ".join(names))
        kind = float if getattr(default, name) is None else type(getattr(default, name))
        try:
            if name == "reshard_after_forward" and text.isdigit():
                values[name] = int(text)
            else:
                values[name] = {"true": True, "false": False}[text.lower()] if kind is bool else kind(text)
        except (KeyError, ValueError):
            expected = "true or false" if kind is bool else kind.__name__
            raise ConfigError(f"{option} {name}: {text!r} is invalid", expected=expected) from None
    return values


def classes_named(names: str, build: Callable[[], Any]) -> frozenset[type]:
    """The classes of a model's modules with these names, separated by commas.

    Raises:
        ConfigError: the model has no such module, or cannot be built.
    """
    from ..insight.planner.planner import built_model

    model, _ = built_model(build)
    classes = {type(module) for module in model.modules()}
    known, chosen = {kind.__name__ for kind in classes}, set(names.split(","))
    if missing := sorted(chosen - known):
        raise ConfigError(
            f"--fix units: the model has no module of class {missing[0]!r}",
            expected=f"auto, model, or some of {', '.join(sorted(known))}",
        )
    return frozenset(kind for kind in classes if kind.__name__ in chosen)


def dtype_named(name: str) -> Any:
    """The dtype with this name; None for an empty name.

    Raises:
        ConfigError: the dtype does not exist.
    """
    import torch

    dtype = getattr(torch, {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}.get(name, name), None)
    if name and not isinstance(dtype, torch.dtype):
        raise ConfigError(f"there is no dtype {name!r}", expected="bfloat16, float16, float32, ...")
    return dtype if name else None


def bytes_of(text: str) -> int | None:
    """The bytes in "80GiB" or "80GB"; None for an empty text.

    Raises:
        ConfigError: the text is not a size, or a small number without a unit.
    """
    if not text:
        return None
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*([kmgt]?i?)b?\s*", text.lower())
    if match is None or match[2] not in UNITS or float(match[1]) == 0:
        raise ConfigError(f"{text!r} is not a size of memory", expected="80GiB, 80GB, 24576MiB, ...")
    nbytes = round(float(match[1]) * UNITS[match[2]])
    if text.strip().isdigit() and nbytes < 2**20:
        raise ConfigError(
            f"{text!r} means {text.strip()} bytes, which is too small; add a unit",
            expected=f"a size such as {text.strip()}GiB",
        )
    return nbytes
