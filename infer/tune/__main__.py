"""``python -m infer.tune``."""

import sys

from infer.tune.commands import main

sys.exit(main())
