"""Kafka topics by the tables that they change, and tables by their name in messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from hps.types import EmbeddingTable
from hps.updates.codec import hps_topic
from hps.updates.source import Reason, TableUpdate

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
    return table.dim == update.changes.vectors.shape[1] and update.key_bits in (0, table.key_bits)


def misfit(tables: Sequence[EmbeddingTable], update: TableUpdate) -> Reason | None:
    """Reason why none of ``tables``, those of the name in ``update``, takes it; None if one does."""
    if not tables:
        return Reason.UNKNOWN_TABLE
    return None if any(takes(table, update) for table in tables) else Reason.ROW_SIZE


class ServedTables:
    """Tables of all served versions, also of those that other readers feed.

    Any thread may read ``by_name``; `set` replaces it."""

    def __init__(self, tables: Iterable[EmbeddingTable] = ()) -> None:
        self.by_name: NamedTables = by_name(tables)

    def set(self, tables: Iterable[EmbeddingTable]) -> None:
        self.by_name = by_name(tables)


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

    def wanted(self, topic: str) -> bool:
        """True if ``topic`` is read; also for an unknown table of these models, to report it."""
        return topic in self._readers or (bool(self._prefixes) and topic.startswith(self._prefixes))
