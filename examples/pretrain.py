"""Pretrain a byte-level GPT on the source of Python's standard library, sharded over all ranks.

    make demo                                                         # two ranks on the CPU
    python examples/pretrain.py                                       # one process
    torchrun --standalone --nproc-per-node=4 examples/pretrain.py     # four ranks, GPUs where there are any

and on each of two machines, with a folder that both see:

    torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 \\
             examples/pretrain.py --out SHARED/run

Run it again and it goes on from its checkpoint, on any number of ranks. Press Ctrl-C and it saves one first.
"""

# What is Fullshard's here: `build` shards the model and views it for the optimizer, `train_step` clips,
# `train` monitors the run, and checkpoint.py saves and loads. The rest is plain PyTorch.

import argparse
import math
import signal
import time
from contextlib import ExitStack
from dataclasses import asdict

import torch
import torch.distributed as dist
from checkpoint import CheckpointUnusable, Record, resume, save
from corpus import Corpus, CorpusError, held_out_offsets, read_corpus, rows_of_rank, training_offsets, windows
from launch import (
    RANK,
    WORLD,
    check_ranks_agree,
    fail,
    parse_options,
    prepare_folder,
    say,
    start_process_group,
)
from model import GPT, GPTConfig, initial_value
from report import draw_loss, draw_memory, draw_timeline, human_bytes
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from fullshard import MixedPrecisionPolicy, Monitor, clip_grad_norm_, fully_shard, memory_use, optimizer_view, trace

TRACED = 5  # the last steps, of which one is drawn
TARGET = 2.6  # nats per byte that the defaults must get below on held-out files


