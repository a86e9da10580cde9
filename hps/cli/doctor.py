"""``hps doctor``: check a machine and a deployment; report faults with remedies."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from hps.cli.command_options import CommandApp, option
from hps.cli.options import Credentials, JsonReportOptions, SetOption
from hps.tools.output import VERDICT_STYLES, print_json, print_line, print_table, problems

if TYPE_CHECKING:
    from hps.tools.doctor.check import DoctorCheck

app = CommandApp(add_completion=False)

CONFIGURATION = "configuration"

EXAMPLES = """\b
Examples:
  hps doctor
  hps doctor --config config.yaml
  hps doctor --server http://a:8002 --server http://b:8002 --json
"""


@dataclass(frozen=True, kw_only=True)
class DoctorOptions(JsonReportOptions):
    config: Path | None = option(None, "--config", "-c", envvar="HPS_CONFIG", metavar="FILE")
    """Check this configuration, and the files and services that it names."""
    overrides: SetOption = None
    server: list[str] | None = option(None, "--server", "-s", metavar="URL")
    """Also check this running server; its admin address gives the most details. Repeatable."""
    credentials: Credentials


@app.command(epilog=EXAMPLES)
def doctor(options: DoctorOptions) -> None:
    """Check this machine and, with --config, a deployment; report faults with remedies.

    The parts of a deployment: ports, certificates, models, memory, disks, RocksDB, Redis, Kafka (its
    topics, permissions and lag), Triton, lookup nodes, clocks.

    Exit code 0: nothing failed, warnings are allowed; 1: a check failed; 2: the configuration is
    invalid, so the parts it names were not checked."""
    logging.getLogger("hps").addHandler(logging.NullHandler())  # the checks report it
    checks = list(run(options))
    failed = [check for check in checks if check.verdict == "FAIL"]
    if options.as_json:
        # "mend" is the deprecated name of "remedy".
        print_json([{**asdict(check), "mend": check.remedy} for check in checks])
    else:
        show(checks, len(failed))
    wrong = any(check.name == CONFIGURATION for check in failed)
    raise typer.Exit(2 if wrong else 1 if failed else 0)


def run(options: DoctorOptions) -> Iterator[DoctorCheck]:
    from hps.config import load_config
    from hps.errors import HpsError
    from hps.tools.doctor.check import DoctorCheck, catch_errors
    from hps.tools.doctor.configuration import configured
    from hps.tools.doctor.machine import machine
    from hps.tools.doctor.servers import servers as each_of

    config, overrides = options.config, options.overrides
    api_key, tls = options.credentials.api_key, options.credentials.client_tls()
    is_configured = config is not None or bool(overrides)
    yield from catch_errors("machine", machine(alone=not is_configured))
    if is_configured:
        try:
            loaded = load_config(config, overrides or ())
        except HpsError as error:
            remedy = "correct it; hps config validate shows the place"
            for mistake in problems(error):
                yield DoctorCheck(CONFIGURATION, "FAIL", mistake, remedy)
        else:
            for warning in loaded.warnings:
                yield DoctorCheck(CONFIGURATION, "WARN", warning, "see docs/ps-json.md")
            yield DoctorCheck(CONFIGURATION, "OK", str(config or "defaults"))
            yield from catch_errors("deployment", configured(loaded, api_key, tls))
    if options.server:
        yield from each_of(options.server, api_key, tls)


def show(checks: list[DoctorCheck], failed: int) -> None:
    print_table(
        ("", "check", "found", "remedy"),
        [(c.verdict, c.name, c.found, c.remedy) for c in checks],
        styles=VERDICT_STYLES,
    )
    print_line()
    warned = sum(check.verdict == "WARN" for check in checks)
    if failed or warned:
        print_line(f"{failed} failed, {warned} warnings.")
    else:
        print_line("All is well.")
