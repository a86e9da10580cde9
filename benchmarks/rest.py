"""Server CPU time of a REST lookup, against three peers.

The same lookup (one table of 200,000 rows × 16 float32, all rows in memory; 26 or 1,024 keys a
request, Zipf-distributed with s = 0.85 over rows in random order) is sent to

* hps: ``hps serve`` with its defaults (metrics, limits and statistics on), binary tensors;
* hps traced: the same, with a different ``X-Request-ID`` in each request; the other sides' requests have
  identical heads, which hps parses once and then recognizes;
* echo, the floor: a bare raw-ASGI app on uvicorn (uvloop, httptools) that reads a body and answers with
  its bytes, repeated to the size of hps's answer;
* fastapi: the lookup with FastAPI and pydantic models, JSON, ``table[row_numbers]``;
* triton: a real Triton 2.51 whose Python-backend model does ``table[row_numbers]``, binary tensors,
  dynamic batching on (`make bench-peers` sets it up).

Every server is pinned to one core, the client to another; 16 keep-alive connections; the servers
alternate for several rounds. The figure is user + system time of the server's processes per request:
requests per second depend on other load of the machine, CPU time much less.

Ratios are taken round by round; the median over the rounds is judged.
"""

from __future__ import annotations

import os
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import orjson
from numpy.typing import NDArray

from benchmarks.common import Bar, Benchmark, Options, Report, main
from benchmarks.load import Load, drive, exchange, http_request
from benchmarks.measure import Spread, alternate, ratio, versions, zipf_keys
from benchmarks.peers.environments import PeerMissing
from benchmarks.peers.hps_server import start_hps, write_lookup_model
from benchmarks.peers.process import Server, cores, free_ports, serving
from benchmarks.peers.triton import start_triton

ROWS, DIM, SIZES, CONNECTIONS, DISTINCT = 200_000, 16, (26, 1024), 16, 256
Reader = Callable[[bytes, bytes], NDArray[np.float32]]  # (head, body) of an answer -> vectors
MODELS = Path(__file__).parent / "peers/triton_models"

BARS = tuple(
    bar
    for n, limit in zip(SIZES, (1.5, 2.0), strict=True)
    for bar in (
        Bar(f"echo_{n}", f"{n} keys: CPU per request, hps / bare echo", at_most=limit),
        Bar(f"fastapi_{n}", f"{n} keys: CPU per request, hps / FastAPI + pydantic", at_most=0.5),
        Bar(f"triton_{n}", f"{n} keys: infer/s per CPU second, hps / Triton", at_least=1.0),
    )
)


@dataclass(frozen=True)
class Side:
    """One server under load: its requests, and the parser of its answers' vectors."""

    server: Server
    requests: list[bytes]
    vectors: Reader | None

    def drive(self, seconds: float) -> Load:
        return drive(self.server, self.requests, connections=CONNECTIONS, seconds=seconds)


def binary_request(path: str, name: str, keys: NDArray[np.int64], **headers: str) -> bytes:
    """An Open Inference Protocol request with one binary INT64 tensor ``(1, n)``."""
    tensor = {
        "name": name,
        "shape": [1, len(keys)],
        "datatype": "INT64",
        "parameters": {"binary_data_size": keys.nbytes},
    }
    header = orjson.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}})
    size = {"Inference-Header-Content-Length": str(len(header))}
    return http_request(path, header + keys.tobytes(), size | headers)


def traced_request(path: str, name: str, keys: NDArray[np.int64]) -> bytes:
    """As ``binary_request``, with a unique request ID."""
    return binary_request(path, name, keys, **{"X-Request-ID": uuid.uuid4().hex})


def json_request(path: str, name: str, keys: NDArray[np.int64]) -> bytes:
    tensor = {"name": name, "shape": [1, len(keys)], "datatype": "INT64", "data": keys.tolist()}
    body = orjson.dumps({"inputs": [tensor]})
    return http_request(path, body, {"Content-Type": "application/json"})


def binary_vectors(head: bytes, body: bytes) -> NDArray[np.float32]:
    lines = [line.partition(b":") for line in head.lower().split(b"\r\n")]
    start = next(
        int(value) for name, _, value in lines if name == b"inference-header-content-length"
    )
    return np.frombuffer(body[start:], np.float32).reshape(-1, DIM)


def json_vectors(head: bytes, body: bytes) -> NDArray[np.float32]:
    return np.array(orjson.loads(body)["outputs"][0]["data"], np.float32).reshape(-1, DIM)


