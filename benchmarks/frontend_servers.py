"""The front ends of hps, Triton, KServe and MLServer under one small load generator.

One of the two halves of `benchmarks.frontend`; `benchmarks/frontend_scene.py` has requests and servers.
KServe 0.21 and MLServer 1.7 have custom models that do the same work in the server's process. They do not
implement a call that perf_analyzer requires, so all four get the same load here: HTTP by
`benchmarks/open_loop.py`, gRPC by `benchmarks/grpc_load.py`, keep-alive connections with one request each.
Tensors are binary except for MLServer's HTTP, which supports only JSON. Every server is pinned to one core,
the generator to another.

Sides alternate for several rounds, fewer and shorter where there is no bar; ratios are taken round by round
against the peer's better protocol, and the median over the rounds is judged. infer/s is answers over the time
from the first request to the last answer; CPU is user + system time of the server's processes over those
answers. One answer of every form is compared with the tables before anything is measured.
"""

from __future__ import annotations

import socket
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from http.client import HTTPResponse
from pathlib import Path
from typing import NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2 as pb

from benchmarks.common import Bar, Benchmark, Options, Report, main
from benchmarks.frontend_scene import Side, Work, client_on, sides, works, write_scene
from benchmarks.frontend_triton import CONCURRENCY, PROTOCOLS, Measured, table
from benchmarks.grpc_load import grpc_closed
from benchmarks.measure import Spread, alternate, ratio, versions
from benchmarks.open_loop import closed_loop
from benchmarks.peers.process import cores

METHOD = "/inference.GRPCInferenceService/ModelInfer"
SERVERS = ("hps", "Triton", "KServe", "MLServer")
LEAST = {"KServe": 3.0, "MLServer": 5.0}
WITHOUT_BAR = (2, 0.5)
"""Most rounds, and seconds of each, of workloads without a bar."""


class Requests(NamedTuple):
    """The messages of one protocol, ``http`` or ``grpc``."""

    protocol: str
    messages: list[bytes]


BARS = tuple(
    bar
    for peer, least in LEAST.items()
    for n in CONCURRENCY
    for name, head in [
        (f"{peer.lower()}_{n}", f"26 keys, {n} in flight: hps REST / {peer}'s better protocol")
    ]
    for bar in (
        Bar(name, f"{head}, infer/s", at_least=least),
        Bar(f"{name}_p99", f"{head}, p99", at_most=1.0),
    )
)


def measure(side: Side, work: Work, requests: Requests, n: int, s: float) -> Measured:
    """Keep ``n`` requests in flight for ``s`` seconds. Raises RuntimeError for a failed request."""
    cpu = side.server.cpu_seconds()
    if requests.protocol == "grpc":
        load = grpc_closed(side.grpc, METHOD, requests.messages, n, s)
    else:
        load = closed_loop(side.server.address, requests.messages, n, s)
    cpu = side.server.cpu_seconds() - cpu
    if set(load.statuses) != {200}:
        raise RuntimeError(f"{work.title}: answered with {set(load.statuses)}")
    p50, p99 = np.quantile(load.of(ok=True), [0.5, 0.99]) * 1e3
    return Measured(load.goodput, float(p50), float(p99), cpu / len(load.statuses) * 1e6)


