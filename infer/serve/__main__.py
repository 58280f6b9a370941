"""``python -m infer.serve``."""

from infer.serve.commands import main
from specjax.program import start

start(main)
