"""``hps demo``: serve the model that comes with hps, ask it over HTTP and check every answer."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hps.cli.output import Number, count, print_table, say, share
from hps.errors import ConfigError, Unavailable

if TYPE_CHECKING:
    from hps.cli.demo_data import DemoData
    from hps.cli.demo_run import Findings

app = typer.Typer(add_completion=False)

EXAMPLES = """\b
Examples:
  hps demo               serve until Ctrl-C, so that you can try it
  hps demo --once        check and leave: exit code 0, or 1 when a check failed
  hps demo --port 9000
"""
PORTS = {"http": 8000, "admin": 8002}
START_S = 60.0


class PortTaken(Unavailable):
    """The server could not have its port."""


@app.command(epilog=EXAMPLES)
def demo(
    once: Annotated[bool, typer.Option("--once", help="Leave after the checks.")] = False,
    port: Annotated[
        int | None,
        typer.Option(
            "--port", min=1, max=65_535, help="Port for requests; default 8000 or a free one."
        ),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option("--model", help="Another model of the demo's form; see examples/README.md."),
    ] = None,
) -> None:
    """Serve the model that comes with hps, ask it over HTTP and check every answer.

    The model was trained on real ad impressions; its requests are keys of its own tables, and every
    score is compared with the trainer's. Needs no GPU, no other service and no network.
    """
    from hps.cli.demo_data import FOLDER, load_demo
    from hps.cli.demo_run import ask

    folder = model or FOLDER
    data = load_demo(folder)
    with tempfile.TemporaryDirectory(prefix="hps-demo-") as scratch, ExitStack() as stack:
        say(f"Starting a server for model {data.model!r} …")
        process, ready = _start(stack, folder, Path(scratch), port)
        findings = ask(data, ready["http"], ready["admin"])
        _report(data, findings)
        _try_next(data, findings, ready, folder, once)
        if not once:
            say()
            say("Serving until Ctrl-C.", style="bold")
            _wait(process)
    raise typer.Exit(0 if findings.ok else 1)


Started = tuple[subprocess.Popen[str], dict[str, str]]


def _start(stack: ExitStack, repository: Path, scratch: Path, port: int | None) -> Started:
    """The server's process and addresses; ``stack`` ends it."""
    config = scratch / "config.yaml"
    config.write_text(json.dumps(_settings(repository, scratch, _ports(port)), indent=2))
    try:
        return stack.enter_context(_server(config))
    except PortTaken:
        # Free when it was looked at, taken by another process since.
        if port is not None:
            raise
    free = dict.fromkeys(PORTS, 0)
    config.write_text(json.dumps(_settings(repository, scratch, free), indent=2))
    return stack.enter_context(_server(config))


def _ports(port: int | None) -> dict[str, int]:
    """By listener, 0 for any free one: the usual ports where they are free, else the one given."""
    wanted = PORTS if port is None else {"http": port, "admin": 0}
    ports = {}
    for name, number in wanted.items():
        free = _is_free(number)
        if not free and port is not None:
            raise ConfigError(f"port {number} is taken; leave --port out and the demo finds one")
        if not free:
            say(f"Port {number} is taken; the demo's {name} port is another one.", style="yellow")
        ports[name] = number if free else 0
    return ports


def _settings(repository: Path, scratch: Path, ports: dict[str, int]) -> dict[str, Any]:
    """The configuration file: JSON, which is YAML."""
    return {
        "models": {"repository": str(repository.absolute())},
        "tiers": {
            "rocksdb": {"path": str(scratch / "rocksdb")},
            # Empty at first, so that the demo shows rows coming from disk and then from memory.
            "cpu_cache": {"warm": False},
        },
        "server": {name: {"port": number} for name, number in ports.items()},
    }


def _is_free(port: int) -> bool:
    import socket

    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


@contextmanager
def _server(config: Path) -> Iterator[Started]:
    """``hps serve`` in a process of its own, and the addresses it printed when it was ready."""
    log = config.with_name("server.log")
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [sys.executable, "-m", "hps.cli.demo_server", str(config)],
            stdin=subprocess.PIPE,  # closes with this process: see demo_server
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        # A demo that is told to end takes its server along.
        ends = (signal.SIGTERM, signal.SIGHUP)
        before = [(number, signal.signal(number, _interrupt)) for number in ends]
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                process.wait(START_S)
                cause = _cause(log.read_text())
                kind = PortTaken if "cannot listen on" in cause else Unavailable
                raise kind(f"the demo's server did not start: {cause}")
            yield process, json.loads(line)["endpoints"]
        finally:
            process.terminate()
            try:
                process.wait(START_S)
            except subprocess.TimeoutExpired:
                process.kill()
            for number, handler in before:
                signal.signal(number, handler)


