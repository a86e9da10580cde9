"""``hps store checkpoint|restore|dump|import-dump``: copies of a database, and HPS's dumps of tables."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hps.cli.command_options import argument, option
from hps.cli.options import (
    OptionalAdminServer,
    ReportOptions,
    SetOption,
    open_admin,
    reject_overrides,
)
from hps.cli.progress import ConsoleProgress
from hps.cli.store_open import StoredTableOptions, TierName, open_store, read_config, work
from hps.cli.store_rows import VersionOption
from hps.cli.value_parsing import parse_version
from hps.errors import ConfigError
from hps.tools.output import plural, print_line, warn

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from hps.config import Configuration
    from hps.tiers.dump import BinDump, Rows
    from hps.tiers.rocksdb.sst import SstDump

_CHECKPOINT_S = 3600.0  # a copy to another disk may be slow

CHECKPOINT_EXAMPLES = """\b
Examples:
  hps store checkpoint /backup/2026-01-31 --config hps.yaml  # node stopped
  hps store checkpoint -s http://127.0.0.1:8002 --keep 3  # by a running node
"""


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions(ReportOptions):
    folder: Path | None = argument(None, metavar="FOLDER")
    """Folder of the new checkpoint, with --config."""
    config: Path | None = option(None, "--config", "-c", metavar="FILE")
    """Configuration of a stopped node."""
    overrides: SetOption = None
    node: OptionalAdminServer
    keep: int = option(1, min=1)
    """With --server: number of newest checkpoints to keep; older ones are removed."""


def checkpoint(options: CheckpointOptions) -> None:
    """Make a consistent copy of the RocksDB database.

    With --config: copies the database to FOLDER, which must be empty or not exist; the node must be
    stopped. With --server: the running node copies its database into a new folder, named by the time,
    in its tiers.rocksdb.checkpoints. On the same file system, table files are hard-linked: it takes a
    moment and hardly any space."""
    if options.node.server is not None:
        if options.folder is not None or options.config is not None:
            raise ConfigError(
                "with --server the node chooses the folder; remove FOLDER and --config"
            )
        reject_overrides(options.overrides)
        credentials = options.node.credentials
        with open_admin(options.node.server, credentials, timeout_s=_CHECKPOINT_S) as node:
            made = node.ask("/v1/checkpoints", {"keep": options.keep})
        source = f"the node at {node.url}"
    elif options.folder is None or options.config is None:
        raise ConfigError("give FOLDER and --config FILE, or --server URL of a running node")
    else:
        source = _checkpoint(options.folder, read_config(options.config, options.overrides))
        made = {"checkpoint": options.folder, "database": source}
    options.report(
        made, lambda made: print_line(f"{made['checkpoint']} is a checkpoint of {source}")
    )


def _checkpoint(folder: Path, configuration: Configuration) -> str:
    """Make a checkpoint of a stopped node's database; return the database's folder."""
    from hps.rows.tiers import RocksDbRows

    with open_store(configuration, TierName.rocksdb, writing=True) as store:
        assert isinstance(store, RocksDbRows)
        store.tier.checkpoint(folder)
        return str(store.tier.path)


RESTORE_EXAMPLES = """\b
Examples:
  hps store restore /backup/2026-01-31 --config hps.yaml
  hps store restore /backup/2026-01-31 --config hps.yaml \\
      --set tiers.rocksdb.path=restored
  hps store restore /checkpoints --bootstrap --config hps.yaml  # a new node
"""


@dataclass(frozen=True, kw_only=True)
class RestoreOptions(ReportOptions):
    folder: Path = argument(metavar="FOLDER")
    """Folder of the checkpoint."""
    config: Path = option(MISSING, "--config", "-c", metavar="FILE")
    """The node's configuration."""
    overrides: SetOption = None
    bootstrap: bool = option(False)
    """FOLDER holds several: take the newest one that is whole; nothing where there is none, or the
    database is there already."""


