"""A step on fake tensors: what it counts, and that it leaves the model alone."""

from __future__ import annotations

import gc
import threading
import time

import pytest
import torch
from allocations import mark, watch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import models
from fullshard import MixedPrecisionPolicy
from fullshard.insight.planner.profile import Profile, Step, TooMuch, Tracker, profile
from fullshard.torch_private.fake_tensors import Remembered
from fullshard.watcher import process

BLOCKS = [f"blocks.{i}" for i in range(3)]


def units(*paths: str, dtype: torch.dtype | None = None) -> dict[str, MixedPrecisionPolicy]:
    return dict.fromkeys([*paths, ""], MixedPrecisionPolicy(dtype))


def step(model: nn.Module, batch: int, length: int) -> torch.Tensor:
    tokens = torch.zeros(batch, length, dtype=torch.int64)
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


@pytest.mark.parametrize("recompute", [False, True])
def test_the_peak_is_what_the_allocator_reports(recompute):
    """Without units below the root: nothing is freed but at the end, as in plain PyTorch."""
    planned = profile(models.GPT(3), units(*BLOCKS) if recompute else units(), step, 4, 12, checkpointing=recompute)
    gc.collect()
    with watch() as watched:
        model = models.GPT(3)
        for block in model.blocks if recompute else ():
            forward = block.forward
            block.forward = lambda x, f=forward: checkpoint(f, x, use_reentrant=False, preserve_rng_state=False)
        for name in "ab":
            with mark(name):
                step(model, 4, 12).backward()
                gradients = sum(p.grad.nbytes for p in model.parameters())
                model.zero_grad()
    window = watched.windows["b"]
    measured = window.peak - window.start
    peak = max(moment.peak.activations + moment.peak.logits for moment in planned.moments)
    if recompute:  # gradients of a block that is done do not count
        assert measured - gradients <= peak <= measured
    else:
        assert peak == pytest.approx(measured, abs=64)


@pytest.mark.parametrize("name", models.EXAMPLES)
def test_operations_that_ran_before_give_what_they_gave(monkeypatch, name):
    """Every model's profile is the same without what is remembered of shapes; and most operations are remembered."""
    example = models.EXAMPLES[name]

    def one_step(model: nn.Module, samples: int, _: int) -> torch.Tensor:
        return example.loss(model, example.batch(0, 0, samples=samples))

    def profiled() -> Profile:
        model = example.make()
        paths = {module: path for path, module in model.named_modules()}
        found = [unit if isinstance(unit, list) else [unit] for unit in example.units(model)]
        own = [paths[module] for modules in found for module in modules]
        return profile(model, units(*own), one_step, 3, 1, checkpointing=True)

    remembered = profiled()
    monkeypatch.setattr(Remembered, "__call__", lambda self, func, args, kwargs: func(*args, **kwargs))
    assert profiled() == remembered


def test_a_layer_more_costs_torch_nothing_more():
    """All its operations but views of its own parameters are remembered; if not, torch's counters have changed."""
    looked_up = []
    for layers in (3, 4, 8):
        before = FakeTensorMode.cache_info()
        profile(models.GPT(layers), units(*[f"blocks.{i}" for i in range(layers)]), step, 2, 12)
        after = FakeTensorMode.cache_info()
        looked_up.append(sum(after.bypasses.values()) + after.hits + after.misses)
        looked_up[-1] -= sum(before.bypasses.values()) + before.hits + before.misses
    per_layer = (looked_up[2] - looked_up[1]) / 4
    assert per_layer < 30, looked_up


def test_more_bytes_than_fit_end_a_profile_where_they_are_allocated():
    """A model without checkpointing that does not fit is not run to its end."""
    model, reached = models.GPT(8), []
    for index, block in enumerate(model.blocks):
        block.register_forward_pre_hook(lambda *_, index=index: reached.append(index))
    whole = profile(model, units(*[f"blocks.{i}" for i in range(8)]), step, 4, 12)
    peak = max(moment.peak.activations + moment.peak.logits for moment in whole.moments)
    reached.clear()
    with pytest.raises(TooMuch):
        profile(model, units(*[f"blocks.{i}" for i in range(8)]), step, 4, 12, most=peak // 4)
    assert reached and max(reached) < 4
    assert profile(model, units(*[f"blocks.{i}" for i in range(8)]), step, 4, 12, most=peak) == whole


@pytest.mark.xdist_group("transformers")
def test_a_model_of_transformers_is_planned_unpacked():
    """Real batches have no mask of all scores; a plan had one, as it cannot read the values of position ids."""
    transformers = pytest.importorskip("transformers", reason="its model")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, use_cache=False)

    def one_step(model: nn.Module, batch: int, length: int, **how: torch.Tensor) -> torch.Tensor:
        return model(torch.zeros(batch, length, dtype=torch.int64), **how).logits.square().mean()

    def packed(model: nn.Module, batch: int, length: int) -> torch.Tensor:
        return one_step(model, batch, length, position_ids=torch.arange(length)[None])

    def peak(step: Step) -> int:
        planned = profile(transformers.LlamaForCausalLM(config), units(), step, 1, 512)
        return max(moment.peak.activations + moment.peak.logits for moment in planned.moments)

    gc.collect()
    with watch() as watched:
        model = transformers.LlamaForCausalLM(config)
        for name in "ab":
            with mark(name):
                one_step(model, 1, 512).backward()
                model.zero_grad()
    window = watched.windows["b"]
    assert peak(one_step) == pytest.approx(window.peak - window.start, rel=0.01)
    assert peak(packed) > 1.2 * peak(one_step)


