"""The client of an HTTP connection: its address and certificate."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from services.frontend.certificates import caller_names, certificate_names

# Key in the ASGI scope: the request's ``ConnectionPeer``.
PEER = "hps.peer"


class ConnectionPeer:
    """The client of one connection. ``address``: its host and port, None if unknown."""

    __slots__ = ("_names", "_transport", "address")

    def __init__(self, address: Any, transport: Any = None) -> None:
        self.address = address
        self._transport = transport
        self._names: Collection[str] | None = None

    @property
    def host(self) -> str:
        """The client's IP address, empty if unknown."""
        return self.address[0] if self.address else ""

    def certificate(self) -> Collection[str]:
        """Return the names in the client's certificate, which TLS has verified; empty without one."""
        if self._names is None:
            shown = self._transport and self._transport.get_extra_info("peercert")
            self._names = caller_names(*certificate_names(shown or {}))
        return self._names


def peer_of(scope: Mapping[str, Any]) -> ConnectionPeer:
    """Return the client that sent the request of ``scope``."""
    return scope.get(PEER) or ConnectionPeer(scope.get("client"))
