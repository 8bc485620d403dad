"""Waits that look up now and then: what a collective ends with is told, whenever it ends."""

from __future__ import annotations

from datetime import timedelta

import pytest

from fullshard.comm.watched import Watched


class Work:
    """A collective that ends after some looks at it, with an error if there is one.

    Args:
        slices: how many waits are over before it ends.
        ends_after_a_slice: whether it ends right after a slice did, before anybody asks.
        error: what it fails with.
    """

    def __init__(self, slices: int, ends_after_a_slice: bool, error: str | None) -> None:
        self.slices, self.ends_after_a_slice, self.error = slices, ends_after_a_slice, error
        self.ended = False

    def is_completed(self) -> bool:
        return self.ended

    def wait(self, timeout: timedelta | None = None) -> None:
        if not self.ended:
            assert timeout is not None, "waited for without a look at the watcher"
            self.slices -= 1
            self.ended = self.slices <= 0
            if not self.ended or self.ends_after_a_slice:
                raise RuntimeError("Operation timed out!")  # what gloo says when a slice is over
        if self.error is not None:
            raise RuntimeError(self.error)


@pytest.mark.parametrize("ends_after_a_slice", [False, True])
@pytest.mark.parametrize("slices", [1, 2, 5])
def test_a_collective_that_ends_while_a_slice_does_has_not_failed(slices: int, ends_after_a_slice: bool) -> None:
    work = Work(slices, ends_after_a_slice, None)
    Watched(work).wait()
    assert work.ended


@pytest.mark.parametrize("ends_after_a_slice", [False, True])
@pytest.mark.parametrize("slices", [1, 2, 5])
def test_a_collective_that_fails_is_never_taken_for_a_good_one(slices: int, ends_after_a_slice: bool) -> None:
    with pytest.raises(RuntimeError, match="Connection closed"):
        Watched(Work(slices, ends_after_a_slice, "Connection closed by peer")).wait()
