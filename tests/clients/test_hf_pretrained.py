"""`fullshard.integrations.hf.from_pretrained`: files straight into shards, and what it holds meanwhile."""

from __future__ import annotations

import json
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiny import batch, close, llama

import fullshard
from fullshard.integrations import hf
from ways import on_ranks


def loss_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(**batch()).loss


def written(folder: str, **more: Any) -> Any:
    """A model that the first rank has saved, the same on all."""
    model = llama(**more)
    if dist.get_rank() == 0:
        model.save_pretrained(folder, max_shard_size="4KB")
    dist.barrier()
    return type(model).from_pretrained(folder)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "bf16": {"dtype": torch.bfloat16},
}


@pytest.mark.parametrize("case", CASES)
@on_ranks(by="run_clients")
def test_loads_what_was_saved(tmp_path, case):
    """An index and its files; rotary buffers, which are in no file; ties; the dtype that the configuration says."""
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    plain = written(tmp_path, **CASES[case])
    assert (Path(tmp_path) / "model.safetensors.index.json").exists()
    assert plain.config.architectures == ["LlamaForCausalLM"]
    for source in (LlamaForCausalLM, AutoModelForCausalLM, plain.config):
        model = hf.from_pretrained(source, tmp_path)
        assert isinstance(model, fullshard.FSDPModule) and isinstance(model.model.layers[1], fullshard.FSDPModule)
        assert not model.training and {p.dtype for p in model.parameters()} == {plain.dtype}
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == (case == "tied")
        torch.testing.assert_close(dict(model.named_buffers()), dict(plain.named_buffers()), rtol=0, atol=0)
        whole = {name: value.full_tensor() for name, value in model.state_dict().items()}
        torch.testing.assert_close(whole, dict(plain.state_dict()), rtol=0, atol=0)
        close(loss_of(model), loss_of(plain))


@pytest.mark.parametrize("how", [{}, {"quantise": lambda block: None}], ids=["plain", "by units"])
def test_ties_without_a_process_group(tmp_path, how):
    """The files hold a tied parameter under one of its names."""
    plain = llama(tie_word_embeddings=True)
    plain.save_pretrained(tmp_path)
    model = hf.from_pretrained(type(plain), tmp_path, **how)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("how", [{}, {"quantise": lambda block: None}], ids=["plain", "by units"])
def test_files_that_do_not_fit(tmp_path, how):
    """Values that no cast converts, and different values under the names of a tied weight."""
    from safetensors.torch import load_file, save_file

    plain, file = llama(tie_word_embeddings=True), tmp_path / "model.safetensors"
    plain.save_pretrained(tmp_path)
    values, name = load_file(file), "model.layers.0.self_attn.q_proj.weight"
    for changed, word in (
        ({name: values[name].to(torch.float8_e4m3fn)}, "a different dtype"),
        ({name: values[name].int()}, "a different dtype"),
        ({"lm_head.weight": torch.zeros_like(plain.lm_head.weight)}, "tied in the model"),
    ):
        save_file({**values, **changed}, file, {"format": "pt"})
        with pytest.raises(fullshard.CheckpointError, match=word):
            hf.from_pretrained(type(plain), tmp_path, **how)