def _cause(log: str) -> str:
    """The server's error line; a log without one is shown whole on stderr."""
    lines = log.strip().splitlines() or ["it said nothing"]
    told = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    if told:
        return told[-1]
    sys.stderr.write(log)
    return lines[-1]


def _interrupt(_signal: int, _frame: Any) -> None:
    raise KeyboardInterrupt


def _wait(process: subprocess.Popen[str]) -> None:
    try:
        code = process.wait()
    except KeyboardInterrupt:
        say("Stopping.")
        return
    raise Unavailable(f"the demo's server ended by itself with exit code {code}")


def _report(data: DemoData, found: Findings) -> None:
    say()
    say("Scores", style="bold")
    output = next(iter(data.scores))
    columns = ("request", f"served {output}", "the trainer's", "rows came from")
    rows = []
    for i in range(min(5, data.samples)):
        served, trained = found.scores[output][i], data.scores[output][i]
        rows.append(
            (i, Number(f"{served:.6f}"), Number(f"{trained:.6f}"), _origins(found, data, i))
        )
    print_table(columns, rows)
    say()
    say("Where the rows came from (the cache was empty at first)", style="bold")
    tiers = list(dict.fromkeys(tier for counts in found.rounds for tier in counts))
    total = sum(found.rounds[0].values())
    passes = [part for i in range(len(found.rounds)) for part in (f"pass {i + 1}", "hit rate")]
    by_tier = []
    for tier in tiers:
        keys = [counts.get(tier, 0) for counts in found.rounds]
        by_tier.append((tier, *(cell for n in keys for cell in (count(n), share(n, total)))))
    print_table(("tier", *passes), by_tier)
    from hps.cli.demo_run import CANDIDATES

    say()
    best = ", ".join(f"number {position} ({score:.4f})" for position, score in found.best)
    say(f"Ranking {CANDIDATES} candidates for one context, best first: {best}")
    p50, p99 = _percentiles(found)
    say()
    say(f"Latency of one request over HTTP: p50 {p50:.2f} ms, p99 {p99:.2f} ms")
    say()
    for name, passed in found.checks.items():
        say(f"{'OK  ' if passed else 'FAIL'} {name}", style="green" if passed else "bold red")
    say(f"     largest difference to the trainer's scores: {found.difference:.1e}")


def _percentiles(found: Findings) -> tuple[float, float]:
    import numpy as np

    p50, p99 = np.percentile(found.milliseconds, [50, 99])
    return float(p50), float(p99)


def _origins(found: Findings, data: DemoData, sample: int) -> str:
    """``cpu: user ad; rocksdb: title``: the features by the tier of their first key's row."""
    from hps.types import Source

    features: dict[str, list[str]] = {}
    for name, keys in data.keys.items():
        code = found.sources[name][sample * keys.shape[1]]
        features.setdefault(Source(int(code)).name.lower(), []).append(name)
    return "; ".join(f"{tier}: {' '.join(names)}" for tier, names in features.items())


def _try_next(
    data: DemoData, found: Findings, ready: dict[str, str], folder: Path, once: bool
) -> None:
    body = json.dumps(found.sample, separators=(",", ":"))
    http, admin = ready["http"], ready["admin"]
    say()
    say("Try it yourself" + (", while hps demo runs without --once" if once else ""), style="bold")
    if shutil.which("hps") is None:
        say(f"source {os.path.relpath(sys.prefix)}/bin/activate     # in each new shell, for hps")
    say(f"curl -s {http}/v2/models/{data.model}/infer -d '{body}'")
    values = {t["name"]: _plain(t["data"]) for t in found.sample["inputs"]}
    plain = json.dumps(values, separators=(",", ":"))
    at = "" if http.endswith(":8000") else f" --server {http}"
    say(f"hps predict {data.model}{at} --explain --json '{plain}'")
    say()
    say("What to try next", style="bold")
    there = "" if admin.endswith(":8002") else f" --admin {admin}"
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
    """A single value without its lists; several stay as they are."""
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
