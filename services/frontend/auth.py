"""Authentication: API keys in the request's headers, or client certificates."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from hps.config.auth import ApiKeys, Role
from hps.errors import Forbidden, Unauthenticated

# Paths without authentication: probes and scrapers have no keys, and the documentation has no data.
EXEMPT = ("/v2/health/", "/metrics", "/docs", "/openapi.json")


class Authorizer:
    """Checks callers; allows everything except requests of other sites' web pages. Thread-safe."""

    enabled = False

    def check(
        self,
        headers: Mapping[bytes, bytes],
        role: Role,
        certificate: Callable[[], Collection[str]] = tuple,
    ) -> str:
        """Return the caller's name, or "" if callers are not identified.

        ``certificate`` returns the names in the client's certificate, if it has one. Raises
        ``Unauthenticated``, or ``Forbidden`` if the role is too low or the caller is a web page of another
        site: browsers let any page send requests to any server that the user can reach, with the user's
        certificate."""
        if b"origin" in headers:
            _refuse_other_sites(headers)
        return ""


class ApiKeyAuthorizer(Authorizer):
    """Requires ``X-API-Key: <key>``, ``Authorization: Bearer <key>``, or a known certificate."""

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
                    f"unknown certificate, with the names {', '.join(sorted(names))}; add it to "
                    "auth.keys_file, or send an API key"
                )
        if caller is None:
            raise Unauthenticated(
                "this server requires an API key: send the header 'X-API-Key: <key>' or 'Authorization: "
                "Bearer <key>'"
            )
        self._keys.require(caller, role)
        return caller.name


def guard(keys: ApiKeys) -> Authorizer:
    """Build the authorizer for these keys."""
    return ApiKeyAuthorizer(keys) if keys.enabled else Authorizer()


def _refuse_other_sites(headers: Mapping[bytes, bytes]) -> None:
    """Raise ``Forbidden`` for requests of other sites' web pages.

    Browsers send the page's site in a header. Only that header decides, since proxies may change the host;
    only old browsers do not send it."""
    origin = headers[b"origin"]
    site = headers.get(b"sec-fetch-site")
    if site is None:
        is_ours = origin.rpartition(b"//")[2].lower() == headers.get(b"host", b"").lower()
    else:
        is_ours = site in (b"same-origin", b"none")
    if not is_ours:
        raise Forbidden(
            f"rejected a request by a web page of another site, {origin[:80].decode('latin-1')}; "
            "let that site's own server send it"
        )


def _key(headers: Mapping[bytes, bytes]) -> str | None:
    """The key in the headers, or None."""
    key = headers.get(b"x-api-key")
    if key is None:
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer":
            key = b""
    return key.strip().decode("latin-1") or None
