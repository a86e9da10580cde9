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
import sys

from benchmarks.common import Bar, Benchmark, Options, Report, main
from benchmarks.gpu_server import missing_requirement
from benchmarks.gpu_server_scene import Cores
from benchmarks.gpu_soak_cache import soak_cache
from benchmarks.gpu_soak_server import ServerSoak, soak_server

BARS = (
    Bar("wrong", "wrong rows and answers", at_most=0.0),
    Bar("cache_keys", "10^10 keys checked in the cache", at_least=1.0),
    Bar("server_keys", "10^10 keys checked through the server", at_least=1.0),
    Bar("stale", "keys without their last row in the end", at_most=0.0),
    Bar("killed", "workers killed", at_least=3.0),
    Bar("device_mib", "growth of the device's memory, MiB", at_most=16.0),
    Bar(
        "node_mib",
        "growth of the node's resident memory, pinned memory included, MiB",
        at_most=64.0,
    ),
)


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
        share=extra.get("share") or 1.0,
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
        *(f"benchmarks/gpu_soak_{part}.py" for part in ("cache", "scene", "server")),
        *("benchmarks/native_load", "benchmarks/grpc_load.py", "benchmarks/request_templates.py"),
    ),
    missing_requirement=missing_requirement,
    arguments={
        "--keys": {"type": float, "help": "to check in the cache (default 1e10)"},
        "--seconds": {"type": float, "help": "of the server's part (default 120)"},
        "--workers": {"type": int, "help": "of the server (default: one per core, at most 8)"},
        "--share": {"type": float, "help": "of the server's rows that the GPU has (default 1)"},
        "--parts": {"help": "some of cache,server, separated by commas (default: both)"},
    },
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
