"""``hps store scan|get|put|del``: rows of one table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from hps.cli.command_options import argument, option
from hps.cli.store_open import (
    StoredTableOptions,
    TableOptions,
    TierName,
    chosen_tiers,
    open_store,
    open_stores,
    work,
)
from hps.cli.value_parsing import (
    as_typed,
    key_array,
    parse_key,
    parse_vector,
    parse_version,
    shown_age,
    shown_vector,
)
from hps.errors import ConfigError, NotFound, TierError
from hps.tools.output import FormattedNumber, plural, print_line, print_table, warn

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray

    from hps.config import Configuration
    from hps.rows.base import StoredKeys, TableRows
    from hps.rows.tiers import RedisRows, RocksDbRows
    from hps.types import EmbeddingTable, KeyArray, VectorArray

SCAN_EXAMPLES = """\b
Examples:
  hps store scan ctr user --config hps.yaml
  hps store scan ctr user --config hps.yaml --from -100 --limit 1000 -o json
  hps store scan ctr user --config hps.yaml --tier redis
"""


@dataclass(frozen=True, kw_only=True)
class ScanOptions(StoredTableOptions):
    start: str | None = option(None, "--from", metavar="KEY")
    """Start at this key; RocksDB only: Redis has no order."""
    limit: int = option(20, "--limit", "-n", min=1)
    """Maximum number of rows."""


def scan(options: ScanOptions) -> None:
    """Show the rows of a table, in the store's order.

    RocksDB orders rows by signed key (in HPS's layout by the key's little-endian bytes); Redis has no
    order."""
    from hps.tiers.stored_rows import to_vectors

    first = None if options.start is None else parse_key(options.start)
    with options.open() as (store, table):
        store.check(table)
        rows: list[dict[str, Any]] = []
        with work():
            for some in _scanned(store, table, first):
                left = options.limit - len(rows)
                vectors = to_vectors(table, some.vectors[:left])
                each = zip(some.keys[:left], some.versions, vectors, strict=False)
                rows += [{"key": k, "version": v, "vector": row} for k, v, row in each]
                if len(rows) == options.limit:
                    break
    report = {"model": options.model, "table": options.table, "tier": store.name, "rows": rows}
    options.report(report, lambda _report: _show_scanned(rows))


def _show_scanned(rows: list[dict[str, Any]]) -> None:
    print_table(
        ("key", "age", "vector"),
        [(int(r["key"]), shown_age(int(r["version"])), shown_vector(r["vector"])) for r in rows],
    )


def _scanned(
    store: RedisRows | RocksDbRows, table: EmbeddingTable, first: int | None
) -> Iterator[TableRows]:
    from hps.rows.tiers import RocksDbRows

    if first is None:
        return store.scan(table)
    if not isinstance(store, RocksDbRows):
        raise ConfigError("--from: Redis keeps rows in no order; leave it out, or --tier rocksdb")
    return store.scan_from(table, first)


GET_EXAMPLES = """\b
Examples:
  hps store get ctr user 17 42 --config hps.yaml
  hps store get ctr user -9223372036854775808 0xffffffffffffffff \\
      --config hps.yaml --output json
"""


@dataclass(frozen=True, kw_only=True)
class GetOptions(TableOptions):
    keys: list[str] = argument(metavar="KEY")
    """Keys, from -2^63 to 2^64-1; 0x… is hexadecimal."""


def get(options: GetOptions) -> None:
    """Show rows by their keys, in each store, with versions.

    A key with a tombstone is shown as deleted. A store without the table causes a warning. Exit code 1:
    a store is unavailable."""
    import numpy as np

    parsed = [parse_key(text) for text in options.keys]
    configuration, table = options.find()
    keys = key_array(table, parsed)
    typed = dict(
        zip(table.narrow(np.array(parsed)).tolist(), map(as_typed, options.keys), strict=True)
    )
    found, failed = _in_each_store(configuration, options.tier, table, keys)
    order = {key: i for i, key in enumerate(typed)}
    found.sort(key=lambda row: order[row["key"]])
    found = [row | {"key": typed[row["key"]]} for row in found]
    report = {"model": options.model, "table": options.table, "rows": found}
    options.report(report, lambda _report: _show_found(found))
    if failed:
        raise typer.Exit(1)


def _show_found(rows: list[dict[str, Any]]) -> None:
    print_table(
        ("key", "tier", "version", "age", "vector"),
        [_cells(row) for row in rows],
        styles={"deleted": "yellow", "not there": "yellow"},
    )


def _in_each_store(
    configuration: Configuration, tier: TierName | None, table: EmbeddingTable, keys: KeyArray
) -> tuple[list[dict[str, Any]], bool]:
    """Fetch the keys' rows from each store that has the table; also whether a store failed.

    Warns of the other stores; raises NotFound or TierError when no store has the table."""
    found: list[dict[str, Any]] = []
    problems: list[NotFound | TierError] = []
    for name in chosen_tiers(configuration, tier):
        try:
            with open_store(configuration, name) as store:
                store.check(table)
                with work():
                    found += _held(store.name, table, keys.tolist(), store.get(table, keys))
        except (NotFound, TierError) as error:
            problems.append(error)
    failures = [error for error in problems if isinstance(error, TierError)]
    if not found:
        if len(problems) == 1 or failures:
            raise (failures or problems)[0]
        raise NotFound("; ".join(map(str, problems)))
    for problem in problems:
        warn(str(problem))
    return found, bool(failures)


def _held(
    tier: str, table: EmbeddingTable, keys: list[int], held: StoredKeys
) -> list[dict[str, Any]]:
    from hps.tiers.stored_rows import to_vectors

    vectors = to_vectors(table, held.vectors)
    return [
        {
            "key": key,
            "tier": tier,
            "found": bool(held.found[i]),
            "deleted": bool(held.deleted[i]),
            "version": int(held.versions[i]) if held.found[i] or held.deleted[i] else None,
            "vector": vectors[i] if held.found[i] else None,
        }
        for i, key in enumerate(keys)
    ]


def _cells(row: dict[str, Any]) -> list[Any]:
    version = row["version"]
    if version is None:
        return [row["key"], row["tier"], FormattedNumber("-"), FormattedNumber("-"), "not there"]
    text = "deleted" if row["deleted"] else shown_vector(row["vector"])
    return [row["key"], row["tier"], FormattedNumber(version), shown_age(version), text]


PUT_EXAMPLES = """\b
Examples:
  hps store put ctr user 17 --vector 0.1,-0.2,0.3,0.4 --config hps.yaml
  hps store put ctr user 0xff --vector '[0.1, -0.2, 0.3, 0.4]' \\
      --config hps.yaml --tier redis
