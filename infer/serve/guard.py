"""Which hosts and origins a request may name, and who a client is.

A page of another site can make its own name resolve to this machine (DNS rebinding). Its scripts
then reach a server without a key, and the browser lets them read the answers, as it takes both for
one site. Only the header ``Host`` tells: it has the page's name. An address in it is no danger,
since no name was looked up.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection
from typing import Any
from urllib.parse import urlsplit

from infer.serve.refusals import Refusal
from specjax._util.checks import quoted

HOST = re.compile(
    r"(\[[^\[\]/@?#]+\]|[^\[\]:/@?#\s]+)(:[0-9]{1,5})?"
)  # a name or an address, a port
PORTS = {"http": 80, "https": 443}


class RequestGuard:
    """ASGI middleware that refuses foreign hosts and origins with 403.

    Args:
      app: the application behind it.
      allowed: names that requests may use beside ``localhost`` and addresses.
      any_host: whether ``Host`` may have any name, as it may if clients need a key.
    """

    def __init__(self, app: Any, allowed: Collection[str], any_host: bool):
        self._app = app
        self._allowed = {name.lower().rstrip(".") for name in allowed}
        self._any_host = any_host

    async def __call__(self, scope, receive, send) -> None:
        problem = None
        if scope["type"] == "http":
            problem = self._problem(dict(scope["headers"]))
        if problem is None:
            await self._app(scope, receive, send)
            return
        refusal = Refusal(403, f"{problem}; see --allowed-host", "host_not_allowed")
        await refusal.response()(scope, receive, send)

    def _problem(self, headers: dict[bytes, bytes]) -> str | None:
        """What is wrong with the headers ``Host`` and ``Origin``, if anything."""
        host = headers.get(b"host", b"").decode("latin-1")
        # Browsers send it always. Without it there is no name to mistrust.
        if host and not self._any_host and not self._trusts(host):
            return f"Host {quoted(host)} is neither localhost nor an address"

        origin = headers.get(b"origin", b"").decode("latin-1")
        if not origin or self._is_own(origin, host):
            return None
        return f"a page of {quoted(origin)} may not use this server"

    def _trusts(self, host: str) -> bool:
        """Whether requests may name this host."""
        if not HOST.fullmatch(host):
            return False
        name, _ = _place(f"http://{host}")
        return name == "localhost" or name in self._allowed or _is_address(name)

    def _is_own(self, origin: str, host: str) -> bool:
        """Whether a page of ``origin`` came from this server, or from an allowed name.

        A proxy may have changed ``Host``, so the port counts only where the name is not listed.
        """
        scheme = origin.partition("://")[0]
        place = _place(origin)
        return place[0] in self._allowed or (
            bool(place[0]) and place == _place(f"{scheme}://{host}")
        )


def _place(url: str) -> tuple[str, int | None]:
    """The host's name in lower case and the port; an empty name where there is none."""
    try:
        parts = urlsplit(url)
        return (parts.hostname or "").rstrip("."), parts.port or PORTS.get(parts.scheme)
    except ValueError:
        return "", None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
