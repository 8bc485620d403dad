"""What users do with gradients and dtypes: optimizers inside backward, hooks, anomaly detection, casts of the model."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fullshard
from fullshard import fully_shard
from models import EXAMPLES
from training import LAYOUTS, Options, full_parameters, shard

both_layouts = pytest.mark.parametrize("layout", LAYOUTS)


def steps(model: nn.Module, example, after, count: int = 3) -> dict[str, Tensor]:
    for index in range(count):
        example.loss(model, example.batch(index, dist.get_rank())).backward()
        after()
    return full_parameters(model)


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name
    return True


@both_layouts
@pytest.mark.parametrize("name", ["gpt", "tied_across", "odd_mlp"])
def test_optimizer_in_backward(run_ranks, name, layout):
    assert all(run_ranks(optimizer_in_backward, name, layout))


def optimizer_in_backward(name: str, layout: str) -> bool:
    """An optimizer for each parameter, stepped by its post-accumulate hook: as one optimizer after backward."""
    example = EXAMPLES[name]
    plain, hooked = (shard(fullshard, example.make(), example, Options(layout=layout)) for _ in range(2))
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)

    def after() -> None:
        optimizer.step()
        optimizer.zero_grad()

    each = {p: torch.optim.AdamW([p], lr=1e-2) for p in hooked.parameters()}
    calls = []

    def now(parameter: Tensor) -> None:
        calls.append(parameter)
        each[parameter].step()
        each[parameter].zero_grad()

    for parameter in each:
        parameter.register_post_accumulate_grad_hook(now)
    want, got = steps(plain, example, after), steps(hooked, example, lambda: None)
    assert len(calls) == 3 * len(each)
    assert all(p.grad is None for p in hooked.parameters())
    return same(got, want)


@both_layouts
def test_detect_anomaly(run_ranks, layout):
    assert all(run_ranks(anomaly, layout))


def anomaly(layout: str) -> bool:
    example = EXAMPLES["gpt"]
    model, checked = (shard(fullshard, example.make(), example, Options(layout=layout)) for _ in range(2))

    def go(m: nn.Module) -> dict[str, Tensor]:
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        return steps(m, example, lambda: (optimizer.step(), optimizer.zero_grad()))

    want = go(model)
    with torch.autograd.detect_anomaly(check_nan=True):
        got = go(checked)
        with torch.no_grad():
            next(iter(checked.parameters())).fill_(float("nan"))
        with pytest.raises(RuntimeError, match="nan"):
            example.loss(checked, example.batch(0, dist.get_rank())).backward()
    return same(got, want)


@dataclass
class Result:
    """What `Talkative` returns."""

    loss: Tensor
    logits: Tensor
    labels: Tensor
    text: str


class Talkative(nn.Module):
    """Returns a tensor with gradients, one without, integers and a string, in a dataclass or a dict."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.inner = nn.Linear(4, 4)
        self.outer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> object:
        logits = self.outer(self.inner(x))
        parts = {"loss": logits.square().mean(), "logits": logits.detach(), "labels": logits.argmax(-1), "text": "ok"}
        return Result(**parts) if self.kind == "dataclass" else parts


@both_layouts
@pytest.mark.parametrize("kind", ["dataclass", "dict"])
def test_backward_through_structured_outputs(run_ranks, kind, layout):
    assert all(run_ranks(structured, kind, layout))


def structured(kind: str, layout: str) -> bool:
    model, whole = Talkative(kind), Talkative(kind)
    fully_shard(model.inner, layout=layout)
    fully_shard(model, layout=layout)
    x = torch.arange(8.0).view(2, 4)
    for m in (model, whole):
        out = m(x)
        loss, labels = (out.loss, out.labels) if kind == "dataclass" else (out["loss"], out["labels"])
        assert labels.dtype == torch.int64 and not labels.requires_grad
        loss.backward()
    for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)
    return True


@both_layouts
def test_outputs_without_gradients(run_ranks, layout):
    assert all(run_ranks(without_gradients, layout))


