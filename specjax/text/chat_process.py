"""The script that renders chat templates: JSON lines in, JSON lines out, until there are no more.

:mod:`specjax.text.chat` runs it. It imports nothing of ours, for it is to start at once.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import functools
import json
import sys
from typing import Any

from jinja2 import Template, nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment


class GenerationTag(Extension):
    """``{% generation %}`` marks what an assistant wrote; here its body is text like any other."""

    tags = frozenset({"generation"})

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller):
        return caller()


def _refuse(text):
    raise TemplateError(text)


def _tojson(value, ensure_ascii=False, **options):
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


@functools.lru_cache(maxsize=8)
def _compiled(template: str) -> Template:
    """In a jinja2 sandbox with what transformers offers to templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson  # jinja's own escapes HTML
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(template)


def _render(template: str, variables: dict[str, Any], most: int) -> str:
    pieces, length = [], 0
    for piece in _compiled(template).generate(variables):
        pieces.append(piece)
        length += len(piece)
        if length > most:
            raise TemplateError(f"its text is longer than {most} characters")
    return "".join(pieces)


def _answer(request: dict[str, Any]) -> dict[str, str]:
    # A thread that needs no interpreter lock ends the process: nothing else stops 2 ** 10 ** 9.
    faulthandler.dump_traceback_later(request.pop("seconds"), exit=True)
    try:
        return {"text": _render(**request)}
    except MemoryError:
        return {"error": "it needs too much memory"}
    except Exception as error:  # a template is a program: any exception can come out of it
        said = " ".join(str(error)[:500].split())
        return {"error": said or type(error).__name__}
    finally:
        faulthandler.cancel_dump_traceback_later()


def _limit_memory(most: int) -> None:
    # Windows has no such limit, and macOS does not keep it.
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))


if __name__ == "__main__":
    _limit_memory(int(sys.argv[1]))
    for line in sys.stdin:
        print(json.dumps(_answer(json.loads(line))), flush=True)
