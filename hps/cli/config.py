"""``hps config``: show, check, describe and convert configurations."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hps.cli.command_options import CommandApp, argument, option
from hps.cli.options import ReportOptions
from hps.tools.output import plural, print_json, print_line, print_table, warn

if TYPE_CHECKING:
    from hps.config.validation import ValidationReport
    from hps.models.repository import ModelVersion

app = CommandApp(no_args_is_help=True, help="Show, check and describe the configuration.")

SHOW_EXAMPLES = """\b
Examples:
  hps config show --config hps.yaml
  hps config show --config hps.yaml --set server.workers=2 --output json
"""

VALIDATE_EXAMPLES = """\b
Examples:
  hps config validate hps.yaml
  hps config validate models/ctr/model.yaml
"""

SCHEMA_EXAMPLES = """\b
Examples:
  hps config schema > hps.schema.json
  hps config schema model
"""

CONVERT_EXAMPLES = """\b
Examples:
  hps config convert ps.json
  hps config convert ps.json --into converted
"""


class SchemaFile(StrEnum):
    settings = "settings"
    model = "model"
    api_key = "api-key"


@dataclass(frozen=True, kw_only=True)
class ShowOptions(ReportOptions):
    config: Path | None = option(None, "--config", "-c", metavar="FILE")
    """hps YAML, or HPS's ps.json."""
    set_: list[str] | None = option(None, "--set", metavar="KEY=VALUE")
    """Override a setting, as in server.http.port=80."""


@app.command(epilog=SHOW_EXAMPLES)
def show(options: ShowOptions) -> None:
    """Print the effective value of every setting and its origin.

    Secrets are hidden."""
    from hps.config import load_config
    from hps.config.effective_settings import effective_settings, public_settings

    configuration = load_config(options.config, options.set_ or ())
    models = [model.spec.name for model in configuration.legacy]
    if options.as_json:
        print_json(
            {
                "file": options.config,
                "settings": public_settings(configuration.settings),
                "origins": dict(configuration.origins),
                "models_of_file": models,
                "warnings": list(configuration.warnings),
            }
        )
        return
    rows = [
        (key, _text(value), origin)
        for key, (value, origin) in effective_settings(configuration).items()
    ]
    print_table(("setting", "value", "from"), rows)
    if models:
        print_line(
            f"The file itself describes the models {', '.join(models)}; see: hps config convert"
        )
    for warning in configuration.warnings:
        warn(warning)


@dataclass(frozen=True, kw_only=True)
class ValidateOptions(ReportOptions):
    file: Path = argument()
    """hps YAML, HPS's ps.json, a model.yaml or an API key file."""
    set_: list[str] | None = option(None, "--set", metavar="KEY=VALUE")
    """Override a setting, as in server.http.port=80."""


@app.command(epilog=VALIDATE_EXAMPLES)
def validate(options: ValidateOptions) -> None:
    """Check a file and the models it names; report all errors.

    Checks the sizes of table files, but not their contents (`hps model verify` does). Does not check
    ports, other servers or this machine (`hps doctor --config FILE` does). Exit code 2: the file
    has errors."""
    from hps.cli.config_checks import check_parts
    from hps.config.validation import validate_file

    file = options.file
    report = validate_file(file, options.set_ or ())
    models = check_parts(report, file)
    options.report(
        {
            "file": file,
            "kind": report.kind,
            "ok": not report.errors,
            "errors": report.errors,
            "warnings": report.warnings,
            "models": [{"model": each.name, "version": each.version} for each in models],
        },
        lambda _report: _show_report(report, file, models),
    )
    if report.errors:
        raise typer.Exit(2)


def _show_report(report: ValidationReport, file: Path, models: list[ModelVersion]) -> None:
    for warning in report.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    for error in report.errors:
        print(f"error: {error}", file=sys.stderr)
    if report.errors:
        print(f"{file}: {plural(len(report.errors), 'error')}", file=sys.stderr)
    else:
        checked = "".join(f", {each.name} version {each.version}" for each in models)
        print(f"{file}: ok ({report.kind}{checked})")
        if report.configuration is not None:
            rest = f"hps doctor --config {file}"
            print(
                f"Not checked: ports, stores, streams, other servers, this machine: {rest}",
                file=sys.stderr,
            )


@app.command(epilog=SCHEMA_EXAMPLES)
def schema(
    of: Annotated[
        SchemaFile,
        typer.Argument(help="The kind of file: settings, model (model.yaml) or api-key."),
    ] = (SchemaFile.settings),
) -> None:
    """Print the JSON Schema of a file, for editors and validators."""
    import json

    from hps.config.effective_settings import json_schema

    print(json.dumps(json_schema(of.value), indent=2))


@dataclass(frozen=True, kw_only=True)
class ConvertFileOptions:
    file: Path = argument()
    """An HPS ps.json."""
    into: Path | None = option(None, metavar="FOLDER")
    """Write the files into this folder instead of printing them."""


@app.command(epilog=CONVERT_EXAMPLES)
def convert(options: ConvertFileOptions) -> None:
    """Convert an HPS ps.json to hps.yaml and a model.yaml per model.

    Rows are not converted: `hps model import` imports them."""
    from hps.config.effective_settings import SETTINGS_FILE, convert_ps_json
    from hps.config.ps_json.converter import read_ps_json
    from hps.errors import ConfigError

    into = options.into
    legacy = read_ps_json(options.file)
    for warning in legacy.warnings:
        warn(warning)
    files = convert_ps_json(legacy)
    if into is None:
        print("---\n".join(f"# {name}\n{text}" for name, text in files.items()), end="")
        return
    present = [str(into / name) for name in files if (into / name).exists()]
    if present:
        raise ConfigError(f"{', '.join(present)} exists already; choose another folder for --into")
    for name, text in files.items():
        (into / name).parent.mkdir(parents=True, exist_ok=True)
        # The settings may contain a password.
        (into / name).touch(0o600 if name == SETTINGS_FILE else 0o666)
        (into / name).write_text(text)
        print_line(str(into / name))


def _text(value: Any) -> str:
    import json

    return value if isinstance(value, str) and value else json.dumps(value)
