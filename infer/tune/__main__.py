"""``python -m infer.tune``."""

from infer.tune.commands import main
from specjax._util.program import start

start(main)
