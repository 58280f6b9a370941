"""Renders chat templates, in a child process with limits.

A chat template is a Jinja program that comes with a checkpoint, so it is not trusted. The child
guards against four things:

- Access to Python objects and files. Jinja's sandbox refuses it.
- Endless or very long computing, such as ``2 ** 10 ** 9``. No signal interrupts that in Python, so
  the child ends itself after ``MAX_SECONDS``.
- Memory. The child may take ``MAX_MEMORY`` bytes, and a rendered text ``MAX_TEXT`` characters.
- Crashes, such as by deep recursion. They end the child, not this process.

A child takes 0.1 s to start and then renders one conversation after the other, until a template
kills it. There are as many children as threads render at the same time, up to ``MAX_CHILDREN``.
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specjax._util.errors import ModelError, OptionError

MAX_SECONDS = 5.0  # for one conversation
MAX_MEMORY = 2**30  # bytes, with the interpreter's own
MAX_TEXT = 2**22  # characters of a rendered text: more than any context holds
MAX_TEMPLATE = 2**20  # characters: the longest in use have 20,000
MAX_CHILDREN = 8
SCRIPT = Path(__file__).with_name("chat_process.py")


class _Child:
    """One child process. It starts with the first request, and again after it was killed."""

    def __init__(self):
        self._process: subprocess.Popen[str] | None = None

    def ask(self, request: str) -> str:
        """The answer to a request, one line each; empty where the process died over it."""
        if self._process is None or self._process.poll() is not None:
            self._process = self._start()
        process = self._process
        assert process.stdin is not None and process.stdout is not None, "both are pipes"
        try:
            process.stdin.write(request + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        except BaseException:
            # Interrupted: the answer still to come would be read as the next request's.
            process.kill()
            raise
        if not answer:
            process.kill()
            process.wait()
        return answer

    def _start(self) -> subprocess.Popen[str]:
        # -P keeps the script's folder off the import path, where a module of ours could hide one
        # of the standard library.
        command = [sys.executable, "-P", str(SCRIPT), str(MAX_MEMORY)]
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="ascii",
        )


class _Children:
    """The child processes. A thread waits while all of them render for others."""

    def __init__(self):
        # The last one used comes first, so that no more are started than are needed.
        self._free: queue.LifoQueue[_Child] = queue.LifoQueue()
        for _ in range(MAX_CHILDREN):
            self._free.put(_Child())

    def ask(self, request: str) -> tuple[str, float]:
        """As :meth:`_Child.ask`, of a free child; and the seconds that it took."""
        child = self._free.get()
        began = time.monotonic()
        try:
            return child.ask(request), time.monotonic() - began
        finally:
            self._free.put(child)


_children = _Children()


def render(
    template: str,
    messages: Sequence[Mapping],
    special: Mapping[str, str],
    source: str,
    options: Mapping[str, Any] | None = None,
) -> str:
    """The prompt of a conversation, up to the assistant's turn, as ``transformers`` renders it.

    Args:
      template: the chat template, in Jinja.
      messages: with ``role`` and ``content`` each.
      special: the special tokens that templates may name, such as ``bos_token``.
      source: whose template it is; errors name it.
      options: further variables of the template, such as Qwen3's ``enable_thinking``.
    Raises:
      ModelError: the template fails, or exceeds a limit.
      OptionError: the messages are not JSON.
    """
    failed = f"{source}: its chat template failed"
    if len(template) > MAX_TEMPLATE:
        raise ModelError(f"{failed}: it is longer than {MAX_TEMPLATE} characters")
    # In transformers, too, tools and documents are None where the caller gives none.
    variables: dict[str, Any] = {"tools": None, "documents": None, "add_generation_prompt": True}
    variables |= {**special, **(options or {}), "messages": messages}
    request = {
        "template": template,
        "variables": variables,
        "seconds": MAX_SECONDS,
        "max_text": MAX_TEXT,
    }
    try:
        line = json.dumps(request)
    except (TypeError, ValueError, RecursionError) as error:
        raise OptionError(f"messages: expected what JSON can say ({error})") from None

    answer, seconds = _children.ask(line)
    if not answer:
        slow = seconds >= MAX_SECONDS
        reason = f"it took longer than {MAX_SECONDS:g} s" if slow else "its process crashed"
        raise ModelError(f"{failed}: {reason}")
    result = json.loads(answer)
    if "text" not in result:
        raise ModelError(f"{failed}: {result['error']}")
    return result["text"]