def build(options: argparse.Namespace, device: torch.device) -> tuple[GPT, torch.optim.Optimizer]:
    """The sharded model, with its starting weights, and AdamW over what this rank owns of it.

    The model is made on the meta device: no rank ever holds all of it, only one whole parameter at a time.
    """
    with torch.device("meta"):
        model = GPT(GPTConfig(options.layers, options.width, options.heads, options.context))
    mesh = init_device_mesh(device.type, (WORLD,))
    compute = {"fp32": torch.float32, "bf16": torch.bfloat16}[options.dtype]
    precision = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)  # the rest: embedding, last norm, head
    model.to_empty(device=device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            whole = initial_value(name, parameter.shape, options.seed).to(device)  # mlp_in: [512, 128], ...
            # ... of which each of two ranks owns, and copies, its [256, 128]. No communication.
            parameter.copy_(distribute_tensor(whole, mesh, parameter.placements, src_data_rank=None))
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    norms = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [
        {"params": optimizer_view(model, matrices), "weight_decay": 0.1},
        {"params": optimizer_view(model, norms), "weight_decay": 0.0},
    ]
    return model, torch.optim.AdamW(groups, lr=options.learning_rate, betas=(0.9, 0.95), fused=True)


# ---------------------------------------------------------------------------------------------- training


class Interrupt:
    """Notes SIGINT (Ctrl-C) and SIGTERM instead of ending at once. torchrun passes them on to all ranks."""

    def __init__(self) -> None:
        self.noted = False
        numbers = (signal.SIGINT, signal.SIGTERM)
        self.before = {number: signal.signal(number, self.note) for number in numbers}

    def note(self, number: int, frame: object) -> None:
        """The handler. A second signal changes nothing: the step at hand is finished and saved."""
        self.noted = True

    def restore(self) -> None:
        """Let signals end the program again."""
        for number, handler in self.before.items():
            signal.signal(number, handler)


def learning_rate(step: int, options: argparse.Namespace) -> float:
    """Linear warm-up to the highest rate, then a cosine down to a tenth of it at the last step."""
    if step < options.warmup:
        return options.learning_rate * (step + 1) / options.warmup
    progress = (step - options.warmup) / max(options.steps - options.warmup, 1)  # 0 .. 1
    return options.learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def mean_over_ranks(*values: Tensor | float, device: torch.device) -> list[float]:
    """The mean of each value over all ranks, by one all-reduce."""
    together = torch.stack([torch.as_tensor(value, dtype=torch.float32, device=device) for value in values])
    dist.all_reduce(together)
    return (together / WORLD).tolist()


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    corpus: Corpus,
    *,
    step: int,
    options: argparse.Namespace,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """One optimizer step; this rank's loss, and the gradient norm. Gradients stay, to be measured and cleared."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step, options)
    offsets = training_offsets(corpus.training, options.context, options.batch, options.seed, step)  # [B = 8]
    mine = rows_of_rank(offsets, RANK, WORLD)  # [B / W]: rank 0 of 2 takes sequences 0 to 3
    loss = model(*windows(corpus.training, mine, options.context, device))  # from two [B / W, T = 128]
    loss.backward()  # a unit's gradients are reduced while the next unit's are computed
    norm = clip_grad_norm_(model.parameters(), options.clip)  # of all ranks' gradients together
    optimizer.step()
    return loss.detach(), norm


@torch.no_grad()
def validate(
    model: nn.Module, corpus: Corpus, *, rounds: int, options: argparse.Namespace, device: torch.device
) -> float:
    """Loss in nats per byte over `rounds` batches of 4 B windows, evenly spread over the held-out files."""
    text, batch, total = corpus.held_out, 4 * options.batch, torch.zeros((), device=device)
    for offsets in held_out_offsets(text, options.context, rounds * batch).split(batch):
        total += model(*windows(text, rows_of_rank(offsets, RANK, WORLD), options.context, device))
    return mean_over_ranks(total / rounds, device=device)[0]


def memory_of_ranks(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> list[dict[str, int]]:
    """What every rank holds and what one process would, in bytes: one dict per rank."""
    use = memory_use(model, optimizer)
    names = ("parameters", "gradients", "optimizer", "peak_transient", "single_process")
    mine = {name: getattr(use, name) for name in names}
    mine["single_parameters"] = sum(parameter.numel() * parameter.itemsize for parameter in model.parameters())
    packed = torch.tensor(list(mine.values()), device=device)  # [6], int64
    gathered = [torch.empty_like(packed) for _ in range(WORLD)]
    dist.all_gather(gathered, packed)
    return [dict(zip(mine, row.tolist(), strict=True)) for row in gathered]


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    corpus: Corpus,
    record: Record,
    *,
    options: argparse.Namespace,
    device: torch.device,
) -> bool:
    """Train to the last step, keeping `record` and saving now and then. False if a signal came before."""
    interrupt = Interrupt()
    tokens = options.batch * options.context  # in a step, over all ranks
    every = max(options.steps // 20, 1)  # from one line to the next
    with ExitStack() as recorded:
        monitor = Monitor(model, optimizer, every=every, start_step=record.step, tokens_per_step=tokens // WORLD)
        recorded.enter_context(monitor)
        recording = None
        while record.step < options.steps:
            if record.step == max(options.steps - TRACED, 0):
                recording = recorded.enter_context(trace(options.out / "trace"))
            started = time.perf_counter()
            loss, norm = train_step(model, optimizer, corpus, step=record.step, options=options, device=device)
            mean, interrupted = mean_over_ranks(loss, float(interrupt.noted), device=device)
            if not math.isfinite(mean):
                fail(f"the loss is {mean} at step {record.step + 1}: try a lower --learning-rate")
            record.add_step(mean, tokens, time.perf_counter() - started)
            monitor.step(loss=mean, grad_norm=norm)

            last = record.step == options.steps
            save_now = last or interrupted or record.step % options.save_every == 0
            if save_now:
                record.memory = memory_of_ranks(model, optimizer, device)
                (record.seconds,) = mean_over_ranks(record.seconds, device=device)  # a record of all ranks
            optimizer.zero_grad()
            if recording is not None:
                recording.step()
            if record.step % options.validate_every == 0 and not last:
                held_out_loss = validate(model, corpus, rounds=4, options=options, device=device)
                record.validation.append((record.step, held_out_loss))
                say(f"step {record.step:>6,}  held-out loss {held_out_loss:.4f}")
            if save_now:
                save(options.out, model, optimizer, record)
            if interrupted:
                break
    interrupt.restore()
    return record.step == options.steps


# ---------------------------------------------------------------------------------------------- afterwards


@torch.no_grad()
def generate(model: nn.Module, options: argparse.Namespace, device: torch.device) -> str:
    """Continue the prompt byte by byte. Every rank generates the same text: each forward needs them all."""
    generator = torch.Generator().manual_seed(options.seed)
    text = list(options.prompt.encode())
    for _ in range(options.sample):
        recent = torch.tensor([text[-options.context :]], device=device)  # [1, T]
        logits = model(recent)[0, -1].cpu()  # [V = 256]
        chances = torch.softmax(logits / 0.7, dim=-1)  # a temperature below 1 prefers likely bytes
        text.append(int(torch.multinomial(chances, 1, generator=generator)))
    return bytes(text).decode(errors="replace")


def draw(options: argparse.Namespace, record: Record) -> None:
    """Write the pictures, on rank 0, and say where they are."""
    if RANK != 0:
        return
    loss, memory = options.out / "loss.png", options.out / "memory.png"
    if draw_loss(loss, record.losses, record.validation, TARGET) and draw_memory(memory, record.memory):
        say(f"loss curve      {loss}\nmemory picture  {memory}")
        if draw_timeline(options.out / "timeline.png", options.out / "trace"):
            say(f"one step        {options.out / 'timeline.png'}")
    else:
        say("no pictures: matplotlib is not installed")


def summarize(record: Record, loss: float) -> None:
    """The last lines: what was held, and the validation loss against the target."""
    say(f"{record.tokens:,} bytes of text in {record.step:,} steps, {record.seconds:.0f} s of training")
    if record.memory:
        parts, ranks = ("parameters", "gradients", "optimizer"), len(record.memory)
        held = human_bytes(max(sum(rank[part] for part in parts) for rank in record.memory))
        whole = human_bytes(record.memory[0]["single_process"])
        each = f"on each of {ranks} ranks" if ranks > 1 else "on the one rank"
        say(f"Parameters, gradients and AdamW state: {held} {each}; one process would hold {whole}.")
    verdict = f"below the target of {TARGET}" if loss < TARGET else f"above the target of {TARGET}: train longer"
    bits = loss / math.log(2)
    say(f"Validation loss: {loss:.3f} nats/byte on held-out files ({bits:.2f} bits/byte), {verdict}.")


def main() -> None:
    """The whole program, top to bottom."""
    options = parse_options(__doc__)
    try:
        corpus = read_corpus(options.data, options.context)
    except CorpusError as error:
        fail(f"--data: {error}")
    prepare_folder(options.out)
    device = start_process_group(options.device)
    check_ranks_agree(options, corpus, device)
    model, optimizer = build(options, device)

    count = sum(parameter.numel() for parameter in model.parameters())
    say(f"GPT of {count:,} parameters, {options.dtype}, on {WORLD} x {device.type} ({dist.get_backend()})")
    say(f"Text: {corpus.description}")
    record = Record(model=asdict(model.config), seed=options.seed, fingerprint=corpus.fingerprint)
    checkpoints = options.out / "checkpoints"
    try:
        found = None if options.fresh else resume(options.out, model, optimizer, record)
    except CheckpointUnusable as error:
        fail(f"{error}; --fresh starts over, --out chooses another folder")
    if found is not None:
        record = found
        say(f"Resuming from {checkpoints}, after step {record.step:,} of {max(options.steps, record.step):,}")

    if record.step >= options.steps:
        say(f"Already finished at step {record.step:,}: validating and generating again, without training.")
    elif not train(model, optimizer, corpus, record, options=options, device=device):
        say(f"Interrupted after step {record.step:,} of {options.steps:,}, and saved in {checkpoints}.")
        say("The same command goes on from there. (torchrun may follow with a traceback of its own; all is well.)")
        dist.destroy_process_group()
        return

    loss = validate(model, corpus, rounds=16, options=options, device=device)
    if not record.validation or record.validation[-1][0] < record.step:
        record.validation.append((record.step, loss))
        save(options.out, model, optimizer, record)
    if options.sample:
        say(f"\n{' sample ':-^80}\n{generate(model, options, device)}\n{'-' * 80}\n")
    draw(options, record)
    say(f"checkpoints     {checkpoints}\n")
    summarize(record, loss)
    say(f'To train on: make demo ARGS="--steps {2 * record.step}". To start over: make demo ARGS=--fresh')
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
