"""How a request ends that cannot be answered: told to the client, counted, logged."""

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
    """Answer an inference request that began at ``started`` (ns) with what went wrong. ``unread``: where
    the rest of its body comes from. ``origin``: as far as it was known by then."""
    if isinstance(error, ClientGone):
        return
    reply = failure(error, head, state, started, origin)
    body = reply.body
    await send({"type": "http.response.start", "status": reply.status, "headers": reply.headers})
    if unread is not None and b"expect" not in head.headers:
        # The client reads the answer only when it has sent its request: let it finish.
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
    """What `fail` answers; it is counted and told of."""
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


def describe(error: BaseException, known_as: str) -> tuple[int, bytes]:
    """Status and body for an error of the request ``known_as``."""
    answer = client_error(error, known_as)
    return http_status(answer), error_body(str(answer))
