"""Against `transformers` and `peft` themselves: what we write they load, what they write we load, outputs are equal."""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

import fullshard
from fullshard import CheckpointError, ConfigError
from ways import error_of, named_error, on_ranks, shard

some_ways = pytest.mark.parametrize("way", ["rows", "originals"])  # one FlatParameter cannot be partly frozen
pytestmark = pytest.mark.xdist_group("transformers")  # which takes seconds to import, on every rank
IMPORTS = 180  # seconds, for a task that imports both libraries first


def llama(seed: int = 0, tied: bool = False) -> Any:
    """A tiny one with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(vocab_size=31, max_position_embeddings=32, tie_word_embeddings=tied, **sizes, **heads)
    return LlamaForCausalLM(config).eval()


def adapted(seed: int = 0, base: Any = None, **settings: Any) -> Any:
    """With LoRA on linear layers and the embedding, and a head of its own; all of it random."""
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "down_proj", "embed_tokens"]
    config = LoraConfig(r=3, target_modules=targets, modules_to_save=["lm_head"], **{"lora_alpha": 5} | settings)
    model = get_peft_model(llama(seed) if base is None else base, config)
    torch.manual_seed(seed + 100)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.normal_(std=0.3)
    return model.eval()


def layers(model: Any) -> list[nn.Module]:
    """The decoder's, which become units."""
    return list(next(m for m in model.modules() if hasattr(m, "embed_tokens")).layers)


def logits(model: Any) -> Tensor:
    tokens = torch.arange(12).view(2, 6) * 5 % 31
    with torch.no_grad():
        return model(input_ids=tokens).logits.clone()


def close(got: Tensor, want: Tensor, tolerance: float = 0.0) -> None:
    torch.testing.assert_close(got, want, rtol=0.0, atol=tolerance)


# transformers


@some_ways
@on_ranks(timeout=IMPORTS)
def test_transformers_loads_what_we_save_and_we_what_it_saves(tmp_path, way):
    warnings.simplefilter("ignore")
    from transformers import LlamaForCausalLM

    want = logits(llama(tied=True))
    model = shard(llama(tied=True), way, layers)
    for saved, settings in (("one", {}), ("many", {"max_file_bytes": 5000}), ("half", {"dtype": torch.bfloat16})):
        fullshard.save_safetensors(model, tmp_path / saved, **settings)
        loaded = LlamaForCausalLM.from_pretrained(tmp_path / saved).eval()
        assert loaded.dtype == settings.get("dtype", torch.float32)
        assert loaded.config.architectures == ["LlamaForCausalLM"]
        close(logits(loaded.float()), want, 0.02 if saved == "half" else 0.0)
    assert len(list((tmp_path / "many").glob("model-*.safetensors"))) >= 3

    other = shard(llama(seed=1, tied=True), way, layers)
    theirs = tmp_path / "theirs"
    llama(tied=True).save_pretrained(theirs, max_shard_size="5KB")  # on the first rank
    dist.barrier()
    fullshard.load_safetensors(other, theirs)
    close(logits(other), want)


# PEFT


@some_ways
@on_ranks(timeout=IMPORTS)
def test_peft_loads_what_we_save_and_we_what_it_saves(tmp_path, way):
    warnings.simplefilter("ignore")
    from peft import PeftModel

    reference = adapted()
    want = logits(reference)
    model = shard(adapted(), way, layers)
    close(logits(model), want, 1e-6)
    fullshard.save_safetensors(model, tmp_path / "adapter", adapter=True)
    theirs = tmp_path / f"theirs{dist.get_rank()}"
    reference.save_pretrained(theirs)
    mine, other = (load_file(path / "adapter_model.safetensors") for path in (tmp_path / "adapter", theirs))
    assert mine.keys() == other.keys() and all(torch.equal(mine[key], other[key]) for key in other)
    ours, told = (json.loads((path / "adapter_config.json").read_text()) for path in (tmp_path / "adapter", theirs))
    for one in (ours, told):
        one["target_modules"].sort()
    assert ours == told
    close(logits(PeftModel.from_pretrained(llama(), tmp_path / "adapter").eval()), want)

    # A base model from its files, then the adapter, each straight into shards; the adapter is not touched by the base.
    llama().save_pretrained(tmp_path / "base")  # on the first rank
    dist.barrier()
    second = shard(adapted(seed=1), way, layers)
    fullshard.load_safetensors(second, theirs, adapter="default")
    trained = {n: t for n, t in fullshard.full_parameters(second) if "lora_" in n}
    fullshard.load_safetensors(second, tmp_path / "base", base=True)
    assert all(torch.equal(t, trained[n]) for n, t in fullshard.full_parameters(second) if "lora_" in n)
    fullshard.load_safetensors(second, theirs, adapter=True)  # its head, which the base's files hold too
    close(logits(second), want, 1e-6)

    odd = shard(adapted(lora_alpha=6), way, layers)
    error = error_of(lambda: fullshard.load_safetensors(odd, theirs, adapter=True))
    problems = named_error(error, "lora_alpha", "6", "5", kinds=CheckpointError, where="another scaling")
    error = error_of(lambda: fullshard.save_safetensors(model, tmp_path / "x", adapter="nobody"))
    problems += named_error(error, "nobody", kinds=ConfigError, where="no such adapter")
    error = error_of(lambda: fullshard.save_safetensors(shard(llama(), way, layers), tmp_path / "x", adapter=True))
    problems += named_error(error, "no PEFT adapter", kinds=ConfigError, where="no adapter at all")
    return problems


