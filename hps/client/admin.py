"""What a server's admin port tells."""

from __future__ import annotations

import json
import time
from typing import Any
from urllib.parse import urlencode

from hps.client.address import Tls, address
from hps.client.http_wire import Request, key_headers
from hps.client.rest import Http
from hps.client.wire import Sample, parse_sample
from hps.errors import NotFound


class Admin:
    """Asks one server's admin port, each call once. Any number of threads may use it. Failures are
    ``HpsError``s, as ``Client``'s are."""

    def __init__(
        self,
        url: str = "http://127.0.0.1:8002",
        *,
        api_key: str | None = None,
        timeout_s: float = 30.0,
        tls: Tls | None = None,
    ) -> None:
        at = address(url, tls, ("http", "https"))
        self.url = at.base
        self._timeout_s = timeout_s
        self._headers = key_headers(api_key)
        self._http = Http(at)

    def __enter__(self) -> Admin:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; idempotent."""
        self._http.close()

    def ask(self, path: str, body: Any = None) -> Any:
        """GET ``path``, or POST of ``body`` as JSON. Returns the parsed reply."""
        verb, sent, headers = "GET", None, self._headers
        if body is not None:
            verb, sent = "POST", json.dumps(body).encode()
            headers = headers | {"Content-Type": "application/json"}
        return self._ask(Request(verb, path, headers, sent)).json(self.url + path)

    def status(self) -> dict[str, Any]:
        """What the server serves and how it is doing."""
        return dict(self.ask("/v1/status"))

    def hot_keys(
        self, model: str | None = None, table: str | None = None, limit: int = 20
    ) -> list[dict[str, Any]]:
        """The hottest keys of the server's CPU cache, by table, with their scores from 255 down."""
        asked = {"model": model, "table": table, "limit": limit}
        query = urlencode({name: value for name, value in asked.items() if value is not None})
        return list(self.ask(f"/v1/hotkeys?{query}")["tables"])

    def metrics(self) -> list[Sample]:
        """The server's metrics: name, labels, value."""
        reply = self._ask(Request("GET", "/metrics", self._headers)).checked(self.url)
        lines = reply.body.decode().splitlines()
        return [sample for line in lines if (sample := parse_sample(line)) is not None]

    def _ask(self, request: Request) -> Any:
        reply = self._http.send(request, time.monotonic() + self._timeout_s)
        try:
            return reply.checked(self.url + request.path)
        except NotFound as error:
            if not str(error).startswith("Not Found"):  # the server's word for an unknown path
                raise
            raise NotFound(
                f"{self.url} has no {request.path.partition('?')[0]}; is it the admin address? The "
                "server prints it when it starts, port 8002 unless configured otherwise"
            ) from None
