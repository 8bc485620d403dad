"""The CUDA path on one GPU: numbers, races, frees and memory. Skipped, with the reason, where there is no GPU.

One NCCL rank gives real communication streams and real results; the fake group at world 64 gives real sharding and
meaningless results, so only memory is asserted there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

from fullshard import MixedPrecisionPolicy, TorchComm, fully_shard, memory_use, optimizer_view

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that --gpu=tests shows"),
]

DEVICE = "cuda"
WIDTH, BLOCKS, VOCABULARY, WORLD = 512, 6, 97, 64
LAYOUTS = pytest.mark.parametrize("layout", ["rows", "flat"])


class Block(nn.Module):
    """Pre-norm causal attention and a 4x MLP. [batch, time, width] -> same."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm_mlp = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, _ = x.shape
        q, k, v = self.qkv(self.norm_attention(x)).view(batch, time, 3, 8, -1).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x))))


class Model(nn.Module):
    """Tokens [batch, time] -> logits [batch, time, vocabulary]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.fixture(autouse=True)
def repeatable_attention() -> Iterator[None]:
    """Attention by plain matrix products: the faster kernels' backward adds in no fixed order."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


def make_model() -> Model:
    torch.manual_seed(0)
    with torch.device(DEVICE):
        return Model()


def make_tokens(batch: int = 2, time: int = 32) -> Tensor:
    random = torch.Generator().manual_seed(1)
    return torch.randint(0, VOCABULARY, (batch, time + 1), generator=random).to(DEVICE)


