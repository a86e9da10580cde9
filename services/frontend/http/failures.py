"""How a request ends that cannot be answered: told to the client, counted, logged."""

from __future__ import annotations

import logging
from time import perf_counter_ns

from hps import metric_names as m
from services.frontend.errors import http_status, refused_for, told
from services.frontend.http.asgi import Receive, Send
from services.frontend.http.body import ClientGone, discard
from services.frontend.http.errors import error_body, error_headers
from services.frontend.http.head import Head, request_id
from services.frontend.logs import fields, log
from services.frontend.state import State


async def fail(
    error: BaseException,
    head: Head,
    state: State,
    send: Send,
    started: int,
    unread: Receive | None = None,
) -> None:
    """Answer an inference request that began at ``started`` (ns) with what went wrong. ``unread``: where
    the rest of its body comes from."""
    if isinstance(error, ClientGone):
        return
    status, body = describe(error, head.headers)
    done = perf_counter_ns()
    name = ""
    if head.route is not None:
        name = head.route.entry.name
        head.route.entry.statistics.failed(started, done)
    metrics = state.metrics
    metrics.histogram(m.REQUEST_SECONDS, "http", "infer", name, str(status)).observe(
        (done - started) * 1e-9
    )
    if (reason := refused_for(error)) is not None:
        metrics.counter(m.REQUESTS_REFUSED, reason).add()
    reply = error_headers(status, body)
    if head.request_id:
        reply.append((b"x-request-id", head.request_id.encode()))
    log_request(head, status, started)
    await send({"type": "http.response.start", "status": status, "headers": reply})
    if unread is not None and b"expect" not in head.headers:
        # The client reads the answer only when it has sent its request: let it finish.
        await send({"type": "http.response.body", "body": body, "more_body": True})
        await discard(unread)
        body = b""
    await send({"type": "http.response.body", "body": body})


def describe(error: BaseException, headers: dict[bytes, bytes]) -> tuple[int, bytes]:
    """Status and body for an error of a request with these headers."""
    answer = told(error, request_id(headers))
    return http_status(answer), error_body(str(answer))


def log_request(head: Head, status: int, started: int) -> None:
    """At log level debug, a line for each inference request."""
    if log.isEnabledFor(logging.DEBUG):
        us = (perf_counter_ns() - started) // 1000
        model = head.route.entry.name if head.route else ""
        log.debug("request %s", fields(id=head.request_id, model=model, status=status, us=us))