def first_answer(side: Side, requests: Requests) -> NDArray[np.float32]:
    """The values of the single tensor of the first request's answer, flat."""
    request = requests.messages[0]
    if requests.protocol == "http":
        host, _, port = side.server.address.rpartition(":")
        with socket.create_connection((host, int(port)), 30) as connection:
            connection.sendall(request)
            answer = HTTPResponse(connection)
            answer.begin()
            body = answer.read()
        if not side.binary:
            return np.array(orjson.loads(body)["outputs"][0]["data"], np.float32).ravel()
        length = int(answer.headers["Inference-Header-Content-Length"])
        return np.frombuffer(body[length:], np.float32)
    import grpc

    options = [("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(side.grpc, options) as channel:
        message = pb.ModelInferResponse.FromString(channel.unary_unary(METHOD)(request, timeout=30))
    if message.raw_output_contents:
        return np.frombuffer(message.raw_output_contents[0], np.float32)
    return np.array(message.outputs[0].contents.fp32_contents, np.float32)


def targets(work: Work, running: Mapping[str, Side]) -> dict[str, tuple[Side, Requests]]:
    """Servers and their requests, by server and protocol."""
    found = {}
    for server, side in running.items():
        for protocol, name in PROTOCOLS.items():
            messages = (
                work.grpc(ours=side.ours)
                if protocol == "grpc"
                else work.http(ours=side.ours, binary=side.binary)
            )
            found[f"{server} {name}"] = (side, Requests(protocol, messages))
    return found


def run(options: Options) -> Report:
    """All workloads; with ``--quick`` only the one with bars."""
    names = ("26",) if options.quick else ("26", "1024", "predict")
    return measured(options, names, 1 if options.quick else 3)


def measured(options: Options, names: tuple[str, ...], rounds: int) -> Report:
    seconds = 0.3 if options.quick else 0.8
    report = Report()
    found = works(options.seed)
    core, client = cores()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        rows = write_scene(folder, options.seed)["rows"]
        running = stack.enter_context(sides(folder, SERVERS, core, report.notes))
        client_on(stack, client)
        for name in names:
            work = found[name]
            compared = targets(work, running)
            check(work, compared, rows)
            count, s = rounds, seconds
            if name != "26":
                count, s = min(rounds, WITHOUT_BAR[0]), min(seconds, WITHOUT_BAR[1])
            for n in CONCURRENCY:
                runs: dict[str, Callable[[], Measured]] = {
                    key: partial(measure, side, work, requests, n, s)
                    for key, (side, requests) in compared.items()
                }
                record(report, name, work.title, n, alternate(runs, count))
    report.figures["versions"] = versions("numpy", "onnxruntime", "grpcio", "uvicorn")
    return report


def check(
    work: Work, compared: Mapping[str, tuple[Side, Requests]], rows: NDArray[np.float32]
) -> None:
    """Raise RuntimeError unless lookups return the table's rows bit for bit and predictions agree to 1e-6."""
    expected = None
    if "f" in work.requests[0]:
        expected = rows[work.requests[0]["f"]].ravel()
    for name, (side, requests) in compared.items():
        answer = first_answer(side, requests)
        expected = answer if expected is None else expected
        if not np.allclose(answer, expected, rtol=0, atol=1e-6 if work.ours == "ctr" else 0):
            raise RuntimeError(f"{name}: wrong answer to {work.title}")


def record(
    report: Report, work: str, title: str, n: int, runs: Mapping[str, list[Measured]]
) -> None:
    report.tables[f"{title}, {n} in flight, one generator"] = table(runs)
    report.figures[f"servers_{work}_{n}"] = {
        k: [asdict(each) for each in v] for k, v in runs.items()
    }
    if work != "26":
        return
    ours = runs["hps REST"]
    for peer in LEAST:
        theirs = [runs[key] for key in runs if key.startswith(f"{peer} ")]
        if not theirs:
            continue
        best = max(theirs, key=lambda run: Spread.of([each.per_second for each in run]).median)
        pairs = {"": "per_second", "_p99": "p99_ms"}
        for suffix, field in pairs.items():
            report.values[f"{peer.lower()}_{n}{suffix}"] = ratio(
                [getattr(each, field) for each in ours], [getattr(each, field) for each in best]
            ).median


BENCHMARK = Benchmark(
    name="frontend_servers",
    title="The front end, Triton's, KServe's and MLServer's",
    run=run,
    bars=BARS,
    measured=(
        "hps",
        "services",
        "benchmarks/frontend_scene.py",
        "benchmarks/frontend_triton.py",
        "benchmarks/grpc_load.py",
        "benchmarks/open_loop.py",
    ),
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
