"""Arguments, bars, digests, tables and verdicts of every benchmark.

A script describes itself as data and passes a function that measures::

    BENCHMARK = Benchmark(
        name="rest", title="…", run=run, measured=("hps", "services"),
        bars=(Bar("echo_26", "26 keys: ours / bare echo, server CPU", at_most=2.0),),
    )
    if __name__ == "__main__":
        sys.exit(main(BENCHMARK))

``run(options)`` returns a Report whose ``values`` are judged against the bars by name. A value that is
absent counts as unmeasured, never as met.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.measure import machine

ROOT = Path(__file__).resolve().parents[1]
HELPERS = (
    "benchmarks/common.py",
    "benchmarks/measure.py",
    "benchmarks/load.py",
    "benchmarks/peers",
)
SOURCES = {
    ".py",
    ".pyi",
    ".cpp",
    ".hpp",
    ".h",
    ".lua",
    ".cu",
    ".cuh",
    ".txt",
    ".pbtxt",
    ".toml",
    ".yaml",
}


@dataclass(frozen=True)
class Bar:
    """A limit that a measured value must keep: ``at_most`` or ``at_least``, exactly one of them."""

    name: str
    text: str
    at_most: float | None = None
    at_least: float | None = None

    def __post_init__(self) -> None:
        if (self.at_most is None) == (self.at_least is None):
            raise ValueError(f"bar {self.name!r} needs either at_most or at_least")

    @property
    def limit(self) -> str:
        return f"≤ {self.at_most:g}" if self.at_most is not None else f"≥ {self.at_least:g}"

    def verdict(self, value: float | None) -> str:
        """``met``, ``MISSED`` or ``unmeasured``; NaN misses."""
        if value is None:
            return "unmeasured"
        if self.at_most is not None:
            return "met" if value <= self.at_most else "MISSED"
        return "met" if self.at_least is not None and value >= self.at_least else "MISSED"


@dataclass(frozen=True)
class Options:
    """``quick``: a shorter run, under a minute. ``seed``: of the random keys. ``extra``: the benchmark's
    additional arguments, JSON-able."""

    quick: bool = False
    seed: int = 1
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Report:
    """Results of a run. ``values``: bar name -> value. ``tables``: title -> rows, each a mapping from
    column to text or number. ``figures``: everything else worth recording, JSON-able."""

    values: dict[str, float] = field(default_factory=dict)
    tables: dict[str, list[Mapping[str, Any]]] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Benchmark:
    """``measured`` are the paths, relative to the repository, whose change makes a recording stale.

    ``helpers`` are the paths of the load generators and peers. ``missing_requirement()`` returns what this
    machine is missing to run it (a GPU, say), or None; if it is missing, the recording in
    ``benchmarks/results/NAME.json`` is judged instead. ``arguments`` are additional ones of the command
    line, as `ArgumentParser.add_argument` takes them; their values are in ``Options.extra``.
    """

    name: str
    title: str
    run: Callable[[Options], Report]
    bars: tuple[Bar, ...]
    measured: tuple[str, ...]
    missing_requirement: Callable[[], str | None] = lambda: None
    helpers: tuple[str, ...] = HELPERS
    arguments: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def recording(self) -> Path:
        return ROOT / "benchmarks/results" / f"{self.name}.json"

    def digest(self) -> str:
        """SHA-256 of the script, its helpers and the measured sources."""
        files = {ROOT / "benchmarks" / f"{self.name}.py"}
        for place in (*self.helpers, *self.measured):
            path = ROOT / place
            files |= (
                {path}
                if path.is_file()
                else {each for each in path.rglob("*") if each.suffix in SOURCES and each.is_file()}
            )
        total = hashlib.sha256()
        for each in sorted(files):
            total.update(f"{each.relative_to(ROOT).as_posix()}\0".encode())
            total.update(hashlib.sha256(each.read_bytes()).digest())
        return total.hexdigest()


def main(benchmark: Benchmark, arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark, or read a recording; print and judge it. Exit status 1 under ``--check`` when a bar
    is not met."""
    options = _parse(benchmark, arguments)
    unforced = options.results is None and not options.force
    if unforced and (reason := benchmark.missing_requirement()):
        print(f"{benchmark.name}: {reason}; judging the recording instead", file=sys.stderr)
        options.results = benchmark.recording
    if options.results is not None:
        record = read_record(benchmark, options.results)
    else:
        names = [name.lstrip("-").replace("-", "_") for name in benchmark.arguments]
        extra = {name: getattr(options, name) for name in names}
        record = _measure(benchmark, Options(options.quick, options.seed, extra))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    show(record)
    missed = [bar["name"] for bar in record["bars"] if bar["verdict"] != "met"]
    if options.check and missed:
        print(f"{benchmark.name}: not met: {', '.join(missed)}", file=sys.stderr)
        return 1
    return 0


