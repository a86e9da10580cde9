"""``hps store scan|get|put|del``: rows of one table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from hps.cli.options import SetOption
from hps.cli.store_open import (
    ConfigFile,
    ModelArgument,
    OneTierOption,
    TableArgument,
    TierName,
    TierOption,
    chosen_tiers,
    open_models,
    open_store,
    open_stores,
    read_config,
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
from hps.tools.output import (
    FormattedNumber,
    Output,
    OutputFormat,
    plural,
    print_json,
    print_line,
    print_table,
    warn,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hps.config import Configuration
    from hps.rows.base import StoredKeys, TableRows
    from hps.rows.tiers import RedisRows, RocksDbRows
    from hps.types import EmbeddingTable, KeyArray

SCAN_EXAMPLES = """\b
Examples:
  hps store scan ctr user --config hps.yaml
  hps store scan ctr user --config hps.yaml --from -100 --limit 1000 -o json
  hps store scan ctr user --config hps.yaml --tier redis
"""


def scan(
    model: ModelArgument,
    table: TableArgument,
    config: ConfigFile,
    tier: OneTierOption = None,
    start: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="KEY", help="The first key; RocksDB only: Redis has no order."
        ),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="Rows at most.")] = 20,
    overrides: SetOption = None,
    output: Output = OutputFormat.table,
) -> None:
    """Show the rows of a table, in the store's own order.

    RocksDB keeps rows by signed key (in HPS's layout by the key's little-endian bytes).
    """
    first = None if start is None else parse_key(start)
    configuration = read_config(config, overrides)
    chosen = open_models(configuration).one(model, table)
    with open_store(configuration, tier) as store:
        store.check(chosen)
        rows: list[dict[str, Any]] = []
        with work():
            for some in _scanned(store, chosen, first):
                left = limit - len(rows)
                each = zip(some.keys[:left], some.versions, some.vectors, strict=False)
                rows += [{"key": k, "version": v, "vector": row} for k, v, row in each]
                if len(rows) == limit:
                    break
    if output is OutputFormat.json:
        print_json({"model": model, "table": table, "tier": store.name, "rows": rows})
        return
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


def get(
    model: ModelArgument,
    table: TableArgument,
    keys: Annotated[
        list[str],
        typer.Argument(help="Keys, from -2^63 to 2^64-1; 0x… is hexadecimal.", metavar="KEY"),
    ],
    config: ConfigFile,
    tier: TierOption = None,
    overrides: SetOption = None,
    output: Output = OutputFormat.table,
) -> None:
    """Show rows by their keys, in each store, with versions.

    A key of which a store remembers the deletion is shown as deleted. A store without the table is a warning;
    exit code 1 when a store cannot be asked.
    """
    import numpy as np

    parsed = [parse_key(text) for text in keys]
    configuration = read_config(config, overrides)
    chosen = open_models(configuration).one(model, table)
    asked = key_array(chosen, parsed)
    typed = dict(zip(chosen.narrow(np.array(parsed)).tolist(), map(as_typed, keys), strict=True))
    found, failed = _in_each_store(configuration, tier, chosen, asked)
    order = {key: i for i, key in enumerate(typed)}
    found.sort(key=lambda row: order[row["key"]])
    found = [row | {"key": typed[row["key"]]} for row in found]
    if output is OutputFormat.json:
        print_json({"model": model, "table": table, "rows": found})
    else:
        print_table(
            ("key", "tier", "version", "age", "vector"),
            [_cells(row) for row in found],
            styles={"deleted": "yellow", "not there": "yellow"},
        )
    if failed:
        raise typer.Exit(1)


def _in_each_store(
    configuration: Configuration, tier: TierName | None, table: EmbeddingTable, keys: KeyArray
) -> tuple[list[dict[str, Any]], bool]:
    """The keys' rows in each store that has the table, and whether a store could not be asked. Warns of the
    other stores; raises NotFound or TierError when no store has the table."""
    found: list[dict[str, Any]] = []
    problems: list[NotFound | TierError] = []
    for name in chosen_tiers(configuration, tier):
        try:
            with open_store(configuration, name) as store:
                store.check(table)
                with work():
                    found += _held(store.name, keys.tolist(), store.get(table, keys))
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


def _held(tier: str, keys: list[int], held: StoredKeys) -> list[dict[str, Any]]:
    return [
        {
            "key": key,
            "tier": tier,
            "found": bool(held.found[i]),
            "deleted": bool(held.deleted[i]),
            "version": int(held.versions[i]) if held.found[i] or held.deleted[i] else None,
            "vector": held.vectors[i] if held.found[i] else None,
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
    typer.Option("--version", metavar="VERSION", help="A version or a time; default: now."),
]


def put(
    model: ModelArgument,
    table: TableArgument,
    key: Annotated[str, typer.Argument(help="The key, from -2^63 to 2^64-1; 0x… is hexadecimal.")],
    vector: Annotated[str, typer.Option("--vector", metavar="NUMBERS", help="The row's values.")],
    config: ConfigFile,
    tier: TierOption = None,
    version: VersionOption = None,
    overrides: SetOption = None,
    output: Output = OutputFormat.table,
) -> None:
    """Write one row, the lowest store first.

    A newer row is kept (exit code 1). A node that has the old row in its cache serves that until the
    row leaves the cache.
    """
    _write(model, table, [key], vector, config, tier, version, overrides, output)


DEL_EXAMPLES = """\b
Examples:
  hps store del ctr user 17 18 0xff --config hps.yaml
  hps store del ctr user -17 --config hps.yaml --tier redis
