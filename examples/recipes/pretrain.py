"""Pretrain a model from its configuration.

    torchrun --standalone --nproc-per-node=2 examples/recipes/pretrain.py --out runs/pretrained
    ... --config FOLDER      a folder with the config.json of any causal language model of transformers

The model is made on the meta device, sharded, and only then given memory and values: no rank ever holds it whole. Run
it again and it goes on from its checkpoint, on any number of ranks.
"""

import argparse
from pathlib import Path

import job
import text
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

import fullshard

SMALL = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}


def main(arguments: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--config", type=Path, help="folder with a config.json [a Llama of a million parameters]")
    parser.add_argument("--out", type=Path, default=Path("runs/pretrained"))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rows", type=int, default=8, help="of a batch, all ranks")
    parser.add_argument("--length", type=int, default=128)
    options = parser.parse_args(arguments)

    device = job.start()
    rank, world = dist.get_rank(), dist.get_world_size()
    if options.config is not None:
        config = AutoConfig.from_pretrained(options.config)
    else:
        config = LlamaConfig(vocab_size=text.VOCABULARY, bos_token_id=None, eos_token_id=None, **SMALL)

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    fullshard.fully_shard(model, auto_wrap_policy="auto")  # the blocks that repeat become units
    model.to_empty(device=device)
    torch.manual_seed(rank)  # each rank draws the rows that it owns
    model.init_weights()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    losses = []
    done = fullshard.load(options.out / "checkpoints", model, optimizer, rng=False, missing_ok=True).step
    source = b"\n".join(text.sources())
    for step in range(done, options.steps):
        tokens = text.batch(source, step, options.rows, options.length)[rank::world].to(device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        fullshard.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(job.mean_over_ranks(loss))
        if step % 10 == 0:
            job.say(f"step {step}: {losses[-1]:.3f}")

    if losses:
        fullshard.save(options.out / "checkpoints", model, optimizer, step=options.steps, rng=False, keep_last=2)
    if not (options.out / f"model-{options.steps}").exists():
        fullshard.save_safetensors(model, options.out / f"model-{options.steps}")  # what from_pretrained loads
    return losses


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
