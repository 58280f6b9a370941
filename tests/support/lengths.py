"""Options of methods whose drafts size themselves, for tests that compare counters."""

import specjax as sj


def fixed_lengths(name: str) -> dict[str, int]:
    """Options that fix a draft length where the default depends on the clock and on other rows."""
    gamma = sj.method(name).options.get("gamma")
    return {"gamma": 10} if gamma is not None and gamma.default == "auto" else {}
