"""Parameters that tensor parallelism made DTensors, sharded once more: numbers, placements, norms, checkpoints."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import fullshard
from training import full as whole

STEPS = 3


class Block(nn.Module):
    """A norm and two layers, of sizes that four ranks share evenly or not."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, width: int = 6, hidden: int = 10, classes: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(2))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def tensor_parallel(model: Model, mesh: DeviceMesh, sequence: bool) -> Model:
    for block in model.blocks:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        if sequence:
            plan = {
                "norm": SequenceParallel(),
                "up": ColwiseParallel(input_layouts=Shard(1)),
                "down": RowwiseParallel(output_layouts=Shard(1)),
            }
        parallelize_module(block, mesh, plan)
    if sequence:
        split = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True)
        parallelize_module(model.blocks[0], mesh, split)
    plan = {"head": ColwiseParallel(input_layouts=Shard(1) if sequence else Replicate(), output_layouts=Replicate())}
    return parallelize_module(model, mesh, plan)


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def meshes(shape: tuple[int, ...]) -> tuple[DeviceMesh, DeviceMesh]:
    """The data-parallel mesh and the tensor-parallel one."""
    names = ("replicate", "dp", "tp")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return mesh[names[:-1]], mesh["tp"]


def parallel_model(library, shape: tuple[int, ...], sequence: bool = False, hidden: int = 10) -> Model:
    dp, tp = meshes(shape)
    model = tensor_parallel(Model(hidden=hidden), tp, sequence)
    for unit in [*model.blocks, model]:
        library.fully_shard(unit, mesh=dp)
    return model


def data_rank(shape: tuple[int, ...]) -> tuple[int, int]:
    """Which batch this rank computes, and of how many."""
    return dist.get_rank() // shape[-1], dist.get_world_size() // shape[-1]


