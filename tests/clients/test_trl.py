"""TRL's `SFTTrainer`, with FSDP on adopted ranks or behind `ShardedTrainerMixin`: the numbers of DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_transformers import STEPS, WAYS, is_ours, losses
from tiny import VOCABULARY, Sentences, close, llama

import fullshard
from fullshard.integrations import hf
from ways import on_ranks

pytest.importorskip("trl", reason="needs the extra trl: pip install -e '.[trl]'")


def tokenizer() -> Any:
    """A word a token."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{index}": index for index in range(VOCABULARY)}
    made = Tokenizer(models.WordLevel(words, unk_token="w3"))
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="w0", eos_token="w2", bos_token="w1")


def sft(way: str, folder: str, cls: Any = None) -> Any:
    import datasets
    from accelerate.state import AcceleratorState
    from trl import SFTConfig, SFTTrainer

    AcceleratorState._reset_state(reset_partial_state=True)
    arguments = SFTConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        max_steps=STEPS,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        gradient_checkpointing=False,
        **WAYS[way],
    )
    data = datasets.Dataset.from_dict({"input_ids": Sentences(32).tokens.tolist()})
    return (cls or SFTTrainer)(model=llama(), args=arguments, train_dataset=data, processing_class=tokenizer())


@pytest.mark.parametrize("way", ["v1", "v2"])
@on_ranks(by="run_adopted")
def test_fine_tunes_as_ddp(tmp_path, way):
    plain = sft("ddp", tmp_path)
    plain.train()
    sharded = sft(way, tmp_path)
    sharded.train()
    assert is_ours(sharded)
    close(losses(sharded), losses(plain))
    expected = plain.accelerator.unwrap_model(plain.model_wrapped).state_dict()
    found = exported(sharded.model)
    assert found.keys() == expected.keys()
    torch.testing.assert_close(found, dict(expected), rtol=1e-3, atol=1e-4)


def exported(model: Any) -> dict[str, torch.Tensor]:
    """Whole weights, as TRL takes them to an engine that generates: summoned one instance at a time, or gathered."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    if not isinstance(model, FullyShardedDataParallel):
        return {name: value.full_tensor() for name, value in model.state_dict().items()}
    found: dict[str, torch.Tensor] = {}
    for path, module in reversed(list(model.named_modules())):
        if isinstance(module, FullyShardedDataParallel):
            with FullyShardedDataParallel.summon_full_params(module, recurse=False, writeback=False):
                for name, value in module.named_parameters():
                    clean = f"{path}.{name}".replace("_fsdp_wrapped_module.", "").removeprefix(".")
                    if clean not in found:
                        found[clean] = value.detach().clone()
    assert isinstance(model, fullshard.FullyShardedDataParallel) and dist.is_initialized()
    return found


@on_ranks(by="run_clients")
def test_fine_tunes_behind_the_mixin_as_ddp(tmp_path):
    """Without adopting."""
    from trl import SFTTrainer

    class ShardedSFTTrainer(hf.ShardedTrainerMixin, SFTTrainer):
        """What users write."""

    plain: Any = sft("ddp", tmp_path)
    plain.train()
    sharded = sft("ddp", tmp_path, ShardedSFTTrainer)
    sharded.train()
    assert isinstance(sharded.model, fullshard.FSDPModule) and sharded.model_wrapped is sharded.model
    close(losses(sharded), losses(plain))
    expected = dict(plain.accelerator.unwrap_model(plain.model_wrapped).state_dict())
    found = {name: value.full_tensor() for name, value in sharded.model.state_dict().items()}
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    streamed = dict(fullshard.full_parameters(sharded.model, dtype=torch.bfloat16))
    assert streamed.keys() == dict(llama().named_parameters()).keys()
    torch.testing.assert_close(streamed["lm_head.weight"], expected["lm_head.weight"].bfloat16(), rtol=1e-2, atol=1e-2)
