"""A call of a bidirectional stream: messages, answers and context for the thread of its handler."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import NoReturn

import grpc

from services.frontend.admission.byte_budget import ByteBudget, ByteReservation
from services.frontend.errors import Overloaded
from services.frontend.grpc.http2.frames import ErrorCode
from services.frontend.grpc.http2.headers import CallHead, Trailers
from services.frontend.grpc.http2.interfaces import StreamConnection
from services.frontend.grpc.http2.messages import CallFailed, decompress
from services.frontend.grpc.http2.streams import Stream
from services.frontend.grpc.method_handlers import BidiStreamHandler
from services.frontend.grpc.status import call_status

log = logging.getLogger(__name__)

# The connection's window is returned for so many bytes of taken messages at a time.
_RETURNED_BYTES = 16_384
_PREFIX_BYTES = 5
_OK = grpc.StatusCode.OK
_CODES = {code.value[0]: code for code in grpc.StatusCode}

Post = Callable[..., None]


class StreamCalls:
    """Starts the calls of bidirectional streams of a port. Used on the event loop."""

    post: Post
    """Runs a function on the event loop, in the order of the calls, from any thread."""

    def __init__(self, most: int, max_message_bytes: int, budget: ByteBudget) -> None:
        """``most``: calls at a time. ``max_message_bytes``: of a decompressed message, which is reserved in
        ``budget``."""
        self._most, self.max_message_bytes, self.budget = most, max_message_bytes, budget
        self._open: set[StreamCall] = set()

    def leave(self, call: StreamCall) -> None:
        """Remove a call that has ended."""
        self._open.discard(call)

    def begin(
        self,
        connection: StreamConnection,
        stream: Stream,
        head: CallHead,
        handler: BidiStreamHandler,
    ) -> StreamCall:
        """Start a call, or reject it if there are too many."""
        call = StreamCall(self, connection, stream, head, handler)
        if len(self._open) < self._most:
            self._open.add(call)
            call.begin()
        else:
            call.reject(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{self._most} streams are open, the maximum; retry later, or ask another replica",
            )
        return call


class StreamEnded(Exception):
    """The client is gone, or the call was ended: the handler's thread stops."""


