"""Fine-tune adapters (LoRA) on a frozen base model: the base in bfloat16, the adapters in float32.

    torchrun --standalone --nproc-per-node=2 examples/recipes/lora.py --base runs/pretrained/model-100 --out runs/lora

The base's files are read straight into shards. Only adapters have gradients and optimizer state, and only they are
saved, in PEFT's format: `PeftModel.from_pretrained(base, "runs/lora")` loads them anywhere.
"""

import argparse
from pathlib import Path

import job
import peft
import text
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

import fullshard


def main(arguments: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--base", type=Path, required=True, help="a model as save_pretrained writes it")
    parser.add_argument("--out", type=Path, default=Path("runs/lora"))
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    options = parser.parse_args(arguments)

    device = job.start()
    rank, world = dist.get_rank(), dist.get_world_size()
    settings = peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(options.base), dtype=torch.bfloat16)
        model = peft.get_peft_model(base, settings)  # freezes the base, adds adapters in float32
    fullshard.fully_shard(model, auto_wrap_policy="auto")
    model.to_empty(device=device)

    base.init_weights()  # for what is in no file: the angles of rotary positions
    fullshard.load_safetensors(model, options.base, base=True)
    torch.manual_seed(rank)  # each rank draws the rows that it owns
    for module in model.modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            module.reset_lora_parameters("default", True)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-3)

    source, losses = b"\n".join(text.sources()), []
    for step in range(options.steps):
        tokens = text.batch(source, step, options.rows, options.length)[rank::world].to(device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(job.mean_over_ranks(loss))
        if step % 10 == 0:
            job.say(f"step {step}: {losses[-1]:.3f}")
    fullshard.save_safetensors(model, options.out, adapter=True)
    return losses


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
