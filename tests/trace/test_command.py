"""`fullshard trace`: what it prints and writes, its exit codes, and its page in a browser."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_analyse import content, rank_trace, run_of, step_of

from fullshard.cli.main import main
from fullshard.cli.trace import TraceArguments
from fullshard.insight.trace import analyse, html_page
from fullshard.insight.trace.merge import RunTrace

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def write_run(folder: Path, ranks: tuple[int, ...] = (0, 1), **more: object) -> None:
    """Files of ranks of which rank 1 loses 3 s in unit a, in each of two steps."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank in ranks:
        lost = 3.0 * rank
        rows = step_of(0, lost, 5.5) + step_of(8, lost, 13.5)
        verbs, units, groups = (list(dict.fromkeys(row[i] for row in rows)) for i in range(3))
        events = [
            [verbs.index(verb), units.index(unit), groups.index(ranks), nbytes, live, time - 5 * rank, allocated]
            for verb, unit, ranks, nbytes, live, time, allocated, _ in rows
        ]
        tables = {"verbs": verbs, "units": units, "models": ["Net"] * len(units), "groups": groups, "events": events}
        text = json.dumps({**content(rank), "begin": -5.0 * rank, "end": 20.0 - 5 * rank, **tables, **more})
        (folder / f"rank-{rank}.json").write_text(text)


