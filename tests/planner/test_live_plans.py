"""`explain_memory(model, optimizer)` plans a copy of the live model, with inputs as it was called with."""

from __future__ import annotations

import gc
import random
import weakref
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from test_explained_changes import Block, Model, begin
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fullshard
from fullshard import FullyShardedDataParallel, MixedPrecisionPolicy, explain_memory, fully_shard
from fullshard.insight.planner.live import plan_changes
from fullshard.runtime import runner_of

ROWS, WIDTH = 4, 32
MIXED = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def step(model: nn.Module, micro_batch: int, sequence: int) -> Tensor:
    return model(torch.ones(micro_batch, WIDTH, 7)).sum()


def by_blocks(model: nn.Module, **how: Any) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, **how)
    return fully_shard(model, **{**how, "reshard_after_forward": None})


def compiled(model: nn.Module) -> nn.Module:
    for index, block in enumerate(model.blocks):
        if index % 2:
            model.blocks[index] = torch.compile(block, backend="eager")
        else:
            block.compile(backend="eager")
    return by_blocks(model)


def frozen_in_part(model: nn.Module) -> nn.Module:
    for block in model.blocks:
        block.up.weight.requires_grad_(False)
    return model


def wrapped(model: nn.Module, use_orig_params: bool) -> nn.Module:
    return FullyShardedDataParallel(model, auto_wrap_policy={Block}, use_orig_params=use_orig_params)


def tied(model: nn.Module) -> nn.Module:
    model.blocks[3].up.weight = model.blocks[1].up.weight
    return model


WAYS: dict[str, tuple[Callable[[nn.Module], nn.Module], Callable[[nn.Module], nn.Module]]] = {
    "rows": (lambda model: model, by_blocks),
    "flat, kept": (lambda model: model, partial(by_blocks, layout="flat", reshard_after_forward=False)),
    "mixed precision": (lambda model: model, partial(by_blocks, mp_policy=MIXED)),
    "the wrapper": (lambda model: model, partial(wrapped, use_orig_params=True)),
    "one flat parameter each": (lambda model: model, partial(wrapped, use_orig_params=False)),
    "compiled": (lambda model: model, compiled),
    "frozen in part": (frozen_in_part, by_blocks),
    "tied": (tied, by_blocks),
}


def planned_both_ways(way: str) -> Any:
    """Peak and changes of the live model, and of the one that was built."""
    begin(8)
    prepare, shard = WAYS[way]
    model = shard(prepare(Model()))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(2):
        step(model, ROWS, 1).backward()
        optimizer.step()
        optimizer.zero_grad()
    before = model.state_dict(), torch.get_rng_state()
    now, changes, _ = plan_changes(model, optimizer)
    built, expected, _ = plan_changes(model, optimizer, lambda: prepare(Model()), step=step, batch=ROWS)
    said = explain_memory(model, optimizer)
    assert all((words in said) is (saved > 0) for words, saved in changes.items()), said
    after = model.state_dict(), torch.get_rng_state()
    assert torch.equal(before[1], after[1]) and before[0].keys() == after[0].keys()
    step(model, ROWS, 1).backward()  # it still trains
    return (now.peak, changes), (built.peak, expected)


@pytest.mark.parametrize("way", WAYS)
def test_the_live_model_is_planned_as_the_one_that_was_built(in_a_process, way):
    live, built = in_a_process(planned_both_ways, way)
    assert live == built and len(live[1]) >= 4


def checkpointed(model: nn.Module, around: bool, reentrant: bool) -> nn.Module:
    """Checkpoints around units, or inside them."""
    wrap = partial(apply_activation_checkpointing, model, check_fn=lambda module: isinstance(module, Block))
    if reentrant:
        for block in model.blocks:
            fully_shard(block)
            model.blocks[int(block.index)] = Reentrant(block)
    elif around:
        for block in model.blocks:
            fully_shard(block)
        wrap()
    else:
        wrap()
        for block in model.blocks:
            fully_shard(block)
    return fully_shard(model)


class Reentrant(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=True)


def peak_with_checkpoints(around: bool, reentrant: bool) -> tuple[int, int, int]:
    from allocations import mark, watch

    begin(8)
    with watch() as watched:
        model = Model()
        for index, block in enumerate(model.blocks):
            block.index = index
        model = checkpointed(model, around, reentrant)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for index in range(3):
            with mark(str(index)):
                step(model, ROWS, 1).backward()
                optimizer.step()
                optimizer.zero_grad()
    now, changes, _ = plan_changes(model, optimizer)
    return watched.windows["2"].peak, now.peak, changes["activation checkpointing of the units"]


