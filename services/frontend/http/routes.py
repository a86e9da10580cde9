"""HTTP routes of the served names, by the paths of their inference requests."""

from __future__ import annotations

from services.frontend.http.request import HttpRequestParser
from services.frontend.http.response import HttpReply, HttpResponseEncoder
from services.frontend.inference import InferencePort
from services.frontend.inference_route import InferenceRoute
from services.frontend.state import ServedEndpoint

HttpRoute = InferenceRoute[HttpRequestParser, HttpReply]
"""Used by one event loop."""


def http_route(entry: ServedEndpoint, port: InferencePort, max_keys: int) -> HttpRoute:
    """Create the route of a served name."""
    parser = HttpRequestParser(entry.name, entry.endpoint.rules, max_keys)
    encoder = HttpResponseEncoder(entry.name, entry.version)
    return InferenceRoute(entry, parser, encoder, port.latency(entry, "200"))


def inference_path(name: str, version: str) -> str:
    """Return the path of inference requests to a name's ``version``: a number, a label, or empty."""
    base = f"/v2/models/{name}"
    return f"{base}/versions/{version}/infer" if version else f"{base}/infer"
