"""Settings that metrics need besides their argument."""

from __future__ import annotations

import dataclasses

JUDGE_KEY = "SPECJAX_JUDGE_KEY"  # the environment variable with the judge's key


@dataclasses.dataclass(frozen=True)
class Settings:
    """What metrics need besides their argument.

    ``unsafe`` allows code to run without a sandbox. ``judge_key`` is a bearer token; it is sent
    only to the judge, and never printed.
    """

    repeats: int = 1
    unsafe: bool = False
    judge_url: str | None = None
    judge_model: str | None = None
    judge_key: str | None = dataclasses.field(default=None, repr=False)