class StreamCall:
    """One call. The event loop reports what arrives; the handler's thread takes messages and answers.

    A message keeps its share of the flow control window until the thread takes it, so a slow handler slows
    its client. One answer at a time is passed to the connection: a client that does not read keeps the
    thread, not memory. The methods of ``grpc.ServicerContext`` that handlers use may be called on any thread.
    """

    def __init__(
        self,
        calls: StreamCalls,
        connection: StreamConnection,
        stream: Stream,
        head: CallHead,
        handler: BidiStreamHandler,
    ) -> None:
        self._calls, self._connection, self._stream = calls, connection, stream
        self._head, self._handler = head, handler
        self._deadline = time.monotonic() + head.timeout_s
        self._changed = threading.Condition()  # guards the fields below
        self._messages: deque[tuple[bytes, bool]] = deque()  # with True if compressed
        self._is_complete = False  # the client sends no more messages
        self._is_sending = False
        self._is_over = False
        self._taken_bytes = 0
        self._callbacks: list[Callable[[], object]] = []
        self._code: grpc.StatusCode = _OK
        self._details = ""
        self._trailers: Trailers = None
        self._run_future: Future[None] | None = None
        self._inflated = ByteReservation(calls.budget)
        """The present message, if it was compressed. Only for the handler's thread."""

    def begin(self) -> None:
        """Run the handler on its pool. Called on the event loop."""
        self._run_future = self._handler.pool.submit(self._run)

    def reject(self, code: grpc.StatusCode, details: str) -> None:
        """End a call that has not begun, in a later turn of the event loop."""
        self._code, self._details = code, details
        self._end()

    # Events, on the event loop

    def message(self, message: bytes, is_compressed: bool) -> None:
        """Take a complete message."""
        with self._changed:
            if not self._is_over:
                self._messages.append((message, is_compressed))
                self._changed.notify_all()

    def half_closed(self) -> None:
        """The client has sent its last message."""
        with self._changed:
            self._is_complete = True
            self._changed.notify_all()

    def gone(self) -> None:
        """The client is gone, or the connection has ended the stream."""
        self._finish()

    # The handler's thread

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        """Wait for the next message. Raises ``StreamEnded`` if the call is over."""
        self._inflated.release()
        with self._changed:
            while not self._messages:
                if self._is_over:
                    raise StreamEnded
                if self._is_complete:
                    raise StopIteration
                self._wait()
            if self._is_over:
                raise StreamEnded
            message, is_compressed = self._messages.popleft()
            self._taken_bytes += len(message) + _PREFIX_BYTES
            returned = self._taken_bytes if self._taken_bytes >= _RETURNED_BYTES else 0
            self._taken_bytes -= returned
        if returned:
            self._calls.post(self._connection.return_window, self._stream, returned)
        return self._decompressed(message) if is_compressed else message

    def _decompressed(self, message: bytes) -> bytes:
        try:
            most = self._calls.max_message_bytes
            return decompress(message, self._head.encoding, most, self._inflated)
        except CallFailed as error:
            self._code, self._details = _CODES[error.code], error.details
            raise StreamEnded from None
        except Overloaded as error:
            self._code, _, self._trailers = call_status(error)
            self._details = str(error)
            raise StreamEnded from None

    def _run(self) -> None:
        try:
            for answer in self._handler.behavior(self, self):
                self._send(answer)
            self._wait_until_sent()
        except StreamEnded:
            pass
        except Exception:
            if self._code is _OK:
                log.exception("stream failed; answering INTERNAL")
                self._code, self._details = grpc.StatusCode.INTERNAL, "internal error"
        self._inflated.release()
        self._end()
        self._calls.leave(self)

    def _send(self, answer: bytes) -> None:
        self._wait_until_sent()
        with self._changed:
            self._is_sending = True
        self._calls.post(self._connection.send_message, self._stream, answer, self._sent)

    def _sent(self) -> None:
        with self._changed:
            self._is_sending = False
            self._changed.notify_all()

    def _wait_until_sent(self) -> None:
        with self._changed:
            while self._is_sending and not self._is_over:
                self._wait()
            if self._is_over:
                raise StreamEnded

    def _wait(self) -> None:
        """Wait for a change. Raises ``StreamEnded`` when the deadline is exceeded."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            self._code, self._details = grpc.StatusCode.DEADLINE_EXCEEDED, "deadline exceeded"
            raise StreamEnded
        self._changed.wait(min(left, threading.TIMEOUT_MAX))

    def _end(self) -> None:
        """Send the status, unless the call is over."""
        if self._finish():
            status = self._code.value[0], self._details, self._trailers
            self._calls.post(self._connection.end, self._stream, *status)

    def _finish(self) -> bool:
        """Mark the call as over; return False if it was."""
        with self._changed:
            if self._is_over:
                return False
            self._is_over = True
            callbacks, self._callbacks = self._callbacks, []
            self._messages.clear()
            self._changed.notify_all()
        for callback in callbacks:
            try:
                callback()
            except Exception:
                log.exception("failed to cancel the work of a stream")
        if self._run_future is not None and self._run_future.cancel():  # no thread was free yet
            self._calls.leave(self)
        return True

    # grpc.ServicerContext

    def invocation_metadata(self) -> Sequence[tuple[str, str | bytes]]:
        return self._head.metadata

    def peer(self) -> str:
        return self._connection.peer()

    def auth_context(self) -> Mapping[str, Sequence[bytes]]:
        return self._connection.auth_context()

    def time_remaining(self) -> float:
        """Seconds until the deadline; inf without one."""
        return max(0.0, self._deadline - time.monotonic())

    def is_active(self) -> bool:
        return not self._is_over

    def add_callback(self, callback: Callable[[], object]) -> bool:
        """Call ``callback`` when the call is over; return False if it is."""
        with self._changed:
            if self._is_over:
                return False
            self._callbacks.append(callback)
            return True

    def cancel(self) -> None:
        """End the call without a status: its client sees CANCELLED."""
        if self._finish():
            self._calls.post(self._connection.reset, self._stream, ErrorCode.CANCEL)

    def set_trailing_metadata(self, trailers: Trailers) -> None:
        self._trailers = trailers

    def set_code(self, code: grpc.StatusCode) -> None:
        self._code = code

    def set_details(self, details: str) -> None:
        self._details = details

    def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        """End the call with a status; raises an exception that ends the handler."""
        self._code, self._details = code, details
        raise StreamEnded
