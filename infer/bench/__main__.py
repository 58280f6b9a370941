"""``python -m infer.bench``."""

from infer.bench.commands import main
from specjax._util.program import start

start(main)
