"""Fine-tune on questions and answers, with losses on the answers alone. A plain loop.

    torchrun --standalone --nproc-per-node=2 examples/recipes/sft.py --base runs/pretrained/model-100 --out runs/sft

A question is the first line of a function, its answer the first line of its docstring. Answers differ in length, so
ranks have unequal numbers of tokens that count: the loss is a sum, and `set_token_count` makes gradients those of the
mean over all tokens of all ranks and micro-batches.
"""

import argparse
from pathlib import Path

import job
import text
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import fullshard

IGNORED = -100


def padded(pairs: list[tuple[bytes, bytes]], length: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels, each [pairs, length]; labels are IGNORED but for the answer's tokens."""
    tokens = torch.zeros(len(pairs), length, dtype=torch.int64)
    labels = torch.full((len(pairs), length), IGNORED)
    for row, (question, answer) in enumerate(pairs):
        whole = list(question + b"\n" + answer)[:length]
        tokens[row, : len(whole)] = torch.tensor(whole)
        begin = min(len(question) + 1, length)
        labels[row, begin : len(whole)] = tokens[row, begin : len(whole)]
    return tokens, labels


def main(arguments: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--base", type=Path, required=True, help="a model as save_pretrained writes it")
    parser.add_argument("--out", type=Path, default=Path("runs/sft"))
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=128)
    options = parser.parse_args(arguments)

    device = job.start()
    rank, world = dist.get_rank(), dist.get_world_size()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(options.base))
    fullshard.fully_shard(model, auto_wrap_policy="auto", reduction="tokens")
    model.to_empty(device=device)
    model.init_weights()  # for what is in no file: the angles of rotary positions
    fullshard.load_safetensors(model, options.base)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    pairs, losses = text.questions_and_answers(), []
    for step in range(options.steps):
        chosen = torch.randint(len(pairs), (options.rows,), generator=torch.Generator().manual_seed(step)).tolist()
        tokens, labels = padded([pairs[index] for index in chosen[rank::world]], options.length)
        micro_batches = list(zip(tokens.to(device).chunk(2), labels.to(device).chunk(2), strict=True))
        counts = [int((part[:, 1:] != IGNORED).sum()) for _, part in micro_batches]
        fullshard.set_token_count(model, counts)
        total = torch.zeros(2, device=device)  # of losses, and of tokens
        for (inputs, targets), count in zip(micro_batches, counts, strict=True):
            logits = model(input_ids=inputs).logits[:, :-1]  # [B, T - 1, V]
            loss = F.cross_entropy(
                logits.flatten(0, 1).float(), targets[:, 1:].flatten(), ignore_index=IGNORED, reduction="sum"
            )
            loss.backward()
            total += torch.stack([loss.detach(), torch.tensor(float(count), device=device)])
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        losses.append((total[0] / total[1]).item())
        if step % 10 == 0:
            job.say(f"step {step}: {losses[-1]:.3f} a token")
    fullshard.save_safetensors(model, options.out)
    return losses


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
