"""Writes the error index, docs/errors.md, and what `fullshard explain` reads, src/fullshard/cli/errors.json.

    python docs/_errors/page.py

Both are made of the source (`codes.py`), of what was written by hand (meanings.toml: why an error comes and what to do,
where its own text is not enough) and of the tests that raise it (`examples.py`). tests/test_error_index.py says when
they are older than those.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import codes
import examples

PAGE = Path(__file__).parents[1] / "errors.md"
DATA = codes.SOURCE / "cli" / "errors.json"
MEANINGS = Path(__file__).with_name("meanings.toml")

CLASSES = {
    "C": ("ConfigError", "ValueError", "an argument, or a combination of settings, that cannot work"),
    "L": ("LayoutError", "ValueError", "a parameter that cannot be laid out as asked"),
    "D": ("DivergenceError", "RuntimeError", "ranks disagree on what they train or on what to do next"),
    "K": ("CheckpointError", "RuntimeError", "a state dict or checkpoint that does not fit, or files that are damaged"),
    "P": ("PhaseError", "RuntimeError", "a call at a time when it cannot be served"),
    "N": ("NonfiniteError", "RuntimeError", "gradients that are not finite"),
    "W": ("Warnings", "UserWarning", "training goes on; something is not as it was probably meant"),
}
SUBJECTS = {
    "api/functional/": "fully_shard",
    "api/wrapper/": "FullyShardedDataParallel",
    "api/wrapping/": "Wrapping: which modules become units",
    "api/": "Gradients, parking, what stays gathered",
    "agreement/": "Ranks that should do the same",
    "watcher/": "Ranks that are stuck or gone",
    "checkpoint/": "State dicts",
    "store/formats/": "Files of other formats",
    "store/hugging_face.py": "Hugging Face's files and adapters",
    "store/lora.py": "Hugging Face's files and adapters",
    "store/": "Checkpoints on disk",
    "exchange/": "Checkpoints between formats",
    "cli/": "The command line",
    "comm": "Collectives",
    "mesh/": "Meshes and process groups",
    "torch_private/": "Meshes and process groups",
    "layout/": "Layouts",
    "forms/": "Sharded parameters",
    "shard/": "Units",
    "runtime/": "Forward and backward",
    "optim/": "Optimizers and gradients",
    "insight/doctor/": "The doctor",
    "insight/verify/": "verify",
    "insight/": "What a model holds",
    "integrations/": "Adopted programs",
    "": "Policies, names and dtypes",
}
"""Beginnings of paths, the first that fits counts; what the errors there are about."""


RUN_BY = {
    "tests/clients/": " (of the extras of client libraries: `make test-clients`)",
    "tests/gpu/": " (on a GPU)",
}
SHARED = ("two_layers", "unit", "sharded", "wrapped", "nested", "run", "step")
"""Functions of tests/raising.py that examples call."""


@dataclass(frozen=True)
class Entry:
    """One code, as it is shown.

    Attributes:
        kind: the class that is raised.
        subject: what it is about.
        text: the whole message, with what is put in at run time in braces.
        means: what the text does not say; empty where it says all.
        do: what to do, if neither the text nor `means` says it.
        places: where it is made.
        example: the test that shows it, if one does.
        needs: where none does, why: what a program that raises it would need.
    """

    code: str
    kind: str
    subject: str
    text: str
    means: str
    do: str
    places: tuple[codes.Site, ...]
    example: examples.Example | None
    needs: str = ""


def entries() -> list[Entry]:
    """All of them, in the order of codes.

    Raises:
        ValueError: something was written by hand for a code that there is not.
    """
    written = tomllib.loads(MEANINGS.read_text())
    tests = examples.read_table()
    places: defaultdict[str, list[codes.Site]] = defaultdict(list)
    for site in codes.sites():
        places[site.code or "?"].append(site)
    unknown = sorted({*written, *tests} - set(places))
    if unknown:
        raise ValueError(f"there are no such codes: {', '.join(unknown)}")
    found = []
    for code, made in sorted(places.items()):
        by_hand = written.get(code, {})
        first = made[0]
        facts = {**first.facts, **{key: by_hand[key] for key in codes.FACTS if key in by_hand}}
        lines = [
            by_hand.get("what", first.what),
            *(f"  {name + ':':<11}{facts[name]}" for name in codes.FACTS if name in facts),
        ]
        found.append(
            Entry(
                code,
                first.kind,
                next(title for start, title in SUBJECTS.items() if first.path.startswith(start)),
                "\n".join(lines),
                " ".join(by_hand.get("means", "").split()),
                " ".join(by_hand.get("do", "").split()),
                tuple(made),
                examples.example(tests[code], code) if code in tests else None,
                by_hand.get("needs", ""),
            )
        )
    return found


def section(entry: Entry, shown: set[str]) -> list[str]:
    """An entry as Markdown. `shown`: tests that were quoted already; this one's is added."""
    lines = [f"### {entry.code}", "", f"*{entry.subject}*", "", "```", entry.text, "```", ""]
    if entry.means:
        lines += [entry.means, ""]
    if entry.do:
        lines += [f"**What to do:** {entry.do}", ""]
    kind = "A warning" if entry.kind == "warning" else f"`{entry.kind}`"
    where = [f"[{one.path}](../src/fullshard/{one.path}#L{one.line}){in_function(one)}" for one in entry.places]
    lines += [f"{kind}, from {'; '.join(where)}.", ""]
    if entry.example is None:
        return [*lines, f"No example here: it takes {entry.needs}." if entry.needs else "No example yet.", ""]
    example = entry.example
    run = next((told for start, told in RUN_BY.items() if example.path.startswith(start)), "")
    lines += [f"Raised by the test [{name_of(example)}](../{example.path}#L{example.line}){run}.", ""]
    if example.source and example.test not in shown:
        shown.add(example.test)
        lines += ["```python", example.source, "```", ""]
    return lines


