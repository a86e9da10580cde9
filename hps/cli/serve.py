"""``hps serve``: run the server until a signal."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hps.cli.command_options import CommandApp, option
from hps.cli.options import ReportOptions, SetOption
from hps.cli.tables import flatten
from hps.cli.tables import show as show_tables
from hps.tools.output import plural, print_line

if TYPE_CHECKING:
    from hps.config import Configuration

app = CommandApp(add_completion=False)


class Role(StrEnum):
    """Values of `server.role` that `hps serve` accepts."""

    all = "all"
    frontend = "frontend"
    lookup = "lookup"


SHOWN_TABLES = 30

EXAMPLES = """\b
Examples:
  hps serve --config config.yaml
  hps serve --config ps.json --set server.http.port=9000
  hps serve --set models.repository=models
  hps serve --config config.yaml --workers 4
  hps serve --config config.yaml --role lookup
  hps serve --config config.yaml --role frontend
"""


@dataclass(frozen=True, kw_only=True)
class ServeOptions(ReportOptions):
    config: Path | None = option(None, "--config", "-c", envvar="HPS_CONFIG", metavar="FILE")
    """hps YAML file, or HPS's ps.json."""
    workers: int | None = option(None, "--workers", "-w", min=0)
    """Number of worker processes that answer requests; 0: this process answers them."""
    role: Role | None = option(None)
    """all: one process does everything; lookup: rows, for front ends; frontend: requests, with rows
    from lookup nodes."""
    overrides: SetOption = None


@app.command(epilog=EXAMPLES, context_settings={"allow_extra_args": True})
def serve(ctx: typer.Context, options: ServeOptions) -> None:
    """Serve models until SIGTERM or Ctrl-C; print the models and addresses once ready.

    Without --workers, one process does everything: simplest to run, and enough for one core. With
    --workers N, this process (the node) keeps the stores, the caches, the update streams and the admin
    port, and N worker processes answer requests. Use workers if one core cannot answer all requests or,
    already with --workers 1, if streamed updates must not delay requests. Workers read the node's CPU
    cache in shared memory, so the cache must fit into /dev/shm. A worker that exits is replaced.

    With --role, the work is split over machines, with one configuration for all. `lookup` nodes keep
    the rows and read the update streams. `frontend` processes, any number, have no rows: they run the
    networks and ask the nodes in lookup.nodes. A front end that reaches no node is not ready, reports
    the reason and keeps trying (docs/split.md).

    Exit code 2: the configuration or a model is broken. With --output json, one line of JSON is
    printed when the server is ready."""
    from hps.config import load_config
    from hps.errors import ConfigError

    started = time.monotonic()
    if ctx.args:
        raise ConfigError(f"the configuration file is an option: hps serve --config {ctx.args[0]}")
    more = [] if options.workers is None else [f"server.workers={options.workers}"]
    more += [] if options.role is None else [f"server.role={options.role.value}"]
    run(load_config(options.config, [*(options.overrides or ()), *more]), options, started)


def run(configuration: Configuration, options: ReportOptions, started: float) -> None:
    """Serve until a signal; ``started``: an instant of ``time.monotonic``, for the report."""
    from hps.errors import ConfigError

    if configuration.settings.server.role == "ingest":
        raise ConfigError("server.role is ingest: `hps ingest` starts that, not `hps serve`")
    check_early(configuration, configuration.settings.server.role)

    # Imported late, so that common mistakes are reported before the server's packages are loaded.
    from hps.cli.progress import ConsoleProgress
    from services.frontend import logs
    from services.frontend.main import FrontendServer, ServerUrls

    logs.setup_logging(configuration.settings.server)
    frontend = FrontendServer(configuration, ConsoleProgress())

    def ready(addresses: ServerUrls) -> None:
        found = {"http": addresses.http, "admin": addresses.admin, "grpc": addresses.grpc}
        endpoints = {name: url for name, url in found.items() if url is not None}
        report = summary(configuration, frontend.state.status(), endpoints)
        report["seconds"] = round(time.monotonic() - started, 3)
        # A closed standard output must not stop the server.
        with suppress(OSError):
            options.report(report, show)

    frontend.run(ready)


def check_early(configuration: Configuration, role: str) -> None:
    """Check early what the process would check only seconds later, or after loading its tables.

    ``role``: that of the settings, or ``ingest``. Raises ConfigError or ModelError."""
    from hps.config.auth import check_exposure
    from hps.config.validation import check_files, check_folders

    settings = configuration.settings
    check_exposure(settings)
    check_files(settings, role)
    if role in ("all", "lookup"):
        check_folders(settings)
    if settings.updates.kafka is not None and role != "frontend":
        from hps.updates.kafka.client import check_options

        check_options(settings.updates.kafka)
    models = configuration.settings.models
    if isinstance(models.repository, str) or not (
        configuration.legacy or models.repository.is_dir()
    ):
        from hps.errors import Unavailable
        from hps.models.remote import repository_of

        with suppress(Unavailable):  # the start may open a downloaded version
            repository_of(models).names()


def summary(
    configuration: Configuration, status: dict[str, Any], endpoints: dict[str, str]
) -> dict[str, Any]:
    """Report of a ready server: models, tiers, addresses, authentication."""
    return {
        "version": status["version"],
        "endpoints": endpoints,
        "auth": configuration.settings.auth.mode or "off",
        "tables": flatten(status),
        "models": [m["name"] for m in status["models"]],
        "tiers": [tier["name"] for tier in status["tiers"]],
        "database": configuration.settings.tiers.rocksdb.path,
        "lookup_nodes": [node["address"] for node in status.get("lookup_nodes", [])],
        "processes": status["processes"],
        "warnings": status["warnings"],
    }


def processes(status: list[dict[str, Any]]) -> str:
    """The server's processes as one line of text."""
    node, *workers = status
    shown = f"{node['role']} {node['pid']}"
    if not workers:
        return shown
    names = ", ".join(f"{worker['pid']}" for worker in workers)
    return f"{shown}; {plural(len(workers), 'worker')}: {names}"


def show(report: dict[str, Any]) -> None:
    source = "tiers", f"{' > '.join(report['tiers'])}, database {report['database']}"
    if report["lookup_nodes"]:  # a front end
        models, nodes = ", ".join(report["models"]), ", ".join(report["lookup_nodes"])
        source = "lookups", f"of {models} asked of {nodes}"
    else:
        show_tables(report["tables"][:SHOWN_TABLES])
        if len(report["tables"]) > SHOWN_TABLES:
            print_line(f"… and {len(report['tables']) - SHOWN_TABLES} more: hps tables")
        print_line()
    endpoints, requests = report["endpoints"], "lookups of front ends, by gRPC"
    if "http" in endpoints:
        requests = f"{endpoints['http']}  (Open Inference Protocol)"
    locked = "API keys" if report["auth"] == "api_key" else "none asked for"
    lines = [
        ("requests", requests),
        ("gRPC", endpoints.get("grpc", "off")),
        ("admin", f"{endpoints['admin']}  (/docs, /metrics, /v1/status)"),
        source,
        ("processes", processes(report["processes"])),
        ("access", locked),
    ]
    print_ready(report, lines)


def print_ready(report: dict[str, Any], lines: list[tuple[str, str]]) -> None:
    """Print what a ready process reports: ``lines``, names and texts; then its version."""
    if report["warnings"]:
        lines = [*lines, ("warnings", f"{len(report['warnings'])}, logged above")]
    for name, value in lines:
        print_line(f"{name:9} {value}")
    print_line()
    print_line(
        f"hps {report['version']} is ready after {report['seconds']:.1f} s.", style="bold green"
    )