def test_the_table_names_the_late_rank_and_its_unit(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    write_run(tmp_path)
    assert main(["trace", str(tmp_path)]) == 0
    told, errors = capsys.readouterr()
    assert not errors
    assert "Rank 1 is late by up to 3000.0 ms, which it loses in unit a." in told
    assert re.search(r"│ 0 +│ b +│ gather +│ 3\.00 s +│ 500\.0 ms +│ 1 +│", told)
    assert re.search(r"│ 1 +│ 2 +│ 3\.00 s +│ 3\.00 s +│ 3\.00 s +│ 3\.00 s +│ a +│", told)
    assert re.search(r"│ 0 +│ 8\.00 s +│ .*b \d+% \(rank 1 late\)", told)


@pytest.mark.parametrize(("target", "says"), [("/dev/full", "cannot write the output: No space left"), ("pipe", "")])
def test_output_that_cannot_be_written(target, says, tmp_path):
    """A full disk is said in one line; a reader that has enough (`| head`) ends the command without a word."""
    write_run(tmp_path)
    command = [sys.executable, "-m", "fullshard", "trace", str(tmp_path), "--json"]
    if target == "pipe":
        reading, writing = os.pipe()
        os.close(reading)
    else:
        writing = os.open(target, os.O_WRONLY)
    ended = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == bool(says) and says in ended.stderr, ended.stderr


def test_recordings_are_not_overwritten_and_paths_are_named(tmp_path, capsys):
    write_run(tmp_path)
    before = (tmp_path / "rank-0.json").read_bytes()
    for option in ("--html", "--chrome", "--picture"):
        assert main(["trace", str(tmp_path), option, str(tmp_path / "rank-0.json")]) == 2
        assert "would replace a recording" in capsys.readouterr().err
    assert (tmp_path / "rank-0.json").read_bytes() == before
    if Path("/dev/full").exists():
        assert main(["trace", str(tmp_path), "--html", "/dev/full"]) == 2
        assert "cannot write /dev/full: No space left on device" in capsys.readouterr().err


def test_an_error_is_told_by_its_first_line(tmp_path, capsys):
    write_run(tmp_path, raised="DivergenceError: Ranks are stuck.\n  rank 0 waits\n  rank 1 does not")
    assert main(["trace", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "rank 0 raised DivergenceError: Ranks are stuck.\n" in told and "rank 0 waits" not in told


def test_what_programs_read_is_what_the_tables_show(tmp_path, capsys):
    write_run(tmp_path)
    assert main(["trace", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    (late,) = told["late_ranks"]
    assert (late["rank"], late["place"], late["worst"], late["times"]) == (1, "a", 3, 2)
    assert len(told["steps"]) == 2 and told["missing"] == []


def test_the_example_of_the_help_runs_and_the_help_fits_a_screen(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs" / "trace")
    (example,) = re.findall(r"^ +fullshard (trace .*)$", str(TraceArguments.__doc__), re.M)
    assert main(example.split()) == 0
    assert "<h1>Who is late?</h1>" in (tmp_path / "trace.html").read_text()
    capsys.readouterr()
    assert main(["trace", "--help"]) == 0
    told = capsys.readouterr().out
    assert f"fullshard {example}" in told and len(told.splitlines()) <= 40


def test_chromes_file_is_json(tmp_path):
    write_run(tmp_path)
    assert main(["trace", str(tmp_path), "--chrome", str(tmp_path / "chrome.json")]) == 0
    written = json.loads((tmp_path / "chrome.json").read_text())
    assert {event["ph"] for event in written["traceEvents"]} == {"M", "X", "C"}


@pytest.mark.parametrize("kind", [".png", ".svg"])
def test_a_step_is_drawn(tmp_path, kind):
    pytest.importorskip("matplotlib", reason="draws the picture")
    write_run(tmp_path)
    assert main(["trace", str(tmp_path), "--picture", str(tmp_path / f"step{kind}")]) == 0
    written = (tmp_path / f"step{kind}").read_bytes()
    assert written[:4] == b"\x89PNG" if kind == ".png" else b"</svg>" in written


def test_bad_input_is_one_line_and_exit_code_2(tmp_path, capsys):
    write_run(tmp_path / "mixed")
    write_run(tmp_path / "mixed", ranks=(1,), run=8)
    (tmp_path / "empty").mkdir()
    (tmp_path / "other.json").write_text('{"a": 1}')
    write_run(tmp_path / "run")
    unwritable = ["run", "--html", str(tmp_path / "no" / "folder.html")]
    picture = ["run", "--picture", str(tmp_path / "step.gif")]
    for words in (["mixed"], ["empty"], ["other.json"], ["nothing"], unwritable, picture):
        assert main(["trace", str(tmp_path / words[0]), *words[1:]]) == 2, words
        told, errors = capsys.readouterr()
        assert not told and errors.count("\n") == 1 and errors.startswith("fullshard: "), errors
    assert main(["trace"]) == 2


def test_ranks_without_a_file_are_named(tmp_path, capsys):
    write_run(tmp_path, ranks=(1,))
    assert main(["trace", str(tmp_path)]) == 0
    told, errors = capsys.readouterr()
    assert "no file of rank 0" in errors and "Ranks without a file: 1. A wait for them counts as transfer." in told


def test_a_run_without_events_is_told(tmp_path, capsys):
    (tmp_path / "rank-0.json").write_text(json.dumps({**content(0, world=1), "events": []}))
    assert main(["trace", str(tmp_path), "--html", str(tmp_path / "page.html")]) == 0
    assert "No complete step was recorded" in capsys.readouterr().out


def test_the_page_loads_nothing_and_names_cannot_end_its_data():
    run = run_of(step_of(0, 0, 5.5), step_of(0, 3, 5.5))
    events = [row._replace(unit="</script><b>") for row in step_of(0, 0, 3)]
    for page in (html_page(run, analyse(run)), html_page(one := RunTrace([rank_trace(0, events)], []), analyse(one))):
        assert not re.search(r"""(?:src|href)\s*=|@import|url\(|https?://|fetch\(|import\(""", page)
        assert page.count("</script>") == 2 and '"DATA"' not in page


PROBE = """<script>
const lane = document.querySelector("#lanes canvas"), box = lane.getBoundingClientRect();
const at = (time) => box.left + label() + (time - view[0]) / (view[1] - view[0]) * (box.width - label());
const point = (time, y) => {
  lane.dispatchEvent(new PointerEvent("pointermove", {clientX: at(time), clientY: box.top + y}));
  return $("tip").textContent;
};
const pixels = lane.getContext("2d").getImageData(0, 0, lane.width, lane.height).data;
const seen = {late: point(3.5, 45), transfer: point(5.3, 45), work: point(1.5, 25), memory: point(3, 110),
  painted: pixels.some((value) => value > 0), wide: document.documentElement.scrollWidth, window: window.innerWidth};
zoom(0.5);
seen.zoomed = view;
make(document.body, "pre", JSON.stringify(seen)).id = "seen";
</script></body>"""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed (Debian: apt-get install chromium)")
@pytest.mark.parametrize("width", [1280, 500])  # headless windows are no narrower than 500
def test_the_page_in_a_browser(width, tmp_path):
    """It draws, tells details of what is pointed at, zooms, and is no wider than the window."""
    run = run_of(step_of(0, 0, 5.5), step_of(0, 3, 5.5))
    page = tmp_path / "page.html"
    page.write_text(html_page(run, analyse(run)).replace("</body>", PROBE))
    command = [str(BROWSER), "--headless=new", "--no-sandbox", "--disable-gpu", f"--window-size={width},900"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "Uncaught" not in done.stderr, done.stderr
    (text,) = re.findall(r'<pre[^>]* id="seen">(.*?)</pre>', done.stdout, re.S)
    seen = json.loads(text)
    assert "waits for rank 1, which is late to issue the gather of b\n3.00 s, from 2.00 s" in seen["late"]
    assert "waits for the transfer: gather of b\n500.0 ms" in seen["transfer"]
    assert seen["work"].startswith("rank 0 computes in a") and seen["memory"] == "8 B gathered or in reduction"
    assert seen["painted"] and seen["wide"] <= seen["window"] and seen["zoomed"] == [5, 15]
    rows = re.findall(r"<tr[^>]*>(.*?)</tr>", done.stdout, re.S)
    assert any(re.findall(r">([^<]*)</td>", row)[:3] == ["1", "a", "3.00 s"] for row in rows)
