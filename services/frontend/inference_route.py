"""Routes of served names: how a protocol's requests to one version are decoded and answered.

Requests that name no version may be divided over versions by the model's traffic rule. That is decided once
per request, where its name is resolved; its rows and its network are those of the version of its route."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from typing import Any, Generic, Self, TypeVar

from hps.config.traffic_settings import RequestKey
from hps.errors import HpsError
from hps.node.served_versions import CURRENT
from hps.node.traffic_split import TrafficSplit, value_text
from services.frontend.inference import Answer, ResponseEncoder
from services.frontend.inference_request import InferenceRequest
from services.frontend.state import ServedEndpoint

Parser = TypeVar("Parser")


class InferenceRoute(Generic[Parser, Answer]):
    """Parser, encoder and latency histogram of one served name, for one protocol.

    ``split`` is None, or chooses the route of each request in its place: then this is the route of the
    current version, for requests that name no version."""

    __slots__ = ("encoder", "entry", "observe", "parser", "split")

    def __init__(
        self,
        entry: ServedEndpoint,
        parser: Parser,
        encoder: ResponseEncoder[Answer],
        observe: Callable[[float], None],
    ) -> None:
        self.entry = entry
        self.parser = parser
        self.encoder = encoder
        self.observe = observe
        self.split: RouteSplit[Any] | None = None

    def divided(self, split: TrafficSplit, routes: Mapping[str, Self]) -> Self:
        """Return a copy that is replaced by one of ``routes``, by number or label, for each request."""
        other = copy(self)
        other.split = RouteSplit(split, self, routes)
        return other


Route = TypeVar("Route", bound=InferenceRoute[Any, Any])


class RouteSplit(Generic[Route]):
    """Chooses the route of each request that names no version. Thread-safe."""

    __slots__ = ("_routes", "_split", "candidates", "needs_body")

    def __init__(self, split: TrafficSplit, current: Route, routes: Mapping[str, Route]) -> None:
        self._split = split
        self._routes = {**routes, CURRENT: current}
        self.needs_body = split.needs_body
        """True if the choice needs the decoded request."""
        others = [each for each in routes.values() if each.entry is not current.entry]
        self.candidates = [current, *dict.fromkeys(others)]
        """The routes that may be chosen, the current one first."""

    def choose(self, header: Callable[[str], str | None], call: InferenceRequest | None) -> Route:
        """Return the route of a request; ``header`` returns a header's value by its name in lower case.

        ``call`` is the decoded request, needed if ``needs_body``."""

        def value_of(key: RequestKey) -> str | None:
            if key.kind == "header":
                return header(key.name)
            assert call is not None
            if key.kind == "parameter":
                return value_text(call.form.parameters.get(key.name))
            return call.first_element(key.name)

        return self._routes.get(self._split.choose(value_of), self._routes[CURRENT])

    def decode(
        self,
        header: Callable[[str], str | None],
        parse: Callable[[Route], InferenceRequest],
    ) -> tuple[Route, InferenceRequest]:
        """Decode a request by ``parse``, and choose its route.

        Versions may have different inputs: the first candidate that accepts the request decodes it for the
        choice. Raises the current version's error if none does."""
        fault: HpsError | None = None
        for route in self.candidates:
            try:
                call = parse(route)
            except HpsError as error:
                fault = fault or error
                continue
            chosen = self.choose(header, call)
            same = chosen.parser is route.parser
            return chosen, call if same else parse(chosen)
        assert fault is not None
        raise fault
