"""Request bodies read within bounds, and the two content codings.

A body is refused as soon as it is known to be too large; what the client still sends of it is read
and forgotten, so that it gets to see the answer. Nothing inflates beyond the limit either.
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
from services.frontend.errors import RequestBodyTimeout, RequestTooLarge, UnknownEncoding
from services.frontend.http.asgi import Receive

# zlib's window bits for each coding; "deflate" means a zlib stream (RFC 9110).
_WINDOW = {"gzip": 31, "x-gzip": 31, "deflate": 15}
# Work beyond this many bytes leaves the event loop for a thread.
_INLINE_BYTES = 256 << 10
# As much is inflated between looks at whether there is room.
_PIECE_BYTES = 1 << 20
# Bytes a second that a body has to come with, or its memory would be held for as long as a client likes.
_SLOWEST = 64 << 10
# How much of a refused body is read so that the client gets to see the answer.
_DISCARDED_BYTES, _DISCARDED_S = 1 << 30, 20.0
# Smaller answers are sent as they are: compressing them costs more than it saves.
COMPRESS_FROM_BYTES = 1024


class ClientGone(Exception):
    """The client hung up before its request was complete."""


async def read_body(
    receive: Receive, headers: dict[bytes, bytes], limit: int, patience_s: float, room: ByteBudget
) -> bytes:
    """The whole body, as it was sent: at most ``limit`` bytes, never ``patience_s`` without news once it
    has begun, and beyond that at `_SLOWEST` or faster (the server closes connections on which nothing
    comes at all). What has come of it holds ``room`` while more is to come.

    Raises TooLarge, TooSlow, Overloaded or ClientGone.
    """
    length = headers.get(b"content-length")
    if length is not None and length.isdigit() and int(length) > limit:
        raise _too_large(int(length), limit, unread=True)
    message = await receive()  # mostly there already; a timer for it would cost more than the wait
    body: bytes = message.get("body", b"")
    more = message.get("more_body") or message["type"] != "http.request"
    if more or len(body) > limit:
        with ByteReservation(room) as share:
            body = await _rest(message, receive, limit, patience_s, share)
    return body


async def _rest(
    message: MutableMapping[str, Any],
    receive: Receive,
    limit: int,
    patience_s: float,
    share: ByteReservation,
) -> bytes:
    """A body that comes in several pieces, ``message`` being the first of them."""
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
        left_s = begun + patience_s + size / _SLOWEST - time.monotonic()
        message = await _next(receive, min(patience_s, left_s))


async def ensure_task() -> None:
    """Go on within a task: timers need one, and an answer may have begun without."""
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
            f"the rest of the request's body did not come within {max(0.0, left_s):.2g} s; at least "
            f"{_SLOWEST >> 10} KiB of it have to come each second"
        ) from None


async def discard(receive: Receive) -> None:
    """Read what is left of a refused body and forget it, up to a bound of bytes and seconds."""
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
    """``body`` without its content coding, at most ``limit`` bytes. While it is inflated on a thread, it and
    what has come of it so far hold ``room``. Raises TooLarge, UnknownEncoding, Overloaded or BadRequest."""
    coding = coding.strip().lower()
    if coding in ("identity", ""):
        return body
    window = _WINDOW.get(coding)
    if window is None:
        raise UnknownEncoding(
            f"Content-Encoding {coding[:40]!r} is not understood; use gzip, deflate or identity"
        )
    stream = zlib.decompressobj(window)
    try:
        inflated = stream.decompress(body, min(limit + 1, _INLINE_BYTES))
        if not stream.eof and len(inflated) <= limit:
            with ByteReservation(room) as share:
                share.grow(len(body) + len(inflated))
                inflated = await asyncio.to_thread(_inflate, stream, inflated, limit, share)
    except zlib.error as error:
        raise BadRequest(f"the body is not a valid {coding} stream: {error}") from None
    if len(inflated) > limit:
        raise _too_large(len(inflated), limit, so_far=True)
    if not stream.eof:
        raise BadRequest(f"the {coding} stream ends early; is the body truncated?")
    if stream.unused_data:
        raise BadRequest(f"{len(stream.unused_data)} bytes follow the {coding} stream")
    return inflated


def _inflate(stream: Any, begun: bytes, limit: int, share: ByteReservation) -> bytes:
    """All that ``stream``, of which ``begun`` has come, gives, and at most a byte more than ``limit``."""
    pieces, size = [begun], len(begun)
    while not stream.eof and size <= limit:
        piece = stream.decompress(stream.unconsumed_tail, min(_PIECE_BYTES, limit + 1 - size))
        if not piece:
            break  # it ends early
        share.grow(len(piece))
        pieces.append(piece)
        size += len(piece)
    return b"".join(pieces)


def accepted_coding(accept: bytes) -> str | None:
    """gzip or deflate if ``Accept-Encoding`` names one of them with a weight above 0."""
    found = None
    best = 0.0
    for part in accept.decode("latin-1").lower().split(","):
        name, _, rest = part.partition(";")
        name = name.strip()
        if name not in ("gzip", "deflate"):
            continue
        weight = _weight(rest)
        if weight > best:
            found, best = name, weight
    return found


def _weight(parameters: str) -> float:
    key, _, value = parameters.partition("=")
    if key.strip() != "q":
        return 1.0
    try:
        return float(value)
    except ValueError:
        return 0.0


async def compress(body: bytes, coding: str) -> bytes:
    """``body`` in ``gzip`` or ``deflate``, quickly rather than tightly."""
    if len(body) <= _INLINE_BYTES:
        return _deflate(body, coding)
    return await asyncio.to_thread(_deflate, body, coding)


def _deflate(body: bytes, coding: str) -> bytes:
    stream = zlib.compressobj(1, zlib.DEFLATED, _WINDOW[coding])
    return stream.compress(body) + stream.flush()