def test_moments_come_in_the_order_of_the_step():
    moments = [(m.kind, m.unit) for m in profile(models.GPT(3), units(*BLOCKS), step, 2, 12).moments]
    forward = [(kind, unit) for unit in BLOCKS for kind in ("enter", "leave")]
    backward = [(kind, unit) for unit in reversed(BLOCKS) for kind in ("back", "done")]
    assert moments == [("enter", ""), *forward, ("leave", ""), ("back", ""), *backward, ("done", "")]


def test_flops_are_those_of_the_matrix_products():
    """2 per multiplication and addition, three times for forward and backward; the first layer's input needs none."""
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 16, bias=False), nn.Tanh()), nn.Linear(16, 4, bias=False))
    planned = profile(model, units(), lambda m, n, _: m(torch.ones(n, 8)).sum(), 5, 1)
    first, second = 2 * 5 * 8 * 16, 2 * 5 * 16 * 4
    assert planned.flops == 2 * first + 3 * second
    again = profile(
        model, units("0"), lambda m, n, _: m(torch.ones(n, 8, requires_grad=True)).sum(), 5, 1, checkpointing=True
    )
    assert again.flops == 4 * first + 3 * second


def test_the_model_is_left_as_it_was():
    model = models.GPT(2, tied=True)
    before = dict(model.named_parameters(remove_duplicate=False))
    values = {name: parameter.detach().clone() for name, parameter in before.items()}
    profile(model, units(*BLOCKS[:2], dtype=torch.bfloat16), step, 2, 12, checkpointing=True)
    with pytest.raises(ZeroDivisionError):
        profile(model, units(*BLOCKS[:2]), lambda *_: 1 / 0, 2, 12)
    after = dict(model.named_parameters(remove_duplicate=False))
    assert all(after[name] is parameter for name, parameter in before.items())
    assert all(torch.equal(after[name], value) for name, value in values.items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_watcher_that_looks_at_the_stack_changes_nothing(monkeypatch):
    """Slowly, as on a busy machine: the frames that it has in hand outlive their functions."""
    expected = profile(models.GPT(3), units(*BLOCKS), step, 4, 12)
    plain = process.Frame

    def slow(*args: str) -> process.Frame:
        time.sleep(1e-4)
        return plain(*args)

    monkeypatch.setattr(process, "Frame", slow)
    main, ends, looks = threading.get_ident(), threading.Event(), []

    def look() -> None:
        while not ends.is_set():
            looks.append(len(process.frames_at(main)))
            time.sleep(1e-4)

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        profiles = [profile(models.GPT(3), units(*BLOCKS), step, 4, 12) for _ in range(5)]
    finally:
        ends.set()
        watcher.join()
    assert profiles == [expected] * 5 and len(looks) > 5


def test_what_the_loss_holds_counts_as_logits():
    """The logits, the log-probabilities, and the gradients of these; nothing before the last block."""
    moments = profile(models.GPT(3), units(*BLOCKS), step, 4, 12).moments
    logits = 4 * 12 * models.GPT(3)(torch.zeros(1, 1, dtype=torch.int64)).shape[-1] * 4
    counted = {(moment.kind, moment.unit): moment.peak.logits for moment in moments}
    last = moments.index(next(m for m in moments if m.kind == "leave" and m.unit == BLOCKS[-1]))
    assert all(moment.peak.logits == 0 for moment in moments[:last])
    assert 2 * logits <= counted["leave", ""] <= 4 * logits
    assert counted["done", BLOCKS[0]] < logits


@pytest.mark.parametrize("dims", [(2, 2), (2, 3), (3, 2), (3, 3)])
def test_grouped_products_in_float32_have_the_shapes_of_real_ones(dims):
    """As Mixtral's experts compute them; torch's own fake kernel takes bfloat16 only."""
    ends = torch.tensor([8, 16], dtype=torch.int32)
    first = torch.randn((2, 16, 32) if dims[0] == 3 else (16, 32))
    second = torch.randn((2, 32, 24) if dims[1] == 3 else (32, 24))
    if dims == (2, 2):
        ends *= 2  # groups of the inner dim
    arguments = (first, second) if dims == (3, 3) else (first, second, ends)
    real = torch._grouped_mm(*arguments)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(tensor) for tensor in arguments]
        with Tracker(fakes):
            fake = torch._grouped_mm(*fakes)
    assert (fake.shape, fake.dtype) == (real.shape, real.dtype)
