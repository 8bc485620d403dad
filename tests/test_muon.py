"""`fullshard.Muon`: bit for bit what `torch.optim.Muon` does with whole matrices and the same gradients."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import fullshard
from fullshard.optim import muon as muon_module
from fullshard.optim import owners
from fullshard.optim.muon import newton_schulz
from fullshard.optim.owners import Owners, RowsCut, least_loaded

WIDE, NARROW = 12, 7
SETTINGS: list[dict[str, Any]] = [
    {},
    {"nesterov": False, "momentum": 0.9, "weight_decay": 0.0},
    {"adjust_lr_fn": "match_rms_adamw", "ns_steps": 3, "ns_coefficients": (2.0, -1.5, 0.5)},
    {"ns_steps": 0},
]


def build() -> nn.Sequential:
    """Tall, wide and square matrices, of which the number of rows is odd; biases are of AdamW's."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDE, 2 * WIDE + 1), nn.Tanh(), nn.Linear(2 * WIDE + 1, WIDE)) for _ in range(3)]
    return nn.Sequential(*blocks, nn.Linear(WIDE, WIDE), nn.Linear(WIDE, NARROW))


def sharded(**options: Any) -> nn.Sequential:
    model = build()
    for block in model[:3]:
        fullshard.fully_shard(block, **options)
    return fullshard.fully_shard(model, **options)


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.ndim == 2]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def backward(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    model(torch.randn(5, WIDE, generator=generator)).square().mean().backward()


def train(model: nn.Module, muon: torch.optim.Optimizer, adamw: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        backward(model, step)
        muon.step()
        adamw.step()
        model.zero_grad()


def optimizers(model: nn.Module, **settings: Any) -> tuple[fullshard.Muon, torch.optim.AdamW]:
    others = [p for p in model.parameters() if p.ndim != 2]
    return fullshard.Muon(matrices(model), lr=0.05, **settings), torch.optim.AdamW(others, lr=0.01)


def differences(
    settings: dict[str, Any], options: dict[str, Any], mesh: tuple[int, ...], batch: int | None = None
) -> list[str]:
    """Parameters that differ in any bit from those that torch's Muon makes of the same gradients.

    Matrices are multiplied one by one: some processors round products of a stack differently.

    Args:
        batch: bytes of whole matrices in a batch; None: all are in one.
    """
    names = ("replicate", "shard")[-len(mesh) :]
    model = sharded(mesh=init_device_mesh("cpu", mesh, mesh_dim_names=names), **options)
    plain = build()
    muon = fullshard.Muon(matrices(model), lr=0.05, **settings)
    reference = torch.optim.Muon(matrices(plain), lr=0.05, **settings)
    one_by_one = mock.patch.object(muon_module, "elements_at_once", lambda: 0)
    with one_by_one, mock.patch.object(owners, "BATCH", owners.BATCH if batch is None else batch):
        for step in range(3):
            backward(model, step)
            for theirs, ours in zip(matrices(plain), matrices(model), strict=True):
                theirs.grad = whole(ours.grad).clone()
            if step == 1:  # one without a gradient is left alone
                matrices(plain)[2].grad = matrices(model)[2].grad = None
            muon.step()
            reference.step()
            model.zero_grad()
        if batch is not None:
            assert all(len(step.batches) > 1 for step in muon._plans.values())
    names_of = [name for name, p in model.named_parameters() if p.ndim == 2]
    pairs = zip(names_of, matrices(model), matrices(plain), strict=True)
    return [name for name, ours, theirs in pairs if not torch.equal(whole(ours), theirs)]


@pytest.mark.parametrize("layout", ["rows", "flat", "owner", fullshard.Blocks("row"), fullshard.Blocks(8)], ids=str)
@pytest.mark.parametrize("mesh", [(1,), (2,), (3,), (4,), (2, 2), (2, 1)], ids=str)
@pytest.mark.gloo("exchanges pieces of different sizes")
def test_equals_torchs_on_whole_matrices(run_ranks, layout, mesh):
    for settings in SETTINGS if mesh == (3,) else SETTINGS[:1]:
        found = run_ranks(differences, settings, {"layout": layout}, mesh, world=torch.Size(mesh).numel())
        assert found == [[]] * len(found), settings


@pytest.mark.parametrize("shape", [(25, 12), (12, 25), (12, 12), (7, 12)], ids=str)
def test_a_stack_of_matrices_is_orthogonalized_as_each_is(shape):
    generator, iteration = torch.Generator().manual_seed(0), ((3.4445, -4.775, 2.0315), 5, 1e-7)
    stack = torch.randn(6, *shape, generator=generator).bfloat16()
    for matrix, update in zip(stack, newton_schulz(stack, *iteration), strict=True):
        alone = newton_schulz(matrix, *iteration)
        assert (update - alone).norm() <= 0.02 * alone.norm()


@pytest.mark.parametrize("layout", ["rows", "flat"])
@pytest.mark.parametrize("mesh", [(2,), (3,), (2, 2)], ids=str)
@pytest.mark.gloo("exchanges pieces of different sizes")
def test_batches_of_matrices_change_no_bit(run_ranks, layout, mesh):
    for settings in SETTINGS[:2]:
        found = run_ranks(differences, settings, {"layout": layout}, mesh, 600, world=torch.Size(mesh).numel())
        assert found == [[]] * len(found), settings


def orthogonalized_here(mesh: tuple[int, ...]) -> tuple[int, list[str]]:
    """How many matrices this rank orthogonalizes; what differs from shards of its own replica, in bfloat16.

    Without Nesterov, the momentum itself is what is exchanged.
    """
    ranks = init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard"))
    model, plain = build().bfloat16(), build().bfloat16()
    fullshard.fully_shard(model, mesh=ranks)
    fullshard.fully_shard(plain, mesh=ranks["shard"])
    settings: dict[str, Any] = {"lr": 0.05, "nesterov": False}
    ours, theirs = fullshard.Muon(matrices(model), **settings), fullshard.Muon(matrices(plain), **settings)
    calls = []
    for _ in range(3):
        for mine, reference in zip(matrices(model), matrices(plain), strict=True):
            gradient = torch.ones(mine.shape, dtype=mine.dtype).cumsum(0).sin().cumsum(1).cos()
            for p in (mine, reference):
                p.grad = distribute_tensor(gradient, p.device_mesh, p.placements, src_data_rank=None)
        with mock.patch.object(muon_module, "newton_schulz", side_effect=newton_schulz) as counted:
            ours.step()
        calls.append(sum(1 if call.args[0].ndim == 2 else len(call.args[0]) for call in counted.call_args_list))
        theirs.step()
    wrong = []
    for p, q in zip(matrices(model), matrices(plain), strict=True):  # which add updates in bfloat16, turned or not
        if not torch.allclose(whole(p), whole(q), rtol=0.02, atol=1e-3):
            wrong.append(str(p.shape))
        if not torch.equal(whole(ours.state[p]["momentum_buffer"]), whole(theirs.state[q]["momentum_buffer"])):
            wrong.append(f"momentum of {p.shape}")
    return calls[-1], wrong


@pytest.mark.parametrize("mesh", [(2, 2), (2, 1), (1, 3)], ids=str)
@pytest.mark.gloo("exchanges pieces of different sizes")
def test_a_matrix_is_orthogonalized_once_in_the_world(run_ranks, mesh):
    found = run_ranks(orthogonalized_here, mesh, world=torch.Size(mesh).numel())
    assert sum(count for count, _ in found) == len(matrices(build())), found
    assert [wrong for _, wrong in found] == [[]] * len(found)


def split_over_two_axes() -> bool:
    """A matrix of tensor parallelism: rows over one axis, columns over the other; and its rows over both."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    same = True
    for placements in ([Shard(0), Shard(1)], [Shard(0), Shard(0)]):
        value, gradient = torch.randn(9, 6), torch.randn(9, 6)
        plain = nn.Parameter(value.clone())
        ours = nn.Parameter(distribute_tensor(value, mesh, placements))
        plain.grad, ours.grad = gradient, distribute_tensor(gradient, mesh, placements)
        torch.optim.Muon([plain], lr=0.1).step()
        fullshard.Muon([ours], lr=0.1).step()
        assert isinstance(ours, DTensor)
        same = same and torch.equal(ours.full_tensor(), plain)
    return same


@pytest.mark.gloo("DTensor's collectives")
def test_matrices_that_are_split_twice_are_gathered(run_ranks):
    assert run_ranks(split_over_two_axes, world=4) == [True] * 4


def test_parts_of_a_matrix_are_orthogonalised_apart():
    """Heads of 4 rows; queries, keys and values of different numbers of rows."""
    value, gradient = torch.randn(12, 5), torch.randn(12, 5)
    for split, sizes in ((4, [4, 4, 4]), ((6, 3, 3), [6, 3, 3])):
        one = nn.Parameter(value.clone())
        one.grad = gradient
        parts = [nn.Parameter(part.clone()) for part in value.split(sizes)]
        for part, part_gradient in zip(parts, gradient.split(sizes), strict=True):
            part.grad = part_gradient.clone()
        fullshard.Muon([{"params": [one], "split": split}], lr=0.1).step()
        torch.optim.Muon(parts, lr=0.1).step()
        torch.testing.assert_close(one.data, torch.cat([part.data for part in parts]), rtol=1e-2, atol=1e-3)
        assert not torch.equal(one.data, value)


def first_half(folder: str, layout: str) -> dict[str, torch.Tensor]:
    """Two steps, a save, and two more steps."""
    model = sharded(layout=layout)
    pair = optimizers(model)
    train(model, *pair, range(2))
    fullshard.save(folder, model, list(pair))
    return {name: whole(p).detach().clone() for name, p in model.named_parameters()}


def loaded(folder: str, layout: str) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    model = sharded(layout=layout)
    pair = optimizers(model)
    fullshard.load(folder, model, list(pair))
    state = [whole(pair[0].state[p]["momentum_buffer"]) for p in matrices(model)]
    return {name: whole(p).detach().clone() for name, p in model.named_parameters()}, state


@pytest.mark.gloo("processes")
def test_momentum_is_loaded_on_another_number_of_ranks(run_ranks, tmp_path: Path):
    saved = run_ranks(first_half, str(tmp_path / "saved"), "rows", world=2)[0]
    _, expected = run_ranks(loaded, str(tmp_path / "saved"), "rows", world=2)[0]
    parameters, state = run_ranks(loaded, str(tmp_path / "saved"), "flat", world=3)[0]
    assert all(torch.equal(parameters[name], value) for name, value in saved.items())
    assert all(torch.equal(ours, theirs) and ours.any() for ours, theirs in zip(state, expected, strict=True))


def bytes_of_a_step(layout: str) -> tuple[int, int]:
    """Sent in exchanges, and what this rank's shards of the matrices take in bfloat16."""
    model = sharded(layout=layout)
    muon = fullshard.Muon(matrices(model))
    backward(model, 0)
    original, sent = dist.all_to_all_single, []

    def counted(out: torch.Tensor, given: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(given.nbytes)
        return original(out, given, *args, **kwargs)

    dist.all_to_all_single = counted
    try:
        muon.step()
    finally:
        dist.all_to_all_single = original
    assert len(sent) == 2
    return sum(sent), sum(2 * p.to_local().numel() for p in matrices(model))


@pytest.mark.gloo("counts what is sent")
def test_nothing_is_padded(run_ranks):
    """All ranks together send each number twice, there and back."""
    for layout in ("rows", "flat"):
        found = run_ranks(bytes_of_a_step, layout, world=3)
        assert sum(sent for sent, _ in found) == 2 * sum(held for _, held in found)


# Llama-3-8B: 32 blocks of these matrices; Qwen3-4B: 36; Mixtral 8x7B: 32, whose experts are matrices each.
SHAPES = {
    "Llama-3-8B": 32 * [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), *2 * [(14336, 4096)], (4096, 14336)],
    "Qwen3-4B": 36 * [(4096, 2560), (1024, 2560), (1024, 2560), (2560, 4096), *2 * [(9728, 2560)], (2560, 9728)],
    "Mixtral-8x7B": 32 * [(4096, 4096), *2 * [(1024, 4096)], (4096, 4096), *24 * [(14336, 4096)]],
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("world", [8, 64, 1024])
def test_owners_are_balanced(name, world):
    """No rank has more than a third over the least that is possible: an equal share, or the largest matrix."""
    costs = [2 * min(shape) ** 2 * max(shape) + min(shape) ** 3 for shape in SHAPES[name]]
    loads = [0] * world
    for owner, cost in zip(least_loaded(costs, world), costs, strict=True):
        loads[owner] += cost
    least = max(sum(costs) / world, *costs)
    assert max(loads) <= 4 / 3 * least + 1


def test_pieces_find_their_place():
    """Columns of an odd number over 4 ranks, of which the last has none."""
    cut = RowsCut(None, torch.Size((3, 5)), 1, 4, 0)  # type: ignore[arg-type]
    assert [cut.bounds(rank) for rank in range(4)] == [(0, 2), (2, 2), (4, 1), (5, 0)]
    assert [cut.numel(rank) for rank in range(4)] == [6, 6, 3, 0]
    assert Owners([cut], least_loaded([1], 4)).mine == [0]


def test_goes_on_with_the_state_of_torchs():
    results = []
    for kind in (torch.optim.Muon, fullshard.Muon):
        matrix = nn.Parameter(torch.arange(12.0).view(4, 3).sin())
        first, second = torch.optim.Muon([matrix], lr=0.1), kind([matrix], lr=0.5)
        for optimizer in (first, second):
            matrix.grad = matrix.detach().cos()
            if optimizer is second:
                second.load_state_dict(first.state_dict())
            optimizer.step()
        results.append(matrix.detach())
    assert torch.equal(*results)


def test_the_state_of_another_optimizer_is_refused(fake_world):
    """By name of what it lacks, before anything changes; hooks that convert it run first."""
    fake_world(1)
    model = fullshard.fully_shard(nn.Linear(WIDE, NARROW, bias=False))
    muon, adamw = fullshard.Muon(model.parameters()), torch.optim.AdamW(model.parameters())
    settings = dict(muon.param_groups[0])
    with pytest.raises(fullshard.CheckpointError, match=r"lacks settings of optimizer group 0(.|\n)*momentum"):
        muon.load_state_dict(adamw.state_dict())  # which has not stepped
    model(torch.ones(1, WIDE)).sum().backward()
    adamw.step()
    with pytest.raises(fullshard.CheckpointError, match=r"weight\n(.|\n)*momentum_buffer\n(.|\n)*exp_avg, exp_avg_sq"):
        muon.load_state_dict(adamw.state_dict())
    assert muon.param_groups[0] == settings and not muon.state
    fresh = muon.state_dict()
    muon.register_load_state_dict_pre_hook(lambda *_: fresh)
    muon.load_state_dict(adamw.state_dict())
    muon.step()


@pytest.mark.parametrize("layout", ["rows", "flat"])
def test_momentum_of_another_shape_is_refused(fake_world, layout):
    """The step would fail, on this rank alone, while the others wait for it."""
    fake_world(2)
    model = fullshard.fully_shard(nn.Linear(WIDE, NARROW, bias=False), layout=layout)
    muon = fullshard.Muon(model.parameters())
    state = {**muon.state_dict(), "state": {0: {"momentum_buffer": torch.zeros(NARROW, WIDE)}}}
    with pytest.raises(fullshard.CheckpointError, match=r"not split like its parameter(.|\n)*weight\n(.|\n)*of which"):
        muon.load_state_dict(state)  # of one process
    model(torch.ones(1, WIDE)).sum().backward()
    muon.step()
    saved, momentum = muon.state_dict(), muon.state[model.weight]["momentum_buffer"].clone()
    state = {**saved, "state": {0: {"momentum_buffer": torch.zeros_like(momentum)[:1]}}} if layout == "rows" else state
    with pytest.raises(fullshard.CheckpointError, match="not split like its parameter"):
        muon.load_state_dict(state)
    assert torch.equal(muon.state[model.weight]["momentum_buffer"].to_local(), momentum.to_local())
    muon.load_state_dict(saved)
    muon.step()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lr": -1.0}, r"Muon\(lr=\) is invalid"),
        ({"ns_steps": -1}, r"Muon\(ns_steps=\) is invalid"),
        ({"eps": -1e-7}, r"Muon\(eps=\) is invalid"),
        ({"momentum": float("nan")}, r"Muon\(momentum=\) is invalid"),
        ({"adjust_lr_fn": "other"}, r"Muon\(adjust_lr_fn=\) is invalid"),
        ({"lr": "0.1"}, r"Muon\(lr=\) is invalid"),
        ({"lr": torch.ones(2)}, r"Muon\(lr=\) is invalid"),
        ({"ns_steps": 2.5}, r"Muon\(ns_steps=\) is invalid"),
        ({"ns_steps": 100}, r"Muon\(ns_steps=\) is invalid"),
        ({"ns_coefficients": (1.0, 2.0)}, r"Muon\(ns_coefficients=\) is invalid"),
        ({"split": True}, "split does not fit"),
        ({"split": 5}, "split does not fit"),
        ({"split": (6, 7)}, "rows that add up to 12"),
        ({"split": "heads"}, "split does not fit"),
        ({"split": [6.0, 6.0]}, "split does not fit"),
        ({"split": [6, "6"]}, "split does not fit"),
    ],
)
def test_refused_settings(settings, words):
    with pytest.raises(fullshard.ConfigError, match=words):
        fullshard.Muon([nn.Parameter(torch.ones(12, 5))], **settings)


def test_a_group_that_lost_a_setting_is_refused():
    muon = fullshard.Muon([nn.Parameter(torch.ones(3, 3))])
    del muon.param_groups[0]["weight_decay"]
    with pytest.raises(fullshard.ConfigError, match="none of weight_decay"):
        muon.step()


def test_refused_parameters(fake_world):
    fake_world(2)
    with pytest.raises(fullshard.ConfigError, match="real numbers"):
        fullshard.Muon([nn.Parameter(torch.ones(3, 3, dtype=torch.complex64))])
    matrix = nn.Parameter(torch.ones(3, 3))
    with pytest.raises(fullshard.ConfigError, match=r"Muon\(lr=\) is invalid"):
        fullshard.Muon([{"params": [matrix], "lr": -1.0}])
    with pytest.raises(fullshard.ConfigError, match=r"(?s)not a matrix.*bias"):
        fullshard.Muon(nn.Linear(3, 3).named_parameters())
    with pytest.raises(fullshard.ConfigError, match=r"(?s)not a matrix.*fully_shard and model\.parameters"):
        fullshard.Muon(fullshard.optimizer_view(sharded()))
    with pytest.raises(fullshard.ConfigError, match="not a matrix"):
        fullshard.Muon(fullshard.FullyShardedDataParallel(build()).parameters())


@pytest.mark.parametrize(
    ("name", "value"),
    [("split", 5), ("ns_steps", "x"), ("lr", None), ("ns_coefficients", ("a", "b", "c")), ("nesterov", "no")],
)
def test_a_setting_that_became_invalid_changes_nothing(name: str, value: Any):
    matrices = [nn.Parameter(torch.randn(12, 5)) for _ in range(2)]
    muon = fullshard.Muon([{"params": [matrices[0]]}, {"params": [matrices[1]]}], lr=0.1)
    for _ in range(2):
        for matrix in matrices:
            matrix.grad = torch.randn(12, 5)
        values = [matrix.detach().clone() for matrix in matrices]
        momenta = [muon.state[matrix]["momentum_buffer"].clone() for matrix in matrices if muon.state[matrix]]
        before, muon.param_groups[1][name] = muon.param_groups[1][name], value
        with pytest.raises(fullshard.ConfigError, match=name):
            muon.step()
        assert all(map(torch.equal, values, matrices))
        assert all(torch.equal(m, muon.state[p]["momentum_buffer"]) for m, p in zip(momenta, matrices, strict=False))
        muon.param_groups[1][name] = before
        muon.step()


def test_a_parameter_that_is_listed_twice():
    p, q = (nn.Parameter(torch.randn(3, 4)) for _ in range(2))
    for make in (fullshard.Muon, lambda params: fullshard.OwnerOptimizer(params, torch.optim.SGD, lr=0.1)):
        with warnings.catch_warnings(), pytest.raises(fullshard.ConfigError, match="lists a parameter twice"):
            warnings.simplefilter("ignore")  # torch's own
            make([p, q, p])


def other_rates(kind: str, mesh: tuple[int, ...]) -> str:
    model = build()
    names = ("replicate", "shard")[-len(mesh) :]
    fullshard.fully_shard(model, mesh=init_device_mesh("cpu", mesh, mesh_dim_names=names))
    of = matrices(model)
    optimizer = (
        fullshard.Muon(of, lr=0.1) if kind == "Muon" else fullshard.OwnerOptimizer(of, torch.optim.Adafactor, lr=0.1)
    )
    for step in range(2):
        for p in of:
            p.grad = torch.ones_like(p)
        optimizer.param_groups[0]["lr"] = 0.1 + 0.1 * step * torch.distributed.get_rank()
        try:
            optimizer.step()
        except fullshard.DivergenceError as error:
            return f"{step}: {error}"
    return ""


@pytest.mark.parametrize("mesh", [(2,), (2, 1)], ids=str)
@pytest.mark.parametrize("kind", ["Muon", "OwnerOptimizer"])
@pytest.mark.gloo("processes")
def test_ranks_with_other_learning_rates(run_ranks, kind, mesh):
    for error in run_ranks(other_rates, kind, mesh, world=2):
        assert error.startswith("1: ") and "learning rates [0.1]" in error and "learning rates [0.2]" in error, error


@pytest.mark.parametrize("layout", ["rows", "flat"])
def test_muons_of_shards_are_refused(fake_world, layout):
    """By the name of the package: this stands in for one whose kernels need a GPU."""
    fake_world(2)
    kind = type("Muon", (torch.optim.SGD,), {"__module__": "muonium.optim.optim"})
    model = fullshard.fully_shard(nn.Linear(4, 4, bias=False), layout=layout)
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(fullshard.ConfigError, match=r"the part of a matrix[\s\S]*weight[\s\S]*fullshard.Muon"):
        kind(model.parameters(), lr=0.1).step()
    plain = nn.Linear(4, 4)
    plain(torch.ones(2, 4)).sum().backward()
    kind(plain.parameters(), lr=0.1).step()
