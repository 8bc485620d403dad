"""Which replica steps which elements of the shards that all replicas hold, and the exchange of the new values.

On a mesh (replicate, shard) the ranks of a replicate axis hold equal shards and, after the all-reduce, equal gradients.
Each steps some of the elements and sends the new values to the others:

    elements of one unit's parameters on this rank, in memory order      0 ............... 128 ............... 256
    replica 0 steps, and sends                                           [0 .............. 128)
    replica 1 steps, and sends                                                             [128 ............. 256)

An exchange is one all-to-all without padding. For L elements of which a replica steps l, it sends (R - 1) l elements
and receives L - l: over all R replicas (R - 1) L are sent, as by an all-gather.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
import torch.distributed as dist

from ..comm import Watched
from ..mesh import Axis, backend_of, device_of
from ..torch_private.foreach import copy_all
from ..watcher import RANK

GRAIN = 64
"""Parameters are cut at multiples of this many elements, two AVX-512 registers of 16-bit numbers: vectorized kernels on
CPUs then process each element as they would in the whole tensor, so that results are the same to the bit."""


def element_bounds(sizes: Sequence[int], replicas: int) -> list[list[int]]:
    """Cut consecutive tensors into equal runs, one per replica.

    Args:
        sizes: elements of each tensor.
        replicas: number of runs.

    Returns:
        For each tensor `replicas + 1` bounds: replica r steps its elements [bounds[r], bounds[r + 1]). Cuts inside a
        tensor are at multiples of `GRAIN`.
    """
    total = sum(sizes)
    bounds = []
    for stop, size in zip(accumulate(sizes), sizes, strict=True):
        cuts = [total * replica // replicas - (stop - size) for replica in range(replicas + 1)]
        bounds.append([size if cut >= size else max(cut, 0) // GRAIN * GRAIN for cut in cuts])
    return bounds


def run_of(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """A 1-D view of a dense plain tensor's elements [start, stop) in the order in which they lie in memory."""
    return tensor.as_strided((stop - start,), (1,), tensor.storage_offset() + start)


def like_order(tensor: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """`tensor` with its elements in memory in the order of `order`, which is dense: itself, or a copy."""
    strides = zip(tensor.stride(), order.stride(), order.shape, strict=False)
    if tensor.shape == order.shape and all([ours == theirs or size < 2 for ours, theirs, size in strides]):
        return tensor
    return torch.empty_like(order, dtype=tensor.dtype, device=tensor.device).copy_(tensor.view(order.shape))


def exchange(
    group: dist.ProcessGroup, sent: torch.Tensor, sizes: Sequence[int], expected: Sequence[int]
) -> Callable[[], torch.Tensor]:
    """Start an all-to-all of a 1-D tensor: `sizes` and `expected` are the elements sent to and received from each rank.

    Returns:
        A function that waits for it and returns what was received; called once. It keeps `sent` until then. Raises a
        `DivergenceError` if the exchange never completes, on hosts that wait for it.
    """
    received = sent.new_empty(sum(expected))
    width = sent.dtype.itemsize  # as bytes: backends support different dtypes
    output_splits, input_splits = [width * size for size in expected], [width * size for size in sizes]
    output, data = received.view(torch.uint8), sent.view(torch.uint8)
    RANK.talks("optimizers' state")
    work = dist.all_to_all_single(output, data, output_splits, input_splits, group=group, async_op=True)
    if work is not None and backend_of(group, device_of(group).type) == "gloo":
        work = Watched(work)
    under_way = [(work, sent, received)]

    def finish() -> torch.Tensor:
        work, _, received = under_way.pop()  # freed at the end, `received` by the caller
        if work is not None:  # in a planned step there is none
            work.wait()
        return received

    return finish


def spread(axis: Axis, by_replica: Sequence[Sequence[torch.Tensor]]) -> None:
    """Copy each replica's tensors into those of the other replicas. Collective over the replicate axis.

    Args:
        axis: the replicate axis.
        by_replica: for each replica, this rank's tensors that the replica has stepped: of one dtype, at least one of
            them, and of the same shapes on all ranks of the axis. Those of other replicas are overwritten.
    """
    home = device_of(axis.group)  # offloaded shards are on the CPU
    sizes = [sum(tensor.numel() for tensor in tensors) for tensors in by_replica]
    others = [replica for replica in range(axis.size) if replica != axis.rank]
    dtype = next(tensor.dtype for tensors in by_replica for tensor in tensors)
    sent = torch.empty(len(others), sizes[axis.rank], dtype=dtype, device=home)
    if ours := by_replica[axis.rank]:
        sent[0] = torch.cat([tensor.reshape(-1) for tensor in ours])
    sent[1:] = sent[0]
    received = exchange(
        axis.group,
        sent.view(-1),
        [0 if replica == axis.rank else sizes[axis.rank] for replica in range(axis.size)],
        [0 if replica == axis.rank else size for replica, size in enumerate(sizes)],
    )()
    targets = [tensor for replica in others for tensor in by_replica[replica]]
    values = received.split([tensor.numel() for tensor in targets])
    copy_all(targets, [value.view(tensor.shape) for tensor, value in zip(targets, values, strict=True)])
