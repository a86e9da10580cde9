"""A gRPC port on an event loop of its own, with methods that tests need, and a client of raw frames."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import hpack
import pytest

from hps.errors import Unavailable
from services.frontend.admission.byte_budget import ByteBudget
from services.frontend.connection_limit import ConnectionLimit
from services.frontend.grpc.http2 import frames
from services.frontend.grpc.http2.calls import CallTable
from services.frontend.grpc.http2.connection import GrpcConnection
from services.frontend.grpc.http2.limits import PortSettings
from services.frontend.grpc.http2.port import PortContext
from services.frontend.grpc.http2.preface import PREFACE
from services.frontend.grpc.http2.receive_budget import ReceiveBudget
from services.frontend.grpc.method_handlers import (
    BidiStreamHandler,
    ServerStreamHandler,
    UnaryHandler,
)

HEAD = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/test/Echo"),
    (":authority", "x"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
]


class EchoStream:
    """A bidirectional stream that answers each message with itself, on the event loop."""

    def __init__(self, connection, stream, head, handler):
        self.connection, self.stream, self.held, self.events = connection, stream, [], []
        self.holds = head.path.endswith("Hold")

    def message(self, data, is_compressed):
        self.events.append(len(data))
        if self.holds:
            self.held.append(data)
            return
        self.connection.return_window(self.stream, len(data) + 5)
        self.connection.send_message(self.stream, data, lambda: self.events.append("sent"))

    def half_closed(self):
        self.events.append("half closed")
        self.connection.end(self.stream, 0, "", [("left", "1"), ("raw-bin", b"\xff\0")])

    def gone(self):
        self.events.append("gone")


class Port:
    """The port, its calls and streams."""

    def __init__(
        self, *, most=64, auxiliary=8, check=None, connections=100, queue_bytes=1 << 28, **settings
    ):
        self.threads = ThreadPoolExecutor(4)
        self.gate = threading.Event()
        self.gone = threading.Event()
        self.streams = []
        self.calls = CallTable(most, auxiliary, check)
        self.budget, self.rejections = ByteBudget(queue_bytes), []
        self.context = PortContext(
            PortSettings(**{"max_message_bytes": 1 << 22, **settings}),
            self._methods(),
            self.calls,
            ConnectionLimit(connections),
            ReceiveBudget(self.budget, lambda: self.rejections.append(1)),
            self._stream,
        )
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.server = self.run(self._serve())
        self.number = self.server.sockets[0].getsockname()[1]
        self.url = f"127.0.0.1:{self.number}"

    def _methods(self):
        pool, gate = self.threads, self.gate

        def later(message, reply):
            def work():
                gate.wait(30)
                reply.answer(message)

            reply.when_gone(self.gone.set)
            pool.submit(work)

        def several(message, reply):
            def push(left):
                if left:
                    reply.push(message, lambda: push(left - 1))
                else:
                    reply.fail(Unavailable("over"))

            push(3)

        def size(message, reply):
            reply.answer(b"%d" % len(message))

        def large(message, reply):
            reply.run(lambda: (gate.wait(30), reply.answer(b"%d" % len(message))), len(message))

        def broken(message, reply):
            raise RuntimeError("broken")

        stream = BidiStreamHandler(None, pool)
        return {
            "/test/Echo": UnaryHandler(lambda message, reply: reply.answer(message)),
            "/test/Thread": UnaryHandler(lambda m, reply: pool.submit(reply.answer, m) and None),
            "/test/Big": UnaryHandler(lambda m, reply: reply.answer(b"x" * int(m))),
            "/test/Size": UnaryHandler(size),
            "/test/Later": UnaryHandler(later),
            "/test/Large": UnaryHandler(large),
            "/test/Auxiliary": ServerStreamHandler(later),
            "/test/Broken": UnaryHandler(broken),
            "/test/Metadata": UnaryHandler(
                lambda m, r: r.answer(repr((r.invocation_metadata(), r.peer())).encode())
            ),
            "/test/Several": ServerStreamHandler(several),
            "/test/Bidi": stream,
            "/test/Hold": stream,
        }

    def _stream(self, connection, stream, head, handler):
        self.streams.append(EchoStream(connection, stream, head, handler))
        return self.streams[-1]

    async def _serve(self):
        self.context.start()
        return await self.loop.create_server(
            lambda: GrpcConnection(self.context), "127.0.0.1", 0, backlog=128
        )

    def run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(30)

    def call(self, function, *arguments):
        """Call ``function`` on the event loop and return its result."""

        async def calling():
            return function(*arguments)

        return self.run(calling())

    def sweep(self, after_s=0.0):
        """Sweep as if ``after_s`` seconds had passed."""
        self.call(self.context.sweep, time.monotonic() + after_s)

    @property
    def connection(self):
        """The only connection."""
        (connection,) = self.context.connections
        return connection

    def close(self):
        self.gate.set()
        self.call(self.server.close)
        self.call(lambda: [each.abort() for each in list(self.context.connections)])
        self.calls.shutdown()
        self.threads.shutdown(wait=False)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()


class RawClient:
    """Sends and receives frames as they are."""

    def __init__(self, port, *, preface=True, settings=b""):
        self.socket = socket.create_connection(("127.0.0.1", port.number), 20)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.encoder, self.decoder = hpack.Encoder(), hpack.Decoder()
        self._data = b""
        if preface:
            self.send(PREFACE + frames.frame(frames.SETTINGS, 0, 0, settings))

    def send(self, data):
        self.socket.sendall(data)

    def frame(self, kind, flags, stream, payload=b""):
        self.send(frames.frame(kind, flags, stream, payload))

    def head(self, stream, flags=frames.END_HEADERS, **fields):
        """Begin a call; ``fields`` replace pseudo headers (``path``) or add others."""
        fields = {name.replace("_", "-"): value for name, value in fields.items()}
        head = [(n, fields.pop(n.removeprefix(":"), v)) for n, v in HEAD]
        block = self.encoder.encode([*head, *fields.items()], huffman=False)
        self.frame(frames.HEADERS, flags, stream, block)

    def message(self, stream, message, flags=frames.END_STREAM):
        self.frame(frames.DATA, flags, stream, struct.pack(">BI", 0, len(message)) + message)

    def receive(self):
        """Return the next frame: type, flags, stream, payload; None at the end."""
        while len(self._data) < 9 or len(self._data) < 9 + int.from_bytes(self._data[:3], "big"):
            with suppress(ConnectionResetError):
                more = self.socket.recv(1 << 16)
                if more:
                    self._data += more
                    continue
            return None
        size = int.from_bytes(self._data[:3], "big")
        _, kind, flags, stream = struct.unpack(">3sBBI", self._data[:9])
        payload, self._data = self._data[9 : 9 + size], self._data[9 + size :]
        return kind, flags, stream, payload

    def receive_kind(self, *kinds):
        """Return the next frame of these types; None if the connection ends first."""
        while (received := self.receive()) is not None:
            if received[0] in kinds:
                return received
        return None

    def status(self, stream):
        """Return the last fields sent on ``stream``, or the code of its reset."""
        while True:
            received = self.receive_kind(frames.HEADERS, frames.RST_STREAM)
            assert received is not None, "the connection has ended"
            kind, flags, number, payload = received
            if kind == frames.RST_STREAM:
                if number == stream:
                    return frames.ErrorCode(int.from_bytes(payload, "big"))
                continue
            fields = dict(self.decoder.decode(payload))
            if number == stream and flags & frames.END_STREAM:
                return fields

    def goodbye(self):
        """Return the code of GOAWAY; the connection must end after it."""
        received = self.receive_kind(frames.GOAWAY)
        assert received is not None, "no GOAWAY"
        code = frames.ErrorCode(int.from_bytes(received[3][4:8], "big"))
        while self.receive() is not None:
            pass
        return code

    def ping(self):
        """Wait until the server has processed all that was sent."""
        self.frame(frames.PING, 0, 0, b"12345678")
        while True:
            received = self.receive_kind(frames.PING)
            assert received is not None, "the connection has ended"
            if received[3] == b"12345678":
                return

    def close(self):
        self.socket.close()


@pytest.fixture
def make_port():
    ports = []

    def make(**settings):
        ports.append(Port(**settings))
        return ports[-1]

    yield make
    for port in ports:
        port.close()


@pytest.fixture
def port(make_port):
    return make_port()


@pytest.fixture
def raw(port):
    """A client of ``port`` that has sent its preface."""
    client = RawClient(port)
    yield client
    client.close()


@pytest.fixture
def connect():
    """Make raw clients of a port."""
    clients = []

    def make(to, **options):
        clients.append(RawClient(to, **options))
        return clients[-1]

    yield make
    for client in clients:
        client.close()
