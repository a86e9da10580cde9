"""The answering half of a gRPC connection: messages, statuses and resets of its streams."""

from __future__ import annotations

import logging
from collections.abc import Callable

from services.frontend.grpc.http2 import frames
from services.frontend.grpc.http2.frames import ErrorCode
from services.frontend.grpc.http2.headers import (
    ANSWER_HEAD,
    Trailers,
    http_error_block,
    status_block,
)
from services.frontend.grpc.http2.lifetime import GrpcConnectionLifetime
from services.frontend.grpc.http2.status_codes import INTERNAL
from services.frontend.grpc.http2.streams import Stream
from services.frontend.grpc.http2.unary_call import UnaryCall

log = logging.getLogger(__name__)


class AnsweringConnection(GrpcConnectionLifetime):
    """A connection that sends what its calls answer. Calls on streams that have ended have no effect."""

    def grant(self, stream_id: int, size: int) -> None:
        """Let the client send ``size`` more bytes on a stream, or on the connection (0)."""
        self.sender.write(frames.window_update(stream_id, size))

    def return_window(self, stream: Stream, size: int) -> None:
        """Let the client send ``size`` more bytes on ``stream``: its messages of so many were taken."""
        if self.streams.get(stream.id) is stream:
            stream.return_window(size)

    def answer(self, call: UnaryCall, message: bytes) -> None:
        """Send the only answer of ``call``."""
        if self.streams.get(call.id) is not call:
            return
        if self.sender.answer(call, message):
            self.finish(call)
        elif self.streams.get(call.id) is call:
            self.port.calls.slow_readers.watch(call, len(message))

    def send_message(
        self, stream: Stream, message: bytes, sent: Callable[[], None] | None = None
    ) -> None:
        """Send a message of ``stream``, after its headers and earlier messages; then call ``sent``."""
        if self.streams.get(stream.id) is stream:
            self.sender.send_message(stream, message, sent)

    def end(self, stream: Stream, code: int, details: str = "", trailers: Trailers = None) -> None:
        """End ``stream`` with a gRPC status, after its messages."""
        if self.streams.get(stream.id) is not stream:
            return
        try:
            block = status_block(code, details, trailers)
        except ValueError as error:
            log.error("invalid trailing metadata of %s: %s", stream.head.path, error)
            block = status_block(INTERNAL, "internal error", None)
        if not stream.has_headers:
            block = ANSWER_HEAD + block
        self._end(stream, block)

    def end_with_http_error(self, stream: Stream, status: int) -> None:
        """End the stream of a request that is no gRPC call."""
        self._end(stream, http_error_block(status))

    def _end(self, stream: Stream, block: bytes) -> None:
        if self.sender.end(stream, block):
            self.finish(stream)

    def reset(self, stream: Stream, code: ErrorCode) -> None:
        """End ``stream`` at once, without a status. It is not notified."""
        if self.streams.get(stream.id) is stream:
            self.remove(stream.id)
            self.sender.forget(stream)
            self.sender.write(frames.reset(stream.id, code))
            self.close_if_drained()

    def remove(self, stream_id: int) -> Stream | None:
        """Remove a stream that has ended, if it is open."""
        stream = self.streams.pop(stream_id, None)
        if stream is not None:
            stream.end_receiving()
        return stream

    def finish(self, stream: Stream) -> None:
        """Forget ``stream``, whose last frame was sent."""
        if self.remove(stream.id) is None:
            return
        if not stream.is_half_closed:  # the client need not send the rest of its request
            self.sender.write(frames.reset(stream.id, ErrorCode.NO_ERROR))
        stream.finished()
        self.close_if_drained()
