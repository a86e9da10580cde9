"""JSON over HTTP, a connection per call: for everything but inference."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from hps.client.errors import replied, said, unreachable
from hps.errors import ConfigError, HpsError


class JsonHttp:
    """One server's address. May be used by any thread. Every failure is an ``HpsError``."""

    def __init__(self, url: str, headers: Mapping[str, str], timeout_s: float) -> None:
        """Raises ConfigError for what is no address."""
        self.url = checked(url)
        self._headers = dict(headers)
        self._timeout_s = timeout_s

    def ask(self, verb: str, path: str, body: Any = None) -> Any:
        """The parsed reply; ``body`` goes out as JSON."""
        text = self.fetch(verb, path, None if body is None else json.dumps(body))
        try:
            return json.loads(text) if text else {}
        except ValueError:
            raise HpsError(
                f"{self.url}{path} did not answer with JSON; is it an hps server?"
            ) from None

    def fetch(self, verb: str, path: str, body: str | None = None) -> bytes:
        """The reply's body as it is."""
        parts = urlsplit(self.url)
        is_secure = parts.scheme == "https"
        kind = http.client.HTTPSConnection if is_secure else http.client.HTTPConnection
        connection = kind(parts.netloc, timeout=self._timeout_s)
        headers = self._headers | ({"Content-Type": "application/json"} if body else {})
        try:
            connection.request(verb, parts.path + path, body, headers)
            reply = connection.getresponse()
            text = reply.read()
        except (OSError, http.client.HTTPException) as error:
            raise unreachable(self.url, error, self._timeout_s) from None
        finally:
            connection.close()
        if reply.status != 200:
            message = said(text) or f"{self.url}{path} answered {reply.status}"
            raise replied(str(reply.status), message)
        return text


def checked(url: str) -> str:
    """``url`` without a closing slash; ``host:port`` alone means http."""
    full = url if "://" in url else f"http://{url}"
    parts = urlsplit(full)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(f"server address {url!r} must look like http://host:port")
    return full.rstrip("/")
