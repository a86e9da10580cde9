"""``hps store checkpoint|restore|dump|import-dump``: copies of a database, and HPS's dumps of tables."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hps.cli.command_options import argument, expand_options, option
from hps.cli.options import (
    Credentials,
    FormerAdminOption,
    SetOption,
    SomeAdminOption,
    open_admin,
    reject_overrides,
)
from hps.cli.progress import ConsoleProgress
from hps.cli.store_open import (
    ConfigFile,
    ModelArgument,
    OneTierOption,
    TableArgument,
    TierName,
    open_models,
    open_store,
    read_config,
    work,
)
from hps.cli.store_rows import VersionOption
from hps.cli.value_parsing import parse_version
from hps.errors import ConfigError
from hps.tools.output import Output, OutputFormat, plural, print_json, print_line, warn

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from hps.client import Admin
    from hps.tiers.dump import BinDump, Rows
    from hps.tiers.rocksdb.sst import SstDump

_CHECKPOINT_S = 3600.0  # a copy to another disk may be slow

CHECKPOINT_EXAMPLES = """\b
Examples:
  hps store checkpoint /backup/2026-01-31 --config hps.yaml  # node stopped
  hps store checkpoint -s http://127.0.0.1:8002 --keep 3  # by a running node
"""


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """Arguments and options of ``hps store checkpoint``."""

    folder: Path | None = argument(None, metavar="FOLDER")
    """Folder of the new checkpoint, with --config."""
    config: Path | None = option(None, "--config", "-c", metavar="FILE")
    """Configuration of a stopped node."""
    overrides: SetOption = None
    server: SomeAdminOption = None
    _admin: FormerAdminOption = None
    keep: int = option(1, min=1)
    """With --server: number of newest checkpoints to keep; older ones are removed."""
    credentials: Credentials
    output: Output = OutputFormat.table


@expand_options
def checkpoint(options: CheckpointOptions) -> None:
    """Make a consistent copy of the RocksDB database.

    With --config: copies the database to FOLDER, which must be empty or not exist; the node must be
    stopped. With --server: the running node copies its database into a new folder, named by the time,
    in its tiers.rocksdb.checkpoints. On the same file system, table files are hard-linked: it takes a
    moment and hardly any space."""
    if options.server is not None:
        if options.folder is not None or options.config is not None:
            raise ConfigError(
                "with --server the node chooses the folder; remove FOLDER and --config"
            )
        reject_overrides(options.overrides)
        _ask(
            open_admin(
                options.server,
                options.credentials,
                timeout_s=_CHECKPOINT_S,
            ),
            options.keep,
            options.output,
        )
        return
    if options.folder is None or options.config is None:
        raise ConfigError("give FOLDER and --config FILE, or --server URL of a running node")
    _make(options.folder, options.config, options.overrides, options.output)


def _ask(node: Admin, keep: int, output: OutputFormat) -> None:
    with node:
        made = node.ask("/v1/checkpoints", {"keep": keep})
    if output is OutputFormat.json:
        print_json(made)
    else:
        print_line(f"{made['checkpoint']} is a checkpoint of the node at {node.url}")


def _make(folder: Path, config: Path, overrides: list[str] | None, output: OutputFormat) -> None:
    from hps.rows.tiers import RocksDbRows

    configuration = read_config(config, overrides)
    with open_store(configuration, TierName.rocksdb, writing=True) as store:
        assert isinstance(store, RocksDbRows)
        store.tier.checkpoint(folder)
        path = store.tier.path
    if output is OutputFormat.json:
        print_json({"checkpoint": folder, "database": path})
    else:
        print_line(f"{folder} is a checkpoint of {path}")


RESTORE_EXAMPLES = """\b
Examples:
  hps store restore /backup/2026-01-31 --config hps.yaml
  hps store restore /backup/2026-01-31 --config hps.yaml \\
      --set tiers.rocksdb.path=restored
  hps store restore /checkpoints --bootstrap --config hps.yaml  # a new node
"""


def restore(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of the checkpoint.")],
    config: ConfigFile,
    overrides: SetOption = None,
    bootstrap: Annotated[
        bool,
        typer.Option(
            "--bootstrap",
            help="FOLDER holds several: take the newest one that is whole; nothing where there is none, or "
            "the database is there already.",
        ),
    ] = False,
    output: Output = OutputFormat.table,
) -> None:
    """Restore the configured RocksDB database from a checkpoint.

    tiers.rocksdb.path must be empty or not exist: nothing is overwritten. A damaged checkpoint is
    rejected."""
    from hps.tiers import rocksdb

    chosen = read_config(config, overrides).settings.tiers.rocksdb
    if not chosen.enabled:
        raise ConfigError("tiers.rocksdb.enabled is false: there is no database to restore")
    if bootstrap:
        found = rocksdb.bootstrap(folder, chosen.path)
    else:
        rocksdb.restore(folder, chosen.path)
        found = folder
    if output is OutputFormat.json:
        print_json({"checkpoint": found, "database": chosen.path})
    elif found is None:
        print_line(f"nothing restored: {chosen.path} exists, or {folder} holds no checkpoint")
    else:
        print_line(f"{chosen.path} is restored from {found}")


DUMP_EXAMPLES = """\b
Examples:
  hps store dump ctr user user.bin --config hps.yaml
  hps store dump ctr user user.bin --config hps.yaml --tier redis
