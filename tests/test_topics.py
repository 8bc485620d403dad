"""Errors that a message cannot explain have a topic: raised somewhere, explained by a page whose programs are run.

Programs of the page run on two ranks in memory, after its first lines; each rank on its own thread, in one folder.
"""

from __future__ import annotations

import ast
import builtins
import copy
import os
import pickle
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import fullshard
from fullshard import errors
from fullshard.cli import explain
from fullshard.cli.main import main
from fullshard.optim import guard

SOURCE = Path(fullshard.__file__).parent
PAGE = SOURCE / "cli" / "errors.md"
PROGRAM = re.compile(r"(?ms)^```python\n(.*?)^```$")
MORE = re.compile(r"(?m)^(?:\[rank\d\]:)? +more: +fullshard explain ([\w-]+)$")
TOPICS = explain.topics()
LAUNCHED = "rank-gone"  # a program that ends on one rank: it is run as its reader runs it
IN_BACKGROUND = "save-failed"  # by a process beside each rank


def topics_raised() -> set[str]:
    """The topics that the source gives to errors and warnings: arguments `topic="..."`, and attributes of classes."""
    found: set[str] = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.keyword) and node.arg == "topic" and isinstance(node.value, ast.Constant):
                found.add(node.value.value)
        if path.name == "errors.py":
            found |= {kind.topic for kind in vars(errors).values() if isinstance(getattr(kind, "topic", None), str)}
    return found


def programs(topic: str) -> list[str]:
    return PROGRAM.findall(TOPICS[topic])


def test_every_topic_that_is_raised_has_a_section_and_every_section_is_raised() -> None:
    assert topics_raised() == set(TOPICS)


@pytest.mark.parametrize("topic", TOPICS)
def test_a_section_is_a_line_reasons_and_two_programs(topic: str) -> None:
    assert re.fullmatch(r"[a-z]+(-[a-z]+)*", topic)
    assert len(explain.summary(TOPICS[topic])) <= 100 and explain.summary(TOPICS[topic]).endswith(".")
    assert len(programs(topic)) == 2


def before() -> str:
    """What all programs of the page begin with."""
    (program,) = PROGRAM.findall(PAGE.read_text().partition("\n## ")[0])
    return str(program)


def outcome(program: str, folder: Path) -> set[str | None]:
    """The topics of what this rank is told by a program: of its error, or of warnings; None: an error without one."""
    os.chdir(folder)
    names: dict[str, Any] = {"__name__": "__main__"}
    with warnings.catch_warnings(record=True) as caught, mock.patch.object(guard, "_warned", set()):
        warnings.simplefilter("always")
        exec(before().replace('dist.init_process_group("gloo")\n', ""), names)
        try:
            exec(compile(program, "program", "exec"), names)
        except fullshard.FullshardError as error:
            return {error.topic}
    return {found[1] for each in caught if (found := MORE.search(str(each.message)))}


def launched(program: str, folder: Path) -> set[str]:
    """The topics that a program prints, run by torchrun; it ends well if there are none."""
    (folder / "program.py").write_text(f"{before()}\n{program}")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "program.py"]
    ended = subprocess.run(command, check=False, cwd=folder, capture_output=True, text=True, timeout=120)
    topics = set(MORE.findall(ended.stderr))
    assert bool(topics) == bool(ended.returncode), ended.stderr
    return topics


MARKS = {
    IN_BACKGROUND: pytest.mark.gloo("saves beside ranks"),
    "weights-changed-in-a-step": pytest.mark.cpu("refused at once on a CPU; on a device two backwards later"),
}


@pytest.mark.parametrize(
    "topic",
    [pytest.param(topic, marks=MARKS.get(topic, ())) for topic in TOPICS],
)
def test_the_first_program_fails_with_the_topic_and_the_second_works(
    run_ranks: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, topic: str
) -> None:
    monkeypatch.chdir(tmp_path)  # and back
    fails, works = programs(topic)
    for number, (program, topics) in enumerate(((fails, {topic}), (works, set()))):
        (folder := tmp_path / str(number)).mkdir()
        if topic == LAUNCHED:
            assert launched(program, folder) == topics
        else:
            assert set().union(*run_ranks(outcome, program, folder, timeout=30)) == topics


@pytest.mark.parametrize("name", [name for name, kind in vars(errors).items() if isinstance(kind, type)])
def test_an_error_says_its_topic_last_and_keeps_it(name: str) -> None:
    kind = getattr(errors, name)
    if not issubclass(kind, errors.FullshardError):
        return
    for topic in ("tied-weights", None):
        error = kind("It went wrong.", rank=1, got="this", remedy="do that", topic=topic)
        named = topic or kind.topic
        assert error.topic == named
        last = "  remedy:    do that" if named is None else f"  more:      fullshard explain {named}"
        assert str(error).splitlines()[-1] == last
        for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
            assert type(again) is kind and str(again) == str(error)
            assert (again.topic, again.rank, again.got, again.remedy) == (named, 1, "this", "do that")


def test_explain_prints_a_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "tied-weights"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("tied-weights\n") and explain.summary(TOPICS["tied-weights"]) in text and "```" not in text


def test_explain_alone_lists_the_topics(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(TOPICS)
    assert all(line.endswith(explain.summary(text)) for line, text in zip(lines, TOPICS.values(), strict=True))


@pytest.mark.parametrize("written", ["tied-weights", "Tied Weights", " tied_weights "])
def test_a_topic_is_found_however_it_is_written(written: str) -> None:
    assert explain.find(written)[0] == "tied-weights"


def test_an_unknown_topic_is_refused_and_near_ones_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "tide-weights"]) == 2
    assert re.search(r"has this topic\.\n  got: .*\n  remedy:    perhaps tied-weights", capsys.readouterr().err)
    assert main(["explain", "zzz"]) == 2
    assert "perhaps" not in capsys.readouterr().err


def test_explain_imports_no_torch() -> None:
    program = "import sys; from fullshard.cli.main import main; main(['explain']); print('torch' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert told.splitlines()[-1] == "False"


INNER = (
    "__init__.py", "torch_private/store.py", "store/hashed.py", "store/record.py", "store/tree.py", "store/metadata.py",
    "store/manifest.py", "store/storage.py", "store/pickles.py", "store/load.py", "store/names.py", "store/formats/",
)  # fmt: skip
"""Files whose errors of Python's own are caught: by readers, which name the file, and by a stream, of a full disk."""


def test_users_get_errors_of_fullshards_own() -> None:
    """But for `import` of what needs a package that is not there, and assertions of what only a bug brings about."""
    bare = []
    for path in SOURCE.rglob("*.py"):
        file = path.relative_to(SOURCE).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(getattr(getattr(node, "exc", None), "func", None), "id", "")
            if isinstance(node, ast.Raise) and isinstance(getattr(builtins, name, None), type):
                needs_a_package = name == "ImportError" and file.startswith("integrations/")
                if name != "AssertionError" and not file.startswith(INNER) and not needs_a_package:
                    bare.append(f"{file}:{node.lineno}: {name}")
    assert bare == []
