"""``hps serve --workers 2``: the answers of one process, sums over all, and processes that end."""

from __future__ import annotations

import http.client
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hps
from benchmarks.peers.hps_server import Hps, start_hps
from benchmarks.peers.perf_analyzer import perf_analyzer
from hps.client import Admin, Client, Tls
from hps.errors import Unavailable, Unsupported
from hps.native import COMPILED
from tests.support.certificates import made
from tests.support.grpc_load import no_call_lost
from tests.support.small_models import write_models
from tests.support.waiting import PATIENT_GUARD, until

pytestmark = pytest.mark.skipif(not COMPILED, reason="a shared cache needs the native core")

WORD = {"name": "word", "shape": [1, 1], "datatype": "INT64", "data": [5]}
BODY = json.dumps({"inputs": [WORD]})
SERVE = [sys.executable, "-m", "hps.cli.main", "serve"]
PATH = "/v2/models/words.lookup/infer"


class Connection:
    """A connection, which stays with one worker as long as it is open."""

    def __init__(self, address: str) -> None:
        self._connection = http.client.HTTPConnection(address, timeout=60)

    def ask(self, method: str, path: str, body: str | None = None) -> Any:
        self._connection.request(method, path, body)
        answer = self._connection.getresponse()
        data = answer.read()
        assert answer.status == 200, data
        return json.loads(data)

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()


def status(server: Hps) -> dict[str, Any]:
    with Connection(server.admin) as admin:
        found: dict[str, Any] = admin.ask("GET", "/v1/status")
        return found


def workers(server: Hps) -> list[dict[str, Any]]:
    return [each for each in status(server)["processes"] if each["role"] == "worker"]


def counted(server: Hps, name: str, **labels: str) -> float:
    with Admin(f"http://{server.admin}") as client:
        return sum(
            sample.value
            for sample in client.metrics()
            if sample.name == name and labels.items() <= sample.labels.items()
        )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hps]:
    folder = tmp_path_factory.mktemp("workers")
    write_models(folder / "models")
    limits = {"workers": 2, "admission": {"queue_bytes": 1 << 20}}
    with start_hps(folder, limits=limits) as started:
        until(lambda: status(started)["ready"])
        yield started


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[hps.Node]:
    """The same models in one process."""
    folder = tmp_path_factory.mktemp("alone")
    write_models(folder / "models")
    settings = {
        "models": {"repository": str(folder / "models")},
        "tiers": {"rocksdb": {"path": str(folder / "db"), "guard": PATIENT_GUARD}},
    }
    with hps.open(settings) as node:
        yield node


def test_log_level_reaches_all_workers(server):
    def levels():
        reported = set()
        for _ in range(12):  # connections are spread over the workers
            with Connection(server.address) as data:
                reported.add(data.ask("GET", "/v2/logging")["log_verbose_level"])
        return reported

    with Admin(f"http://{server.admin}") as admin, Admin(f"http://{server.address}") as data:
        with pytest.raises(Unsupported, match="use the admin port"):
            data.ask("/v2/logging", {"log_verbose_level": 1})
        assert levels() == {0}
        assert admin.ask("/v2/logging", {"log_verbose_level": 1})["log_verbose_level"] == 1
        assert levels() == {1}
        admin.ask("/v2/logging", {"log_verbose_level": 0})
        assert levels() == {0}


def test_status_lists_the_workers(server):
    found = status(server)
    assert found["processes"][0] == {
        "role": "node",
        "pid": server.process.pid,
        "state": "ready",
    }
    pids = {each["pid"] for each in found["processes"]}
    assert len(pids) == 3
    shared = found["tiers"][0]["shared_memory"]
    assert shared["owner"] == server.process.pid
    assert shared["readers"] == 2
    assert counted(server, "hps_workers") == 2


def test_answers_are_bit_identical_to_those_of_one_process(server, alone):
    rng = np.random.default_rng(3)
    with Client(f"http://{server.address}") as client:
        for _ in range(20):
            words = rng.integers(-10, 1010, (50, 1))
            answer = client.infer("words.lookup", {"word": words})
            mine = alone.lookup("words", {"word": words})
            assert answer.outputs["word"].tobytes() == mine.vectors["word"].tobytes()
            features = {
                "user": rng.integers(0, 110, (8, 1)),
                "item": rng.integers(-60, 60, (8, 1)),
                "history": rng.integers(-60, 60, (8, 3)),
            }
            dense = rng.random((8, 3), np.float32)
            scores = client.infer("clicks", {**features, "dense": dense})
            wanted = alone.predict("clicks", features, {"dense": dense}).outputs
            for name, values in wanted.items():
                assert scores.outputs[name].tobytes() == values.tobytes()


