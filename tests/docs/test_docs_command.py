"""`fullshard docs`: what it writes, that all its links lead somewhere, and what it never touches."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from checked import faults  # docs/_ext

from fullshard.cli.main import main
from fullshard.reference.write import LIST


@pytest.fixture(scope="module")
def site(odd_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out") / "site"
    assert main(["docs", str(odd_folder), "--out", str(out)]) == 1, "three files are broken"
    return out


def test_broken_files_are_named_and_all_have_pages(odd_folder, tmp_path, capsys):
    assert main(["docs", str(odd_folder), "--out", str(tmp_path / "x")]) == 1
    told = capsys.readouterr().out
    assert "odd/broken.py:4: syntax error" in told and "odd/not_utf8.py:2: cannot be decoded" in told
    assert "21 files, 3 could not be parsed" in told
    assert "def right" in (tmp_path / "x/odd/broken.py.html").read_text()


def test_every_link_leads_somewhere_and_nothing_is_loaded_from_the_network(site):
    assert list(faults(site)) == []


def test_the_check_of_links_sees_what_is_wrong(tmp_path):
    (tmp_path / "a.html").write_text(
        '<a href="b.html">x</a><a href="#no">y</a><p id="yes"></p><a href="a.html#yes">z</a>'
    )
    (tmp_path / "c.html").write_text(
        '<script src="https://cdn.example/x.js"></script><a href="https://example.org">fine</a>'
    )
    (tmp_path / "s.css").write_text("@import 'https://cdn.example/x.css'; p { background: url(//cdn.example/y.png) }")
    found = sorted(faults(tmp_path))
    assert [one.split(" ")[0] for one in found] == ["a.html", "a.html", "c.html", "s.css", "s.css"]


class Balanced(HTMLParser):
    """Fails where tags do not nest."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.ids += [value for key, value in attrs if key == "id"]
        if tag not in ("meta", "link", "br", "wbr", "input", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, (tag, self.getpos())


def test_pages_are_sound_html_and_markup_in_source_is_text(site):
    for path in site.rglob("*.html"):
        reader = Balanced()
        reader.feed(path.read_text())
        assert len(reader.ids) == len(set(reader.ids)), path
        assert reader.open == ([] if path.name != "index.html" or path.parent != site else reader.open), path
    text = (site / "odd/markup.py.html").read_text()
    assert "<script>alert" not in text and "&lt;script&gt;alert(1)" in text


def test_the_source_on_a_page_is_the_source(site, odd):
    """Without its tags and numbers, each file's highlighted source is the file again."""
    for path, file in odd.package.files.items():
        text = (site / f"{path}.html").read_text()
        shown = re.search(r'<div class="highlight source"><pre>(.*)\n</pre></div>', text, re.S)
        assert shown is not None
        lines = re.findall(r'<span class="line" id="L(\d+)"><a class="ln"[^>]*>[ \d]*</a> (.*)</span>', shown[1])
        bare = [re.sub("<[^>]*>", "", line) for _, line in lines]
        for mark, plain in (("&lt;", "<"), ("&gt;", ">"), ("&quot;", '"'), ("&#x27;", "'"), ("&amp;", "&")):
            bare = [one.replace(mark, plain) for one in bare]
        assert bare == file.text.split("\n")[: file.lines], path
        assert [int(number) for number, _ in lines] == list(range(1, file.lines + 1))


def test_names_in_source_lead_to_their_definitions(site):
    text = (site / "odd/hint.py.html").read_text()
    assert '<a href="names.py.html#L4" title="method Base.shared">shared</a>' in text
    assert '<a class="guess" href="#L4" title="probably method Child.use">use</a>' in text


def test_the_searchs_data_has_every_name(site, odd):
    data = json.loads((site / "names-data.js").read_text().removeprefix("window.NAMES = ").rstrip(";\n"))
    assert {name for name, _ in data["names"]} == set(odd.everywhere())
    places = {
        (name, data["kinds"][at[i]], data["files"][at[i + 1]], at[i + 2])
        for name, at in data["names"]
        for i in range(0, len(at), 3)
    }
    assert ("starred", "function", "odd/names.py", 1) in places


def test_markdown_is_a_page_and_an_index_a_file(odd_folder, odd, tmp_path):
    out = tmp_path / "md"
    assert main(["docs", str(odd_folder), "--markdown", "--out", str(out)]) == 1
    there = {path.relative_to(out).as_posix() for path in out.rglob("*.md")}
    assert there >= {f"{path}{end}" for path in odd.package.files for end in (".md", ".names.md")}
    for name in there:
        text = (out / name).read_text()
        front = re.match(r"---\n(.*?)\n---\n", text, re.S)
        assert front is not None, name
        assert {key: json.loads(value) for key, value in (one.split(": ", 1) for one in front[1].split("\n"))}["title"]
        for target in re.findall(r"\]\(([^)#]+)", text.partition("## Source")[0]):
            assert ((out / name).parent / target).exists(), (name, target)
    assert "```python\nVALUE = 3\n```" in (out / "odd/no_docstring.py.md").read_text()


# -- the folder that is written


def docs(package: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = main(["docs", str(package), "--out", str(out)])
    return code, capsys.readouterr().err


@pytest.fixture
def small(tmp_path: Path) -> Path:
    (tmp_path / "small").mkdir()
    (tmp_path / "small/__init__.py").write_text("A = 1\n")
    (tmp_path / "small/extra.py").write_text("B = 2\n")
    return tmp_path / "small"


def test_what_is_not_its_own_is_left_alone(small, tmp_path, capsys):
    """A folder with other things, the package's own folder, a file, and what lies below one."""
    mine, file = tmp_path / "mine", tmp_path / "file"
    mine.mkdir()
    for path in (mine / "thesis.txt", file):
        path.write_text("years of work")
    code, told = docs(small, mine, capsys)
    assert code == 2 and "thesis.txt" in told and re.fullmatch(r"fullshard: .+\n(  .+\n)*", told)
    for out in (small, file, file / "below"):
        assert docs(small, out, capsys)[0] == 2, out
    assert [one.name for one in mine.iterdir()] == ["thesis.txt"] and file.read_text() == "years of work"


def test_a_second_run_replaces_its_own_pages_and_nothing_else(small, tmp_path, capsys):
    """Nor does it write over someone else's file, or through a link."""
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere.html"
    assert docs(small, out, capsys)[0] == 0
    for path in (notes := [out / "notes.txt", out / "small/notes.txt", elsewhere]):
        path.write_text("mine")
    (small / "extra.py").unlink()
    assert docs(small, out, capsys)[0] == 0
    assert not (out / "small/extra.py.html").exists() and (out / "small/__init__.py.html").exists()
    (out / "small/new.py.html").write_text("mine")
    (small / "new.py").write_text("")
    code, told = docs(small, out, capsys)
    assert code == 2 and "new.py.html" in told
    assert (out / "small/new.py.html").read_text() == "mine"
    (out / "small/new.py.html").unlink()
    (out / "small/__init__.py.html").unlink()
    (out / "small/__init__.py.html").symlink_to(elsewhere)
    assert docs(small, out, capsys)[0] == 2
    assert all(path.read_text() == "mine" for path in notes)


@pytest.mark.parametrize(
    "text", ["", "{}", '["../../outside"]', '["/etc/passwd"]', "[1]", "not json", '["small", ".."]']
)
def test_a_list_that_was_changed_is_refused(small, tmp_path, capsys, text):
    out, outside = tmp_path / "a/b/out", tmp_path / "a/outside"
    out.mkdir(parents=True)
    outside.write_text("mine")
    (out / LIST).write_text(text)
    assert docs(small, out, capsys)[0] == 2
    assert outside.read_text() == "mine"


@pytest.mark.parametrize("given", [["no.such.package"], ["."], [], ["x", "--wrong"]])
def test_bad_input_is_refused(given, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["docs", *given]) == 2
    printed = capsys.readouterr().err
    assert printed if len(given) != 1 else re.fullmatch(r"fullshard: .+\n(  .+\n)*", printed)  # options: tyro's words
    assert not list(tmp_path.iterdir())


def test_one_file_and_an_installed_package(tmp_path, capsys):
    (tmp_path / "one.py").write_text("def f(): pass\n")
    assert main(["docs", str(tmp_path / "one.py"), "--out", str(tmp_path / "a")]) == 0
    assert main(["docs", "iniconfig", "--out", str(tmp_path / "b")]) == 0, "what pytest needs, and is not ours"
    assert list(faults(tmp_path / "a")) == list(faults(tmp_path / "b")) == []
    assert (tmp_path / "a/one.py.html").exists() and (tmp_path / "b/iniconfig/__init__.py.html").exists()
