"""The reference of any Python package, from its source alone: a page and an index of names for every file.

    find     what a path or a package's name means      resolve   what names mean, over all files
    read     bytes -> text and tree, or a fault         package   all of it, and who depends on whom
    scopes   one walk: definitions, names, imports      keywords  the indexes
    pages, index_pages, site -> HTML                    markdown -> Markdown           write -> a folder

Nothing that is read is imported or run. `fullshard docs` and this project's own site are made of it.
"""

from .facts import Definition, Fault, Package, SourceFile, Use
from .find import Place, find
from .keywords import Keywords
from .package import package
from .write import write

__all__ = ["Definition", "Fault", "Keywords", "Package", "Place", "SourceFile", "Use", "find", "package", "write"]
