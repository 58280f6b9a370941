"""Grammars of calls, in llguidance's form of Lark, so that calls always parse and fit."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from infer.serve.tools.families import ToolFamily
from specjax._util.sampling_checks import LARK
from specjax.text.grammar import SPACING

Schema = Mapping[str, Any]
# Of a function that has none: OpenAI's, without parameters.
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
ANY_OBJECT = {"type": "object"}


class CallGrammar:
    """The grammars of calls to some functions.

    Args:
      family: how the model writes calls.
      functions: by name, the JSON schema of each one's arguments; None: it has no parameters.
      token_of: the id of a text that is one token, else None.
      parallel: a text may have several calls.
    """

    def __init__(
        self,
        family: ToolFamily,
        functions: Mapping[str, Schema | None],
        token_of: Callable[[str], int | None],
        parallel: bool,
    ):
        self._family = family
        self._token_of = token_of
        more = f"({self._text(family.between)} call)*" if parallel else ""
        parts = (self._text(family.before), "call", more, self._text(family.end))
        names = " | ".join(f"call_{number}" for number in range(len(functions)))
        self._rules = [f"call: {names}", f"calls: {_joined(parts)}"]
        for number, (name, schema) in enumerate(functions.items()):
            self._rules.append(f"call_{number}: {self._call(name, schema)}")

    def required(self) -> str:
        """Calls and nothing else."""
        marker = "" if self._family.bare else self._text(self._family.marker)
        return self._grammar(f"start: {_joined((marker, 'calls'))}")

    def optional(self) -> str:
        """Any text, and calls wherever a marker begins them."""
        family = self._family
        if family.bare:  # calls are the whole text, and other texts begin in another way
            return self._grammar("start: calls | TEXT", r"TEXT: /[^{](.|\n)*/")
        rules = ["start: marked* TEXT", r"TEXT: /(.|\n)*/", "marked: marker calls"]
        if self._token_of(family.marker) is None:
            rules.append(f"marker[lazy]: TEXT {_quoted(family.marker)}")
        else:
            rules.append(f"marker: TEXT {self._text(family.marker)}")
        return self._grammar(*rules)

    def or_answer(self, schema: Schema) -> str:
        """Calls, or an answer of JSON."""
        marker = "" if self._family.bare else self._text(self._family.marker)
        return self._grammar(f"start: {_joined((marker, 'calls'))} | {_json_rule(schema)}")

    def _grammar(self, *rules: str) -> str:
        return LARK + "\n".join(["%llguidance {}", *rules, *self._rules])

    def _call(self, name: str, schema: Schema | None) -> str:
        before, after = self._family.head.split("NAME")
        arguments = NO_PARAMETERS if schema is None else ANY_OBJECT | dict(schema)
        parts = (before + name + after, self._family.tail)
        return _joined((self._text(parts[0]), _json_rule(arguments), self._text(parts[1])))

    def _text(self, text: str) -> str:
        """A text as Lark has it, with those of the family's tokens that are tokens."""
        pieces: list[str] = []
        while text:
            found = {text.find(token): token for token in self._tokens() if token in text}
            at = min(found, default=len(text))
            if at > 0:
                pieces.append(_quoted(text[:at]))
                text = text[at:]
            else:
                pieces.append(f"<[{self._token_of(found[0])}]>")
                text = text.removeprefix(found[0])
        return " ".join(pieces)

    def _tokens(self) -> Sequence[str]:
        return [token for token in self._family.tokens if self._token_of(token) is not None]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _json_rule(schema: Schema) -> str:
    return f"%json {json.dumps({'x-guidance': SPACING, **schema})}"


def _joined(parts: Sequence[str]) -> str:
    return " ".join(filter(None, parts))
