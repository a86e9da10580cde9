"""``hps store``: inspect and maintain the rows in Redis and RocksDB; one module per kind of work."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

from hps.cli import store_backup, store_compact, store_compare, store_copy, store_rows
from hps.cli.command_options import CommandApp, argument, option
from hps.cli.store_open import (
    ConfiguredModels,
    StoreOptions,
    chosen_tiers,
    open_models,
    open_store,
    open_stores,
    work,
)
from hps.errors import ConfigError, NotFound, TierError
from hps.tools.output import (
    approximate,
    count,
    number,
    print_line,
    print_table,
    size,
    warn,
)

if TYPE_CHECKING:
    from hps.config import Configuration
    from hps.rows.tiers import RedisRows, RocksDbRows
    from hps.tiers.base import TableName
    from hps.types import EmbeddingTable

HELP = """Inspect and maintain the stores of a configuration: Redis and RocksDB.

Commands open the stores themselves. Reading works while a node runs; commands that write to RocksDB need
exclusive access: stop the node first.
"""
app = CommandApp(no_args_is_help=True, help=HELP)
KEYS = {"ignore_unknown_options": True}  # a negative key is not an option

LS_EXAMPLES = """\b
Examples:
  hps store ls --config hps.yaml
  hps store ls ctr --config hps.yaml --tier redis --output json
"""


@dataclass(frozen=True, kw_only=True)
class ListOptions(StoreOptions):
    model: str | None = argument(None)
    """Only this model's tables."""


@app.command(epilog=LS_EXAMPLES)
def ls(options: ListOptions) -> None:
    """List the tables in each store: rows, bytes, dim, layout.

    Includes tables that are not configured (any more), which hps store erase removes, and versions
    other than the one that a start would serve: a running node may serve those. Exit code 1: a store
    is unavailable.

    ~ marks approximate numbers: once a table has been written to, RocksDB counts added rows only after
    they are compacted. Tombstones count as rows, also in Redis."""
    model, configuration = options.model, options.read()
    try:
        models = open_models(configuration)
    except ConfigError as error:
        warn(f"{error}; shown is what is stored")
        models = ConfiguredModels()
    entries: list[dict[str, Any]] = []
    failed = False
    for name in chosen_tiers(configuration, options.tier):
        try:
            with open_store(configuration, name) as store:
                entries += [e for e in _listed(store, models) if model in (None, e["model"])]
        except (TierError, NotFound) as error:
            failed = True
            warn(str(error))
    if model is not None and not entries and not failed:
        raise NotFound(f"no store holds a table of model {model!r}")
    options.report(entries, _show_tables)
    if failed:
        raise typer.Exit(1)


def _listed(store: RedisRows | RocksDbRows, models: ConfiguredModels) -> list[dict[str, Any]]:
    """Tables in a store, and configured tables that it does not have."""
    from hps.rows.tiers import placeholder_table, table_name_in

    configured = {table_name_in(table, store.tier.layout): table for table in models.all()}
    there = store.tables()
    entries = []
    for name in sorted({*there, *configured}, key=lambda n: (n.model, n.version, n.name)):
        table = configured.get(name)
        record = store.record(name) if name in there else None
        rows, bytes_, exact = 0, 0, True
        dim = table.dim if table else record.dim if record else None
        if name in there:
            shape = table or placeholder_table(name, dim or 1)
            problem = _problem(store, table) if table else _unconfigured(name, models)
            rows, bytes_, exact = store.measure(shape)
        else:
            other = table is not None and store.other_layout(table)
            problem = f"there in the {other} layout" if other else "not there"
        entries.append(
            {
                "tier": store.name,
                "model": name.model,
                "version": name.version or None,
                "table": name.name,
                "rows": rows,
                "rows_approximate": not exact,
                "bytes": bytes_ if dim or store.name == "redis" else None,
                "dim": dim,
                "dtype": table.row_format.name if table else record.dtype if record else None,
                "layout": store.tier.layout,
                "state": problem or "ok",
            }
        )
    return entries


def _unconfigured(name: TableName, models: ConfiguredModels) -> str:
    """Reason why no configured table has that name.

    A node may serve another version, which was loaded after its start."""
    version = models.versions.get(name.model)
    if version is None or name.name not in version.tables:
        return "not configured"
    return f"another version, a start serves {version.version}"


def _problem(store: RedisRows | RocksDbRows, table: EmbeddingTable) -> str:
    """Reason why the stored table does not fit its configuration; empty if it fits."""
    try:
        store.check(table)
    except TierError as error:
        return str(error).removeprefix(f"{store.name}: table {table.id}: ")
    return ""


