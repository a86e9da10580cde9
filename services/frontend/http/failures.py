"""HTTP answers to failed requests."""

from __future__ import annotations

from hps.errors import HpsError
from services.frontend.errors import client_error, http_status
from services.frontend.http.asgi import Receive, Send
from services.frontend.http.body import discard
from services.frontend.http.errors import error_body, error_headers
from services.frontend.http.head import RequestHead
from services.frontend.http.response import HttpReply


def error_reply(error: HpsError, head: RequestHead) -> HttpReply:
    """Return the answer to an inference request that failed with ``error``, in the client's form."""
    status, body = http_status(error), error_body(str(error))
    headers = error_headers(status, body)
    if head.identity.request_id:
        headers.append((b"x-request-id", head.identity.request_id.encode()))
    return HttpReply.make(headers, [body], len(body), status)


async def send_error(
    reply: HttpReply, head: RequestHead, send: Send, unread: Receive | None
) -> None:
    """Send the answer to a failed request; ``unread`` receives the rest of its body, if any is left.

    Clients read the answer only after they have sent the whole request, so the rest is read.
    """
    body = reply.body
    await send({"type": "http.response.start", "status": reply.status, "headers": reply.headers})
    if unread is not None and b"expect" not in head.headers:
        await send({"type": "http.response.body", "body": body, "more_body": True})
        await discard(unread)
        body = b""
    await send({"type": "http.response.body", "body": body})


def describe(error: BaseException, request_id: str) -> tuple[int, bytes]:
    """Return status and body for an error."""
    answer = client_error(error, request_id)
    return http_status(answer), error_body(str(answer))
