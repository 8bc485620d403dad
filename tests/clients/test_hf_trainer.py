"""`fullshard.integrations.hf.ShardedTrainerMixin`, without adopting: the numbers of the same program under DDP."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from test_transformers import STEPS, losses, norms, trainer_of
from tiny import LENGTH, Sentences, batch, close, llama

import fullshard
from fullshard.integrations import hf
from fullshard.integrations.hf.saving import converted
from ways import on_ranks


def sharded_class(base: Any = None) -> Any:
    import transformers

    class ShardedTrainer(hf.ShardedTrainerMixin, base or transformers.Trainer):
        """What users write."""

    return ShardedTrainer


def sharded_trainer(folder: str, model: Any = None, base: Any = None, **more: Any) -> Any:
    return trainer_of("ddp", folder, model, sharded_class(base), **more)


def is_ours(trainer: Any) -> bool:
    model = trainer.model
    layers = model.get_base_model().model.layers if hasattr(model, "get_base_model") else model.model.layers
    return trainer.model_wrapped is model and all(isinstance(m, fullshard.FSDPModule) for m in (model, *layers))


# Training.

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "checkpointing": {"gradient_checkpointing": True},
    "tied": {"tie_word_embeddings": True},
    "no clipping": {"max_grad_norm": 0.0},
}


@pytest.mark.parametrize("variant", VARIANTS)
@on_ranks(by="run_clients")
def test_trains_and_evaluates_as_ddp(tmp_path, variant):
    more = dict(VARIANTS[variant])
    ties = {"tie_word_embeddings": more.pop("tie_word_embeddings", False)}
    plain = trainer_of("ddp", tmp_path, llama(**ties), **more)
    plain.train()
    sharded = sharded_trainer(tmp_path, llama(**ties), **more)
    sharded.train()
    assert is_ours(sharded) and type(plain.model_wrapped).__name__ == "DistributedDataParallel"
    close(losses(sharded), losses(plain))
    close(norms(sharded), norms(plain))
    close(sharded.evaluate()["eval_loss"], plain.evaluate()["eval_loss"])
    if ties["tie_word_embeddings"]:
        assert sharded.model.lm_head.weight is sharded.model.model.embed_tokens.weight


@on_ranks(by="run_clients")
def test_bf16_computes_in_16_bits_and_holds_32(tmp_path):
    """Also a model that was loaded in bfloat16: what trains is held in float32."""
    plain = trainer_of("ddp", tmp_path, bf16=True)
    plain.train()
    for dtype in (torch.float32, torch.bfloat16):
        sharded = sharded_trainer(tmp_path, llama(dtype=dtype), bf16=True)
        sharded.train()
        assert {p.dtype for p in sharded.model.parameters()} == {torch.float32}
        assert (
            fullshard.owner_of(sharded.model, sharded.model.model.layers[0]).buckets[0].compute_dtype == torch.bfloat16
        )
        torch.testing.assert_close(losses(sharded), losses(plain), rtol=2e-2, atol=2e-2)


@on_ranks(by="run_clients")
def test_optimizer_that_was_given_is_pointed_at_the_shards(tmp_path):
    found = []
    for cls in (None, sharded_class()):
        model = llama()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        from accelerate.state import AcceleratorState
        from transformers import Trainer, TrainingArguments

        AcceleratorState._reset_state(reset_partial_state=True)
        arguments = TrainingArguments(
            tmp_path, max_steps=2, use_cpu=True, report_to=[], logging_steps=1, disable_tqdm=True
        )
        trainer = (cls or Trainer)(model, arguments, train_dataset=Sentences(32), optimizers=(optimizer, None))
        trainer.train()
        found.append(losses(trainer))
    close(found[1], found[0])
    assert is_ours(trainer)


# Evaluation.


def test_evaluates_before_training_and_generates(run_clients, tmp_path):
    found = run_clients(evaluated_first, str(tmp_path))
    assert found[0] == found[1]


def evaluated_first(folder: str) -> list[float]:
    """What `generate` gives on ranks whose texts end at other lengths is what the unsharded model gives."""
    from transformers import Seq2SeqTrainer

    plain = trainer_of("ddp", folder)
    sharded = sharded_trainer(folder, base=Seq2SeqTrainer, predict_with_generate=True, max_steps=1)
    metrics = sharded.evaluate(max_new_tokens=5, do_sample=False)
    assert is_ours(sharded)
    close(metrics["eval_loss"], plain.evaluate()["eval_loss"])
    prompts = Sentences(12).tokens[:, : LENGTH // 2]
    settings = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": int(prompts[0, 0])}
    mine = prompts[dist.get_rank() :: 2]
    ours, theirs = sharded.model.generate(mine, **settings), llama().generate(mine, **settings)
    length = min(ours.shape[1], theirs.shape[1])
    torch.testing.assert_close(ours[:, :length], theirs[:, :length])
    sharded.train()
    return [round(sharded.evaluate(max_new_tokens=5, do_sample=False)["eval_loss"], 4)]


# Checkpoints.


def test_resumes_on_other_numbers_of_ranks(run_clients, tmp_path):
    for ranks, worlds in ((2, (2, 1)), (1, (2,))):
        folder = tmp_path / str(ranks)
        together = run_clients(checkpointed, str(folder), world=ranks)[0]
        for world in worlds:
            run_clients(resumed, str(folder), together, world=world)
    names = {path.name for path in (tmp_path / "2" / f"checkpoint-{STEPS // 2}").iterdir()}
    assert {"fullshard", "config.json", "trainer_state.json", "scheduler.pt", "training_args.bin"} <= names
    assert not any(name.endswith((".safetensors", ".bin")) and name != "training_args.bin" for name in names)


def checkpointed(folder: str) -> list[float]:
    batch = 4 // dist.get_world_size()
    trainer = sharded_trainer(folder, save_strategy="steps", save_steps=STEPS // 2, per_device_train_batch_size=batch)
    trainer.train()
    return losses(trainer)


def resumed(folder: str, expected: list[float]) -> None:
    torch.manual_seed(dist.get_rank())
    model = llama()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()  # all of it comes from the checkpoint
    trainer = sharded_trainer(folder, model, per_device_train_batch_size=4 // dist.get_world_size())
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{STEPS // 2}")
    assert is_ours(trainer) and trainer.state.global_step == STEPS
    close(losses(trainer), expected)


@on_ranks(by="run_clients")
def test_best_model_is_loaded_at_the_end(tmp_path):
    """A learning rate that spoils the model after the first step: the best is not the last."""
    for name, more in {"sharded": {}, "whole": {"save_only_model": True}}.items():
        settings = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
        trainer = sharded_trainer(
            f"{tmp_path}/{name}",
            learning_rate=2.0,
            load_best_model_at_end=True,
            lr_scheduler_type="constant",
            max_steps=3,
            **settings,
            **more,
        )
        trainer.train()
        evaluated = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
        assert min(evaluated) != evaluated[-1], evaluated
        close(trainer.evaluate()["eval_loss"], min(evaluated))
        checkpoint = Path(trainer.state.best_model_checkpoint)
        assert (checkpoint / "fullshard").is_dir() != (checkpoint / "model.safetensors").exists()


@pytest.mark.parametrize("tied", [False, True])
@on_ranks(by="run_clients")
def test_saved_model_is_what_from_pretrained_loads(tmp_path, tied):
    """By the trainer, into a folder in use; by `hf.save_pretrained`; and by the model's own method."""
    from transformers import LlamaForCausalLM

    trainer = sharded_trainer(tmp_path, llama(tie_word_embeddings=tied))
    trainer.train()
    with torch.no_grad():
        expected = trainer.model(**batch()).loss
    for _ in range(2):
        trainer.save_model()
    hf.save_pretrained(trainer.model, f"{tmp_path}/ours", max_shard_size="4KB")
    trainer.model.save_pretrained(f"{tmp_path}/own", max_shard_size="4KB")
    dist.barrier()
    assert all(len(list((tmp_path / one).glob("*.safetensors"))) > 2 for one in ("ours", "own"))
    for one in ("", "ours", "own"):
        found = LlamaForCausalLM.from_pretrained(f"{tmp_path}/{one}")
        with torch.no_grad():
            close(found(**batch()).loss, expected)
        assert found.config.architectures == ["LlamaForCausalLM"]
    assert not list(Path(tmp_path).glob(".fullshard*"))


