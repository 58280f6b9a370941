"""``python -m infer.tune``."""

from infer.tune.commands import main
from specjax.program import start

start(main)
