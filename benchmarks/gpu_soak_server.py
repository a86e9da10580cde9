"""The server's part of `benchmarks.gpu_soak`: checked predictions, update files, killed workers."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

from benchmarks.common import Report
from benchmarks.gpu_server_scene import PROTOCOLS, Cores, on_cores
from benchmarks.gpu_serving import NAMES
from benchmarks.gpu_soak_scene import (
    ROWS,
    SENT_KEYS,
    FileWriter,
    soak_template,
    write_soak_model,
)
from benchmarks.native_load import Callers, LoadSummary, run_load
from benchmarks.peers.hps_server import Hps, start_hps

MIB = 1 << 20
WARM_UP_SHARE = 0.4
"""Share of the samples of memory before growth counts: caches fill, graphs are captured."""
WORKER = "services.frontend.workers.process"


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
    share: float = 1.0
    """Of each table's rows, in the GPU cache: the others are missed there."""
    spoil: bool = False


def soak_server(report: Report, plan: ServerSoak) -> None:
    cores = Cores.of(sorted(os.sched_getaffinity(0)))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_soak_model(folder)
        updates = folder / "updates"
        tiers = {"gpu": {"use": "required", "share": plan.share} if plan.gpu else {"use": "off"}}
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
    report.values |= {"server_keys": keys / 1e10, "stale": float(stale)}
    report.values["killed"] = float(watcher.killed)
    report.values["node_mib"] = growth(watcher.node)
    if plan.gpu and watcher.device:
        report.values["device_mib"] = growth(watcher.device)
    wrong = sum(load.wrong for load in loads.values())
    report.values["wrong"] = report.values.get("wrong", 0.0) + wrong
