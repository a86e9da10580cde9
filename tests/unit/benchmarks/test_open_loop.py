"""The load that does not wait for answers."""

from __future__ import annotations

import sys

import pytest

from benchmarks.load import http_request
from benchmarks.open_loop import closed_loop, open_loop, poisson
from benchmarks.peers.process import free_ports, serving


@pytest.fixture(scope="module")
def echo():
    port = free_ports(1)[0]
    command = [sys.executable, "-m", "benchmarks.peers.asgi", "echo", str(port), "300000"]
    with serving(command, port, ready_path="/0") as server:
        yield server


def test_every_request_is_sent_and_answered(echo):
    requests = [http_request("/300000", bytes(300_000)), http_request("/0", b"x")]
    arrivals = poisson(100.0, 1.5, seed=1)
    seen = open_loop(echo.address, requests, arrivals)
    assert len(seen.statuses) == len(arrivals) == len(seen.of(ok=True))
    assert set(seen.statuses) == {200}
    assert seen.goodput == pytest.approx(len(arrivals) / seen.wall_s)


def test_so_many_in_flight(echo):
    seen = closed_loop(echo.address, [http_request("/0", b"x")], 3, 1.0)
    assert len(seen.statuses) > 3
    assert (seen + seen).goodput == pytest.approx(seen.goodput)


def test_arrivals_are_random_at_the_rate_asked_for():
    times = poisson(1000.0, 10.0, seed=3)
    assert times == sorted(times)
    assert 9_500 < len(times) < 10_500
    assert times[-1] < 10.0
