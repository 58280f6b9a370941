"""Grammars of calls, in llguidance's form of Lark, so that calls always parse and fit."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from infer.serve.tools.families import ToolFamily
from infer.serve.tools.tag_calls import is_plain_text
from specjax._util.sampling_checks import LARK
from specjax.text.grammar import SPACING

Schema = Mapping[str, Any]
# Of a function that has none: OpenAI's, without parameters.
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
ANY_OBJECT = {"type": "object"}
ANY_TEXT = r"ANY_TEXT: /(.|\n)*/"
FINAL = "<|channel|>final<|message|>"  # begins an answer of a family with channels


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
        if family.key:
            self._rules += [self._text_up_to("text_value", family.value_end), ANY_TEXT]

    def required(self) -> str:
        """Calls and nothing else, but for thoughts where a family has them."""
        if self._family.channels:
            return self._grammar(f"start: thought* {self._marked_calls}", *self._thoughts())
        return self._grammar(f"start: {self._marked_calls}")

    def optional(self) -> str:
        """Any text, and calls wherever a marker begins them."""
        family = self._family
        if family.bare:  # calls are the whole text, and other texts begin in another way
            return self._grammar("start: calls | TEXT", r"TEXT: /[^{](.|\n)*/")
        if family.channels:
            start = f"start: thought* ({self._marked_calls} | {self._text(FINAL)} ANY_TEXT)"
            return self._grammar(start, *self._thoughts())
        rules = ["start: marked* TEXT", r"TEXT: /(.|\n)*/", "marked: marker calls"]
        if self._token_of(family.marker) is None:
            rules.append(f"marker[lazy]: TEXT {_quoted(family.marker)}")
        else:
            rules.append(f"marker: TEXT {self._text(family.marker)}")
        return self._grammar(*rules)

    def or_answer(self, schema: Schema) -> str:
        """Calls, or an answer of JSON."""
        answer = f"{self._marked_calls} | {_json_rule(schema)}"
        if self._family.channels:
            answer = f"{self._marked_calls} | {self._text(FINAL)} {_json_rule(schema)}"
            return self._grammar(f"start: thought* ({answer})", *self._thoughts())
        return self._grammar(f"start: {answer}")

    @property
    def _marked_calls(self) -> str:
        marker = "" if self._family.bare else self._text(self._family.marker)
        return _joined((marker, "calls"))

    def _thoughts(self) -> Sequence[str]:
        """The rules of messages before a call or an answer."""
        head = f"{self._text('<|channel|>')} /analysis|commentary/ {self._text('<|message|>')}"
        following = f'{self._text("<|start|>")} "assistant"'
        rules = [f"thought: {head} thought_text {following}"]
        return [*rules, self._text_up_to("thought_text", "<|end|>"), ANY_TEXT]

    def _text_up_to(self, name: str, end: str) -> str:
        """The rule of any text that ends with ``end``, which is not in it."""
        is_token = self._token_of(end.strip()) is not None
        return f"{name}{'' if is_token else '[lazy]'}: ANY_TEXT {self._text(end)}"

    def _grammar(self, *rules: str) -> str:
        return LARK + "\n".join(["%llguidance {}", *rules, *self._rules])

    def _call(self, name: str, schema: Schema | None) -> str:
        before, after = self._family.head.split("NAME")
        arguments = NO_PARAMETERS if schema is None else ANY_OBJECT | dict(schema)
        head = self._text(before + name + after)
        written = self._tags(arguments) if self._family.key else _json_rule(arguments)
        return _joined((head, written, self._text(self._family.tail)))

    def _tags(self, arguments: Schema) -> str:
        """Arguments as tags, in the order of the schema; any ones if it names none."""
        before, after = self._family.key.split("KEY")
        properties = arguments.get("properties") or {}
        if not properties and arguments.get("additionalProperties") is not False:
            any_key = f"{self._text(before)} /[^<>\\n]+/ {self._text(after)}"
            return f"({any_key} text_value)*"
        shared = {key: arguments[key] for key in ("$defs", "definitions") if key in arguments}
        parts = []
        for name, schema in properties.items():
            value = self._tag_value(schema, shared)
            part = f"{self._text(before + name + after)} {value}"
            is_required = name in (arguments.get("required") or ())
            parts.append(part if is_required else f"({part})?")
        return _joined(parts)

    def _tag_value(self, schema: Any, shared: Schema) -> str:
        """One argument's value and its end. Texts are free, apart from those of an ``enum``."""
        end = self._text(self._family.value_end)
        if not is_plain_text(schema):
            fields = schema if isinstance(schema, dict) else {}
            return f"{_json_rule({**shared, **fields})} {end}"
        texts = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if texts is None:
            return "text_value"
        return f"({' | '.join(map(_quoted, texts))}) {end}"

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
