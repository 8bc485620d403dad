"""`MixedPrecisionPolicy(gather_dtype=, scatter_dtype=)`: what is sent in 8 bits, and how little that changes."""

from __future__ import annotations

import math
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import fullshard
from fullshard.comm import packed_bytes
from fullshard.shard import units_of
from fullshard.torch_private.local_tensor import inside
from raising import raises
from training import live_bytes

WIDE = 24
LAYOUTS = ["rows", "flat", fullshard.Blocks("row"), "owner"]
EIGHT_BITS = [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2]
STEP = {torch.int8: 1 / 254, torch.float8_e4m3fn: 1 / 16, torch.float8_e5m2: 1 / 8}
"""The most by which a value changes: for int8 over the block's largest magnitude, else over the value itself."""


class Tied(nn.Module):
    """Blocks of odd sizes with a frozen bias, and an output layer that shares the weight of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(31, WIDE)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDE, 37), nn.Tanh(), nn.Linear(37, WIDE), nn.LayerNorm(WIDE)) for _ in range(2)
        )
        self.blocks[0][0].bias.requires_grad_(False)
        self.out = nn.Linear(WIDE, 31, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.out(hidden)


def build() -> Tied:
    torch.manual_seed(0)
    return Tied()


def sharded(policy: fullshard.MixedPrecisionPolicy, **options: Any) -> Any:
    model = build()
    for block in model.blocks:
        fullshard.fully_shard(block, mp_policy=policy, **options)
    return fullshard.fully_shard(model, mp_policy=policy, **options)


def loss_of(model: nn.Module, rank: int, step: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(0, 31, (3, 8), generator=generator)
    return nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.roll(1, 1).flatten())


def whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def gathered_values(model: nn.Module) -> dict[str, torch.Tensor]:
    """What the modules compute with."""
    units = [module for module in model.modules() if isinstance(module, fullshard.FSDPModule)]
    for unit in units:
        unit.unshard()
    values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for unit in units:
        unit.reshard()
    return values


def differences(dtype: torch.dtype, layout: Any, mesh: tuple[int, ...], options: dict[str, Any]) -> list[str]:
    """How a step differs from one process' with the weights that modules compute with here."""
    names = ("replicate", "shard")[-len(mesh) :]
    options = {"mesh": init_device_mesh("cpu", mesh, mesh_dim_names=names), "layout": layout, **options}
    model = sharded(fullshard.MixedPrecisionPolicy(gather_dtype=dtype), **options)
    wrong, masters = [], dict(build().named_parameters())
    values = gathered_values(model)
    for name, value in values.items():
        master = masters[name].detach()
        allowed = STEP[dtype] * (master.abs() if dtype.is_floating_point else 4.2) + 1e-4
        if not bool(((value - master).abs() <= allowed).all()):
            wrong.append(f"gathered {name}")
        if master.ndim == 2 and torch.equal(value, master) is (mesh[-1] > 1):
            wrong.append(f"whether {name} is rounded")
    plain = build()
    plain.load_state_dict(values, strict=False)
    world = dist.get_world_size()
    loss_of(model, dist.get_rank()).backward()
    (sum(loss_of(plain, rank) for rank in range(world)) / world).backward()
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        if (ours.grad is None) is not (theirs.grad is None):
            wrong.append(f"whether {name} has a gradient")
        elif ours.grad is not None and not torch.allclose(whole(ours.grad), theirs.grad, rtol=1e-4, atol=1e-6):
            wrong.append(f"gradient of {name}")
        if not torch.equal(whole(ours.detach()), masters[name]):
            wrong.append(f"{name}, which changed")
    wrong += [f"full {name}" for name, p in fullshard.full_parameters(model) if not torch.equal(p, masters[name])]
    return wrong


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", EIGHT_BITS, ids=str)
def test_a_step_is_that_of_the_rounded_weights_and_shards_keep_their_values(run_ranks, dtype, layout):
    for mesh in [(2,), (3,), (2, 2), (1,)]:
        world = torch.Size(mesh).numel()
        assert run_ranks(differences, dtype, layout, mesh, {}, world=world) == [[]] * world, mesh


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ((2,), {"reshard_after_forward": False}),
        ((4,), {"reshard_after_forward": 2}),
        ((2,), {"prefetch": 0}),
        ((2,), {"offload_policy": fullshard.CPUOffloadPolicy()}),  # on the simulated device
        ((2,), {"prefetch": 3, "layout": fullshard.Blocks(8)}),
        ((2,), {"unused": "zeros", "check": "every"}),
    ],
    ids=str,
)
def test_in_every_way_to_gather(run_ranks, mesh, options):
    layout = options.pop("layout", "rows")
    world = mesh[0]
    assert run_ranks(differences, torch.int8, layout, mesh, options, world=world) == [[]] * world


