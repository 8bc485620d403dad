"""What units, buckets and gradients say to users, in the order of the code: the wording of errors and warnings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..errors import ConfigError, PhaseError, message

# unit.py


def not_sharded(unit: str, state: str) -> PhaseError:
    """The error for a gather of a unit that is gathered."""
    return PhaseError(f"unit {unit!r} is {state}; only a sharded one is gathered", code="P054")


def no_gather(unit: str, state: str) -> PhaseError:
    """The error for waiting where nothing is gathered."""
    return PhaseError(f"unit {unit!r} is {state}; there is no gather to wait for", code="P055")


def already_sharded(unit: str) -> PhaseError:
    """The error for freeing a sharded unit."""
    return PhaseError(f"unit {unit!r} is already sharded; there is nothing to free", code="P056")


def written_while_gathered(parameters: Iterable[str], rank: int) -> PhaseError:
    """The error for a forward that wrote to its own parameters."""
    return PhaseError(
        "A gathered parameter was written to: a copy, which ranks would keep or lose apart.",
        parameter=", ".join(dict.fromkeys(parameters)),
        rank=rank,
        expected="parameters that change between steps only",
        got="a change in place, or of .data, while it was gathered",
        remedy="do it between steps, on the sharded parameter (under torch.no_grad()), or compute with a changed "
        "copy; Embedding(max_norm=) renormalises rows in its forward: leave it out, or put the weight in "
        "ignored_params",
        code="P057",
    )


def assigned_in_forward(parameter: str, rank: int, unit: str) -> PhaseError:
    """The error for a Parameter that was assigned to a module while forwards run."""
    return PhaseError(
        "A parameter was assigned to a module of a sharded model inside a forward: ranks would train it apart.",
        parameter=parameter,
        rank=rank,
        expected="parameters that are assigned between steps",
        got=f"another object in its place, in or before the forward of unit {unit or '(root)'!r}",
        remedy="assign it between steps, or change values in place then (copy_)",
        code="P058",
    )


def lacks_parameter(unit: str) -> PhaseError:
    """The error for a parameter that a unit does not hold."""
    return PhaseError(f"unit {unit!r} lacks what it should give up; this is a bug in Fullshard", code="P059")


# bucket.py


def partly_on_meta(parameters: Iterable[str]) -> ConfigError:
    """The error for a unit of which only a part was given values."""
    return ConfigError(
        "Some parameters of a unit are on the meta device and others are not.",
        parameter=", ".join(parameters),
        remedy="materialise the whole unit: model.to_empty(device=...), then initialise every module",
        code="C167",
    )


def several_dtypes(named: Sequence[tuple[str, str]], rank: int) -> ConfigError:
    """The error for a cast of some of a bucket's parameters: the dtype of each is the same on every rank.

    Args:
        named: each parameter's name and dtype.
        rank: this one.
    """
    names: dict[str, list[str]] = {}
    for name, dtype in named:
        names.setdefault(dtype, []).append(name)
    return ConfigError(
        "Some parameters of a unit, which lie in one buffer, were cast to another dtype, and others were not.",
        parameter=", ".join([name for name, dtype in named if dtype != named[0][1]]),
        rank=rank,
        expected="one dtype",
        got="; ".join(f"{dtype}: {', '.join(group)}" for dtype, group in names.items()),
        remedy="cast the whole unit; or cast a part of it before the model is sharded, or make it a unit of its own",
        code="C168",
    )


# gradients.py


def collected_while_reduced() -> PhaseError:
    """The error for gradients that come while their buffer is sent."""
    return PhaseError(
        "gradients were collected while their bucket is being reduced; this is a bug in Fullshard", code="P048"
    )


def not_reduced_yet(unit: str, parameters: Iterable[str], rank: int, what: str, do: str) -> PhaseError:
    """The error for what cannot be done to a unit that holds gradients; see `refuse_unreduced`."""
    return PhaseError(
        f"Unit {unit or '(root)'!r} cannot be {what} now: it holds gradients not yet reduced.",
        parameter=", ".join(parameters),
        rank=rank,
        remedy=f"{do} after the backward that reduces them (set_requires_gradient_sync(True)), "
        "or after optimizer.zero_grad() and before the next backward",
        code="P049",
    )


# reduce_buffer.py


def not_dense(parameter: str) -> PhaseError:
    """The error for a sparse gradient."""
    return PhaseError(
        "A parameter has a sparse gradient, which cannot be reduced into shards.",
        parameter=parameter,
        expected="a dense gradient",
        got="a sparse one",
        remedy="build the layer with sparse=False (nn.Embedding, nn.EmbeddingBag), or put the parameter in "
        "ignored_params and reduce its gradient yourself",
        code="P052",
    )


# hooks.py


def not_a_gradient(parameter: str, rank: int, expected: str, got: str) -> ConfigError:
    """The error for a hook that gave something else than a gradient."""
    return ConfigError(
        "A hook on a sharded parameter gave something else than a gradient of it.",
        parameter=parameter,
        rank=rank,
        expected=f"None, or {expected}, as the gradient that it was given",
        got=got,
        remedy="compute what is returned from the gradient that the hook is given (torch.zeros_like(grad))",
        code="C178",
    )


# delivery.py


def two_gradients(parameter: str, rank: int) -> ConfigError:
    """The error for a parameter and an optimizer view over it that were given different gradients."""
    return ConfigError(
        "Both a parameter and the optimizer view over it were given a gradient.",
        parameter=parameter,
        rank=rank,
        expected="one of them: they share their .grad",
        got="two different tensors since the last step or backward",
        remedy="assign to the parameter's .grad or to the view's, or add one to the other",
        code="C415",
    )


def view_of_another_shape(parameter: str, expected: tuple[int, ...], got: tuple[int, ...]) -> ConfigError:
    """The error for the `.data` of an optimizer view that was set to another shape."""
    return ConfigError(
        "The .data of an optimizer view was set to a tensor of another shape.",
        parameter=parameter,
        expected=f"shape {expected}",
        got=f"shape {got}",
        remedy="assign a result of the view (p.data = p.data * 2)",
        code="C380",
    )


def zero_in_a_view(parameter: str) -> str:
    """The warning for a parameter without a gradient, whose neighbours in an optimizer view have one."""
    return message(
        "A parameter got no gradient in this step, but others in its optimizer view did: to the "
        "optimizer it is zero, so that weight decay and momentum still move the parameter.",
        parameter=parameter,
        remedy="if they must not, leave it out (optimizer_view(model, params=...)), or give the "
        "optimizer model.parameters(); said once per unit",
        code="W011",
    )
