"""The error index is what the source says: every code is in it, examples exist, and `fullshard explain` finds it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from fullshard.cli import explain
from fullshard.cli.main import main
from fullshard.errors import ConfigError

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs" / "_errors"))

import codes  # noqa: E402 - where they lie is known only now
import examples  # noqa: E402
import page  # noqa: E402

HOW = "make it anew: .venv/bin/python docs/_errors/page.py"


@pytest.fixture(scope="module")
def entries() -> list[page.Entry]:
    return page.entries()


def test_the_page_is_not_stale(entries: list[page.Entry]) -> None:
    """Numbers of lines may be older than the source: every change of a file moves them."""
    assert page.without_lines(page.PAGE.read_text()) == page.without_lines(page.page(entries)), HOW
    assert page.DATA.read_text() == page.data(entries), HOW


def test_the_page_has_a_section_for_every_code() -> None:
    raised = {site.code for site in codes.sites()}
    text = page.PAGE.read_text()
    assert sorted(re.findall(r"(?m)^### (\w+)$", text)) == sorted(raised)
    links = set(re.findall(r"\]\(#(\w+)\)", text))
    headings = {heading.lower() for heading in re.findall(r"(?m)^#+ (.+)$", text)}
    assert links <= headings, links - headings


def test_the_pages_links_lead_to_files() -> None:
    for target in set(re.findall(r"\]\(\.\./([^)#]+)(?:#L\d+)?\)", page.PAGE.read_text())):
        assert (ROOT / target).is_file(), target


def test_every_example_is_a_test() -> None:
    for code, test in examples.read_table().items():
        name = examples.function_of(test)
        assert name.startswith("test_") and name in examples.functions(test.partition("::")[0]), (code, test)


def test_examples_of_the_index_name_the_code_that_they_show() -> None:
    """A program in tests/errors says in its own text which error it shows; readers compare."""
    for code, test in examples.read_table().items():
        assert examples.shows(test, code), (code, test)


def test_of_a_table_the_row_of_the_code_is_quoted() -> None:
    row = examples.example("tests/errors/test_errors_of_formats.py::test_what_cannot_be_converted[K054]", "K054").source
    assert '"K054": too_short' in row and "def too_short" in row and "K051" not in row
    program = examples.example("tests/errors/test_errors_of_ranks.py::test_two_ranks[D007]", "D007").source
    assert "load_state_dict" in program and "D006" not in program and "run_ranks" not in program


def test_explain_prints_an_entry(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "K121"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("K121  CheckpointError") and "There is no checkpoint of this step." in told
    assert "store/load.py" in told and "docs/errors.md#k121" in told


@pytest.mark.parametrize("written", ["k121", "K121", " K121", "k121 "])
def test_a_code_is_found_however_it_is_written(written: str) -> None:
    assert explain.find(written)[0] == "K121"


@pytest.mark.parametrize("written", ["C999", "Q001", "x", "code", ""])
def test_an_unknown_code_is_refused_by_name(written: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        explain.find(written)
    assert caught.value.code == "C207" and caught.value.got == written
    assert main(["explain", written]) == 2
    told = capsys.readouterr().err.splitlines()
    assert told[0].startswith("fullshard: No error or warning") and "C207" in told[-1]
    assert [line.split(":")[0].strip() for line in told[1:]] == ["expected", "got", "remedy", "code"], "a line each"


def test_near_codes_are_named() -> None:
    with pytest.raises(ConfigError, match=r"such as .*P0"):
        explain.find("P999")


def test_everything_that_is_explained_can_be_printed(capsys: pytest.CaptureFixture[str]) -> None:
    for code in sorted({site.code for site in codes.sites()}):
        explain.show(*explain.find(str(code)))
        assert capsys.readouterr().out.startswith(f"{code}  ")
