"""Parameters of dtypes that a backend's collectives may not know: complex numbers, small integers, 8-bit floats.

They train, or serve as frozen tables, as in one process; they come back whole; and they are saved and loaded.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fullshard
from fullshard import MixedPrecision, MixedPrecisionPolicy
from training import full
from ways import LAYOUTS, WIDTH, WRAPPERS, batch, named, on_ranks, some_ways, whole_parameters
from ways import shard as sharded

three_ways = pytest.mark.parametrize("way", ["rows", "flat", "wrapper"])
KINDS = {"complex64": torch.complex64, "int16": torch.int16, "float8": torch.float8_e4m3fn}
KINDS |= {"uint32": torch.uint32, "bool": torch.bool}


class Spectrum(nn.Module):
    """A complex weight, and a complex scale of one element that not every rank can own a part of. `[n, width]`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.randn(1, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(self.weight.dtype) @ self.weight * self.scale).abs().to(x.dtype)


class Table(nn.Module):
    """Frozen numbers in a narrow dtype, added in the input's. `[n, width]`."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randint(0, 100, (3, WIDTH)).to(dtype), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.01 * self.table.to(x.dtype).sum(0)


class Model(nn.Module):
    """The layer in question is a unit of its own, between two units of floats."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(WIDTH, WIDTH), layer, nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.layer(torch.tanh(self.first(x)))))


def make(kind: str) -> nn.Module:
    torch.manual_seed(3)
    return Model(Spectrum() if kind == "complex64" else Table(KINDS[kind]))


def shard(model: nn.Module, way: str, **settings: Any) -> Any:
    return sharded(model, way, named("layer"), **settings)


def train(model: nn.Module, rank: int | None) -> list[float]:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    losses = []
    for step in range(3):
        loss = model(batch(step, rank, dtype=torch.float32)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """Whole parameters under the unwrapped model's names."""
    return {name: whole(value.detach().clone()) for name, value in model.state_dict().items()}


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor; of rows, put together without a collective on its dtype: DTensor's own knows as few."""
    if not isinstance(tensor, DTensor):
        return full(tensor)
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, as_bytes(tensor.to_local().clone()).tolist())  # 8-bit floats cannot be pickled
    together = torch.tensor([byte for part in parts for byte in part], dtype=torch.uint8)
    return together.view(tensor.dtype).view(tensor.shape)


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def check_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert got[name].dtype == value.dtype, name
        if (value.dtype.is_floating_point and value.dtype.itemsize > 1) or value.dtype.is_complex:
            torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
        else:
            assert torch.equal(as_bytes(got[name]), as_bytes(value)), name


def trains_as(model: nn.Module, reference: nn.Module) -> None:
    want, mine = train(reference, None), torch.tensor(train(model, dist.get_rank()), dtype=torch.float64)
    dist.all_reduce(mine)
    world = dist.get_world_size()
    torch.testing.assert_close(mine / world, torch.tensor(want, dtype=torch.float64), rtol=1e-5, atol=1e-6)
    check_same(whole_state(model), dict(reference.state_dict()))


@three_ways
@pytest.mark.parametrize("kind", KINDS)
@on_ranks
def test_as_one_process(way: str, kind: str) -> None:
    model = shard(make(kind), way)
    trains_as(model, make(kind))
    if kind in ("int16", "float8") and way not in WRAPPERS:
        check_same({"table": model.layer.table.full_tensor()}, {"table": make(kind).layer.table.detach()})


