"""Every error and warning has a code, a literal, of its own; and keeps it on its way between processes."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from fullshard import errors

DOCS = Path(__file__).parents[1] / "docs"


def load(path: Path) -> ModuleType:
    """A file that is in no package, as a module."""
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[path.stem] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


codes = load(DOCS / "_errors" / "codes.py")


def test_every_error_and_warning_has_a_code_of_its_own() -> None:
    """What to do where this fails: `python docs/_errors/codes.py --new LETTER` gives a free code."""
    assert codes.faults() == []


def test_errors_that_are_not_ours_are_raised_only_where_they_are_caught() -> None:
    """By readers of files, who make of it an error that names the file; by a stream, of a full disk; and by `import`
    of what needs a package that is not there."""
    inner = ("__init__.py", "torch_private/store.py", "store/hashed.py", "store/storage.py", "store/tree.py",
             "store/metadata.py", "store/manifest.py", "store/pickles.py", "store/load.py", "store/source.py",
             "store/formats/")  # fmt: skip
    found = [one for one in codes.builtin_raises() if not one.startswith(inner)]
    assert not [one for one in found if not (one.startswith("integrations/") and one.endswith("ImportError"))]


@pytest.mark.parametrize("source, fault", [
    ('raise ConfigError("no")', "wants code="),
    ('raise ConfigError("no", code="P001")', "wants code="),
    ('raise ConfigError("no", code=found)', "wants code="),
    ('raise ConfigError("no", code="C001")\nraise ConfigError("not", code="C001")', "another text's"),
    ('kind = ConfigError\nraise kind("no", code="C001")', "neither called nor caught"),
    ("raise ConfigError", "neither called nor caught"),
    ("class MyError(ConfigError): ...", "errors.py"),
    ('warnings.warn("look out", stacklevel=2)', "message("),
    ('warnings.warn(message("look out"), stacklevel=2)', "wants code="),
])  # fmt: skip
def test_what_has_no_code_is_found(source: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "errors.py").write_text((codes.SOURCE / "errors.py").read_text())
    (tmp_path / "one.py").write_text(source)
    monkeypatch.setattr(codes, "SOURCE", tmp_path)
    assert any(fault in one for one in codes.faults()), codes.faults()


def test_the_tool_gives_a_code_that_is_free() -> None:
    command = [sys.executable, str(DOCS / "_errors" / "codes.py"), "--new", "C"]
    code = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    assert code.startswith("C") and code not in {site.code for site in codes.sites()}


@pytest.mark.parametrize("name", [name for name, letter in codes.error_classes().items() if letter])
def test_an_error_ends_in_its_code_and_keeps_it(name: str) -> None:
    error = getattr(errors, name)("It went wrong.", rank=1, got="this", remedy="do that", code="X007")
    assert str(error).splitlines()[-1] == "  code:      X007"
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(again) is type(error) and str(again) == str(error)
        assert (again.code, again.rank, again.got, again.remedy) == ("X007", 1, "this", "do that")


def test_a_warning_ends_in_its_code() -> None:
    assert errors.message("Look out.", got=1, code="W001").splitlines() == [
        "Look out.",
        "  got:       1",
        "  code:      W001",
    ]


def test_codes_are_filled_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`docs/_errors/fill.py`, on calls with and without commas at their ends, of one line and of several."""
    (tmp_path / "errors.py").write_text((codes.SOURCE / "errors.py").read_text())
    source = tmp_path / "one.py"
    source.write_text(
        'raise ConfigError("no", got=1)\n'
        'raise ConfigError(\n    "é",  # a, comma\n    got=(1, 2),\n)\n'
        'raise PhaseError("now", code="P004")\nraise PhaseError(\n    "later"  # why\n)\n'
        'warnings.warn(message("look out"), stacklevel=2)\n'
    )
    monkeypatch.setattr(codes, "SOURCE", tmp_path)
    monkeypatch.setattr(codes, "RETIRED", ("W008",))
    monkeypatch.setitem(sys.modules, "codes", codes)
    assert load(DOCS / "_errors" / "fill.py").fill() == {"one.py": 4}
    assert codes.faults() == []
    assert [(site.code, site.what) for site in codes.sites()] == [
        ("C001", "no"), ("C002", "é"), ("P004", "now"), ("P005", "later"), ("W009", "look out"),
    ]  # fmt: skip