"""


def delete(
    model: ModelArgument,
    table: TableArgument,
    keys: Annotated[list[str], typer.Argument(help="The keys.", metavar="KEY")],
    config: ConfigFile,
    tier: TierOption = None,
    version: VersionOption = None,
    overrides: SetOption = None,
    output: Output = OutputFormat.table,
) -> None:
    """Delete rows, in the lowest store first.

    Older updates do not bring them back. A newer row is kept (exit code 1). HPS's layout keeps no
    trace of a deletion.
    """
    _write(model, table, keys, None, config, tier, version, overrides, output)


def _write(
    model: str,
    table: str,
    keys: list[str],
    vector: str | None,
    config: ConfigFile,
    tier: TierName | None,
    version: str | None,
    overrides: list[str] | None,
    output: OutputFormat,
) -> None:
    import numpy as np

    from hps.updates.version_clock import VersionClock

    at = VersionClock().now() if version is None else parse_version(version)
    parsed = [parse_key(text) for text in keys]
    configuration = read_config(config, overrides)
    chosen = open_models(configuration).one(model, table)
    row = None if vector is None else parse_vector(vector, chosen)
    asked = key_array(chosen, parsed)
    versions = np.full(len(asked), at, np.uint64)
    # A store above must not get what the one below refuses: it is asked first.
    taken = np.ones(len(asked), bool)
    found: list[dict[str, Any]] = []
    kept: list[dict[str, Any]] = []
    with open_stores(configuration, tier, writing=True) as stores:
        for store in stores:
            store.ready(chosen)
        for store in reversed(stores):
            with work():
                if row is None:
                    store.tier.delete(chosen, asked[taken], versions[taken])
                else:
                    rows = np.repeat(row, np.count_nonzero(taken), axis=0)
                    store.tier.insert(chosen, asked[taken], rows, versions[taken])
                held = _held(store.name, asked.tolist(), store.get(chosen, asked))
                newer = [store.versioned and (each["version"] or 0) > at for each in held]
                kept += [each for each, is_newer in zip(held, newer, strict=True) if is_newer]
                taken &= ~np.array(newer)
                found += held
    _tell_written(found, kept, deleting=row is None, output=output)


def _tell_written(
    found: list[dict[str, Any]],
    kept: list[dict[str, Any]],
    *,
    deleting: bool,
    output: OutputFormat,
) -> None:
    if output is OutputFormat.json:
        print_json(found)
    else:
        done = "Deleted" if deleting else "Written"
        tiers = list(dict.fromkeys(row["tier"] for row in found))
        number = len(found) // len(tiers) - len({row["key"] for row in kept})
        print_line(f"{done}: {plural(number, 'row')} in {' and '.join(tiers)}")
    for row in kept:
        newer = f"version {row['version']}; --version {row['version'] + 1} would replace it"
        warn(f"{row['tier']} keeps what is newer of key {row['key']}: {newer}")
    if kept:
        raise typer.Exit(1)