def sent(policy: dict[str, torch.dtype], layout: str) -> tuple[list[str], dict[str, int], dict[str, int]]:
    """Gradients that differ by more than 8 bits explain; bytes by verb of a step; and what they should be."""
    comm = fullshard.RecordingComm(fullshard.TorchComm())
    model = sharded(fullshard.MixedPrecisionPolicy(**policy), layout=layout, comm=comm)
    exact = sharded(fullshard.MixedPrecisionPolicy(gather_dtype=policy.get("gather_dtype")), layout=layout)
    rank, wrong = dist.get_rank(), []
    for step in range(2):  # the second by the plans of the first
        comm.calls.clear()
        for each in (model, exact):
            each.zero_grad()
            loss_of(each, rank, step).backward()
        for (name, ours), theirs in zip(model.named_parameters(), exact.parameters(), strict=True):
            if theirs.grad is None:
                continue
            error = (whole(ours.grad) - whole(theirs.grad)).abs().max()
            largest = max(float(whole(p.grad).abs().max()) for p in exact.parameters() if p.grad is not None)
            if not 0 < error < 2 * largest / 127:
                wrong.append(f"{name}: {error}, the largest gradient is {largest}")
    recorded: dict[str, int] = {}
    for call in comm.calls:
        if call.dtype == torch.uint8:  # not the comparisons of a pass
            recorded[call.verb] = recorded.get(call.verb, 0) + call.nbytes
    expected = {"gather": 0, "exchange": 0}
    for unit in units_of(model):
        for bucket in unit.buckets:
            nbytes = dist.get_world_size() * packed_bytes(bucket.layout.shard_numel)
            expected["gather"] += nbytes * (2 if unit.name else 1)  # the root stays gathered until its backward
            expected["exchange"] += nbytes * bucket.trains
    return wrong, recorded, expected


def test_gradients_are_exchanged_in_eight_bits(run_ranks):
    policy = {"gather_dtype": torch.int8, "scatter_dtype": torch.int8}
    for wrong, recorded, expected in run_ranks(sent, policy, "flat", world=3):
        assert not wrong
        assert recorded == expected


