"""Interfaces between the parts of the transport: ports, connections and streams, on the event loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from services.frontend.grpc.http2.frames import ErrorCode
from services.frontend.grpc.http2.headers import Trailers
from services.frontend.grpc.http2.limits import PortSettings
from services.frontend.grpc.http2.receive_budget import ConnectionBytes, ReceiveBudget
from services.frontend.grpc.slow_readers import SlowReaderLimit


class OpenCalls(Protocol):
    """The calls with one request of a port, `CallTable`; ``call`` is a `UnaryCall`."""

    slow_readers: SlowReaderLimit

    def request_received(self, call: Any) -> bool:
        """Return True if ``call``, whose request was received, is still to be answered."""

    def forget(self, call: Any) -> bool:
        """Expect no request of ``call`` any more; return True if one was expected."""

    def release(self, call: Any) -> None:
        """Free the slot of ``call``."""

    def run_on_pool(self, work: Callable[[], None]) -> None:
        """Run ``work`` on another thread."""


class CallsPort(Protocol):
    """A port, as calls use it: `PortContext`."""

    settings: PortSettings
    receiving: ReceiveBudget
    thread: int
    """The event loop's thread."""

    @property
    def calls(self) -> OpenCalls: ...

    def post(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call ``function`` on the event loop, from any thread, in order."""


class CorkingPort(Protocol):
    """A port, as senders of frames use it: `PortContext`."""

    corked: list[Any] | None
    """Senders that collect what they write; None: they write at once."""


class StreamConnection(Protocol):
    """A connection, as calls use it: `GrpcConnection`. ``stream`` is a `Stream`."""

    running: int
    """Unary calls whose work has not ended."""
    received_bytes: ConnectionBytes

    @property
    def port(self) -> CallsPort: ...

    def peer(self) -> str: ...

    def auth_context(self) -> Mapping[str, Sequence[bytes]]: ...

    def grant(self, stream_id: int, size: int) -> None:
        """Let the client send ``size`` more bytes on a stream."""

    def return_window(self, stream: Any, size: int) -> None:
        """Let the client send ``size`` more bytes: messages of so many were taken."""

    def answer(self, call: Any, message: bytes) -> None:
        """Send the only answer of ``call``."""

    def send_message(
        self, stream: Any, message: bytes, sent: Callable[[], None] | None = None
    ) -> None:
        """Send ``message``, with the headers before the first one; call ``sent`` when it is written."""

    def end(self, stream: Any, code: int, details: str = "", trailers: Trailers = None) -> None:
        """End the stream with a status, after its messages."""

    def reset(self, stream: Any, code: ErrorCode) -> None:
        """End the stream at once, without a status."""

    def finish(self, stream: Any) -> None:
        """Forget the stream, whose last frame was sent."""


class OpenConnection(Protocol):
    """A connection, as its port uses it: `GrpcConnection`."""

    def begin_drain(self) -> None:
        """Ask the client to make no further calls; close when the present ones are over."""

    def abort(self) -> None:
        """End the connection and its calls now."""

    def sweep(self, now: float) -> None:
        """End what takes too long."""


class StreamReceiver(Protocol):
    """The receiver of a bidirectional stream's events."""

    def message(self, data: bytes, is_compressed: bool) -> None:
        """Take the next message. Its window is returned by ``StreamConnection.return_window``."""

    def half_closed(self) -> None:
        """The client sends no further message."""

    def gone(self) -> None:
        """The stream has ended by its client, the connection's loss, a fault or its deadline."""
