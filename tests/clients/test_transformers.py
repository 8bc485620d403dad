"""Transformers' `Trainer` with FSDP, both versions, on adopted CPU ranks: the numbers of the same program under DDP."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiny import LENGTH, Sentences, batch, close, llama

import fullshard
from ways import on_ranks

STEPS = 4
LAYERS = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
WAYS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "words": {"fsdp": "full_shard auto_wrap", "fsdp_config": {"version": 1}},
    "v1": {"fsdp": True, "fsdp_config": {"version": 1, "state_dict_type": "SHARDED_STATE_DICT", **LAYERS}},
    "v2": {"fsdp": True, "fsdp_config": {"version": 2, "state_dict_type": "SHARDED_STATE_DICT", **LAYERS}},
    "v2 full": {"fsdp": True, "fsdp_config": {"version": 2, "state_dict_type": "FULL_STATE_DICT"}},
}


def trainer_of(way: str, folder: str, model: Any = None, cls: Any = None, **more: Any) -> Any:
    import transformers
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    seq2seq = cls is not None and issubclass(cls, transformers.Seq2SeqTrainer)
    arguments = (transformers.Seq2SeqTrainingArguments if seq2seq else transformers.TrainingArguments)(
        output_dir=folder,
        use_cpu=True,
        per_device_eval_batch_size=2,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        **{
            "max_steps": STEPS,
            "max_grad_norm": 0.5,
            "per_device_train_batch_size": 2,
            "save_strategy": "no",
            "learning_rate": 1e-2,
            "gradient_accumulation_steps": 2,
            **WAYS[way],
            **more,
        },
    )
    return (cls or transformers.Trainer)(
        model=llama() if model is None else model,
        args=arguments,
        train_dataset=Sentences(64),
        eval_dataset=Sentences(12),
    )


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def norms(trainer: Any) -> list[float]:
    return [float(entry["grad_norm"]) for entry in trainer.state.log_history if "grad_norm" in entry]


def is_ours(trainer: Any) -> bool:
    model = trainer.model_wrapped
    if isinstance(model, fullshard.FullyShardedDataParallel):
        return len(model.fsdp_modules(model)) == 3
    return isinstance(model, fullshard.FSDPModule) and isinstance(model.model.layers[0], fullshard.FSDPModule)


@pytest.mark.parametrize("way", ["words", "v1", "v2"])
@on_ranks(by="run_adopted")
def test_trains_and_evaluates_as_ddp(tmp_path, way):
    plain = trainer_of("ddp", tmp_path)
    plain.train()
    expected = plain.evaluate()["eval_loss"]
    sharded = trainer_of(way, tmp_path)
    sharded.train()
    assert is_ours(sharded)
    close(losses(sharded), losses(plain))
    close(norms(sharded), norms(plain))
    close(sharded.evaluate()["eval_loss"], expected)


@pytest.mark.parametrize("way", ["v1", "v2", "v2 full"])
def test_resumes(run_adopted, tmp_path, way):
    """Two steps and a checkpoint on two ranks; the rest by two and by one, which has the whole batch."""
    together = run_adopted(checkpointed, way, str(tmp_path))
    run_adopted(resumed, way, str(tmp_path), together[0])
    run_adopted(resumed, way, str(tmp_path), together[0], world=1)


def checkpointed(way: str, folder: str) -> list[float]:
    trainer = trainer_of(way, folder, save_strategy="steps", save_steps=STEPS // 2)
    trainer.train()
    assert (Path(folder) / f"checkpoint-{STEPS // 2}").is_dir()
    return losses(trainer)


def resumed(way: str, folder: str, expected: list[float]) -> None:
    size = {"per_device_train_batch_size": 2 * 2 // dist.get_world_size()}
    trainer = trainer_of(way, folder, **size)
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{STEPS // 2}")
    assert is_ours(trainer)
    close(losses(trainer), expected)


@pytest.mark.parametrize("kind", ["Trainer's", "FSDP's"])
@pytest.mark.parametrize("way", ["v1", "v2"])
@on_ranks(by="run_adopted")
def test_gradient_checkpointing(tmp_path, way, kind):
    plain = trainer_of("ddp", tmp_path)
    plain.train()
    config = {**WAYS[way]["fsdp_config"], **({"activation_checkpointing": True} if kind == "FSDP's" else {})}
    more = {"gradient_checkpointing": True} if kind == "Trainer's" else {}
    sharded = trainer_of(way, tmp_path, fsdp_config=config, **more)
    sharded.train()
    assert is_ours(sharded)
    close(losses(sharded), losses(plain))


@pytest.mark.parametrize("way", ["words", "v2 full"])
def test_saved_model_is_whole(run_adopted, tmp_path, way):
    run_adopted(saved, way, str(tmp_path), "save_model")


@pytest.mark.parametrize("way", ["v1", "v2"])
def test_save_pretrained_of_a_sharded_model(run_adopted, tmp_path, way):
    """Of the wrapped and of the unwrapped model; called by every rank, as `Trainer` and examples do."""
    run_adopted(saved, way, str(tmp_path), "save_pretrained")


def saved(way: str, folder: str, by: str) -> None:
    """Train, write by the trainer's or the model's own method, and compare with what the folder holds."""
    from transformers import LlamaForCausalLM

    sharded = trainer_of(way, folder)
    sharded.train()
    if by == "save_model":
        sharded.save_model(f"{folder}/whole")
    else:
        inner = sharded.accelerator.unwrap_model(sharded.model_wrapped)
        inner.save_pretrained(f"{folder}/whole", is_main_process=dist.get_rank() == 0)
    dist.barrier()
    found = LlamaForCausalLM.from_pretrained(f"{folder}/whole")
    with torch.no_grad():
        close(sharded.model(**batch()).loss, found(**batch()).loss)


@pytest.mark.parametrize("way", ["v1", "v2"])
def test_generates_during_evaluation(run_adopted, tmp_path, way):
    found = run_adopted(generated, way, str(tmp_path))
    assert found[0] == found[1]


def generated(way: str, folder: str) -> list[Any]:
    """What both ranks generated, the same as the unsharded model would."""
    from transformers import Seq2SeqTrainer

    prompts = Sentences(12).tokens[:, : LENGTH // 2]
    plain = llama()
    sharded = trainer_of(way, folder, cls=Seq2SeqTrainer, learning_rate=0.0, predict_with_generate=True, max_steps=1)
    sharded.train()
    model = sharded.model
    synced = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": int(prompts[0, 0])}  # ranks end at other lengths
    mine = prompts[dist.get_rank() :: 2]
    whole: Any = contextlib.nullcontext()
    if isinstance(model, fullshard.FullyShardedDataParallel):
        whole = fullshard.FullyShardedDataParallel.summon_full_params(model)
    with whole:
        ours = model.generate(mine, **synced)
    theirs = plain.generate(mine, **synced)
    length = min(ours.shape[1], theirs.shape[1])
    torch.testing.assert_close(ours[:, :length], theirs[:, :length])
    metrics = sharded.evaluate(max_new_tokens=5, do_sample=False)
    return [round(metrics["eval_loss"], 4)]


@pytest.mark.parametrize("way", ["v1", "v2"])
@on_ranks(by="run_adopted")
def test_from_pretrained_for_sharding_loads_once(tmp_path, way):
    """With efficient loading, and weights of the first rank sent to the others; rotary buffers are right on all."""
    from transformers import LlamaForCausalLM

    plain = trainer_of("ddp", tmp_path, train_sampling_strategy="sequential")
    if dist.get_rank() == 0:
        llama().save_pretrained(f"{tmp_path}/base", max_shard_size="4KB")
    dist.barrier()
    plain.train()
    config = {**WAYS[way]["fsdp_config"], "cpu_ram_efficient_loading": True, "sync_module_states": True}
    os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_CPU_RAM_EFFICIENT_LOADING="true")  # as its launcher does
    model = LlamaForCausalLM.from_pretrained(f"{tmp_path}/base", dtype=torch.float32)
    sharded = trainer_of(way, tmp_path, model, fsdp_config=config, train_sampling_strategy="sequential")
    sharded.train()
    assert is_ours(sharded)
    close(losses(sharded), losses(plain))
    expected = dict(plain.accelerator.unwrap_model(plain.model_wrapped).named_buffers())
    found = {name.replace("_fsdp_wrapped_module.", ""): value for name, value in sharded.model.named_buffers()}
    close(found, expected)


@on_ranks(by="run_adopted")
def test_label_smoothing(tmp_path):
    """Trainer shifts labels of a causal model, which it knows by the name of its class."""
    found = {}
    for way in ("ddp", "v1", "v2"):
        trainer = trainer_of(way, tmp_path, label_smoothing_factor=0.1)
        trainer.train()
        found[way] = losses(trainer)
    close(found["v1"], found["ddp"])
    close(found["v2"], found["ddp"])
