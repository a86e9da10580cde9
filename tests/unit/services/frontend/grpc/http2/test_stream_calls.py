"""Calls of bidirectional streams, on a connection that collects what they send."""

from __future__ import annotations

import gzip
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import pytest

from hps.errors import Unavailable
from services.frontend.admission.byte_budget import ByteBudget
from services.frontend.grpc.http2 import stream_calls
from services.frontend.grpc.http2.headers import CallHead
from services.frontend.grpc.http2.stream_calls import StreamCalls
from services.frontend.grpc.method_handlers import BidiStreamHandler
from tests.support.waiting import until

STREAM = "a stream"
LIMIT = 1000


class Connection:
    """Collects answers, statuses and returned windows; answers are sent while ``reads`` is set."""

    def __init__(self):
        self.answers, self.ends, self.resets, self.returned = [], [], [], 0
        self.reads, self.sent = True, None

    def send_message(self, stream, message, sent):
        self.answers.append(message)
        self.sent = sent
        if self.reads:
            sent()

    def end(self, stream, code, details, trailers):
        self.ends.append((code, details, trailers))

    def reset(self, stream, code):
        self.resets.append(int(code))

    def return_window(self, stream, size):
        self.returned += size

    def peer(self):
        return "ipv4:127.0.0.1:1"

    def auth_context(self):
        return {}


def head(timeout_s=math.inf, encoding="identity"):
    return CallHead("/a/b", (("name", "value"),), timeout_s, encoding)


@pytest.fixture
def begin():
    """``begin(behavior, **head)``: a connection, and a call on it; posted work runs at once."""
    pool = ThreadPoolExecutor(2)
    calls = StreamCalls(2, LIMIT, ByteBudget(1 << 20))
    calls.post = lambda function, *arguments: function(*arguments)

    def make(behavior, **of_head):
        connection = Connection()
        handler = BidiStreamHandler(behavior, pool)
        return connection, calls.begin(connection, STREAM, head(**of_head), handler)

    yield make
    for call in list(calls._open):
        call.gone()
    pool.shutdown()


def echo(messages, context):
    yield from messages


@contextmanager
def stuck():
    """A behavior that waits until the end of the block."""
    gate = threading.Event()

    def wait(_messages, _context):
        gate.wait(60)
        yield from ()

    try:
        yield wait
    finally:
        gate.set()


def test_messages_are_answered_in_order(begin):
    connection, call = begin(echo)
    for message in (b"1", b"2", b"3"):
        call.message(message, False)
    call.half_closed()
    until(lambda: connection.ends)
    assert connection.answers == [b"1", b"2", b"3"]
    assert connection.ends == [(0, "", None)]
    call.gone()  # after the status: no effect
    assert not connection.resets


def test_window_is_returned_when_messages_are_taken(begin, monkeypatch):
    monkeypatch.setattr(stream_calls, "_RETURNED_BYTES", 20)
    gate = threading.Semaphore(0)

    def slow(messages, _context):
        for _ in messages:
            gate.acquire()
            yield b""

    connection, call = begin(slow)
    for _ in range(4):
        call.message(b"x" * 10, False)
    assert connection.returned == 0
    gate.release()
    until(lambda: connection.returned == 30)
    call.gone()
    gate.release()


def test_one_answer_at_a_time_is_passed_on(begin):
    connection, call = begin(echo)
    connection.reads = False
    for message in (b"1", b"2"):
        call.message(message, False)
    until(lambda: connection.answers)
    until(lambda: not call._messages)
    assert connection.answers == [b"1"]
    connection.sent()
    until(lambda: connection.answers == [b"1", b"2"])
    call.gone()


