"""LoRA on a quantised base (torchao's int8, int4, NF4), sharded: the numbers of the unsharded model, in its bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiny import Sentences, llama
from torch import nn

import fullshard
from fullshard.integrations import hf
from fullshard.integrations.quantised import QuantisedRows, by_rows
from ways import on_ranks

pytest.importorskip("torchao", reason="needs the extra torchao: pip install --no-deps torchao (it asks for no torch)")
pytest.importorskip("peft", reason="needs the extra hf: pip install -e '.[hf]'")

STEPS = 3
KINDS = ["int8", "int8 by groups", "int8 by tensor", "int4", "nf4"]


def quantise(model: nn.Module, kind: str, frozen: bool = False) -> None:
    """Linear layers of the blocks, in place; of an adapted model only those that do not train."""
    from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, quantize_
    from torchao.quantization.granularity import PerGroup, PerTensor
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

    if kind == "nf4":
        for module in model.model.layers.modules():
            if isinstance(module, nn.Linear) and not (frozen and module.weight.requires_grad):
                module.weight = nn.Parameter(to_nf4(module.weight.detach(), 16, 8), requires_grad=False)
        return
    config = {
        "int8": Int8WeightOnlyConfig(),
        "int8 by groups": Int8WeightOnlyConfig(granularity=PerGroup(8)),
        "int8 by tensor": Int8WeightOnlyConfig(granularity=PerTensor()),
        "int4": IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(8)),
    }[kind]
    even = 1 if kind in ("int8", "int8 by tensor") else 8  # columns that make whole groups

    def chosen(module: nn.Module, _: str) -> bool:
        linear = isinstance(module, nn.Linear) and module.in_features % even == 0
        return linear and not (frozen and module.weight.requires_grad)

    quantize_(model.model.layers, config, filter_fn=chosen)


def lora(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    """The same on every rank; rows of the MLP do not divide evenly by two, but NF4 has no such."""
    from peft import LoraConfig, get_peft_model

    base = llama(dtype=dtype, intermediate_size=24 if kind == "nf4" else 25)
    targets = ["q_proj", "v_proj", "up_proj"]
    quantise(base, kind)
    torch.manual_seed(9)
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


def batches(rank: int | None) -> list[torch.Tensor]:
    """Of a step, four rows: two a rank, or all."""
    tokens = Sentences(4 * STEPS).tokens.split(4)
    return [one if rank is None else one[rank::2] for one in tokens]


def train(model: Any, rank: int | None) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for tokens in batches(rank):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        shared = loss.detach().clone()
        if rank is not None:
            dist.all_reduce(shared)
            shared /= 2
        losses.append(shared.item())
    return losses


def adapters(model: Any) -> dict[str, torch.Tensor]:
    found = {name: value for name, value in model.named_parameters() if "lora_" in name}
    return {name: getattr(value, "full_tensor", lambda v=value: v)().detach() for name, value in found.items()}


def inner_bytes(model: nn.Module) -> int:
    """Of all quantised weights: what their tensors take."""
    weights = [p for p in model.parameters() if hasattr(p, "__tensor_flatten__")]
    inner = [getattr(weight, name) for weight in weights for name in weight.__tensor_flatten__()[0]]
    assert weights
    return sum(one.numel() * one.element_size() for one in inner)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(by="run_clients")
def test_trains_as_the_unsharded_model(kind, dtype):
    plain, sharded = lora(kind, dtype), hf.shard(lora(kind, dtype))
    local = [p.to_local() for p in sharded.parameters() if isinstance(getattr(p, "_local_tensor", None), QuantisedRows)]
    assert len(local) >= 12
    tolerance = {"rtol": 2e-4, "atol": 2e-5} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(train(sharded, dist.get_rank()), train(plain, None), **tolerance)
    torch.testing.assert_close(adapters(sharded), adapters(plain), **tolerance)


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(by="run_clients")
def test_gathers_and_holds_quantised_bytes(kind):
    """Of one block: what travels is its quantised tensors and its adapters; a rank holds half."""
    plain, sharded = lora(kind), hf.shard(lora(kind))
    block, ours = plain.get_base_model().model.layers[0], sharded.get_base_model().model.layers[0]
    whole = inner_bytes(block)
    others = sum(p.numel() * p.element_size() for p in block.parameters() if not hasattr(p, "__tensor_flatten__"))
    adjusted = [p.to_local() for p in ours.parameters() if isinstance(getattr(p, "_local_tensor", None), QuantisedRows)]
    held = sum(piece.numel() * piece.element_size() for one in adjusted for piece in one.pieces.values())
    kept = sum(t.numel() * t.element_size() for one in adjusted for t in one.recipe.whole.values())
    assert whole * 0.4 < held + kept < whole * 0.65, (held, kept, whole)
    with fullshard.record_events() as events, torch.no_grad():
        tokens = batches(dist.get_rank())[0]
        sharded(input_ids=tokens, labels=tokens)
    sent = sum(event.nbytes for event in events if event.verb == "gather" and event.unit.endswith("layers.0"))
    assert whole - kept <= sent - others <= (whole - kept) * 1.15 + 512, (sent, others, whole, kept)  # and padding


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_checkpoints_on_other_numbers_of_ranks(run_clients, tmp_path, kind):
    expected = run_clients(saved, kind, str(tmp_path))[0]
    for world in (2, 1):
        run_clients(loaded, kind, str(tmp_path), expected, world=world)


def saved(kind: str, folder: str) -> list[float]:
    model = hf.shard(lora(kind))
    train(model, dist.get_rank())
    fullshard.save(f"{folder}/all", model)
    fullshard.save_safetensors(model, f"{folder}/adapter", adapter=True)
    return logits(model)


def logits(model: Any) -> list[float]:
    with torch.no_grad():
        return model(input_ids=Sentences(4).tokens).logits.flatten().tolist()


def differ(ours: list[float], theirs: list[float]) -> float:
    return max(abs(one - other) for one, other in zip(ours, theirs, strict=True))


def loaded(kind: str, folder: str, expected: list[float]) -> None:
    """Into adapters of other values and a base of other numbers."""
    model = lora(kind)
    with torch.no_grad():
        for parameter in model.parameters():
            if not hasattr(parameter, "__tensor_flatten__"):
                parameter.mul_(0.5)
    base = [p for p in model.parameters() if hasattr(p, "__tensor_flatten__")]
    names = {"int8": "qdata", "nf4": "quantized_data"}
    for weight in base:
        getattr(weight, names[kind]).zero_()
    hf.shard(model)
    assert differ(logits(model), expected) > 1e-3
    fullshard.load(f"{folder}/all", model)
    assert differ(logits(model), expected) < 1e-5
    again = hf.shard(lora(kind))
    fullshard.load_safetensors(again, f"{folder}/adapter", adapter=True)
    assert differ(logits(again), expected) < 1e-5


@pytest.mark.parametrize("kind", ["int8", "nf4"])
@on_ranks(by="run_clients")
def test_files_are_quantised_block_by_block(tmp_path, kind):
    """One block at a time is whole; what comes out is what quantising the whole model gives."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaForCausalLM

    plain = llama(tie_word_embeddings=kind == "nf4")
    if dist.get_rank() == 0:
        plain.save_pretrained(tmp_path, max_shard_size="4KB")
    dist.barrier()
    seen: list[int] = []

    def quantise_block(block: nn.Module) -> None:
        holder = nn.Module()
        holder.model = nn.Module()
        holder.model.layers = nn.ModuleList([block])
        quantise(holder, kind, frozen=True)
        seen.append(sum(p.numel() for p in block.parameters()))

    config = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = hf.from_pretrained(
        LlamaForCausalLM, tmp_path, prepare=lambda base: get_peft_model(base, config), quantise=quantise_block
    )
    assert len(seen) == 2
    quantise(plain, kind)
    torch.testing.assert_close(logits(model), logits(plain), rtol=1e-4, atol=1e-5)
    rows = [p for p in model.parameters() if isinstance(getattr(p, "_local_tensor", None), QuantisedRows)]
    assert len(rows) == 14
    model.train()
    before = train(model, dist.get_rank())
    assert before[-1] == before[-1]


