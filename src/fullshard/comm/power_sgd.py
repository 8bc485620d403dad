"""PowerSGD: replicas send each other matrices of gradients as products of two thin matrices.

Vogels, Karimireddy, Jaggi 2019, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization"
(arXiv:1905.13727), algorithms 1 and 2. M is a replica's gradient [n, m] plus its previous error, and r is the rank:

    P = mean over replicas of M Q        [n, r] is sent; then its columns are made orthonormal
    Q = mean over replicas of M^T P      [m, r] is sent, and kept for the next step (warm start)
    the averaged gradient is P Q^T, and the replica keeps the error M - P Q^T (error feedback)

All replicas compute P Q^T from the same bits. If r is n or m, P Q^T is the mean of all M.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..errors import ConfigError, invalid_argument
from .protocol import Pending


class Residuals(dict[str, torch.Tensor]):
    """Tensors that a bucket's compressed reductions keep from step to step, by name. Outlives the plans of reductions.

    Attributes:
        reductions: number of reductions so far, counted by `powerSGD_hook`.
    """

    reductions = 0


@dataclass(frozen=True)
class GradientSlice:
    """A bucket's gradients on one replica, which a hook replaces by their mean over the replicas.

    Attributes:
        tensor: [S], this rank's slice, already the mean over the shard axis.
        matrices: views [n, m] of it: the complete rows of each parameter of two dims or more (n: the outermost dim in
            memory, m: all others).
        others: views of all other elements of parameters: vectors, and cut rows.
        kept: this bucket's residuals, empty at first; the hook may store tensors in it.
        average: starts averaging a tensor over the replicas, in place.
    """

    tensor: torch.Tensor
    matrices: Sequence[torch.Tensor]
    others: Sequence[torch.Tensor]
    kept: Residuals
    average: Callable[[torch.Tensor], Pending]


@dataclass(eq=False)
class PowerSGDState:
    """The state of `powerSGD_hook`: its settings, by the names and with the defaults of PyTorch's DDP hook.

    Each bucket keeps its own tensors, in the dtype of the reduction: with error feedback a copy of the slice's
    matrices, with warm start m * r elements of each. They are not saved in checkpoints, and are dropped when a unit is
    copied, moved to another device or given new storage; this loses the compression error of one gradient.

    Args:
        process_group: the replicas, for instance `mesh["replicate"].get_group()`; under NO_SHARD all ranks. None: the
            replicas of each unit.
        matrix_approximation_rank: r, at least 1.
        start_powerSGD_iter: reductions of a unit before the first that is compressed.
        min_compression_rate: a matrix is compressed if (n + m) * r times this is less than n * m.
        use_error_feedback: add the compression error to the next gradient.
        warm_start: begin with the Q of the previous reduction instead of a random one.
        random_seed: seed of the random Q.

    Raises:
        ConfigError: a setting is not of its type, or negative.
    """

    process_group: dist.ProcessGroup | None
    matrix_approximation_rank: int = 1
    start_powerSGD_iter: int = 1000
    min_compression_rate: float = 2
    use_error_feedback: bool = True
    warm_start: bool = True
    random_seed: int = 0

    def __post_init__(self) -> None:
        rank, start, rate = self.matrix_approximation_rank, self.start_powerSGD_iter, self.min_compression_rate
        group = self.process_group
        for name, is_valid, expected in (
            ("matrix_approximation_rank", type(rank) is int and rank >= 1, "an int of at least 1"),
            ("start_powerSGD_iter", type(start) is int and start >= 0, "an int of at least 0"),
            ("min_compression_rate", type(rate) in (int, float) and rate >= 0, "a number of at least 0"),
            ("random_seed", type(self.random_seed) is int, "an int"),
            ("use_error_feedback", isinstance(self.use_error_feedback, bool), "a bool"),
            ("warm_start", isinstance(self.warm_start, bool), "a bool"),
            (
                "process_group",
                isinstance(group, dist.ProcessGroup | None),
                "a ProcessGroup, or None for the replicas of each unit",
            ),
        ):
            if not is_valid:
                remedy = "the arguments are those of PyTorch's DDP hook; help(PowerSGDState) explains each"
                raise invalid_argument(f"PowerSGDState({name}=)", getattr(self, name), expected, remedy)

    def rank_of(self, matrix: torch.Tensor) -> int:
        """The rank to which a matrix [n, m] is compressed; 0 if it is not."""
        rows, columns = matrix.shape
        rank = min(self.matrix_approximation_rank, rows, columns)
        return rank if (rows + columns) * rank * self.min_compression_rate < rows * columns else 0


def powerSGD_hook(state: PowerSGDState, gradient: GradientSlice) -> None:
    """Average a gradient over replicas, with low-rank approximations of its matrices (see the module's docstring).

    For `register_comm_hook` of both front-ends: with NO_SHARD, and with hybrid meshes, where it replaces the all-reduce
    between replicas. It sends two tensors: the Ps together with everything that is not compressed, and the Qs. An
    infinite or NaN element makes the whole gradient of its matrix non-finite, and is not kept for later steps.

    Args:
        state: the settings.
        gradient: reduced in place.

    Raises:
        ConfigError: `gradient` is a plain tensor, which does not say where its matrices lie.
    """
    if not isinstance(gradient, GradientSlice):
        raise ConfigError(
            "powerSGD_hook must be registered together with a PowerSGDState.",
            expected="model.register_comm_hook(PowerSGDState(...), powerSGD_hook), or a function around it",
            got=f"a call with {type(gradient).__name__}",
        )
    kept, dtype = gradient.kept, gradient.tensor.dtype
    kept.reductions += 1
    compressed = [matrix for matrix in gradient.matrices if state.rank_of(matrix)]
    if kept.reductions <= state.start_powerSGD_iter or not compressed:
        gradient.average(gradient.tensor).wait()
        return
    others = [*gradient.others, *[matrix for matrix in gradient.matrices if not state.rank_of(matrix)]]
    computed = torch.promote_types(dtype, torch.float32)
    wholes = [_with_error(matrix, kept.get(f"error of {i}"), computed) for i, matrix in enumerate(compressed)]
    guesses = _guesses(state, compressed, kept, computed)
    products = [whole @ _orthonormal(guess) for whole, guess in zip(wholes, guesses, strict=True)]
    averaged = _averaged([*others, *products], dtype, gradient.average)
    for other, mean in zip(others, averaged, strict=False):
        other.copy_(mean)
    bases = [_orthonormal(mean.to(computed)) for mean in averaged[len(others) :]]
    products = [whole.mT @ basis for whole, basis in zip(wholes, bases, strict=True)]
    averaged = _averaged(products, dtype, gradient.average)
    for i, (matrix, whole, basis, mean) in enumerate(zip(compressed, wholes, bases, averaged, strict=True)):
        approximation = basis @ mean.to(computed).mT
        matrix.copy_(approximation)
        if state.warm_start:
            kept[f"Q of {i}"] = mean.nan_to_num(0.0, 0.0, 0.0)  # `_orthonormal` turns zeros into unit vectors
        if state.use_error_feedback:
            kept[f"error of {i}"] = whole.sub_(approximation).nan_to_num_(0.0, 0.0, 0.0).to(dtype)


def _with_error(matrix: torch.Tensor, error: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """A copy of a matrix in `dtype`, plus the previous compression error."""
    whole = matrix.to(dtype, copy=True)
    return whole if error is None else whole.add_(error.to(whole.device))


def _guesses(
    state: PowerSGDState, matrices: Sequence[torch.Tensor], kept: Residuals, dtype: torch.dtype
) -> list[torch.Tensor]:
    """For each matrix [n, m] the initial Q [m, r], the same on all replicas."""
    generator = torch.Generator("cpu").manual_seed(state.random_seed + kept.reductions)
    guesses = []
    for i, matrix in enumerate(matrices):
        guess = kept.get(f"Q of {i}") if state.warm_start else None
        if guess is None:
            guess = torch.randn(matrix.shape[1], state.rank_of(matrix), generator=generator, device="cpu")
        guesses.append(guess.to(matrix.device, dtype))
    return guesses


def _orthonormal(matrix: torch.Tensor) -> torch.Tensor:
    """An orthonormal basis [n, r] of the columns of a matrix [n, r], completed if they are linearly dependent."""
    basis: torch.Tensor = torch.linalg.qr(matrix).Q
    return basis


def _averaged(
    tensors: Sequence[torch.Tensor], dtype: torch.dtype, average: Callable[[torch.Tensor], Pending]
) -> list[torch.Tensor]:
    """The means of these tensors over the replicas, by one collective, as views of one buffer."""
    buffer = torch.cat([tensor.reshape(-1).to(dtype) for tensor in tensors])
    average(buffer).wait()
    parts = buffer.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