def test_workers_answer_grpc(server):
    tritonclient = pytest.importorskip("tritonclient.grpc")
    with tritonclient.InferenceServerClient(server.grpc) as client:
        assert client.is_server_ready()
        before = _count(client)
        tensor = tritonclient.InferInput("word", [1, 1], "INT64")
        tensor.set_data_from_numpy(np.array([[5]]))
        answer = client.infer("words.lookup", [tensor])
        assert answer.as_numpy("word")[0, 0] == 5
        assert _count(client) == before + 1


def _count(client: Any) -> int:
    reported = client.get_inference_statistics("words.lookup", as_json=True)
    return int(reported["model_stats"][0]["inference_stats"]["success"].get("count", 0))


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_perf_analyzer_reads_the_sums_of_all_workers(server, perf_analyzer_ready, protocol):
    tritonclient = pytest.importorskip("tritonclient.grpc")
    address = server.grpc if protocol == "grpc" else server.address
    with tritonclient.InferenceServerClient(server.grpc) as client:
        before = _count(client)
        row = perf_analyzer(
            address, "words.lookup", [], "--shape", "word:26", protocol=protocol, concurrency=8
        )
        assert _count(client) - before >= 200
    assert row["Inferences/Second"] > 10
    # By the servers' statistics, which it takes differences of, from whichever worker.
    assert row["Server Compute Infer"] > 0


def test_every_worker_reports_the_sums_of_all(server):
    """Connections until both workers have answered: the kernel spreads them."""

    def total(connection: Connection) -> int:
        reported = connection.ask("GET", "/v2/models/words.lookup/stats")["model_stats"][0]
        return int(reported["inference_stats"]["success"]["count"])

    with Connection(server.admin) as admin:
        before = total(admin)
        metric = counted(server, "hps_request_duration_seconds_count", model="words.lookup")
        keys = counted(server, "hps_lookup_keys_total", model="words", tier="cpu")
        connections = [Connection(server.address) for _ in range(16)]
        for each in connections:
            each.ask("POST", PATH, BODY)
        assert {total(each) for each in [admin, *connections]} == {before + 16}
        after = counted(server, "hps_request_duration_seconds_count", model="words.lookup")
        assert after == metric + 16
        assert counted(server, "hps_lookup_keys_total", model="words", tier="cpu") == keys + 16
        for each in connections:
            each.__exit__()


def test_each_worker_has_its_own_byte_budget(server):
    """Of three bodies in transit, one worker has two, which exceed its byte budget."""
    host, _, port = server.address.rpartition(":")
    head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: 900000\r\n\r\n".encode()
    with ExitStack() as stack:
        waiting = []
        for _ in range(3):
            connection = stack.enter_context(socket.create_connection((host, int(port)), 60))
            connection.sendall(head + b"{" * 700_000)
            waiting.append(connection)
        answered, _, _ = select.select(waiting, [], [], 60)
        assert answered[0].recv(4096).startswith(b"HTTP/1.1 503 ")
    until(lambda: counted(server, "hps_queue_bytes") == 0)
    assert counted(server, "hps_requests_refused_total", reason="queue_bytes") >= 1


def test_rows_written_at_the_admin_port_are_served_by_all_workers(server):
    def first(connection: Connection) -> float:
        word = WORD | {"data": [777]}
        answer = connection.ask("POST", PATH, json.dumps({"inputs": [word]}))
        return float(answer["outputs"][0]["data"][0])

    connections = [Connection(server.address) for _ in range(8)]
    assert {first(each) for each in connections} == {777.0}
    with Connection(server.admin) as admin:
        row = {"keys": [777], "vectors": [[1.5] * 8]}
        admin.ask("POST", "/v1/tables/words/words/rows", json.dumps(row))
    assert {first(each) for each in connections} == {1.5}
    for each in connections:
        each.__exit__()


