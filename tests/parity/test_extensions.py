"""Tensor subclasses with `fsdp_pre_all_gather`: against PyTorch's fully_shard with the same class, and in bytes."""

from __future__ import annotations

import copy
import types

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
import quantised
from quantised import GatheredInt8
from training import LAYOUTS, assert_same
from ways import on_ranks

WIDE = 32
layouts = pytest.mark.parametrize("layout", LAYOUTS)


def network(blocks: int = 3) -> nn.Sequential:
    """Linear layers whose weights are sent as int8; biases and the last layer are plain."""
    torch.manual_seed(0)
    model = nn.Sequential()
    for _ in range(blocks):
        layer = nn.Linear(WIDE, WIDE)
        layer.weight = nn.Parameter(GatheredInt8(layer.weight.detach().clone()))
        model.extend([layer, nn.Tanh()])
    return model.append(nn.Linear(WIDE, 2))


def shard(library: types.ModuleType, model: nn.Module, **settings: object) -> nn.Module:
    for layer in model:
        if isinstance(layer, nn.Linear):
            library.fully_shard(layer, **settings)
    return library.fully_shard(model, **settings)


def train(library: types.ModuleType, options: dict[str, object], **settings: object) -> tuple[list, dict]:
    """Losses of four AdamW steps, and the local values afterwards."""
    if options.get("precision"):
        settings["mp_policy"] = library.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if options.get("hybrid"):
        settings["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = shard(library, network(), reshard_after_forward=options.get("reshard", True), **settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, foreach=False)
    losses = []
    for step in range(4):
        for part in range(2 if options.get("accumulate") else 1):
            if options.get("accumulate"):
                model.set_requires_gradient_sync(part == 1)
            x = torch.randn(5, WIDE, generator=torch.Generator().manual_seed(10 * step + part + 100 * dist.get_rank()))
            loss = model(x).float().square().mean()
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    values = {}
    for name, parameter in model.named_parameters():
        local = parameter._local_tensor
        whole = local.values if isinstance(local, GatheredInt8) else parameter.full_tensor()
        values[name] = whole.detach().clone()
    return losses, values


def parity(layout: str, options: dict[str, object]) -> list[str]:
    want_losses, want = train(torch_fsdp, options)
    got_losses, got = train(fullshard, options, layout=layout)
    problems = []
    if not torch.allclose(torch.tensor(got_losses), torch.tensor(want_losses), rtol=1e-6):
        problems.append(f"losses {got_losses}, wanted {want_losses}")
    for name, value in want.items():
        if not torch.allclose(got[name], value, rtol=1e-5, atol=1e-6):
            problems.append(name)
    return problems


@pytest.mark.parametrize(
    ("layout", "options"),
    [("rows", {"reshard": False}), ("flat", {}), ("rows", {"precision": True}), ("flat", {"accumulate": True})],
)
def test_trainable_int8_trains_as_with_pytorch(run_ranks, layout, options):
    assert_same(run_ranks(parity, layout, options))


def test_on_a_hybrid_mesh(run_ranks):
    assert_same(run_ranks(parity, "rows", {"hybrid": True}, world=4))


def bytes_gathered(layout: str) -> tuple[int, int, int]:
    """Bytes of one int8 unit's gather by the recording comm, by the events, and what is alive between steps."""
    comm = fullshard.RecordingComm(fullshard.TorchComm())
    layer = network(1)[0]
    model = fullshard.fully_shard(layer, layout=layout, comm=comm, reshard_after_forward=True)
    x = torch.randn(3, WIDE)
    model(x).sum().backward()
    comm.calls.clear()
    with fullshard.record_events() as events:
        model(x).sum().backward()
    sent = sum(call.nbytes for call in comm.calls if call.verb == "gather" and call.dtype != torch.int64)
    said = sum(event.nbytes for event in events if event.verb == "gather")
    return sent, said, events[-1].live


@layouts
def test_a_quarter_of_the_bytes_is_sent(run_ranks, layout):
    """Weight: int8 and one fp32 scale per row; bias: fp32 (flat rounds slices up to 16 bytes)."""
    once = WIDE * WIDE + 4 * WIDE + 4 * WIDE
    for sent, said, live in run_ranks(bytes_gathered, layout):
        assert sent == said == 2 * once  # in forward and in backward
        assert sent < 2 * 0.31 * 4 * (WIDE * WIDE + WIDE)
        assert live == 0


class Scaled(torch.Tensor):
    """What `OneScale` is computed with: int8 values and a scale that is an attribute, not a tensor of the gather."""

    @staticmethod
    def __new__(cls, data, scale):
        return torch.Tensor._make_wrapper_subclass(cls, data.size(), dtype=torch.float32)

    def __init__(self, data, scale):
        self.data8, self.scale = data, scale

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        aten = torch.ops.aten
        if func in (aten.detach.default, aten.alias.default):
            return cls(args[0].data8, args[0].scale)
        if func in (aten.as_strided.default, aten.view.default):
            return cls(args[0].data8, args[0].scale)
        args = tuple(a.data8.float() * a.scale if isinstance(a, cls) else a for a in args)
        return func(*args, **(kwargs or {}))


class OneScale(GatheredInt8):
    """int8 on the wire with one scale for all, which `out=` learns as an attribute."""

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        scale = self.values.abs().amax()
        dist.all_reduce(scale, dist.ReduceOp.MAX)
        scale = scale / 127
        return ((self.values / scale).round().to(torch.int8),), scale

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        if out is not None:
            out.scale = metadata
            return None
        return Scaled(outputs[0], metadata), outputs


def one_scale(library: types.ModuleType) -> list[float]:
    torch.manual_seed(3)
    layer = nn.Linear(WIDE, 4)
    layer.weight = nn.Parameter(OneScale(layer.weight.detach().clone()))
    model = library.fully_shard(layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0, foreach=False)
    losses = []
    for step in range(4):
        x = torch.randn(5, WIDE, generator=torch.Generator().manual_seed(step + 100 * dist.get_rank()))
        loss = model(x).square().mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@on_ranks
def test_attributes_set_on_out_reach_the_module() -> list[str]:
    got, want = one_scale(fullshard), one_scale(torch_fsdp)
    return [] if torch.allclose(torch.tensor(got), torch.tensor(want), rtol=1e-6) else [f"{got}, wanted {want}"]


@on_ranks
def test_a_refusal_takes_nothing_from_units_below() -> None:
    """A unit below keeps its tied weight when the unit above is refused, and gives it up when it is not."""
    for kind in (Uncuttable, GatheredInt8):
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 8))
        model[1].weight = model[0].weight
        model[2].weight = nn.Parameter(kind(model[2].weight.detach().clone()))
        fullshard.fully_shard(model[0])
        try:
            fullshard.fully_shard(model)
            refused = False
        except fullshard.ConfigError:
            refused = True
        assert refused == (kind is Uncuttable), f"{kind.__name__}: refused {refused}"
        (model[0] if refused else model)(torch.ones(1, 6)).sum().backward()
        assert model[0].weight.grad is not None, "no gradient"