def shard(model: Model, mesh: DeviceMesh, *, shortcut: bool = False, **options: Any) -> Model:
    """Every block a unit, and the root; one rank alone calls NCCL all the same, unless `shortcut`."""
    options["comm"] = TorchComm(local_shortcut=shortcut)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def make_step(model: nn.Module, tokens: Tensor, parameters: Any = None) -> Callable[[], Tensor]:
    """A function that trains one step and returns its loss, for which the host does not wait: races would hide."""
    optimizer = torch.optim.AdamW(list(parameters or model.parameters()), lr=1e-3, fused=True)

    def step() -> Tensor:
        loss = loss_of(model, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def assert_same_losses(losses: list[tuple[Tensor, Tensor]], tolerance: float) -> None:
    """Of each step, ours and the reference's; read only now, when the device may be steps behind the host."""
    ours, expected = (torch.stack(side).cpu() for side in zip(*losses, strict=True))
    torch.testing.assert_close(ours, expected, rtol=tolerance, atol=0)


def full_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Name -> whole parameter: of a sharded model (`full_tensor`) or a plain one."""
    return {
        name: (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).detach()
        for name, parameter in model.named_parameters()
    }


def assert_same_parameters(ours: nn.Module, reference: nn.Module, tolerance: float) -> None:
    """Every parameter within `tolerance`, relative to the reference's norm."""
    expected = full_parameters(reference)
    for name, value in full_parameters(ours).items():
        distance = (value - expected[name]).norm() / expected[name].norm().clamp_min(1e-12)
        assert distance <= tolerance, f"{name}: relative distance {distance:.2e}"


@LAYOUTS
@pytest.mark.parametrize("shortcut", [False, True])
def test_fp32_training_equals_plain_pytorch(one_rank: DeviceMesh, layout: str, shortcut: bool) -> None:
    tokens = make_tokens()
    plain, sharded = make_model(), shard(make_model(), one_rank, layout=layout, shortcut=shortcut)
    plain_step, step = make_step(plain, tokens), make_step(sharded, tokens)
    assert_same_losses([(step(), plain_step()) for _ in range(4)], 1e-6)
    assert_same_parameters(sharded, plain, 1e-6)


@LAYOUTS
def test_mixed_precision_equals_bf16_compute_on_fp32_weights(one_rank: DeviceMesh, layout: str) -> None:
    tokens, policy = make_tokens(), MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    master, sharded = make_model(), shard(make_model(), one_rank, layout=layout, mp_policy=policy)
    compute = copy.deepcopy(master).bfloat16()
    optimizer = torch.optim.AdamW(master.parameters(), lr=1e-3, fused=True)
    step, losses = make_step(sharded, tokens), []
    for _ in range(4):
        for low, high in zip(compute.parameters(), master.parameters(), strict=True):
            low.data.copy_(high.data)
            low.grad = None
        loss = loss_of(compute, tokens)
        loss.backward()
        for low, high in zip(compute.parameters(), master.parameters(), strict=True):
            high.grad = low.grad.float()
        optimizer.step()
        losses.append((step(), loss.detach()))
    assert_same_losses(losses, 1e-4)
    assert_same_parameters(sharded, master, 1e-4)


@LAYOUTS
def test_optimizer_view_trains_as_the_parameters_do(one_rank: DeviceMesh, layout: str) -> None:
    tokens = make_tokens()
    by_parameter, by_view = (shard(make_model(), one_rank, layout=layout) for _ in range(2))
    view = optimizer_view(by_view)
    assert all(type(tensor) is nn.Parameter and tensor.device.type == DEVICE for tensor in view)
    step, view_step = make_step(by_parameter, tokens), make_step(by_view, tokens, view)
    assert_same_losses([(view_step(), step()) for _ in range(4)], 1e-6)
    assert_same_parameters(by_view, by_parameter, 1e-6)


@LAYOUTS
def test_compiled_blocks_give_the_same_numbers(one_rank: DeviceMesh, layout: str) -> None:
    tokens = make_tokens()
    plain = make_model()
    compiled = make_model()
    for block in compiled.blocks:
        block.forward = torch.compile(block.forward)
    sharded = shard(compiled, one_rank, layout=layout)
    plain_step, step = make_step(plain, tokens), make_step(sharded, tokens)
    assert_same_losses([(step(), plain_step()) for _ in range(3)], 1e-4)
    assert_same_parameters(sharded, plain, 1e-3)


@LAYOUTS
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_slow_computation_and_late_host_change_nothing(one_rank: DeviceMesh, layout: str, prefetch: int) -> None:
    """Races show as other numbers: blocks that dawdle on the compute stream let communication run far ahead."""
    tokens = make_tokens()
    models = [shard(make_model(), one_rank, layout=layout, prefetch=prefetch) for _ in range(2)]
    for block in models[1].blocks:
        block.register_forward_pre_hook(lambda *_: torch.cuda._sleep(2_000_000))
        block.norm_mlp.register_full_backward_hook(lambda *_: torch.cuda._sleep(2_000_000))
    quick, slow = (make_step(model, tokens) for model in models)
    assert_same_losses([(slow(), quick()) for _ in range(6)], 0.0)
    for name, value in full_parameters(models[1]).items():
        assert torch.equal(value, full_parameters(models[0])[name]), name


@LAYOUTS
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_a_step_returns_every_byte_it_took(one_rank: DeviceMesh, layout: str, prefetch: int) -> None:
    """The same bytes are allocated after every step, and the same peak is reached in each."""
    step = make_step(shard(make_model(), one_rank, layout=layout, prefetch=prefetch), make_tokens())
    for _ in range(3):
        step()
    levels, peaks = set(), set()
    for _ in range(5):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step()
        levels.add(torch.cuda.memory_allocated())
        peaks.add(torch.cuda.max_memory_allocated())
    assert len(levels) == 1, f"bytes after each step: {sorted(levels)}"
    assert len(peaks) == 1, f"peak of each step: {sorted(peaks)}"


def skip(model: nn.Module, tokens: Tensor) -> None:
    """The next step comes at once."""


def evaluate(model: nn.Module, tokens: Tensor) -> None:
    with torch.no_grad():
        loss_of(model, tokens)


@LAYOUTS
@pytest.mark.parametrize("following", [skip, evaluate])
def test_training_goes_on_after_a_backward_that_ran_out_of_memory(
    one_rank: DeviceMesh, layout: str, following: Callable[[nn.Module, Tensor], None]
) -> None:
    """Gradients are set to None one by one: nobody calls `zero_grad`, in which Fullshard would notice."""
    tokens = make_tokens()
    plain, sharded = make_model(), shard(make_model(), one_rank, layout=layout)
    plain_step, step = make_step(plain, tokens), make_step(sharded, tokens)
    losses = [(step(), plain_step()) for _ in range(2)]
    for _ in range(2):
        # Called on autograd's thread of the device, as the hooks of units are.
        handle = sharded.blocks[BLOCKS // 2].norm_mlp.register_full_backward_hook(
            lambda *_: torch.empty(2**50, dtype=torch.uint8, device=DEVICE)
        )
        with pytest.raises(torch.OutOfMemoryError):
            loss_of(sharded, tokens).backward()
        handle.remove()
        assert memory_use(sharded).gathered == 0
        for parameter in sharded.parameters():
            parameter.grad = None
        following(sharded, tokens)
        losses += [(step(), plain_step()) for _ in range(2)]
    assert_same_losses(losses, 1e-6)
    assert_same_parameters(sharded, plain, 1e-6)


@LAYOUTS
def test_a_step_is_captured_as_a_graph(one_rank: DeviceMesh, layout: str) -> None:
    """Replays train as steps do; a step that follows them goes on from there."""
    tokens, results = make_tokens(), []
    for captured in (False, True):
        model = shard(make_model(), one_rank, layout=layout)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True, capturable=True)

        def step(model: Model = model, optimizer: torch.optim.Optimizer = optimizer) -> Tensor:
            loss = loss_of(model, tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss.detach()

        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            losses = [step() for _ in range(3)]
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=side):
                loss = step()
            for _ in range(4):
                graph.replay()
                losses.append(loss.clone())
        else:
            losses += [step() for _ in range(4)]
        losses.append(step())
        results.append((torch.stack(losses).cpu(), full_parameters(model)))
    (losses, weights), (of_graph, same) = results
    torch.testing.assert_close(of_graph, losses, rtol=1e-5, atol=0)
    for name, value in weights.items():
        torch.testing.assert_close(same[name], value, rtol=1e-4, atol=1e-6)


