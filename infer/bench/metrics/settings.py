"""What metrics are told beside their argument."""

from __future__ import annotations

import dataclasses

JUDGE_KEY = "SPECJAX_JUDGE_KEY"  # of the environment


@dataclasses.dataclass(frozen=True)
class Settings:
    """What metrics need beside their argument.

    ``unsafe``: without a sandbox code runs all the same. ``judge_key`` is a bearer token, told to
    nobody but the judge.
    """

    repeats: int = 1
    unsafe: bool = False
    judge_url: str | None = None
    judge_model: str | None = None
    judge_key: str | None = dataclasses.field(default=None, repr=False)
