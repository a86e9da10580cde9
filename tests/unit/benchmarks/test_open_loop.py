"""Tests of the open-loop load generator."""

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


def test_open_loop_sends_every_arrival(echo):
    requests = [http_request("/300000", bytes(300_000)), http_request("/0", b"x")]
    arrivals = poisson(100.0, 1.5, seed=1)
    result = open_loop(echo.address, requests, arrivals)
    assert len(result.statuses) == len(arrivals) == len(result.of(ok=True))
    assert set(result.statuses) == {200}
    assert result.goodput == pytest.approx(len(arrivals) / result.wall_s)


def test_closed_loop_counts_answers(echo):
    result = closed_loop(echo.address, [http_request("/0", b"x")], 3, 1.0)
    assert len(result.statuses) > 3
    assert (result + result).goodput == pytest.approx(result.goodput)


def test_poisson_arrivals_have_the_rate():
    times = poisson(1000.0, 10.0, seed=3)
    assert times == sorted(times)
    assert 9_500 < len(times) < 10_500
    assert times[-1] < 10.0
