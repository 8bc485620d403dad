"""PEFT: LoRA on a Llama with a frozen bfloat16 base and float32 adapters, under Trainer and under Accelerate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_transformers import WAYS, losses, trainer_of
from tiny import batch, close, llama

from ways import on_ranks

BASES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TOLERANCES = {"float32": 2e-4, "bfloat16": 2e-2}


def lora(dtype: torch.dtype) -> Any:
    """Adapters of float32 on a base of `dtype`; not zero, so that all of them have gradients."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    torch.manual_seed(9)
    model = get_peft_model(llama(dtype=dtype), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def adapters(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name.replace(".default", ""): value.float() for name, value in state.items() if "lora_" in name}


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("way", ["v1", "v2"])
@on_ranks(by="run_adopted")
def test_trains_as_ddp(tmp_path, way, base):
    plain = trainer_of("ddp", tmp_path, lora(BASES[base]), ddp_find_unused_parameters=False)
    plain.train()
    state = "FULL_STATE_DICT"
    sharded = trainer_of(
        way, tmp_path, lora(BASES[base]), fsdp_config={**WAYS[way]["fsdp_config"], "state_dict_type": state}
    )
    sharded.train()
    torch.testing.assert_close(losses(sharded), losses(plain), rtol=TOLERANCES[base], atol=1e-4)
    trains = [p for p in sharded.model.parameters() if p.requires_grad]
    assert all(p.dtype is torch.float32 for p in trains)
    whole = sharded.accelerator.get_state_dict(sharded.model)
    if dist.get_rank() == 0:
        expected = adapters(plain.accelerator.unwrap_model(plain.model_wrapped).state_dict())
        found = adapters(whole)
        assert found.keys() == expected.keys() and len(found) == 8
        torch.testing.assert_close(found, expected, rtol=TOLERANCES[base], atol=2e-3)
    sharded.save_model(f"{tmp_path}/adapters")
    dist.barrier()
    if dist.get_rank() == 0:
        from safetensors.torch import load_file

        saved = load_file(Path(tmp_path) / "adapters" / "adapter_model.safetensors")
        torch.testing.assert_close({name: value.float() for name, value in saved.items()}, adapters(whole))


@pytest.mark.parametrize("way", ["v1", "v2"])
@on_ranks(by="run_adopted")
def test_adapters_are_loaded_into_a_sharded_base(tmp_path, way):
    """Saved by the model's own `save_pretrained` on every rank; read by PEFT, before sharding."""
    from peft import PeftModel

    sharded = trainer_of(way, tmp_path, lora(torch.float32))
    sharded.train()
    with torch.no_grad():
        expected = sharded.model(**batch()).loss
    sharded.accelerator.unwrap_model(sharded.model_wrapped).save_pretrained(f"{tmp_path}/adapters")
    dist.barrier()
    plain = PeftModel.from_pretrained(llama(), f"{tmp_path}/adapters")
    with torch.no_grad():
        close(plain(**batch()).loss, expected)
    model = PeftModel.from_pretrained(llama(), f"{tmp_path}/adapters", is_trainable=True)
    again = trainer_of(way, tmp_path, model, learning_rate=0.0)
    again.train()
    with torch.no_grad():
        close(again.model(**batch()).loss, expected)


@pytest.mark.parametrize("state", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
@pytest.mark.parametrize("way", ["v1", "v2"])
@on_ranks(by="run_adopted")
def test_resumes_adapters_and_copies_of_modules(tmp_path, way, state):
    """In blocks that are wrapped one by one, too: the second run starts from other adapters, and ends as the first."""
    from peft import get_peft_model

    config = {**WAYS[way]["fsdp_config"], "state_dict_type": state}
    found = []
    for start in (None, f"{tmp_path}/checkpoint-2"):
        torch.manual_seed(9 if start is None else 10)
        model = get_peft_model(llama(), adapter_of("modules_to_save"))
        trainer = trainer_of(way, tmp_path, model, fsdp_config=config, save_strategy="steps", save_steps=2)
        trainer.train(resume_from_checkpoint=start)
        found.append(losses(trainer))
    close(found[1], found[0])


def adapter_of(kind: str) -> Any:
    import peft

    common = {"task_type": "CAUSAL_LM"}
    if kind == "modules_to_save":
        return peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head", "embed_tokens"], **common)
    if kind == "prompt":
        return peft.PromptTuningConfig(num_virtual_tokens=4, **common)
    if kind == "prefix":
        return peft.PrefixTuningConfig(num_virtual_tokens=4, prefix_projection=True, encoder_hidden_size=16, **common)
    lstm = {"encoder_reparameterization_type": "LSTM"} if kind == "p-tuning, LSTM" else {}
    return peft.PromptEncoderConfig(num_virtual_tokens=4, encoder_hidden_size=16, **lstm, **common)


ADAPTERS = ("modules_to_save", "prompt", "prefix", "p-tuning", "p-tuning, LSTM")


def test_save_pretrained_on_every_rank_writes_what_one_process_does(run_adopted, tmp_path):
    """Copies of modules, in instances of their own too, and prompt encoders: the file of one process."""
    for way in ("v1", "PEFT's policy", "v2"):
        run_adopted(saved_on_every_rank, way, str(tmp_path))


def saved_on_every_rank(way: str, folder: str) -> None:
    from peft import PeftModel, get_peft_model
    from peft.utils.other import fsdp_auto_wrap_policy
    from safetensors.torch import load_file
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    for kind in ADAPTERS:
        models = []
        for _ in range(2):
            torch.manual_seed(9)
            models.append(get_peft_model(llama(), adapter_of(kind)))
        plain, model = models
        if way == "v2":
            for layer in [m for m in model.modules() if isinstance(m, LlamaDecoderLayer)]:
                fully_shard(layer)
            sharded = fully_shard(model)
        else:
            policy = ModuleWrapPolicy({LlamaDecoderLayer}) if way == "v1" else fsdp_auto_wrap_policy(model)
            cpu = torch.device("cpu")
            sharded = FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=True, device_id=cpu)
        for one in (plain, sharded):
            one(**batch()).loss.backward()
            torch.optim.SGD([p for p in one.parameters() if p.requires_grad], lr=0.1).step()
        where = f"{folder}/{way}/{kind}"
        model.save_pretrained(where)
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(model, options=options) if way == "v2" else None  # empty but on rank 0
        if state is not None:
            model.save_pretrained(f"{where}/given", state_dict=state, is_main_process=dist.get_rank() == 0)
        dist.barrier()
        if dist.get_rank() == 0:
            plain.save_pretrained(f"{where}/plain")
            expected = load_file(f"{where}/plain/adapter_model.safetensors")
            for found in [where, *([f"{where}/given"] if state is not None else [])]:
                torch.testing.assert_close(load_file(f"{found}/adapter_model.safetensors"), expected)
            again = PeftModel.from_pretrained(llama(), where)
            with torch.no_grad():
                close(again.eval()(**batch()).loss, plain.eval()(**batch()).loss)
        dist.barrier()
        sharded(**batch()).loss.backward()  # and nothing has changed
