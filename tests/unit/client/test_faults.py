"""The clients against a server that closes connections, is slow, busy or unavailable for a moment."""

from __future__ import annotations

import asyncio
import math
import socket
import ssl
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import (
    GRPCInferenceServiceServicer,
    add_GRPCInferenceServiceServicer_to_server,
)

from hps.client import AsyncClient, Client, Tls
from hps.client import client as module
from hps.client.calls import RetryDeadline
from hps.client.errors import RetryLater, ServerUnreachable, grpc_error, http_error
from hps.errors import BadRequest, ConfigError, DeadlineExceeded, HpsError, Unavailable
from tests.support.certificates import made

BODY = (
    b'{"model_name":"m.lookup","outputs":[{"name":"f","datatype":"FP32","shape":[1,1],"data":[7]}]}'
)
OK = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
BUSY = b'HTTP/1.1 %d No\r\n%bContent-Length: 16\r\n\r\n{"error":"busy"}'
DROP, HANG = b"", None


class Script:
    """A server that gives its answers in turn: bytes, then it hangs up if they are no whole answer; or it
    hangs."""

    def __init__(self, context=None):
        self.answers = []
        self.seen = []
        self._context = context
        self._end = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"{'https' if context else 'http'}://127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = []
        self._start(self._accept)

    def _start(self, work, *args):
        thread = threading.Thread(target=work, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self):
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._start(self._talk, connection)

    def _talk(self, connection):
        try:
            if self._context:
                connection = self._context.wrap_socket(connection, server_side=True)
            while self._read(connection):
                answer = self.answers.pop(0)
                if answer is HANG:
                    self._end.wait(30)
                    return
                connection.sendall(answer)
                if answer != OK and not answer.endswith(b"}"):
                    return
        except OSError:
            pass
        finally:
            connection.close()

    def _read(self, connection):
        data = b""
        while b"\r\n\r\n" not in data:
            data += (piece := connection.recv(65536))
            if not piece:
                return False
        head, _, body = data.partition(b"\r\n\r\n")
        lines = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        while len(body) < int(lines.get(b"content-length", 0)):
            body += connection.recv(65536)
        self.seen.append((lines, body))
        return True

    def close(self):
        self._end.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(30)


@pytest.fixture
def script():
    server = Script()
    yield server
    server.close()


def by_threads(url, **options):
    call = {name: options.pop(name) for name in ("timeout_s", "request_id") if name in options}
    with Client(url, **options) as client:
        return client.lookup("m", {"f": [1]}, **call).vectors["f"][0, 0]


def by_asyncio(url, **options):
    call = {name: options.pop(name) for name in ("timeout_s", "request_id") if name in options}

    async def once():
        async with AsyncClient(url, **options) as client:
            return (await client.lookup("m", {"f": [1]}, **call)).vectors["f"][0, 0]

    return asyncio.run(once())


@pytest.fixture(params=[by_threads, by_asyncio], ids=["threads", "asyncio"])
def lookup(request):
    return request.param


@pytest.fixture
def pauses(monkeypatch):
    """Seconds of each pause of the clients; they do not sleep."""
    slept = []

    async def sleep(seconds):
        slept.append(seconds)

    monkeypatch.setattr(module.time, "sleep", slept.append)
    monkeypatch.setattr(module.asyncio, "sleep", sleep)
    return slept


@pytest.mark.parametrize(
    "first", [DROP, OK[:60], OK[:-3]], ids=["at once", "in the head", "in the body"]
)
def test_request_is_retried_when_server_dies_while_answering(script, lookup, pauses, first):
    script.answers = [first, OK]
    assert lookup(script.url, retries=1) == 7
    assert len(script.seen) == 2
    assert 0 < pauses[0] < 0.1
    script.answers = [first]
    with pytest.raises(Unavailable, match=r"http://127.0.0.1:\d+"):
        lookup(script.url, retries=0)


