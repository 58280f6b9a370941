"""``python -m train.lm``."""

import sys

from train.lm.program import run

sys.exit(run())
