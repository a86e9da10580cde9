"""A server that is asked for four times of what it can do.

Predictions of 1,024 samples (26 features, 13 dense numbers, a network of 0.5 M parameters in the process).
The server has one core, the load generator another. Its capacity is what it answers with as many requests in
flight as `server.admission` lets be worked at, closed loop. Overload is requests that come at random at four
times that rate, whether answered or not; over REST and over gRPC. First capacity and overload take turns of a
few seconds, since a shared machine is not as fast in one minute as in the next. Then overload lasts for a
minute, and capacity is measured once more. A run in which fewer than 3.8 times of it were sent fails.

* goodput: answers a second / capacity, each over all of its turns;
* recovery: capacity after the minute / in the turns;
* p99: 99th percentile of the minute's accepted / of capacity's, both from the instant a request was to be
  sent;
* refused: the slowest refusal since its request was sent, and whether all had the right code (503,
  UNAVAILABLE);
* memory: the server's resident bytes at most in the second half of the minute / in its first quarter;
* health: the slowest answer to a readiness probe, one a second meanwhile.

There is no peer: the floor is the same server asked for no more than it can do.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import orjson
from tritonclient.grpc import service_pb2 as pb

from benchmarks.common import Bar, Benchmark, Options, Report, main
from benchmarks.grpc_load import grpc_closed, grpc_open
from benchmarks.load import http_request
from benchmarks.measure import versions
from benchmarks.open_loop import Seen, closed_loop, open_loop, poisson
from benchmarks.peers.hps_server import Hps, start_hps
from benchmarks.peers.process import cores
from hps.generate.model import model_spec
from hps.models.writer import write_version

FEATURES, DENSE, DIM, ROWS, BATCH, HIDDEN = 26, 13, 16, 20_000, 1024, 512
TIMES, DISTINCT = 4.0, 16
# Of capacity, so much must really have been asked for.
OFFERED = 3.8
REFUSED = {"rest": 503, "grpc": grpc.StatusCode.UNAVAILABLE.value[0]}
METHOD = "/inference.GRPCInferenceService/ModelInfer"
# As docs/overload.md says for a network that runs in the process: twice the cores, a short wait.
RUNNING, MAX_WAIT_MS = 2, 10.0

BARS = tuple(
    bar
    for way, name in (("rest", "REST"), ("grpc", "gRPC"))
    for bar in (
        Bar(f"goodput_{way}", f"{name}: goodput / capacity, by turns", at_least=0.9),
        Bar(f"recovery_{way}", f"{name}: capacity after the minute / before", at_least=0.9),
        Bar(f"p99_{way}", f"{name}: accepted p99 / p99 at capacity", at_most=2.0),
        Bar(f"refused_ms_{way}", f"{name}: slowest refusal, ms", at_most=50.0),
        Bar(f"codes_{way}", f"{name}: refusals with the right code", at_least=1.0),
        Bar(f"memory_{way}", f"{name}: resident memory, later / early", at_most=1.05),
        Bar(f"health_ms_{way}", f"{name}: slowest readiness probe, ms", at_most=100.0),
    )
)


def network() -> bytes:
    """Two hidden layers over everything: 0.5 M parameters, ONNX."""
    from onnx import TensorProto, helper, numpy_helper

    names = [f"f{i}" for i in range(FEATURES)]
    widths = dict.fromkeys(names, DIM) | {"dense": DENSE}
    random = np.random.default_rng(1)
    sizes = [sum(widths.values()), HIDDEN, HIDDEN, 1]
    weights = [
        (random.standard_normal((a, b)) / a**0.5).astype(np.float32) for a, b in pairwise(sizes)
    ]
    nodes = [helper.make_node("Concat", list(widths), ["x0"], axis=1)]
    for i in range(3):
        nodes.append(helper.make_node("MatMul", [f"x{i}", f"w{i}"], [f"y{i}"]))
        last = "Sigmoid" if i == 2 else "Relu"
        nodes.append(helper.make_node(last, [f"y{i}"], ["score" if i == 2 else f"x{i + 1}"]))

    def tensor(name: str, width: int) -> Any:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", width])

    graph = helper.make_graph(
        nodes,
        "dlrm",
        [tensor(name, width) for name, width in widths.items()],
        [tensor("score", 1)],
        [numpy_helper.from_array(w, f"w{i}") for i, w in enumerate(weights)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)])
    model.ir_version = 8
    return bytes(model.SerializeToString())


def write_model(root: Path) -> None:
    spec = model_spec("ctr", FEATURES, DIM, 1, DENSE, 65_536)
    random = np.random.default_rng(2)
    tables = {
        table.name: iter([(np.arange(ROWS), random.random((ROWS, DIM), dtype=np.float32))])
        for table in spec.tables
    }
    write_version(root, spec, 1, tables, dense=network())


def tensors(seed: int, batch: int = BATCH) -> dict[str, tuple[str, np.ndarray]]:
    random = np.random.default_rng(seed)
    asked: dict[str, tuple[str, np.ndarray]] = {
        f"f{i}": ("INT64", random.integers(0, ROWS, (batch, 1))) for i in range(FEATURES)
    }
    asked["dense"] = "FP32", random.random((batch, DENSE), dtype=np.float32)
    return asked


def rest_request(seed: int, batch: int = BATCH) -> bytes:
    inputs, body = [], b""
    for name, (datatype, array) in tensors(seed, batch).items():
        size = {"binary_data_size": array.nbytes}
        inputs.append(
            {"name": name, "shape": array.shape, "datatype": datatype, "parameters": size}
        )
        body += array.tobytes()
    head = orjson.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}})
    sizes = {"Inference-Header-Content-Length": str(len(head))}
    return http_request("/v2/models/ctr/infer", head + body, sizes)


def grpc_request(seed: int) -> bytes:
    request = pb.ModelInferRequest(model_name="ctr")
    for name, (datatype, array) in tensors(seed).items():
        request.inputs.add(name=name, datatype=datatype, shape=array.shape)
        request.raw_input_contents.append(array.tobytes())
    return bytes(request.SerializeToString())


class Watch:
    """Looks at the server once a second while it is entered: its memory, and how long a readiness probe
    takes."""

    def __init__(self, server: Hps) -> None:
        self._server = server
        self.rss: list[int] = []
        self.health_s: list[float] = []
        self._over = threading.Event()
        self._pool = ThreadPoolExecutor(1, "watch")

    def __enter__(self) -> Watch:
        self._looking = self._pool.submit(self._run)
        return self

    def __exit__(self, *_: object) -> None:
        """Raises what kept it from looking."""
        self._over.set()
        self._pool.shutdown()
        self._looking.result()

    def _run(self) -> None:
        while not self._over.wait(1):
            self.rss.append(self._server.process.memory_info().rss)
            start = time.monotonic()
            url = f"http://{self._server.address}/v2/health/ready"
            with urllib.request.urlopen(url, timeout=10):
                self.health_s.append(time.monotonic() - start)

    @property
    def growth(self) -> float:
        quarter, half = max(1, len(self.rss) // 4), len(self.rss) // 2
        return max(self.rss[half:]) / max(self.rss[:quarter])


def run(options: Options) -> Report:
    seconds = 10.0 if options.quick else 60.0
    report = Report()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_model(folder / "models")
        core, client = cores()
        limits = {"admission": {"running": RUNNING, "max_wait_ms": MAX_WAIT_MS}}
        server = stack.enter_context(start_hps(folder, limits=limits, core=core))
        if client is not None:
            stack.callback(os.sched_setaffinity, 0, os.sched_getaffinity(0))
            os.sched_setaffinity(0, {client})
        requests = [rest_request(seed) for seed in range(DISTINCT)]
        messages = [grpc_request(seed) for seed in range(DISTINCT)]
        closed_loop(server.address, requests, RUNNING, 3.0)
        for way in ("rest", "grpc"):
            load = Load(server, way, requests if way == "rest" else messages)
            before, by_turns = in_turns(load, *((3, 2.0) if options.quick else (12, 4.0)))
            arrivals = poisson(TIMES * before.goodput, seconds, options.seed)
            with Watch(server) as watch:
                minute = load.open(arrivals)
            after = load.capacity(seconds / 6)
            record(report, way, before, by_turns, minute, after, watch)
    report.figures["versions"] = versions("numpy", "onnxruntime", "grpcio", "uvicorn")
    return report


@dataclass(frozen=True)
class Load:
    """The requests of one protocol to ``server``."""

    server: Hps
    way: str
    requests: list[bytes]

    def open(self, arrivals: list[float]) -> Seen:
        if self.way == "grpc":
            return grpc_open(self.server.grpc, METHOD, self.requests, arrivals)
        return open_loop(self.server.address, self.requests, arrivals)

    def capacity(self, seconds: float) -> Seen:
        if self.way == "grpc":
            seen = grpc_closed(self.server.grpc, METHOD, self.requests, RUNNING, seconds)
        else:
            seen = closed_loop(self.server.address, self.requests, RUNNING, seconds)
        if set(seen.statuses) != {200}:
            raise RuntimeError(f"refused without overload: {set(seen.statuses)}")
        return seen


def in_turns(load: Load, turns: int, seconds: float) -> tuple[Seen, Seen]:
    """Capacity and overload over ``turns`` turns each; those of capacity take half of ``seconds`` each and
    lie around the others."""
    last = load.capacity(seconds / 4)
    able, asked = last, Seen()
    for turn in range(turns):
        asked += load.open(poisson(TIMES * last.goodput, seconds, turn))
        last = load.capacity(seconds / (4 if turn == turns - 1 else 2))
        able += last
    return able, asked


def record(
    report: Report,
    way: str,
    before: Seen,
    by_turns: Seen,
    minute: Seen,
    after: Seen,
    watch: Watch,
) -> None:
    """Raises RuntimeError when the load generator has not kept up."""
    offered = len(minute.statuses) / minute.wall_s
    if offered < OFFERED * before.goodput:
        raise RuntimeError(
            f"{way}: {offered:.0f} requests a second were sent, {offered / before.goodput:.2f} times of "
            f"{before.goodput:.0f}: the load generator has not kept up"
        )
    taken, refused, floor = minute.of(ok=True), minute.refusals, before.of(ok=True)
    codes = {status for status in by_turns.statuses + minute.statuses if status != 200}
    values = {
        "goodput": by_turns.goodput / before.goodput,
        "recovery": after.goodput / before.goodput,
        "p99": float(np.quantile(taken, 0.99) / np.quantile(floor, 0.99)),
        "refused_ms": float(refused.max() * 1e3),
        "codes": float(codes <= {REFUSED[way]}),
        "memory": watch.growth,
        "health_ms": max(watch.health_s) * 1e3,
    }
    report.values |= {f"{name}_{way}": value for name, value in values.items()}
    report.tables[f"predictions of {BATCH} samples, {way}"] = [
        {"load": f"capacity, {RUNNING} in flight", **_row(before, floor, floor)},
        {
            "load": f"{TIMES:g} × capacity, by turns with it",
            **_row(by_turns, by_turns.of(ok=True), by_turns.refusals),
        },
        {"load": f"{TIMES:g} × capacity, the minute", **_row(minute, taken, refused)},
    ]
    report.figures[way] = {
        "answers": len(taken),
        "refusals": len(refused),
        "codes": sorted(codes),
        "generator_lag_ms": max(minute.late) * 1e3,
        "rss": watch.rss,
        "health_ms": [round(s * 1e3, 2) for s in watch.health_s],
        "capacity": {"before": before.goodput, "after": after.goodput},
        "offered": offered,
    }


def _row(seen: Seen, taken: np.ndarray, refused: np.ndarray) -> dict[str, str]:
    p50, p99 = np.quantile(taken, [0.5, 0.99]) * 1e3
    row = {"answers/s": f"{seen.goodput:.1f}", "p50 ms": f"{p50:.1f}", "p99 ms": f"{p99:.1f}"}
    if refused is taken:
        return {**row, "refused/s": "0", "p50, p99, max ms": "", "generator's lag ms": ""}
    p50, p99, most = np.quantile(refused, [0.5, 0.99, 1]) * 1e3
    return {
        **row,
        "refused/s": f"{len(refused) / seen.wall_s:.0f}",
        "p50, p99, max ms": f"{p50:.1f}, {p99:.1f}, {most:.1f}",
        "generator's lag ms": f"{max(seen.late) * 1e3:.1f}",
    }


BENCHMARK = Benchmark(
    name="overload",
    title="Four times of what the server can do",
    run=run,
    bars=BARS,
    measured=("hps", "services", "benchmarks/open_loop.py", "benchmarks/grpc_load.py"),
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