@LAYOUTS
def test_evaluation_frees_every_unit(one_rank: DeviceMesh, layout: str) -> None:
    tokens = make_tokens()
    with torch.no_grad():
        loss_of(make_model(), tokens).item()  # cuBLAS takes memory at its first use, and keeps it
        base = torch.cuda.memory_allocated()
        model = shard(make_model(), one_rank, layout=layout, reshard_after_forward=True)
        loss_of(model, tokens).item()
        before = torch.cuda.memory_allocated()
        loss_of(model, tokens).item()
    assert torch.cuda.memory_allocated() == before
    shards = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    assert before - base < 1.2 * shards + 2**20  # bytes: a unit left gathered would add at least a seventh of the model


def activation_bytes(tokens: Tensor) -> int:
    """Most bytes a plain forward adds: what sharding cannot reduce."""
    model = make_model()
    loss_of(model, tokens).backward()  # the library of matrix products takes memory on each thread, and keeps it
    model.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss_of(model, tokens)
    return torch.cuda.max_memory_allocated() - before


@LAYOUTS
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_peak_memory_keeps_its_promise(fake_world: Callable[..., None], layout: str, prefetch: int) -> None:
    """World 64: state + (prefetch + 1) gathered units + gradients of the units in reduction + activations.

    Gradients in reduction: one unit's as autograd made them, one unit's in the reduce buffer, one in flight.
    """
    tokens = make_tokens()
    activations = activation_bytes(tokens)
    block = sum(parameter.numel() * 4 for parameter in Block().parameters())
    base = torch.cuda.memory_allocated()
    fake_world(WORLD)
    model = shard(make_model(), init_device_mesh(DEVICE, (WORLD,)), layout=layout, prefetch=prefetch)
    whole = BLOCKS * block + 2 * VOCABULARY * WIDTH * 4
    for _ in range(2):
        loss_of(model, tokens).backward()
        model.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated() - base
    assert held < 2 * whole / WORLD + 2**20  # rows pad the vocabulary's 97 rows to 128
    torch.cuda.reset_peak_memory_stats()
    loss_of(model, tokens).backward()
    copies = 1 if layout == "rows" else 0  # rows that do not come out contiguous are copied once
    units = prefetch + 1 + copies + 3
    allowed = units * block + 4 * VOCABULARY * WIDTH * 4 + 4 * whole / WORLD + 1.5 * activations
    peak = torch.cuda.max_memory_allocated() - base
    assert peak <= allowed, f"peak {peak:,} B, allowed {allowed:,.0f} B"
    assert memory_use(model).peak_transient <= allowed


@LAYOUTS
def test_second_derivatives_equal_plain_pytorch(one_rank: DeviceMesh, layout: str) -> None:
    """A gradient penalty: autograd's thread numbers the nodes of the first backward for itself."""
    x, results = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(2)).to(DEVICE), []
    for sharded in (False, True):
        torch.manual_seed(0)
        with torch.device(DEVICE):
            model = nn.Sequential(
                *[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(3)],
                nn.Linear(WIDTH, 4),
            )
        for block in model[:-1] if sharded else ():
            fully_shard(block, mesh=one_rank, layout=layout, comm=TorchComm(local_shortcut=False))
        if sharded:
            fully_shard(model, mesh=one_rank, layout=layout, comm=TorchComm(local_shortcut=False))
        given = x.clone().requires_grad_()
        rows = [torch.autograd.grad(out.sum(), given, create_graph=True)[0] for out in model(given).unbind(1)]
        torch.stack(rows).square().sum().backward()
        results.append(
            [
                (p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad)
                for p in model.parameters()
                if p.grad is not None
            ]
        )
        if sharded:
            assert memory_use(model).gathered == 0
    for ours, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
