"""``hps doctor``: look at what a server needs, say what is wrong and how to mend it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hps.cli.output import (
    VERDICT_STYLES,
    Output,
    OutputFormat,
    print_json,
    print_table,
    problems,
    say,
)
from hps.cli.targets import ApiKeyOption, SetOption, TlsOption, tls_of

if TYPE_CHECKING:
    from hps.cli.checks import Check
    from hps.client import Tls

app = typer.Typer(add_completion=False)

EXAMPLES = """\b
Examples:
  hps doctor
  hps doctor --config config.yaml
  hps doctor --server http://127.0.0.1:8000 --output json
"""


@app.command(epilog=EXAMPLES)
def doctor(
    config: Annotated[
        Path | None,
        typer.Option("--config", "-c", metavar="FILE", help="Check this configuration too."),
    ] = None,
    overrides: SetOption = None,
    server: Annotated[
        str | None,
        typer.Option("--server", "-s", metavar="URL", help="Check that this server answers."),
    ] = None,
    api_key: ApiKeyOption = None,
    tls: TlsOption = None,
    output: Output = OutputFormat.table,
) -> None:
    """Check this machine, a configuration and a server; exit 1 when something fails."""
    checks = list(run(config, overrides, server, api_key, tls_of(tls)))
    failed = sum(check.verdict == "FAIL" for check in checks)
    if output is OutputFormat.json:
        print_json([asdict(check) for check in checks])
    else:
        show(checks, failed)
    raise typer.Exit(1 if failed else 0)


def run(
    config: Path | None,
    overrides: list[str] | None,
    server: str | None,
    api_key: str | None,
    tls: Tls | None = None,
) -> Iterator[Check]:
    from hps.cli.checks import Check, attempt, configured, machine
    from hps.config import load_config
    from hps.errors import HpsError

    yield from machine()
    if config is not None or overrides:
        try:
            loaded = load_config(config, overrides or ())
        except HpsError as error:
            mend = "correct it; hps config validate shows the place"
            for mistake in problems(error):
                yield Check("configuration", "FAIL", mistake, mend)
        else:
            for warning in loaded.warnings:
                yield Check("configuration", "WARN", warning, "see docs/ps-json.md")
            yield Check("configuration", "OK", str(config or "defaults"))
            yield from configured(loaded, api_key, tls)
    if server is not None:
        yield attempt("server", lambda: answering(server, api_key, tls))


def answering(server: str, api_key: str | None, tls: Tls | None) -> Check:
    from hps.cli.checks import Check
    from hps.client import Client

    with Client(server, api_key=api_key, timeout_s=5, retries=0, tls=tls) as client:
        if not client.is_hps():
            return Check("server", "FAIL", f"{server} is not an hps server", "check the address")
        if not client.ready():
            mend = "wait while it loads, then see hps status"
            return Check("server", "FAIL", f"{server} answers but is not ready", mend)
    return Check("server", "OK", f"{server} is ready")


def show(checks: list[Check], failed: int) -> None:
    print_table(
        ("", "check", "found", "mend"),
        [(c.verdict, c.name, c.found, c.mend) for c in checks],
        styles=VERDICT_STYLES,
    )
    say()
    warned = sum(check.verdict == "WARN" for check in checks)
    if failed or warned:
        say(f"{failed} failed, {warned} to look at.")
    else:
        say("All is well.")
