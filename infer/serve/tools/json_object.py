"""Finds the end of a JSON object that comes in pieces."""

from __future__ import annotations

import re

MARKS = re.compile(r'[{}"\\]')


class JsonObject:
    """An object that is being written; its braces outside of texts say where it ends.

    Attributes:
      text: of the object so far.
      end: where the object ends; None: not yet.
      inner_end: where its first inner object ends; None: not yet.
    """

    def __init__(self):
        self.text = ""
        self.end: int | None = None
        self.inner_end: int | None = None
        self._seen = 0
        self._depth = 0
        self._quoted = False

    def add(self, text: str) -> str:
        """Adds text up to the object's end; returns what is behind it."""
        self.text += text
        while self.end is None:
            found = MARKS.search(self.text, self._seen)
            if found is None:
                self._seen = len(self.text)
                return ""
            if found[0] == "\\":
                self._seen = found.start()
                if found.end() == len(self.text):  # what it escapes has not come
                    return ""
                self._seen += 2
            else:
                self._seen = found.end()
                self._read(found[0])
        rest = self.text[self.end :]
        self.text = self.text[: self.end]
        return rest

    def _read(self, mark: str) -> None:
        if mark == '"':
            self._quoted = not self._quoted
        elif not self._quoted:
            self._depth += 1 if mark == "{" else -1
            if self._depth == 0:
                self.end = self._seen
            elif self._depth == 1 and mark == "}" and self.inner_end is None:
                self.inner_end = self._seen
