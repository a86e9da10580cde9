"""``hps serve``: run the server in this process until it is told to stop."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hps.cli.output import Output, OutputFormat, print_json, say, warn
from hps.cli.targets import SetOption

if TYPE_CHECKING:
    from hps.config import Configuration

app = typer.Typer(add_completion=False)

EXAMPLES = """\b
Examples:
  hps serve --config config.yaml
  hps serve --config ps.json --set server.http.port=9000
  hps serve --set models.repository=models
"""


@app.command(epilog=EXAMPLES)
def serve(
    config: Annotated[
        Path | None,
        typer.Option("--config", "-c", metavar="FILE", help="Our YAML file, or HPS's ps.json."),
    ] = None,
    overrides: SetOption = None,
    output: Output = OutputFormat.table,
) -> None:
    """Serve models until SIGTERM or Ctrl-C; prints what is served and where once it is ready.

    A broken configuration or model ends it with exit code 2. With --output json one line of JSON
    is printed when it is ready.
    """
    from hps.config import load_config

    configuration = load_config(config, overrides or ())
    for warning in configuration.warnings:
        warn(warning)
    run(configuration, output)
