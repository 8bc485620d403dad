"""How examples/pretrain.py is started: its command line, its ranks and its device."""

import argparse
import math
import os
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from corpus import Corpus, standard_library

# torchrun sets these; plain `python` is a world of one.
RANK = int(os.environ.get("RANK", "0"))
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", "0"))
LOCAL_WORLD = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # ranks on this machine


def say(text: str) -> None:
    """Print on rank 0."""
    if RANK == 0:
        print(text, flush=True)


def fail(reason: str) -> NoReturn:
    """End with one line for the user, from the first rank of each machine. All ranks come here together."""
    if LOCAL_RANK == 0:
        print(f"pretrain.py: {reason}", file=sys.stderr, flush=True)
    else:
        time.sleep(3)  # torchrun ends the other ranks as soon as one has exited: let the first one speak
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.exit(2)


class Parser(argparse.ArgumentParser):
    """Reports a bad argument in one line, once per machine."""

    def error(self, message: str) -> NoReturn:
        """What argparse calls with a bad argument."""
        fail(f"{message} (--help lists the arguments)")


def at_least(smallest: int) -> Callable[[str], int]:
    """An argparse type: an integer not below `smallest`."""

    def whole_number(text: str) -> int:
        value = int(text)
        if value < smallest:
            raise argparse.ArgumentTypeError(f"{value} is below {smallest}")
        return value

    return whole_number


def positive_number(text: str) -> float:
    """An argparse type: a finite number above zero."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a finite number above zero")
    return value


def make_parser(description: str) -> Parser:
    """All arguments and their defaults, which take about two minutes on two CPU cores."""
    parser = Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    run = parser.add_argument_group("the run")
    run.add_argument("--steps", type=at_least(1), default=400, help="optimizer steps in all [%(default)s]")
    run.add_argument("--fresh", action="store_true", help="start over, whatever checkpoint there is")
    run.add_argument(
        "--out", type=Path, default=Path("runs/pretrain"), help="for checkpoint and pictures [%(default)s]"
    )
    run.add_argument("--save-every", type=at_least(1), default=200, help="in steps [%(default)s]")
    run.add_argument("--validate-every", type=at_least(1), default=100, help="in steps [%(default)s]")
    run.add_argument("--device", help="cpu, cuda, ... [an accelerator where there is one, else cpu]")
    run.add_argument(
        "--dtype",
        choices=("fp32", "bf16"),
        default="fp32",
        help="of gathered parameters and of computing; bf16 is slow on CPUs without it [%(default)s]",
    )
    data = parser.add_argument_group("text")
    data.add_argument("--data", type=Path, default=standard_library(), help="folder of .py files [standard library]")
    data.add_argument("--batch", type=at_least(1), default=8, help="sequences a step, all ranks [%(default)s]")
    data.add_argument("--context", type=at_least(8), default=128, help="bytes in a sequence [%(default)s]")
    data.add_argument("--seed", type=at_least(0), default=0, help="of weights and batches [%(default)s]")
    data.add_argument("--prompt", default="def ", help="where the sample begins [%(default)r]")
    data.add_argument("--sample", type=at_least(0), default=300, help="bytes to generate [%(default)s]")
    model = parser.add_argument_group("model and optimizer")
    model.add_argument("--layers", type=at_least(1), default=6, help="blocks, one unit each [%(default)s]")
    model.add_argument("--width", type=at_least(2), default=128, help="of the residual stream [%(default)s]")
    model.add_argument("--heads", type=at_least(1), default=4, help="of attention [%(default)s]")
    model.add_argument("--learning-rate", type=positive_number, default=3e-3, help="highest [%(default)s]")
    model.add_argument("--warmup", type=at_least(0), default=50, help="steps up to it [%(default)s]")
    model.add_argument("--clip", type=positive_number, default=1.0, help="gradient norm [%(default)s]")
    return parser


def parse_options(description: str) -> argparse.Namespace:
    """The command line, checked as far as it can be before the ranks meet."""
    parser = make_parser(description)
    options = parser.parse_args()
    if options.batch % WORLD:
        parser.error(f"--batch {options.batch} does not divide by {WORLD} ranks, which take equal parts of it")
    if options.width % (2 * options.heads):
        parser.error(f"--width {options.width} does not divide by twice --heads {options.heads}")
    if not options.prompt:
        parser.error("--prompt is empty: a sample needs a byte to begin with")
    return options


def prepare_folder(out: Path) -> None:
    """Make the output folder now: a run should not learn at its first save that it cannot."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"--out: cannot make {out}: {error.strerror}")
    if not os.access(out, os.W_OK):
        fail(f"--out: may not write in {out}")


def start_process_group(name: str | None) -> torch.device:
    """Choose this rank's device and start the process group: NCCL, gloo, or what else serves the device.

    Without a name the CPU where there are fewer accelerators than ranks: NCCL refuses two ranks on one.
    """
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    count = torch.accelerator.device_count()
    if found is not None and name is None and count < LOCAL_WORLD:
        say(f"{count} {found.type} for {LOCAL_WORLD} ranks: training on the CPU")
        found = None
    try:
        device = torch.device(name) if name else found or torch.device("cpu")
    except RuntimeError:
        fail(f"--device {name}: PyTorch knows no such device")
    if device.type != "cpu":
        if found is None or device.type != found.type:
            fail(f"--device {name}: what this machine has is {found.type if found else 'no accelerator'}")
        if count <= LOCAL_RANK:
            fail(f"a rank needs a device of its own, and there are {count}: start fewer, or use --device cpu")
        device = torch.device(device.type, LOCAL_RANK)
        torch.accelerator.set_device_index(LOCAL_RANK)
    backend = dist.get_default_backend_for_device(device.type)
    if "RANK" in os.environ:
        dist.init_process_group(backend, device_id=device if device.type != "cpu" else None)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


def check_ranks_agree(options: argparse.Namespace, corpus: Corpus, device: torch.device) -> None:
    """Machines may differ in their arguments or their Python: compare both before anything is trained."""
    shared = {name: value for name, value in vars(options).items() if name not in ("data", "out", "device")}
    mine = torch.tensor([zlib.crc32(repr(shared).encode()), corpus.fingerprint], device=device)
    gathered = [torch.empty_like(mine) for _ in range(WORLD)]
    dist.all_gather(gathered, mine)
    for rank, theirs in enumerate(gathered):
        for what, first, other in zip(("arguments", "text"), gathered[0].tolist(), theirs.tolist(), strict=True):
            if first != other:
                fail(f"rank {rank} was started with other {what} than rank 0: all machines need the same")
