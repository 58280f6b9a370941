"""``python -m infer.tune``."""

from infer.tune.commands import main

raise SystemExit(main())
