"""``hps model``: import, publish, inspect and verify versions of a repository, and serve them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hps.cli import model_serving, model_traffic
from hps.cli.command_options import CommandApp, argument, option
from hps.cli.model_import import IMPORT_EXAMPLES, import_
from hps.cli.model_publish import INDEX_EXAMPLES, PUBLISH_EXAMPLES, index, publish
from hps.cli.model_rows import ROWS_EXAMPLES, rows
from hps.cli.options import DEFAULT_REPOSITORY, ReportOptions, RepositoryLocation, repository_option
from hps.cli.row_errors import ERROR_TITLES, errors_row, row_errors, row_errors_json
from hps.errors import ConfigError, ModelError
from hps.tools.output import VERDICT_STYLES, count, print_line, print_table, size, warn

if TYPE_CHECKING:
    from hps.config.repository_uri import Location
    from hps.models.repository import ModelVersion, Repository

app = CommandApp(
    no_args_is_help=True,
    help="Import, publish, inspect and verify models of a repository; change what a server serves.",
)


@dataclass(frozen=True, kw_only=True)
class RepositoryOptions:
    """A model repository and a version of it."""

    repository: RepositoryLocation = repository_option(DEFAULT_REPOSITORY, "--repository", "-r")
    """The model repository."""
    version: int | None = option(None, "--version", "-v", min=1)
    """The model's version; default: the highest."""


app.command("import", epilog=IMPORT_EXAMPLES)(import_)
app.command(epilog=PUBLISH_EXAMPLES)(publish)
app.command(epilog=INDEX_EXAMPLES)(index)
app.command(epilog=ROWS_EXAMPLES)(rows)
app.command(epilog=model_serving.LOAD_EXAMPLES)(model_serving.load)
app.command(epilog=model_serving.UNLOAD_EXAMPLES)(model_serving.unload)
app.command(epilog=model_serving.LABEL_EXAMPLES)(model_serving.label)
app.command(epilog=model_serving.SWITCH_EXAMPLES)(model_serving.switch)
app.command(epilog=model_serving.ROLLBACK_EXAMPLES)(model_serving.rollback)
app.command(epilog=model_traffic.TRAFFIC_EXAMPLES)(model_traffic.traffic)
app.command("list", epilog=model_serving.LIST_EXAMPLES)(model_serving.list_)

INSPECT_EXAMPLES = """\b
Examples:
  hps model inspect                  # the models of ./models
  hps model inspect ctr -r /srv/models
  hps model inspect ctr --version 3 --output json
"""


@dataclass(frozen=True, kw_only=True)
class InspectModelOptions(ReportOptions):
    name: str | None = argument(None)
    """A model; default: list all."""
    source: RepositoryOptions


@app.command(epilog=INSPECT_EXAMPLES)
def inspect(options: InspectModelOptions) -> None:
    """Show the models of a repository, or the contents of one version."""
    models = _repository(options.source.repository)
    if options.name is not None:
        opened = models.open(options.name, options.source.version)
        options.report(_described(opened), lambda _report: _show(opened))
        return
    listed = [(n, models.versions(n), models.spec(n)) for n in models.names()]
    options.report(
        [{"model": n, "versions": v, "tables": len(s.tables)} for n, v, s in listed],
        lambda _report: print_table(
            ("model", "versions", "tables", "network"),
            [
                (n, ", ".join(map(str, v)) or "none", len(s.tables), _yes(s.dense is not None))
                for n, v, s in listed
            ],
        ),
    )


def _repository(location: Location) -> Repository:
    from hps.cli.options import open_repository

    if isinstance(location, Path) and not location.is_dir():
        raise ModelError(
            f"there is no model repository {location}; name one with --repository DIR, or make one with "
            "hps model import"
        )
    return open_repository(location)


def _described(opened: ModelVersion) -> dict[str, Any]:
    manifest = opened.manifest
    formats = {spec.name: spec.row_format for spec in opened.spec.tables}
    return {
        "model": opened.name,
        "version": opened.version,
        "folder": opened.folder,
        "digest": opened.digest,
        "spec": opened.spec.model_dump(mode="json"),
        "tables": [
            {
                "name": t.name,
                "rows": t.rows,
                "dim": t.dim,
                "bytes": t.bytes,
                "digest": t.digest,
                "row_format": formats[t.name],
                "row_errors": row_errors_json(opened, t.name),
            }
            for t in opened.tables.values()
        ],
        "dense": opened.dense,
        "manifest": manifest.model_dump(mode="json") if manifest else None,
        "warnings": opened.warnings,
    }