@on_ranks(by="run_clients")
def test_no_rank_returns_before_all_files_are_there(tmp_path):
    trainer = sharded_trainer(tmp_path, max_steps=1)
    trainer.train()
    write = torch.save
    with mock.patch("torch.save", lambda *args: (time.sleep(1), write(*args))):
        trainer.save_model(f"{tmp_path}/out")
    assert (Path(tmp_path) / "out" / "training_args.bin").exists()


@on_ranks(by="run_clients")
def test_a_full_disk_leaves_the_old_files(tmp_path):
    trainer = sharded_trainer(tmp_path)
    trainer.train()
    trainer.save_model(str(tmp_path), _internal_call=True)
    arguments = tmp_path / "training_args.bin"
    before = arguments.read_bytes()
    trainer.args.seed += 1
    full = mock.patch("os.fsync", side_effect=OSError(28, "No space left on device"))
    with full, pytest.raises(fullshard.CheckpointError, match="save_model failed on rank 0"):
        trainer.save_model(str(tmp_path), _internal_call=True)
    assert arguments.read_bytes() == before


@on_ranks(by="run_clients")
def test_models_whose_files_have_other_names(tmp_path):
    """Transformers stacks experts while it loads: files are as its own, and loading them into shards is refused."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {
        "hidden_size": 16,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 40,
    }
    config = MixtralConfig(**sizes, num_key_value_heads=2, num_local_experts=2, tie_word_embeddings=False)
    torch.manual_seed(1)
    plain = MixtralForCausalLM(config).eval()
    if dist.get_rank() == 0:
        with mock.patch("torch.distributed.is_initialized", lambda: False):
            hf.save_pretrained(plain, f"{tmp_path}/alone")  # not sharded, without a process group
        assert MixtralForCausalLM.from_pretrained(f"{tmp_path}/alone").dtype == torch.float32
    model = hf.shard(plain)
    with torch.no_grad():
        expected = model(**batch()).logits
    assert converted(model) and not converted(llama())
    hf.save_pretrained(model, f"{tmp_path}/experts")
    from safetensors import safe_open

    with safe_open(f"{tmp_path}/experts/model.safetensors", "pt") as files:
        assert any("experts.1." in name for name in files.keys())  # noqa: SIM118 - no dict
    with torch.no_grad():
        close(MixtralForCausalLM.from_pretrained(f"{tmp_path}/experts")(**batch()).logits, expected)
    with pytest.raises(fullshard.CheckpointError, match="experts"):
        hf.from_pretrained(MixtralForCausalLM, f"{tmp_path}/experts")
    hf.save_pretrained(model, f"{tmp_path}/short", dtype=torch.bfloat16)
    assert json.loads((Path(tmp_path) / "short" / "config.json").read_text())["dtype"] == "bfloat16"
    with pytest.raises(fullshard.ConfigError, match=r"floating-point torch\.dtype"):
        hf.save_pretrained(model, f"{tmp_path}/integers", dtype=torch.int8)
    fullshard.save_safetensors(model, f"{tmp_path}/stacked")
    again = hf.from_pretrained(MixtralForCausalLM, f"{tmp_path}/stacked")
    with torch.no_grad():
        close(again(**batch()).logits, expected)


# PEFT.


@on_ranks(by="run_clients")
def test_adapters_train_resume_and_are_saved(tmp_path):
    from peft import PeftModel
    from test_peft import lora

    plain = trainer_of("ddp", tmp_path, lora(torch.float32), ddp_find_unused_parameters=False)
    plain.train()
    saves = {"save_strategy": "steps", "save_steps": STEPS // 2}
    sharded = sharded_trainer(tmp_path, lora(torch.float32), **saves)
    sharded.train()
    assert is_ours(sharded)
    close(losses(sharded), losses(plain))
    prompt = Sentences(1).tokens[:, :4]
    ours = sharded.model.generate(input_ids=prompt, max_new_tokens=4, do_sample=False)
    torch.testing.assert_close(ours, plain.model.generate(input_ids=prompt, max_new_tokens=4, do_sample=False))
    again = sharded_trainer(tmp_path, lora(torch.float32))
    again.train(resume_from_checkpoint=f"{tmp_path}/checkpoint-{STEPS // 2}")
    close(losses(again), losses(plain))
    sharded.save_model(f"{tmp_path}/adapters")
    sharded.model.save_pretrained(f"{tmp_path}/own")
    plain.save_model(f"{tmp_path}/plain")
    dist.barrier()
    files = {where: {path.name for path in Path(tmp_path, where).iterdir()} for where in ("adapters", "plain")}
    assert files["adapters"] <= files["plain"], files  # from_pretrained takes a config.json for a whole model's
    assert not Path(tmp_path, f"checkpoint-{STEPS}", "config.json").exists()
    with torch.no_grad():
        expected = sharded.model(**batch()).loss
        for one in ("adapters", "own"):
            assert not (Path(tmp_path) / one / "model.safetensors").exists()
            close(PeftModel.from_pretrained(llama(), f"{tmp_path}/{one}")(**batch()).loss, expected)


@on_ranks(by="run_clients")
def test_an_optimizer_that_cannot_step_shards_is_named(tmp_path):
    """Transformers' own Adafactor; and what the error recommends for others: plain tensors of a sharded model."""
    trainer = sharded_trainer(tmp_path, optim="adafactor")
    with pytest.raises(fullshard.ConfigError, match=r"Adafactor(.|\n)*optimizer-on-shards") as caught:
        trainer.train()
    assert caught.value.parameter in dict(llama().named_parameters()), caught.value
    found = []
    for cls in (None, sharded_class()):
        model = llama() if cls is None else hf.shard(llama())
        trainer = trainer_of("ddp", tmp_path, model, cls)
        parameters = model.parameters() if cls is None else fullshard.optimizer_view(model)
        trainer.optimizer = torch.optim.AdamW(parameters, lr=1e-2)
        trainer.train()
        found.append(losses(trainer))
    close(found[1], found[0])
    assert is_ours(trainer)


