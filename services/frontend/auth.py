"""Who may ask: API keys taken from the request's headers. Off is an object too."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from hps.config.auth import ApiKeys, Role
from hps.errors import Forbidden, Unauthenticated

# Answered to everybody: probes and scrapers carry no keys, and the documentation holds no data.
EXEMPT = ("/v2/health/", "/metrics", "/docs", "/openapi.json")


class Authorizer(Protocol):
    """Who may do what. Any number of threads may ask."""

    enabled: bool

    def check(
        self,
        headers: Mapping[bytes, bytes],
        role: Role,
        certificate: Callable[[], Collection[str]] = tuple,
    ) -> str:
        """Who the caller is, "" when that was not asked; ``certificate`` tells what the client's names, where
        it has shown one. Raises ``Unauthenticated`` or ``Forbidden`` unless the caller may do what needs
        ``role``, and ``Forbidden`` for a page of another site: a browser lets any page ask any server that
        its user can reach, and shows it his certificate."""
        ...


class NoAuthorizer:
    """Lets everybody do everything but web pages of others."""

    enabled = False

    def check(
        self,
        headers: Mapping[bytes, bytes],
        role: Role,
        certificate: Callable[[], Collection[str]] = tuple,
    ) -> str:
        if b"origin" in headers:
            _refuse_other_sites(headers)
        return ""


class ApiKeyAuthorizer:
    """Wants ``X-API-Key: <key>`` or ``Authorization: Bearer <key>``, or a certificate that it knows."""

    enabled = True

    def __init__(self, keys: ApiKeys) -> None:
        self._keys = keys

    def check(
        self,
        headers: Mapping[bytes, bytes],
        role: Role,
        certificate: Callable[[], Collection[str]] = tuple,
    ) -> str:
        if b"origin" in headers:
            _refuse_other_sites(headers)
        caller = None
        if (key := _key(headers)) is not None:
            caller = self._keys.authenticate(key)
        elif names := certificate():
            caller = self._keys.certified(names)
            if caller is None:
                raise Unauthenticated(
                    f"nobody is known by this certificate, which names {', '.join(sorted(names))}; add it to "
                    "auth.keys_file, or send an API key"
                )
        if caller is None:
            raise Unauthenticated(
                "this server wants an API key: send the header 'X-API-Key: <key>' or 'Authorization: "
                "Bearer <key>'"
            )
        self._keys.require(caller, role)
        return caller.name


def guard(keys: ApiKeys) -> Authorizer:
    """The guard for these keys."""
    return ApiKeyAuthorizer(keys) if keys.enabled else NoAuthorizer()


def _refuse_other_sites(headers: Mapping[bytes, bytes]) -> None:
    """Browsers say what site a page is of that asks. Theirs is the word on whether it is this one, for
    proxies may change the host; those that give none are old."""
    origin = headers[b"origin"]
    told = headers.get(b"sec-fetch-site")
    if told is None:
        is_ours = origin.rpartition(b"//")[2].lower() == headers.get(b"host", b"").lower()
    else:
        is_ours = told in (b"same-origin", b"none")
    if not is_ours:
        raise Forbidden(
            f"a page of {origin[:80].decode('latin-1')} asks, which is another site than this server; "
            "have it ask through its own"
        )


def _key(headers: Mapping[bytes, bytes]) -> str | None:
    """The key that was sent; None when there is none."""
    key = headers.get(b"x-api-key")
    if key is None:
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer":
            key = b""
    return key.strip().decode("latin-1") or None
