"""``hps ingest``: write updates from Kafka into the shared stores, until a signal."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hps.cli.command_options import CommandApp, option
from hps.cli.options import ReportOptions, SetOption
from hps.cli.serve import check_early, print_ready

if TYPE_CHECKING:
    from hps.config import Configuration
    from hps.config.update_settings import KafkaSettings

app = CommandApp(add_completion=False)

EXAMPLES = """\b
Examples:
  hps ingest --config hps.yaml
  hps ingest --config hps.yaml --set server.admin.port=8003   # next to a node
  hps updates status --server http://127.0.0.1:8003
  hps model load ctr --version 2 --server http://127.0.0.1:8003
"""


@dataclass(frozen=True, kw_only=True)
class IngestOptions(ReportOptions):
    config: Path | None = option(None, "--config", "-c", envvar="HPS_CONFIG", metavar="FILE")
    """The nodes' configuration: YAML, or HPS's ps.json."""
    overrides: SetOption = None


@app.command(epilog=EXAMPLES, context_settings={"allow_extra_args": True})
def ingest(ctx: typer.Context, options: IngestOptions) -> None:
    """Write streamed rows into Redis for all nodes, until SIGTERM or Ctrl-C.

    It uses the nodes' configuration: tiers.redis, updates.kafka with shared_writer: ingest, and the
    model repository for the tables' shapes. With shared_writer: nodes (the default) the nodes write
    Redis themselves, and this process is not needed.

    It serves no lookups and has no RocksDB or cache. It opens only the admin port: health, metrics,
    /v1/status, /v1/updates. Start any number of these processes, on any machine: they share the topics'
    partitions. When one ends, the others continue its partitions from the positions in Redis; no row is
    lost or undone. Nodes still refresh their RocksDB and caches from the stream.

    It feeds the versions that the settings choose, new ones of a watched repository (models.watch_s), and
    those that hps model load names: load a version here before the nodes switch to it.

    On SIGTERM it finishes the current batch, records the positions and exits with code 0. Exit code 2:
    the configuration or a model is broken. With --output json, one line of JSON is printed when it is
    ready."""
    from hps.config import load_config
    from hps.errors import ConfigError

    started = time.monotonic()
    if ctx.args:
        raise ConfigError(f"the configuration file is an option: hps ingest --config {ctx.args[0]}")
    run(load_config(options.config, options.overrides or ()), options, started)


def run(configuration: Configuration, options: ReportOptions, started: float) -> None:
    """Apply updates until a signal; ``started``: an instant of ``time.monotonic``, for the report."""
    from hps.node.ingest import check_role

    kafka = check_role(configuration.settings)
    check_early(configuration, "ingest")

    # Imported late, so that common mistakes are reported before the server's packages are loaded.
    from hps.cli.progress import ConsoleProgress
    from services.frontend import logs
    from services.ingest.main import IngestServer

    logs.setup_logging(configuration.settings.server)
    server = IngestServer(configuration, ConsoleProgress())

    def ready(admin: str) -> None:
        report = summary(server.state.status(), admin, kafka)
        report["seconds"] = round(time.monotonic() - started, 3)
        # A closed standard output must not stop the process.
        with suppress(OSError):
            options.report(report, show)

    server.run(ready)


def summary(status: dict[str, Any], admin: str, kafka: KafkaSettings) -> dict[str, Any]:
    return {
        "version": status["version"],
        "endpoints": {"admin": admin},
        "group": kafka.shared_group,
        "brokers": kafka.brokers,
        "stores": [tier["name"] for tier in status["tiers"]],
        "models": [model["name"] for model in status["models"]],
        "warnings": status["warnings"],
    }


def show(report: dict[str, Any]) -> None:
    lines = [
        ("reads", f"Kafka at {report['brokers']}, group {report['group']}"),
        ("feeds", f"{', '.join(report['stores'])}: {', '.join(report['models'])}"),
        ("admin", f"{report['endpoints']['admin']}  (/docs, /metrics, /v1/updates)"),
    ]
    print_ready(report, lines)