def test_trainers_take_it_adopted_or_not(run_adopted, run_clients, tmp_path):
    """DDP cannot send such weights. The mixin's are told from the model's own by the test above."""
    expected = run_clients(by_trainer, "mixin", str(tmp_path))[0]
    assert expected[0] != expected[-1]
    for found in run_adopted(by_trainer, "v2", str(tmp_path)):
        torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-5)
    with pytest.raises(fullshard.ConfigError, match=r"base_layer.weight(.|\n)*by_rows"):
        run_adopted(by_trainer, "v1", str(tmp_path))


def by_trainer(way: str, folder: str) -> list[float]:
    from test_transformers import losses, trainer_of
    from transformers import Trainer

    class ShardedTrainer(hf.ShardedTrainerMixin, Trainer):
        """What users write."""

    model = lora("int8")
    if way == "mixin":
        trainer = trainer_of("ddp", folder, model, ShardedTrainer)
    else:
        by_rows(model)
        trainer = trainer_of(way, folder, model)
    trainer.train()
    return losses(trainer)


@on_ranks(by="run_clients")
def test_adapters_are_merged_into_another_base(tmp_path):
    """Into the quantised one: refused, with the way, which is taken."""
    from peft import PeftModel

    model = hf.shard(lora("nf4"))
    for merge in (model.merge_adapter, lambda: fullshard.save_safetensors(model, f"{tmp_path}/no", merge_lora=True)):
        with pytest.raises(fullshard.FullshardError, match=r"QuantisedRows(.|\n)*merge them on one process"):
            merge()
    hf.save_pretrained(model, tmp_path)
    dist.barrier()
    whole = PeftModel.from_pretrained(llama(intermediate_size=24), tmp_path).merge_and_unload()
    assert differ(logits(whole), logits(model)) < 0.2  # NF4's error


