"""Time from the start of `hps serve` to the first answered lookup, by the size of the model.

One table of random int64 keys, as `hps model import` publishes it, files in the page cache. The server is
started as a process; a client asks for a few rows every 5 ms over REST until they are answered, and compares
them. Measured with the model's mapped file, and with RocksDB alone (`tiers.mapped.enabled: false`): its first
load, and the next start, which finds the rows loaded.

Beside each time: the server's CPU time until then, and its memory then and after 2,000 further lookups of 26
keys each: anonymous (RssAnon), and of files (RssFile), which the machine's processes share.

The same with mapped files of ten times as many rows; that takes 8 GB of disk, and some minutes to write."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import Bar, Benchmark, Options, Report, main
from benchmarks.load import exchange, http_request
from benchmarks.measure import Spread, versions
from benchmarks.peers.process import free_ports
from hps.config.model_schema import ModelSpec
from hps.models.version_writer import write_version

DIM = 8
ROWS, LARGE_ROWS, QUICK_ROWS = 10_000_000, 100_000_000, 500_000
ROUNDS = 5
_CHUNK, _ASKED = 1 << 20, 26
_LOOKUPS = 2000

BARS = (
    Bar("mapped_s", f"{ROWS:,} rows x {DIM}, mapped: seconds to the first lookup", at_most=3.0),
    Bar(
        "large_s", f"{LARGE_ROWS:,} rows x {DIM}, mapped: seconds to the first lookup", at_most=5.0
    ),
    Bar("anonymous_mb", "mapped: anonymous memory at the first lookup, MB", at_most=150.0),
)


def run(options: Options) -> Report:
    rows, rounds = (QUICK_ROWS, 1) if options.quick else (ROWS, ROUNDS)
    report = Report(figures={"rows": rows, "dim": DIM, "versions": versions("numpy", "rocksdict")})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        keys = write_model(folder / "models", rows, options.seed)
        mapped = _starts(folder, keys, rounds, mapped=True)
        loaded = _starts(folder, keys, rounds, mapped=False)
        first = mapped["mapped, first start"]
        report.values["mapped_s"] = Spread.of([each["s"] for each in first]).median
        report.values["anonymous_mb"] = max(each["anonymous_mb"] for each in first)
        _add(report, rows, mapped | loaded)
    if not options.quick:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            keys = write_model(folder / "models", LARGE_ROWS, options.seed)
            mapped = _starts(folder, keys, rounds, mapped=True)
            first = mapped["mapped, first start"]
            report.values["large_s"] = Spread.of([each["s"] for each in first]).median
            _add(report, LARGE_ROWS, mapped)
    return report


def _starts(
    folder: Path, keys: np.ndarray[Any, Any], rounds: int, *, mapped: bool
) -> dict[str, list[dict[str, float]]]:
    name = "mapped" if mapped else "RocksDB"
    first = [start(folder, keys, mapped=mapped) for _ in range(rounds if mapped else 1)]
    again = [start(folder, keys, mapped=mapped, fresh=False) for _ in range(rounds)]
    return {f"{name}, first start": first, f"{name}, next start": again}


def _add(report: Report, rows: int, measured: dict[str, list[dict[str, float]]]) -> None:
    report.tables[f"{rows:,} rows x {DIM}"] = [
        {
            "": name,
            "seconds": f"{Spread.of([each['s'] for each in starts])}",
            "CPU s": f"{Spread.of([each['cpu_s'] for each in starts])}",
            **{k: round(max(e[k] for e in starts)) for k in starts[0] if k not in ("s", "cpu_s")},
        }
        for name, starts in measured.items()
    ]
    report.figures[f"starts_{rows}"] = measured


def write_model(root: Path, rows: int, seed: int) -> np.ndarray[Any, Any]:
    """Publish a model; return some of its keys, spread over the table."""
    rng = np.random.default_rng(seed)
    keys = rng.integers(-(2**63), 2**63 - 1, rows)
    spec = ModelSpec.model_validate(
        {
            "name": "m",
            "tables": [{"name": "t", "dim": DIM}],
            "features": [{"name": "t", "table": "t", "pooling": "none"}],
        }
    )
    chunks = (
        (keys[i : i + _CHUNK], vectors_of(keys[i : i + _CHUNK])) for i in range(0, rows, _CHUNK)
    )
    write_version(root, spec, 1, {"t": chunks})
    return keys[:: max(1, rows // (_ASKED * _LOOKUPS))].copy()


def vectors_of(keys: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The rows (n, DIM) of keys (n,)."""
    first = (keys % 1000).astype(np.float32)[:, None]
    return np.asarray(first + np.arange(DIM, dtype=np.float32))


def start(
    folder: Path, keys: np.ndarray[Any, Any], *, mapped: bool, fresh: bool = True
) -> dict[str, float]:
    """Start a server; return seconds to the first answer, and its memory then and after more lookups, MB."""
    database = folder / ("mapped" if mapped else "loaded")
    if fresh:
        shutil.rmtree(database, ignore_errors=True)
    data, admin = free_ports(2)
    settings = {
        "models": {"repository": str(folder / "models")},
        "tiers": {"rocksdb": {"path": str(database)}, "mapped": {"enabled": mapped}},
        "server": {"http": {"port": data}, "admin": {"port": admin}, "grpc": None},
    }
    config = folder / "hps.yaml"
    config.write_text(json.dumps(settings))
    began = time.monotonic()
    with server(config, folder / "server.log") as process:
        first = keys[:_ASKED]
        while not answered(data, first):
            if process.poll() is not None:
                raise RuntimeError((folder / "server.log").read_text())
            time.sleep(0.005)
        seconds, cpu = time.monotonic() - began, cpu_seconds(process.pid)
        then = memory(process.pid)
        for i in range(0, len(keys) - _ASKED, _ASKED):
            if not answered(data, keys[i : i + _ASKED]):
                raise AssertionError("a lookup was not answered")
        later = memory(process.pid)
    return {
        "s": seconds,
        "cpu_s": cpu,
        "anonymous_mb": then[0],
        "file_mb": then[1],
        "anonymous_mb_later": later[0],
        "file_mb_later": later[1],
    }


@contextmanager
def server(config: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "hps.cli.main", "serve", "--config", str(config)],
            stdout=out,
            stderr=subprocess.STDOUT,
        )
        try:
            yield process
        finally:
            process.terminate()
            process.wait(60)


def answered(port: int, keys: np.ndarray[Any, Any]) -> bool:
    """Ask for keys (n,); return False if the server does not answer lookups yet. Rows are compared."""
    body = {
        "inputs": [
            {"name": "t", "shape": [len(keys), 1], "datatype": "INT64", "data": keys.tolist()}
        ]
    }
    request = http_request(
        "/v2/models/m.lookup/infer", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        _, answer = exchange(f"127.0.0.1:{port}", request)
    except (OSError, RuntimeError):
        return False
    found = np.array(json.loads(answer)["outputs"][0]["data"], np.float32)
    if not np.array_equal(found.reshape(-1, DIM), vectors_of(keys)):
        raise AssertionError("the server does not answer with the rows of the files")
    return True


def memory(pid: int) -> tuple[float, float]:
    """Return anonymous memory and that of files, MB, of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    anonymous, file = (
        int(status.split(f"{name}:")[1].split()[0]) / 1024 for name in ("RssAnon", "RssFile")
    )
    return anonymous, file


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process so far, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


BENCHMARK = Benchmark(
    name="startup",
    title="Time from a server's start to its first answered lookup",
    run=run,
    bars=BARS,
    measured=("hps", "services"),
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