@pytest.mark.parametrize(("around", "reentrant"), [(False, False), (True, False), (True, True)])
def test_checkpoints_of_the_model_itself_are_planned(in_a_process, around, reentrant):
    """Its own recomputation opens a unit for its backward, once: within 2% of the allocator."""
    measured, planned, saved = in_a_process(peak_with_checkpoints, around, reentrant)
    assert planned == pytest.approx(measured, rel=0.02) and saved < 0.02 * measured


# Tensor parallelism.


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(128, 64), nn.ModuleList(Layer() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, 128, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def sequence_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Activations between matrices are split on the sequence (Korthikanti et al. 2022, section 4.2.2)."""
    outside = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    inside = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    parallelize_module(model, mesh, outside)
    for block in model.blocks:
        parallelize_module(block, mesh, inside)


def tokens_step(model: nn.Module, micro_batch: int, sequence: int) -> Tensor:
    return model(torch.zeros(micro_batch, sequence, dtype=torch.int64)).sum()


SHARES = {"all_reduce": 1.0, "all_gather_into_tensor": 1.0, "reduce_scatter_tensor": 0.5}


class Sent(TorchDispatchMode):
    """Counts the bytes that a rank of two sends in functional collectives, and their number."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes, self.count = 0.0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        if func.namespace == "_c10d_functional" and func.overloadpacket.__name__ in SHARES:
            self.nbytes += SHARES[func.overloadpacket.__name__] * args[0].nbytes
            self.count += 1
        return func(*args, **(kwargs or {}))


def tensor_parallel(policy: MixedPrecisionPolicy) -> Any:
    begin(8)
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("data", "tensor"))
    model = Language()
    sequence_parallel(model, mesh["tensor"])
    model = by_blocks(model, mesh=mesh["data"], mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(3):
        with Sent() as sent:
            tokens_step(model, 4, 16).backward()
        optimizer.step()
        optimizer.zero_grad()
    how: dict[str, Any] = {"ranks": 4, "batch": 4, "sequence": 16, "step": tokens_step, "mp_policy": policy}
    make = partial(torch.optim.AdamW, fused=True)
    strategy = fullshard.Strategy(micro_batch=4)
    split: dict[str, Any] = {"tensor_parallel": 2, "parallelize": sequence_parallel}
    before = fullshard.plan(Language, strategy=strategy, optimizer=make, **how, **split).best
    now, *_ = plan_changes(model, optimizer)
    return sent.nbytes, sent.count, before.sent, before.collectives["tensor"], before.peak, now.sent, now.peak


@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), MIXED], ids=["float32", "bfloat16"])
def test_sequence_parallel_traffic_is_counted_to_the_byte(in_a_process, policy):
    """Gathers and scatters of activations, and the sums of norms' gradients in the dtype of the reduction."""
    nbytes, count, sent, planned_count, peak, live, live_peak = in_a_process(tensor_parallel, policy)
    assert (sent["tensor"], planned_count) == (nbytes, count) and count == 25
    assert live == sent and live_peak == peak


def experts() -> tuple[int, int]:
    begin(8)
    model, mesh = Routed(), init_device_mesh("cpu", (2, 4), mesh_dim_names=("copies", "experts"))
    apart = fullshard.ShardPlacementResult(placement=Shard(0), mesh=mesh["experts"])
    fully_shard(model, shard_placement_fn=lambda p: apart if p is model.weight else None)
    model(torch.ones(4, 16)).sum().backward()
    strategy = fullshard.Strategy(micro_batch=4)
    how: dict[str, Any] = {"ranks": 8, "batch": 4, "meshes": {"weight": (4, 1)}, "strategy": strategy}
    before = fullshard.plan(Routed, step=lambda m, n, _: m(torch.ones(n, 16)).sum(), optimizer=lambda p: [], **how).best
    return plan_changes(model, None)[0].peak, before.peak


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.dense = nn.Parameter(torch.ones(8, 16, 16)), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bi,eij->bj", self.dense(x), self.weight)


def test_parameters_on_a_mesh_of_their_own_are_planned_there(in_a_process):
    now, before = in_a_process(experts)
    assert now == before


# What is run.