def without_gradients(layout: str) -> bool:
    """A unit whose output nobody can differentiate leaves nothing gathered, and later steps are right."""
    torch.manual_seed(0)
    chooser, body = nn.Linear(4, 4), nn.Linear(4, 4)

    class Chooses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.chooser, self.body = chooser, body

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x * (1.0 + self.chooser(x).argmax()))

    model = Chooses()
    fully_shard(model.chooser, layout=layout)
    fully_shard(model.body, layout=layout)
    fully_shard(model, layout=layout)
    for _ in range(3):
        model.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        assert model.chooser.weight.grad is None
        assert model.body.weight.grad is not None
        use = fullshard.memory_use(model)
        assert (use.gathered, use.reducing) == (0, 0)
    return True


CASTS = {
    "double": (lambda m: m.double(), torch.float64),
    "to": (lambda m: m.to(torch.float64), torch.float64),
    "half_and_back": (lambda m: m.half().float(), torch.float32),
    "bfloat16": (lambda m: m.bfloat16(), torch.bfloat16),
}


@both_layouts
@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("when", ["before the first step", "after it"])
def test_casts_of_a_sharded_model(run_ranks, cast, when, layout):
    """As the same cast of a sharded model before it was sharded (values go through the same dtypes)."""
    assert all(run_ranks(casts, cast, when, layout))


