"""Serve completions over HTTP, by OpenAI's protocol, with any method; a page at / shows them.

  python -m infer.serve                                the embedded pair, http://127.0.0.1:8000
  python -m infer.serve --target DIR --draft DIR --batch-size 16
  python -m infer.serve --method specinfer --set branching=4,2,2 --port 9000

SIGTERM takes no more connections, answers every request that came, and ends with 0.
Exit codes: 0 ended, 2 bad arguments.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from infer import cli
from specjax._util.program import Parser, run

KEY = "SPECJAX_API_KEY"
EXTRA = ("fastapi", "uvicorn", "prometheus_client")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns the exit code. Wrong arguments exit at once, with 2."""
    commands = parser()
    args = commands.parse_args(argv)
    for name in EXTRA:
        if importlib.util.find_spec(name) is None:
            commands.error(f"{name} is not installed: pip install -c constraints.txt -e '.[serve]'")
    return run("infer.serve", "infer.serve.server:serve", args)


def parser() -> Parser:
    """The command line of ``infer.serve``."""
    out = Parser("infer.serve", __doc__)
    cli.add_models(out)
    how = out.add_argument_group("decoding")
    said = "of requests that name none (default: speculative where there is a draft)"
    how.add_argument("--method", metavar="NAME", help=said)
    said = "an option of that method; repeatable"
    how.add_argument("--set", type=cli.setting, metavar="OPTION=VALUE", help=said, **cli.REPEATABLE)
    said = "rows in flight of a method (default: %(default)s)"
    how.add_argument(
        "--batch-size", type=cli.whole(1, cli.MOST_ROWS), default=8, metavar="B", help=said
    )
    said = "prompts whose caches are kept for others that begin alike (default: %(default)s)"
    how.add_argument(
        "--prefixes", type=cli.whole(0, cli.MOST_ROWS), default=4, metavar="N", help=said
    )
    cli.add_mesh(how)
    where = out.add_argument_group("address")
    said = "default: %(default)s, which nobody else reaches"
    where.add_argument("--host", type=cli.some_text, default="127.0.0.1", help=said)
    said = "default: %(default)s; 0 takes a free one"
    where.add_argument("--port", type=cli.whole(0, 65535), default=8000, metavar="N", help=said)
    said = f"what clients must send as a bearer token; better in the environment, as {KEY}"
    where.add_argument("--api-key", type=cli.some_text, metavar="KEY", help=said)
    said = "what clients call the model (default: what --target says)"
    where.add_argument("--name", type=cli.some_text, help=said)
    limits = out.add_argument_group("limits")
    for name, default, said in (
        ("--max-prompt", 4096, "tokens of a prompt, within the context"),
        ("--max-output", 1024, "tokens of a completion, within the context"),
        ("--queue", 512, "rows that may wait for a seat; beyond, requests get 429"),
        ("--flights", 4, "methods, or options of one, that decode at a time"),
        ("--max-body", 2**20, "bytes of a request"),
        ("--drain", 300, "seconds after SIGTERM for the requests that came before"),
    ):
        said += " (default: %(default)s)"
        limits.add_argument(name, type=cli.whole(1), default=default, metavar="N", help=said)
    return out
