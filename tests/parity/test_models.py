"""Every example model, sharded, against single-process training and against PyTorch's fully_shard."""

from __future__ import annotations

import pytest
import torch

from models import EXAMPLES
from training import FP32, FP64, LAYOUTS, Options, assert_same, parity

CORE = ["gpt", "odd_mlp", "tied_within", "tied_across", "frozen"]


@pytest.mark.parametrize(
    ("name", "layout"),
    [(name, layout) for name, example in EXAMPLES.items() for layout in example.layouts],
)
def test_model(run_ranks, name, layout):
    assert_same(run_ranks(parity, name, Options(layout=layout), FP32))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CORE)
def test_model_on_four_ranks(run_ranks, name, layout):
    assert_same(run_ranks(parity, name, Options(layout=layout), FP32, world=4))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CORE)
def test_model_in_double_precision(run_ranks, name, layout):
    """Without fp32's rounding there is no room for a small mistake."""
    assert_same(run_ranks(parity, name, Options(layout=layout, dtype=torch.float64, steps=5), FP64))
