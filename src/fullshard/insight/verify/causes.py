"""From a difference to its likely cause. Every rule measures and does not guess from names: which combination of the
micro-batches' gradients a wrong gradient is, whether a parameter changed at all, which parameters the optimizers have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

Weights = list[list[float]]  # by data rank, a number for each of its micro-batches
SAMPLE = 65536  # elements of a gradient that are sent to find its cause
FIT = 1e-3  # residual, relative to the norm, up to which a combination explains a gradient

UNREDUCED = (
    "no gradient was reduced in this step: every micro-batch ran under no_sync() or set_requires_gradient_sync(False); "
    "the last one of a step must run with synchronization"
)
NOT_CALLED = "optimizer.step() was not called on this rank, so nothing is trained"
DROPPED = (
    "a custom autograd.Function returns None (or zeros) for it in backward, or a detach() or no_grad() lies between it "
    "and the loss; if it should not be trained, set requires_grad_(False)"
)
TIE = (
    "the tie was broken: to_empty() (or assigning new Parameters) makes a separate tensor for each name; tie the "
    "weights again after to_empty(), before sharding, or materialize the model first"
)
UNTIED = "weights are tied that are separate in the unsharded model"
MASTER = (
    "there is no full-precision master copy: the parameter itself was cast (model.bfloat16(), .half(), torch_dtype=), "
    "so small updates round to nothing; leave it in full precision and set MixedPrecisionPolicy(param_dtype=...) or "
    "MixedPrecision"
)
OTHER_DTYPE = "the model was cast before or while it was sharded"
UNINITIALIZED = (
    "it was left uninitialized: to_empty() allocates memory without values, and state dicts omit non-persistent "
    "buffers; compute it again after to_empty() (in reset_parameters() or an init function)"
)
OTHER_START = (
    "its initial value differs from the unsharded model's: initialized after sharding with different random numbers, "
    "not initialized at all, or different on this rank; load the same state, or pass initial='copy'"
)
ADAPTER = (
    "ranks have different models: an adapter (LoRA) or a layer is added, omitted or frozen on some ranks only; do the "
    "same on every rank"
)
OTHER_MODEL = "shard_fn changes the model's structure beyond sharding it"
UNFROZEN = (
    "a frozen parameter is trained and will be updated: it is frozen in the unsharded model, and requires_grad was set "
    "during sharding (a wrapper's new Parameters, requires_grad_(True) on the whole model); freeze it again"
)
FROZEN = (
    "it is frozen in the sharded model and trained in the unsharded one: requires_grad_(False) was called while it was "
    "sharded, or after; freeze it in model_fn, so that both models are alike"
)
UNUSED = (
    "a parameter that no rank's loss uses got a gradient: with zeros, optimizers apply weight decay and momentum to "
    "it; without a gradient, they leave it alone"
)
BUFFER = (
    "its forward computes something different on this rank: batch norm over a different batch, statistics in low "
    "precision, or a buffer that is written outside of forward"
)
FORWARD = (
    "the forward computes something different when sharded: a cast, code that depends on the rank, a weight used "
    "outside its unit's forward, or random numbers drawn in a different order"
)
DRAWN = "random numbers differ from the reference's: dropout is drawn in a different order, or seeded by the model"
UNCLEARED = (
    "the gradient of the step before is still in it: zero_grad() was not called (one process would add them, too)"
)
LOCAL = (
    "the gradient is this rank's alone: it was never reduced over ranks; average the gradient of a parameter "
    "that no unit shards (ignored, or added later) yourself, or run the last micro-batch with synchronization"
)
ONE_RANK = (
    "only the loss of rank {} counts: the losses of other ranks have no gradient (multiplied by 0, or computed without "
    "the parameters)"
)
BACKWARD = (
    "no combination of the micro-batches' gradients gives this one: a weight used outside its unit's forward, a hook "
    "that changes it, or a backward that differs on one rank"
)


@dataclass(frozen=True)
class Observations:
    """One rank's observations in a step.

    Attributes:
        stepped: whether an optimizer stepped.
        optimized: names of the parameters in the optimizers that stepped.
        foreign: number of tensors in them that are not the model's.
        reductions: of gradients, issued by units; None for a model without units.
    """

    stepped: bool
    optimized: frozenset[str]
    foreign: int
    reductions: int | None


def start_cause(value: torch.Tensor) -> str:
    """The cause for a parameter with this wrong value before the first step."""
    return OTHER_START if bool(value.isfinite().all()) else UNINITIALIZED


def parameter_cause(
    before: torch.Tensor,
    got: torch.Tensor,
    expected: torch.Tensor,
    trained: bool,
    name: str,
    observations: Observations,
) -> str:
    """The cause for a parameter that differs after a step with correct gradients.

    Args:
        before, got, expected: this rank's parts before and after the step, in double precision.
        trained: whether the parameter requires a gradient in the unsharded model.
        name: the parameter's.
        observations: this rank's.
    """
    update, expected_update = got - before, expected - before
    if not bool(expected_update.any()) or (not trained and bool(update.any())):
        reason = "is frozen in the unsharded model" if not trained else "is not changed by this step"
        return (
            f"a frozen parameter was updated: it {reason}; keep requires_grad_(False) when sharding, and apply your "
            "own weight decay, averages and writes to trained parameters only"
        )
    if not bool(update.any()):
        if name not in observations.optimized:
            foreign = (
                f"; they have {observations.foreign} tensors that are not this model's" if observations.foreign else ""
            )
            return (
                f"no rank updates it: no optimizer that stepped has it{foreign}; build the optimizer from "
                "model.parameters() after sharding, with every trained parameter in a group"
            )
        return "it was not updated although an optimizer has it: its learning rate is 0, or the step was undone"
    ratio, residual = _fit(update, expected_update)
    if ratio and residual <= 0.02:
        return f"its update is {ratio:.4g} times the expected one: a different learning rate, or more than one step"
    return (
        "its gradient is correct but its update is not: different settings (betas, weight decay) or a different "
        "optimizer"
    )


def _fit(got: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    """The factor by which `expected`, not zero, is nearest to `got`; and the residual's norm, relative to `got`'s."""
    factor = float((got * expected).sum() / expected.square().sum())
    return factor, float((got - factor * expected).norm() / got.norm())


def gradient_cause(
    gradient: torch.Tensor,
    contributions: list[list[torch.Tensor]],
    weights: Weights,
    counts: Weights,
    data_rank: int,
    earlier: torch.Tensor | None = None,
    clipped: float = 1.0,
) -> str | None:
    """Which combination of the micro-batches' gradients a wrong gradient is; None if no combination here fits.

    Args:
        gradient: [n], elements of the wrong gradient, in double precision.
        contributions: for each data rank and micro-batch, the same elements of the gradient of its loss alone.
        weights: with which the reference adds them up.
        counts: of tokens (1 without `tokens_fn`).
        data_rank: the one that `gradient` is from.
        earlier: the same elements of the gradient that was there before the step, if one was.
        clipped: by how much the reference's gradients were multiplied to clip them.
    """

    def added(combination: Weights) -> torch.Tensor:
        total = torch.zeros_like(gradient)
        for of_rank, factors in zip(contributions, combination, strict=True):
            for contribution, factor in zip(of_rank, factors, strict=True):
                if factor:
                    total += factor * contribution
        return total

    if earlier is not None and bool(earlier.any()) and bool(gradient.any()):
        scale, residual = _fit(gradient, added(weights) + earlier)
        if abs(scale - 1) < FIT and residual < FIT:
            return UNCLEARED
    best: tuple[float, str] | None = None
    for text, combination in _combinations(weights, counts, data_rank):
        total = added(combination)
        if not bool(total.any()) or not bool(gradient.any()):
            continue
        scale, residual = _fit(gradient, total)
        if text == LOCAL and abs(scale - 1) < FIT and abs(sum(map(sum, weights)) - 1) < FIT:  # not that of a sum
            text = ONE_RANK.format(data_rank) + ", or its gradient was divided, and never reduced over ranks"
        if scale > 0 and residual < FIT and (best is None or residual < best[0] / 4):
            best = (residual, text or _scale_cause(scale, len(weights), len(weights[0]), clipped))
    return _clamped_cause(gradient, added(weights)) if best is None else best[1]


def _clamped_cause(gradient: torch.Tensor, expected: torch.Tensor) -> str | None:
    """The cause for a gradient that is the expected one clamped to its own largest magnitude; None if it is not."""
    largest = float(gradient.abs().max())
    clamped = expected.clamp(-largest, largest)
    at_bound = int((gradient.abs() > largest * (1 - FIT)).sum())
    if at_bound < 2 or torch.equal(clamped, expected) or float((gradient - clamped).norm() / gradient.norm()) > FIT:
        return None
    return (
        f"gradients are clipped by value: the elements that differ are the expected ones clamped to {largest:.4g}, as "
        "clip_grad_value_() does; the reference clips only by norm (max_norm=): verify without clip_grad_value_()"
    )


def _scale_cause(scale: float, ranks: int, micro_batches: int, clipped: float) -> str:
    """The cause for a gradient of the right direction and `scale` times the size of the reference's before clipping."""
    if clipped < 1 and abs(scale - 1) < FIT:
        return "gradients are not clipped: max_norm= says that the step clips them, and the reference's were clipped"
    scale, before = scale / clipped, scale
    if clipped < 1 and before < 1:  # clipping removes the gradients' own scale
        reason = "the step clips them to a norm other than max_norm=, or scales them after clipping"
        return f"gradients are {scale:.5g} times the expected ones: {reason}"
    usual_scales = (
        (ranks, "gradients are summed over ranks where their mean is expected: divide by the number of ranks"),
        (1 / ranks, "gradients are divided by the number of ranks one time too many"),
        (micro_batches, "losses of micro-batches are summed where their mean is expected: divide each by their number"),
        (1 / micro_batches, "losses are divided by the number of micro-batches one time too many"),
    )
    fitting = [text for usual, text in usual_scales if usual != 1 and abs(scale / usual - 1) < 0.01]
    if fitting:  # both, if there are as many ranks as micro-batches
        return "; or ".join(fitting)
    if scale < 1 and clipped == 1:
        reason = "clipping by norm (if the step clips, pass the norm as max_norm=), or a different divide factor"
    else:
        reason = "a loss scale that was not removed, clipping, or a different divide factor"
    return f"gradients are {scale:.5g} times the expected ones: {reason}"


