"""JSON schemas as regular expressions, where their values are a regular language.

A schema with a keyword that is not known here has no expression. Nor has an object with free keys,
or a reference that leads back to itself. Values are spaced and written as llguidance has them
(:data:`specjax.text.grammar.SPACING`); :mod:`specjax.text.automaton` compares masks with it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

# As llguidance writes them.
CHARACTER = r'(?:[^"\\\x00-\x1F\x7F]|\\(?:["\\bfnrt]|u00(?:[01][a-fA-F0-9]|7[fF])))'
INTEGER = r"-?(?:0|[1-9][0-9]*)"
NUMBER = INTEGER + r"(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?"
ANNOTATIONS = {"title", "description", "default", "examples", "$schema", "$id", "$comment"}
DEFINITIONS = ("$defs", "definitions")
MOST_REPEATS = 64  # of an item or a character: each is a copy in the automaton
MOST_INTEGERS = 256  # of a range, which is written out
LONGEST = 100_000  # characters of an expression


class NoRegex(Exception):
    """The schema is not a regular language, or not one that is read here."""


def regex_of_schema(schema: Any) -> str:
    """An expression that matches the JSON of all values that fit, and nothing else.

    Raises:
      NoRegex: there is none.
    """
    try:
        return _Writer(schema).value(schema, ())
    except RecursionError:
        raise NoRegex from None


class _Writer:
    def __init__(self, root: Any):
        self._root = root

    def value(self, schema: Any, above: tuple[str, ...]) -> str:
        """The expression of one schema; ``above`` are the references that led to it."""
        if not isinstance(schema, dict):
            raise NoRegex
        ignored = (*ANNOTATIONS, *DEFINITIONS)  # definitions count where a reference leads there
        fields = {key: schema[key] for key in schema if key not in ignored}
        for key, write in self._alone.items():
            if key in fields:
                # A type beside it says the same again. Where it does not, masks differ.
                if not set(fields) <= {key, "type"}:
                    raise NoRegex
                return _short(write(self, fields[key], above))
        kinds = fields.pop("type", None)
        if isinstance(kinds, list) and len(kinds) > 1 and not fields:
            return _any_of([self._typed(kind, {}, above) for kind in kinds])
        return _short(self._typed(kinds, fields, above))

    def _reference(self, target: Any, above: tuple[str, ...]) -> str:
        if target in above or not isinstance(target, str):
            raise NoRegex
        where, _, name = target.removeprefix("#/").partition("/")
        if where not in DEFINITIONS or not target.startswith("#/"):
            raise NoRegex
        found = self._root.get(where)
        if not isinstance(found, dict) or name not in found:
            raise NoRegex
        return self.value(found[name], (*above, target))

    def _one_of(self, schemas: Any, above: tuple[str, ...]) -> str:
        if not isinstance(schemas, list) or not schemas:
            raise NoRegex
        return _any_of([self.value(schema, above) for schema in schemas])

    def _constant(self, value: Any, above: tuple[str, ...]) -> str:
        return self._enumeration([value], above)

    def _enumeration(self, values: Any, above: tuple[str, ...]) -> str:
        simple = (str, int, bool, type(None))
        if not isinstance(values, list) or not all(isinstance(value, simple) for value in values):
            raise NoRegex
        return _any_of([_literal(value) for value in values])

    _alone: ClassVar[dict[str, Callable[..., str]]] = {
        "$ref": _reference,
        "anyOf": _one_of,
        "const": _constant,
        "enum": _enumeration,
    }

    def _typed(self, kind: Any, fields: dict[str, Any], above: tuple[str, ...]) -> str:
        """The expression of a type with the keywords that belong to it."""
        writers = {
            "string": (self._text, {"minLength", "maxLength"}),
            "integer": (self._integer, {"minimum", "maximum"}),
            "number": (lambda fields, above: NUMBER, set()),
            "boolean": (lambda fields, above: "(?:true|false)", set()),
            "null": (lambda fields, above: "null", set()),
            "array": (self._array, {"items", "minItems", "maxItems"}),
            "object": (self._object, {"properties", "required", "additionalProperties"}),
        }
        if not isinstance(kind, str) or kind not in writers:
            raise NoRegex
        write, known = writers[kind]
        if not set(fields) <= known:
            raise NoRegex
        return write(fields, above)

    def _text(self, fields: dict[str, Any], above: tuple[str, ...]) -> str:
        return f'"{CHARACTER}{_times(fields.get("minLength", 0), fields.get("maxLength"))}"'

    def _integer(self, fields: dict[str, Any], above: tuple[str, ...]) -> str:
        if not fields:
            return INTEGER
        low, high = fields.get("minimum"), fields.get("maximum")
        if type(low) is not int or type(high) is not int or not 0 <= high - low < MOST_INTEGERS:
            raise NoRegex
        minus_zero = ["-0"] if low < 0 <= high else []  # which is JSON, too
        return _any_of([*minus_zero, *(str(value) for value in range(low, high + 1))])

    def _array(self, fields: dict[str, Any], above: tuple[str, ...]) -> str:
        if "items" not in fields:
            raise NoRegex
        item = self.value(fields["items"], above)
        low, high = fields.get("minItems", 0), fields.get("maxItems")
        if high == 0:
            return r"\[\]"
        # The first item has no comma before it.
        more = _times(max(low - 1, 0), None if high is None else high - 1)
        items = f"{item}(?:, {item}){more}"
        return rf"\[{items}\]" if low else rf"\[(?:{items})?\]"

    def _object(self, fields: dict[str, Any], above: tuple[str, ...]) -> str:
        """Its properties in their order; those that are not required may be missing."""
        properties = fields.get("properties", {})
        required = fields.get("required", [])
        if fields.get("additionalProperties") is not False or not isinstance(properties, dict):
            raise NoRegex
        if not isinstance(required, list) or not set(required) <= set(properties):
            raise NoRegex
        members = [
            (f"{_literal(name)}: {self.value(schema, above)}", name in required)
            for name, schema in properties.items()
        ]
        return rf"\{{{_members(members)}\}}"


def _members(members: Sequence[tuple[str, bool]]) -> str:
    """Members with commas between those that are there.

    Which is the first is a choice; what follows it has a comma before it, in any case.
    """
    choices = []
    can_be_empty = True
    for first, (member, is_required) in enumerate(members):
        rest = [
            f"(?:, {other})" + ("" if needed else "?") for other, needed in members[first + 1 :]
        ]
        choices.append(member + "".join(rest))
        if is_required:
            can_be_empty = False
            break
    if not choices:
        return ""
    return _any_of(choices) + ("?" if can_be_empty else "")


def _times(low: Any, high: Any) -> str:
    for bound in (low, high):
        if bound is not None and (type(bound) is not int or not 0 <= bound <= MOST_REPEATS):
            raise NoRegex
    return f"{{{low},{'' if high is None else high}}}"


def _literal(value: Any) -> str:
    return re.escape(json.dumps(value, ensure_ascii=False))


def _any_of(choices: Sequence[str]) -> str:
    return f"(?:{'|'.join(choices)})"


def _short(expression: str) -> str:
    if len(expression) > LONGEST:
        raise NoRegex
    return expression