class Program(nn.Module):
    """Keeps what it saw, as programs do; `call` replaces its last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 64), nn.Linear(64, 8)
        self.scale, self.seen, self.count = torch.ones(64), [], 0
        self.call: Callable[[Tensor], Tensor] | None = None

    def forward(self, batch: dict[str, Any], *, double: bool = False) -> dict[str, Tensor]:
        self.count += 1
        x = self.first(batch["x"]) * self.scale
        self.seen.append(x)
        x = (self.call or self.last)(x)
        return {"loss": x.square().mean() * (1 + double), "logits": x}


def program(fake_world: Any) -> nn.Module:
    fake_world(8)
    model = Program()
    fully_shard(model.last)
    return fully_shard(model)


def halves(model: nn.Module) -> int:
    return plan_changes(model, None)[1].get("half the micro-batch, and twice as many of them", 0)


def test_the_inputs_of_the_last_forward_are_planned_and_not_kept(fake_world):
    model = program(fake_world)
    for rows in (4, 400, 40):
        x = torch.ones(rows, 8)
        model({"x": x, "name": "train"}, double=True)["loss"].backward()
        freed = halves(model)
        assert 0.2 * rows * 64 * 4 < freed < 4 * rows * 64 * 4  # of the order of an activation of `first`
    reference = weakref.ref(x)
    model.seen.clear()
    del x
    gc.collect()
    assert reference() is None


class Attributes(dict[str, Any]):
    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.__dict__ = self


@dataclass(frozen=True)
class Batch:
    x: Tensor

    @cached_property
    def double(self) -> Tensor:
        return self.x * 2


Pair = namedtuple("Pair", ["name", "x"])


class Takes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, batch: Any) -> Tensor:
        if isinstance(batch, dict):
            return self.layer(batch["x"])
        return self.layer(batch.double if isinstance(batch, Batch) else batch[1])


CONTAINERS: dict[str, tuple[Callable[[Tensor], Any], bool]] = {
    "a dict": (lambda x: {"x": x}, True),
    "an ordered dict": (lambda x: OrderedDict(x=x), True),
    "a named tuple": (partial(Pair, "train"), True),
    "a dataclass": (Batch, True),
    "a list": (lambda x: ["train", x], True),
    "a dict that is its attributes": (lambda x: Attributes(x=x), False),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_no_tensor_of_a_batch_lives_on(fake_world, name):
    fake_world(8)
    make, is_planned = CONTAINERS[name]
    model, alive = fully_shard(Takes()), []
    for _ in range(3):
        batch = make(torch.ones(4, 8))
        if isinstance(batch, Batch):
            tensors = [batch.x, batch.double]
        else:
            tensors = [batch["x"]] if isinstance(batch, dict) else [batch[1]]
        alive = [weakref.ref(tensor) for tensor in tensors]
        model(batch).sum().backward()
        del batch, tensors
    gc.collect()
    assert alive and not any(reference() is not None for reference in alive)
    assert ("could not be planned" in explain_memory(model)) is not is_planned


def test_inputs_of_other_names_or_dtypes_are_noticed(fake_world):
    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, a: Any = None, b: Any = None) -> Tensor:
            return self.layer((b if a is None else a).float())

    fake_world(8)
    model = fully_shard(Either())
    kept = []
    for inputs in ({"a": torch.ones(2, 8)}, {"b": torch.ones(2, 8)}, {"b": torch.ones(2, 8, dtype=torch.int64)}):
        model(**inputs).sum().backward()
        root = runner_of(model).root
        kept.append({key: value.dtype for key, value in root.inputs.kwargs.items()})
    assert kept == [{"a": torch.float32}, {"b": torch.float32}, {"b": torch.int64}]


def test_random_generators_are_where_they_were(fake_world):
    """A rank that asks alone draws the same layers and noise afterwards as ranks that did not."""
    model = program(fake_world)

    model.call = partial(drawn, model.last)
    model({"x": torch.ones(4, 8)})["loss"].backward()
    for module in (random, np.random, torch):
        module.manual_seed(3) if module is torch else module.seed(3)
    expected = random.random(), np.random.rand(), torch.rand(())
    for module in (random, np.random, torch):
        module.manual_seed(3) if module is torch else module.seed(3)
    assert halves(model) > 0
    assert (random.random(), np.random.rand(), torch.rand(())) == expected


def drawn(last: nn.Module, x: Tensor) -> Tensor:
    return last(F.dropout(x, random.random()) * np.random.rand())


class Meter:
    """An object of no known kind, which a forward writes to."""

    def __init__(self) -> None:
        self.last, self.count = torch.zeros(()), np.zeros(1)

    def update(self, value: Tensor) -> None:
        self.last = value.detach()
        self.count += 1


class Measured(Program):
    def __init__(self) -> None:
        super().__init__()
        self.meter = Meter()

    def forward(self, batch: dict[str, Any]) -> Tensor:
        loss = self.last(self.first(batch["x"])).sum()
        self.meter.update(loss)
        return loss


def test_objects_that_a_forward_writes_to_are_not_touched(fake_world):
    """So they are copied, too: no object is known to be only read."""
    fake_world(8)
    model = fully_shard(Measured())
    model({"x": torch.ones(4, 8)}).backward()
    last = model.meter.last
    assert halves(model) > 0
    assert model.meter.last is last and model.meter.count == 1


def test_nothing_of_the_live_model_is_touched(fake_world):
    model, hooked = program(fake_world), []
    handle = model.last.register_forward_hook(lambda *_: hooked.append(1))
    model({"x": torch.ones(4, 8)})["loss"].backward()
    seen, count, calls = list(model.seen), model.count, len(hooked)
    attributes = {name: set(module.__dict__) for name, module in model.named_modules()}
    assert halves(model) > 0
    assert len(model.seen) == len(seen) and model.seen[0] is seen[0] and model.count == count and len(hooked) == calls
    assert {name: set(module.__dict__) for name, module in model.named_modules()} == attributes
    handle.remove()


def test_autocast_is_planned(fake_world):
    fake_world(8)
    model = fully_shard(nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)]))
    freed = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            model(torch.ones(512 + enabled, 64)).sum().backward()  # other shapes: inputs are read again
        freed.append(plan_changes(model, None)[0].most["activations"])
    assert freed[1] < 0.8 * freed[0]


class Branches(Program):
    def forward(self, batch: Any) -> Any:
        x = self.first(batch["x"])
        return self.last(x * 2 if x.sum() > 0 else x)


class Data:
    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __getitem__(self, name: str) -> Tensor:
        return self.x


def outside(model: nn.Module) -> None:
    last = model.last
    model.call = lambda x: last(x) * 1


def hidden(model: nn.Module) -> None:
    teachers = [fully_shard(nn.Linear(64, 8))]
    model.call = partial(distilled, model.last, teachers)


def distilled(last: nn.Module, teachers: list[nn.Module], x: Tensor) -> Tensor:
    return last(x) - teachers[0](x.detach()).detach()


APART = "the model calls a sharded module that is not among its submodules"


@pytest.mark.parametrize(
    ("kind", "change", "batch", "why"),
    [
        (Branches, lambda model: None, {"x": torch.ones(4, 8)}, "DataDependentOutputException: aten._local_scalar"),
        (Program, lambda model: None, Data(torch.ones(4, 8)), "inputs of class Data cannot be repeated; pass step="),
        (Program, outside, {"x": torch.ones(4, 8)}, f"{APART}; pass step="),
        (Program, hidden, {"x": torch.ones(4, 8)}, f"{APART}; pass step="),
        (Program, lambda model: None, None, "this is not the root, or it was not called with gradients yet"),
    ],
    ids=["a branch on values", "an object", "a closure over the live model", "a model in a list", "no forward"],
)
def test_where_nothing_can_be_planned_the_account_remains(fake_world, kind, change, batch, why):
    fake_world(8)
    model = kind()
    fully_shard(model.last)
    fully_shard(model)
    change(model)

    def train() -> None:
        output = model(batch)
        (output["loss"] if isinstance(output, dict) else output.sum()).backward()

    if batch is not None:
        train()
    said = explain_memory(model)
    assert f"A step could not be planned ({why}" in said and "16 ranks instead of 8" in said, said
    assert "What changes would free now" in said
    if batch is not None:
        train()  # the model is as it was
    assert "not the root" in explain_memory(nn.ModuleList([model]))


def test_a_change_that_cannot_be_planned_is_named(fake_world):
    model = program(fake_world)
    model.call = lambda x: F.linear(x.view(40, 64), torch.ones(1, 64))
    model({"x": torch.ones(40, 8)})["loss"].backward()
    said = explain_memory(model)
    assert "Not planned: half the micro-batch, and twice as many of them: RuntimeError: shape '[40, 64]'" in said, said
    assert "at the peak of a step (fullshard.plan)" in said


def test_what_was_asked_is_read_off_the_error_that_is_handled(fake_world):
    model = program(fake_world)
    model({"x": torch.ones(400, 8)})["loss"].backward()
    try:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 KiB. GPU 0 has ...")
    except torch.OutOfMemoryError:
        said = explain_memory(model)
    assert said.startswith("An allocation of 20.0 KiB failed.") and "micro-batch, and twice as many of them" in said
    assert "failed" not in explain_memory(model)


def test_the_note_of_an_error_says_where_changes_are_planned(fake_world):
    """It keeps to the engine's account, which takes milliseconds: a job may catch many, and go on."""
    model = program(fake_world)

    def fail(x: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 KiB. GPU 0 has ...")

    model.call = fail
    with pytest.raises(torch.OutOfMemoryError) as caught:
        model({"x": torch.ones(400, 8)})
    (note,) = caught.value.__notes__
    assert "What changes would free now" in note and note.endswith("fullshard.explain_memory(model, optimizer).")
    model.call = None
    assert "half the micro-batch" in explain_memory(model)  # of the forward that failed: none has succeeded


def test_a_forward_of_its_own_on_an_instance_is_planned_and_kept():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    own = model.forward = partial(checkpoint, model.forward, use_reentrant=False)
    strategy = fullshard.Strategy(units="model")
    fullshard.plan(model, ranks=2, step=lambda m, n, _: m(torch.ones(n, 4)).sum(), strategy=strategy)
    assert model.forward is own


def test_no_process_group_is_needed_to_plan(fake_world):
    """Nothing is communicated: a group that is gone cannot have been used."""
    model = program(fake_world)
    model({"x": torch.ones(4, 8)})["loss"].backward()
    dist.destroy_process_group()
    assert halves(model) > 0


def one_rank_asks(use_wrapper: bool) -> tuple[list[float], str]:
    """Losses of four steps, and what the first rank was told in the second; the others have gone on by then."""
    torch.manual_seed(0)
    model = wrapped(Model(), True) if use_wrapper else by_blocks(Model())
    optimizer, said, losses = torch.optim.AdamW(model.parameters(), lr=1e-4), "", []
    for index in range(4):
        loss = model(torch.ones(ROWS, WIDTH, 7)).square().mean()
        loss.backward()
        if index == 1 and dist.get_rank() == 0:
            said = explain_memory(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, said


@pytest.mark.parametrize("use_wrapper", [False, True])
def test_one_rank_may_ask_while_the_others_train_on(run_ranks, use_wrapper):
    (losses, said), (others, _) = run_ranks(one_rank_asks, use_wrapper)
    assert losses == others and losses[-1] < losses[0]
    assert "at the peak of a step (fullshard.plan)" in said and "half the micro-batch" in said, said


class Communicates(nn.Module):
    """Whose forward exchanges something of its own."""

    def __init__(self, exchange: str) -> None:
        super().__init__()
        self.net, self.exchange = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)), exchange

    def forward(self, x: Tensor) -> Tensor:
        count = torch.tensor([float(len(x))])  # whose value torch knows while it plans
        if self.exchange == "all_reduce":
            dist.all_reduce(count[:])
        elif self.exchange == "barrier":
            dist.barrier()
        else:
            dist.all_gather_object([None] * dist.get_world_size(), len(x))
        return self.net(x).square().sum() / count.sum()


