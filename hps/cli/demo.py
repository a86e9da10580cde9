"""``hps demo``: serve the demo model, send requests over HTTP and check every answer."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hps.cli.command_options import CommandApp, option
from hps.errors import ConfigError
from hps.tools.output import FormattedNumber, count, percentage, print_line, print_table

if TYPE_CHECKING:
    from hps.cli.demo_data import DemoData
    from hps.cli.demo_run import DemoResults

app = CommandApp(add_completion=False)

PORT = 8000
"""The demo's port for requests: the server's default."""

EXAMPLES = """\b
Examples:
  hps demo                 # serve until Ctrl-C, so that you can try it
  hps demo --once          # check and exit: code 0, or 1 on a failed check
  hps demo --port 9000
  hps demo --write models  # put the model there, for a server of your own
"""


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    once: bool = option(False)
    """Exit after the checks."""
    port: int | None = option(None, min=1, max=65_535)
    """HTTP port of the server; default: 8000 if it is free, else any free one."""
    model: Path | None = option(None)
    """Folder of another model in the demo's format; see examples/README.md."""
    write: Path | None = option(None, metavar="FOLDER")
    """Copy the model into this model repository if it has none, print a request, and exit."""


@app.command(epilog=EXAMPLES)
def demo(options: DemoOptions) -> None:
    """Serve the model that comes with hps, send it requests over HTTP and check every answer.

    The model was trained on real ad impressions. The requests use keys of its tables, and every score
    is compared with the trainer's. Needs no GPU, no other service and no network."""
    from hps.cli.demo_data import FOLDER, load_demo

    folder = options.model or FOLDER
    data = load_demo(folder)
    if options.write is not None:
        _write(data, folder, options.write, f"http://127.0.0.1:{options.port or PORT}")
    elif not _run(data, folder, options.port, options.once):
        raise typer.Exit(1)


def _run(data: DemoData, folder: Path, port: int | None, once: bool) -> bool:
    """Serve and check the model; return whether all checks passed.

    Without ``once``, serve until a signal."""
    from hps.cli.demo_process import start, stop_on_signals, wait
    from hps.cli.demo_run import TIMED_REQUESTS, ask

    with (
        stop_on_signals(),
        tempfile.TemporaryDirectory(prefix="hps-demo-") as scratch,
        ExitStack() as stack,
    ):
        with _step(f"1/2 Starting a server for model {data.model!r}"):
            process, ready = start(stack, folder, Path(scratch), port)
        print_line(
            f"It answers at {ready['http']}, gRPC at {ready['grpc']}, admin at {ready['admin']}."
        )
        with _step(
            f"2/2 Sending {data.samples} requests twice, in batches, and {TIMED_REQUESTS} alone"
        ):
            findings = ask(data, ready["http"], ready["admin"])
        _report(data, findings)
        _try_next(data, findings, ready, folder, once)
        if not once:
            print_line()
            print_line("Serving until Ctrl-C.", style="bold")
            wait(process)
    return findings.ok


@contextmanager
def _step(title: str) -> Iterator[None]:
    """Print a step's title, and at its end the time it took."""
    print_line(f"{title} …")
    begun = time.monotonic()
    yield
    print_line(f"{title}: done, {time.monotonic() - begun:.1f} s")


def _write(data: DemoData, folder: Path, repository: Path, http: str) -> None:
    """Copy the model into ``repository`` unless that has models; print an example request.

    The copy gets its final name when it is complete: until then, readers ignore it."""
    from hps.cli.demo_run import json_request
    from hps.models.repository import Repository

    try:
        repository.mkdir(parents=True, exist_ok=True)
        there = Repository(repository).names()
        if not there:
            with tempfile.TemporaryDirectory(prefix=".demo-", dir=repository) as scratch:
                shutil.copytree(folder / data.model, Path(scratch) / data.model)
                (Path(scratch) / data.model).rename(repository / data.model)
    except OSError as error:
        raise ConfigError(f"cannot write the demo's model into {repository}: {error}") from None
    if there and data.model not in there:
        print_line(
            f"{repository} already has other models, so the demo's was not copied: {', '.join(there)}"
        )
        return
    body = json.dumps(json_request(data.tensors(slice(0, 1))), separators=(",", ":"))
    output = next(iter(data.scores))
    print_line(f"{repository} has model {data.model!r}. Once a server serves it, ask for a score:")
    print_line()
    print_line(f"  curl -s {http}/v2/models/{data.model}/infer -d '{body}'")
    print_line()
    print_line(f"The trainer's own {output} for this request is {data.scores[output][0]:.6f}.")


