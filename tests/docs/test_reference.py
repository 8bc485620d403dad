"""The reference of a package: what is read from source, what pages say of it, and what the command writes where."""

from __future__ import annotations

import ast
import builtins
import json
import re
import subprocess
import sys
from html import unescape
from html.parser import HTMLParser
from importlib.metadata import version
from pathlib import Path

import pytest
import reference
from checked import faults
from reading import Package, locate, sentence

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(odd_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out") / "site"
    assert reference.main([str(odd_folder), "--out", str(out)]) == 1, "three files are broken"
    return out


@pytest.fixture(scope="module")
def own() -> Package:
    """This project's own source, as the site shows it."""
    return locate(str(ROOT / "src" / "fullshard"))


def index(site: Path, file: str) -> dict[str, list[str]]:
    """A file's keyword index: for each name the text of its cells."""
    text = (site / f"odd/{file}.html").read_text().partition("<h2>Keyword index</h2>")[2].partition("</section>")[0]
    rows = [re.findall(r"<td>(.*?)</td>", row) for row in re.findall(r"<tr><td>.*?</tr>", text, re.S)]
    plain = [[unescape(re.sub("<[^>]*>", "", cell)) for cell in row] for row in rows]
    return {row[0]: row[1:] for row in plain}


# -- what is read


def test_broken_files_are_named_and_the_rest_is_read(odd):
    broken = {path: file.fault for path, file in odd.files.items() if file.fault}
    assert set(broken) == {"odd/broken.py", "odd/not_utf8.py", "odd/nul.py"}
    assert broken["odd/broken.py"].startswith("odd/broken.py:4: ")
    assert "def right" in odd.files["odd/broken.py"].text, "its page shows the text all the same"


def test_encodings(odd):
    assert odd.files["odd/latin.py"].text.endswith("'é'\n")
    assert odd.files["odd/bom.py"].text == "BOM = 1\nNEXT = BOM\n"


MEANT = {
    ("wide.py", 2, "é"): ("wide.py", "é", True),
    ("star_user.py", 2, "starred"): ("names.py", "starred", True),
    ("circle_a.py", 5, "stop"): ("circle_b.py", "Beta.stop", True),  # by the annotation of `other`
    ("circle_b.py", 4, "Alpha"): ("circle_a.py", "Alpha", True),
    ("hint.py", 5, "shared"): ("names.py", "Base.shared", True),  # inherited
    ("hint.py", 6, "shared"): ("names.py", "Base.shared", True),  # by the annotation of a parameter
    ("hint.py", 7, "starred"): ("names.py", "starred", True),  # of a module under another name
    ("hint.py", 8, "use"): ("hint.py", "Child.use", True),  # of what a call makes
    ("hint.py", 10, "use"): ("hint.py", "Child.use", False),  # a guess, which says so
    ("hint.py", 10, "append"): None,  # lists have it: no guess
    ("star_circle.py", 2, "missing"): None,
}


def test_names_mean_what_they_are_imported_annotated_derived_or_called_as(odd):
    for (path, line, name), wanted in MEANT.items():
        file = odd.files[f"odd/{path}"]
        at = [
            (entry, sure) for (number, _), (entry, sure) in file.links.items() if (number, entry.name) == (line, name)
        ]
        found = [(entry.file.path.removeprefix("odd/"), entry.qualified, sure) for entry, sure in at]
        assert found == ([] if wanted is None else [wanted]), (path, line, name)


def test_every_link_stands_at_the_name_that_it_is_of(odd, own):
    """A link of an imported name may stand at the name that it was imported as."""
    for package in (odd, own):
        for file in package.files.values():
            lines = file.text.split("\n")
            known = {entry.name for entry in file.entries}
            for (line, column), (entry, _) in file.links.items():
                at = re.match(r"\w+", lines[line - 1].encode()[column:].decode())
                assert at is not None and (at[0] == entry.name or at[0] in known), (file.path, line, entry.qualified)


def test_every_identifier_is_in_its_files_index(odd):
    """Against the tree: whatever is a name, attribute, parameter or definition in it."""
    for path, file in odd.files.items():
        wanted = set()
        for node in ast.walk(ast.parse("" if file.fault else file.text)):
            keys = ("id", "attr", "name") + ("arg",) * isinstance(node, ast.arg)
            wanted |= {getattr(node, key) for key in keys if isinstance(getattr(node, key, None), str)}
        linked = {entry.name for entry, _ in file.links.values()}
        listed = {part for entry in file.entries for part in f"{entry.qualified}.{entry.written}".split(".")} | linked
        assert wanted - {"*", "self", "Any", *dir(builtins)} <= listed, path


def test_an_index_says_where_else_a_name_is_used(odd):
    starred = odd.find("odd.names.starred")
    assert {path: set(lines) for path, lines in starred.uses.items()} == {"odd/hint.py": {7}, "odd/star_user.py": {2}}
    assert odd.entries["odd.names.starred.one"].uses == {"odd/names.py": {2: True}}


def test_files_know_what_they_import_and_who_imports_them(odd):
    assert odd.files["odd/circle_a.py"].imports == {"odd/circle_b.py": [("Beta", 1)]}
    users = ["odd/__init__.py", "odd/hint.py", "odd/spaced/deep/inside.py", "odd/star_user.py"]
    assert sorted(odd.files["odd/names.py"].imported_by) == users
    assert odd.files["odd/spaced/deep/inside.py"].module == "odd.spaced.deep.inside"


def test_a_package_inside_another_is_known_by_its_whole_name(tmp_path):
    inner = tmp_path / "outer" / "inner"
    (inner / "deep").mkdir(parents=True)
    for folder in (inner.parent, inner, inner / "deep"):
        (folder / "__init__.py").touch()
    (inner / "a.py").write_text("VALUE = 1\n")
    (inner / "b.py").write_text("import outer.inner.a\nprint(outer.inner.a.VALUE)\n")
    (inner / "deep" / "c.py").write_text("from outer.inner import a\nfrom ...inner.b import outer\n")
    found = locate(str(inner))
    assert found.files["inner/deep/c.py"].module == "outer.inner.deep.c"
    assert list(found.files["inner/b.py"].imports) == ["inner/a.py"]
    assert list(found.files["inner/deep/c.py"].imports) == ["inner/a.py", "inner/b.py"]
    assert found.find("outer.inner.a.VALUE").uses == {"inner/b.py": {2: True}}


def test_all_dependencies_within_a_part_of_an_installed_package_are_found():
    fsdp = locate("torch.distributed.fsdp")
    assert all(file.module.startswith("torch.distributed.fsdp") for file in fsdp.files.values())
    count = sum(len(file.imports) for file in fsdp.files.values())
    assert (count == 86) if version("torch").startswith("2.13.") else count > 80


def test_reading_imports_nothing(tmp_path, monkeypatch):
    (tmp_path / "loud").mkdir()
    (tmp_path / "loud" / "__init__.py").write_text("raise SystemExit('this was run')\n")
    (tmp_path / "loud" / "inner.py").write_text("import os; os.abort()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for given in ("loud", "loud.inner", str(tmp_path / "loud")):
        assert locate(given).files
    assert "loud" not in sys.modules


# -- what pages say


def test_every_file_has_a_purpose_and_every_name_a_meaning(odd, own):
    for package in (odd, own):
        writer = reference.Writer(package)
        for file in package.files.values():
            assert re.fullmatch(r"\S.*[.!?:)`\w]", file.purpose) and "\n" not in file.purpose, file.path
            for entry in file.entries:
                assert writer.meaning(entry).strip("` "), (file.path, entry.qualified)


def test_the_first_sentence_of_a_text():
    assert sentence("Do it, e.g. Now.\nThen Rest.\n\nMore.") == "Do it, e.g. Now."
    assert sentence("One line. `code` follows.") == "One line."
    assert sentence("Kinds:\n- one.\n- two.") == "Kinds:"
    assert sentence("Version 1.2 of it\nand no dot") == "Version 1.2 of it and no dot"


def test_fields_members_and_parameters_are_listed_with_what_they_mean(site):
    names = index(site, "fields.py")
    meanings = {name: cells[0] for name, cells in names.items()}
    wanted = {
        "Colour.RED": "of blood", "Colour.BLUE": "BLUE = 2", "Point": "A point.", "Point.x": "where it lies.",
        "Point.y": "where it lies.", "Point.name": "What it is called.", "Pair.left": "left: int",
        "Pair.right": "right = None", "Plain.count": "count = 0", "Plain.late": "late = count + by",
        "Plain.grow": "Grow it.", "Plain.grow.by": "how much.", "Plain.grow.how": "how = None",
    }  # fmt: skip
    assert {name: meanings[name].replace(": Any", "") for name in wanted} == wanted
    assert names["Plain.late"][1] == "34" and names["Plain.count"][1:] == ["27", "34"]
    assert not {"self", "Any"} & {name.rpartition(".")[2] for name in names}
    definitions = (site / "odd/fields.py.html").read_text().partition("<h2>Keyword index")[0]
    for line, field in ((7, "RED = 1"), (17, "x: int"), (23, "left: int"), (24, "right = None"), (27, "count = 0")):
        assert f'<dt><a href="#L{line}"><code>{field}</code></a></dt>' in definitions
    assert "grow(by: int, how=None)</code>" in definitions and not re.search("<d[dt]>.*right.*<dd>", definitions)


def test_roles_are_links_or_plain_code(site):
    text = (site / "odd/fields.py.html").read_text().partition('id="roles"')[2].partition("</section>")[0]
    assert '<a href="#Point"><code>Point</code></a>' in text
    assert all(f"<code>{name}</code>" in text for name in ("shared", "a text", "gone")) and ":class:" not in text


def test_docstrings_become_html(odd):
    writer = reference.Writer(odd)
    text = """Do it.

    for one in two:
        three

Text that names things:
  one  two

- first
- second

.. note:: Take care.

>>> print(1)

Args:
    rank: who asks;
        the second line
    *rest (int): others

Raises:
    ValueError: never
"""
    html = writer.docstring(reference.griffe.Docstring(text))
    assert "<pre><code>one  two\n</code></pre>" in html
    assert "<pre><code>for one in two:\n    three\n</code></pre>" in html and "<li>first</li>" in html
    assert "<strong>Note:</strong> Take care." in html and "&gt;&gt;&gt; print(1)" in html
    assert "<li><code>rank</code>: who asks;\nthe second line</li>" in html and "<code>*rest</code>: others" in html
    assert '<p class="head">Raises</p>\n<ul><li><code>ValueError</code>: never</li></ul>' in html


def test_every_link_leads_somewhere_and_nothing_is_loaded_from_the_network(site):
    assert list(faults(site)) == []


class Balanced(HTMLParser):
    """Fails where tags do not nest."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.ids += [value for key, value in attrs if key == "id"]
        if tag not in ("meta", "link", "br", "wbr", "input", "hr"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, (tag, self.getpos())


def test_pages_are_sound_html_and_markup_in_source_is_text(site):
    for path in site.rglob("*.html"):
        reader = Balanced()
        reader.feed(path.read_text())
        assert not reader.open and len(reader.ids) == len(set(reader.ids)), path
    text = (site / "odd/markup.py.html").read_text()
    assert "<script>alert" not in text and "&lt;script&gt;alert(1)" in text


def test_the_source_on_a_page_is_the_source(site, odd):
    for path, file in odd.files.items():
        shown = (site / f"{path}.html").read_text().partition('<div class="highlight source"><pre>')[2]
        lines = re.findall(r'<span class="line" id="L(\d+)"><a class="ln"[^>]*>[ \d]*</a> (.*)</span>\n', shown)
        text = "".join(unescape(re.sub("<[^>]*>", "", line)) + "\n" for _, line in lines)
        assert text.rstrip("\n") == file.text.rstrip("\n"), path
        assert [int(number) for number, _ in lines] == list(range(1, len(lines) + 1))
    text = (site / "odd/hint.py.html").read_text()
    assert '<a href="names.py.html#Base.shared" title="method Base.shared">shared</a>' in text
    assert '<a class="guess" href="#Child.use" title="method Child.use">use</a>' in text


def test_the_searchs_data_has_every_name(site, odd):
    data = json.loads((site / "names-data.js").read_text().removeprefix("window.NAMES = ").rstrip(";\n"))
    found = {(name, kind, data["files"][file]) for name, kind, file, _, _ in data["names"]}
    assert ("starred", "function", "odd/names.py") in found and ("Colour.RED", "attribute", "odd/fields.py") in found


# -- the command


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "docs" / "_ext" / "reference.py", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_an_installed_package_and_a_file_are_documented(tmp_path):
    done = run("iniconfig", "--out", tmp_path / "a")
    assert done.returncode == 0 and "could not be parsed" in done.stdout and not done.stderr
    (tmp_path / "one.py").write_text("def f(): pass\n")
    assert reference.main([str(tmp_path / "one.py"), "--out", str(tmp_path / "b")]) == 0
    assert list(faults(tmp_path / "a")) == list(faults(tmp_path / "b")) == []
    assert (tmp_path / "a/iniconfig/__init__.py.html").exists() and (tmp_path / "b/one.py.html").exists()


@pytest.mark.parametrize("given", ["no.such.package", "./no-such", "sys", "."])
def test_what_is_not_there_is_refused(given, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        reference.main([given])
    assert "neither a folder with Python files" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_folder_that_holds_something_is_left_alone(tmp_path, odd_folder):
    (tmp_path / "thesis.txt").write_text("years of work")
    for out in (tmp_path, tmp_path / "thesis.txt"):
        with pytest.raises(SystemExit, match="2"):
            reference.main([str(odd_folder), "--out", str(out)])
    assert [one.name for one in tmp_path.iterdir()] == ["thesis.txt"]
