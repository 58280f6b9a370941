"""Conversations in the forms in which people keep them, as the messages that templates read.

A record is an object of a JSON line, or a row of a table. Its form shows in its keys:

* ``messages``: OpenAI's. ``content`` is a text, parts, or null beside ``tool_calls``.
* ``conversations``: ShareGPT's ``from`` and ``value``, or ``role`` and ``content``.
* ``prompt`` and ``completion``: texts, or lists of messages.
* ``instruction``, ``input`` and ``output``: Alpaca's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Message = dict[str, Any]

ASSISTANT = "assistant"
ROLES = {"human": "user", "gpt": ASSISTANT}  # ShareGPT's names
OPTIONAL = ("tool_calls", "tool_call_id", "name", "reasoning_content")  # of a message
# The keys of all forms.
KEYS = (
    *("messages", "conversations", "prompt", "completion", "instruction", "input", "output"),
    *("tools", "system"),
)


class Conversation(NamedTuple):
    """What a template renders.

    Attributes:
      messages: with ``role`` and ``content``, and what else OpenAI's have.
      tools: the functions that the assistant may call; None: there are none.
    """

    messages: list[Message]
    tools: list[Any] | None = None


def read_conversation(record: Mapping[str, Any]) -> Conversation | None:
    """The conversation of a record; None if its keys are of no form.

    Raises:
      ValueError: the keys are of a form, and the values are not; the message says what is wrong.
    """
    messages = _messages(record)
    if messages is None:
        return None
    system = record.get("system")
    if isinstance(system, str) and system and messages[:1] and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    if not messages:
        raise ValueError("the conversation has no message")
    return Conversation(messages, _tools(record.get("tools")))


def _messages(record: Mapping[str, Any]) -> list[Message] | None:
    for key in ("messages", "conversations"):
        if record.get(key) is not None:
            return messages_of(record[key], key)
    if record.get("prompt") is not None and record.get("completion") is not None:
        asked = _messages_or_text(record["prompt"], "prompt", "user")
        return asked + _messages_or_text(record["completion"], "completion", ASSISTANT)
    if record.get("instruction") is not None and record.get("output") is not None:
        return _instruction(record)
    return None


def _messages_or_text(value: Any, key: str, role: str) -> list[Message]:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    return messages_of(value, key)


def _instruction(record: Mapping[str, Any]) -> list[Message]:
    texts = [record["instruction"], record.get("input") or "", record["output"]]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError('"instruction", "input" and "output" must be texts')
    asked, further, answer = texts
    if further:
        asked = f"{asked}\n\n{further}"
    return [{"role": "user", "content": asked}, {"role": ASSISTANT, "content": answer}]


def messages_of(turns: Any, key: str) -> list[Message]:
    """Turns of OpenAI's or ShareGPT's form as messages; ``key`` names them in errors.

    Raises:
      ValueError: they are no list of turns.
    """
    if not isinstance(turns, Sequence) or isinstance(turns, str):
        raise _no_turns(key)
    return [_message(turn, key) for turn in turns]


def _message(turn: Any, key: str) -> Message:
    if not isinstance(turn, Mapping):
        raise _no_turns(key)
    role = turn.get("role", turn.get("from"))
    content = turn.get("content", turn.get("value"))
    if not isinstance(role, str):
        raise _no_turns(key)
    message: Message = {"role": ROLES.get(role, role), "content": _text(content, turn, key)}
    for name in OPTIONAL:
        if turn.get(name) is not None:  # a table has null where a message has no such field
            message[name] = turn[name]
    if "tool_calls" in message:
        if not isinstance(message["tool_calls"], list):
            raise ValueError('"tool_calls" must be a list')
        message["tool_calls"] = [with_object(call) for call in message["tool_calls"]]
    return message


def _text(content: Any, turn: Mapping[str, Any], key: str) -> str:
    """A turn's text; its parts, if it has several, one after the other."""
    if isinstance(content, str):
        return content
    if content is None and (turn.get("tool_calls") or turn.get("reasoning_content")):
        return ""
    if not isinstance(content, Sequence):
        raise _no_turns(key)
    texts = []
    for part in content:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            raise _no_turns(key)
        texts.append(part["text"])
    return "".join(texts)


def with_object(call: Any) -> Any:
    """A call whose arguments are an object, as templates expect; OpenAI writes them as JSON."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _tools(value: Any) -> list[Any] | None:
    """The tools of a record: a list, or the JSON of one."""
    if isinstance(value, str) and value:
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise ValueError('"tools" must be a list, or the JSON of one') from None
    if value is not None and not isinstance(value, (list, str)):
        raise ValueError('"tools" must be a list, or the JSON of one')
    return list(value) if value else None


def _no_turns(key: str) -> ValueError:
    writer, text = ("from", "value") if key == "conversations" else ("role", "content")
    return ValueError(f'"{key}" must be a list of objects with "{writer}" and "{text}"')