# What is refused.


@on_ranks(by="run_clients")
def test_bad_inputs_are_named(tmp_path):
    fsdp = {"fsdp": True, "fsdp_config": {"version": 2}}
    for make, word in (
        (lambda: sharded_trainer(tmp_path, **fsdp), "python -m fullshard adopt"),
        (lambda: hf.shard(llama(), units=["LlamaDecoder"]), "LlamaDecoderLayer"),
        (lambda: hf.shard(llama(), mixed_precision="bfloat16"), "'bf16'"),
        (lambda: hf.shard(llama(), mixed_precision="bf16", mp_policy=fullshard.MixedPrecisionPolicy()), "both set"),
        (lambda: hf.save_pretrained(hf.shard(llama()), f"{tmp_path}/x", max_shard_size="5 apples"), "1GiB"),
    ):
        with pytest.raises(fullshard.ConfigError, match=word):
            make()


def test_units_are_the_models_own():
    from transformers import BertConfig, BertForMaskedLM

    bert = BertForMaskedLM(BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8))
    assert {cls.__name__ for cls in hf.unit_classes(bert)} >= {"BertLayer"}
    assert {cls.__name__ for cls in hf.unit_classes(llama())} == {"LlamaDecoderLayer"}
    assert {cls.__name__ for cls in hf.unit_classes(llama(), ["LlamaMLP"])} == {"LlamaMLP"}
    assert hf.unit_classes(torch.nn.Linear(2, 2)) == set()


def test_the_mixin_comes_first():
    from transformers import Trainer

    with pytest.raises(fullshard.ConfigError, match="lists ShardedTrainerMixin after the Trainer"):
        type("Bad", (Trainer, hf.ShardedTrainerMixin), {})
    made = type("Good", (hf.ShardedTrainerMixin, type("Mine", (Trainer,), {})), {})
    for sharding, word in (("full", "sharding is invalid"), ({"layuot": "flat"}, "did you mean layout=")):
        with pytest.raises(fullshard.ConfigError, match=word):
            made(sharding=sharding)
