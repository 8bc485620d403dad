"""The pages say what is so: their programs run, what they print is what they show, links lead somewhere.

Pages of docs/ and README.md are programs on two ranks (`WHOLE`); docs/adopt.md and docs/clients are run by
tests/clients, docs/errors.md by tests/test_topics.py.
docs/guides/run.py says how a page is read.
"""

from __future__ import annotations

import doctest
import importlib.util
import re
import weakref
from pathlib import Path
from typing import Any

import pages
import pytest
import torch
from pages import ROOT, blocks, name_of
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = pytest.mark.gloo("each program begins its own group")

BY_CLIENTS = {"docs/adopt.md", *(name_of(page) for page in (ROOT / "docs" / "clients").glob("*.md"))}
BY_ERRORS = {"docs/errors.md", "src/fullshard/cli/errors.md"}
WHOLE = [
    page
    for page in pages.pages()
    if name_of(page) not in BY_CLIENTS | BY_ERRORS and any(block.runs() for block in blocks(page))
]
CONSOLE = [
    pytest.param(page, every, id=page.stem + " slow" * every, marks=[pytest.mark.slow] * every)
    for page in pages.pages()
    for every in (False, True)
    if any(block.language == "console" and block.mark == "slow" * every for block in blocks(page))
]
CHECKER = doctest.OutputChecker()
AS_SHOWN = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def assert_as_shown(wanted: str, said: str, where: str) -> None:
    wanted = wanted.strip("\n") + "\n"
    said = said.strip("\n") + "\n"
    assert CHECKER.check_output(wanted, said, AS_SHOWN), f"{where} shows\n{wanted}and this was printed:\n{said}"


@pytest.mark.parametrize("page", WHOLE, ids=name_of)
def test_programs_run_and_print_what_is_shown(run_ranks: Any, tmp_path: Path, page: Path) -> None:
    pages.prepare(page, tmp_path)
    shown = run_ranks(pages.run_program, page, tmp_path, timeout=120)[0]
    for line, wanted, said in shown:
        assert_as_shown(wanted, said, f"{name_of(page)}:{line}")


@pytest.mark.parametrize(("page", "every"), CONSOLE)
def test_commands_run_and_print_what_is_shown(tmp_path: Path, page: Path, every: bool) -> None:
    pages.prepare(page, tmp_path)
    for block in blocks(page):
        if block.language != "console" or block.mark.startswith("not run:") or (block.mark == "slow" and not every):
            continue
        for command, wanted in pages.commands_of(block.text):
            said = pages.run_command(command, tmp_path)
            assert_as_shown(wanted, said, f"{name_of(page)}:{block.line}: {command}")


def test_every_block_is_run_by_some_test_or_says_why_not() -> None:
    known = {"python", "console", "text", "yaml", ""}  # and directives of the site: {toctree}
    for page in pages.pages():
        for block in blocks(page):
            where = f"{name_of(page)}:{block.line}"
            assert block.language in known or block.language.startswith("{"), (
                f"{where}: a block of a kind that no test looks at: {block.language}"
            )
            told = re.fullmatch(r"|slow|file: [\w.]+|not run: .{10,}", block.mark)
            assert told, f"{where}: what is <!-- {block.mark} --> to say?"
            if block.language == "console":
                assert pages.commands_of(block.text), f"{where}: no line begins with '$ '"


def test_files_that_pages_show_are_used_by_their_commands() -> None:
    for page in pages.pages():
        told = "\n".join(block.text for block in blocks(page) if block.language == "console")
        for name in pages.files_of(page):
            assert name in told, f"{name_of(page)}: no command uses {name}"
            before = page.read_text().partition(f"<!-- file: {name} -->")[0].rstrip()
            assert before.endswith(f"`{name}`:"), f"{name_of(page)}: a reader does not see that the block is {name}"


@pytest.mark.parametrize("page", pages.pages(), ids=name_of)
def test_links_and_anchors_lead_somewhere(page: Path) -> None:
    wrong = pages.broken_links(page)
    wrong += [f"{name_of(page)}: `{path}`: not there" for path in pages.paths_named(page) if not (ROOT / path).exists()]
    assert not wrong, "\n".join(wrong)


def test_commands_name_what_there_is() -> None:
    from fullshard.cli.main import COMMANDS

    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    wrong, seen = [], 0
    for page in pages.pages():
        files = pages.files_of(page)
        for command in pages.commands_named(page):
            seen += 1
            command = command.partition(" # ")[0]
            words = command.split()
            if words[0] == "make" and words[1:] and words[1] not in targets:
                wrong.append(f"{name_of(page)}: make has no {words[1]}")
            if words[0] == "fullshard" and words[1:] and re.fullmatch("[a-z-]+", words[1]) and words[1] not in COMMANDS:
                wrong.append(f"{name_of(page)}: fullshard has no command {words[1]}")
            for path in re.findall(r"(?:examples|benchmarks|tests|docs)/[\w./-]*\w", command):
                if not (ROOT / path).exists():
                    wrong.append(f"{name_of(page)}: {path} is not there")
                elif path.endswith(".py") and "pytest" not in words and words[0] != "fullshard":
                    wrong += [f"{name_of(page)}: {path} has no {one}" for one in unknown_options(command, path)]
            wrong += [
                f"{name_of(page)}: the page has no {one}"
                for one in re.findall(r"(?<![\w/.-])([a-z]\w*\.py)\b", command)
                if name_of(page).startswith("docs/guides") and one not in files
            ]
    assert not wrong, "\n".join(wrong)
    assert seen > 30


