"""``python -m infer.serve``."""

from infer.serve.commands import main
from specjax._util.program import start

start(main)
