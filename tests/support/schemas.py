"""JSON schemas in the shapes of public suites, written anew, and a check of values against them.

All of their texts are short: strings, arrays and numbers are bounded.
"""

import itertools
import random

import jsonschema

WORDS = ("name", "age", "tags", "city", "price", "open", "unit", "kind", "notes", "id")


def validate(value, schema) -> None:
    """Raises ValidationError if the value does not fit."""
    jsonschema.validate(value, schema)


def written_schemas(count: int) -> list[dict]:
    """``count`` different schemas, always the same ones."""
    draw = random.Random(0)
    shapes = itertools.cycle((_record, _nested, _listing, _choice, _optional))
    return [next(shapes)(draw) for _ in range(count)]


def _scalar(draw) -> dict:
    return draw.choice(
        (
            {"type": "string", "maxLength": draw.randint(1, 6)},
            {"type": "integer", "minimum": 0, "maximum": draw.randint(1, 99)},
            {"type": "boolean"},
            {"type": "null"},
            {"enum": draw.sample(WORDS, 3)},
            {"const": draw.randint(0, 9)},
            {"type": "string", "pattern": "^[a-c]{2,4}$"},
        )
    )


def _object(properties: dict, required) -> dict:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def _record(draw) -> dict:
    names = draw.sample(WORDS, draw.randint(1, 3))
    return _object({name: _scalar(draw) for name in names}, names)


def _nested(draw) -> dict:
    inner, outer = draw.sample(WORDS, 2)
    return _object({outer: _object({inner: _scalar(draw)}, [inner])}, [outer])


def _listing(draw) -> dict:
    low = draw.randint(0, 1)
    return {"type": "array", "items": _scalar(draw), "minItems": low, "maxItems": low + 2}


def _choice(draw) -> dict:
    return {"anyOf": [_record(draw), _listing(draw)]}


def _optional(draw) -> dict:
    names = draw.sample(WORDS, 2)
    return _object({name: _scalar(draw) for name in names}, names[:1])