"""
BinFile = Annotated[Path, typer.Argument(metavar="FILE", help="Output file, .bin.")]
DumpFile = Annotated[Path, typer.Argument(metavar="FILE", help="Dump to read, .bin or .sst.")]


@dataclass(frozen=True, kw_only=True)
class DumpOptions:
    """Arguments and options of ``hps store dump``."""

    model: ModelArgument
    table: TableArgument
    file: BinFile
    config: ConfigFile
    tier: OneTierOption = None
    overrides: SetOption = None
    output: Output = OutputFormat.table


@expand_options
def dump(options: DumpOptions) -> None:
    """Write a table's rows as HPS's .bin dump.

    The format has no versions and no deletions."""
    from hps.tiers.dump import write_dump

    configuration = read_config(options.config, options.overrides)
    chosen = open_models(configuration).one(options.model, options.table)
    with open_store(configuration, options.tier) as store:
        store.check(chosen)

        def rows() -> Iterator[Rows]:
            for some in store.scan(chosen):
                yield some.keys, some.vectors

        total = store.entries(chosen)
        with work(), ConsoleProgress().task(f"dumping {options.table}", total) as step:
            written = write_dump(options.file, chosen, rows(), step)
    if options.output is OutputFormat.json:
        print_json({"file": options.file, "table": chosen.id, "tier": store.name, "rows": written})
    else:
        print_line(f"{options.file}: {plural(written, 'row')}")


IMPORT_EXAMPLES = """\b
Examples:
  hps store import-dump ctr user user.bin --config hps.yaml
  hps store import-dump ctr user user.sst --config hps.yaml
  hps store import-dump ctr user user.bin --config hps.yaml \\
      --version 2026-01-31 --tier redis
"""


@dataclass(frozen=True, kw_only=True)
class ImportDumpOptions:
    """Arguments and options of ``hps store import-dump``."""

    model: ModelArgument
    table: TableArgument
    file: DumpFile
    config: ConfigFile
    tier: OneTierOption = None
    version: VersionOption = None
    overrides: SetOption = None
    output: Output = OutputFormat.table


@expand_options
def import_dump(options: ImportDumpOptions) -> None:
    """Write the rows of a .bin or .sst dump of HPS into a store.

    Newer rows in the store are kept. A table that the store does not have yet is created."""
    import numpy as np

    from hps.rows.tiers import table_name_in
    from hps.updates.version_clock import VersionClock

    at = VersionClock().now() if options.version is None else parse_version(options.version)
    configuration = read_config(options.config, options.overrides)
    chosen = open_models(configuration).one(options.model, options.table)
    with (
        _opened(options.file) as opened,
        open_store(configuration, options.tier, writing=True) as store,
    ):
        store.ready(chosen, create=True)
        with work(), ConsoleProgress().task(f"importing {options.table}", opened.rows) as step:
            for keys, vectors in opened.read(chosen, step):
                versions = np.full(len(keys), at, np.uint64)
                store.tier.insert(chosen, keys, vectors, versions)
        # The last write wins if rows have no versions.
        overwritten = store.name == TierName.rocksdb and not store.versioned
        overwritten = overwritten and store.record(table_name_in(chosen, "hps")) is None
    if options.output is OutputFormat.json:
        facts = {"rows": opened.rows, "version": at}
        print_json({"file": options.file, "table": chosen.id, "tier": store.name, **facts})
    else:
        print_line(
            f"{plural(opened.rows, 'row')} of {options.file} written into {chosen.id} in {store.name}"
        )
    if overwritten:
        warn(
            f"the model's files were never loaded into {chosen.id}: the next start writes them over these "
            "rows, unless tiers.rocksdb.load is false"
        )


def _opened(file: Path) -> AbstractContextManager[BinDump | SstDump]:
    """Open a dump; the file's extension selects the format, as in HPS."""
    if file.suffix == ".sst":
        from hps.tiers.rocksdb import open_sst

        return open_sst(file)
    from hps.tiers.dump import open_dump

    return nullcontext(open_dump(file))
