"""Sphinx's settings: `make docs`. Pages are the Markdown files here; the rest is made from the source."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_ext"))

from fullshard.version import VERSION  # noqa: E402

project = "Fullshard"
author = "the authors of Fullshard"
copyright = f"2026, {author}"
version = release = VERSION

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "outside",
    "reference",
    "api_page",
    "vocabulary",
    "llms",
    "checked",
]

source_suffix = {".md": "markdown"}
exclude_patterns = ["_build", "_ext", "_static"]
suppress_warnings: list[str] = []  # none: a warning is an error here

myst_enable_extensions = ["colon_fence", "deflist", "attrs_inline"]
myst_heading_anchors = 4  # the anchors that a repository browser gives headings

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
highlight_language = "none"  # a block without a language is a message or a command line
default_role = "code"  # docstrings write names in single backticks

html_theme = "furo"
html_title = f"Fullshard {VERSION}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = True  # llms.txt points to the texts
html_theme_options = {"navigation_with_keys": True}
pygments_style = "friendly"
pygments_dark_style = "monokai"