def _report(data: DemoData, found: DemoResults) -> None:
    print_line()
    print_line("Scores", style="bold")
    output = next(iter(data.scores))
    columns = ("request", f"served {output}", "the trainer's", "rows came from")
    rows = []
    for i in range(min(5, data.samples)):
        served, trained = found.scores[output][i], data.scores[output][i]
        rows.append(
            (
                i,
                FormattedNumber(f"{served:.6f}"),
                FormattedNumber(f"{trained:.6f}"),
                _origins(found, data, i),
            )
        )
    print_table(columns, rows)
    _report_tiers(found)
    _report_checks(found)


def _report_tiers(found: DemoResults) -> None:
    print_line()
    print_line("Where the rows came from (the cache was empty at first)", style="bold")
    tiers = list(dict.fromkeys(tier for counts in found.rounds for tier in counts))
    total = sum(found.rounds[0].values())
    passes = [part for i in range(len(found.rounds)) for part in (f"pass {i + 1}", "hit rate")]
    by_tier = []
    for tier in tiers:
        keys = [counts.get(tier, 0) for counts in found.rounds]
        by_tier.append((tier, *(cell for n in keys for cell in (count(n), percentage(n, total)))))
    print_table(("tier", *passes), by_tier)


def _report_checks(found: DemoResults) -> None:
    from hps.cli.demo_run import CANDIDATES

    print_line()
    best = ", ".join(f"number {position} ({score:.4f})" for position, score in found.best)
    print_line(f"Ranking {CANDIDATES} candidates for one context, best first: {best}")
    p50, p99 = _percentiles(found)
    print_line()
    print_line(f"Latency of one request over HTTP: p50 {p50:.2f} ms, p99 {p99:.2f} ms")
    print_line()
    for name, passed in found.checks.items():
        print_line(
            f"{'OK  ' if passed else 'FAIL'} {name}", style="green" if passed else "bold red"
        )
    print_line(f"     largest difference to the trainer's scores: {found.difference:.1e}")


def _percentiles(found: DemoResults) -> tuple[float, float]:
    import numpy as np

    p50, p99 = np.percentile(found.milliseconds, [50, 99])
    return float(p50), float(p99)


def _origins(found: DemoResults, data: DemoData, sample: int) -> str:
    """``cpu: user ad; rocksdb: title``: the features by the tier of their first key's row."""
    from hps.types import Source

    features: dict[str, list[str]] = {}
    for name, keys in data.keys.items():
        code = found.sources[name][sample * keys.shape[1]]
        features.setdefault(Source(int(code)).name.lower(), []).append(name)
    return "; ".join(f"{tier}: {' '.join(names)}" for tier, names in features.items())


def _try_next(
    data: DemoData, found: DemoResults, ready: dict[str, str], folder: Path, once: bool
) -> None:
    body = json.dumps(found.sample, separators=(",", ":"))
    http, admin = ready["http"], ready["admin"]
    print_line()
    print_line(
        "Try it yourself" + (", while hps demo runs without --once" if once else ""), style="bold"
    )
    if shutil.which("hps") is None:
        print_line(
            f"source {os.path.relpath(sys.prefix)}/bin/activate     # in each new shell, for hps"
        )
    print_line(f"curl -s {http}/v2/models/{data.model}/infer -d '{body}'")
    values = {t["name"]: _plain(t["data"]) for t in found.sample["inputs"]}
    plain = json.dumps(values, separators=(",", ":"))
    at = "" if http.endswith(":8000") else f" --server {http}"
    print_line(f"hps predict {data.model}{at} --explain --json '{plain}'")
    print_line()
    print_line("What to try next", style="bold")
    there = "" if admin.endswith(":8002") else f" --server {admin}"
    print_table(
        ("", ""),
        [
            (f"hps status{there}", "what the server has done so far"),
            (f"hps tables{there}", "its embedding tables"),
            (
                f"hps lookup{there} {_first_row(data, folder)} --explain",
                "a row, its tier and its age",
            ),
            (f"{admin}/docs", "the admin interface"),
            (f"{admin}/metrics", "numbers for Prometheus"),
            ("hps model import --help", "bring your own tables"),
        ],
    )


def _plain(data: Any) -> Any:
    """Unwrap a single value from its lists; return several values unchanged."""
    value = data
    while isinstance(value, list) and len(value) == 1:
        value = value[0]
    return data if isinstance(value, list) else value


def _first_row(data: DemoData, folder: Path) -> str:
    """Model, table and key of the first feature's first key, as ``hps lookup`` takes them."""
    from hps.models.repository import Repository

    name, keys = next(iter(data.keys.items()))
    feature = next(f for f in Repository(folder).spec(data.model).features if f.name == name)
    key = (int(keys[0, 0]) + feature.key_offset) % 2**64
    return f"{data.model} {feature.table} {key}"