def test_killed_worker_is_replaced_and_its_counts_are_kept(server):
    before = workers(server)
    restarts = counted(server, "hps_worker_restarts_total")
    answered = counted(server, "hps_request_duration_seconds_count", model="words.lookup")
    os.kill(before[0]["pid"], signal.SIGKILL)
    until(lambda: counted(server, "hps_worker_restarts_total") == restarts + 1)
    # Connections to it meanwhile wait for its successor, and are answered.
    for _ in range(8):
        with Connection(server.address) as connection:
            connection.ask("POST", PATH, BODY)
    until(lambda: status(server)["ready"])
    after = workers(server)
    assert [each["restarts"] for each in after] == [
        before[0]["restarts"] + 1,
        before[1]["restarts"],
    ]
    assert after[0]["pid"] != before[0]["pid"]
    total = counted(server, "hps_request_duration_seconds_count", model="words.lookup")
    assert total == answered + 8


def test_connections_of_an_ended_worker_are_answered_by_the_others(server):
    """Its successor is stopped as it starts, so it answers none of them."""
    before = workers(server)[0]["pid"]
    os.kill(before, signal.SIGKILL)
    until(lambda: workers(server)[0]["pid"] != before)
    successor = workers(server)[0]["pid"]
    os.kill(successor, signal.SIGSTOP)
    try:
        for _ in range(32):
            with Connection(server.address) as connection:
                connection.ask("POST", PATH, BODY)
        assert workers(server)[0]["pid"] == successor
        assert workers(server)[0]["state"] == "starting"
    finally:
        os.kill(successor, signal.SIGCONT)
    until(lambda: status(server)["ready"])


# Signal handler for SIGUSR2 that blocks the main thread, in which the event loop runs; others continue.
STUCK = """
import signal
def stuck_for_ever(*_):
    while True:
        pass
signal.signal(signal.SIGUSR2, stuck_for_ever)
"""


