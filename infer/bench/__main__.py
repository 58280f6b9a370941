"""``python -m infer.bench``."""

from infer.bench.commands import main
from specjax.program import start

start(main)
