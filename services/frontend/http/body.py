"""Bounded reading of request bodies, and the content codings gzip and deflate.

A body is rejected as soon as it is known to be too large; the rest that the client still sends is read and
discarded, so that the client receives the answer. Decompression stops at the limit too.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import zlib
from collections.abc import MutableMapping
from typing import Any

from hps.errors import BadRequest
from services.frontend.admission.byte_budget import ByteBudget, ByteReservation
from services.frontend.admission.inflate import INLINE_BYTES, inflate
from services.frontend.errors import RequestBodyTimeout, RequestTooLarge, UnknownEncoding
from services.frontend.http.asgi import Receive

# zlib's window bits for each coding; "deflate" means a zlib stream (RFC 9110).
_WINDOW = {"gzip": 31, "x-gzip": 31, "deflate": 15}
# The slowest transfer of a body, in bytes per second; a client could otherwise hold its memory for any time.
_SLOWEST = 64 << 10
# Bounds on reading the rest of a rejected body, which lets the client receive the answer.
_DISCARDED_BYTES, _DISCARDED_S = 1 << 30, 20.0
# Smaller answers are not compressed: that costs more than it saves.
COMPRESS_FROM_BYTES = 1024


class ClientGone(Exception):
    """The client disconnected before its request was complete."""


async def read_body(
    receive: Receive, headers: dict[bytes, bytes], limit: int, timeout_s: float, room: ByteBudget
) -> bytes:
    """Read the whole body, still compressed: at most ``limit`` bytes.

    A body that has begun may pause for less than ``timeout_s``, and must arrive at `_SLOWEST` or faster
    beyond that (the server closes connections on which nothing arrives). The bytes received are reserved in
    ``room`` while more are to arrive.

    Raises RequestTooLarge, RequestBodyTimeout, Overloaded or ClientGone.
    """
    length = headers.get(b"content-length")
    if length is not None and length.isdigit() and int(length) > limit:
        raise _too_large(int(length), limit, unread=True)
    message = await receive()  # mostly received already; a timer would cost more than the wait
    body: bytes = message.get("body", b"")
    more = message.get("more_body") or message["type"] != "http.request"
    if more or len(body) > limit:
        with ByteReservation(room) as share:
            body = await _rest(message, receive, limit, timeout_s, share)
    return body


async def _rest(
    message: MutableMapping[str, Any],
    receive: Receive,
    limit: int,
    timeout_s: float,
    share: ByteReservation,
) -> bytes:
    """Read a body in several pieces; ``message`` has the first one."""
    chunks, size = [], 0
    begun = time.monotonic()
    while True:
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > limit:
            raise _too_large(size, limit, so_far=True, unread=bool(message.get("more_body")))
        chunks.append(chunk)
        if not message.get("more_body"):
            return b"".join(chunks)
        share.grow(len(chunk))
        left_s = begun + timeout_s + size / _SLOWEST - time.monotonic()
        message = await _next(receive, min(timeout_s, left_s))


async def ensure_task() -> None:
    """Continue within a task: timers need one, and a request may begin without."""
    if asyncio.current_task() is None:
        await asyncio.sleep(0)


async def _next(receive: Receive, left_s: float) -> MutableMapping[str, Any]:
    await ensure_task()
    try:
        if left_s <= 0:
            raise TimeoutError
        async with asyncio.timeout(left_s):
            return await receive()
    except TimeoutError:
        raise RequestBodyTimeout(
            f"timed out after {max(0.0, left_s):.2g} s waiting for the rest of the request body; send at "
            f"least {_SLOWEST >> 10} KiB per second"
        ) from None


async def discard(receive: Receive) -> None:
    """Read and discard the rest of a rejected body, up to a bound of bytes and seconds."""
    left = _DISCARDED_BYTES
    await ensure_task()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DISCARDED_S):
            while left > 0:
                message = await receive()
                if message["type"] != "http.request" or not message.get("more_body"):
                    return
                left -= len(message.get("body", b""))


def _too_large(
    size: int, limit: int, *, so_far: bool = False, unread: bool = False
) -> RequestTooLarge:
    at_least = "at least " if so_far else ""
    return RequestTooLarge(
        f"the request body has {at_least}{size} bytes, at most {limit} are taken; send smaller "
        "batches or raise server.max_body_bytes",
        unread=unread,
    )


async def decompress(body: bytes, coding: str, limit: int, room: ByteBudget) -> bytes:
    """Decode the body's content coding; at most ``limit`` bytes.

    While a thread inflates it, the body and the output so far are reserved in ``room``. Raises
    RequestTooLarge, UnknownEncoding, Overloaded or BadRequest.
    """
    coding = coding.strip().lower()
    if coding in ("identity", ""):
        return body
    window = _WINDOW.get(coding)
    if window is None:
        raise UnknownEncoding(
            f"Content-Encoding {coding[:40]!r} is not supported; use gzip, deflate or identity"
        )
    stream = zlib.decompressobj(window)
    try:
        inflated = stream.decompress(body, min(limit + 1, INLINE_BYTES))
        if not stream.eof and len(inflated) <= limit:
            with ByteReservation(room) as share:
                share.grow(len(body) + len(inflated))
                inflated = await asyncio.to_thread(inflate, stream, inflated, limit, share)
    except zlib.error as error:
        raise BadRequest(f"the body is not a valid {coding} stream: {error}") from None
    if len(inflated) > limit:
        raise _too_large(len(inflated), limit, so_far=True)
    if not stream.eof:
        raise BadRequest(f"the {coding} stream ends early; is the body truncated?")
    if stream.unused_data:
        raise BadRequest(f"{len(stream.unused_data)} bytes follow the {coding} stream")
    return inflated


def accepted_coding(accept: bytes) -> str | None:
    """Return gzip or deflate, the one with the higher weight in ``Accept-Encoding``; None if neither is
    accepted."""
    coding = None
    best = 0.0
    for part in accept.decode("latin-1").lower().split(","):
        name, _, rest = part.partition(";")
        name = name.strip()
        if name not in ("gzip", "deflate"):
            continue
        weight = _weight(rest)
        if weight > best:
            coding, best = name, weight
    return coding


def _weight(parameters: str) -> float:
    key, _, value = parameters.partition("=")
    if key.strip() != "q":
        return 1.0
    try:
        return float(value)
    except ValueError:
        return 0.0


async def compress(body: bytes, coding: str) -> bytes:
    """Compress ``body`` by ``gzip`` or ``deflate``, at the fastest level."""
    if len(body) <= INLINE_BYTES:
        return _deflate(body, coding)
    return await asyncio.to_thread(_deflate, body, coding)


def _deflate(body: bytes, coding: str) -> bytes:
    stream = zlib.compressobj(1, zlib.DEFLATED, _WINDOW[coding])
    return stream.compress(body) + stream.flush()
