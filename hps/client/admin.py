"""Client of a server's admin port."""

from __future__ import annotations

import json
import re
import time
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

from hps.client.address import Tls, address
from hps.client.http_messages import Reply, Request, key_headers
from hps.client.rest import HttpConnectionPool
from hps.errors import NotFound


class MetricSample(NamedTuple):
    """One number of the server's metrics."""

    name: str
    labels: dict[str, str]
    value: float


class Admin:
    """Client of one server's admin port; it does not retry. Thread-safe.

    Raises ``HpsError``s, as ``Client`` does."""

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
        self._http = HttpConnectionPool(at)

    def __enter__(self) -> Admin:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; idempotent."""
        self._http.close()

    def ask(self, path: str, body: Any = None) -> Any:
        """GET ``path``, or POST ``body`` as JSON. Returns the parsed reply."""
        request = Request("GET", path, {})
        if body is not None:
            headers = {"Content-Type": "application/json"}
            request = Request("POST", path, headers, json.dumps(body).encode())
        return self.send(request).json(self.url + path)

    def send(self, request: Request) -> Reply:
        """Send the request with the API key; return the reply of a success."""
        request = request._replace(headers={**request.headers, **self._headers})
        reply = self._http.send(request, time.monotonic() + self._timeout_s)
        try:
            return reply.checked(self.url + request.path)
        except NotFound as error:
            if not str(error).startswith("Not Found"):  # the server's text for an unknown path
                raise
            raise NotFound(
                f"{self.url} has no {request.path.partition('?')[0]}; is it the admin address? The "
                "server prints it when it starts, port 8002 unless configured otherwise"
            ) from None

    def status(self) -> dict[str, Any]:
        """The server's status: models, tiers, updates."""
        return dict(self.ask("/v1/status"))

    def hot_keys(
        self, model: str | None = None, table: str | None = None, limit: int = 20
    ) -> list[dict[str, Any]]:
        """The hottest keys of the server's CPU cache, by table, with their scores from 255 down."""
        parameters = {"model": model, "table": table, "limit": limit}
        query = urlencode({name: value for name, value in parameters.items() if value is not None})
        return list(self.ask(f"/v1/hotkeys?{query}")["tables"])

    def record_keys(self, model: str, seconds: float, keys: int) -> None:
        """Record the keys of the model's lookups for ``seconds``: at most ``keys`` of each table."""
        self.ask(f"/v1/traces/{quote(model, safe='')}", {"seconds": seconds, "keys": keys})

    def recorded_keys(self, model: str) -> bytes:
        """What `record_keys` has recorded so far: a file for ``hps plan``."""
        return self.send(Request("GET", f"/v1/traces/{quote(model, safe='')}", {})).body

    def end_recording(self, model: str) -> None:
        """End a recording of keys and free its memory."""
        self.send(Request("DELETE", f"/v1/traces/{quote(model, safe='')}", {}))

    def metrics(self) -> list[MetricSample]:
        """The server's metrics: name, labels, value."""
        reply = self.send(Request("GET", "/metrics", {}))
        found = re.findall(
            r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$", reply.body.decode(), re.MULTILINE
        )
        return [
            MetricSample(name, dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', labels)), float(value))
            for name, labels, value in found
        ]
