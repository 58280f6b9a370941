"""``python -m train.sdsat``."""

import sys

from train.sdsat.program import run

sys.exit(run())
