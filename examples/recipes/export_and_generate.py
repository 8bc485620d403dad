"""Export a checkpoint to what `transformers` loads, and generate text: by the sharded model, and by one process.

    torchrun --standalone --nproc-per-node=2 examples/recipes/export_and_generate.py \\
             --run runs/pretrained --out runs/exported

The checkpoint may be of any number of ranks. While the sharded model generates, each unit is gathered once.
"""

import argparse
from pathlib import Path

import job
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

import fullshard


def main(arguments: list[str] | None = None) -> tuple[bytes, bytes]:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--run", type=Path, required=True, help="where pretrain.py wrote")
    parser.add_argument("--out", type=Path, default=Path("runs/exported"), help="a folder that is not there yet")
    parser.add_argument("--prompt", default="def ")
    parser.add_argument("--bytes", type=int, default=32, help="to generate")
    options = parser.parse_args(arguments)

    device = job.start()
    config = AutoConfig.from_pretrained(next(options.run.glob("model-*")))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    fullshard.fully_shard(model, auto_wrap_policy="auto")
    model.to_empty(device=device)
    model.init_weights()  # for what is in no checkpoint: the angles of rotary positions
    fullshard.load(options.run / "checkpoints", model, rng=False)

    fullshard.save_safetensors(model, options.out)

    model.eval()
    prompt = torch.tensor([list(options.prompt.encode())], device=device)  # [1, T]: the same on every rank
    settings = {"max_new_tokens": options.bytes, "min_new_tokens": options.bytes, "do_sample": False}
    with torch.no_grad(), fullshard.keep_gathered(model):
        together = bytes(model.generate(prompt, pad_token_id=0, **settings)[0].tolist())
    job.say(together.decode(errors="replace"))

    alone = AutoModelForCausalLM.from_pretrained(options.out).to(device).eval()  # no Fullshard in it
    apart = bytes(alone.generate(prompt, pad_token_id=0, **settings)[0].tolist())
    job.say("The same from one process." if apart == together else f"Other than {apart!r} from one process.")
    return together, apart


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
