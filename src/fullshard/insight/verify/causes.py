"""From a difference to its likely cause. Every rule is a measurement, not a guess from names: which combination of the
micro-batches' own gradients the wrong gradient is, whether a parameter moved at all, what the optimizers hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

Weights = list[list[float]]  # of each data rank, a factor for each of its micro-batches
SAMPLE = 65536  # elements of a gradient that are sent to find its cause
FIT = 1e-3  # residual, of the norm, up to which a combination explains a gradient

UNREDUCED = (
    "no gradient was reduced in this step: every micro-batch ran under no_sync() or set_requires_gradient_sync(False); "
    "the last one of a step must run with synchronisation"
)
NOT_CALLED = "optimizer.step() was not called on this rank, so nothing is trained"
DROPPED = (
    "a custom autograd.Function returns None (or zeros) for it in backward, or a detach() or no_grad() lies between it "
    "and the loss; if it is not to be trained, set requires_grad_(False)"
)
TIE = (
    "the tie was broken: to_empty() (or assigning new Parameters) makes one tensor for each name; tie the weights "
    "again after to_empty(), before sharding, or materialise the model first"
)
UNTIED = "weights are tied that the unsharded model has apart"
MASTER = (
    "there is no full-precision master: the parameter itself was cast (model.bfloat16(), .half(), torch_dtype=), so "
    "small updates round to nothing; keep it as it is and set MixedPrecisionPolicy(param_dtype=...) or MixedPrecision"
)
OTHER_DTYPE = "the model was cast before or while it was sharded"
UNINITIALISED = (
    "it was left uninitialised: to_empty() gives memory without values, and state dicts leave non-persistent buffers "
    "out; compute it again after to_empty() (in reset_parameters() or an init function)"
)
OTHER_START = (
    "it starts from another value than the unsharded model's: initialised after sharding with other random numbers, "
    "not initialised at all, or different on this rank; load the same state, or pass initial='copy'"
)
ADAPTER = (
    "ranks hold different models: an adapter (LoRA) or a layer is added, left out or frozen on some ranks only; do it "
    "on every rank, whatever its number"
)
OTHER_MODEL = "shard_fn changes the model's structure beyond sharding it"
UNFROZEN = (
    "a frozen parameter is trained and will be updated: it is frozen in the unsharded model; requires_grad was set "
    "when sharding (a wrapper's new Parameters, requires_grad_(True) on the whole model); freeze it again"
)
UNUSED = (
    "a parameter that no rank's loss uses was given a gradient: zeros make optimizers apply weight decay and momentum "
    "to it, where without a gradient they leave it alone"
)
BUFFER = (
    "its forward computes something else on this rank: batch norm over another batch, statistics in low precision, "
    "or a buffer that is written outside of forward"
)
FORWARD = (
    "the forward computes something else when sharded: a cast, code that looks at its rank, a weight used outside its "
    "unit's forward, or random numbers drawn in another order"
)
BACKWARD = (
    "no combination of the micro-batches' gradients gives this one: a weight used outside its unit's forward, a hook "
    "that changes it, or one rank's backward that differs"
)


@dataclass(frozen=True)
class Evidence:
    """What one rank saw of a step.

    Attributes:
        stepped: calls of an optimizer's step.
        held: names of parameters that those optimizers hold.
        foreign: tensors in them that are not the model's.
        reduced: reductions of gradients that units issued; None of a model without units.
    """

    stepped: int
    held: frozenset[str]
    foreign: int
    reduced: int | None


def start_cause(got: torch.Tensor) -> str:
    """Of a parameter that differs before the first step."""
    return OTHER_START if bool(got.isfinite().all()) else UNINITIALISED


def parameter_cause(
    before: torch.Tensor, got: torch.Tensor, want: torch.Tensor, trained: bool, name: str, evidence: Evidence
) -> str:
    """Of a parameter that differs after a step whose gradients were right. All are this rank's parts, in double."""
    ours, theirs = got - before, want - before
    if not bool(theirs.any()) or (not trained and bool(ours.any())):
        frozen = "is frozen in the unsharded model" if not trained else "is not changed by this step"
        return (
            f"a frozen parameter was updated: it {frozen}; keep requires_grad_(False) when sharding, and apply "
            "weight decay, averages and writes of your own to trained parameters only"
        )
    if not bool(ours.any()):
        if name not in evidence.held:
            foreign = f"; they hold {evidence.foreign} tensors that are not this model's" if evidence.foreign else ""
            return (
                f"no rank updates it: no optimizer that stepped holds it{foreign}; build the optimizer from "
                "model.parameters() after sharding, with every trained parameter in a group"
            )
        return "it was not updated though an optimizer holds it: its learning rate is 0, or the step was undone"
    ratio, residual = _fit(ours, theirs)
    if ratio and residual <= 0.02:
        return (
            f"its update is {ratio:.4g} times the expected one: another learning rate, or several steps in place of one"
        )
    return "its gradient was right and its update is not: other settings (betas, weight decay) or another optimizer"


