"""The child process that renders chat templates: it reads JSON lines and writes JSON lines.

:mod:`specjax.text.chat` starts it, and says what it guards against. It imports nothing from
specjax, so that it starts fast.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import functools
import json
import os
import sys
from typing import Any, ClassVar

from jinja2 import Template, nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment


class GenerationTag(Extension):
    """``{% generation %}`` marks what the assistant wrote; here its body is ordinary text."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller):
        return caller()


def _raise_exception(text):
    raise TemplateError(text)


def _tojson(value, ensure_ascii=False, **options):
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


@functools.lru_cache(maxsize=8)
def _compiled(template: str) -> Template:
    """The template in a sandbox, with the functions and filters that transformers offers."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson  # Jinja's own filter escapes HTML
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(template)


def _render(template: str, variables: dict[str, Any], max_text: int) -> str:
    parts = []
    length = 0
    for part in _compiled(template).generate(variables):
        parts.append(part)
        length += len(part)
        if length > max_text:
            raise TemplateError(f"its text is longer than {max_text} characters")
    return "".join(parts)


def _answer(request: dict[str, Any]) -> dict[str, str]:
    # This timer is a thread that needs no interpreter lock, and it ends the process. Nothing else
    # stops 2 ** 10 ** 9, which keeps the lock.
    faulthandler.dump_traceback_later(request.pop("seconds"), exit=True)
    try:
        return {"text": _render(**request)}
    except MemoryError:
        return {"error": "it needs too much memory"}
    except Exception as error:  # a template is a program, so it can raise anything
        message = " ".join(str(error)[:500].split())
        return {"error": message or type(error).__name__}
    finally:
        faulthandler.cancel_dump_traceback_later()


def _limit_memory(max_bytes: int) -> None:
    # Windows has no such limit, and macOS does not enforce it.
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (max_bytes, hard))


if __name__ == "__main__":
    if hasattr(os, "nice"):  # not on Windows; a long template must not slow down its caller
        os.nice(10)
    _limit_memory(int(sys.argv[1]))
    for line in sys.stdin:
        print(json.dumps(_answer(json.loads(line))), flush=True)