@on_ranks(by="run_clients")
def test_other_dtypes_and_settings(tmp_path):
    from transformers import LlamaForCausalLM

    plain = written(tmp_path)
    model = hf.from_pretrained(LlamaForCausalLM, tmp_path, dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16 and model.model.rotary_emb.inv_freq.dtype == torch.float32
    torch.testing.assert_close(loss_of(model).float(), loss_of(plain), rtol=2e-2, atol=2e-2)
    model = hf.from_pretrained(LlamaForCausalLM, tmp_path, dtype=torch.bfloat16, mixed_precision="bf16", layout="flat")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    owned = fullshard.owner_of(model, model.model.layers[0])
    assert owned.buckets[0].compute_dtype == torch.bfloat16 and "flat" in owned.buckets[0].layout
    torch.testing.assert_close(loss_of(model).float(), loss_of(plain), rtol=2e-2, atol=2e-2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(**batch()).loss.backward()
    optimizer.step()


@on_ranks(by="run_clients")
def test_adapters_around_a_base_that_is_read(tmp_path):
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaForCausalLM

    plain = written(tmp_path)
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    torch.manual_seed(dist.get_rank())  # the first rank's adapters are all ranks'
    model = hf.from_pretrained(LlamaForCausalLM, tmp_path, prepare=lambda base: get_peft_model(base, config))
    close(loss_of(model), loss_of(plain))  # the second factor is zero
    first = [value.full_tensor() for name, value in model.named_parameters() if "lora_A" in name]
    assert len(first) == 2 and all(0 < value.abs().max() < 1 for value in first)
    assert not torch.equal(first[0], first[1])
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {
        name for name, _ in model.named_parameters() if "lora_" in name or "modules_to_save" in name
    }
    bound = 1 / 16**0.5  # of its uniform distribution, over 16 columns
    assert all(value.abs().max() <= bound and value.std() > bound / 4 for value in first)
    with pytest.raises(fullshard.ConfigError, match="pissa"):
        settings = LoraConfig(init_lora_weights="pissa", target_modules=["q_proj"])
        hf.from_pretrained(LlamaForCausalLM, tmp_path, prepare=lambda base: get_peft_model(base, settings))
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    before = loss_of(model)
    for _ in range(3):
        model(**batch()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss_of(model) < before


@on_ranks(by="run_clients")
def test_names_that_differ(tmp_path):
    """Refused by name; or what is missing starts as the model starts it, alike on all ranks."""
    from transformers import GPT2Config, LlamaForCausalLM, LlamaForSequenceClassification

    plain = written(tmp_path)
    with pytest.raises(fullshard.CheckpointError, match=r"score.weight(.|\n)*lm_head.weight"):
        hf.from_pretrained(LlamaForSequenceClassification, tmp_path)
    torch.manual_seed(dist.get_rank())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model = hf.from_pretrained(LlamaForSequenceClassification, tmp_path, strict=False)
    assert any("score.weight" in str(one.message) and "lm_head.weight" in str(one.message) for one in told)
    score = model.score.weight.full_tensor()
    assert 0 < score.abs().max() < 1
    everyone = [torch.empty_like(score) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, score)
    assert torch.equal(*everyone)
    torch.testing.assert_close(model.model.norm.weight.full_tensor(), plain.model.norm.weight.detach())
    config = json.loads((Path(tmp_path) / "config.json").read_text())
    for change, error, word in (
        ({"hidden_size": 32}, fullshard.CheckpointError, "shape"),
        ({"num_hidden_layers": 1}, fullshard.CheckpointError, "layers.1"),
        ({"quantization_config": {"quant_method": "torchao"}}, fullshard.ConfigError, "quantised"),
    ):
        dist.barrier()
        if dist.get_rank() == 0:
            (Path(tmp_path) / "config.json").write_text(json.dumps({**config, **change}))
        dist.barrier()
        with pytest.raises(error, match=word):
            hf.from_pretrained(LlamaForCausalLM, tmp_path)
    for source, where, more in ((torch.nn.Linear, tmp_path, {}), (LlamaForCausalLM, "no/such", {}), (3, tmp_path, {})):
        with pytest.raises(fullshard.ConfigError):
            hf.from_pretrained(source, where, **more)
    for dtype in ("bfloat61", torch.int8):
        with pytest.raises(fullshard.ConfigError, match="dtype"):
            hf.from_pretrained(LlamaForCausalLM, tmp_path, dtype=dtype)
    dist.barrier()
    if dist.get_rank() == 0:
        (Path(tmp_path) / "config.json").write_text(json.dumps(config))
    dist.barrier()
    other = GPT2Config(architectures=["GPT2Model"], n_layer=1, n_embd=8, n_head=1)
    for strict in (True, False):
        with pytest.raises(fullshard.CheckpointError, match="have different names; nothing was loaded"):
            hf.from_pretrained(other, tmp_path, strict=strict)
    model = hf.from_pretrained(LlamaForCausalLM, tmp_path, dtype="bfloat16")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("tied", [False, True])
def test_a_base_of_a_larger_model_and_the_reverse(run_clients, tmp_path, tied):
    assert all(run_clients(bases, tied, str(tmp_path)))


def bases(tied: bool, folder: str) -> bool:
    """`AutoModel` of a causal model's folder, and back: names lose and gain "model.", as with transformers' own."""
    from transformers import AutoModel, LlamaForCausalLM

    plain = written(f"{folder}/causal", tie_word_embeddings=tied)
    blocks: list[str] = []
    for more in ({}, {"quantise": lambda block: blocks.append(type(block).__name__)}):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            model = hf.from_pretrained(AutoModel, f"{folder}/causal", **more)
        said = [str(one.message) for one in told if "have different names" in str(one.message)]
        assert len(said) == (0 if tied else 1) and all(
            "lm_head.weight" in one and "matching tensors were loaded" in one for one in said
        ), said
        whole = {name: value.full_tensor() for name, value in model.state_dict().items()}
        torch.testing.assert_close(whole, dict(plain.model.state_dict()), rtol=0, atol=0)
        tokens = batch()["input_ids"]
        with torch.no_grad():
            close(model(tokens).last_hidden_state, plain.model(tokens).last_hidden_state)
    assert blocks == ["LlamaDecoderLayer"] * 2
    hf.save_pretrained(model, f"{folder}/base")
    dist.barrier()
    again = LlamaForCausalLM.from_pretrained(f"{folder}/base")  # transformers adds "model.", and says what is missing
    torch.testing.assert_close(dict(again.model.state_dict()), dict(plain.model.state_dict()), rtol=0, atol=0)
    if tied:
        close(loss_of(hf.from_pretrained(LlamaForCausalLM, f"{folder}/base")), loss_of(plain))
        return True
    with pytest.raises(fullshard.CheckpointError, match=r"lm_head.weight, which the files lack"):
        hf.from_pretrained(LlamaForCausalLM, f"{folder}/base")
    with pytest.warns(UserWarning, match="lm_head.weight"):
        model = hf.from_pretrained(LlamaForCausalLM, f"{folder}/base", strict=False)
    norm = model.model.layers[1].input_layernorm.weight.full_tensor()
    torch.testing.assert_close(norm, plain.model.layers[1].input_layernorm.weight.detach(), rtol=0, atol=0)
    return model.lm_head.weight.full_tensor().std().item() > 0


MIB = 2**20


def test_host_memory_is_that_of_the_shards(run_clients, tmp_path):
    """256 MiB in files: neither loading nor building takes the half of it that a rank does not own."""
    found = run_clients(memory, str(tmp_path))
    for peak, whole in found:
        assert 0.4 * whole < peak < 0.75 * whole, f"{peak / MIB:.0f} of {whole / MIB:.0f} MiB"


def memory(folder: str) -> tuple[int, int]:
    """The most anonymous memory that this rank took, and the bytes in the files."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4, "vocab_size": 1024}
    config = LlamaConfig(**sizes, num_attention_heads=8, tie_word_embeddings=False)
    if dist.get_rank() == 0:
        with torch.device("meta"):
            shapes = {name: value.shape for name, value in LlamaForCausalLM(config).state_dict().items()}
        from safetensors.torch import save_file

        save_file({name: torch.ones(shape) for name, shape in shapes.items()}, f"{folder}/model.safetensors")
        config.architectures = ["LlamaForCausalLM"]
        config.save_pretrained(folder)
    dist.barrier()
    before, peak, stop = anonymous(), [0], threading.Event()

    def sample() -> None:
        while not stop.wait(0.002):
            peak[0] = max(peak[0], anonymous())

    watch = threading.Thread(target=sample)
    watch.start()
    model = hf.from_pretrained(LlamaForCausalLM, folder)
    stop.set()
    watch.join()
    assert model.model.layers[0].self_attn.q_proj.weight.to_local().eq(1).all()
    return peak[0] - before, (Path(folder) / "model.safetensors").stat().st_size


def anonymous() -> int:
    """Bytes of memory that is no file's."""
    fields = Path("/proc/self/status").read_text().split("RssAnon:")[1].split()
    return int(fields[0]) * 1024
