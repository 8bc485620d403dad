"""What is read from a package's source: definitions, what names mean, who depends on whom, and what is broken."""

from __future__ import annotations

import ast
import os
import sys
from pathlib import Path

import pytest

from fullshard.errors import ConfigError
from fullshard.reference import Keywords, find, package
from fullshard.reference.docstring import blocks


def defined(odd: Keywords, file: str, kind: str) -> list[str]:
    return [made.anchor for made in odd.package.files[f"odd/{file}"].definitions if made.kind == kind]


def meant(odd: Keywords, file: str, name: str) -> list[tuple[int, str | None, bool]]:
    """For each use of a name: its line, what it means (`file#anchor`), and whether that is sure."""
    uses = [use for use in odd.package.files[f"odd/{file}"].uses if use.name == name]
    return [
        (use.line, f"{use.target.path.removeprefix('odd/')}#{use.target.anchor}" if use.target else None, use.sure)
        for use in uses
    ]


def test_broken_files_are_named_and_the_rest_is_read(odd):
    faults = {fault.path: (fault.line, fault.what.split(":")[0]) for fault in odd.package.faults}
    assert faults.pop("odd/nul.py")
    assert faults == {"odd/broken.py": (4, "syntax error"), "odd/not_utf8.py": (2, "cannot be decoded")}
    assert len(odd.package.files) == 21
    assert "def right" in odd.package.files["odd/broken.py"].text, "its page shows the text all the same"


def test_encodings(odd):
    assert odd.package.files["odd/latin.py"].text.endswith("'é'\n")
    assert odd.package.files["odd/bom.py"].text == "BOM = 1\nNEXT = BOM\n"
    assert odd.package.files["odd/bom.py"].nbytes == 24
    assert [use.column for use in odd.package.files["odd/wide.py"].uses] == [8, 12, 20], "in characters, not bytes"


def test_definitions_of_nested_classes_and_of_a_name_defined_twice(odd):
    assert defined(odd, "nested.py", "class") == ["Outer", "Outer.Inner", "Outer.Inner.Deep", "Outer.made.within.Local"]
    assert defined(odd, "nested.py", "method") == ["Outer.Inner.Deep.most", "Outer.made"]
    local = {made.qualified for made in odd.package.files["odd/nested.py"].definitions if made.local}
    assert local == {"Outer.Inner.Deep.most.self", "Outer.made.self", "Outer.made.within", "Outer.made.within.Local"}
    assert defined(odd, "twice.py", "function") == ["same", "same-2"]
    assert defined(odd, "twice.py", "method") == ["Two.x", "Two.x-2"]
    assert [made.docstring for made in odd.package.files["odd/twice.py"].definitions[:2]] == ["First.", "Second."]


MEANT = {
    ("wide.py", "é"): [(2, "wide.py#é", True)],
    ("star_user.py", "starred"): [(2, "names.py#starred", True)],
    ("star_user.py", "two"): [(2, "names.py#starred.two", True)],  # a keyword leads to the parameter
    ("star_circle.py", "missing"): [(2, None, True)],
    ("circle_a.py", "stop"): [(5, "circle_b.py#Beta.stop", True)],  # by the annotation of `other`
    ("circle_b.py", "Alpha"): [(4, "circle_a.py#Alpha", True)],
    ("hint.py", "shared"): [(5, "names.py#Base.shared", True), (6, "names.py#Base.shared", True)],
    ("hint.py", "use"): [(8, "hint.py#Child.use", True), (10, "hint.py#Child.use", False)],  # a guess, which says so
    ("hint.py", "append"): [(10, None, True)],  # lists have it: no guess
    ("hint.py", "starred"): [(7, "names.py#starred", True)],
}


def test_names_mean_what_they_are_imported_annotated_derived_or_called_as(odd):
    assert {(file, name): meant(odd, file, name) for file, name in MEANT} == MEANT


def test_a_package_inside_another_is_known_by_its_whole_name(tmp_path):
    inner = tmp_path / "outer" / "inner"
    (inner / "deep").mkdir(parents=True)
    for folder in (inner.parent, inner, inner / "deep"):
        (folder / "__init__.py").touch()
    (inner / "a.py").write_text("VALUE = 1\n")
    (inner / "b.py").write_text("import outer.inner.a\nprint(outer.inner.a.VALUE)\n")
    (inner / "deep" / "c.py").write_text("from outer.inner import a\nfrom ...inner.b import outer\n")
    found = package(find(str(inner)))
    assert found.files["inner/deep/c.py"].module == "outer.inner.deep.c"
    assert found.depends["inner/b.py"] == ["inner/a.py"]
    assert found.depends["inner/deep/c.py"] == ["inner/a.py", "inner/b.py"]
    assert package(find(str(inner / "a.py"))).files["a.py"].module == "outer.inner.a"


def test_who_depends_on_whom_and_roles(odd):
    found = odd.package
    users = ["__init__.py", "hint.py", "spaced/deep/inside.py", "star_user.py"]
    assert found.depends["odd/circle_a.py"] == ["odd/circle_b.py"]
    assert found.dependents["odd/names.py"] == [f"odd/{name}" for name in users]
    assert found.related["odd/names.py"][0] == "odd/test_names.py"
    inside = found.files["odd/spaced/deep/inside.py"]
    assert inside.module == "odd.spaced.deep.inside" and [one.path for one in inside.imports] == ["odd/names.py", None]
    roles = {
        "broken.py": "cannot be parsed",
        "empty.py": "empty",
        "no_docstring.py": "constants",
        "__init__.py": "face of a package: names what it offers",
        "test_names.py": "tests: 1 function",
        "nested.py": "1 class",
    }
    assert {name: found.files[f"odd/{name}"].role for name in roles} == roles