def restore(options: RestoreOptions) -> None:
    """Restore the configured RocksDB database from a checkpoint.

    tiers.rocksdb.path must be empty or not exist: nothing is overwritten. A damaged checkpoint is
    rejected."""
    from hps.tiers import rocksdb

    folder = options.folder
    chosen = read_config(options.config, options.overrides).settings.tiers.rocksdb
    if not chosen.enabled:
        raise ConfigError("tiers.rocksdb.enabled is false: there is no database to restore")
    if options.bootstrap:
        found: Path | None = rocksdb.bootstrap(folder, chosen.path)
    else:
        rocksdb.restore(folder, chosen.path)
        found = folder
    text = f"{chosen.path} is restored from {found}"
    if found is None:
        text = f"nothing restored: {chosen.path} exists, or {folder} holds no checkpoint"
    options.report({"checkpoint": found, "database": chosen.path}, lambda _report: print_line(text))


DUMP_EXAMPLES = """\b
Examples:
  hps store dump ctr user user.bin --config hps.yaml
  hps store dump ctr user user.bin --config hps.yaml --tier redis
"""


@dataclass(frozen=True, kw_only=True)
class DumpOptions(StoredTableOptions):
    file: Path = argument(metavar="FILE")
    """Output file, .bin."""


def dump(options: DumpOptions) -> None:
    """Write a table's rows as HPS's .bin dump.

    The format has no versions and no deletions."""
    from hps.tiers.dump import write_dump
    from hps.tiers.stored_rows import to_vectors

    with options.open() as (store, table):
        store.check(table)

        def rows() -> Iterator[Rows]:
            for some in store.scan(table):
                yield some.keys, to_vectors(table, some.vectors)

        total = store.entries(table)
        with work(), ConsoleProgress().task(f"dumping {options.table}", total) as step:
            written = write_dump(options.file, table, rows(), step)
    options.report(
        {"file": options.file, "table": table.id, "tier": store.name, "rows": written},
        lambda _report: print_line(f"{options.file}: {plural(written, 'row')}"),
    )


IMPORT_EXAMPLES = """\b
Examples:
  hps store import-dump ctr user user.bin --config hps.yaml
  hps store import-dump ctr user user.sst --config hps.yaml
  hps store import-dump ctr user user.bin --config hps.yaml \\
      --version 2026-01-31 --tier redis
"""


@dataclass(frozen=True, kw_only=True)
class ImportDumpOptions(StoredTableOptions):
    file: Path = argument(metavar="FILE")
    """Dump to read, .bin or .sst."""
    version: VersionOption = None


def import_dump(options: ImportDumpOptions) -> None:
    """Write the rows of a .bin or .sst dump of HPS into a store.

    Newer rows in the store are kept. A table that the store does not have yet is created."""
    import numpy as np

    from hps.rows.tiers import table_name_in
    from hps.tiers.stored_rows import to_rows
    from hps.updates.version_clock import VersionClock

    at = VersionClock().now() if options.version is None else parse_version(options.version)
    with _open_dump(options.file) as opened, options.open(writing=True) as (store, table):
        store.ready(table, create=True)
        with work(), ConsoleProgress().task(f"importing {options.table}", opened.rows) as step:
            for keys, vectors in opened.read(table, step):
                versions = np.full(len(keys), at, np.uint64)
                store.tier.insert(table, keys, to_rows(table, vectors), versions)
        # The last write wins if rows have no versions.
        overwritten = store.name == TierName.rocksdb and not store.versioned
        overwritten = overwritten and store.record(table_name_in(table, "hps")) is None
    facts = {"rows": opened.rows, "version": at}
    rows = f"{plural(opened.rows, 'row')} of {options.file}"
    options.report(
        {"file": options.file, "table": table.id, "tier": store.name, **facts},
        lambda _report: print_line(f"{rows} written into {table.id} in {store.name}"),
    )
    if overwritten:
        warn(
            f"the model's files were never loaded into {table.id}: the next start writes them over these "
            "rows, unless tiers.rocksdb.load is false"
        )


def _open_dump(file: Path) -> AbstractContextManager[BinDump | SstDump]:
    """Open a dump; the file's extension selects the format, as in HPS."""
    if file.suffix == ".sst":
        from hps.tiers.rocksdb import open_sst

        return open_sst(file)
    from hps.tiers.dump import open_dump

    return nullcontext(open_dump(file))
