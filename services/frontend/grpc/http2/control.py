"""Control frames of a gRPC connection: settings, pings, windows, resets, and the bound on useless ones."""

from __future__ import annotations

from services.frontend.grpc.http2 import frames
from services.frontend.grpc.http2.answering import AnsweringConnection
from services.frontend.grpc.http2.frames import (
    ACK,
    MAX_WINDOW,
    ConnectionFailed,
    ErrorCode,
    StreamFailed,
)
from services.frontend.grpc.http2.limits import (
    BLOCKED_STREAMS_PER_FRAME,
    SETTINGS_BYTES_PER_FRAME,
    FrameBudget,
)
from services.frontend.grpc.http2.port import PortContext


class ControlledConnection(AnsweringConnection):
    """A connection that processes its client's control frames."""

    def __init__(self, port: PortContext) -> None:
        super().__init__(port)
        self._budget = FrameBudget()

    def control(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        """Process a frame other than DATA, HEADERS and CONTINUATION.

        Raises ``ConnectionFailed`` and ``StreamFailed``."""
        if kind == frames.WINDOW_UPDATE:
            self._window_update(stream_id, payload)
        elif kind == frames.PUSH_PROMISE:
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "PUSH_PROMISE of a client")
        elif kind == frames.PING and flags & ACK:
            self.ping_answered(payload)
        else:
            self.spend()
            handle = _HANDLERS.get(kind)
            if handle is not None:
                handle(self, flags, stream_id, payload)

    def spend(self, cost: int = 1) -> None:
        """Count a frame that serves no call, or one as costly as several. Raises ``ConnectionFailed``."""
        if not self._budget.spend(self.sender.answers, cost):
            raise ConnectionFailed(ErrorCode.ENHANCE_YOUR_CALM, "too many useless frames")

    def require_begun(self, stream_id: int, name: str) -> None:
        """Raise ``ConnectionFailed`` for a frame of a stream without HEADERS.

        After the last GOAWAY, HEADERS of further streams are ignored, and so are their other frames."""
        if not stream_id or (stream_id > self.last_stream and not self._is_last_known):
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, f"{name} without a call")

    def fail_stream(self, stream_id: int, error: StreamFailed) -> None:
        """Reset a stream on which the client violated the protocol. Raises ``ConnectionFailed``."""
        self.spend()
        self.sender.write(frames.reset(stream_id, error.code))
        self._drop(stream_id)

    def _drop(self, stream_id: int) -> None:
        stream = self.remove(stream_id)
        if stream is not None:
            self.sender.forget(stream)
            stream.gone()
            self.close_if_drained()

    def _window_update(self, stream_id: int, payload: bytes) -> None:
        frames.require_size(payload, 4, "WINDOW_UPDATE")
        size = int.from_bytes(payload, "big") & MAX_WINDOW
        if not stream_id:
            if not size:
                raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE of 0")
            self.sender.widen(size)
            return
        stream = self.streams.get(stream_id)
        if stream is None:
            self.require_begun(stream_id, "WINDOW_UPDATE")
            return
        if not size:
            raise StreamFailed(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE of 0")
        self.sender.widen_stream(stream, size)

    def _settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "SETTINGS of a stream")
        if flags & ACK:
            frames.require_size(payload, 0, "SETTINGS with ACK")
            return
        self.spend(
            len(payload) // SETTINGS_BYTES_PER_FRAME
            + self.sender.blocked_streams // BLOCKED_STREAMS_PER_FRAME
        )
        self.sender.write(frames.SETTINGS_ACK)
        self.sender.apply_settings(payload)

    def _ping(self, _flags: int, stream_id: int, payload: bytes) -> None:
        frames.require_size(payload, 8, "PING")
        if stream_id:
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "PING of a stream")
        self.sender.write(frames.frame(frames.PING, ACK, 0, payload))

    def _reset_by_client(self, _flags: int, stream_id: int, payload: bytes) -> None:
        frames.require_size(payload, 4, "RST_STREAM")
        self.require_begun(stream_id, "RST_STREAM")
        self._drop(stream_id)

    def _priority(self, _flags: int, _stream_id: int, payload: bytes) -> None:
        frames.require_size(payload, 5, "PRIORITY")


_HANDLERS = {
    frames.PRIORITY: ControlledConnection._priority,
    frames.RST_STREAM: ControlledConnection._reset_by_client,
    frames.SETTINGS: ControlledConnection._settings,
    frames.PING: ControlledConnection._ping,
}
