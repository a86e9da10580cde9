"""``hps store load|export|convert``: load, export and convert whole tables of a store."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hps.cli.command_options import option
from hps.cli.progress import ConsoleProgress
from hps.cli.store_open import (
    ConfiguredModels,
    StoredTableOptions,
    StoredTablesOptions,
    TierName,
    open_models,
    open_store,
    read_config,
    work,
)
from hps.cli.value_parsing import parse_version
from hps.errors import ConfigError, NotFound
from hps.tools.output import count, plural, print_json, print_line, print_table, warn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from hps.config import Configuration
    from hps.rows.base import TableRows
    from hps.rows.convert import ConversionReport
    from hps.rows.tiers import RedisRows, RocksDbRows
    from hps.types import EmbeddingTable

LOAD_EXAMPLES = """\b
Examples:
  hps store load --config hps.yaml                # every table into RocksDB
  hps store load ctr user --config hps.yaml --tier redis
  hps store load ctr --config hps.yaml --rebuild  # without streamed rows
"""


@dataclass(frozen=True, kw_only=True)
class LoadOptions(StoredTablesOptions):
    rebuild: bool = option(False)
    """RocksDB: load again from the files; rows streamed since the load are lost."""


def load(options: LoadOptions) -> None:
    """Load the models' files into a store.

    Skips tables that are already loaded, and keeps newer rows in the store. If it is killed, run it
    again: it continues. A node does the same when it starts."""
    configuration = options.read()
    models = open_models(configuration)
    chosen = models.chosen(options.model, options.table)
    if options.rebuild and options.tier is TierName.redis:
        raise ConfigError(
            "--rebuild is for RocksDB only; for Redis, erase the model first (hps store erase)"
        )
    with open_store(configuration, options.tier, writing=True) as store, work():
        loaded = [_loaded(store, models, each, rebuild=options.rebuild) for each in chosen]
    options.report(loaded, _show_loaded)


def _show_loaded(loaded: list[dict[str, Any]]) -> None:
    print_table(
        ("table", "in", "how", "rows", "rows/s"),
        [(e["table"], e["tier"], e["how"], count(e["rows"]), _rate(e)) for e in loaded],
    )


def _loaded(
    store: RedisRows | RocksDbRows,
    models: ConfiguredModels,
    table: EmbeddingTable,
    *,
    rebuild: bool,
) -> dict[str, Any]:
    from hps.models.loader import load_tables
    from hps.models.preload import preload_tables
    from hps.rows.tiers import RocksDbRows

    began = time.monotonic()
    version, progress = models.versions[table.model], ConsoleProgress()
    if isinstance(store, RocksDbRows):
        (report,) = load_tables(version, [table], store.tier, progress, rebuild=rebuild)
        if report.duplicates:
            warn(f"table {table.id}: {plural(report.duplicates, 'row')} repeat a later row's key")
        how, rows = str(report.how), report.rows
    else:
        rows = preload_tables(version, {table.name: table}, store.tier, 1.0, progress)
        how = "loaded" if rows else "reused"
        rows = rows or version.tables[table.name].rows
    seconds = time.monotonic() - began
    return {"table": table.id, "tier": store.name, "how": how, "rows": rows, "seconds": seconds}


def _rate(entry: dict[str, Any]) -> Any:
    reused = entry["how"] in ("mapped", "reused") or not entry["seconds"]
    return count(None if reused else round(entry["rows"] / entry["seconds"]))


EXPORT_EXAMPLES = """\b
Examples:
  hps store export ctr user --out user.parquet --config hps.yaml
  hps store export ctr user --out changes.npz --config hps.yaml \\
      --since 2026-01-31T12:00Z
"""


@dataclass(frozen=True, kw_only=True)
class ExportOptions(StoredTableOptions):
    out: Path = option(metavar="FILE")
    """Output file, .parquet or .npz."""
    since: str | None = option(None, metavar="VERSION")
    """Export only rows newer than this version or time."""


def export(options: ExportOptions) -> None:
    """Write a table's rows to a Parquet or npz file.

    Columns: key, version, deleted, vector. --since also exports deletions: deleted is true, and the
    vector is empty. Prints the version to give as the next --since. The file gets its name when it is
    complete."""
    from hps.rows.export import check_format
    from hps.rows.export import export as write

    check_format(options.out)
    after = None if options.since is None else parse_version(options.since)
    with options.open() as (store, table):
        if after is not None and not store.versioned:
            raise ConfigError(
                f"--since: {store.name} has HPS's layout, which keeps no versions; leave it out, or "
                "convert the store: hps store convert"
            )
        store.check(table)
        total = store.entries(table)
        with work(), ConsoleProgress().task(f"exporting {options.table}", total) as step:
            dead = () if after is None else store.tombstones(table)
            written = write(options.out, table, _counted(store.scan(table), step), dead, after)
    facts = {"rows": written.rows, "deleted": written.deleted, "newest": written.newest}
    if options.as_json:
        print_json({"file": options.out, "table": table.id, "tier": store.name, **facts})
        return
    deleted = f", {written.deleted:,} of them deleted" if written.deleted else ""
    print_line(f"{options.out}: {plural(written.rows, 'row')}{deleted}")
    if store.versioned and written.rows:
        print_line(f"The next export continues with --since {written.newest}")


def _counted(rows: Iterable[TableRows], step: Callable[[int], None]) -> Iterator[TableRows]:
    """Yield ``rows`` unchanged; report their number to ``step``."""
    for some in rows:
        yield some
        step(len(some.keys))


CONVERT_EXAMPLES = """\b
Examples:
  hps store convert --config hps.yaml --into native.yaml
  hps store convert ctr --config hps.yaml --into native.yaml --tier redis