@contextmanager
def servers(table: NDArray[np.float32], report: Report) -> Iterator[dict[str, Server]]:
    """Start every side, pinned; yields name -> server, without Triton if it is not set up."""
    core, client = cores()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        np.save(folder / "table.npy", table)
        write_lookup_model(folder / "models", "lookup", "f", table)
        ours = stack.enter_context(start_hps(folder, core=core))
        if client is not None:
            stack.callback(os.sched_setaffinity, 0, os.sched_getaffinity(0))
            os.sched_setaffinity(0, {client})
        running: dict[str, Server] = {"hps": ours, "hps traced": ours, "hps json": ours}

        def python(kind: str, ready: str, *arguments: str) -> None:
            port = free_ports(1)[0]
            command = [sys.executable, "-m", "benchmarks.peers.asgi", kind, str(port), *arguments]
            running[kind] = stack.enter_context(serving(command, port, ready_path=ready, core=core))

        lengths = [answer_bytes(ours, n) for n in SIZES]
        report.figures["answer_bytes"] = dict(zip(map(str, SIZES), lengths, strict=True))
        python("echo", "/0", *map(str, lengths))
        python("fastapi", "/ready", str(folder / "table.npy"))
        try:
            env = {"BENCH_TABLE": str(folder / "table.npy")}
            running["triton"] = stack.enter_context(start_triton(MODELS, core=core, env=env))
        except PeerMissing as missing:
            report.notes.append(f"Triton was not measured: {missing}")
        yield running


def answer_bytes(server: Server, n: int) -> int:
    request = binary_request("/v2/models/lookup/infer", "f", np.arange(n))
    return len(exchange(server.address, request)[1])


def sides(
    running: Mapping[str, Server], n: int, keys: NDArray[np.int64], size: int
) -> dict[str, Side]:
    """The requests of one size, the same keys for every side. ``keys (requests, n)``."""
    path = "/v2/models/lookup/infer"
    forms: dict[str, tuple[Callable[[NDArray[np.int64]], bytes], Reader | None]] = {
        "hps": (lambda k: binary_request(path, "f", k), binary_vectors),
        "hps traced": (lambda k: traced_request(path, "f", k), binary_vectors),
        "echo": (lambda k: binary_request(f"/{size}", "f", k), None),
        "fastapi": (lambda k: json_request(path, "KEYS", k), json_vectors),
        "triton": (lambda k: binary_request(path, "KEYS", k), binary_vectors),
        "hps json": (lambda k: json_request(path, "f", k), json_vectors),
    }
    return {
        name: Side(running[name], [make(k) for k in keys], read)
        for name, (make, read) in forms.items()
        if name in running
    }


def check_answers(
    name: str, side: Side, table: NDArray[np.float32], keys: NDArray[np.int64]
) -> None:
    """Check that a side really does the lookup. Raises RuntimeError for a wrong row."""
    if side.vectors is None:
        return
    for request, k in zip(side.requests[:8], keys, strict=False):
        vectors = side.vectors(*exchange(side.server.address, request))
        if not np.array_equal(vectors, table[k]):
            raise RuntimeError(f"{name}: wrong vectors")


def run(options: Options) -> Report:
    rounds, seconds = (3, 0.7) if options.quick else (9, 1.5)
    random = np.random.default_rng(options.seed)
    table = random.standard_normal((ROWS, DIM), dtype=np.float32)
    report = Report()
    with servers(table, report) as running:
        for n in SIZES:
            keys = zipf_keys(random, ROWS, (DISTINCT, n))
            compared = sides(running, n, keys, report.figures["answer_bytes"][str(n)])
            for name, side in compared.items():
                check_answers(name, side, table, keys)
                side.drive(0.3)
            runs = {name: partial(side.drive, seconds) for name, side in compared.items()}
            record(report, n, alternate(runs, rounds))
    report.figures["versions"] = versions(
        "fastapi", "numpy", "orjson", "pydantic", "uvicorn", "uvloop"
    )
    report.figures["triton"] = "2.51.0 (nvidia-pytriton 0.7.0)" if "triton" in running else None
    return report


def record(report: Report, n: int, loads: Mapping[str, list[Load]]) -> None:
    cpu = {name: [load.cpu_us for load in runs] for name, runs in loads.items()}
    ours = cpu["hps"]
    for name in cpu.keys() & {"echo", "fastapi"}:
        report.values[f"{name}_{n}"] = ratio(ours, cpu[name]).median
    if "triton" in cpu:
        report.values[f"triton_{n}"] = ratio(cpu["triton"], ours).median
    report.tables[f"{n} keys × {DIM}"] = [
        {
            "server": name,
            "CPU µs/request": f"{Spread.of(cpu[name]):.0f}",
            "hps / it": f"{ratio(ours, cpu[name]):.2f}",
            "infer/s per CPU s": f"{1e6 / Spread.of(cpu[name]).median:.0f}",
            "infer/s": f"{Spread.of([load.per_second for load in runs]).median:.0f}",
            "client CPU µs": f"{client_us(runs):.0f}",
        }
        for name, runs in loads.items()
    ]
    report.figures[f"cpu_us_{n}"] = cpu
    report.figures[f"per_second_{n}"] = {k: [x.per_second for x in v] for k, v in loads.items()}


def client_us(runs: list[Load]) -> float:
    return Spread.of([load.client_cpu_s / load.requests * 1e6 for load in runs]).median


BENCHMARK = Benchmark(
    name="rest",
    title="REST lookup: server CPU time per request",
    run=run,
    bars=BARS,
    measured=("hps", "services"),
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
