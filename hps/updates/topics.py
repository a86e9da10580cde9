"""Kafka topics by the tables that they change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from hps.types import EmbeddingTable
from hps.updates.codec import hps_topic


def native_topic(model: str) -> str:
    """The topic of native messages for all tables of ``model``."""
    return f"hps_updates.{model}"


def table_name(table: EmbeddingTable) -> str:
    """The table's name in messages, without a version: updates go to the served one."""
    return f"{table.model}/{table.name}"


class TopicTables:
    """Topics of the tables of served models, and the tables of each topic."""

    def __init__(self, tables: Iterable[EmbeddingTable], models: Callable[[str], bool]) -> None:
        self.tables = {table_name(each): each for each in tables if models(each.model)}
        self._readers: dict[str, list[EmbeddingTable]] = {}
        for table in self.tables.values():
            self._readers.setdefault(native_topic(table.model), []).append(table)
            self._readers.setdefault(hps_topic(table.model, table.name), []).append(table)
        self._prefixes = tuple({hps_topic(table.model, "") for table in self.tables.values()})

    @property
    def names(self) -> Sequence[str]:
        """The topics; they may not exist yet."""
        return list(self._readers)

    def readers(self, topic: str) -> Sequence[EmbeddingTable]:
        return self._readers.get(topic, ())

    def wanted(self, topic: str) -> bool:
        """True if ``topic`` is read; also for an unknown table of these models, to report it."""
        return topic in self._readers or topic.startswith(self._prefixes)
