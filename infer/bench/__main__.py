"""``python -m infer.bench``."""

from infer.bench.commands import main

raise SystemExit(main())