# Merging


@some_ways
@on_ranks(timeout=IMPORTS)
def test_merging_is_pefts(tmp_path, way):
    """Names and values as PEFT's own merge leaves them; the sharded model is as it was."""
    warnings.simplefilter("ignore")
    from transformers import LlamaForCausalLM

    model = shard(adapted(use_rslora=True), way, layers)
    before = logits(model)
    reference = adapted(use_rslora=True).merge_and_unload()
    want = dict(reference.named_parameters())
    for bucket_bytes in (1, 1 << 30):
        got = dict(fullshard.full_parameters(model, merge_lora=True, bucket_bytes=bucket_bytes))
        assert list(got) == list(want)
        for name, tensor in got.items():
            close(tensor, want[name], 1e-6)
    fullshard.save_safetensors(model, tmp_path / "merged", merge_lora=True, dtype=torch.float64)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "merged").eval().float()
    close(logits(loaded), logits(reference.float()), 1e-5)
    close(logits(model), before)

    already = adapted(use_rslora=True)
    already.merge_adapter()
    for name, tensor in fullshard.full_parameters(shard(already, way, layers), merge_lora=True):
        close(tensor, want[name].float(), 1e-6)

    both = adapted(base=llama())
    both.add_adapter("second", both.peft_config["default"])
    both.set_adapter("second")
    half = shard(both, way, layers)
    got = dict(fullshard.full_parameters(half, merge_lora=True))
    close(got["model.norm.weight"], llama().model.norm.weight)
    close(got["model.layers.0.self_attn.q_proj.weight"],
           llama().model.layers[0].self_attn.q_proj.weight)  # fmt: skip

    error = error_of(
        lambda: list(fullshard.full_parameters(shard(adapted(use_dora=True), way, layers), merge_lora=True))
    )
    return named_error(error, "use_dora", kinds=ConfigError, where="DoRA")


class Kinds(nn.Module):
    """Layers of every kind that LoRA adapts."""

    def __init__(self) -> None:
        from transformers.pytorch_utils import Conv1D

        super().__init__()
        torch.manual_seed(0)
        self.table, self.line = nn.Embedding(7, 6), nn.Linear(6, 5)
        self.turned, self.image = Conv1D(4, 5), nn.Conv2d(2, 3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.image(self.turned(self.line(self.table(x))).view(-1, 2, 2, 5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_ranks(timeout=IMPORTS)
def test_every_kind_of_layer_is_merged(dtype):
    """Weights in `dtype`, adapters in float32."""
    warnings.simplefilter("ignore")
    from peft import LoraConfig, get_peft_model

    def make() -> Any:
        targets = ["table", "line", "turned", "image"]
        model = get_peft_model(Kinds().to(dtype), LoraConfig(r=2, target_modules=targets, lora_bias=False))
        torch.manual_seed(1)
        with torch.no_grad():
            for p in model.parameters():
                if p.requires_grad:
                    p.normal_()
        return model

    model = make()
    fullshard.fully_shard(model)
    want = dict(make().merge_and_unload().named_parameters())
    got = dict(fullshard.full_parameters(model, merge_lora=True))
    assert list(got) == list(want)
    for name, tensor in got.items():
        assert tensor.dtype == dtype, name
        close(tensor.float(), want[name].float(), 1e-6 if dtype == torch.float32 else 0.2)