@contextmanager
def two_workers(folder: Path, timeout_s: float) -> Iterator[Hps]:
    """A server with two workers, which are killed when they have been stuck for ``timeout_s``."""
    write_models(folder / "models")
    with start_hps(folder, limits={"workers": 2, "worker_timeout_s": timeout_s}) as started:
        until(lambda: status(started)["ready"])
        yield started


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGSTOP], ids=["loop", "stop"])
def test_stuck_workers_are_unready_then_killed_and_replaced(tmp_path, monkeypatch, number):
    """All of both workers: by an endless loop in the event loop, or the whole process."""
    (tmp_path / "sitecustomize.py").write_text(STUCK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with two_workers(tmp_path, 2) as server:
        pids = [each["pid"] for each in workers(server)]
        for pid in pids:
            os.kill(pid, number)
        until(lambda: not status(server)["ready"])
        until(lambda: counted(server, "hps_worker_timeouts_total") == 2)
        until(lambda: status(server)["ready"])
        assert counted(server, "hps_worker_restarts_total") == 2
        assert not {each["pid"] for each in workers(server)} & set(pids)
        for _ in range(8):
            with Connection(server.address) as connection:
                connection.ask("POST", PATH, BODY)
        log = server.log.read_text()
    assert log.count("worker killed: it does not answer") == 2
    if number == signal.SIGUSR2:  # a stopped process writes nothing
        assert log.count("in stuck_for_ever") == 2


def test_briefly_stuck_worker_is_replaced_in_service_and_continues(tmp_path):
    with two_workers(tmp_path, 600) as server:
        before = workers(server)
        os.kill(before[0]["pid"], signal.SIGSTOP)
        try:
            for _ in range(32):  # some reach the stuck one, and wait until it counts as stuck
                with Connection(server.address) as connection:
                    connection.ask("POST", PATH, BODY)
            until(lambda: workers(server)[0]["state"] == "unresponsive")
            with Admin(f"http://{server.admin}") as admin, pytest.raises(Unavailable) as reported:
                admin.ask("/v2/health/ready")
            assert "1 of 2 worker processes answer; no answer from number 1" in str(reported.value)
        finally:
            os.kill(before[0]["pid"], signal.SIGCONT)
        until(lambda: status(server)["ready"])
        assert workers(server) == before


def serve(
    folder: Path, repository: Path, **http: Any
) -> tuple[subprocess.Popen[str], list[int], dict[str, str]]:
    """``hps serve --workers 2``, ready, with ``http`` in `server.http`; its workers' process numbers, and its
    addresses."""
    settings = {
        "models": {"repository": str(repository)},
        "tiers": {"rocksdb": {"path": str(folder / "db"), "guard": PATIENT_GUARD}},
        "server": {"http": {"port": 0, **http}, "grpc": {"port": 0}, "admin": {"port": 0}},
    }
    (folder / "config.yaml").write_text(json.dumps(settings))
    process = subprocess.Popen(
        [*SERVE, "--config", "config.yaml", "--workers", "2", "--output", "json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.communicate()[1]
    report = json.loads(line)
    urls = {name: url.removeprefix("http://") for name, url in report["endpoints"].items()}
    return process, [worker["pid"] for worker in report["processes"][1:]], urls


def test_workers_end_with_a_killed_node_and_a_stopped_one_loses_no_request(
    small_repository, tmp_path
):
    ca = made(tmp_path, "ca")
    key, certificate = made(tmp_path, "localhost", ["DNS:localhost"], ca)
    tls = {"certificate_file": str(certificate), "key_file": str(key)}
    process, pids, urls = serve(tmp_path, small_repository, tls=tls)
    address = urls["http"].replace("127.0.0.1", "localhost")
    assert address.startswith("https://")
    with Client(address, tls=Tls(ca[1])) as client:
        assert client.lookup("words", {"word": [5]}).vectors["word"][0, 0] == 5
    process.kill()
    process.communicate(timeout=60)
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))

    # Another node starts with the folder and the name of the cache that it left.
    process, pids, urls = serve(tmp_path, small_repository)
    ends: list[Any] = []
    answered = [threading.Semaphore(0) for _ in range(8)]

    def ask_until_told_to_stop(mine: threading.Semaphore) -> None:
        connection = http.client.HTTPConnection(urls["http"], timeout=60)
        try:
            while True:
                connection.request("POST", PATH, BODY)
                answer = connection.getresponse()
                answer.read()
                mine.release()
                if answer.headers.get("connection") == "close":
                    ends.append(answer.status)
                    return
        except Exception as error:
            ends.append(error)
        finally:
            connection.close()

    clients = [threading.Thread(target=ask_until_told_to_stop, args=(a,)) for a in answered]
    for client in clients:
        client.start()
    for each in answered:
        assert all(each.acquire(timeout=60) for _ in range(100))
    with no_call_lost(urls["grpc"]):
        os.kill(process.pid, signal.SIGTERM)
    for client in clients:
        client.join(60)
    _, errors = process.communicate(timeout=60)
    assert ends == [200] * 8
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
    assert errors.count("hps.frontend stopped") == 3


def test_worker_that_cannot_start_ends_the_server(small_repository, tmp_path):
    """Its gRPC certificate is found wrong by workers alone, since they alone listen."""
    (tmp_path / "config.yaml").write_text(
        json.dumps(
            {
                "models": {"repository": str(small_repository)},
                "tiers": {"rocksdb": {"path": str(tmp_path / "db"), "guard": PATIENT_GUARD}},
                "server": {
                    "http": {"port": 0},
                    "grpc": {
                        "port": 0,
                        "tls": {"certificate_file": "no.crt", "key_file": "no.key"},
                    },
                    "admin": {"port": 0},
                },
            }
        )
    )
    done = subprocess.run(
        [*SERVE, "-c", "config.yaml", "-w", "1"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "a worker process failed to start" in done.stderr
    assert "no.key" in done.stderr
    assert "Traceback" not in done.stderr
    assert "hps.frontend stopped" in done.stderr  # in order: nothing is left in shared memory


def test_lookup_node_may_have_workers(tmp_path):
    """They answer front ends, by gRPC alone."""
    write_models(tmp_path / "models")
    limits = {"role": "lookup", "workers": 1}
    with start_hps(tmp_path, limits=limits) as node:
        (worker,) = workers(node)
        assert worker["state"] == "ready"
        with pytest.raises(ConnectionRefusedError), Connection(node.address) as nobody:
            nobody.ask("GET", "/v2")
        asked = {
            "models": {"repository": str(tmp_path / "models")},
            "lookup": {"nodes": [node.grpc]},
        }
        with hps.connect(asked) as front:
            assert front.lookup("words", {"word": [5]}).vectors["word"][0, 0] == 5.0
        counted_there = counted(node, "hps_request_duration_seconds_count", method="lookup")
        assert counted_there == 1
