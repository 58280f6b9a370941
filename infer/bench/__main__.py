"""``python -m infer.bench``."""

import sys

from infer.bench.commands import main

sys.exit(main())
