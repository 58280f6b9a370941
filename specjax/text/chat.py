"""Chat templates, rendered in a process of their own.

A template is a program that comes with a checkpoint. Jinja's sandbox keeps it from files, but not
from ``2 ** 10 ** 9`` or a text of 10 GB, and no signal interrupts those. So a child renders, under
limits of time and memory; it takes 0.1 s to start and then serves every conversation.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specjax._util.errors import ModelError, OptionError

SECONDS = 5.0  # for one conversation
MEMORY = 2**30  # bytes, the interpreter's own included
LONGEST = 2**22  # characters of a rendered text: beyond any context
LONGEST_TEMPLATE = 2**20  # characters: the largest in use have 20,000
SCRIPT = Path(__file__).with_name("chat_process.py")


class _Child:
    """The process: started when first asked, and anew after a template has killed it."""

    def __init__(self):
        self._lock, self._process = threading.Lock(), None

    def ask(self, request: str) -> str:
        """A line for a line; nothing where the process died over it."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._process = self._start()
            process = self._process
            try:
                process.stdin.write(request + "\n")
                process.stdin.flush()
                answer = process.stdout.readline()
            except BrokenPipeError:
                answer = ""
            except BaseException:  # interrupted: its answer would be the next one's
                process.kill()
                raise
            if not answer:
                process.kill()
                process.wait()
            return answer

    def _start(self) -> subprocess.Popen:
        # -P: beside the script lie modules of ours with names of the standard library's.
        command = [sys.executable, "-P", str(SCRIPT), str(MEMORY)]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, encoding="ascii"
        )


_child = _Child()


def render(
    template: str,
    messages: Sequence[Mapping],
    special: Mapping[str, str],
    source: str,
    options: Mapping[str, Any] | None = None,
) -> str:
    """The prompt of a conversation as ``transformers`` renders it, up to the assistant's turn.

    ``special`` are the special tokens that templates may name, ``source`` whose template it is,
    ``options`` further variables of the template, as ``enable_thinking`` of Qwen3's.

    Raises:
      ModelError: the template fails, or passes a limit.
      OptionError: the messages are no JSON.
    """
    failed = f"{source}: its chat template failed"
    if len(template) > LONGEST_TEMPLATE:
        raise ModelError(f"{failed}: it is longer than {LONGEST_TEMPLATE} characters")
    # Those that a caller can leave out are None in transformers, too.
    variables = {"tools": None, "documents": None, "add_generation_prompt": True} | special
    variables |= {**(options or {}), "messages": messages}
    request = {"template": template, "variables": variables, "seconds": SECONDS, "most": LONGEST}
    try:
        request = json.dumps(request)
    except (TypeError, ValueError, RecursionError) as error:
        raise OptionError(f"messages: expected what JSON can say ({error})") from None
    began = time.monotonic()
    line = _child.ask(request)
    if line:
        answer = json.loads(line)
        if "text" in answer:
            return answer["text"]
        raise ModelError(f"{failed}: {answer['error']}")
    slow = time.monotonic() - began >= SECONDS
    why = f"it took longer than {SECONDS:g} s" if slow else "its process crashed"
    raise ModelError(f"{failed}: {why}")
