"""``python -m infer.run``."""

from infer.run.commands import main
from specjax._util.program import start

start(main)
