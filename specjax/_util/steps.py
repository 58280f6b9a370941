"""How far a long step is, told through :mod:`jax.monitoring`.

An event is a scalar: the parts that are done. Its ``total`` is the number of parts. Without a
listener it costs next to nothing. :mod:`specjax._util.waiting` shows the events on a terminal.
"""

from __future__ import annotations

import jax.monitoring

LOADING = "/specjax/loading/layers"
PREFILL = "/specjax/prefill/tokens"


def tell(event: str, done: int, total: int) -> None:
    """Tells that ``done`` of ``total`` parts are done."""
    jax.monitoring.record_scalar(event, done, total=total)
