"""``hps store diff|verify``: compare stores with each other and with a model's files."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hps.cli.command_options import option
from hps.cli.progress import ConsoleProgress
from hps.cli.store_open import (
    ConfiguredModels,
    StoredTablesOptions,
    TierName,
    open_models,
    open_store,
    read_config,
    work,
)
from hps.cli.store_repair import Finding, files_of, repaired
from hps.errors import ConfigError, NotFound
from hps.tools.output import VERDICT_STYLES, count, print_json, print_line, print_table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hps.rows.base import RowSource
    from hps.rows.compare import TableDifference
    from hps.rows.tiers import RedisRows, RocksDbRows
    from hps.types import EmbeddingTable


class CompareTarget(StrEnum):
    files = "files"
    redis = "redis"
    rocksdb = "rocksdb"


class DifferenceKind(StrEnum):
    missing = "missing"
    deleted = "deleted"
    older = "older"
    newer = "newer"
    other = "other"
    extra = "extra"


DIFF_EXAMPLES = """\b
Examples:
  hps store diff --config hps.yaml         # rocksdb against the models' files
  hps store diff ctr --config hps.yaml --tier redis --against rocksdb \\
      --ignore missing
  hps store diff ctr user --config hps.yaml --sample 10000 --output json
  hps store diff --config native.yaml --against rocksdb --other hps.yaml
\b
missing  is not in the store            newer  has a newer version there
deleted  has a tombstone there instead  other  has other values
older    has an older version there     extra  is only there
\b
Exit code 1 when they differ.
"""


@dataclass(frozen=True, kw_only=True)
class DiffOptions(StoredTablesOptions):
    against: CompareTarget = option(CompareTarget.files, "--against", "-a")
    """Other side of the comparison: another store, or the model's files."""
    other: Path | None = option(None, metavar="FILE")
    """Configuration of the other side (--against); default: --config."""
    sample: int | None = option(None, "--sample", "-n", min=1)
    """Compare only about this many random rows per table."""
    ignore: list[DifferenceKind] | None = option(None)
    """Kind of difference that does not cause exit code 1; repeatable."""


def diff(options: DiffOptions) -> None:
    """Compare a store with another one, or with the model's files.

    Compares versions if both sides have them; with files, only values. Rows that are written during the
    comparison may be reported as different."""
    configuration = options.read()
    models = open_models(configuration)
    chosen = models.chosen(options.model, options.table)
    with ExitStack() as resources:
        store = resources.enter_context(open_store(configuration, options.tier))
        if options.other is None and options.against.value == store.name:
            raise ConfigError(
                f"--against {options.against} is the store itself; name another, or --other"
            )
        theirs = read_config(options.other, None) if options.other else configuration
        their_models = open_models(theirs) if options.other else models
        pairs = [(each, _counterpart(their_models, each)) for each in chosen]
        other_store = None
        if options.against is not CompareTarget.files:
            chosen_tier = TierName(options.against.value)
            other_store = resources.enter_context(open_store(theirs, chosen_tier))
        for mine, their in pairs:
            store.check(mine)
            if other_store is not None:
                other_store.check(their)
        found = [
            _compared(
                store, other_store or their_models.files(their), mine, their, models, options.sample
            )
            for mine, their in pairs
        ]
    if options.as_json:
        print_json(_report(store.name, options.against.value, chosen, found))
    else:
        _show(store.name, options.against.value, chosen, found)
    if any(each.differs(options.ignore or ()) for each in found):
        raise typer.Exit(1)


def _counterpart(models: ConfiguredModels, table: EmbeddingTable) -> EmbeddingTable:
    """Find the same table in the other configuration. Raises ConfigError if its shape differs."""
    found = models.one(table.model, table.name)
    if (found.dim, found.row_format) != (table.dim, table.row_format):
        raise ConfigError(
            f"table {table.id} has dim {table.dim} of {table.row_format.name} in one configuration, "
            f"{found.dim} of {found.row_format.name} in the other"
        )
    return found


def _compared(
    store: RedisRows | RocksDbRows,
    against: RowSource,
    table: EmbeddingTable,
    other: EmbeddingTable,
    models: ConfiguredModels,
    sample: int | None,
) -> TableDifference:
    from hps.rows.compare import compare

    keys = None if sample is None else models.files(table).draw(table, sample)
    with work():
        return compare(store, against, table, ConsoleProgress(), other=other, sample=keys)


