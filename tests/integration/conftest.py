"""A small model repository and a real server process on it, for the tests that need both."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from benchmarks.peers.environments import ENVIRONMENTS
from benchmarks.peers.hps_server import Hps, start_hps
from tests.support.small_models import write_models

DOCUMENTED = {501, 503, 504}
PATIENCE_S = 60.0


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


def _ask(address: str, method: str, path: str, body: bytes, headers: dict[str, str]) -> Answer:
    """Send one request on a new connection, byte by byte; waits ``PATIENCE_S`` at most.

    Headers may be wrong."""
    host, _, port = address.rpartition(":")
    lines = [f"{method} {path} HTTP/1.1", "Host: x", "Connection: close"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    with socket.create_connection((host, int(port)), PATIENCE_S) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode("latin-1"))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(body)  # rejected by its head alone: the answer still arrives
        response = http.client.HTTPResponse(connection, method=method)
        response.begin()
        headers_back = {name.lower(): value for name, value in response.getheaders()}
        return judged(Answer(response.status, headers_back, response.read()))


def judged(answer: Answer) -> Answer:
    """``answer``, if valid: no 5xx but the documented ones, and every failure is ``{"error": text}``."""
    assert answer.status < 500 or answer.status in DOCUMENTED, answer
    if answer.status >= 400:
        assert answer.headers.get("content-type", "").startswith("application/json"), answer
        error = json.loads(answer.body)
        assert isinstance(error.get("error"), str), answer
        assert error["error"], answer
        assert "Traceback" not in error["error"], answer
        assert "/pytest-" not in error["error"], answer  # a path of the server's
    return answer


@pytest.fixture(scope="session")
def ask() -> Callable[..., Answer]:
    """Sends one request as its bytes are given and returns the answer, judged."""
    return _ask


@pytest.fixture(scope="session")
def judge() -> Callable[[Answer], Answer]:
    return judged


@pytest.fixture(scope="session")
def small_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model repository of ``write_models``; not to be changed."""
    root = tmp_path_factory.mktemp("repository")
    write_models(root)
    return root


@pytest.fixture(scope="session")
def small_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hps]:
    """``hps serve`` on ``write_models``, with bodies up to 256 KiB and shared memory."""
    folder = tmp_path_factory.mktemp("server")
    write_models(folder / "models")
    with start_hps(folder, limits={"max_body_bytes": 1 << 18, "shared_memory": True}) as server:
        yield server


@pytest.fixture(scope="session")
def perf_analyzer_ready() -> None:
    """Skips when perf_analyzer is not set up, fails where ``CI`` is set."""
    _ready("perf_analyzer")


@pytest.fixture(scope="session")
def triton_ready() -> None:
    """As `perf_analyzer_ready`, for Triton."""
    _ready("triton")


@pytest.fixture(scope="session")
def kserve_ready() -> None:
    """As `perf_analyzer_ready`, for KServe's client."""
    _ready("kserve")


def _ready(peer: str) -> None:
    if not ENVIRONMENTS[peer].ready():
        message = f"{peer} is not set up: run `make test-services`"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