def _parse(benchmark: Benchmark, arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{benchmark.name}", description=benchmark.title
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="a shorter run, under a minute")
    add("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    add("--check", action="store_true", help="exit status 1 when a bar is missed or unmeasured")
    add("--results", type=Path, metavar="FILE", help="judge a recorded file instead of running")
    add("--seed", type=int, default=1, help="of the keys (default 1)")
    add("--force", action="store_true", help="run even if this machine is missing a requirement")
    for name, keywords in benchmark.arguments.items():
        add(name, **keywords)
    return parser.parse_args(arguments)


def _measure(benchmark: Benchmark, options: Options) -> dict[str, Any]:
    digest, start = benchmark.digest(), time.time()
    report = benchmark.run(options)
    if benchmark.digest() != digest:
        report.notes.append("The sources changed during the run: not a result.")
        report.values.clear()
    return {
        "benchmark": benchmark.name,
        "title": benchmark.title,
        "digest": digest,
        "date": time.strftime("%Y-%m-%d", time.gmtime(start)),
        "took_s": round(time.time() - start, 1),
        "options": asdict(options),
        "machine": machine(),
        "bars": judge(benchmark.bars, report.values),
        "tables": report.tables,
        "figures": report.figures,
        "notes": report.notes,
    }


def judge(bars: Sequence[Bar], values: Mapping[str, float]) -> list[dict[str, Any]]:
    """One row per bar. Raises ValueError for a value without a bar (a misspelt name)."""
    unknown = set(values) - {bar.name for bar in bars}
    if unknown:
        raise ValueError(f"values without a bar: {sorted(unknown)}")
    return [
        {
            "name": bar.name,
            "text": bar.text,
            "limit": bar.limit,
            "value": values.get(bar.name),
            "verdict": bar.verdict(values.get(bar.name)),
        }
        for bar in bars
    ]


def read_record(benchmark: Benchmark, path: Path) -> dict[str, Any]:
    """A recorded run, judged by the present bars; every bar counts as missed when the sources changed."""
    try:
        record: dict[str, Any] = json.loads(path.read_text())
        values = {row["name"]: row["value"] for row in record["bars"] if row["value"] is not None}
        stale = record["digest"] != benchmark.digest() or record["benchmark"] != benchmark.name
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"{path}: no readable recording ({error})", file=sys.stderr)
        record, values, stale = {"benchmark": benchmark.name, "title": benchmark.title}, {}, False
    known = {bar.name for bar in benchmark.bars}
    record["bars"] = judge(benchmark.bars, {k: v for k, v in values.items() if k in known})
    if stale:
        record.setdefault("notes", []).append(
            "Recorded from other sources than these: run it again."
        )
        for row in record["bars"]:
            row["verdict"] = "MISSED"
    return record


def show(record: Mapping[str, Any], console: Console | None = None) -> None:
    """Print the record's tables, its bars and its notes."""
    out = console or Console(width=None if sys.stdout.isatty() else 200)
    for title, rows in record.get("tables", {}).items():
        out.print(make_table(title, rows))
    rows = [
        {
            "": row["text"],
            "value": "–" if row["value"] is None else f"{row['value']:.2f}",
            "bar": row["limit"],
            "verdict": row["verdict"],
        }
        for row in record["bars"]
    ]
    out.print(make_table(f"{record['benchmark']}: bars", rows))
    for note in record.get("notes", []):
        out.print(note)


def make_table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """A table with the first row's columns; numbers to three figures."""
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(rows[0] if rows else ()):
        table.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*(f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values()))
    return table