def _report(
    store: str, against: str, tables: list[EmbeddingTable], found: list[TableDifference]
) -> list[dict[str, Any]]:
    from hps.rows.compare import KINDS

    return [
        {
            "model": table.model,
            "table": table.name,
            "store": store,
            "against": against,
            "sampled": each.sampled,
            "compared": each.compared,
            "equal": each.equal,
            **{kind: each.counts[kind] for kind in KINDS},
            "keys": each.examples,
        }
        for table, each in zip(tables, found, strict=True)
    ]


def _show(
    store: str, against: str, tables: list[EmbeddingTable], found: list[TableDifference]
) -> None:
    from hps.rows.compare import KINDS

    print_line(
        f"{store} compared with {against}" + (", a sample" if found and found[0].sampled else "")
    )
    print_table(
        ("table", "rows", "equal", *KINDS),
        [
            (t.id, count(d.compared), count(d.equal), *(count(d.counts[k]) for k in KINDS))
            for t, d in zip(tables, found, strict=True)
        ],
    )
    for table, each in zip(tables, found, strict=True):
        for kind, keys in each.examples.items():
            more = "" if each.counts[kind] <= len(keys) else " …"
            print_line(f"{table.id}: {kind}: {' '.join(map(str, keys))}{more}")


VERIFY_EXAMPLES = """\b
Examples:
  hps store verify --config hps.yaml               # every table in RocksDB
  hps store verify ctr --config hps.yaml --tier redis
  hps store verify --config hps.yaml --repair      # with the node stopped
\b
Exit code 1 when a check fails.
"""


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(StoredTablesOptions):
    repair: bool = option(False)
    """RocksDB: first repair all damaged tables."""


def verify(options: VerifyOptions) -> None:
    """Check that a store holds every row of the files, bit for bit.

    First verifies the checksums of the model's files, and of RocksDB's. Rows that were updated or
    deleted after they were loaded are counted, and are not errors.

    --repair keeps the readable rows of a damaged table, loads the others from the model's files again,
    and has the streams read again. It keeps the readable part of a damaged write-ahead log. It reports
    what may be lost. If it is killed, run it again: it continues."""
    configuration = options.read()
    models = open_models(configuration)
    chosen = models.chosen(options.model, options.table)
    findings: list[Finding] = []
    if options.repair:
        findings += repaired(configuration, models, options.tier)
    with open_store(configuration, options.tier) as store:
        for table in chosen:
            findings += _checks(store, models, table)
    names = ("table", "check", "result", "detail")
    options.report(
        [dict(zip(names, finding, strict=True)) for finding in findings],
        lambda _report: print_table(names, findings, styles=VERDICT_STYLES),
    )
    if any(finding[2] == "FAIL" for finding in findings):
        raise typer.Exit(1)


def _checks(
    store: RedisRows | RocksDbRows, models: ConfiguredModels, table: EmbeddingTable
) -> Iterator[Finding]:
    from hps.models.check import check_files
    from hps.rows.tiers import RocksDbRows

    try:
        store.check(table)
    except NotFound as error:
        yield table.id, f"rows in {store.name}", "FAIL", f"{error}"
        return
    files = models.versions[table.model].tables[table.name]
    checked = check_files(files, ConsoleProgress())
    yield table.id, "checksums", checked.level, checked.text
    stored = files_of(store, table) if isinstance(store, RocksDbRows) else None
    if stored is None or stored[2] == "OK":
        yield table.id, f"rows in {store.name}", *_verified(store, models, table)
    if stored is not None:
        yield stored


def _verified(
    store: RedisRows | RocksDbRows, models: ConfiguredModels, table: EmbeddingTable
) -> tuple[str, str]:
    from hps.rows.compare import compare_present

    with work():
        found = compare_present(store, models.files(table), table, ConsoleProgress())
    since = [f"{found.counts[k]:,} {k} since" for k in ("newer", "deleted") if found.counts[k]]
    text = ", ".join([f"{found.equal:,} of {found.compared:,} as in the files", *since])
    if not found.differs(("newer", "deleted")):
        return "OK", text
    for kind in ("missing", "older", "other"):
        if found.counts[kind]:
            keys = " ".join(map(str, found.examples[kind][:3]))
            text += f"; {found.counts[kind]:,} {kind} (keys {keys} …)"
    if not store.versioned and found.counts["other"]:
        text += "; HPS's layout does not show whether they were updated"
    return "FAIL", text