@three_ways
@pytest.mark.parametrize("kind", ["complex64", "float8"])
@on_ranks
def test_saved_and_loaded(way: str, kind: str) -> None:
    model, x = shard(make(kind), way), batch(0, 0, dtype=torch.float32)
    before = model(x)
    saved = {name: value.detach().clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(saved)
    assert model(x).equal(before)


@pytest.mark.parametrize("kind", ["complex64", "int16", "float8"])
@on_ranks
def test_module_states_are_synchronised(kind: str) -> None:
    """`sync_module_states` sends what the backend may not know, too."""
    model = make(kind)
    if dist.get_rank():
        for parameter in model.parameters():
            parameter.data.zero_()
    check_same(whole_state(shard(model, "originals", sync_module_states=True)), dict(make(kind).state_dict()))


@three_ways
@on_ranks
def test_complex_gradients_are_reduced_whole_and_clipped(way: str) -> None:
    """Mixed precision is of real numbers; a norm is of absolute values, and both clipping functions give it."""
    low: dict[str, Any] = {"reduce_dtype": torch.float64}
    policy = {"mp_policy": fullshard.MixedPrecisionPolicy(**low)}
    given = {"mixed_precision": fullshard.MixedPrecision(**low)} if way in WRAPPERS else policy
    trains_as(shard(make("complex64"), way, **given), make("complex64"))
    reference, model = make("complex64"), shard(make("complex64"), way)
    for each, rank in ((reference, None), (model, dist.get_rank())):
        each(batch(0, rank, dtype=torch.float32)).square().mean().backward()
    want, clip = nn.utils.clip_grad_norm_(reference.parameters(), 0.01), fullshard.clip_grad_norm_
    got = model.clip_grad_norm_(0.01) if way in WRAPPERS else full(clip(model.parameters(), 0.01))
    torch.testing.assert_close(got.double(), want.double(), rtol=1e-5, atol=1e-7)
    for parameter, other in () if way in WRAPPERS else zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(full(parameter.grad), other.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("way", ["rows", "flat"])
@on_ranks
def test_several_dtypes_in_one_unit(way: str) -> None:
    """Floats, complex numbers and both kinds of table together in one unit."""
    torch.manual_seed(3)
    tables = (Table(dtype) for dtype in (torch.int16, torch.float8_e4m3fn))
    reference = Model(nn.Sequential(Spectrum(), *tables, nn.Linear(WIDTH, WIDTH)))
    trains_as(shard(copy.deepcopy(reference), way), reference)


# Integers keep dtype and values, whatever precision the others compute in.


VALUES = {  # none survives a trip through bfloat16 or float16
    "int64": torch.tensor([16777, 2**40 + 1, -(2**31) - 7], dtype=torch.int64),
    "int32": torch.tensor([16777, 1_000_003, -999_983], dtype=torch.int32),
    "uint8": torch.tensor([255, 1, 0], dtype=torch.uint8),
    "bool": torch.tensor([True, False, True]),
}
TOGETHER = (("int64",), ("int32", "uint8"), ("bool", "int64"))


class Codes(nn.Module):
    """Frozen parameters of integers, which remembers what forward saw of them; and perhaps a layer."""

    def __init__(self, kinds: tuple[str, ...], layer: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.codes = nn.ParameterDict({kind: nn.Parameter(VALUES[kind].clone(), requires_grad=False) for kind in kinds})
        self.layer = nn.Linear(WIDTH, WIDTH) if layer else None
        self.seen: dict[str, Tensor] = {}
        self.dtype: torch.dtype | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.seen = {kind: codes.detach().clone() for kind, codes in self.codes.items()}
        self.dtype = self.layer.weight.dtype if self.layer is not None else None
        return x if self.layer is None else self.layer(x)


def unlike(where: str, found: dict[str, Tensor]) -> list[str]:
    """Those that are not their kind's values; names end in the kind."""
    wanted = {name: VALUES[name.rpartition(".")[2]] for name in found if name.rpartition(".")[2] in VALUES}
    wrong = [n for n, v in wanted.items() if found[n].dtype != v.dtype or not torch.equal(found[n], v)]
    return [f"{where}: {name} is {found[name].tolist()} of {found[name].dtype}" for name in wrong]


def passes(model: nn.Module, low: torch.dtype, in_eval: torch.dtype) -> list[str]:
    """Training, evaluation, training, evaluation with gradients, training."""
    problems: list[str] = []
    for mode in ["train", "eval", "train", "eval with gradients", "train"]:
        model.train(mode == "train")
        with torch.set_grad_enabled(mode != "eval"):
            out = model(torch.ones(2, WIDTH))
        for module in model.modules():
            if isinstance(module, Codes):
                problems += unlike(mode, module.seen)
                if module.dtype not in (None, low if mode == "train" else in_eval):
                    problems.append(f"{mode}: the layer is computed in {module.dtype}")
        if mode != "eval":
            out.float().sum().backward()
            model.zero_grad()
    return problems


@some_ways
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
@on_ranks
def test_integers_keep_their_values(way: str, low: torch.dtype) -> list[str]:
    problems: list[str] = []
    for in_eval in (False,) if way in LAYOUTS else (False, True):
        given: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(param_dtype=low)}
        if way not in LAYOUTS:
            mixed = MixedPrecision(param_dtype=low, reduce_dtype=torch.float32)
            given = {"mixed_precision": mixed, "full_precision_in_eval": in_eval}
        for kinds in TOGETHER:
            if way == "wrapper" and len(kinds) > 1:
                continue  # one `FlatParameter` holds one dtype: integers have an instance of their own
            first = Codes(kinds, layer=way != "wrapper")
            last = nn.Linear(WIDTH, WIDTH) if way == "wrapper" else Codes(kinds)
            model = sharded(nn.Sequential(first, last), way, lambda model: [model[0]], **given)
            problems += passes(model, low, torch.float32 if in_eval else low)
            problems += unlike("state dict", whole_state(model)) + unlike("whole", whole_parameters(model))
            assert fullshard.memory_use(model).gathered == 0
    return problems