class ShortForm(GatheredInt8):
    """The older signature."""

    def fsdp_pre_all_gather(self, mesh):
        data, scale = quantised.quantise(self.values)
        return (data, scale), None


class Uncuttable(torch.Tensor):
    """Has the two methods, and no operation that cuts it."""

    @staticmethod
    def __new__(cls, values):
        return torch.Tensor._make_wrapper_subclass(cls, values.size(), dtype=values.dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"no {func}")

    fsdp_pre_all_gather = fsdp_post_all_gather = GatheredInt8.fsdp_pre_all_gather


@on_ranks
def test_the_rest() -> list[str]:
    """The older signature; copies; state dicts; views; and what is refused, with nothing changed."""
    problems = []
    layer = nn.Linear(WIDE, WIDE)
    layer.weight = nn.Parameter(ShortForm(layer.weight.detach().clone()))
    fullshard.fully_shard(layer)
    layer(torch.ones(1, WIDE)).sum().backward()

    model = shard(fullshard, network(1))
    x = torch.randn(3, WIDE, generator=torch.Generator().manual_seed(0))
    before = model(x)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(x), before), "deepcopy"
    views = fullshard.optimizer_view(model)
    assert any(view is model[0].weight for view in views) and len(views) == 3, f"{len(views)} views"
    optimizer = torch.optim.SGD(views, lr=0.1, foreach=False)
    model(x).square().sum().backward()
    norm = fullshard.clip_grad_norm_(model.parameters(), 1e9)
    squares = sum(p.grad.full_tensor().square().sum() for p in model.parameters())
    assert torch.allclose(norm, squares.sqrt()), "clip_grad_norm_"
    optimizer.step()
    assert not torch.equal(model(x), before), "the step changed nothing"
    state = {name: value.full_tensor() if "weight" not in name else None for name, value in twin.state_dict().items()}
    assert state.keys() == dict(network(1).named_parameters()).keys(), "state dict"
    whole = {name: p.detach() for name, p in network(1).named_parameters()}
    whole["0.weight"] = whole["0.weight"].values
    model.load_state_dict(whole)
    assert torch.allclose(model(x), before), "load_state_dict of whole values"

    def attempt(what: nn.Module, text: str) -> None:
        kind = type(what)
        try:
            fullshard.fully_shard(what)
        except fullshard.ConfigError as error:
            assert text in str(error) and type(what) is kind, f"{error}"
        else:
            problems.append(f"{text}: not refused")

    torch.manual_seed(0)
    odd = nn.Linear(WIDE, 7)  # rows that do not divide evenly, of which a rank sends its own
    weight = quantised.dequantise(*quantised.quantise(odd.weight.detach()), torch.float32)
    expected = nn.functional.linear(x, weight, odd.bias.detach())
    odd.weight = nn.Parameter(GatheredInt8(odd.weight.detach().clone()))
    fullshard.fully_shard(odd)
    assert torch.allclose(odd(x), expected), "uneven rows"
    stiff = nn.Linear(4, 4)
    stiff.weight = nn.Parameter(Uncuttable(torch.ones(4, 4)))
    attempt(stiff, "cannot be cut into chunks")
    assert isinstance(stiff.weight, Uncuttable), "a refused parameter was changed"
    try:
        fullshard.FullyShardedDataParallel(network(1))
    except fullshard.ConfigError as error:
        assert "0.weight" in str(error), str(error)
    else:
        problems.append("the wrapper took a subclass")
    return problems
