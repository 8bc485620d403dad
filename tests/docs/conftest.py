"""A package in which everything that a reader of source meets is wrong or rare, made once for all tests here."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "_ext"))  # the site's own extensions

from reading import Package, locate

ODD: dict[str, str | bytes] = {
    "__init__.py": '"""An odd package.\n\nMore of it."""\nfrom .circle_a import Alpha\nfrom .names import *\n',
    "broken.py": "def right():\n    pass\n\ndef wrong(:\n",
    "latin.py": b"# -*- coding: latin-1 -*-\nNAME = '\xe9'\n",
    "not_utf8.py": b"x = 1\nNAME = '\xff\xfe'\n",
    "no_docstring.py": "VALUE = 3\n",
    "empty.py": "",
    "nul.py": b"x = 1\x00\n",
    "bom.py": b"\xef\xbb\xbfBOM = 1\r\nNEXT = BOM\r\n",
    "circle_a.py": "from .circle_b import Beta\nclass Alpha:\n    other: Beta\n"
    "    def go(self):\n        return self.other.stop()\n",
    "circle_b.py": (
        "from __future__ import annotations\nfrom . import circle_a\n"
        "class Beta:\n    def stop(self): return circle_a.Alpha\n"
    ),
    "names.py": (
        "def starred(one, *rest, two=2, **more):\n    return one\n"
        "class Base:\n    def shared(self): ...\n    def append(self): ...\n"
    ),
    "star_user.py": "from .names import *\nstarred(1, two=3)\n",
    "star_circle.py": "from .star_circle_2 import *\nmissing\n",
    "star_circle_2.py": "from .star_circle import *\n",
    "nested.py": (
        "class Outer:\n    class Inner:\n        class Deep:\n            def most(self): pass\n"
        "    def made(self):\n        def within():\n            class Local: pass\n            return Local\n"
        "        return within\n"
    ),
    "twice.py": (
        "if True:\n    def same(): '''First.'''\nelse:\n    def same(): '''Second.'''\n"
        "class Two:\n    @property\n    def x(self): return 1\n    @x.setter\n    def x(self, value): pass\n"
    ),
    "wide.py": "é, ß = 1, 2\ntotal = é + ß\ntext = 'é'; other = total\n",
    "hint.py": (
        "from .names import Base\nfrom . import names as n\n"
        "class Child(Base):\n    def use(self, given: 'Base | None'):\n"
        "        self.shared()\n        given.shared()\n        n.starred(two=1)\n        return Child().use\n"
        "def unknown(thing):\n    return thing.use, thing.append\n"
    ),
    "markup.py": '"""<script>alert(1)</script> & `<b>`."""\nX = "</pre><script>"  # <i>\n',
    "spaced/deep/inside.py": "from ...names import Base\nfrom .... import above\n",
    "fields.py": (
        '"""Fields of each kind."""\nfrom dataclasses import dataclass\nfrom enum import Enum\n'
        "from typing import Any, NamedTuple\n\n"
        "class Colour(Enum):\n    RED = 1  # of blood\n    BLUE = 2\n\n"
        '@dataclass\nclass Point:\n    """A point.\n\n    Attributes:\n        x, y: where it lies.\n    """\n'
        '    x: int\n    y: int = 0\n    name: str = ""\n    """What it is called."""\n\n'
        "class Pair(NamedTuple):\n    left: int\n    right: Any = None\n\n"
        "class Plain:\n    count = 0\n    def grow(self, by: int, how: Any = None):\n"
        '        """Grow it.\n\n        Args:\n            by: how much.\n        """\n'
        "        self.late = self.count + by\n"
        'def roles():\n    "As :class:`Point` and :meth:`~odd.names.Base.shared`, '
        ':ref:`a text <there>` and :any:`gone`."\n'
    ),
}
"""`spaced` is a namespace package: it has no `__init__`."""


@pytest.fixture(scope="session")
def odd_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "odd"
    for name, content in ODD.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


@pytest.fixture(scope="session")
def odd(odd_folder: Path) -> Package:
    return locate(str(odd_folder))
