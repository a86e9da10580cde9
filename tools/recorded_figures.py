"""Write the tables of the documentation that show recorded benchmarks of GPUs.

``python tools/recorded_figures.py`` replaces the text between ``<!-- figures: NAME -->`` and ``<!-- end -->``
in the files below by a table of `TABLES`, from ``benchmarks/results/*.json``. A test compares the files with
it. Run it after a recording.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FILES = tuple(ROOT / name for name in ("README.md", "docs/gpu.md", "hps/cuda/README.md"))
_BLOCK = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
_MILLION = 1_000_000
Rows = list[Mapping[str, Any]]


def recording(name: str) -> dict[str, Any]:
    """What the benchmark ``name`` recorded."""
    found: dict[str, Any] = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())
    return found


def text_with_figures(text: str) -> str:
    """``text`` with all of its blocks as recorded."""
    return _BLOCK.sub(lambda block: block[1] + TABLES[block[2]]() + block[3], text)


def server() -> str:
    """Requests a second of a server on a GPU."""
    recorded = recording("gpu_server")
    values = {bar["name"]: bar["value"] for bar in recorded["bars"]}
    rows = []
    for batch in (1, 64, 1024):
        rates = [_rate(values[f"predict_{batch}_{protocol}"]) for protocol in ("rest", "grpc")]
        rows.append([f"{batch:,}", *rates, _ms(values[f"p50_{batch}"])])
    return _table(("samples a request", "REST, requests/s", "gRPC", "one caller, REST, p50"), rows)


def incomplete() -> str:
    """Requests a second of a server with rows missing on its GPU, in the cells with the most requests."""
    tables = recording("gpu_server")["tables"]
    recorded = tables.get("REST predictions with rows missing on the GPU")
    if recorded is None:
        return "Not recorded yet.\n"
    rows = []
    for share, skew in dict.fromkeys((row["rows on the GPU"], row["skew"]) for row in recorded):
        cells = [
            _row(recorded, skew=skew, batch=batch, callers=callers, **{"rows on the GPU": share})
            for batch, callers in ((1, 64), (64, 64), (1024, 8))
        ]
        keys = "uniform" if not skew else "mostly of a third of the rows"
        rates = (f"{_rate(row['requests/s'])} ({_ms(row['p99 ms'])})" for row in cells)
        rows.append([f"{share:.0%}", keys, f"{cells[1]['missing']:.0%}", *rates])
    columns = (f"batch {samples} (p99)" for samples in ("1", "64", "1,024"))
    return _table(("rows on the GPU", "keys", "missing there", *columns), rows)


def switches() -> str:
    """Latencies of requests while versions change, and another model is loaded, on a GPU."""
    (rows,) = recording("switch_gpu")["tables"].values()
    named = {
        "hps, switches, without": "without changes",
        "hps, switches, with": "while versions of 2 GB are loaded and served in place of one another",
        "hps, another model, without": "without changes",
        "hps, another model, with": "while another model, of 5 GB, is loaded and unloaded",
    }
    lines = [
        [
            named[row[""]],
            f"{row['requests']:,}",
            *(_ms(row[f"{p} ms"]) for p in ("p50", "p99", "p99.9")),
        ]
        for row in rows
    ]
    return _table(("", "requests", "p50", "p99", "p99.9"), lines)


def calls() -> str:
    """What calls of a million and of a thousand keys cost, beside their kernel."""
    recorded = recording("gpu_public_path")["tables"]["all rows on the device, median µs of a call"]
    names = {
        "the kernel alone, by the device's clock": "kernel µs",
        "`GpuCache.direct.fetch`, launch and wait": "direct µs",
        "`GpuCache.fetch`, keys on the GPU": "fetch, device keys µs",
        "`Node.lookup_on_device`, keys on the GPU": "lookup, device keys µs",
        "`Node.lookup_on_device`, keys on the host": "lookup, host keys µs",
    }
    rows = []
    for text, column in names.items():
        cells = []
        for dim in (32, 128):
            large, small = (_row(recorded, dim=dim, keys=n)[column] for n in (_MILLION, 1000))
            cells += [f"{_MILLION / large / 1000:.2f}", f"{small:.0f} µs"]
        rows.append([text, *cells])
    columns = [f"dim {dim}, {n}" for dim in (32, 128) for n in ("10⁶ keys, B keys/s", "10³ keys")]
    return _table(("", *columns), rows)


def missing() -> str:
    """Rates of lookups of a million keys with rows missing on the device."""
    tables = recording("gpu_public_path")["tables"]
    recorded = tables["lookup_on_device, dim 32, rows missing on the device"]
    rows = [
        [
            f"{row['missing']:.0%}",
            *(f"{row[f'{keys} keys, M/s']:,.0f}" for keys in ("device", "host")),
        ]
        for row in recorded
        if row["keys"] == _MILLION
    ]
    return _table(("rows missing on the GPU", "keys on the GPU, M keys/s", "on the host"), rows)


def floor() -> str:
    """Fetches beside the fastest gather of rows by number."""
    recorded = recording("gpu_cache")
    bars = {bar["name"]: bar for bar in recorded["bars"]}
    planned = _tables_of(recorded["tables"], "as planned")
    if not planned:
        return "Not recorded since nodes make such tables.\n"
    packed = _tables_of(recorded["tables"], "packed, three quarters full")
    rows = []
    for row in planned[0]:
        dim = row["dim"]
        ratios = (f"{_row(table, dim=dim)['fetch / floor']:.2f}" for table in (*planned, *packed))
        rates = (f"{row[f'{what} B/s']:.2f}" for what in ("floor", "fetch"))
        rows.append([f"{dim}", *rates, *ratios, bars[f"floor_{dim}"]["limit"].removeprefix("≥ ")])
    sizes = ("4 M rows", "64 M rows")
    columns = (*(f"ratio, {size}" for size in sizes), *(f"packed, {size}" for size in sizes))
    return _table(("dim", "floor", "fetch", *columns, "bar"), rows)


TABLES: dict[str, Callable[[], str]] = {
    table.__name__: table for table in (server, incomplete, switches, calls, missing, floor)
}


def _rate(value: float | None) -> str:
    return "–" if value is None else f"{float(f'{value:.3g}'):,.0f}"


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f} ms"


def _row(rows: Rows, **where: float) -> Mapping[str, Any]:
    return next(row for row in rows if all(row[name] == at for name, at in where.items()))


def _tables_of(tables: Mapping[str, Rows], ending: str) -> list[Rows]:
    return [rows for title, rows in tables.items() if title.endswith(ending)]


def _table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    columns = tuple(columns)
    lines = (columns, ("---",) * len(columns), *rows)
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> int:
    for file in FILES:
        file.write_text(text_with_figures(file.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
