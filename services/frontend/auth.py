"""Who may ask: API keys taken from the request's headers. Off is an object too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from hps.config.auth import ApiKeys, Role
from hps.errors import Unauthenticated

# Answered to everybody: probes and scrapers carry no keys, and the documentation holds no data.
EXEMPT = ("/v2/health/", "/metrics", "/docs", "/openapi.json")


class Guard(Protocol):
    enabled: bool

    def check(self, headers: Mapping[bytes, bytes], role: Role) -> str:
        """Who the caller is, "" when that was not asked. Raises ``Unauthenticated`` or ``Forbidden`` unless
        the caller may do what needs ``role``."""
        ...


class OpenGuard:
    """Lets everybody do everything."""

    enabled = False

    def check(self, headers: Mapping[bytes, bytes], role: Role) -> str:
        return ""


class KeyGuard:
    """Wants ``X-API-Key: <key>`` or ``Authorization: Bearer <key>``."""

    enabled = True

    def __init__(self, keys: ApiKeys) -> None:
        self._keys = keys

    def check(self, headers: Mapping[bytes, bytes], role: Role) -> str:
        caller = self._keys.authenticate(_key(headers))
        self._keys.require(caller, role)
        return caller.name


def guard(keys: ApiKeys) -> Guard:
    """The guard for these keys."""
    return KeyGuard(keys) if keys.enabled else OpenGuard()


def _key(headers: Mapping[bytes, bytes]) -> str:
    key = headers.get(b"x-api-key")
    if key is None:
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer":
            key = b""
    if not key.strip():
        raise Unauthenticated(
            "this server wants an API key: send the header 'X-API-Key: <key>' or 'Authorization: "
            "Bearer <key>'"
        )
    return key.strip().decode("latin-1")
