"""Tests of the native load generator, against a bare peer and an echo over HTTP."""

from __future__ import annotations

import socket
import struct
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.load import http_request
from benchmarks.native_load import Callers, Patch, Template, run_load, sink
from benchmarks.peers.process import free_ports, serving

BODY = 64
MESSAGE = http_request("/3000", bytes(BODY))
KEYS = Patch(len(MESSAGE) - BODY, 4, 100)
FLOATS = Patch(len(MESSAGE) - BODY + 32, 8)
ECHO = Template("http", MESSAGE, [KEYS, FLOATS])


@pytest.fixture(scope="module")
def echo():
    port = free_ports(1)[0]
    command = [sys.executable, "-m", "benchmarks.peers.asgi", "echo", str(port), "3000"]
    with serving(command, port, ready_path="/0") as server:
        yield server.address


def test_http_answers_are_counted_within_the_measured_time(echo):
    summary = run_load(echo, ECHO, Callers(3, 0.5, warm_up=0.1))
    assert summary.errors == 0
    assert summary.requests > 10
    assert summary.per_second == pytest.approx(summary.requests / 0.5)
    assert summary.answer_bytes > 3000
    assert 0 < summary.p50_ms <= summary.p99_ms <= summary.max_ms


def test_each_request_has_fresh_keys_and_numbers(echo):
    summary = run_load(echo, ECHO, Callers(2, 0.5, samples=2))
    (first, answer), (second, _) = summary.samples
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert first[: KEYS.offset] == second[: KEYS.offset] == MESSAGE[: KEYS.offset]
    keys = [np.frombuffer(each, np.int64, 4, KEYS.offset) for each in (first, second)]
    assert (keys[0] != keys[1]).any()
    assert np.concatenate(keys).min() >= 0
    assert np.concatenate(keys).max() < 100
    floats = [np.frombuffer(each, np.float32, 8, FLOATS.offset) for each in (first, second)]
    assert (floats[0] != floats[1]).any()
    assert np.abs(floats).max() <= 1


def test_numbers_may_repeat_the_keys(echo):
    repeated = replace(ECHO, patches=[KEYS, replace(FLOATS, count=4, source=0)])
    (sent, _), _ = run_load(echo, repeated, Callers(2, 0.5, samples=2)).samples
    keys = np.frombuffer(sent, np.int64, 4, KEYS.offset)
    assert np.frombuffer(sent, np.float32, 4, FLOATS.offset).tolist() == keys.tolist()


def test_skewed_keys_are_mostly_small(echo):
    message = http_request("/3000", bytes(8000))
    skewed = Patch(len(message) - 8000, 1000, 1000, skew=3)
    template = replace(ECHO, message=message, patches=[skewed])
    (sent, _), _ = run_load(echo, template, Callers(2, 0.5, samples=2)).samples
    keys = np.frombuffer(sent, np.int64, 1000, skewed.offset)
    assert keys.min() >= 0
    assert keys.max() < 1000
    assert 0.94 < (keys < 300).mean() < 0.99


def test_answers_that_do_not_end_with_zeros_are_wrong(echo):
    zeros = replace(ECHO, message=http_request("/3000", bytes(BODY)), patches=(), zeros=3000)
    assert run_load(echo, zeros, Callers(1, 0.2)).wrong == 0
    ones = replace(zeros, message=http_request("/3000", bytes(BODY - 1) + b"1"))
    summary = run_load(echo, ones, Callers(1, 0.2))
    assert summary.wrong == summary.errors > 0


def test_seeds_decide_the_keys(echo):
    sent = [
        run_load(echo, ECHO, Callers(1, 0.2, samples=1, seed=seed)).samples[0][0]
        for seed in (1, 1, 2)
    ]
    assert sent[0] == sent[1] != sent[2]


def test_other_statuses_are_failures(echo):
    missing = Template("http", http_request("/5000", b""))
    summary = run_load(echo, missing, Callers(1, 0.2))
    assert summary.requests == 0
    assert summary.failures == {"500": 1}


def test_bare_peer_exchanges_the_given_sizes():
    large = Template("raw", bytes(300_000), answer_bytes=500_000)
    with sink(300_000, 500_000, ()) as address:
        summary = run_load(address, large, Callers(4, 0.5))
    assert summary.errors == 0
    assert summary.requests > 10
    assert summary.answer_bytes == 500_000


def test_closed_connections_are_broken_unless_they_may_reconnect(echo):
    closing = Template("http", MESSAGE.replace(b"Host:", b"Connection: close\r\nHost:"))
    assert run_load(echo, closing, Callers(2, 0.3)).broken == 2
    assert run_load(echo, closing, Callers(2, 0.3, reconnect=True)).broken > 10


def test_unreachable_address_is_an_error():
    with pytest.raises(RuntimeError, match="connection failed: Connection refused"):
        run_load(f"127.0.0.1:{free_ports(1)[0]}", ECHO, Callers(1, 0.1))


def test_patch_outside_the_message_is_an_error(echo):
    outside = replace(ECHO, patches=[Patch(len(MESSAGE) - 8, 2, 10)])
    with pytest.raises(RuntimeError, match="is outside of the message"):
        run_load(echo, outside, Callers(1, 0.1))


def test_grpc_frames_may_be_as_large_as_to_grpcs_own_clients():
    """grpcio's clients send SETTINGS_MAX_FRAME_SIZE (5) as 4 MiB; by default an answer is cut in 16 KiB."""
    greeting = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept():
            with listener.accept()[0] as connection:
                greeting.append(connection.recv(4096))

        threading.Thread(target=accept).start()
        call = Template("grpc", bytes(5), method="/any.Service/Call")
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        assert run_load(address, call, Callers(1, 0.2)).broken
    settings = greeting[0].removeprefix(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
    size = int.from_bytes(settings[:3], "big")
    assert dict(struct.iter_unpack("!HI", settings[9 : 9 + size]))[5] == 4 << 20