def alone_beside_collectives(exchange: str) -> tuple[str, list[float]]:
    """What the first rank is told, alone; and sums and losses, on every rank, of what follows."""
    torch.manual_seed(0)
    model, losses, said = Communicates(exchange), [], ""
    for layer in model.net:
        fully_shard(layer)
    fully_shard(model)
    for index in range(3):
        loss = model(torch.ones(2, 8))
        loss.backward()
        if index == 1 and dist.get_rank() == 0:
            said = explain_memory(model)
            if exchange != "all_gather_object":
                strategy = fullshard.Strategy(units="model")
                build = partial(Communicates, exchange)
                fullshard.plan(build, ranks=2, batch=2, step=whole_step, strategy=strategy)
        five = torch.tensor([5.0])
        dist.all_reduce(five)
        losses += [five.item(), loss.item()]
    return said, losses


def whole_step(model: nn.Module, micro_batch: int, sequence: int) -> Tensor:
    return model(torch.ones(micro_batch, 8))


@pytest.mark.gloo("the collectives of PyTorch's own groups")
@pytest.mark.parametrize(
    ("exchange", "words"),
    [
        ("all_reduce", "at the peak of a step (fullshard.plan)"),
        ("barrier", "at the peak of a step (fullshard.plan)"),
        ("all_gather_object", "could not be planned (DataDependentOutputException"),
    ],
)
def test_collectives_of_the_model_itself_are_not_issued(run_ranks, exchange, words):
    """By one rank alone: it would wait for ever, or be paired with what the other issues next."""
    (said, losses), (_, others) = run_ranks(alone_beside_collectives, exchange, world=2)
    assert losses == others and losses[::2] == [10.0] * 3
    assert words in said, said
