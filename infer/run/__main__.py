"""``python -m infer.run``."""

from infer.run.commands import main

raise SystemExit(main())