def _show(opened: ModelVersion) -> None:
    manifest = opened.manifest
    made = f", made {manifest.created:%Y-%m-%d %H:%M %Z}" if manifest else ""
    print_line(f"{opened.name} version {opened.version}{made}, in {opened.folder}")
    specs = {t.name: t for t in opened.spec.tables}
    measured = any(row_errors(opened, name) for name in specs)
    print_table(
        ("table", "rows", "dim", "in tiers", "default", "size", *(ERROR_TITLES if measured else ())),
        [
            (t.name, count(t.rows), t.dim, specs[t.name].row_format, _default(specs[t.name].default),
             size(t.bytes), *(errors_row(row_errors(opened, t.name)) if measured else ()))
            for t in opened.tables.values()
        ],
    )  # fmt: skip
    _show_inputs(opened)
    for key, value in (manifest.metadata if manifest else {}).items():
        print_line(f"{key}: {value}")
    for warning in opened.warnings:
        warn(warning)


def _show_inputs(opened: ModelVersion) -> None:
    """The features, and the tensors of the network."""
    features = opened.spec.features
    if features:
        print_line()
        print_table(
            ("feature", "table", "key offset", "pooling", "hotness", "context"),
            [
                (
                    f.name,
                    ", ".join(f.tables),
                    f.key_offset,
                    f.pooling,
                    f.hotness or (f"padded to {f.max_length}" if f.max_length else "any"),
                    _yes(f.context),
                )
                for f in features
            ],
        )
    if opened.spec.dense is not None:
        print_line()
        dense = opened.spec.dense
        tensors = [("input", t) for t in dense.inputs] + [("output", t) for t in dense.outputs]
        rows = [
            (kind, t.name, t.datatype, "x".join(map(str, t.shape)), _yes(t.context))
            for kind, t in tensors
        ]
        print_table(("network", "tensor", "type", "shape", "context"), rows)


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _default(value: float | list[float]) -> str:
    return f"vector of {len(value)}" if isinstance(value, list) else f"{value:g}"


VERIFY_EXAMPLES = """\b
Examples:
  hps model verify          # the newest version of every model of ./models
  hps model verify ctr --version 3
\b
Exit code 1 when a check fails.
"""


@dataclass(frozen=True, kw_only=True)
class VerifyModelOptions(ReportOptions):
    name: str | None = argument(None)
    """A model; default: all."""
    source: RepositoryOptions


@app.command(epilog=VERIFY_EXAMPLES)
def verify(options: VerifyModelOptions) -> None:
    """Check a version: layout, sizes, checksums, values, keys, network."""
    name, repository, version = options.name, options.source.repository, options.source.version
    if name is None and version is not None:
        raise ConfigError("--version needs a model's name")
    models = _repository(repository)
    names = [name] if name else models.names()
    if not names:
        raise ModelError(f"{repository} holds no model")
    findings = [
        {"model": each, "check": what, "result": level, "detail": text}
        for each in names
        for what, level, text in _check(models, each, version)
    ]
    options.report(
        findings,
        lambda findings: print_table(
            ("model", "check", "result", "detail"),
            [tuple(finding.values()) for finding in findings],
            styles=VERDICT_STYLES,
        ),
    )
    if any(finding["result"] == "FAIL" for finding in findings):
        raise typer.Exit(1)


def _check(models: Any, name: str, version: int | None) -> list[tuple[str, str, str]]:
    from contextlib import ExitStack

    from hps.cli.progress import ConsoleProgress
    from hps.config import Settings
    from hps.models.check import check_version
    from hps.node.model_opening import open_model

    try:
        opened = models.open(name, version)
    except (ModelError, ConfigError) as error:
        return [("layout", "FAIL", str(error))]
    found = [("layout", "OK", f"version {opened.version} in {opened.folder}")]
    found += [(f.what, f.level, f.text) for f in check_version(opened, ConsoleProgress())]
    if opened.dense is not None:
        try:
            with ExitStack() as resources:
                open_model(opened, Settings(), resources)
            found.append(("network", "OK", "inputs and outputs match model.yaml"))
        except (ModelError, ConfigError) as error:
            found.append(("network", "FAIL", str(error)))
    return found
