"""``python -m infer.run``."""

from infer.run.commands import main
from specjax.program import start

start(main)
