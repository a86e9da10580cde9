"""Failed gRPC requests: the answer to the client, metrics, log."""

from __future__ import annotations

from time import perf_counter_ns

from hps.errors import HpsError
from hps.observability import metric_names as m
from hps.observability.metrics import Metrics
from hps.tracing import RequestContext
from services.frontend.errors import REFUSALS, client_error, rejection_reason, status_of
from services.frontend.grpc.request_naming import call_identity
from services.frontend.grpc.responders import UnaryResponder
from services.frontend.state import FrontendState, ServedEndpoint


def fail(
    error: BaseException,
    reply: UnaryResponder,
    state: FrontendState,
    method: str,
    entry: ServedEndpoint | None,
    started: int,
    request_id: str = "",
    origin: RequestContext | None = None,
) -> None:
    """Answer a request that began at ``started`` (ns) with ``error``.

    ``entry`` is None if the model is unknown, ``origin`` if it was not known yet.
    """
    if origin is None and isinstance(error, REFUSALS) and not state.observer.watches:
        # Nothing observes the rejection but its client. In an overload, most of the work is this.
        count_failure(error, state.metrics, method, entry, started)
        reply.fail(error)
        return
    endpoint = None if entry is None else entry.endpoint
    if origin is None:
        model = "" if endpoint is None else endpoint.name
        origin = state.observer.begin(model, started, *call_identity(request_id, reply.context))
    answered = client_error(error, origin.request_id)
    count_failure(answered, state.metrics, method, entry, started)
    state.observer.failed("grpc", origin, endpoint, status_of(answered).grpc, error, started)
    reply.fail(answered)


def count_failure(
    error: HpsError, metrics: Metrics, method: str, entry: ServedEndpoint | None, started: int
) -> None:
    """Count a failed request in the metrics and the protocol's statistics."""
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