def _combinations(weights: Weights, counts: Weights, data_rank: int) -> Iterator[tuple[str, Weights]]:
    """Causes and the factors that they give the micro-batches, the more usual first. "": correct up to a scale."""
    ranks, micro_batches = len(weights), len(weights[0])
    last = micro_batches - 1
    yield "", weights
    if len({n for row in counts for n in row}) > 1:
        uneven = (
            "wrong averaging under unequal token counts: {} count equally, whatever their number of tokens; weight "
            "each loss by its share of the global number of tokens (reduction='tokens')"
        )
        yield uneven.format("micro-batches of all ranks"), [[1.0] * micro_batches] * ranks
        yield uneven.format("ranks"), [[n / sum(row) for n in row] for row in counts]
        yield uneven.format("a rank's micro-batches"), [[sum(row) / micro_batches] * micro_batches for row in counts]

    def factors(factor: Callable[[int, int], float]) -> Weights:
        return [[weight * factor(r, m) for m, weight in enumerate(row)] for r, row in enumerate(weights)]

    if ranks > 1:
        yield LOCAL, factors(lambda r, m: r == data_rank)
        for rank in range(ranks):
            if rank != data_rank:
                yield ONE_RANK.format(rank), factors(lambda r, m, rank=rank: r == rank)  # type: ignore[misc]
    if micro_batches > 1:
        text = (
            "only the last micro-batch counts: gradients of earlier ones are dropped (zero_grad() between them, or "
            "gradients accumulated in no_sync() were discarded)"
        )
        yield text, factors(lambda r, m: m == last)
        text = "the last micro-batch is missing: it ran after the step, or under no_sync()"
        yield text, factors(lambda r, m: m < last)
    if micro_batches > 1 and ranks > 1:
        text = (
            "a missing reduce in no_sync(): this rank has only its own gradients of micro-batches before the last; "
            "reduce gradients accumulated in no_sync() together with those of the last micro-batch"
        )
        yield text, factors(lambda r, m: m == last or r == data_rank)  # an engine that sums over ranks
        yield text, factors(lambda r, m: m == last or ranks * (r == data_rank))  # one that divides when it reduces


