"""Failed HTTP requests: the answer to the client, metrics, log."""

from __future__ import annotations

from time import perf_counter_ns

from hps.observability import metric_names as m
from hps.tracing import RequestContext
from services.frontend.errors import client_error, http_status, rejection_reason
from services.frontend.http.asgi import Receive, Send
from services.frontend.http.body import ClientGone, discard
from services.frontend.http.errors import error_body, error_headers
from services.frontend.http.head import RequestHead
from services.frontend.http.response import HttpReply
from services.frontend.state import FrontendState


async def fail(
    error: BaseException,
    head: RequestHead,
    state: FrontendState,
    send: Send,
    started: int,
    unread: Receive | None = None,
    origin: RequestContext | None = None,
) -> None:
    """Answer an inference request that began at ``started`` (ns) with ``error``.

    ``unread``: receives the rest of the request's body, if any is left. ``origin``: None if it was not known
    yet.
    """
    if isinstance(error, ClientGone):
        return
    reply = failure(error, head, state, started, origin)
    body = reply.body
    await send({"type": "http.response.start", "status": reply.status, "headers": reply.headers})
    if unread is not None and b"expect" not in head.headers:
        # Clients read the answer only after they have sent the whole request, so read the rest of it.
        await send({"type": "http.response.body", "body": body, "more_body": True})
        await discard(unread)
        body = b""
    await send({"type": "http.response.body", "body": body})


def failure(
    error: BaseException,
    head: RequestHead,
    state: FrontendState,
    started: int,
    origin: RequestContext | None = None,
) -> HttpReply:
    """Count and log a failure; return the answer."""
    entry = None if head.route is None else head.route.entry
    name, version = ("", "") if entry is None else (entry.name, entry.version)
    if origin is None:
        named = head.request_id, head.traceparent, head.tracestate
        origin = state.observer.begin(name, started, *named)
    status, body = describe(error, origin.request_id)
    done = perf_counter_ns()
    if entry is not None:
        entry.statistics.failed(started, done)
    metrics = state.metrics
    metrics.histogram(m.REQUEST_SECONDS, "http", "infer", name, version, str(status)).observe(
        (done - started) * 1e-9
    )
    if (reason := rejection_reason(error)) is not None:
        metrics.counter(m.REQUESTS_REFUSED, reason).add()
    reply = error_headers(status, body)
    if head.request_id:
        reply.append((b"x-request-id", head.request_id.encode()))
    endpoint = None if entry is None else entry.endpoint
    state.observer.failed("http", origin, endpoint, status, error, started)
    return HttpReply.make(reply, [body], len(body), status)


def describe(error: BaseException, request_id: str) -> tuple[int, bytes]:
    """Return status and body for an error."""
    answer = client_error(error, request_id)
    return http_status(answer), error_body(str(answer))