def casts(cast: str, when: str, layout: str) -> bool:
    function, dtype = CASTS[cast]
    example = EXAMPLES["odd_mlp"]
    model = shard(fullshard, example.make(), example, Options(layout=layout))
    if when == "after it":
        example.loss(model, example.batch(0, dist.get_rank())).backward()
        model.zero_grad()
    result = function(model)
    assert result is model
    other = shard(fullshard, function(example.make()), example, Options(layout=layout))
    assert {p.dtype for p in model.parameters()} == {dtype}

    def train(m: nn.Module) -> dict[str, Tensor]:
        optimizer = torch.optim.AdamW(m.parameters(), lr=1e-2)
        for index in range(2):
            inputs, targets = example.batch(index, dist.get_rank(), dtype)
            example.loss_of(m(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        return full_parameters(m)

    return same(train(model), train(other))


@both_layouts
def test_cast_takes_gradients_along(fake_world, layout):
    fake_world(2)
    model = fully_shard(nn.Linear(4, 4), layout=layout)
    model(torch.ones(1, 4)).sum().backward()
    before = [p.grad.to_local() if layout == "rows" else p.grad._local_tensor for p in model.parameters()]
    model.double()
    after = [p.grad.to_local() if layout == "rows" else p.grad._local_tensor for p in model.parameters()]
    assert [g.dtype for g in after] == [torch.float64] * 2
    assert all(torch.equal(a, b.double()) for a, b in zip(after, before, strict=True))


def test_moving_to_another_device_than_the_mesh_is_refused(fake_world):
    fake_world(2)
    model = fully_shard(nn.Linear(4, 4))
    model.to("meta")
    with pytest.raises(fullshard.FullshardError, match="meta"):
        model(torch.ones(1, 4))


@both_layouts
def test_cpu_offload_on_a_cpu_mesh(run_ranks, layout):
    """There the host is the device: the policy is accepted and changes nothing."""
    assert all(run_ranks(offloaded, layout))


def offloaded(layout: str) -> bool:
    example = EXAMPLES["gpt"]
    results = []
    for policy in (fullshard.OffloadPolicy(), fullshard.CPUOffloadPolicy(pin_memory=False)):
        model = example.make()
        for unit in [*example.units(model), model]:
            fully_shard(unit, layout=layout, offload_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

        def after(model=model, optimizer=optimizer) -> None:
            fullshard.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()

        results.append(steps(model, example, after))
        assert {p.device.type for p in model.parameters()} == {"cpu"}
    return same(*results)


# Parameters that are frozen and trained again, and inputs that need a gradient in some steps only.


def two_layers() -> nn.Sequential:
    """A unit of two layers, so that one of them can be frozen, and the root."""
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(2, 5), nn.GELU(), nn.Linear(5, 5))
    return nn.Sequential(inner, nn.Tanh(), nn.Linear(5, 1)).double()


def sharded_two_layers(layout: str) -> nn.Sequential:
    model = two_layers()
    fully_shard(model[0], layout=layout)
    return fully_shard(model, layout=layout)


def gradients_equal(model: nn.Module, x: Tensor, reference: nn.Module, same_x: Tensor) -> bool:
    """The gradients of both models' parameters and inputs, which were given the same batch on every rank."""
    for got, want in zip((*model.parameters(), x), (*reference.parameters(), same_x), strict=True):
        assert (got.grad is None) == (want.grad is None)
        if want.grad is not None:
            whole = got.grad.full_tensor() if hasattr(got.grad, "full_tensor") else got.grad
            torch.testing.assert_close(whole, want.grad, rtol=1e-12, atol=1e-14)
    return True


@both_layouts
def test_what_is_frozen_and_what_needs_a_gradient_varies(run_ranks, layout):
    assert all(run_ranks(varying, layout))


def varying(layout: str) -> bool:
    """A frozen layer's weight is needed as long as the input needs a gradient, whatever else is complete."""
    model, reference = sharded_two_layers(layout), two_layers()
    generator = torch.Generator().manual_seed(0)
    for _ in range(24):
        trains = torch.rand(5, generator=generator) < 0.5
        x = torch.randn(3, 2, generator=generator, dtype=torch.float64, requires_grad=bool(trains[4]))
        same_x = x.detach().clone().requires_grad_(x.requires_grad)
        for each, batch in ((model, x), (reference, same_x)):
            for parameter, trained in zip(each[0].parameters(), trains, strict=False):
                parameter.requires_grad_(bool(trained))
            each.zero_grad()
            each(batch).square().mean().backward()
        assert gradients_equal(model, x, reference, same_x)
    return True


def penalised(model: nn.Module, x: Tensor, order: str) -> None:
    """A gradient penalty, with what happens between the two backwards of its loss and after them."""
    loss = model(x).square().mean()
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    loss = loss + slope.square().sum()
    if order == "again":
        loss.backward(retain_graph=True)
        loss.backward()
        return
    other = model(2 * x).mean() if order != "alone" else None
    losses = {"alone": [loss], "other after": [loss, other], "other before": [other, loss]}[order]
    for each in losses:
        each.backward()


@both_layouts
@pytest.mark.parametrize("order", ["alone", "again", "other after", "other before"])
@pytest.mark.parametrize("frozen", [(), (0, 1), (2, 3), (0, 1, 2, 3)], ids=str)
def test_a_second_backward_finds_the_parameters_gathered(run_ranks, frozen, order, layout):
    assert all(run_ranks(second_backward, frozen, order, layout))


def second_backward(frozen: tuple[int, ...], order: str, layout: str) -> bool:
    model, reference = sharded_two_layers(layout), two_layers()
    for index in frozen:
        for each in (model, reference):
            list(each[0].parameters())[index].requires_grad_(False)
    for seed in range(2):
        x = torch.randn(3, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64, requires_grad=True)
        same_x = x.detach().clone().requires_grad_()
        for each, batch in ((model, x), (reference, same_x)):
            each.zero_grad()
            penalised(each, batch, order)
        assert gradients_equal(model, x, reference, same_x)
    return True


@both_layouts
@pytest.mark.parametrize("when", ["after an error", "after unshard"])
def test_what_is_frozen_while_whole_parameters_are_seen_stays_frozen(run_ranks, when, layout):
    assert all(run_ranks(frozen_while_seen, when, layout))


def frozen_while_seen(when: str, layout: str) -> bool:
    model, x = sharded_two_layers(layout), torch.ones(3, 2, dtype=torch.float64)

    def fail(_: Tensor) -> None:
        raise KeyError

    def fail_in_backward(module: nn.Module, inputs: object, output: Tensor) -> None:
        output.register_hook(fail)

    if when == "after unshard":
        model[0].unshard()
    else:
        handle = model[0][0].register_forward_hook(fail_in_backward)
        with pytest.raises(KeyError):
            model(x).sum().backward()
        handle.remove()
        model.zero_grad()
    model[0][2].weight.requires_grad_(False)
    for _ in range(2):
        model(x).sum().backward()
        trained = {name for name, p in model.named_parameters() if p.grad is not None}
        assert trained == {name for name, _ in model.named_parameters()} - {"0.2.weight"}
        model.zero_grad()
    return True
