"""A run of a tensor's elements as rectangles, for checkpoints that store rectangles.

    shape (4, 5), elements [3, 17)         three rectangles
      . . . x x                            offset (0, 3) size (1, 2)
      x x x x x                            offset (1, 0) size (2, 5)
      x x x x x
      x x . . .                            offset (3, 0) size (1, 2)

Pure: integers in, integers out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Rectangle:
    """A block of a tensor, and the position of its elements in the run.

    Attributes:
        offsets: first index on every dim.
        sizes: extent on every dim.
        start: its first element within the run; its other elements follow without gaps.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int


def rectangles(shape: tuple[int, ...], start: int, stop: int) -> tuple[Rectangle, ...]:
    """The smallest set of rectangles, in order, that covers elements [start, stop) of a row-major tensor of `shape`.

    At most 2 * ndim - 1 rectangles; none for an empty run. A 0-dimensional tensor has a single element.
    """
    result: list[Rectangle] = []
    _cover(shape, (), start, stop, 0, result)
    return tuple(result)


def _cover(
    shape: tuple[int, ...], at: tuple[int, ...], start: int, stop: int, done: int, result: list[Rectangle]
) -> None:
    """Cover [start, stop) of the sub-tensor of `shape` at index `at` of the leading dims."""
    if start >= stop:
        return
    lead = (1,) * len(at)
    if not shape or (start == 0 and stop == math.prod(shape)):
        result.append(Rectangle(at + (0,) * len(shape), lead + shape, done))
        return
    inner = math.prod(shape[1:])
    first, last = start // inner, (stop - 1) // inner
    if first == last:
        _cover(shape[1:], (*at, first), start - first * inner, stop - first * inner, done, result)
        return
    if start % inner:
        _cover(shape[1:], (*at, first), start - first * inner, inner, done, result)
        done += (first + 1) * inner - start
        first += 1
    whole = stop // inner - first
    if whole > 0:
        result.append(Rectangle((*at, first) + (0,) * (len(shape) - 1), (*lead, whole, *shape[1:]), done))
        done += whole * inner
        first += whole
    if stop % inner:
        _cover(shape[1:], (*at, first), 0, stop - first * inner, done, result)
