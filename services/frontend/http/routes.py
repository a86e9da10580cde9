"""HTTP routes of the served names, by the paths of their inference requests."""

from __future__ import annotations

from hps.observability import metric_names as m
from hps.observability.metrics import Metrics
from services.frontend.http.request import HttpRequestParser
from services.frontend.http.response import HttpResponseEncoder
from services.frontend.state import ServedEndpoint


class HttpRoute:
    """Parser, encoder and latency histogram of one served name. Used by one event loop."""

    __slots__ = ("encoder", "entry", "observe_ok", "parser")

    def __init__(self, entry: ServedEndpoint, metrics: Metrics, max_keys: int) -> None:
        endpoint = entry.endpoint
        self.entry = entry
        self.parser = HttpRequestParser(endpoint.name, endpoint.rules, max_keys)
        self.encoder = HttpResponseEncoder(endpoint.name, endpoint.version)
        self.observe_ok = metrics.histogram(
            m.REQUEST_SECONDS, "http", "infer", endpoint.name, endpoint.version, "200"
        ).observe

    @property
    def paths(self) -> tuple[str, str]:
        """The paths of its inference requests."""
        base = f"/v2/models/{self.entry.name}"
        return f"{base}/infer", f"{base}/versions/{self.entry.version}/infer"
