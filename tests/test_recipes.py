"""The programs of examples/recipes, each on two ranks at a tiny size, as docs/recipes.md tells them."""

from __future__ import annotations

import importlib
import json
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh

import fullshard
import memory_ranks
from training import assert_same

pytestmark = pytest.mark.xdist_group("transformers")  # which takes seconds to import, on every rank
ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "examples" / "recipes"
TINY = ["--rows", "4", "--length", "32"]


@pytest.fixture(autouse=True, scope="module")
def other_folders_have_files_of_these_names() -> Iterator[None]:
    yield
    if str(RECIPES) in sys.path:
        sys.path.remove(str(RECIPES))
    for file in RECIPES.glob("*.py"):
        sys.modules.pop(file.stem, None)


def program(name: str) -> Any:
    """A recipe as a module; its folder is where it finds what it imports."""
    if str(RECIPES) not in sys.path:
        sys.path.insert(0, str(RECIPES))
    return importlib.import_module(name)


def run(name: str, *arguments: str) -> Any:
    """A recipe on this rank."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return program(name).main(list(arguments))


def write_config(folder: Path) -> Path:
    folder.mkdir()
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = {"model_type": "llama", "vocab_size": 256, "bos_token_id": None, "eos_token_id": None, **sizes}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """What the first recipe wrote, in six steps, of which the last two after it was started again."""
    folder = tmp_path_factory.mktemp("recipes")
    config, out = write_config(folder / "config"), folder / "run"
    given = ["--config", str(config), *TINY]
    straight = str(folder / "straight")
    told = [
        memory_ranks.run(run, "pretrain", "--out", where, "--steps", steps, *given, timeout=120)
        for where, steps in ((str(out), "4"), (str(out), "6"), (straight, "6"))
    ]
    return SimpleNamespace(out=out, model=out / "model-6", losses=told[:2], straight=told[2])


def test_pretraining_learns_and_goes_on_where_it_was(pretrained: SimpleNamespace) -> None:
    (first, last), straight = pretrained.losses, pretrained.straight
    assert first[0] == first[1] and last[0] == last[1]
    assert len(first[0]) == 4 and len(last[0]) == 2
    assert first[0] + last[0] == pytest.approx(straight[0], rel=1e-6)
    assert last[0][-1] < first[0][0] - 0.1


def test_lora(run_ranks, pretrained: SimpleNamespace, tmp_path: Path) -> None:
    out = str(tmp_path / "adapter")
    losses = run_ranks(run, "lora", "--base", str(pretrained.model), "--out", out, "--steps", "4", *TINY, timeout=120)
    assert losses[0] == losses[1] and losses[0][0] == pytest.approx(pretrained.losses[1][0][-1], rel=0.2)
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["r"] == 8
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    moved = [bool(tensor.any()) for name, tensor in saved.items() if "lora_B" in name]
    assert len(moved) == 14 and all(moved)  # seven layers of each of two blocks


def test_sft(run_ranks, pretrained: SimpleNamespace, tmp_path: Path) -> None:
    losses = run_ranks(
        run, "sft", "--base", str(pretrained.model), "--out", str(tmp_path / "sft"), "--steps", "6",
        "--rows", "8", "--length", "64", timeout=120,
    )  # fmt: skip
    assert losses[0] == losses[1] and losses[0][-1] < losses[0][0]
    assert (tmp_path / "sft" / "model.safetensors").exists()


def test_answers_alone_count() -> None:
    tokens, labels = program("sft").padded([(b"def f():", b"Yes.\n"), (b"x" * 40, b"never")], 16)
    assert bytes(tokens[0].tolist()) == b"def f():\nYes.\n\0\0"
    assert bytes(labels[0][labels[0] >= 0].tolist()) == b"Yes.\n"
    assert bool((labels[1] == -100).all())


def test_export_and_generate(run_ranks, pretrained: SimpleNamespace, tmp_path: Path) -> None:
    told = run_ranks(
        run, "export_and_generate", "--run", str(pretrained.out), "--out", str(tmp_path / "exported"), "--bytes", "6",
        timeout=120,
    )  # fmt: skip
    assert told[0] == told[1] and told[0][0] == told[0][1]
    assert len(told[0][0]) == 10 and told[0][0].startswith(b"def ")


def test_the_average_is_one_of_weights_and_is_taken_up_again(run_ranks, tmp_path: Path) -> None:
    first = run_ranks(run, "ema", "--out", str(tmp_path / "run"), "--steps", "5")
    again = run_ranks(run, "ema", "--out", str(tmp_path / "run"), "--steps", "10")
    straight = run_ranks(run, "ema", "--out", str(tmp_path / "straight"), "--steps", "10")
    assert again == straight and again[0] != first[0]
    assert first[0][1] != first[0][0]


def test_a_mixture_of_experts_is_that_of_one_process(run_ranks) -> None:
    assert_same(run_ranks(mixture))


def mixture() -> list[str]:
    """Three steps against the same model in one process, on the batches of all ranks."""
    moe = program("moe")
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("data", "expert"))
    alone = init_device_mesh("cpu", (world, 1), mesh_dim_names=("data", "expert"))
    model, plain = moe.Model(mesh), moe.Model(alone)
    moe.shard(model, mesh)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, plain)]
    for step in range(3):
        for one, ranks in ((model, [dist.get_rank()]), (plain, range(world))):
            inputs, targets = (torch.cat(parts) for parts in zip(*[moe.rows(step, r) for r in ranks], strict=True))
            (one(inputs) - targets).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    problems = []
    for name, wanted in plain.named_parameters():
        found: Any = model.get_parameter(name)
        distance = (found.full_tensor() - wanted).norm() / wanted.norm()
        problems += [f"{name} is off by {distance:.1e}"] if distance > 1e-5 else []
    owner = fullshard.owner_of(model, model.blocks[0].experts)
    held = owner.buckets[0].rank_bytes * world
    problems += [] if held == plain.blocks[0].experts.weight.nbytes else [f"experts take {held} bytes on all ranks"]
    return problems


def test_mixtures_run_as_told(run_ranks) -> None:
    losses = run_ranks(run, "moe", "--steps", "30")
    assert losses[0] == losses[1] and sum(losses[0][-5:]) < 0.5 * sum(losses[0][:5])


def test_the_page_tells_of_every_recipe() -> None:
    page = (ROOT / "docs" / "recipes.md").read_text()
    named = set(re.findall(r"\]\(\.\./examples/([\w/.]+\.(?:py|yaml|sbatch|sh))\)", page))
    there = {str(path.relative_to(ROOT / "examples")) for path in RECIPES.glob("*.py")}
    assert there <= named, there - named
    missing = [name for name in named if not (ROOT / "examples" / name).exists()]
    assert not missing, missing
