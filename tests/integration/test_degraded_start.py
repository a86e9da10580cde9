"""Unreachable services at the start are named, retried and used when available; no process ends."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers.hps_server import Hps, start_hps
from benchmarks.peers.process import free_ports
from benchmarks.peers.redis_server import RedisServer
from tests.support.ingest_process import IngestProcess
from tests.support.redis_servers import need
from tests.support.small_models import write_models
from tests.support.waiting import until

WORDS = {"inputs": [{"name": "word", "shape": [1, 1], "datatype": "INT64", "data": [7]}]}
CLICKS = {
    "inputs": [
        {"name": name, "shape": [1, 1], "datatype": "INT64", "data": [1]}
        for name in ("user", "item", "history")
    ]
    + [{"name": "dense", "shape": [1, 3], "datatype": "FP32", "data": [0, 0, 0]}]
}


@pytest.fixture(scope="module")
def ports() -> dict[str, int]:
    return dict(zip(("redis", "kafka", "triton"), free_ports(3), strict=True))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, ports: dict[str, int]) -> Iterator[Hps]:
    """A server that is ready although all ports are unreachable."""
    folder = tmp_path_factory.mktemp("server")
    write_models(folder / "models")
    with start_hps(
        folder,
        tiers={
            "rocksdb": {"path": str(folder / "rocksdb")},
            "cpu_cache": {"enabled": False},
            "redis": {"addresses": [f"127.0.0.1:{ports['redis']}"]},
        },
        updates={"kafka": {"brokers": f"127.0.0.1:{ports['kafka']}"}},
        dense={"triton": {"url": f"127.0.0.1:{ports['triton']}"}},
    ) as running:
        yield running


def infer(ask: Any, server: Hps, model: str, request: Any) -> Any:
    body = json.dumps(request).encode()
    length = {"Content-Length": str(len(body))}
    answer = ask(server.address, "POST", f"/v2/models/{model}/infer", body, length)
    return answer.status, json.loads(answer.body)


def degraded(ask: Any, server: Hps) -> str:
    """Tiers that a correct lookup skipped."""
    status, answer = infer(ask, server, "words", WORDS)
    assert status == 200
    assert answer["outputs"][0]["data"][0] == 7
    return str(answer.get("parameters", {}).get("hps_degraded", ""))


def test_node_serves_while_all_services_are_unreachable(
    ask: Any, server: Hps, ports: dict[str, int], tmp_path: Path
) -> None:
    need("redis-server")
    assert degraded(ask, server) == "redis"
    status, answer = infer(ask, server, "clicks", CLICKS)
    assert status == 503
    assert f"Triton at 127.0.0.1:{ports['triton']}" in answer["error"]
    for name, port in ports.items():
        until(lambda port=port: f"127.0.0.1:{port}" in server.log.read_text())  # type: ignore[misc]
        lines = [each for each in server.log.read_text().splitlines() if f":{port}" in each]
        assert len(lines) <= 3, (name, lines)
        assert any(re.search(r" (WARNING|ERROR) ", line) for line in lines), (name, lines)
    redis = RedisServer(tmp_path / "redis", port=ports["redis"])
    redis.start()
    try:
        until(lambda: degraded(ask, server) == "")
    finally:
        redis.kill()
    assert "Traceback" not in server.log.read_text()


def test_ingest_waits_for_redis_and_kafka(small_repository: Path, tmp_path: Path) -> None:
    redis, kafka = free_ports(2)
    process = IngestProcess(
        tmp_path / "ingest",
        {
            "models": {"repository": str(small_repository)},
            "tiers": {
                "rocksdb": {"enabled": False},
                "redis": {"addresses": [f"127.0.0.1:{redis}"]},
            },
            "updates": {
                "kafka": {"brokers": f"127.0.0.1:{kafka}", "shared_writer": "ingest"},
            },
        },
    )
    process.start()
    try:
        for port in (redis, kafka):
            until(lambda port=port: f"127.0.0.1:{port}" in process.log.read_text())  # type: ignore[misc]
        assert process.terminate() == 0
    finally:
        process.kill()
    assert "Traceback" not in process.log.read_text()
