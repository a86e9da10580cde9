"""HTTP as the load generator speaks it, to servers that behave in their own ways."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import pytest

from hps.client.calls import InferCall
from hps.client.errors import ServerUnreachable
from hps.errors import BadRequest, ConfigError, DeadlineExceeded, Unavailable
from hps.tools.bench.senders import HttpSender, _BenchConnection, open_sender

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
CALL = InferCall("m", {"x": np.arange(3)})


def sent(
    replies: list[bytes], send: int, timeout_s: float = 5.0, pause_s: float = 0.0
) -> tuple[list[Any], int, list[bytes]]:
    """Send ``send`` requests one after another to a server with these ``replies`` (empty: it closes).

    Returns the outcomes, the number of connections and the received bytes."""
    connections, received = 0, []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().partition(b"\r\ncontent-length: ")[2].split(b"\r\n")[0])
                received.append(head + await reader.readexactly(length))
                reply = replies.pop(0)
                if not reply:
                    break
                half = len(reply) // 2
                writer.write(reply[:half])
                await asyncio.sleep(pause_s)
                writer.write(reply[half:])
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass
        finally:
            writer.close()

    async def whole() -> list[Any]:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        sender = open_sender(f"http://127.0.0.1:{port}", "key", None)
        assert isinstance(sender, HttpSender)
        message = sender.message(CALL)
        outcomes: list[Any] = []
        for _ in range(send):
            try:
                await sender.send(message, time.monotonic() + timeout_s)
            except Exception as error:
                outcomes.append(error)
            else:
                outcomes.append(None)
        await sender.close()
        server.close()
        await server.wait_closed()
        return outcomes

    return asyncio.run(whole()), connections, received


def kinds(outcomes: list[Any]) -> list[Any]:
    return [None if each is None else type(each) for each in outcomes]


def test_http_connection_is_reused() -> None:
    outcomes, connections, received = sent([OK] * 3, 3)
    assert (kinds(outcomes), connections) == ([None] * 3, 1)
    assert received[0] == received[2]
    assert b"Authorization: Bearer key\r\n" in received[0]
    assert received[0].startswith(b"POST /v2/models/m/infer HTTP/1.1\r\n")


def test_answer_in_pieces_is_joined() -> None:
    assert kinds(sent([OK] * 2, 2, pause_s=0.01)[0]) == [None, None]


def test_sender_reconnects_after_the_server_closes() -> None:
    closing = OK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    outcomes, connections, _ = sent([closing, OK], 2)
    assert (kinds(outcomes), connections) == ([None, None], 2)


def test_rejection_keeps_the_connection() -> None:
    body = b'{"error": "full"}'
    refused = b"HTTP/1.1 503 Busy\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
    outcomes, connections, _ = sent([refused, refused.replace(b"503", b"400"), OK], 3)
    assert (kinds(outcomes), connections) == ([Unavailable, BadRequest, None], 1)
    assert str(outcomes[0]) == "full"


@pytest.mark.parametrize("reply", [b"", b"HTTP/1.1 200 OK\r\n\r\n"])
def test_truncated_answer_or_missing_length_fails_the_request(reply: bytes) -> None:
    outcomes, connections, _ = sent([reply, OK], 2)
    assert isinstance(outcomes[0], Unavailable)
    assert (outcomes[1], connections) == (None, 2)


def test_timeout_closes_the_connection() -> None:
    slow, connections, _ = sent([OK], 1, timeout_s=0.05, pause_s=0.5)
    assert (kinds(slow), connections) == ([DeadlineExceeded], 1)


def test_unreachable_server_is_reported() -> None:
    async def ask() -> None:
        sender = open_sender("http://127.0.0.1:9", None, None)
        await sender.send(sender.message(CALL), time.monotonic() + 5)

    with pytest.raises(Unavailable, match="nothing listens"):
        asyncio.run(ask())


def test_invalid_address_is_rejected() -> None:
    with pytest.raises(ConfigError):
        open_sender("ftp://x", None, None)


def test_chunked_answers_are_read() -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    body = b"5;x=y\r\n{\r\n\r\n\r\n1\r\n}\r\n0\r\n\r\n"
    outcomes, connections, _ = sent([head + body] * 3, 3, pause_s=0.001)
    assert (kinds(outcomes), connections) == ([None] * 3, 1)


def test_chunk_without_a_size_is_an_error() -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    outcomes, _, _ = sent([head + b"zz\r\n{}\r\n\r\n"], 1)
    assert kinds(outcomes) == [ServerUnreachable]


@pytest.mark.parametrize("piece", [1, 7])
def test_answer_byte_by_byte_is_read(piece: int) -> None:
    connection = _BenchConnection()

    async def fed() -> bytes:
        connection._reply = asyncio.get_running_loop().create_future()
        for at in range(0, len(OK), piece):
            connection.data_received(OK[at : at + piece])
        reply = await connection._reply
        return reply.body

    assert asyncio.run(fed()) == b"{}"