def train(model: nn.Module, inputs, clip) -> tuple[list[float], dict[str, Tensor]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    norms = []
    for step in range(STEPS):
        x = inputs(step)
        out = model(x)
        loss = (out * out).mean() if isinstance(out, DTensor) else out.square().mean()
        loss.backward()
        norm = clip(model.parameters(), 0.05)
        norms.append((norm.full_tensor() if isinstance(norm, DTensor) else norm).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms, {n: whole(p) for n, p in model.named_parameters()}


def close(left: dict[str, Tensor], right: dict[str, Tensor], rtol: float = 1e-5) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        torch.testing.assert_close(tensor, right[name], rtol=rtol, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")


# torch's own tensor parallelism wants `hidden` to divide by tp; what is left of it need not by dp
@pytest.mark.parametrize(
    ("shape", "hidden", "sequence"),
    [((2, 2), 10, False), ((2, 2), 10, True), ((1, 4), 12, False), ((2, 1, 2), 10, False), ((1, 2, 2), 6, False)],
    ids=str,
)
def test_as_one_process(run_ranks, shape, hidden, sequence):
    assert all(run_ranks(against_one_process, shape, hidden, sequence, world=4))


def against_one_process(shape: tuple[int, ...], hidden: int, sequence: bool) -> bool:
    rank, ranks = data_rank(shape)
    model = parallel_model(fullshard, shape, sequence, hidden)
    norms, got = train(model, lambda s: batch(s, rank), fullshard.clip_grad_norm_)
    everything = train(
        Model(hidden=hidden), lambda s: torch.cat([batch(s, r) for r in range(ranks)]), nn.utils.clip_grad_norm_
    )
    assert norms == pytest.approx(everything[0], rel=1e-5)
    close(got, everything[1])
    return True


def test_placements_and_local_parts_are_pytorchs(run_ranks):
    assert all(run_ranks(placed_as_pytorchs, world=4))


def placed_as_pytorchs() -> bool:
    for sequence in (False, True):
        ours, theirs = (
            dict(parallel_model(one, (2, 2), sequence).named_parameters()) for one in (fullshard, torch_fsdp)
        )
        for name, p in ours.items():
            other = theirs[name]
            assert (p.placements, p.shape) == (other.placements, other.shape), name
            assert p.device_mesh.mesh_dim_names == other.device_mesh.mesh_dim_names, name
        close({n: p.to_local() for n, p in ours.items()}, {n: p.to_local() for n, p in theirs.items()})
    return True


def test_what_modules_see(run_ranks):
    assert all(run_ranks(seen_inside, world=4))


def seen_inside() -> bool:
    """In forward the parameter is the tensor-parallel DTensor, the same object in every step; after it, the sharded."""
    model = parallel_model(fullshard, (2, 2))
    seen = []
    model.blocks[0].up.register_forward_pre_hook(lambda m, a: seen.append(m.weight))
    for step in range(2):
        model(batch(step, 0)).sum().backward()
    assert seen[0] is seen[1]
    assert (seen[0].placements, seen[0].device_mesh.mesh_dim_names) == ((Shard(0),), ("tp",))
    weight = model.blocks[0].up.weight
    assert weight.device_mesh.mesh_dim_names == ("dp", "tp")
    assert torch.equal(whole(weight), Model().blocks[0].up.weight)
    down = model.blocks[0].down.weight
    assert down.placements == (Shard(0), Shard(1))
    assert down.to_local().shape == (3, 5)
    twin = copy.deepcopy(model)
    assert torch.equal(whole(twin.blocks[0].up.weight), whole(weight))
    twin(batch(0, 0)).sum().backward()
    return True


@pytest.mark.parametrize("after", [(1, 4), (2,)], ids=str)
def test_checkpoints_go_to_other_meshes(run_ranks, tmp_path, after):
    """Saved on 2 x 2, with AdamW's state; loaded on other meshes of four ranks, and on two ranks without tp."""
    path = str(tmp_path / "saved")
    want = run_ranks(save_trained, path, world=4)[0]
    for got in run_ranks(load_trained, path, after, world=4 if len(after) == 2 else 2):
        for mine, theirs in zip(got, want, strict=True):
            close(mine, theirs, rtol=0.0)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    return {"model": model.state_dict(), "optimizer": fullshard.optimizer_state_dict(model, optimizer)}


def wholes(state: dict[str, object]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    moments = {f"{n}.{k}": whole(v) for n, s in state["optimizer"]["state"].items() for k, v in s.items()}
    return {n: whole(v) for n, v in state["model"].items()}, moments


def save_trained(path: str):
    rank, _ = data_rank((2, 2))
    model = parallel_model(fullshard, (2, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(batch(0, rank)).square().mean().backward()
    optimizer.step()
    state = state_of(model, optimizer)
    dcp.save(state, checkpoint_id=path)
    return wholes(state)


def load_trained(path: str, shape: tuple[int, ...]):
    if len(shape) == 2:
        model = parallel_model(fullshard, shape)
    else:
        model = Model()
        for unit in [*model.blocks, model]:
            fullshard.fully_shard(unit, layout="flat")
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    fullshard.load_optimizer_state_dict(model, optimizer, state["optimizer"])
    return wholes(state_of(model, optimizer))


def test_whole_tensors_load(run_ranks):
    assert all(run_ranks(load_whole, world=4))


def load_whole() -> bool:
    model, other = parallel_model(fullshard, (2, 2)), Model()
    for p in other.parameters():
        nn.init.normal_(p)
    model.load_state_dict(other.state_dict())
    close({n: whole(p) for n, p in model.named_parameters()}, dict(other.named_parameters()), rtol=0.0)
    return True


def test_what_is_refused(run_ranks):
    assert all(run_ranks(refused, world=4))


def refused() -> bool:
    dp, tp = meshes((2, 2))
    for settings, words in (
        ({"mesh": dp, "layout": "flat"}, 'layout="rows"'),
        ({}, "mesh"),  # one axis over all ranks, not sliced from the mesh of the parameters
        ({"mesh": tp}, "a dim that occurs in both"),
    ):
        model = tensor_parallel(Model(), tp, sequence=False)
        with pytest.raises(fullshard.ConfigError, match=r"already a DTensor|DTensor already") as caught:
            fullshard.fully_shard(model.blocks[0], **settings)
        assert words in str(caught.value) and "up.weight" in str(caught.value)
        model(batch(0, 0))  # nothing has changed
    model = parallel_model(fullshard, (2, 2))
    gone = tensor_parallel(Model(), tp, sequence=False)
    weight = gone.blocks[0].up.weight
    fullshard.fully_shard(gone, mesh=dp)
    with pytest.raises(fullshard.ConfigError, match="was replaced"):
        weight + 1
    return True


# One mesh of all kinds of parallelism, and the names of its data-parallel dims.

SPMD = {
    "shard": ((2, 2), ("dp", "tp"), {"shard": "dp"}),
    "hybrid": ((2, 1, 2), ("pods", "dp", "tp"), {"shard": "dp", "replicate": "pods"}),
    "flattened": ((2, 1, 2), ("dp", "cp", "tp"), {"shard": ("dp", "cp")}),
    "two flattened": ((1, 2, 2), ("pods", "racks", "dp"), {"shard": "dp", "replicate": ("pods", "racks")}),
    "nothing else": ((2, 2), ("pods", "dp"), {"shard": "dp", "replicate": "pods"}),
}


def spmd_model(mesh: DeviceMesh, data: tuple[str, ...]) -> nn.Sequential:
    """Layers whose parameters are DTensors on the whole mesh: the first split by columns, the second by rows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 10), nn.Tanh(), nn.Linear(10, 3))
    for layer, dims in ((model[0], {"weight": 0, "bias": 0}), (model[2], {"weight": 1})):
        for name, p in list(layer.named_parameters()):
            split = Shard(dims[name]) if name in dims else Replicate()
            placements = [Replicate() if dim in data else split for dim in mesh.mesh_dim_names]
            local = p.detach()
            for dim, placement in zip(mesh.mesh_dim_names, placements, strict=True):
                if isinstance(placement, Shard):
                    local = local.chunk(mesh[dim].size(), placement.dim)[mesh.get_local_rank(dim)]
            split_up = DTensor.from_local(local.contiguous(), mesh, placements, run_check=False)
            setattr(layer, name, nn.Parameter(split_up))
    return model


@pytest.mark.parametrize(("name", "unflattened"), [*((name, False) for name in SPMD), ("flattened", True)])
def test_dp_mesh_dims_as_pytorch_and_one_process(run_ranks, name, unflattened):
    """A program such as torchtitan unflattens all its meshes from one dim of all ranks."""
    assert all(run_ranks(spmd_against_others, name, unflattened, world=4))


def spmd_against_others(name: str, unflattened: bool) -> bool:
    """PyTorch's fully_shard is asked where it has dp_mesh_dims: torch 2.11 has not."""
    shape, names, dims = SPMD[name]
    if unflattened:
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("world",))._unflatten(0, shape, names)
    else:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    data = tuple(n for n in names if n != "tp")
    results = []
    for library in (fullshard, torch_fsdp) if hasattr(torch_fsdp, "DataParallelMeshDims") else (fullshard,):
        model = spmd_model(mesh, data)
        settings = {"mesh": mesh, "dp_mesh_dims": library.DataParallelMeshDims(**dims)}
        library.fully_shard(model[0], **settings)
        library.fully_shard(model, **settings)
        seen: list[tuple[object, ...]] = []
        model[0].register_forward_pre_hook(
            lambda m, a, seen=seen: seen.append((m.weight.placements, m.weight.device_mesh.mesh_dim_names))
        )
        places = {n: (p.placements, p.device_mesh.mesh_dim_names) for n, p in model.named_parameters()}
        replicas = dist.get_rank() // (shape[-1] if names[-1] == "tp" else 1)
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(replicas))
        inputs = [Shard(0) if n in data else Replicate() for n in names]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(2):
            out = model(DTensor.from_local(x, mesh, inputs, run_check=False)).redistribute(mesh, inputs).to_local()
            out.square().mean().backward()
            gradients = {n: whole(p.grad) for n, p in model.named_parameters()}
            optimizer.step()
            optimizer.zero_grad()
        results.append((places, seen[0], gradients, {n: whole(p) for n, p in model.named_parameters()}))
    ours = results[0]
    for theirs in results[1:]:
        if name == "two flattened":  # ours makes one dim of both, PyTorch's shows both: docs/migration.md
            assert set(ours[0].values()) == {((Replicate(), Shard(0)), ("pods_racks", "dp"))}
        else:
            assert ours[:2] == theirs[:2]
        close(ours[2], theirs[2])
        close(ours[3], theirs[3])
    gradients, parameters = trained_in_one_process(4 // (shape[-1] if names[-1] == "tp" else 1))
    close(ours[2], gradients)
    close(ours[3], parameters)
    return True


def trained_in_one_process(replicas: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Gradients and parameters after two steps of `spmd_model`, not sharded, on every replica's batch at once."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 10), nn.Tanh(), nn.Linear(10, 3))
    x = torch.cat([torch.randn(2, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(replicas)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    gradients = {}
    for _ in range(2):
        model(x).square().mean().backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    return gradients, {name: p.detach() for name, p in model.named_parameters()}


class Scaled(nn.Module):
    """Multiplies rows, of which each tensor-parallel rank has some: the weight's gradient is partial."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.weight = nn.Parameter(DTensor.from_local(torch.ones(4), mesh, [Replicate()]))

    def forward(self, x: Tensor) -> Tensor:
        return (DTensor.from_local(x, self.mesh, [Shard(0)]) * self.weight).to_local()


def test_partial_gradients_are_summed_in_the_dtype_of_the_reduction(run_ranks):
    """1 and 2**-9 on two tensor-parallel ranks, of whose sum bf16 would lose the second."""
    for got in run_ranks(partial_gradients):
        assert got == [1.0 + 2.0**-9, 1.0 + 2.0**-9, 1.0]


def partial_gradients() -> list[float]:
    dp, tp = meshes((1, 2))
    x = torch.full((1, 4), 2.0 ** (-9 * tp.get_local_rank()), dtype=torch.bfloat16)
    results = []
    for reduce_dtype in (torch.float32, None, torch.bfloat16):
        policy = fullshard.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
        model = fullshard.fully_shard(Scaled(tp), mesh=dp, mp_policy=policy)
        model(x).sum().backward()
        results.append(whole(model.weight.grad)[0].item())
    return results


def test_meshes_unflattened_apart_from_one_root(run_ranks):
    """torchtitan's: `fsdp` is a dim of one mesh, `tp` of another, and neither is one of their root's."""
    for ours, theirs, reference in run_ranks(unflattened, world=4):
        close(ours, reference)
        close(theirs, reference)


def no_clip(parameters: object, norm: float) -> Tensor:
    """torch's own cannot add norms over different meshes."""
    return torch.zeros(())


def unflattened() -> tuple[dict[str, Tensor], ...]:
    results = []
    for library in (fullshard, torch_fsdp):
        world = init_device_mesh("cpu", (4,), mesh_dim_names=("world",))
        data = world._unflatten(0, (1, 2, 1, 2), ("pp", "batch", "cp", "tp"))
        dense = world._unflatten(0, (1, 1, 2, 2), ("pp", "dp_replicate", "fsdp", "tp"))
        for mesh in (dense["fsdp"], dense["dp_replicate", "fsdp"]):
            model = tensor_parallel(Model(), data["tp"], sequence=False)
            for unit in [*model.blocks, model]:
                library.fully_shard(unit, mesh=mesh)
            _, parameters = train(model, lambda step: batch(step, dist.get_rank() // 2), no_clip)
        results.append(parameters)
    single = Model()
    _, reference = train(single, lambda step: torch.cat([batch(step, rank) for rank in range(2)]), no_clip)
    return *results, reference
