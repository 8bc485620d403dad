"""Errors of the integrations of Hugging Face's libraries, and of adopting; most in one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_hf_trainer import sharded_class, sharded_trainer
from tiny import llama
from torch import nn

import fullshard
from fullshard.integrations import hf
from fullshard.integrations.accelerate import FullshardAccelerator, take_over
from raising import Programs, assert_raised, outcome, raises, two_layers, warns


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of transformers in a folder."""
    llama().save_pretrained(tmp_path)
    return tmp_path


def configured(folder: Path, **changes: Any) -> Path:
    """The folder, with another configuration."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


def read(folder: Path | str, name: str = "LlamaForCausalLM", **options: Any) -> nn.Module:
    """The model of that class, read from the folder."""
    import transformers

    return hf.from_pretrained(getattr(transformers, name), folder, **options)


# Models of transformers that are read.


def test_a_class_that_is_not_of_transformers(folder):
    with raises("ConfigError: from_pretrained builds Transformers models"):
        hf.from_pretrained(nn.Linear, folder)


def test_a_model_that_was_quantised(folder):
    with raises("ConfigError: The folder holds a quantised model"):
        read(configured(folder, quantization_config={"quant_method": "torchao"}))


def test_adapters_that_start_from_the_weights(folder):
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(init_lora_weights="pissa", target_modules=["q_proj"])
    with raises("ConfigError: Adapters would be initialised from the"):
        read(folder, prepare=lambda base: get_peft_model(base, config))


def test_a_preparation_that_returns_nothing(folder):
    with raises("ConfigError: prepare must return the model to shard"):
        read(folder, prepare=lambda base: None)


def test_a_name_in_the_place_of_a_folder():
    with raises("ConfigError: from_pretrained reads a local folder"):
        read("meta-llama/Llama-3.2-1B")


def test_blocks_of_another_shape(folder):
    with raises("CheckpointError: a tensor has a different shape; nothing was loaded"):
        read(configured(folder, intermediate_size=32), quantise=lambda block: None)


def test_files_of_a_model_with_other_names(folder):
    with raises("CheckpointError: The safetensors files and the model have different names"):
        read(configured(folder, architectures=["GPT2Model"], model_type="gpt2"), "GPT2Model")


def test_files_of_more_than_a_base_model(folder):
    with warns("UserWarning: The files and the model have different names; matching tensors were loaded"):
        read(folder, "LlamaModel")


def test_files_that_lack_a_part(folder):
    with warns("UserWarning: The files and the model have different names; matching tensors were loaded"):
        read(folder, "LlamaForSequenceClassification", strict=False)


def test_a_part_that_nobody_initialises(folder, monkeypatch):
    import transformers

    monkeypatch.setattr(transformers.LlamaForSequenceClassification, "_init_weights", lambda *_: None)
    with raises("CheckpointError: A parameter is missing from the files, and the model does not initialise it"):
        read(folder, "LlamaForSequenceClassification", strict=False)


def test_a_part_that_is_added_without_values(folder):
    def prepare(base: nn.Module) -> nn.Module:
        base.more = nn.Linear(4, 4, device="meta")
        return base

    with raises("CheckpointError: A parameter is missing from the files and has no initial value"):
        read(folder, prepare=prepare, quantise=lambda block: None)


# How they are sharded and saved.


def test_an_adapter_that_is_no_parameter(tmp_path):
    from peft import PromptTuningConfig, get_peft_model

    model = get_peft_model(llama(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with raises("CheckpointError: An adapter has a tensor that is not a parameter of the model"):
        fullshard.save_safetensors(model, tmp_path / "out", adapter=True)


def test_a_precision_by_another_word():
    with raises("ConfigError: mixed_precision is invalid"):
        hf.shard(llama(), mixed_precision="bfloat16")


def test_two_precisions():
    with raises("ConfigError: mixed_precision and mp_policy both set the precision"):
        hf.shard(llama(), mixed_precision="bf16", mp_policy=fullshard.MixedPrecisionPolicy())


def test_units_of_a_class_that_there_is_not():
    with raises("ConfigError: units names a class that does not occur in the model"):
        hf.shard(llama(), units=["LlamaDecoder"])


def test_a_size_that_is_none(tmp_path, fake_world):
    fake_world(1)
    with raises("ConfigError: max_shard_size is invalid ... a number of bytes"):
        hf.save_pretrained(hf.shard(llama()), tmp_path / "out", max_shard_size="5 apples")


# The Trainer.


def test_a_mixin_after_the_trainer():
    import transformers

    with raises("ConfigError: Mine lists ShardedTrainerMixin after the Trainer"):
        type("Mine", (transformers.Trainer, hf.ShardedTrainerMixin), {})


def test_a_sharding_that_is_no_dictionary():
    with raises("ConfigError: sharding is invalid ... a dictionary"):
        sharded_class()(sharding=True)


PROGRAMS = Programs()
SECONDS = 240


@pytest.mark.parametrize("words", PROGRAMS)
def test_two_ranks(run_clients, tmp_path, words):
    assert_raised(words, run_clients(outcome, PROGRAMS[words], tmp_path, timeout=SECONDS))


@PROGRAMS.raise_("ConfigError: ShardedTrainerMixin shard in place of DDP ... got:       fsdp, distributed type")
def a_trainer_that_is_told_to_shard_twice(rank: int, folder: Path) -> None:
    sharded_trainer(str(folder), fsdp=True, fsdp_config={"version": 2})


@PROGRAMS.raise_("CheckpointError: A checkpoint of an unsharded Trainer stores optimizer state by parameter number")
def a_checkpoint_of_an_unsharded_trainer(rank: int, folder: Path) -> None:
    trainer = sharded_trainer(str(folder))
    trainer.create_optimizer()
    (folder / "optimizer.pt").touch()
    trainer._load_optimizer_and_scheduler(str(folder))


# Accelerate.


@PROGRAMS.raise_("ConfigError: take_over needs a plain Accelerator")
def taking_over_what_is_in_use(rank: int, folder: Path) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator()
    accelerator.prepare(two_layers())
    take_over(accelerator)


@PROGRAMS.raise_(
    "ConfigError: FullshardAccelerator and ShardedTrainerMixin shard in place of DDP ... got:       fsdp_plugin"
)
def another_plugin(rank: int, folder: Path) -> None:
    from accelerate import FullyShardedDataParallelPlugin

    FullshardAccelerator(fsdp_plugin=FullyShardedDataParallelPlugin())


@PROGRAMS.raise_("ConfigError: An optimizer stepped before the model was sharded")
def an_optimizer_that_has_stepped(rank: int, folder: Path) -> None:
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    FullshardAccelerator().prepare(model, optimizer)


# Programs that have adopted.

ADOPTED = Programs()


@pytest.mark.parametrize("words", ADOPTED)
def test_two_ranks_that_have_adopted(run_adopted, tmp_path, words):
    assert_raised(words, run_adopted(outcome, ADOPTED[words], tmp_path, timeout=SECONDS))


@ADOPTED.raise_("PrivateNameError: This program uses")
def a_private_name(rank: int, folder: Path) -> None:
    from torch.distributed.fsdp._runtime_utils import _post_forward

    assert _post_forward


@ADOPTED.raise_("PrivateNameError: FSDPMemTracker patches private methods of")
def a_tracker_of_private_methods(rank: int, folder: Path) -> None:
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

    FSDPMemTracker(two_layers())


def test_an_accelerator_that_does_not_see_the_other_ranks(monkeypatch):
    """As on CPU ranks without `cpu=True`: each would get all batches, and only the model would be sharded."""
    accelerator = FullshardAccelerator()
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    with raises("ConfigError: Accelerate does not see the other ranks"):
        accelerator.shard_model(nn.Linear(2, 2))
