"""How a request ends that cannot be answered: told to the client, counted, logged."""

from __future__ import annotations

from time import perf_counter_ns

from hps.errors import HpsError
from hps.observability import metric_names as m
from hps.observability.metrics import Metrics
from hps.tracing import RequestContext
from services.frontend.errors import REFUSALS, client_error, rejection_reason, status_of
from services.frontend.grpc.request_naming import named
from services.frontend.grpc.responders import UnaryResponder
from services.frontend.state import FrontendState, ServedEndpoint


def fail(
    error: BaseException,
    reply: UnaryResponder,
    state: FrontendState,
    method: str,
    entry: ServedEndpoint | None,
    started: int,
    known_as: str = "",
    origin: RequestContext | None = None,
) -> None:
    """Answer a request for ``entry``, None when that is not known, that began at ``started`` (ns) with what
    went wrong. ``known_as``: its id; ``origin``: as far as it was known by then."""
    if origin is None and isinstance(error, REFUSALS) and not state.observer.watches:
        # Nobody hears of it but its client: in overload most of what is done is this.
        count_failure(error, state.metrics, method, entry, started)
        reply.fail(error)
        return
    endpoint = None if entry is None else entry.endpoint
    if origin is None:
        model = "" if endpoint is None else endpoint.name
        origin = state.observer.begin(model, started, *named(known_as, reply.context))
    answered = client_error(error, origin.request_id)
    count_failure(answered, state.metrics, method, entry, started)
    state.observer.failed("grpc", origin, endpoint, status_of(answered).grpc, error, started)
    reply.fail(answered)


def count_failure(
    error: HpsError, metrics: Metrics, method: str, entry: ServedEndpoint | None, started: int
) -> None:
    """Have metrics and the protocol's statistics know of it."""
    done = perf_counter_ns()
    name = version = ""
    if entry is not None:
        name, version = entry.name, entry.version
        entry.statistics.failed(started, done)
    status = status_of(error).grpc
    metrics.histogram(m.REQUEST_SECONDS, "grpc", method, name, version, status).observe(
        (done - started) * 1e-9
    )
    if (reason := rejection_reason(error)) is not None:
        metrics.counter(m.REQUESTS_REFUSED, reason).add()
