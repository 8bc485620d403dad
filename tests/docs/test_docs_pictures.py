"""The pictures of docs/architecture.md are those that the code draws now."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytestmark = pytest.mark.xdist_group("pictures")  # drawn once
FOLDER = Path(__file__).parents[2] / "docs" / "pictures"


DRAWN: dict[str, str] = {}
"""By the first test, for all: reading the whole source takes seconds."""


@pytest.fixture
def pictures(fake_world) -> dict[str, str]:
    if DRAWN:
        return DRAWN
    spec = importlib.util.spec_from_file_location("draw_pictures", FOLDER / "draw.py")
    assert spec is not None and spec.loader is not None
    drawing = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(drawing)
    fake_world(2)
    DRAWN.update(drawing.drawn(drawing.record()))
    return DRAWN


def test_the_committed_pictures_are_up_to_date(pictures):
    for name, picture in pictures.items():
        assert (FOLDER / name).read_text() == picture, f"{name} is old: python docs/pictures/draw.py"


def test_pictures_are_whole_and_need_nothing_from_outside(pictures):
    assert sorted(pictures) == ["floors.svg", "phases.svg", "step.svg"]
    for picture in pictures.values():
        assert ElementTree.fromstring(picture).tag == "{http://www.w3.org/2000/svg}svg"
        assert not re.findall(r"(?:href|src)=|@import|url\(", picture)
        assert "prefers-color-scheme: dark" in picture


def test_the_step_gathers_each_unit_twice_but_the_root_and_reduces_it_once(pictures):
    """What docs/architecture.md says of a step, and what the picture shows, are the same."""
    shown = re.findall(r'class="small bold">(gather|reduce) ([\d,]+) B<', pictures["step.svg"])
    block = f"{4 * (64 * 256 + 256 + 256 * 64 + 64):,}"
    root = f"{4 * 64 * 10 + 2 * 32:,}"  # each rank's five elements of the bias take 20 bytes, rounded up to 32
    assert sorted(shown) == [("gather", block)] * 4 + [("gather", root)] + [("reduce", block)] * 2 + [("reduce", root)]
