"""Constrained tasks: what ``--task FILE`` reads, one JSON object per line.

* ours: ``{"prompt": TEXT, "constraints": [WORD, …]}``, or constraints by reward name,
  ``{"lexical": […], "forbidden": […]}``
* CommonGen: ``{"concepts": [WORD, …], "references": […]}``; the words may also be one text,
  ``a#b#c``, under ``concept_set``. The prompt is :data:`COMMONGEN`, two examples and the words.
* conversations: ``{"messages": [{"role", "content"}, …]}``, ``{"conversations": [{"from",
  "value"}, …]}``, or ``{"chosen": TEXT}`` with turns that begin ``Human:`` and ``Assistant:``. The
  prompt is everything before the assistant's last turn.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Mapping
from typing import Any

from specjax._util.files import parse_json
from specjax.text.conversations import Message, messages_of

COMMONGEN = """Write one sentence that uses all of the words.

Words: dog, park, ball
Sentence: A girl throws a ball to her dog in the park.

Words: cook, pan, egg, kitchen
Sentence: A man cooks an egg in a pan in his kitchen.

Words: {words}
Sentence:"""
TURN = "\n\n{}: "  # what begins a turn, by its writer
USER = "Human"
ASSISTANT = "Assistant"
WRITERS = {"user": USER, "human": USER, "assistant": ASSISTANT, "gpt": ASSISTANT}


def json_objects(data: bytes) -> Iterator[tuple[int, dict[str, Any] | ValueError]]:
    """The index of each line, and its object or the error in it. Empty lines are skipped.

    A file that is one JSON array has an object per item, and one JSON object is a file of one,
    however they are printed.

    Lines are split as bytes. As text they would also split at U+2028 and the like, which JSON
    allows in strings, and a line that is not UTF-8 would make the whole file unreadable.
    """
    data = data.removeprefix(codecs.BOM_UTF8)
    entries = _items_of_value(data)
    if entries is None:
        entries = _lines(data)
    for index, entry in entries:
        if not isinstance(entry, dict | ValueError):
            entry = ValueError(f"expected an object, got {type(entry).__name__}")
        yield index, entry


def _items_of_value(data: bytes) -> Iterator[tuple[int, Any]] | None:
    """The items of a file that is one JSON value, with their indices; None for other files."""
    try:
        value = parse_json(data)
    except ValueError:
        return None  # lines, each a value
    return enumerate(value if isinstance(value, list) else [value])


def _lines(data: bytes) -> Iterator[tuple[int, Any]]:
    """The index of each line that is not empty, and its value or the error in it."""
    for index, line in enumerate(data.splitlines()):
        if not line.strip():
            continue
        try:
            yield index, parse_json(line)
        except ValueError as error:
            yield index, error


def of_batch(entry: Mapping[str, Any]) -> dict[str, Any] | None:
    """The prompt of a line of OpenAI's batch format, with its id; None for other lines.

    The parameters in its ``body``, such as max_tokens, are not read: the job has its own.
    """
    body = entry.get("body")
    if "custom_id" not in entry or not isinstance(body, dict):
        return None
    asked = {key: body[key] for key in ("messages", "prompt") if key in body}
    return {"id": entry["custom_id"]} | asked


def read_case(
    entry: Mapping[str, Any], chat: bool = False
) -> tuple[str | list[Message], dict[str, list[str]]]:
    """A line's prompt, as text or as chat messages, and its constraints by reward name.

    If a line has a prompt and messages, ``chat`` chooses the messages.

    Raises:
      ValueError: the line has none of the formats; the message says what was expected.
    """
    constraints = constraints_of(entry)
    if isinstance(entry.get("prompt"), str) and not (chat and "messages" in entry):
        return entry["prompt"], constraints
    if isinstance(entry.get("chosen"), str):
        return before_answer(entry["chosen"]), constraints
    for key in ("messages", "conversations"):
        if key in entry:
            return _asked(entry[key], key), constraints
    words = constraints.get("lexical")
    if words and ("concepts" in entry or "concept_set" in entry):
        return COMMONGEN.format(words=", ".join(words)), constraints
    raise ValueError('expected "prompt", "concepts", "messages", "conversations" or "chosen"')


def plain(messages: list[Message]) -> str:
    """A conversation as text, for models without a chat template."""
    text = ""
    for message in messages:
        writer = WRITERS.get(message["role"], message["role"])
        text += TURN.format(writer) + message["content"]
    return text + TURN.format(ASSISTANT).rstrip()


def constraints_of(entry: Mapping[str, Any]) -> dict[str, list[str]]:
    """A line's constraints by reward name; a list of words is for the reward ``lexical``."""
    words = entry.get("constraints", entry.get("concepts", entry.get("concept_set", {})))
    if isinstance(words, str):
        words = [word for word in words.split("#") if word]
    by_reward = {"lexical": words} if isinstance(words, list) else words
    if not isinstance(by_reward, dict) or not all(map(_is_words, by_reward.values())):
        raise ValueError('"constraints" must be a list of words, or such lists by reward name')
    if not all(by_reward.values()):
        raise ValueError("its constraints have no word")
    return by_reward


def _is_words(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(word, str) for word in value)


def before_answer(text: str) -> str:
    """A conversation up to the assistant's last turn."""
    mark = TURN.format(ASSISTANT).rstrip()
    if mark not in text:
        raise ValueError('"chosen" has no turn of the assistant')
    return text[: text.rindex(mark)] + mark


def _asked(turns: Any, key: str) -> list[Message]:
    """Turns as chat messages, without a last answer."""
    messages = messages_of(turns, key)
    if messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages:
        raise ValueError(f'"{key}" has no turn to answer')
    return messages
