"""The stores of a node as row sources."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import astuple
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hps.config.store_settings import RedisSettings
from hps.errors import NotFound
from hps.rows.base import BLOCK, StoredKeys, TableRows, blocks, fetch
from hps.tiers.base import TableName
from hps.tiers.mapped import MappedTier
from hps.tiers.rocksdb import LoadRecord, RocksDbTier
from hps.tiers.rocksdb.database_options import existing_families
from hps.tiers.rocksdb.layout import family_name
from hps.tiers.row_values import Layout, RowValueCodec
from hps.types import EmbeddingTable, KeyArray, VersionArray

if TYPE_CHECKING:
    from hps.tiers.redis import RedisTier

_SCANNED = 2000  # entries per HSCAN
_PLACES = 16
_FAR = [sign << bits for bits in range(2, 63, 4) for sign in (1, -1)]
_DROPPED = 16
_NAME = r"[\w-]+"
_FAMILY = re.compile(rf"(?P<model>{_NAME})/(?P<version>\d+)/(?P<name>{_NAME})")
_HPS_FAMILY = re.compile(rf"hps_et\.(?P<model>{_NAME})\.(?P<name>{_NAME})(?:@(?P<version>\d+))?")


class TierRows:
    """The common part of `RocksDbRows` and `RedisRows`. Raises TierError."""

    uniform = False

    def __init__(self, tier: RocksDbTier | RedisTier) -> None:
        self._tier = tier
        self.name = tier.info.name
        self.versioned = tier.layout == "native"

    def entries(self, table: EmbeddingTable) -> int:
        return self._tier.rows(table)

    def other_layout(self, table: EmbeddingTable) -> Layout | None:
        raise NotImplementedError

    def _absent(self, table: EmbeddingTable, where: str) -> NotFound:
        layout, other = self._tier.layout, self.other_layout(table)
        remedy = "`hps store ls` lists the tables, `hps store load` loads a model's files"
        if other:
            remedy = f"it exists in the {other} layout: set tiers.{self.name}.layout to that"
        return NotFound(f"{where} holds no table {table.id} in the {layout} layout; {remedy}")

    def get(self, table: EmbeddingTable, keys: KeyArray) -> StoredKeys:
        return fetch(self._tier, table, keys)

    def missing_keys(self, table: EmbeddingTable, keys: Iterable[KeyArray]) -> Iterator[KeyArray]:
        for some in blocks(keys, BLOCK):
            yield some[~self.get(table, some).found]


class RocksDbRows(TierRows):
    def __init__(self, tier: RocksDbTier) -> None:
        super().__init__(tier)
        self.tier = tier

    def tables(self) -> list[TableName]:
        """Return every table in this layout, configured or not."""
        found = map(partial(parse_family, layout=self.tier.layout), self._families())
        return sorted((name for name in found if name), key=astuple)

    def check(self, table: EmbeddingTable) -> None:
        """Raise NotFound if the table does not exist, TierError if its dim or dtype differs."""
        if family_name(table, self.tier.layout) not in self._families():
            raise self._absent(table, str(self.tier.path))
        self.tier.check(table)

    def ready(self, table: EmbeddingTable, *, create: bool = False) -> None:
        """Check the table before a write.

        ``create``: create a missing table. Without it, a missing table raises NotFound: its files must
        be loaded first."""
        if create and family_name(table, self.tier.layout) not in self._families():
            if self.other_layout(table):
                raise self._absent(table, str(self.tier.path))
            self.tier.open_tables([table])
        self.check(table)

    def other_layout(self, table: EmbeddingTable) -> Layout | None:
        """Return the other layout if the table exists in that one, else None."""
        other = _other(self.tier.layout)
        return other if family_name(table, other) in self._families() else None

    def _families(self) -> list[str]:
        return existing_families(self.tier.path)

    def record(self, name: TableName) -> LoadRecord | None:
        """Return the load record of a table, configured or not."""
        return self.tier.loaded(placeholder_table(name, 1))

    def measure(self, table: EmbeddingTable) -> tuple[int, int, bool]:
        """Return the number of rows, their bytes, and whether the number is exact."""
        rows = self.tier.rows(table)
        width = 8 if self.versioned else table.key_bits // 8
        each = width + RowValueCodec(table, self.tier.layout).value_bytes
        return rows, rows * each, self.tier.rows_exact(table)

    def tombstones(self, table: EmbeddingTable) -> Iterator[TableRows]:
        return _tombstones(table, self.tier.tombstones(table))

    def erase(self, names: list[TableName]) -> None:
        """Remove tables, a few per call: a call with many would leave empty column families."""
        for start in range(0, len(names), _DROPPED):
            some = names[start : start + _DROPPED]
            self.tier.drop(*(placeholder_table(name, 1) for name in some))

    def scan(self, table: EmbeddingTable) -> Iterator[TableRows]:
        """Yield all rows in the order of the stored keys."""
        # Large blocks: neighbours in the HPS layout's order are scattered over a native database.
        return _joined((TableRows(*some) for some in self.tier.scan(table)), BLOCK)

    def scan_from(self, table: EmbeddingTable, key: int) -> Iterator[TableRows]:
        """Yield rows like `scan`, from ``key``, or the next existing key, on."""
        return (TableRows(*some) for some in self.tier.scan(table, start=key))

    def sample(self, table: EmbeddingTable, keys: KeyArray) -> Iterator[TableRows]:
        """Yield runs of rows that start at some of the ``keys``, far apart."""
        if isinstance(self.tier, MappedTier) and self.tier.is_mapped(table):
            yield self.get(table, keys).rows(keys)  # a scan would sort all keys of the file
            return
        seen = SeenKeys()
        run = max(1, len(keys) // _PLACES)
        for start in [*keys[::run].tolist(), *_FAR]:
            some = next(self.tier.scan(table, start=start), None)
            if some is not None:
                rows = TableRows(*some).at(slice(run))
                yield rows.at(seen.fresh(rows.keys))


class RedisRows(TierRows):
    """The rows of a Redis. ``settings``: those of ``tier``."""

    def __init__(self, tier: RedisTier, settings: RedisSettings) -> None:
        super().__init__(tier)
        self.tier = tier
        self._settings = settings
        self._there: set[TableName] | None = None

    def tables(self) -> list[TableName]:
        """Return every table in this layout, configured or not."""
        return self.tier.find_tables()

    def check(self, table: EmbeddingTable) -> None:
        """Raise NotFound if the table does not exist, TierError if it differs or Redis is unavailable.

        Writes nothing."""
        if self._there is None:
            self._there = set(self.tables())
        if table_name_in(table, self.tier.layout) not in self._there:
            raise self._absent(table, f"Redis at {', '.join(self._settings.addresses)}")
        self.tier.check(table)

    def ready(self, table: EmbeddingTable, *, create: bool = False) -> None:
        """Check the table before a write, which may create it."""
        self.tier.check(table)

    def other_layout(self, table: EmbeddingTable) -> Layout | None:
        """Return the other layout if the table exists in that one, else None."""
        from hps.tiers.redis import RedisTier

        other = _other(self.tier.layout)
        with closing(RedisTier(self._settings.model_copy(update={"layout": other}))) as tier:
            return other if table_name_in(table, other) in tier.find_tables(table.model) else None

    def record(self, name: TableName) -> None:
        """Return None: Redis keeps no load record."""

    def measure(self, table: EmbeddingTable) -> tuple[int, int, bool]:
        """Return the number of entries, Redis's estimate of their bytes, and whether all entries are rows."""
        usage = self.tier.usage(table)
        return usage.entries, usage.bytes, not self.versioned

    def scan(self, table: EmbeddingTable) -> Iterator[TableRows]:
        """Yield all rows, unordered."""
        seen = SeenKeys()
        parts = (TableRows(*some) for some in self.tier.scan(table, _SCANNED))
        for rows in _joined(parts, BLOCK // 2):
            yield rows.at(seen.fresh(rows.keys))

    def tombstones(self, table: EmbeddingTable) -> Iterator[TableRows]:
        seen = SeenKeys()
        for rows in _tombstones(table, self.tier.tombstones(table, _SCANNED)):
            yield rows.at(seen.fresh(rows.keys))

    def erase(self, names: list[TableName]) -> None:
        for name in names:
            self.tier.erase(name.model, name.version, name.name)

    def sample(self, table: EmbeddingTable, keys: KeyArray) -> Iterator[TableRows]:
        """Yield the first rows of a scan: Redis orders them by the keys' hash, so they are random."""
        left = len(keys)
        for part in self.tier.scan(table, _SCANNED):
            rows = TableRows(*part)
            yield rows.at(np.arange(min(left, len(rows.keys))))
            left -= len(rows.keys)
            if left <= 0:
                break


def placeholder_table(name: TableName, dim: int) -> EmbeddingTable:
    """Make a table object for a table that is not configured, to count or erase its rows."""
    return EmbeddingTable.make(
        name.name, dim, model=name.model, version=name.version, hps_version=name.version
    )


def _other(layout: Layout) -> Layout:
    return "native" if layout == "hps" else "hps"


def table_name_in(table: EmbeddingTable, layout: Layout) -> TableName:
    """Return the name of a table in a layout; HPS's own names have version 0."""
    version = table.hps_version if layout == "hps" else table.version
    return TableName(table.model, version, table.name)


def parse_family(family: str, layout: Layout) -> TableName | None:
    """Return the table of a column family; None if the family is no table's."""
    pattern = _HPS_FAMILY if layout == "hps" else _FAMILY
    found = pattern.fullmatch(family)
    if found is None:
        return None
    return TableName(found["model"], int(found["version"] or 0), found["name"])


def _joined(parts: Iterable[TableRows], size: int) -> Iterator[TableRows]:
    """Yield the same rows in blocks of ``size`` or slightly more."""
    waiting: list[TableRows] = []
    n = 0
    for part in parts:
        waiting.append(part)
        n += len(part.keys)
        if n >= size:
            yield TableRows(*map(np.concatenate, zip(*waiting, strict=True)))
            waiting, n = [], 0
    if n:
        yield TableRows(*map(np.concatenate, zip(*waiting, strict=True)))


def _tombstones(
    table: EmbeddingTable, parts: Iterable[tuple[KeyArray, VersionArray]]
) -> Iterator[TableRows]:
    for keys, versions in parts:
        yield TableRows(keys, np.zeros((len(keys), table.row_width), table.row_dtype), versions)


class SeenKeys:
    """Set of the keys of a scan: a server that resizes a hash may repeat some. 8 bytes per key."""

    def __init__(self) -> None:
        self._sorted: list[NDArray[Any]] = []

    def fresh(self, keys: KeyArray) -> NDArray[np.bool_]:
        """Add ``keys (n,)``; return a mask of those that are new."""
        new = np.zeros(len(keys), bool)
        new[np.unique(keys, return_index=True)[1]] = True
        for known in self._sorted:
            at = np.minimum(np.searchsorted(known, keys), len(known) - 1)
            new &= known[at] != keys
        if new.any():
            self._sorted.append(np.sort(keys[new]))
        # Only sets of similar size are merged: so there are few sets, and each key is sorted only a few
        # times.
        while len(self._sorted) > 1 and len(self._sorted[-1]) * 2 > len(self._sorted[-2]):
            last = self._sorted.pop()
            self._sorted[-1] = np.sort(np.concatenate([self._sorted[-1], last]), kind="stable")
        return new
