"""10^10 keys read beside a writer and checked: in the GPU cache, and through a server with killed workers.

``cache``: threads fetch keys of one table from a `GpuCache` in this process while another thread replaces
rows and the table is too small for all keys. Every row is checked on the device against its key and
version, and no thread may see an older row than it saw before.

``server``: `hps serve --workers N` gets update files and predictions over REST and gRPC, whose network checks
every row (`benchmarks/gpu_soak_scene.py`). A random worker is killed every few seconds. In the end every key
is read once more and must have its last row. Memory of the device and of the node is recorded all along.

    python -m benchmarks.gpu_soak --keys 1e10 --seconds 300 --workers 8
    python -m benchmarks.gpu_soak --quick --force    # without a GPU: the CPU cache and a CPU server
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.common import Bar, Benchmark, Options, Report, main
from benchmarks.gpu_server import missing_requirement
from benchmarks.gpu_server_scene import PROTOCOLS, Cores, on_cores
from benchmarks.gpu_serving import NAMES
from benchmarks.gpu_soak_scene import (
    DIM,
    ROWS,
    SENT_KEYS,
    FileWriter,
    soak_template,
    write_soak_model,
)
from benchmarks.native_load import Callers, LoadSummary, run_load
from benchmarks.peers.hps_server import Hps, start_hps
from hps.tiers.base import FetchContext, Part
from hps.types import EmbeddingTable, make_version

MIB = 1 << 20
WARM_UP_SHARE = 0.4
"""Share of the samples of memory before growth counts: caches fill, graphs are captured."""
WORKER = "services.frontend.workers.process"

BARS = (
    Bar("wrong", "wrong rows and answers", at_most=0.0),
    Bar("cache_keys", "10^10 keys checked in the cache", at_least=1.0),
    Bar("server_keys", "10^9 keys checked through the server", at_least=1.0),
    Bar("stale", "keys without their last row in the end", at_most=0.0),
    Bar("killed", "workers killed", at_least=3.0),
    Bar("device_mib", "growth of the device's memory, MiB", at_most=16.0),
    Bar(
        "node_mib",
        "growth of the node's resident memory, pinned memory included, MiB",
        at_most=64.0,
    ),
)


# -- the cache in this process ----------------------------------------------------------------------


@dataclass
class CacheSoak:
    """Readers and a writer of one table of ``cache``; ``xp`` is the module of its arrays, NumPy or CuPy."""

    cache: Any
    table: EmbeddingTable
    xp: Any
    key_count: int
    call: int
    target: int
    readers: int = 3
    written: int = 0
    checked: int = 0
    wrong: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    stop: threading.Event = field(default_factory=threading.Event)
    base: int = make_version(time.time_ns() // 1_000_000)
    spoil: bool = False

    def run(self, limit_s: float) -> None:
        """Until ``target`` keys are checked. Raises what a thread raised."""
        for start in range(0, self.key_count, self.call):
            self.write(self.xp.arange(start, min(start + self.call, self.key_count)))
        failures: list[BaseException] = []

        def guard(work: Callable[[], None]) -> None:
            try:
                work()
            except BaseException as error:
                failures.append(error)
                self.stop.set()

        works = [self.write_on, *(lambda seed=i: self.read_on(seed) for i in range(self.readers))]
        threads = [threading.Thread(target=guard, args=(each,)) for each in works]
        for thread in threads:
            thread.start()
        end = time.monotonic() + limit_s
        while self.checked < self.target and not self.stop.wait(0.05) and time.monotonic() < end:
            pass
        self.stop.set()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]

    def rows(self, keys: Any, versions: Any) -> Any:
        """(n, dim) float32 whose bits are a checksum of key and version, different at each position."""
        xp = self.xp
        mark = keys.astype(xp.uint32) * np.uint32(2654435761)
        mark ^= (versions - np.uint64(self.base)).astype(xp.uint32) * np.uint32(40503)
        return (mark[:, None] + xp.arange(self.table.dim, dtype=xp.uint32)).view(xp.float32)

    def write(self, keys: Any) -> None:
        self.written += 1
        versions = self.xp.full(len(keys), self.base + self.written, np.uint64)
        rows = self.rows(keys, versions)
        if self.spoil and self.written > 10:
            rows[0, -1] = 0
        self.cache.insert(self.table, keys, rows, versions)

    def write_on(self) -> None:
        rng = np.random.default_rng(0)
        with _stream(self.xp):
            while not self.stop.wait(0.002):
                first = int(rng.integers(self.key_count))
                self.write((first + self.xp.arange(self.call // 64) * 7919) % self.key_count)

    def read_on(self, seed: int) -> None:
        xp, rng = self.xp, np.random.default_rng(seed + 1)
        newest = xp.zeros(self.key_count, xp.uint64)
        with _stream(xp):
            while not self.stop.is_set():
                first = int(rng.integers(self.key_count))
                keys = (first + xp.arange(self.call) * 7919) % self.key_count
                found, wrong = self.check(self.fetch(keys), newest)
                with self.lock:
                    self.checked += found
                    self.wrong += wrong

    def fetch(self, keys: Any) -> Part:
        n, xp = len(keys), self.xp
        out = xp.empty((n, self.table.dim), self.table.dtype)
        versions, source = xp.zeros(n, xp.uint64), xp.zeros(n, xp.uint8)
        part = Part(self.table, keys, out, versions, source, np.arange(n))
        self.cache.fetch([part], FetchContext())
        return part

    def check(self, part: Part, newest: Any) -> tuple[int, int]:
        """Rows found, and wrong ones of them; ``newest`` are the versions seen until now, by key."""
        xp = self.xp
        found = part.source > 0
        held = part.out.view(xp.uint32)
        right = (held == self.rows(part.keys, part.versions).view(xp.uint32)).all(axis=1)
        right &= part.versions >= newest[part.keys]
        newest[part.keys] = xp.maximum(
            newest[part.keys], xp.where(found, part.versions, np.uint64(0))
        )
        count = int(found.sum())
        return count, int((found & ~right).sum()) + abs(len(part.keys) - count - len(part.missing))


@contextmanager
def _stream(xp: Any) -> Iterator[None]:
    """A stream of the present thread, if arrays are on a device."""
    if xp is np:
        yield
    else:
        with xp.cuda.Stream(non_blocking=True):
            yield


def soak_cache(report: Report, target: int, limit_s: float, *, gpu: bool) -> None:
    """Four fifths of the keys fit, so rows are evicted and keys are missing all the time."""
    count, call = (1 << 22, 1 << 20) if gpu else (1 << 14, 1 << 12)
    table = EmbeddingTable.make("soak", DIM)
    if gpu:
        from hps.cuda.loader import cupy
        from hps.tiers.gpu.cache import GpuCache

        cache, xp = GpuCache({table: count * 4 // 5}), cupy()
    else:
        from hps.tiers.cpu.cache import CpuCache

        cache, xp = CpuCache({table: count * 4 // 5}), np
    soak = CacheSoak(cache, table, xp, count, call, target)
    start = time.monotonic()
    try:
        soak.run(limit_s)
    finally:
        cache.close()
    seconds = time.monotonic() - start
    report.figures["cache"] = {"keys": soak.checked, "seconds": seconds, "writes": soak.written}
    report.figures["cache"]["wrong"] = soak.wrong
    report.values["cache_keys"] = soak.checked / 1e10


# -- the server -------------------------------------------------------------------------------------


@dataclass
class Watcher:
    """Samples memory and kills a random worker every ``kill_every_s``, in a thread."""

    server: Hps
    kill_every_s: float
    killed: int = 0
    device: list[float] = field(default_factory=list)
    node: list[float] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        kill_at = time.monotonic() + self.kill_every_s
        while not self.stop.wait(0.25):
            self.node.append(self.server.process.memory_info().rss / MIB)
            if (used := device_memory()) is not None:
                self.device.append(used)
            workers = self.workers()
            if time.monotonic() >= kill_at and len(workers) > 1:
                random.choice(workers).kill()
                self.killed += 1
                kill_at = time.monotonic() + self.kill_every_s

    def workers(self) -> list[psutil.Process]:
        found = []
        for each in self.server.process.children(recursive=True):
            with suppress(psutil.Error):  # it has ended
                if WORKER in each.cmdline():
                    found.append(each)
        return found


def growth(samples: list[float]) -> float:
    """The largest of the last samples less the largest of the first ones after the warm-up, in their unit."""
    steady = samples[int(len(samples) * WARM_UP_SHARE) :]
    half = len(steady) // 2
    return max(steady[half:], default=0.0) - max(steady[:half], default=0.0)


def device_memory() -> float | None:
    """MiB in use on the first device, by all processes; None without one."""
    if (program := shutil.which("nvidia-smi")) is None:
        return None
    command = [program, "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    done = subprocess.run(command, capture_output=True, text=True)
    return float(done.stdout) if not done.returncode else None


@dataclass(frozen=True)
class ServerSoak:
    """``seconds`` of predictions of ``batch`` samples by ``callers`` at a server with ``workers``."""

    seconds: float
    workers: int
    kill_every_s: float
    batch: int
    callers: int
    gpu: bool
    spoil: bool = False


def soak_server(report: Report, plan: ServerSoak) -> None:
    cores = Cores.of(sorted(os.sched_getaffinity(0)))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_soak_model(folder)
        updates = folder / "updates"
        tiers = {
            "gpu": {"use": "required", "capacity_bytes": 1 << 30} if plan.gpu else {"use": "off"}
        }
        with on_cores(cores.server):
            started = start_hps(
                folder,
                tiers=tiers | {"cpu_cache": {"share": 1.0}},
                dense={"provider": "cuda" if plan.gpu else "cpu"},
                limits={"workers": plan.workers},
                updates={"directory": {"path": str(updates), "keep_applied": False}},
                timeout_s=300.0,
            )
            server = started.__enter__()
        try:
            writer = FileWriter(updates, spoil=plan.spoil)
            watcher = Watcher(server, plan.kill_every_s)
            with on_cores(cores.load), _threads(writer, watcher):
                loads = _load(server, plan, cores)
            stale = _stale_keys(server, writer)
        finally:
            started.__exit__(None, None, None)
    _record(report, plan, writer, watcher, loads, stale)


@contextmanager
def _threads(*works: FileWriter | Watcher) -> Iterator[None]:
    threads = [threading.Thread(target=each.run) for each in works]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for work, thread in zip(works, threads, strict=True):
            work.stop.set()
            thread.join()


def _load(server: Hps, plan: ServerSoak, cores: Cores) -> dict[str, LoadSummary]:
    loads = {}
    for protocol in PROTOCOLS:
        asked = Callers(
            plan.callers,
            plan.seconds / len(PROTOCOLS),
            cores=cores.load,
            spin=cores.spin,
            reconnect=True,
        )
        address = server.address if protocol == "rest" else server.grpc
        loads[protocol] = run_load(address, soak_template(protocol, plan.batch), asked)
    return loads


def _stale_keys(server: Hps, writer: FileWriter) -> int:
    """Keys whose row is not the last one written, once all files are applied."""
    from tritonclient.http import InferenceServerClient, InferInput

    deadline = time.monotonic() + 60
    while list(writer.folder.glob("*.npz")) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)  # the last file has left the folder: its rows are in the stores and caches
    client, stale = InferenceServerClient(server.address), 0
    for start in range(0, ROWS, 1000):
        keys = np.arange(start, min(start + 1000, ROWS)).reshape(-1, 1)
        inputs = []
        for names, array in ((NAMES, keys), (SENT_KEYS, keys.astype(np.float32))):
            for name in names:
                datatype = "INT64" if array.dtype == np.int64 else "FP32"
                inputs.append(InferInput(name, list(array.shape), datatype))
                inputs[-1].set_data_from_numpy(array)
        rounds = client.infer("soak", inputs).as_numpy("rounds")
        last = np.column_stack([writer.last[name][keys[:, 0]] for name in NAMES])
        stale += int((rounds != last).sum())
    client.close()
    return stale


def _record(
    report: Report,
    plan: ServerSoak,
    writer: FileWriter,
    watcher: Watcher,
    loads: dict[str, LoadSummary],
    stale: int,
) -> None:
    keys = sum(load.requests for load in loads.values()) * plan.batch * len(NAMES)
    for protocol, load in loads.items():
        report.figures[f"server, {protocol}"] = {
            "requests/s": load.per_second,
            "p99 ms": load.p99_ms,
            "connections that broke": load.broken,
            "failed requests": load.failures,
            "wrong": load.wrong,
        }
    report.figures["server"] = {
        "keys": keys,
        "update files": writer.files,
        "device MiB": watcher.device[:: max(1, len(watcher.device) // 20)],
        "node MiB": watcher.node[:: max(1, len(watcher.node) // 20)],
    }
    report.values |= {"server_keys": keys / 1e9, "stale": float(stale)}
    report.values["killed"] = float(watcher.killed)
    report.values["node_mib"] = growth(watcher.node)
    if plan.gpu and watcher.device:
        report.values["device_mib"] = growth(watcher.device)
    wrong = sum(load.wrong for load in loads.values())
    report.values["wrong"] = report.values.get("wrong", 0.0) + wrong


def run(options: Options) -> Report:
    report, gpu = Report(), missing_requirement() is None
    quick = options.quick
    extra = options.extra
    target = float(extra.get("keys") or (1e6 if quick else 1e10))
    cores = Cores.of(sorted(os.sched_getaffinity(0)))
    workers = extra.get("workers")
    plan = ServerSoak(
        seconds=float(extra.get("seconds") or (6 if quick else 120)),
        workers=(2 if quick else min(8, max(2, len(cores.workers))))
        if workers is None
        else workers,
        kill_every_s=1.5 if quick else 3.0,
        batch=64 if quick else 1024,
        callers=4 if quick else 32,
        gpu=gpu,
    )
    parts = str(extra.get("parts") or "cache,server").split(",")
    if "cache" in parts:
        soak_cache(report, int(target), 30 if quick else 600, gpu=gpu)
        report.values["wrong"] = float(report.figures["cache"]["wrong"])
    if "server" in parts:
        soak_server(report, plan)
    return report


BENCHMARK = Benchmark(
    name="gpu_soak",
    title="Keys checked beside a writer, with workers killed",
    run=run,
    bars=BARS,
    measured=("hps", "services"),
    helpers=(
        *("benchmarks/common.py", "benchmarks/gpu_server_scene.py"),
        *("benchmarks/gpu_soak_scene.py", "benchmarks/native_load", "benchmarks/grpc_load.py"),
    ),
    missing_requirement=missing_requirement,
    arguments={
        "--keys": {"type": float, "help": "to check in the cache (default 1e10)"},
        "--seconds": {"type": float, "help": "of the server's part (default 120)"},
        "--workers": {"type": int, "help": "of the server (default: one per core, at most 8)"},
        "--parts": {"help": "some of cache,server, separated by commas (default: both)"},
    },
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