def between_replicas(shape: tuple[int, int], dtype: torch.dtype) -> tuple[list[str], dict[str, int], dict[str, int]]:
    """What is wrong after accumulated steps; bytes by collective and ranks of a step; and what they should be."""
    comm = fullshard.RecordingComm(fullshard.TorchComm())
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    shard, replicate = mesh["shard"].get_group(), mesh["replicate"].get_group()
    policies = ({"scatter_dtype": dtype, "all_reduce_dtype": dtype}, {"all_reduce_dtype": dtype}, {})
    both, model, exact = (
        sharded(fullshard.MixedPrecisionPolicy(**policy), layout="flat", mesh=mesh, comm=comm) for policy in policies
    )
    rank, wrong, recorded = dist.get_rank(), [], {}
    for step in range(3):  # from the second on by the plans of the first
        for each in (exact, both, model):
            comm.calls.clear()
            each.set_requires_all_reduce(step < 2)
            loss_of(each, rank, 2 * step).backward()
            if step == 2:  # the two are accumulated over the shard axis
                each.set_requires_all_reduce(True)
                loss_of(each, rank, 5).backward()
        for call in comm.calls if step == 1 else ():
            if call.dtype == torch.uint8 or (call.verb == "reduce" and call.dtype == torch.float32):
                kind = f"{call.verb} {call.world} {call.dtype}"
                recorded[kind] = recorded.get(kind, 0) + call.nbytes
        largest = max(float(whole(p.grad).abs().max()) for p in exact.parameters() if p.grad is not None)
        for way, each in (("both", both), ("all-reduced", model)):
            for (name, ours), theirs in zip(each.named_parameters(), exact.parameters(), strict=True):
                if theirs.grad is None:
                    continue
                error = (whole(ours.grad) - whole(theirs.grad)).abs().max()
                if not 0 < error < 6 * STEP[dtype] * largest:
                    wrong.append(f"{way}, step {step}, {name}: {error}, the largest gradient is {largest}")
                local = ours.grad.to_local().contiguous() if hasattr(ours.grad, "to_local") else inside(ours.grad)
                copies = [torch.empty_like(local) for _ in range(shape[0])]
                dist.all_gather(copies, local.contiguous(), group=replicate)
                if not all(torch.equal(copy, local) for copy in copies):
                    wrong.append(f"{way}, step {step}, {name}: replicas differ")
            each.zero_grad()
        exact.zero_grad()
    expected: dict[str, int] = {}
    for unit in units_of(model):
        for bucket in unit.buckets:
            if not bucket.trains:
                continue
            numel, copies = bucket.layout.shard_numel, shape[0]
            packed = copies * packed_bytes(-(-numel // copies))
            sizes = {f"{verb} {copies} torch.uint8": packed for verb in ("exchange", "gather")}
            sizes[f"reduce {dist.get_world_size(shard)} torch.float32"] = 4 * numel * shape[1]
            for kind, nbytes in sizes.items():
                expected[kind] = expected.get(kind, 0) + nbytes
    return wrong, recorded, expected


def miscounted(layout: str) -> list[Any]:
    """Events of two steps in 8 bits, if the account of bytes differs from those that are alive."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    policy = fullshard.MixedPrecisionPolicy(scatter_dtype=torch.int8, all_reduce_dtype=torch.int8)
    model = sharded(policy, layout=layout, mesh=mesh)
    units, counted = units_of(model), []
    for step in range(2):
        with fullshard.record_events(lambda event: counted.append((event, live_bytes(units)))):
            loss_of(model, dist.get_rank(), step).backward()
        model.zero_grad()
    assert any(event.verb == "all_reduce" for event, _ in counted)
    return [(event, alive) for event, alive in counted if event.live != alive]


@pytest.mark.gloo("events are a process's")
def test_the_ledger_counts_what_is_alive(run_ranks):
    assert run_ranks(miscounted, "flat", world=4) == [[]] * 4


@pytest.mark.parametrize("shape", [(2, 3), (3, 2), (3, 1)], ids=str)
@pytest.mark.parametrize("dtype", EIGHT_BITS, ids=str)
def test_replicas_exchange_eight_bits_and_get_the_same_bits(run_ranks, dtype, shape):
    for wrong, recorded, expected in run_ranks(between_replicas, shape, dtype, world=math.prod(shape)):
        assert not wrong
        assert recorded == expected


def trained(way: str) -> list[torch.Tensor]:
    """Parameters after four steps."""
    policy = fullshard.MixedPrecisionPolicy(gather_dtype=torch.int8, scatter_dtype=torch.float8_e5m2)
    model = sharded(policy, layout="flat")
    if way == "recomputed":
        for block in model.blocks:
            forward = block.forward
            block.forward = partial(checkpoint, forward, use_reentrant=False)
    elif way == "gathered between steps":
        for unit in (model, *model.blocks):
            unit.set_reshard_after_backward(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for step in range(4):
        loss_of(model, dist.get_rank(), step).backward()
        optimizer.step()
        optimizer.zero_grad()
        if way == "evaluated":
            with torch.no_grad(), fullshard.keep_gathered(model):
                loss_of(model, 7), loss_of(model, 8)
    return [whole(p.detach()).clone() for p in model.parameters()]


def ways_that_differ() -> list[str]:
    expected = trained("plainly")
    ways = ("plainly", "recomputed", "gathered between steps", "evaluated")
    return [way for way in ways if not all(map(torch.equal, trained(way), expected))]


def test_training_is_the_same_to_the_bit_however_units_are_gathered(run_ranks):
    assert run_ranks(ways_that_differ, world=2) == [[], []]


def test_other_dtypes_are_refused():
    for name in ("gather_dtype", "scatter_dtype", "all_reduce_dtype"):
        with raises(f"ConfigError: MixedPrecisionPolicy.{name} is invalid. ... torch.int8 ... bfloat16"):
            fullshard.MixedPrecisionPolicy(**{name: torch.bfloat16})


class GathersOnly(fullshard.NullComm):
    """A user's collectives, written before `exchange` was part of the protocol."""

    exchange = None


def error_without_exchange(name: str) -> str:
    policy = fullshard.MixedPrecisionPolicy(**{name: torch.int8})
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = fullshard.fully_shard(build(), mp_policy=policy, comm=GathersOnly(), mesh=mesh)
    try:
        loss_of(model, 0).backward()
    except fullshard.ConfigError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("name", ["scatter_dtype", "all_reduce_dtype"])
def test_collectives_without_an_exchange_are_refused(run_ranks, name):
    for words in run_ranks(error_without_exchange, name, world=4):
        assert "needs collectives that exchange bytes between ranks" in words


def computed_after_to_empty(layout: Any) -> list[float]:
    """The range of weights that are all 0.5; memory that `to_empty` gets is full of NaN before."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(7, 33), nn.Linear(33, 5))
    fullshard.fully_shard(model, mp_policy=fullshard.MixedPrecisionPolicy(gather_dtype=torch.int8), layout=layout)
    with mock.patch.object(torch, "empty_like", lambda *args, **kwargs: torch.full_like(*args, math.nan, **kwargs)):
        model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            inside(parameter).fill_(0.5)
    model.unshard()
    ends = [end(parameter.detach()).item() for parameter in model.parameters() for end in (torch.min, torch.max)]
    return [min(ends), max(ends)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_undefined_padding_stays_out_of_blocks(run_ranks, layout):
    for ends in run_ranks(computed_after_to_empty, layout, world=2):
        assert ends == pytest.approx([0.5, 0.5], rel=1e-6)


def of_doubles() -> list[bool]:
    """Whether gradients of a model in float64, and of one with a frozen float8 parameter, are near the exact ones."""
    close = []
    for policy in ({"gather_dtype": torch.int8, "scatter_dtype": torch.int8}, {}):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)).double()
        model[0].scale = nn.Parameter(torch.ones(4).to(torch.float8_e4m3fn), requires_grad=False)
        fullshard.fully_shard(model, mp_policy=fullshard.MixedPrecisionPolicy(**policy))
        model(torch.ones(2, 8, dtype=torch.float64)).sum().backward()
        close.append([whole(p.grad) for p in model.parameters() if p.grad is not None])
    return [torch.allclose(ours, exact, atol=0.1) for ours, exact in zip(*close, strict=True)]


def test_other_storage_dtypes(run_ranks):
    assert run_ranks(of_doubles, world=2) == [[True] * 4] * 2


def error_of_different_dtypes(name: str) -> str:
    dtype = torch.int8 if dist.get_rank() == 0 else torch.float8_e4m3fn
    shape = (2, 1) if name == "all_reduce_dtype" else (1, 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    model = sharded(fullshard.MixedPrecisionPolicy(**{name: dtype}), mesh=mesh)
    try:
        loss_of(model, 0).backward()
    except fullshard.DivergenceError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("name", ["gather_dtype", "scatter_dtype", "all_reduce_dtype"])
def test_ranks_that_send_in_different_dtypes_are_told(run_ranks, name):
    for words in run_ranks(error_of_different_dtypes, name, world=2):
        assert "in int8" in words and "in float8_e4m3fn" in words, words


def described() -> list[str]:
    """What `describe` says of a model that is sent in 8 bits wherever it can be, on a hybrid mesh and on one axis."""
    policy = fullshard.MixedPrecisionPolicy(
        gather_dtype=torch.float8_e4m3fn, scatter_dtype=torch.float8_e5m2, all_reduce_dtype=torch.int8
    )
    texts = []
    for shape in ((2, 2), (4,)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        model = sharded(policy, mesh=mesh)
        loss_of(model, 0).backward()
        texts.append(fullshard.describe(model, plans=True))
    return texts


def test_describe_says_what_is_sent_in_eight_bits(run_ranks):
    for hybrid, plain in run_ranks(described, world=4):
        assert "gathered in float8_e4m3fn, reduced in float8_e5m2, reduced between replicas in int8" in hybrid
        assert "sent in float8_e5m2, then its slice between replicas, sent in int8" in hybrid
        assert "reduced in float8_e5m2" in plain
        assert "int8" not in plain