def loss_cause(
    got: float, expected: float, ranks: int, micro_batches: int, drew: bool, others: Sequence[tuple[float, str]] = ()
) -> str:
    """The cause for a loss that differs although every parameter is correct.

    Args:
        got, expected: the loss that the step returned, and the reference's.
        drew: whether it draws random numbers.
        others: numbers that a step may have returned in place of its mean, and what they are.
    """
    for number, what in others:
        if abs(got - number) <= 1e-5 * abs(number):
            return f"the training step returns {what}: return the mean of its own micro-batches, or None"
    numbers = ((micro_batches, "number of micro-batches"), (ranks, "number of ranks"))
    fitting = [text for number, text in numbers if number != 1 and expected and _near(got / expected, 1 / number)]
    if fitting:
        return (
            f"the loss that the training step returns is divided by the {' or the '.join(fitting)}: return it undivided"
        )
    if summed := [text for number, text in numbers if number != 1 and expected and _near(got / expected, number)]:
        return (
            f"the loss that the training step returns is multiplied by the {' or the '.join(summed)}: return the mean, "
            "not the sum"
        )
    return DRAWN if drew else FORWARD


def _near(ratio: float, expected: float) -> bool:
    return abs(ratio / expected - 1) < 1e-4


def missing_gradient_cause(observations: Sequence[Observations], everywhere: bool) -> str:
    """The cause for gradients that are None where one is expected; `everywhere`: for every parameter."""
    if any(of_rank.reductions == 0 for of_rank in observations):
        return UNREDUCED
    if everywhere and not all(of_rank.stepped for of_rank in observations):
        return f"{NOT_CALLED}; zero_grad() dropped its gradients"
    if everywhere:
        return (
            "no gradient reaches any parameter: the loss was computed without grad, or zero_grad() came before the step"
        )
    return f"no gradient reaches it in the sharded run: {DROPPED}"