@on_ranks(by="run_clients")
def test_what_cannot_be_split_is_refused_by_name():
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 4))
    model[0].weight = nn.Parameter(Odd(torch.zeros(9999)), requires_grad=False)
    with pytest.raises(fullshard.ConfigError, match=r"0.weight(.|\n)*9999(.|\n)*ignored_params"):
        by_rows(model)
    whole = 1281  # of its bytes that no rank can do without, a sixteenth and a little more; over 4096 bytes
    rest = 4 * ((15 * whole + 3) // 4)
    for uncut, cut, fits in ((whole, rest - 4, False), (whole, rest, True), (1023, 4, True), (1025, 4, False)):
        model[0].weight = nn.Parameter(Odd(torch.zeros(uncut), torch.zeros(cut)), requires_grad=False)
        if fits:
            assert by_rows(model) == ["0.weight"] and set(model[0].weight.pieces) == {"more"}
        else:
            with pytest.raises(fullshard.ConfigError, match=f"numbers \\({uncut},\\): {4 * uncut} bytes"):
                by_rows(model)
    int8 = lora("int8")
    names = by_rows(int8)
    assert len(names) == 14 and all("layers" in name for name in names) and by_rows(int8) == []
    with pytest.raises(NotImplementedError, match="outside of its unit's forward"):
        int8(input_ids=Sentences(1).tokens)
    fullshard.fully_shard(int8, auto_wrap_policy="auto")
    assert int8(input_ids=Sentences(1).tokens).logits.isfinite().all().item()


class Odd(torch.Tensor):
    """A weight [4, 6] whose numbers cannot be cut into 4 pieces; of more beside them, some can."""

    @staticmethod
    def __new__(cls, numbers: torch.Tensor, more: torch.Tensor | None = None) -> Odd:
        return torch.Tensor._make_wrapper_subclass(cls, (4, 6), dtype=torch.float32)

    def __init__(self, numbers: torch.Tensor, more: torch.Tensor | None = None) -> None:
        self.numbers, self.more = numbers, more

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["numbers"] + ([] if self.more is None else ["more"]), None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is torch.ops.aten.detach.default else NotImplemented