def _fit(got: torch.Tensor, want: torch.Tensor) -> tuple[float, float]:
    """The factor by which `want`, which is not zero, is nearest to `got`; the norm of the rest, of that of `got`."""
    factor = float((got * want).sum() / want.square().sum())
    return factor, float((got - factor * want).norm() / got.norm())


def gradient_cause(
    got: torch.Tensor, parts: list[list[torch.Tensor]], weights: Weights, counts: Weights, own: int
) -> str | None:
    """Which combination of the micro-batches' gradients a wrong gradient is; None if it is none of those known.

    Args:
        got: [n], elements of the wrong gradient, in double precision.
        parts: for each data rank and micro-batch, the same elements of what its loss alone gives.
        weights: as the reference adds them up.
        counts: of tokens (1 where there are none).
        own: the data rank that has `got`.
    """
    best: tuple[float, str] | None = None
    for text, matrix in _combinations(weights, counts, own):
        total = torch.zeros_like(got)
        for rows, factors in zip(parts, matrix, strict=True):
            for part, factor in zip(rows, factors, strict=True):
                total += factor * part
        if not bool(total.any()) or not bool(got.any()):
            continue
        factor, residual = _fit(got, total)
        if factor > 0 and residual < FIT and (best is None or residual < best[0] / 4):
            best = (residual, text or _scaled(factor, len(parts), len(parts[0])))
    return None if best is None else best[1]


def _scaled(s: float, ranks: int, micro: int) -> str:
    """The right direction with a wrong factor."""
    for value, text in (
        (ranks, "gradients are summed over ranks where their mean is expected: divide by the number of ranks"),
        (1 / ranks, "gradients are divided by the number of ranks once too often"),
        (micro, "losses of micro-batches are added up where their mean is expected: divide each by their number"),
        (1 / micro, "losses are divided by the number of micro-batches once too often"),
    ):
        if value != 1 and abs(s / value - 1) < 0.01:
            return text
    return f"gradients are {s:.5g} times the expected ones: a loss scale left in, clipping, or another divide factor"


def _combinations(weights: Weights, counts: Weights, own: int) -> Iterator[tuple[str, Weights]]:
    """Texts and factors, the more usual first. An empty text: all is right but for a factor."""
    ranks, micro = len(weights), len(weights[0])
    yield "", weights
    if len({n for row in counts for n in row}) > 1:
        uneven = (
            "wrong averaging under unequal token counts: {} count alike, whatever their number of tokens; weight each "
            "loss by its tokens over the global number (reduction='tokens')"
        )
        yield uneven.format("micro-batches of all ranks"), [[1.0] * micro] * ranks
        yield uneven.format("ranks"), [[n / sum(row) for n in row] for row in counts]
        yield uneven.format("a rank's micro-batches"), [[sum(row) / micro] * micro for row in counts]
    last = micro - 1

    def factors(factor: Callable[[int, int], float]) -> Weights:
        return [[w * factor(r, m) for m, w in enumerate(row)] for r, row in enumerate(weights)]

    if ranks > 1:
        text = (
            "the gradient is this rank's own: it was never reduced over ranks; a parameter that no unit shards "
            "(ignored, or added later) must be averaged by you, or the last micro-batch ran without synchronisation"
        )
        yield text, factors(lambda r, m: r == own)
    if micro > 1:
        text = (
            "only the last micro-batch counts: gradients of those before are dropped (zero_grad() between them, or "
            "gradients kept in no_sync() were given up)"
        )
        yield text, factors(lambda r, m: m == last)
        text = "the last micro-batch is missing: it ran after the step, or under no_sync()"
        yield text, factors(lambda r, m: m < last)
    if micro > 1 and ranks > 1:
        text = (
            "a missing reduce in no_sync(): of micro-batches before the last this rank has only its own gradients; "
            "let gradients kept in no_sync() join the last micro-batch's reduction"
        )
        yield text, factors(lambda r, m: m == last or r == own)  # of an engine that sums over ranks
        yield text, factors(lambda r, m: m == last or ranks * (r == own))  # or divides where it reduces


def loss_cause(got: float, want: float, ranks: int, micro: int, drew: bool) -> str:
    """Of a loss that differs though every parameter was right."""
    for value, text in ((1 / micro, "number of micro-batches"), (1 / ranks, "number of ranks")):
        if value != 1 and want and abs(got / want / value - 1) < 1e-4:
            return f"the loss that the training step returns is divided by the {text}: return it undivided"
    if drew:
        return "random numbers differ from the reference's: dropout is drawn in another order, or seeded by the model"
    return FORWARD


def missing_gradient_cause(evidence: Sequence[Evidence], everywhere: bool) -> str:
    """Of a gradient that is None where one is expected."""
    if any(one.reduced == 0 for one in evidence):
        return UNREDUCED
    if everywhere:
        return (
            "no gradient reaches any parameter: the loss was computed without grad, or zero_grad() came before the step"
        )
    return f"no gradient reaches it in the sharded run: {DROPPED}"
