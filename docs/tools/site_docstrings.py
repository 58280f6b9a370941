"""An extension of mkdocstrings: what our docstrings and comments say, as its pages can show it."""

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|func|meth|mod|data|attr|obj|exc):`~?([^`]+)`")
COMMENT = re.compile(r"[^\"']*\s#\s(.+)")


class Docstrings(griffe.Extension):
    """Changes docstrings before their sections are parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """A reference such as :func:`name` becomes code: its colon would begin a type."""
        if obj.docstring:
            obj.docstring.value = ROLE.sub(r"`\1`", obj.docstring.value)

    def on_attribute(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """The comment behind a class's field describes it."""
        if attr.docstring or not (attr.parent and attr.parent.is_class and attr.lineno):
            return
        line = attr.lines_collection[attr.filepath][attr.lineno - 1]
        comment = COMMENT.fullmatch(line)
        if comment:
            text = ROLE.sub(r"`\1`", comment[1])
            attr.docstring = griffe.Docstring(text[0].upper() + text[1:] + ".", parent=attr)
