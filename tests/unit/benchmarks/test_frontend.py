"""Tests of the front end's benchmark: its gRPC client against a real server, and its verdicts."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import product

import grpc
import pytest

from benchmarks import frontend_servers, frontend_triton
from benchmarks.common import Options, Report
from benchmarks.frontend_scene import BATCH, works
from benchmarks.frontend_triton import CONCURRENCY, SAMPLES, Measured, perf_analyzer_steps
from benchmarks.grpc_load import grpc_closed, grpc_open
from benchmarks.load import http_request
from benchmarks.open_loop import closed_loop, poisson


@pytest.fixture(scope="module")
def echo():
    """A gRPC server: ``/test/Echo`` answers with as many bytes as the message says and rejects empty
    messages; ``/test/Reject`` rejects all calls before their message is read."""

    def answer(message, context):
        if not message:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "nothing")
        return bytes(int(message.split()[0]))

    server = grpc.server(ThreadPoolExecutor(4))
    handlers = {
        "Echo": grpc.unary_unary_rpc_method_handler(answer),
        "Reject": grpc.stream_unary_rpc_method_handler(
            lambda messages, context: context.abort(grpc.StatusCode.UNAVAILABLE, "queue full")
        ),
    }
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test", handlers)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(0).wait()


def run_until(least, address, method, messages, connections):
    """A run with at least ``least`` answers, as long as this machine takes for them."""
    for seconds in (0.5, 5.0, 50.0):
        result = grpc_closed(address, method, messages, connections, seconds)
        if len(result.statuses) >= least:
            return result
    raise AssertionError(result)


@pytest.mark.parametrize(
    "message", [b"10", b"300000", b"10 " + bytes(16_000), b"10 " + bytes(900_000)]
)
def test_grpc_closed_loop_counts_answers(echo, message):
    result = run_until(6, echo, "/test/Echo", [message], 3)
    assert result.goodput > 0
    assert max(result.latencies) <= result.wall_s


def test_grpc_closed_loop_counts_rejected_calls(echo):
    result = grpc_closed(echo, "/test/Echo", [b"", b"10"], 1, 0.2)
    assert set(result.statuses[::2]) == {grpc.StatusCode.INVALID_ARGUMENT.value[0]}
    assert set(result.statuses[1::2]) <= {200}


def test_grpc_closed_loop_counts_calls_rejected_before_their_message_is_read(echo):
    result = run_until(2, echo, "/test/Reject", [bytes(2_000_000)], 1)  # on one connection
    assert set(result.statuses) == {grpc.StatusCode.UNAVAILABLE.value[0]}


def test_grpc_open_loop_sends_every_arrival(echo):
    arrivals = poisson(100.0, 0.5, seed=1)
    result = grpc_open(echo, "/test/Echo", [b"10 " + bytes(100_000)], arrivals)
    assert len(result.statuses) == len(arrivals)
    assert set(result.statuses) == {200}


def test_workloads_have_the_same_tensors_for_all_servers():
    found = works(1)
    for work in found.values():
        for request in work.requests:
            ours, theirs = work.tensors(request, ours=True), work.tensors(request, ours=False)
            assert [a.tobytes() for a in ours.values()] == [a.tobytes() for a in theirs.values()]
    assert len(perf_analyzer_steps(found["26"], ours=True)[0]) == len(found["26"].requests)
    steps, batch = perf_analyzer_steps(found["predict"], ours=False)
    assert batch == BATCH
    assert len(steps) == SAMPLES


def runs(**per_second):
    """Two rounds of each side; latencies are 1,000 / the rate."""
    return {
        side.replace("_", " "): [Measured(rate, 1000 / rate, 1000 / rate, 10.0) for _ in range(2)]
        for side, rate in per_second.items()
    }


def test_record_compares_each_protocol_with_the_same_protocol_of_triton():
    report = Report()
    sides = runs(hps_REST=300.0, hps_gRPC=100.0, Triton_REST=100.0, Triton_gRPC=200.0)
    frontend_triton.record(report, "26", "title", 8, sides)
    assert report.values["rest_26_8"] == pytest.approx(3)
    assert report.values["grpc_26_8"] == pytest.approx(0.5)
    assert report.values["grpc_26_8_p99"] == pytest.approx(2)
    assert set(report.values) <= {bar.name for bar in frontend_triton.BARS}


def test_record_compares_rest_with_the_better_protocol_of_peers():
    report = Report()
    sides = runs(hps_REST=300.0, KServe_REST=10.0, KServe_gRPC=100.0, MLServer_REST=50.0)
    frontend_servers.record(report, "26", "title", 8, sides)
    assert report.values["kserve_8"] == pytest.approx(3)
    assert report.values["mlserver_8"] == pytest.approx(6)
    assert report.values["kserve_8_p99"] == pytest.approx(1 / 3)


def test_closed_loop_reads_chunked_answers():
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        connection = listener.accept()[0]
        with listener, connection:
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc")
            connection.sendall(b"\r\n0\r\n\r\n")
            connection.recv(65536)

    threading.Thread(target=serve, daemon=True).start()
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    assert closed_loop(address, [http_request("/", b"")], 1, 0.0).statuses == [200]


@pytest.mark.parametrize(("quick", "names"), [(False, ("26", "1024", "predict")), (True, ("26",))])
def test_every_workload_is_measured_at_every_concurrency(monkeypatch, quick, names):
    cells = []
    for name in ("write_scene", "client_on", "check", "versions", "alternate"):
        monkeypatch.setattr(frontend_servers, name, lambda *_: {"rows": None})
    monkeypatch.setattr(frontend_servers, "sides", lambda *_: nullcontext({}))
    monkeypatch.setattr(
        frontend_servers, "record", lambda _, work, title, n, runs: cells.append((work, n))
    )
    frontend_servers.run(Options(quick=quick))
    assert cells == [*product(names, CONCURRENCY)]


def test_quick_run_measures_only_what_bars_judge(monkeypatch):
    monkeypatch.setattr(frontend_triton, "write_scene", lambda *_: None)
    sides = {"hps": frontend_triton.Side(None, ""), "Triton": frontend_triton.Side(None, "")}
    monkeypatch.setattr(frontend_triton, "sides", lambda *_: nullcontext(sides))
    monkeypatch.setattr(frontend_triton, "measure", lambda *_: Measured(1.0, 1.0, 1.0, 1.0))
    report = frontend_triton.run(Options(quick=True))
    assert set(report.values) == {bar.name for bar in frontend_triton.BARS}
    assert sum(len(rows) for rows in report.tables.values()) == 2 * sum(
        not bar.name.endswith("_p99") for bar in frontend_triton.BARS
    )
