"""Kafka topics by the tables that they change, and tables by their name in messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from hps.types import EmbeddingTable
from hps.updates.codec import hps_topic
from hps.updates.source import Reason, TableUpdate

_ANY_VERSION = (1 << 64) - 1
NamedTables = Mapping[str, Sequence[EmbeddingTable]]
"""Tables by their name in messages, `model/table`: one for each served version that has the table."""


def native_topic(model: str) -> str:
    """The topic of native messages for all tables of ``model``."""
    return f"hps_updates.{model}"


def table_name(table: EmbeddingTable) -> str:
    """The table's name in messages, without a version: updates go to all served versions."""
    return f"{table.model}/{table.name}"


def by_name(tables: Iterable[EmbeddingTable]) -> dict[str, tuple[EmbeddingTable, ...]]:
    """``tables`` by their name in messages, each once: versions may share a table."""
    named: dict[str, dict[EmbeddingTable, None]] = {}
    for table in tables:
        named.setdefault(table_name(table), {})[table] = None
    return {name: tuple(some) for name, some in named.items()}


def takes(table: EmbeddingTable, update: TableUpdate) -> bool:
    """True if the rows of ``update`` have the shape of ``table``: versions may differ in it."""
    return table.dim == update.changes.dim and update.key_bits in (0, table.key_bits)


def misfit(tables: Sequence[EmbeddingTable], update: TableUpdate) -> Reason | None:
    """Reason why none of ``tables``, those of the name in ``update``, takes it; None if one does."""
    if not tables:
        return Reason.UNKNOWN_TABLE
    return None if any(takes(table, update) for table in tables) else Reason.ROW_SIZE


class ServedTables:
    """Tables of all served versions, also of those that other readers feed, and the networks they may serve.

    ``hold_s``: rows of a newer network than a table's limit wait for as long at most; None: they do not. Any
    thread may read; one at a time may call `set`, and set ``limits``, both of which replace what is read."""

    def __init__(self, tables: Iterable[EmbeddingTable] = (), hold_s: float | None = None) -> None:
        self.by_name: NamedTables = by_name(tables)
        self.hold_s = hold_s
        self.limits: Mapping[EmbeddingTable, int] = {}
        """Highest dense version of rows by table; without a limit, all are applied."""
        self._passed: dict[EmbeddingTable, int] = {}

    def set(self, tables: Iterable[EmbeddingTable]) -> None:
        self.by_name = by_name(tables)

    def limit(self, table: EmbeddingTable) -> int:
        """The highest dense version of rows that ``table`` may get now."""
        if self.hold_s is None or table not in self.limits:
            return _ANY_VERSION
        return max(self.limits[table], self._passed.get(table, 0))

    def let_pass(self, tables: Iterable[EmbeddingTable], dense_version: int) -> None:
        """Apply rows up to ``dense_version`` from now on: they have waited long enough."""
        for table in tables:
            self._passed[table] = max(dense_version, self._passed.get(table, 0))


class TopicTables:
    """Topics of the tables that one reader feeds, and the tables of each topic.

    ``models`` chooses the tables by their model; ``served``: all tables, of which this reader may feed a
    part. ``alone`` False: another reader of the same topics reports messages of unknown tables."""

    def __init__(
        self,
        tables: Iterable[EmbeddingTable],
        models: Callable[[str], bool],
        served: ServedTables | None = None,
        *,
        alone: bool = True,
    ) -> None:
        self.tables: NamedTables = by_name(each for each in tables if models(each.model))
        self._models = models
        self._served = served
        self._readers: dict[str, list[EmbeddingTable]] = {}
        fed = [table for some in self.tables.values() for table in some]
        for table in fed:
            self._readers.setdefault(native_topic(table.model), []).append(table)
            self._readers.setdefault(hps_topic(table.model, table.name), []).append(table)
        models_fed = {hps_topic(table.model, "") for table in fed}
        self._prefixes = tuple(models_fed) if alone else ()

    @property
    def names(self) -> Sequence[str]:
        """The topics; they may not exist yet."""
        return list(self._readers)

    def readers(self, topic: str) -> Sequence[EmbeddingTable]:
        return self._readers.get(topic, ())

    def served(self, name: str) -> Sequence[EmbeddingTable]:
        """All served tables of a name in messages, also those that another reader feeds."""
        fed = self.tables.get(name, ())
        if self._served is None:
            return fed
        others = self._served.by_name.get(name, ())
        return [*fed, *(each for each in others if each not in fed and self._models(each.model))]

    def newer(self, update: TableUpdate) -> list[int]:
        """Numbers of the messages of ``update`` whose network is newer than their tables may serve."""
        limit = self._limit(update.table)
        if limit == _ANY_VERSION:
            return []
        found: list[int] = np.flatnonzero(update.messages["dense_version"] > limit).tolist()
        return found

    def may_apply(self, name: str, dense_version: int) -> bool:
        """True if the tables of this name may get rows of the network ``dense_version``."""
        return dense_version <= self._limit(name)

    def let_pass(self, name: str, dense_version: int) -> None:
        """See `ServedTables.let_pass`."""
        if self._served is not None:
            self._served.let_pass(self.tables.get(name, ()), dense_version)

    @property
    def hold_s(self) -> float:
        """The longest time for which rows wait for their network."""
        return 0.0 if self._served is None or self._served.hold_s is None else self._served.hold_s

    def _limit(self, name: str) -> int:
        served, tables = self._served, self.tables.get(name, ())
        if served is None or served.hold_s is None:
            return _ANY_VERSION
        return min(map(served.limit, tables), default=_ANY_VERSION)

    def wanted(self, topic: str) -> bool:
        """True if ``topic`` is read; also for an unknown table of these models, to report it."""
        return topic in self._readers or (bool(self._prefixes) and topic.startswith(self._prefixes))
