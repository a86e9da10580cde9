"""State shared by the connections of one gRPC port: limits, methods, calls, work for the event loop."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from threading import get_ident
from typing import Any

from services.frontend.connection_limit import ConnectionLimit
from services.frontend.grpc.http2.calls import CallTable
from services.frontend.grpc.http2.headers import CallHead
from services.frontend.grpc.http2.interfaces import OpenConnection, StreamConnection, StreamReceiver
from services.frontend.grpc.http2.limits import PortSettings
from services.frontend.grpc.http2.receive_budget import ReceiveBudget
from services.frontend.grpc.http2.sending import FrameSender
from services.frontend.grpc.http2.streams import Stream
from services.frontend.grpc.method_handlers import BidiStreamHandler, UnaryHandler

log = logging.getLogger(__name__)


MakeStreamReceiver = Callable[
    [StreamConnection, Stream, CallHead, BidiStreamHandler], StreamReceiver
]
Certificates = Callable[[asyncio.BaseTransport], Mapping[str, Sequence[bytes]]]


class PortContext:
    """The shared state of a port's connections. All but `post` is for the event loop's thread."""

    def __init__(
        self,
        settings: PortSettings,
        methods: Mapping[str, UnaryHandler | BidiStreamHandler],
        calls: CallTable,
        limit: ConnectionLimit,
        receiving: ReceiveBudget,
        stream_call: MakeStreamReceiver,
        certificates: Certificates = lambda _transport: {},
    ) -> None:
        """``methods``: handlers by full name, ``/service/name``; other calls are UNIMPLEMENTED.
        ``certificates`` returns the names in the client's certificate as grpc's auth context has them."""
        self.settings, self.methods, self.calls, self.limit = settings, methods, calls, limit
        self.receiving = receiving
        self.stream_call, self.certificates = stream_call, certificates
        self.connections: set[OpenConnection] = set()
        self.loop: asyncio.AbstractEventLoop
        self.thread = 0
        self.corked: list[FrameSender] | None = None
        """Senders that collect what they write while posted work runs; None: none does."""
        self._posted: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._is_woken = False

    def start(self) -> None:
        """Use the running event loop. Call it before the first connection."""
        self.loop, self.thread = asyncio.get_running_loop(), get_ident()

    def post(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call ``function`` on the event loop, from any thread, in order. One wake-up serves many calls."""
        self._posted.append((function, arguments))
        if not self._is_woken:
            self._is_woken = True
            with suppress(RuntimeError):  # the loop has ended
                self.loop.call_soon_threadsafe(self._run_posted)

    def _run_posted(self) -> None:
        self._is_woken = False  # before the work is counted, so that none is missed
        corked: list[FrameSender] = []
        self.corked = corked
        posted = self._posted
        for _ in range(len(posted)):
            function, arguments = posted.popleft()
            try:
                function(*arguments)
            except Exception:  # must not prevent other answers
                log.exception("failed to answer a call")
        self.corked = None
        for sender in corked:
            sender.uncork()

    def sweep(self, now: float) -> None:
        """End calls and connections that take too long; ``now`` is ``time.monotonic``. Call it about every
        second."""
        self.calls.sweep(now)
        self.receiving.sweep(now)
        for connection in list(self.connections):
            connection.sweep(now)