def test_the_help_of_each_command_shows_how_it_is_called_and_fits_a_screen(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from fullshard.cli.main import COMMANDS, main

    monkeypatch.setenv("COLUMNS", "80")
    for name in COMMANDS:
        assert main([name, "--help"]) == 0
        _, _, told = capsys.readouterr().out.partition("\n")  # without the line of the usage
        assert f"fullshard {name} " in told, name
        assert sum(1 + max(len(line) - 1, 0) // 80 for line in told.split("\n")) <= 40, name


def unknown_options(command: str, path: str) -> list[str]:
    """Options after a program's name that neither it nor what lies beside it mentions."""
    given = re.findall(r"(?<=\s)(--[a-z][\w-]*)", command.partition(path)[2])
    source = "".join(one.read_text() for one in (ROOT / path).parent.glob("*.py"))
    return [option for option in given if f'"{option}"' not in source]


def test_the_picture_of_a_step_is_of_this_engine(run_ranks: Any) -> None:
    step = picture("step")
    recorded = run_ranks(record_step)
    drawn = step.read(step.PICTURE.read_text())
    assert step.draw(drawn) == step.PICTURE.read_text(), "run docs/guides/step.py again"
    assert by_unit(drawn) == by_unit(recorded[0]) == by_unit(recorded[1])
    assert len(drawn) == 33


def by_unit(steps: list[tuple[str, str, int, int]]) -> dict[str, list[tuple[str, int]]]:
    """What happens to each unit; where a result comes among other units' events is the network's to say."""
    found: dict[str, list[tuple[str, int]]] = {}
    for verb, unit, nbytes, _ in steps:
        found.setdefault(unit, []).append((verb, nbytes))
    return found


def test_the_picture_of_what_a_rank_holds_is_measured() -> None:
    holds = picture("holds")
    panels = holds.measure()
    assert holds.PICTURE.read_text() == holds.draw(panels), "run docs/guides/holds.py again"
    told = [f"{max(map(sum, moments)) / 1e6:.1f} MB" for moments in panels.values()]
    alternative = re.search(r"!\[([^]]*)\]\(docs/guides/holds.svg\)", (ROOT / "README.md").read_text())
    assert alternative is not None and re.findall(r"[\d.]+ MB", alternative[1]) == told


def test_a_loss_holds_three_times_its_logits() -> None:
    """As docs/guides/strategy.md says: 12 bytes per token and word at the beginning of backward."""
    tokens, words, width = 256, 5000, 8
    live: dict[int, int] = {}
    most = 0

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal most
            out = function(*args, **(kwargs or {}))
            for one in out if isinstance(out, tuple) else [out]:
                if isinstance(one, torch.Tensor) and (key := one.untyped_storage()._cdata) not in live:
                    live[key] = one.untyped_storage().nbytes()
                    weakref.finalize(one.untyped_storage(), live.pop, key)
            most = max(most, sum(live.values()))
            return out

    hidden = torch.randn(tokens, width, dtype=torch.bfloat16)
    head = torch.nn.Linear(width, words, bias=False, dtype=torch.bfloat16)
    with Counting():
        loss = torch.nn.functional.cross_entropy(head(hidden * 1).float(), torch.randint(words, (tokens,)))
        kept = sum(live.values())
        loss.backward()
    assert kept == pytest.approx(4 * tokens * words, rel=0.05)
    assert most == pytest.approx(12 * tokens * words, rel=0.05)


@pytest.mark.parametrize(
    ("row", "file", "heading", "peer", "column"),
    [
        ("speed of a training step", "2026-11-29-throughput", "throughput: training step [s]", "rows+view", 5),
        ("host cost of a block", "2026-11-28-all", "host_cost: host cost over plain", "rows", 5),
        ("host time of `AdamW.step()`", "2026-11-30-optimizer_step", "optimizer_step: AdamW step, loop", "rows", 6),
        ("peak live memory", "2026-11-28-all", "live_memory: peak live memory", "rows", 5),
    ],
)
def test_figures_of_the_readme_are_those_measured(row: str, file: str, heading: str, peer: str, column: int) -> None:
    line = next(line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith(f"| {row}"))
    results = (ROOT / "benchmarks" / "results" / f"{file}.md").read_text()
    part = results.partition(f"## {heading}")[2]
    measured = next(line for line in part.splitlines() if line.startswith(f"| {peer} |")).split("|")[column]
    assert line.split("|")[2].strip().removesuffix("x") == measured.split("/")[0].strip()


def record_step() -> list[tuple[str, str, int, int]]:
    step = picture("step")
    facts: list[tuple[str, str, int, int]] = step.facts(step.record())
    return facts


def picture(name: str) -> Any:
    """A program beside the guides, as a module."""
    spec = importlib.util.spec_from_file_location(f"guide_{name}", ROOT / "docs" / "guides" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
