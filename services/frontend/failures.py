"""How a request ends that cannot be answered: told to the client, counted, logged."""

from __future__ import annotations

import asyncio
import logging
import secrets
from time import perf_counter_ns

from hps import metrics as m
from hps.errors import HpsError, Unavailable
from services.frontend.asgi import Receive, Send
from services.frontend.body import ClientGone, discard
from services.frontend.errors import error_body, error_headers, http_status
from services.frontend.head import Head, request_id
from services.frontend.logs import fields, log
from services.frontend.state import State

# Requests that were refused before they were looked at, by status.
_REFUSED = {401: "unauthenticated", 403: "forbidden", 413: "too_large", 503: "unavailable"}


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
    if head.entry is not None:
        name = head.entry.name
        head.entry.statistics.failed(started, done)
    metrics = state.metrics
    metrics.histogram(m.REQUEST_SECONDS, "http", "infer", name, str(status)).observe(
        (done - started) * 1e-9
    )
    reason = _REFUSED.get(status)
    if reason is not None:
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
    """Status and body for an error; one that nobody raised on purpose is logged, not told."""
    if isinstance(error, asyncio.CancelledError):  # the drain is over
        error = Unavailable("the server has shut down before it could answer; ask another replica")
    if isinstance(error, HpsError):
        status = http_status(error)
        if status == 500:
            log.error("request failed %s", fields(id=request_id(headers), error=str(error)))
        return status, error_body(str(error))
    known_as = request_id(headers) or secrets.token_hex(8)
    log.error("internal error %s", fields(id=known_as), exc_info=error)
    message = f"internal error; the server's log has it under id {known_as}"
    return 500, error_body(message)


def log_request(head: Head, status: int, started: int) -> None:
    """At log level debug, a line for each inference request."""
    if log.isEnabledFor(logging.DEBUG):
        us = (perf_counter_ns() - started) // 1000
        model = head.entry.name if head.entry else ""
        log.debug("request %s", fields(id=head.request_id, model=model, status=status, us=us))