def test_request_is_retried_after_retry_after(script, lookup, pauses):
    script.answers = [BUSY % (503, b""), BUSY % (429, b"Retry-After: 3\r\n"), OK]
    assert lookup(script.url) == 7
    assert pauses[0] < 0.1
    assert pauses[1] == 3
    # What would come after the deadline is not waited for.
    script.answers = [BUSY % (503, b"Retry-After: 60\r\n"), OK]
    with pytest.raises(Unavailable, match="busy"):
        lookup(script.url)
    script.answers = [b'HTTP/1.1 400 No\r\nContent-Length: 16\r\n\r\n{"error":"this"}']
    with pytest.raises(BadRequest, match="this"):
        lookup(script.url)


def test_slow_server_times_out(script, lookup):
    script.answers = [HANG]
    with pytest.raises(DeadlineExceeded, match="did not answer in time"):
        lookup(script.url, timeout_s=0.1)
    assert b'"timeout": 100000' in script.seen[0][1]  # microseconds, for the server


def test_dripping_server_times_out():
    """Every piece arrives soon; the answer never ends."""
    listener = socket.create_server(("127.0.0.1", 0))

    def drip():
        connection, _ = listener.accept()
        with connection:
            connection.sendall(OK[:70])
            try:
                while True:
                    connection.sendall(b" ")
                    time.sleep(0.02)
            except OSError:
                pass

    thread = threading.Thread(target=drip, daemon=True)
    thread.start()
    with pytest.raises((DeadlineExceeded, HpsError)):
        by_threads(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout_s=0.2)
    thread.join(30)
    assert not thread.is_alive()
    listener.close()