@pytest.mark.parametrize("waits_for", ["message", "reader"])
def test_client_that_leaves_ends_the_thread(begin, waits_for):
    left = threading.Event()

    def behavior(messages, context):
        try:
            yield from messages
        finally:
            left.set()

    connection, call = begin(behavior)
    connection.reads = False
    cancelled = threading.Event()
    assert call.add_callback(cancelled.set)
    if waits_for == "reader":
        for message in (b"1", b"2", b"3"):
            call.message(message, False)
        until(lambda: connection.answers)
    assert call.is_active()
    call.gone()
    assert cancelled.is_set()
    assert left.wait(60)
    assert not call.is_active()
    assert not call.add_callback(cancelled.set)
    assert not connection.ends
    assert not connection.resets


def test_deadline_ends_the_call(begin):
    connection, call = begin(echo, timeout_s=0.05)
    assert call.time_remaining() <= 0.05
    until(lambda: connection.ends)
    assert connection.ends == [
        (grpc.StatusCode.DEADLINE_EXCEEDED.value[0], "deadline exceeded", None)
    ]


def test_handler_ends_with_a_status_and_trailers(begin):
    def behavior(_messages, context):
        yield b"1"
        context.set_trailing_metadata((("a", "b"),))
        context.abort(grpc.StatusCode.NOT_FOUND, "none")

    connection, _ = begin(behavior)
    until(lambda: connection.ends)
    assert connection.answers == [b"1"]
    assert connection.ends == [(5, "none", (("a", "b"),))]


def test_failure_of_a_handler_is_internal(begin, caplog):
    def behavior(_messages, _context):
        yield b"1"
        raise RuntimeError("secret")

    connection, _ = begin(behavior)
    until(lambda: connection.ends)
    assert connection.ends == [(13, "internal error", None)]
    assert "secret" in caplog.text


def test_refused_handler_is_unavailable(begin):
    connection = Connection()
    with ThreadPoolExecutor(1) as pool:
        handler = BidiStreamHandler(echo, pool)
        handler.refuse(Unavailable("stopping"))
        calls = StreamCalls(1, LIMIT, ByteBudget(1 << 20))
        calls.post = lambda function, *arguments: function(*arguments)
        calls.begin(connection, STREAM, head(), handler)
        until(lambda: connection.ends)
    ((code, details, trailers),) = connection.ends
    assert (code, details) == (14, "stopping")
    assert dict(trailers)["grpc-retry-pushback-ms"]


def test_cancelled_call_is_reset(begin):
    connection, call = begin(echo)
    call.cancel()
    call.cancel()
    assert connection.resets == [8]
    assert not connection.ends


def test_calls_are_limited_and_leave(begin):
    with stuck() as behavior:
        calls = [begin(behavior) for _ in range(2)]
        rejected, call = begin(behavior)
        assert rejected.ends == [
            (8, "2 streams are open, the maximum; retry later, or ask another replica", None)
        ]
        call.message(b"late", False)
        assert not call._messages
        for _, each in calls:
            each.gone()
    until(lambda: not begin(echo)[0].ends)


def test_call_without_a_thread_leaves_when_its_client_is_gone():
    with ThreadPoolExecutor(1) as pool, stuck() as behavior:
        calls = StreamCalls(2, LIMIT, ByteBudget(1 << 20))
        handler = BidiStreamHandler(behavior, pool)
        calls.begin(Connection(), STREAM, head(), handler).gone()
        queued = calls.begin(Connection(), STREAM, head(), handler)
        assert queued in calls._open
        queued.gone()
        assert queued not in calls._open


def test_compressed_messages_are_limited(begin):
    connection, call = begin(echo, encoding="gzip")
    call.message(gzip.compress(b"1" * LIMIT), True)
    call.message(gzip.compress(b"1" * (LIMIT + 1)), True)
    until(lambda: connection.ends)
    assert connection.answers == [b"1" * LIMIT]
    assert connection.ends[0][0] == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]


def test_context_describes_the_call(begin):
    _, call = begin(echo)
    assert call.invocation_metadata() == (("name", "value"),)
    assert call.peer() == "ipv4:127.0.0.1:1"
    assert call.auth_context() == {}
    assert call.time_remaining() == math.inf
    call.half_closed()