def test_every_name_stands_where_it_is_said_to(odd):
    """Of this project's own reader, too: columns and lines point at the name itself."""
    own = Keywords(package(find(str(Path(__file__).parents[2] / "src/fullshard/reference"))))
    for keywords in (odd, own):
        for file in keywords.package.files.values():
            lines = file.text.split("\n")
            for one in [*file.uses, *[made for made in file.definitions if made.kind != "import"]]:
                assert lines[one.line - 1][one.column :].startswith(one.name), (file.path, one)


def test_every_identifier_is_in_a_files_index(odd):
    """Against the tree: whatever is a name, attribute, parameter or definition in it."""
    for path, file in odd.package.files.items():
        wanted = set()
        for node in ast.walk(ast.parse("" if file.faults else file.text)):
            keys = ("id", "attr", "name") + ("arg",) * isinstance(node, ast.arg)
            wanted |= {getattr(node, key) for key in keys if isinstance(getattr(node, key, None), str)}
        wanted -= {"*", "property", *sys.stdlib_module_names}
        assert wanted <= {entry.name for entries in odd.of_file(path).values() for entry in entries}, path


def test_an_index_says_where_else_a_name_is_used(odd):
    entry = next(one for one in odd.of_file("odd/names.py")["function"] if one.name == "starred")
    assert entry.others == {"odd/hint.py": [7], "odd/star_user.py": [2]}
    parameter = next(one for one in odd.of_file("odd/names.py")["parameter"] if one.name == "one")
    assert parameter.here == [2]
    assert list(odd.of_file("odd/names.py")) == ["class", "function", "method", "parameter"]


def test_reading_imports_nothing(tmp_path, monkeypatch):
    (tmp_path / "loud").mkdir()
    (tmp_path / "loud" / "__init__.py").write_text("raise SystemExit('this was run')\n")
    (tmp_path / "loud" / "inner.py").write_text("import os; os.abort()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for given in ("loud", "loud.inner", str(tmp_path / "loud")):
        assert package(find(given)).files
    assert "loud" not in sys.modules


@pytest.mark.parametrize(
    "given", ["no.such.package", "nowhere/at/all", "./no-such", "a" * 5000, "nul\0name", "sys", "fullshard.none"]
)
def test_what_is_not_there_is_refused(given):
    with pytest.raises(ConfigError):
        find(given)


def test_a_folder_without_python_and_a_file_of_another_kind_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="no Python file"):
        find(str(tmp_path))
    (tmp_path / "text.txt").write_text("x")
    with pytest.raises(ConfigError, match="not Python source"):
        find(str(tmp_path / "text.txt"))


def test_a_file_that_cannot_be_read_and_one_nested_too_deeply_are_faults(tmp_path):
    (tmp_path / "gone.py").symlink_to(tmp_path / "not-there.py")
    (tmp_path / "deep.py").write_text("x = " + "-" * 5000 + "1\n")
    (tmp_path / "long.py").write_text("x = " + " + ".join(["1"] * 3000) + "\n")
    (tmp_path / "fine.py").write_text("y = 1\n")
    found = package(find(str(tmp_path)))
    assert {Path(fault.path).name for fault in found.faults} >= {"gone.py", "deep.py"}
    assert [made.name for made in found.files[f"{tmp_path.name}/fine.py"].definitions] == ["y"]


def test_links_to_folders_are_not_followed(tmp_path):
    (tmp_path / "a.py").write_text("")
    os.symlink(tmp_path, tmp_path / "loop")
    assert list(find(str(tmp_path)).files) == [f"{tmp_path.name}/a.py"]


def test_docstrings_become_blocks():
    text = """Do it.

    kept as it is

Text that names things:
  one  two

- first
  goes on
- second

Args:
    rank: who asks;
        the second line
    *rest (int): others

Returns:
    Bytes: a number.

Raises:
    ValueError: never
"""
    assert [(one.kind, one.text, one.items) for one in blocks(text)] == [
        ("text", "Do it.", ()),
        ("kept", "kept as it is", ()),
        ("text", "Text that names things:", ()),
        ("kept", "one  two", ()),
        ("list", "", (("", "first goes on"), ("", "second"))),
        ("head", "Arguments", ()),
        ("entries", "", (("rank", "who asks; the second line"), ("*rest (int)", "others"))),
        ("head", "Returns", ()),
        ("entries", "", (("", "Bytes: a number."),)),
        ("head", "Raises", ()),
        ("entries", "", (("ValueError", "never"),)),
    ]


def test_public_names_stand_before_private_ones(odd):
    from fullshard.reference.keywords import order

    names = ["_Ab", "zeta", "Ab", "_a", "ab", "__b"]
    assert sorted(names, key=order) == ["Ab", "ab", "zeta", "__b", "_a", "_Ab"]
    for listed in [*odd.of_folder("odd").values(), odd.everywhere()]:
        private = [name.startswith("_") for name in listed]
        assert private == sorted(private)