def test_connections_are_reused_unless_closed(script):
    script.answers = [OK, OK, b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"]
    with Client(script.url, retries=0) as client:
        for _ in range(2):
            client.lookup("m", {"f": [1]})
        assert client._transport._idle != []
        kept = client._transport._idle[0]
        with pytest.raises(HpsError, match="violates the protocol"):
            client.lookup("m", {"f": [1]})
        assert kept.fileno() == -1
        # The server closes an idle connection; the next call has another.
        script.answers = [OK, OK]
        client.lookup("m", {"f": [1]})
        client._transport._idle[0].shutdown(socket.SHUT_RD)
        client.lookup("m", {"f": [1]})


def test_request_id_is_sent_as_a_header(script, lookup):
    script.answers = [OK]
    lookup(script.url, request_id="r-7")
    head, body = script.seen[0]
    assert head[b"x-request-id"] == b"r-7"
    assert b"r-7" not in body  # the body is the same again for the next request


def test_only_unavailable_servers_are_retried():
    patience = RetryDeadline(60, 3)
    assert 0 < patience.pause_s(Unavailable("")) < 0.1
    assert 0.05 <= patience.pause_s(Unavailable("")) < 0.2
    assert patience.pause_s(RetryLater("", 7)) == 7
    with pytest.raises(Unavailable):
        patience.pause_s(Unavailable(""))
    with pytest.raises(BadRequest):
        RetryDeadline(60, 2).pause_s(BadRequest(""))
    with pytest.raises(Unavailable):  # no time for another
        RetryDeadline(0.001, 2).pause_s(Unavailable(""))


def test_retry_headers_are_parsed():
    assert http_error(503, b"", "5", "h").after_s == 5
    assert type(http_error(503, b"", "Fri, 31 Dec 1999 23:59:59 GMT", "h")) is Unavailable
    assert grpc_error("g", "UNAVAILABLE", "busy", "250").after_s == 0.25
    assert grpc_error("g", "RESOURCE_EXHAUSTED", "too many", "250").after_s == 0.25
    for never in ("-1", "soon"):  # gRFC A6: not to be repeated
        assert grpc_error("g", "UNAVAILABLE", "busy", never).after_s == math.inf
    assert (
        type(grpc_error("g", "UNAVAILABLE", "failed to connect to all addresses"))
        is ServerUnreachable
    )
    assert type(grpc_error("g", "CANCELLED", "CANCELLED")) is ServerUnreachable
    assert type(grpc_error("g", "RESOURCE_EXHAUSTED", "queue is full")) is Unavailable
    assert (
        type(grpc_error("g", "RESOURCE_EXHAUSTED", "Received message larger than max"))
        is BadRequest
    )


# -- gRPC ------------------------------------------------------------------------------------------


class Servicer(GRPCInferenceServiceServicer):
    """Ends calls with ``codes``, in turn, then answers."""

    def __init__(self):
        self.codes, self.seen = [], []
        self.released = threading.Event()

    def ModelInfer(self, request, context):
        self.seen.append((request, context.time_remaining(), dict(context.invocation_metadata())))
        if self.codes:
            code = self.codes.pop(0)
            if code is HANG:
                self.released.wait(30)
            else:
                context.set_trailing_metadata((("grpc-retry-pushback-ms", "1500"),))
                context.abort(code, "busy")
        response = pb.ModelInferResponse(model_name=request.model_name)
        response.outputs.add(name="f", datatype="FP32", shape=[1, 1])
        response.raw_output_contents.append(b"\0\0\xe0@")
        return response


@pytest.fixture
def servicer():
    made = Servicer()
    server = grpc.server(ThreadPoolExecutor(4))
    add_GRPCInferenceServiceServicer_to_server(made, server)
    made.url = f"grpc://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield made
    made.released.set()
    server.stop(0).wait(30)


def test_grpc_is_retried_after_pushback(servicer, lookup, pauses):
    unavailable = grpc.StatusCode.UNAVAILABLE
    servicer.codes = [unavailable, grpc.StatusCode.RESOURCE_EXHAUSTED]
    assert lookup(servicer.url, request_id="r-7", api_key="k") == 7
    assert pauses == [1.5, 1.5]
    request, remaining, metadata = servicer.seen[-1]
    assert request.id == "r-7"
    assert metadata["x-api-key"] == "k"
    assert 0 < remaining < 31
    servicer.codes = [grpc.StatusCode.INTERNAL]
    with pytest.raises(HpsError, match="busy"):
        lookup(servicer.url)


def test_slow_grpc_server_times_out(servicer, lookup):
    servicer.codes = [HANG]
    with pytest.raises(DeadlineExceeded, match="did not answer in time"):
        lookup(servicer.url, timeout_s=0.1)


# -- addresses and certificates --------------------------------------------------------------------


def test_address_scheme_selects_protocol_and_tls():
    with pytest.raises(ConfigError, match=r"must look like http://host:port or grpc://host:port"):
        Client("ftp://x")
    with pytest.raises(ConfigError, match=r"is without TLS; write https://"):
        Client("http://x", tls=Tls())
    with pytest.raises(ConfigError, match=r"/no/such: No such file"):
        Client("grpcs://x", tls=Tls("/no/such"))
    with pytest.raises(ConfigError, match=r"/no/such: not usable for TLS"):
        Client("https://x", tls=Tls("/no/such"))


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """Self-signed certificate of 127.0.0.1, and its key."""
    key, certificate = made(tmp_path_factory.mktemp("tls"), "x", ["IP:127.0.0.1"])
    return certificate, key


def test_certificates_are_checked_both_ways(certificate, lookup):
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=certificate[0])
    context.load_cert_chain(*certificate)
    context.verify_mode = ssl.CERT_REQUIRED
    server = Script(context)
    try:
        server.answers = [OK]
        assert lookup(server.url, tls=Tls(certificate[0], *certificate)) == 7
        with pytest.raises(HpsError, match=r"the certificate of .* is not trusted"):
            lookup(server.url)
        with pytest.raises(HpsError):  # who shows none is turned away
            lookup(server.url, tls=Tls(certificate[0]), retries=0)
    finally:
        server.close()
