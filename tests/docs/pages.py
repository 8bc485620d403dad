"""The project's pages as tests see them: blocks that run, commands, links and anchors.

`docs/guides/run.py` reads blocks, for readers who run a page by hand; here they are run on the ranks of the tests.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import os
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[2]
LEFT_OUT = {
    ".venv",
    ".git",
    "runs",
    "build",
    "dist",
    "_build",
    "project",
    "node_modules",
    ".pytest_cache",
    ".hypothesis",
}
COMMAND = re.compile(r"^(?:\$ )?((?:make|torchrun|fullshard|python|pytest|accelerate|\.venv/bin/python)\b.*)$")


@functools.cache
def reader() -> Any:
    """docs/guides/run.py as a module."""
    path = ROOT / "docs" / "guides" / "run.py"
    spec = importlib.util.spec_from_file_location("page_reader", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["page_reader"] = module
    spec.loader.exec_module(module)
    return module


def pages() -> list[Path]:
    """Every Markdown file of the project."""
    beside = {path.name for path in ROOT.glob(".venv*")}  # environments of other versions of torch, too
    found = [path for path in ROOT.rglob("*.md") if not (LEFT_OUT | beside) & set(path.relative_to(ROOT).parts)]
    return sorted(found)


@functools.cache
def blocks(page: Path) -> list[Any]:
    return reader().blocks(page.read_text())


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def files_of(page: Path) -> dict[str, str]:
    """The files that a page tells its reader to save."""
    return {block.file(): block.text for block in blocks(page) if block.file() is not None}


def prepare(page: Path, folder: Path) -> None:
    """A folder as a reader has it: the repository's, and the page's files."""
    for name in ("examples", "benchmarks", "docs", "tests", "src", "README.md", "Makefile"):
        (folder / name).symlink_to(ROOT / name)
    for name, text in files_of(page).items():
        (folder / name).write_text(text)


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[None]:
    """The working directory, and a process group that is there already."""
    import torch.distributed as dist

    before = Path.cwd()
    os.chdir(folder)
    try:
        with mock.patch.object(dist, "init_process_group"), mock.patch.object(dist, "destroy_process_group"):
            yield
    finally:
        os.chdir(before)


def run_program(page: Path, folder: Path) -> list[tuple[int, str, str]]:
    """Run a page's program on this rank: of each block with an output its line, what the page shows, what was said."""
    told: list[tuple[int, str, str]] = []
    names: dict[str, Any] = {"__name__": "__main__"}
    with inside(folder), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for block in blocks(page):
            if not block.runs():
                continue
            code = compile("\n" * block.line + block.text, str(page), "exec")  # a traceback has the page's lines
            with contextlib.redirect_stdout(io.StringIO()) as said:
                exec(code, names)
            if block.output is not None:
                told.append((block.line, block.output, said.getvalue()))
    return told


def commands_of(text: str) -> list[tuple[str, str]]:
    """The commands of a console block, each with the output that follows it."""
    found: list[tuple[str, str]] = []
    for part in re.split(r"^\$ ", text, flags=re.M)[1:]:
        lines = part.splitlines()
        taken = next(index for index, line in enumerate(lines) if not line.endswith("\\")) + 1
        found.append(("\n".join(lines[:taken]), "".join(line + "\n" for line in lines[taken:])))
    return found


def run_command(command: str, folder: Path) -> str:
    """What a command of a page prints; it has to end well."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    process = subprocess.Popen(
        ["bash", "-c", command],
        cwd=folder,
        env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "COLUMNS": "120"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        said, complaints = process.communicate(timeout=280)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # what it started, too
        raise
    assert process.returncode == 0, f"{command}\n{said}{complaints}"
    return said


def without_code(text: str) -> str:
    """A page's prose: no fenced blocks, no comments."""
    text = re.sub(r"^( *)(```+|~~~+).*?^\1\2[ \t]*$", "", text, flags=re.M | re.S)
    return re.sub(r"<!--.*?-->", "", text, flags=re.S)


@functools.cache
def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them, and its explicit ones; of a program its lines."""
    if page.suffix != ".md":
        return {f"L{line}" for line in range(1, page.read_text().count("\n") + 2)}
    prose = without_code(page.read_text())
    found: dict[str, int] = {}
    out = set(re.findall(r"<a (?:id|name)=\"([^\"]+)\"", prose)) | set(re.findall(r"^\(([\w-]+)\)=$", prose, re.M))
    for title in re.findall(r"^#{1,6} +(.*?) *#*$", prose, re.M):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).replace("`", "")
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        number = found.get(slug, 0)
        found[slug] = number + 1
        out.add(slug if number == 0 else f"{slug}-{number}")
    return out


def links(page: Path) -> list[str]:
    """The targets of a page's links and pictures."""
    prose = re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)", "code", without_code(page.read_text()), flags=re.S)
    found = re.findall(r"\]\(\s*<?([^()\s>]+(?:\([^()\s]*\))?)>?(?:\s+\"[^\"]*\")?\s*\)", prose)
    found += re.findall(r"^\[[^]]+\]:\s*(\S+)", prose, re.M)
    return found + re.findall(r"<(?:img|a)\b[^>]*?\b(?:src|href)=\"([^\"]+)\"", prose)


def broken_links(page: Path) -> list[str]:
    """The links of a page that lead nowhere in this repository."""
    wrong = []
    for target in links(page):
        if re.match(r"[a-z][a-z0-9+.-]*:", target):
            continue  # another site
        path, _, anchor = target.partition("#")
        if path.endswith((".html", "llms.txt", "llms-full.txt")) and page.is_relative_to(ROOT / "docs"):
            continue  # what the site makes, and checks
        there = (page.parent / path).resolve() if path else page
        if there.is_relative_to(ROOT / "docs" / "project"):
            wrong.append(f"{name_of(page)}: {target}: is only there once the site was built")
        elif not there.exists():
            wrong.append(f"{name_of(page)}: {target}: there is no such file")
        elif not there.is_relative_to(ROOT):
            wrong.append(f"{name_of(page)}: {target}: leads out of the repository")
        elif anchor and anchor not in anchors(there):
            wrong.append(f"{name_of(page)}: {target}: there is no such anchor")
    return wrong


def paths_named(page: Path) -> list[str]:
    """Files of the repository that a page names in code, `docs/verify.md` for instance."""
    prose = re.sub(r"^( *)(```+).*?^\1\2[ \t]*$", "", page.read_text(), flags=re.M | re.S)
    found = re.findall(r"`((?:docs|tests|src|examples|benchmarks|\.ci)/[\w./-]*)`", prose)
    return [path for path in found if "<" not in path]


def commands_named(page: Path) -> list[str]:
    """Every command that a page shows, in any block or in its text, run or not."""
    inline = re.findall(r"`([^`\n]+)`", without_code(page.read_text()))
    found = [match[1] for code in inline if (match := COMMAND.match(code))]
    for block in blocks(page):
        if block.language not in ("python", "text", "yaml"):
            joined = block.text.replace("\\\n", " ")
            found += [match[1] for line in joined.splitlines() if (match := COMMAND.match(line.strip()))]
    return found