\b
hps.yaml says layout: hps, native.yaml layout: native; another folder for
RocksDB; Redis may be the same one. Afterwards:
  hps store diff --config native.yaml --against rocksdb --other hps.yaml
"""


@dataclass(frozen=True, kw_only=True)
class ConvertOptions(StoredTablesOptions):
    into: Path = option(metavar="FILE")
    """Configuration of the new stores, with layout: native."""
    tier: TierName | None = option(None, "--tier", "-t")
    """Only this store; default: all that are configured."""


def convert(options: ConvertOptions) -> None:
    """Convert stores from HPS's layout to the native one.

    The native layout keeps versions and deletions. The source is only read. It may be written to
    meanwhile: run the command again to copy those changes. If it is killed, run it again: it continues.
    Rows get the version of the models' files, so that no update streamed later is rejected. For
    RocksDB, the models' files are loaded first."""
    source, target = options.read(), read_config(options.into, None)
    old, new = open_models(source), open_models(target)
    tiers = _convertible(source, target, options.tier)
    pairs = [(each, _same_shape(new, each)) for each in old.chosen(options.model, options.table)]
    done: list[tuple[TierName, ConversionReport]] = []
    for each in tiers:
        with ExitStack() as resources:
            here = resources.enter_context(open_store(source, each))
            there = resources.enter_context(open_store(target, each, writing=True))
            there_are = [
                pair for pair in pairs if _is_there(here, pair[0], named=options.table is not None)
            ]
            with work():
                done += [(each, _converted(here, there, *pair, new)) for pair in there_are]
    options.report(
        [
            {"tier": tier, "table": each.table, "read": each.read, "written": each.written}
            for tier, each in done
        ],
        _show_converted,
    )


def _show_converted(done: list[dict[str, Any]]) -> None:
    print_table(
        ("tier", "table", "rows read", "written"),
        [(e["tier"].value, e["table"], count(e["read"]), count(e["written"])) for e in done],
    )


def _is_there(store: RedisRows | RocksDbRows, table: EmbeddingTable, *, named: bool) -> bool:
    """True if the store holds the table. A missing table is an error if ``named``, else a warning."""
    try:
        store.check(table)
    except NotFound as error:
        if named:
            raise
        warn(str(error))
        return False
    return True


def _convertible(
    source: Configuration, target: Configuration, tier: TierName | None
) -> list[TierName]:
    """The tiers to convert. Raises ConfigError if their layouts or folders do not fit."""
    tiers = []
    for name in [tier] if tier is not None else list(TierName):
        one, other = _settings(source, name), _settings(target, name)
        if tier is None and (one is None or other is None):
            continue
        for given, where, layout in ((one, "--config", "hps"), (other, "--into", "native")):
            if given is None:
                raise ConfigError(f"{where}: tiers.{name} is not configured there")
            if given.layout != layout:
                raise ConfigError(
                    f"{where}: tiers.{name}.layout is {given.layout}, expected {layout}: rows are "
                    "converted from HPS's layout to the native one"
                )
        tiers.append(name)
    if not tiers:
        raise ConfigError("no store is configured in both --config and --into")
    folders = source.settings.tiers.rocksdb.path, target.settings.tiers.rocksdb.path
    if TierName.rocksdb in tiers and folders[0].resolve() == folders[1].resolve():
        raise ConfigError(
            f"--into: tiers.rocksdb.path is {folders[1]}, the source, which is left as it is; "
            "name another folder"
        )
    return tiers


def _settings(configuration: Configuration, tier: TierName) -> Any:
    tiers = configuration.settings.tiers
    if tier is TierName.redis:
        return tiers.redis
    return tiers.rocksdb if tiers.rocksdb.enabled else None


def _same_shape(models: ConfiguredModels, table: EmbeddingTable) -> EmbeddingTable:
    found = models.one(table.model, table.name)
    if found.dim != table.dim or found.key_bits != table.key_bits:
        raise ConfigError(
            f"--into: table {found.id} has dim {found.dim} and {found.key_bits}-bit keys, the source "
            f"{table.dim} and {table.key_bits}"
        )
    return found


def _converted(
    source: RedisRows | RocksDbRows,
    target: RedisRows | RocksDbRows,
    table: EmbeddingTable,
    into: EmbeddingTable,
    models: ConfiguredModels,
) -> ConversionReport:
    from hps.models.loader import load_tables
    from hps.rows.convert import convert
    from hps.rows.tiers import RocksDbRows

    progress = ConsoleProgress()
    if isinstance(target, RocksDbRows):
        load_tables(models.versions[into.model], [into], target.tier, progress)
    return convert(source, table, target, into, models.files(into), progress)
