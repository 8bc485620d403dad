"""Every program of docs/clients/{transformers,accelerate,peft,trl}.md, as it stands, on two ranks."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import fullshard

FOLDER = Path(__file__).parents[2] / "docs" / "clients"
PAGES = ("accelerate", "peft", "transformers", "trl")
NEEDS = {("peft", "A quantised base"): "torchao"}


def programs() -> dict[tuple[str, str], list[str]]:
    """By page and section; each snippet is a program."""
    found: dict[tuple[str, str], list[str]] = {}
    for page in PAGES:
        for part in (FOLDER / f"{page}.md").read_text().split("\n## ")[1:]:
            title, _, body = part.partition("\n")
            if snippets := re.findall(r"```python\n(.*?)```", body, re.DOTALL):
                found[page, title] = snippets
    return found


def test_each_page_has_both_ways_and_its_limits():
    for page in PAGES:
        assert {(page, "Adopted"), (page, "Without adopting")} <= programs().keys()
        assert (FOLDER / f"{page}.md").read_text().split("\n## ")[-1].startswith("Limits")


@pytest.mark.parametrize(("page", "title"), programs())
def test_programs_run(run_adopted, run_clients, tmp_path, page, title):
    if (page, title) in NEEDS:
        pytest.importorskip(NEEDS[page, title], reason=f"needs the extra {NEEDS[page, title]}")
    run = run_adopted if title == "Adopted" else run_clients
    for number in range(len(programs()[page, title])):
        assert all(run(program, page, title, number, str(tmp_path)))


def program(page: str, title: str, number: int, folder: str) -> bool:
    names: dict[str, Any] = runpy.run_path(str(FOLDER / "at_hand.py")) | {"__name__": "__main__", "folder": folder}
    if page == "peft" and dist.get_rank() == 0:
        names["language_model"]().save_pretrained(f"{folder}/base")
    dist.barrier()
    exec(compile(programs()[page, title][number], f"{page}: {title}", "exec"), names)
    kinds = (fullshard.FSDPModule, fullshard.FullyShardedDataParallel)
    assert sum(isinstance(module, kinds) for module in names["model"].modules()) >= 3
    return True