def in_function(site: codes.Site) -> str:
    return f", in `{site.function}`" if site.function else ""


def name_of(example: examples.Example) -> str:
    """A test's id, as the text of a link."""
    return "`" + example.test.rpartition("/")[2].replace("`", "'") + "`"


def page(all_entries: list[Entry]) -> str:
    """The whole page."""
    lines = [
        "<!-- Made by docs/_errors/page.py from the source: change that, or docs/_errors/meanings.toml. -->",
        "",
        "# Error index",
        "",
        "Every error and warning of Fullshard ends in a line with its code (the attribute `error.code`, too):",
        "",
        "```",
        *example_of_a_message(),
        "```",
        "",
        "Look the code up here (`errors.html#k121`, or `docs/errors.md` in the repository), or in a terminal:",
        "",
        "```console",
        "$ fullshard explain K121",
        "...",
        "```",
        "",
        "An entry shows the message, with `{braces}` around what is put in at run time. Below it stands what the "
        "message does not say itself, where it is raised, and a test that raises it.",
        "",
        "A code's letter is its class. Each class is also a built-in type, which is the one that PyTorch raises for "
        "such a mistake: code that catches PyTorch's errors catches these.",
        "",
        "| codes | class | what went wrong |",
        "|---|---|---|",
    ]
    by_letter: defaultdict[str, list[Entry]] = defaultdict(list)
    for entry in all_entries:
        by_letter[entry.code[0]].append(entry)
    for letter, (kind, builtin, what) in CLASSES.items():
        own = by_letter[letter]
        span = f"[{own[0].code}](#{own[0].code.lower()})" + (f" to {own[-1].code}" if len(own) > 1 else "")
        lines.append(f"| {span} | [{kind}](#{kind.lower()}), a `{builtin}` | {what} |")
    shown = [entry for entry in all_entries if entry.example is not None]
    explained = [entry for entry in all_entries if entry.example is None and entry.needs]
    lines += ["", f"Of {len(all_entries)} entries {len(shown)} have an example that a test runs."]
    if explained:
        lines += [f"{len(explained)} say what such a program would take (a GPU, say)."]
    lines += ["", f"No longer raised: {', '.join(codes.RETIRED)}.", "", *shared()]
    quoted: set[str] = set()
    for letter in CLASSES:
        lines += [f"## {CLASSES[letter][0]}", "", f"{CLASSES[letter][2][0].upper()}{CLASSES[letter][2][1:]}.", ""]
        lines += ["By subject:", ""]
        subjects: defaultdict[str, list[Entry]] = defaultdict(list)
        for entry in by_letter[letter]:
            subjects[entry.subject].append(entry)
        for title, own in subjects.items():
            links = " ".join(f"[{entry.code}](#{entry.code.lower()})" for entry in own)
            lines.append(f"- {title}: {links}")
        lines.append("")
        for entry in by_letter[letter]:
            lines += section(entry, quoted)
    return "\n".join(lines).rstrip() + "\n"


def shared() -> list[str]:
    """What a reader of the examples has to know, as Markdown."""
    path = "tests/raising.py"
    lines = [
        "Examples are tests: what raises stands below `with raises(code)`, or warns below `with warns(code)`. Where",
        "nothing else is said they are rank 0 of 2 (of 4 where there is a mesh), in one process, on a group that moves",
        "no data. A function below `@PROGRAMS.raise_(code)` is a program of two ranks, which both run, each with its",
        "number and a folder that both see. Of a table the row of the code is shown: its last call is what raises, of",
        "what the first makes or of a new folder; those between are done before. `ONE` is one sample of ones. They",
        "share these models:",
        "",
        "```python",
    ]
    for name in SHARED:
        lines += [*examples.source_of(path, examples.functions(path)[name]), "", ""]
    return [*lines[:-2], "```", ""]


def example_of_a_message() -> list[str]:
    """A message as users meet it."""
    return [
        "fullshard.errors.CheckpointError: There is no checkpoint of this step.",
        "  expected:  step 300 in runs/first",
        "  got:       steps 100, 200",
        "  code:      K121",
    ]


def data(all_entries: list[Entry]) -> str:
    """What `fullshard explain` reads, as JSON."""
    told = {
        entry.code: {
            "kind": entry.kind,
            "text": entry.text,
            "means": entry.means,
            "do": entry.do,
            "where": [f"{one.path}: {one.function}" if one.function else one.path for one in entry.places],
            "example": entry.example.test if entry.example is not None else None,
        }
        for entry in all_entries
    }
    return json.dumps(told, indent=1, ensure_ascii=False) + "\n"


def without_lines(text: str) -> str:
    """A page without the numbers of lines, which every change of a file moves."""
    return re.sub(r"#L\d+\)", ")", text)


def main() -> None:
    found = entries()
    PAGE.write_text(page(found))
    DATA.write_text(data(found))
    without = [entry for entry in found if entry.example is None]
    unexplained = [entry.code for entry in without if not entry.needs]
    print(f"{len(found)} codes, {len(without)} without an example: {len(without) - len(unexplained)} say why")
    print(*unexplained)


if __name__ == "__main__":
    main()
