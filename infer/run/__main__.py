"""``python -m infer.run``."""

import sys

from infer.run.commands import main

sys.exit(main())