"""
VersionOption = Annotated[
    str | None,
    typer.Option(
        "--version",
        metavar="VERSION",
        help="Version of the write: a number or a time; default: now.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class PutOptions(TableOptions):
    key: str = argument()
    """The key, from -2^63 to 2^64-1; 0x… is hexadecimal."""
    vector: str = option(metavar="NUMBERS")
    """The row's values."""
    version: VersionOption = None


def put(options: PutOptions) -> None:
    """Write one row, into the lowest store first.

    A newer row is kept (exit code 1). A node that has cached the old row serves it until that is
    evicted."""
    _write(options, [options.key], options.vector)


DEL_EXAMPLES = """\b
Examples:
  hps store del ctr user 17 18 0xff --config hps.yaml
  hps store del ctr user -17 --config hps.yaml --tier redis
"""


@dataclass(frozen=True, kw_only=True)
class DeleteOptions(TableOptions):
    keys: list[str] = argument(metavar="KEY")
    """The keys."""
    version: VersionOption = None


def delete(options: DeleteOptions) -> None:
    """Delete rows, in the lowest store first.

    Older updates do not bring them back. A newer row is kept (exit code 1). HPS's layout has no
    tombstones."""
    _write(options, options.keys)


def _write(options: PutOptions | DeleteOptions, keys: list[str], vector: str | None = None) -> None:
    """Write ``vector`` as the row of each key; without one, delete the rows."""
    import numpy as np

    from hps.updates.version_clock import VersionClock

    version = options.version
    at = VersionClock().now() if version is None else parse_version(version)
    parsed = [parse_key(text) for text in keys]
    configuration, table = options.find()
    row = None if vector is None else parse_vector(vector, table)
    change = _RowChange(table, key_array(table, parsed), row, at)
    written: list[dict[str, Any]] = []
    kept: list[dict[str, Any]] = []
    with open_stores(configuration, options.tier, writing=True) as stores:
        for store in stores:
            store.ready(table)
        # The lowest store first: a store must not get a row that the store below it rejects.
        accepted = np.ones(len(change.keys), bool)
        for store in reversed(stores):
            held, is_newer = _apply(store, change, accepted)
            kept += [each for each, newer in zip(held, is_newer, strict=True) if newer]
            accepted &= ~np.array(is_newer)
            written += held
    done = "Deleted" if row is None else "Written"
    options.report(written, lambda written: _show_written(done, written, kept))
    for each in kept:
        newer = f"version {each['version']}; --version {each['version'] + 1} would replace it"
        warn(f"{each['tier']} keeps what is newer of key {each['key']}: {newer}")
    if kept:
        raise typer.Exit(1)


class _RowChange(NamedTuple):
    """The change of all keys: a row to write, or None for a deletion."""

    table: EmbeddingTable
    keys: KeyArray
    row: VectorArray | None
    version: int


def _apply(
    store: RedisRows | RocksDbRows, change: _RowChange, accepted: NDArray[np.bool_]
) -> tuple[list[dict[str, Any]], list[bool]]:
    """Write the ``accepted`` keys; return the stored rows, and which were kept as newer."""
    import numpy as np

    table, keys = change.table, change.keys[accepted]
    versions = np.full(len(keys), change.version, np.uint64)
    with work():
        if change.row is None:
            store.tier.delete(table, keys, versions)
        else:
            store.tier.insert(table, keys, np.repeat(change.row, len(keys), axis=0), versions)
        held = _held(store.name, table, change.keys.tolist(), store.get(table, change.keys))
    newer = [store.versioned and (each["version"] or 0) > change.version for each in held]
    return held, newer


def _show_written(done: str, written: list[dict[str, Any]], kept: list[dict[str, Any]]) -> None:
    tiers = list(dict.fromkeys(row["tier"] for row in written))
    number = len(written) // len(tiers) - len({row["key"] for row in kept})
    print_line(f"{done}: {plural(number, 'row')} in {' and '.join(tiers)}")
