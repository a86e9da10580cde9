"""HTTP requests and replies of a client, and the header with its API key. Imports no NumPy."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from hps.client.errors import http_error
from hps.errors import ConfigError, HpsError

_KEY = re.compile(r"[\x21-\x7e]+")


class Request(NamedTuple):
    """``path`` begins with a slash; ``body`` None: no body."""

    verb: str
    path: str
    headers: Mapping[str, str]
    body: bytes | None = None


class Reply(NamedTuple):
    """An answer; ``headers`` by their names in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def checked(self, url: str) -> Reply:
        """Return the reply; raise its error if it is not a success."""
        if self.status == 200:
            return self
        raise http_error(self.status, self.body, self.headers.get("retry-after"), url)

    def json(self, url: str) -> Any:
        """Decode the JSON of a success; other replies raise their error."""
        self.checked(url)
        try:
            return json.loads(self.body) if self.body else {}
        except ValueError:
            raise HpsError(f"{url} did not answer with JSON; is it an hps server?") from None


def checked_key(api_key: str) -> str:
    """Check that a header can carry the key. Raises ConfigError, which does not quote the key.

    A line break would begin another header."""
    if not _KEY.fullmatch(api_key):
        raise ConfigError(
            "the API key has characters that no key has (spaces, line ends, letters beyond ASCII); is it the "
            "key alone?"
        )
    return api_key


def key_headers(api_key: str | None) -> dict[str, str]:
    """Headers that authenticate the client. Raises as `checked_key` does."""
    return {"Authorization": f"Bearer {checked_key(api_key)}"} if api_key else {}