def _show_tables(entries: list[dict[str, Any]]) -> None:
    print_table(
        ("tier", "model", "version", "table", "rows", "bytes", "dim", "layout", "state"),
        [
            (
                e["tier"],
                e["model"],
                number(e["version"]),
                e["table"],
                count(e["rows"], about=e["rows_approximate"]),
                approximate(size(e["bytes"]), about=e["rows_approximate"]),
                number(e["dim"]),
                e["layout"],
                e["state"],
            )
            for e in entries
        ],
        styles={"not there": "yellow", "not configured": "yellow"},
    )


ERASE_EXAMPLES = """\b
Examples:
  hps store erase ctr --version 3 --config hps.yaml
  hps store erase ctr --config hps.yaml --tier redis --yes
"""


@dataclass(frozen=True, kw_only=True)
class EraseOptions(StoreOptions):
    model: str = argument()
    """The model; it need not be configured."""
    version: int | None = option(None, "--version", "-v")
    """Only this version; default: all."""
    table: str | None = option(None)
    """Only this table."""
    yes: bool = option(False, "--yes", "-y")
    """Erase without asking for confirmation."""


def erase(options: EraseOptions) -> None:
    """Remove a model, or one version or table, from the stores.

    The model's files are kept: a configured model is loaded again when a node starts."""
    configuration = options.read()
    with open_stores(configuration, options.tier, writing=True) as stores:
        chosen = {store: _matching(store, options) for store in stores}
        erased = [
            {"tier": s.name, "model": n.model, "version": n.version, "table": n.name}
            for s, names in chosen.items()
            for n in names
        ]
        if not erased:
            raise NotFound(
                f"no store holds that of model {options.model!r}; hps store ls lists all"
            )
        if options.version is not None:
            _warn_of_sharing(configuration, options.model, options.version, erased)
        if not options.yes:
            _confirm(erased)
        for store, names in chosen.items():
            with work():
                store.erase(names)
    options.report(erased, lambda erased: print_line(f"Erased: {_labels(erased)}"))


def _matching(store: RedisRows | RocksDbRows, options: EraseOptions) -> list[TableName]:
    """The tables in the store that the options name."""
    return [
        name
        for name in store.tables()
        if name.model == options.model
        and options.version in (None, name.version or 1)
        and options.table in (None, name.name)
    ]


def _warn_of_sharing(
    configuration: Configuration, model: str, version: int, erased: list[dict[str, Any]]
) -> None:
    """Name the versions whose rows are also erased, as they share tables with ``version``."""
    from hps.models.remote.opening import repository_of
    from hps.models.table_sharing import versions_sharing

    folder = repository_of(configuration.settings.models).root / model
    for other, tables in versions_sharing(folder, version, {e["table"] for e in erased}).items():
        warn(
            f"version {other} shares {', '.join(tables)} with version {version}: its rows are erased too, "
            "with updates that were streamed into them"
        )


def _confirm(erased: list[dict[str, Any]]) -> None:
    what = _labels(erased)
    if not sys.stdin.isatty():
        raise ConfigError(f"this would erase {what}; give --yes to confirm")
    if not typer.confirm(f"Erase {what}?", err=True):
        raise typer.Exit(1)


def _labels(entries: list[dict[str, Any]]) -> str:
    return ", ".join(f"{e['model']}/{e['version']}/{e['table']} in {e['tier']}" for e in entries)


app.command(epilog=store_rows.SCAN_EXAMPLES)(store_rows.scan)
app.command(epilog=store_rows.GET_EXAMPLES, context_settings=KEYS)(store_rows.get)
app.command(epilog=store_rows.PUT_EXAMPLES, context_settings=KEYS)(store_rows.put)
app.command("del", epilog=store_rows.DEL_EXAMPLES, context_settings=KEYS)(store_rows.delete)
app.command(epilog=store_compare.DIFF_EXAMPLES)(store_compare.diff)
app.command(epilog=store_compare.VERIFY_EXAMPLES)(store_compare.verify)
app.command(epilog=store_copy.LOAD_EXAMPLES)(store_copy.load)
app.command(epilog=store_copy.EXPORT_EXAMPLES)(store_copy.export)
app.command(epilog=store_copy.CONVERT_EXAMPLES)(store_copy.convert)
app.command(epilog=store_compact.COMPACT_EXAMPLES)(store_compact.compact)
app.command(epilog=store_backup.CHECKPOINT_EXAMPLES)(store_backup.checkpoint)
app.command(epilog=store_backup.RESTORE_EXAMPLES)(store_backup.restore)
app.command(epilog=store_backup.DUMP_EXAMPLES)(store_backup.dump)
app.command("import-dump", epilog=store_backup.IMPORT_EXAMPLES)(store_backup.import_dump)
app.command(epilog=ERASE_EXAMPLES)(erase)
