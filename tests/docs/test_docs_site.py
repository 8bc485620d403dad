"""What the site's own extensions make of the project's pages: copies, links, words. `make docs` builds the whole."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from checked import faults  # docs/_ext
from outside import copied, page_of, page_of_link
from vocabulary import PLAIN, pattern, words

ROOT = Path(__file__).parents[2]
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()


def test_every_row_of_the_vocabulary_is_in_the_glossary():
    found = words(ARCHITECTURE)
    _, table = ARCHITECTURE.split("| word | meaning |")
    assert 20 <= len(found) == table.partition("\n\n")[0].count("\n") - 1
    assert found["unit"] == "the modules whose parameters are gathered together, usually one transformer block"
    assert set(found) >= PLAIN, "words without hover are words of the table"
    assert all(found.values())


def test_every_meaning_reads_alone():
    """A hover shows one meaning without the row above it: no word of it may point there."""
    for word, meaning in words(ARCHITECTURE).items():
        assert re.fullmatch(r"[\w -]+", word), f"{word}: a row for each word"
        first = re.findall(r"\w+", meaning)[0].lower()
        assert first not in {"it", "its", "they", "one", "ones", "that", "these"}, f"{word}: {meaning}"
        assert not re.match(r"all of them|the same\b|the (part|process|file) beside it", meaning), f"{word}: {meaning}"


def test_a_word_is_told_as_a_whole_in_singular_and_plural():
    matches = pattern(words(ARCHITECTURE))
    text = "Units and one bucket, a sharded parameter; a united shard-like full run."
    assert [found[0] for found in matches.finditer(text)] == ["Units", "bucket", "sharded parameter", "shard"]


@pytest.mark.parametrize(
    ("file", "page"),
    [
        ("src/fullshard/runtime/root.py", "reference/fullshard/runtime/root.py"),
        ("src/fullshard/runtime", "reference/fullshard/runtime/index"),
        ("examples/elastic.py", "reference/examples/elastic.py"),
        ("docs/padding.py", "reference/docs/padding.py"),
        ("benchmarks/results/2026-11-21-all.md", "project/results/2026-11-21-all"),
        ("benchmarks/results", "project/results"),
        ("CHANGELOG.md", "project/changelog"),
        ("examples/cluster/slurm.sbatch", None),
    ],
)
def test_files_outside_docs_have_pages(file, page):
    assert page_of(file) == page
    assert (ROOT / file).exists()


def test_links_as_myst_hands_them_over_are_found():
    docs = ROOT / "docs"
    assert page_of_link("../examples/elastic.py", docs, "recipes") == "reference/examples/elastic.py"
    assert page_of_link("/../examples/elastic.py", docs, "guides/x") == "reference/examples/elastic.py"
    given = str(ROOT / "benchmarks/results/2026-11-21-all")
    assert page_of_link(given, docs, "recipes") == "project/results/2026-11-21-all"
    assert page_of_link("../no/such.py", docs, "recipes") is None


def test_a_copied_pages_links_are_moved_along():
    text = "[a](docs/adopt.md#x) [b](https://example.org/y.md) [c](#here) [d](examples/elastic.py)"
    moved = "[a](../adopt.md#x) [b](https://example.org/y.md) [c](#here) [d](../../examples/elastic.py)"
    assert copied(text, "README.md", "project/readme") == moved


def test_every_page_is_in_the_first_pages_tree():
    """Sphinx says so, too; here it is told in a second."""
    index = (ROOT / "docs" / "index.md").read_text()
    listed = [line for tree in re.findall(r"```\{toctree\}(.*?)```", index, re.S) for line in tree.split("\n")]
    docs = ROOT / "docs"
    for page in [*docs.glob("*.md"), *docs.glob("guides/*.md"), *docs.glob("clients/*.md")]:
        name = page.relative_to(docs).with_suffix("").as_posix()
        assert name in ["index", *listed] or any(page.match(f"{one}.md") for one in listed if "*" in one), page


def test_the_page_of_files_names_every_package():
    text = (ROOT / "docs" / "reference.md").read_text()
    packages = {path.parent.name for path in (ROOT / "src" / "fullshard").glob("*/__init__.py")}
    assert set(re.findall(r"\]\(\.\./src/fullshard/(\w+)\)", text)) == packages


def test_the_check_of_links_sees_what_is_wrong(tmp_path):
    (tmp_path / "a.html").write_text(
        '<a href="b.html">x</a><a href="#no">y</a><p id="yes"></p><a href="a.html#yes">z</a>'
    )
    (tmp_path / "c.html").write_text(
        '<script src="https://cdn.example/x.js"></script><a href="https://a.example">b</a>'
    )
    (tmp_path / "s.css").write_text("@import 'https://cdn.example/x.css'; p { background: url(//cdn.example/y.png) }")
    found = sorted(faults(tmp_path))
    assert [one.split(" ")[0] for one in found] == ["a.html", "a.html", "c.html", "s.css", "s.css"]
