"""Which of Kafka's topics change which tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from hps.types import EmbeddingTable
from hps.updates.codec import hps_topic


def native_topic(model: str) -> str:
    """The topic of our format's messages for all tables of ``model``."""
    return f"hps_updates.{model}"


def table_name(table: EmbeddingTable) -> str:
    """What messages and sources call it: updates go to the version that is served."""
    return f"{table.model}/{table.name}"


class TopicTables:
    """Which topics change which tables."""

    def __init__(self, tables: Iterable[EmbeddingTable], models: Callable[[str], bool]) -> None:
        self.tables = {table_name(each): each for each in tables if models(each.model)}
        self._readers: dict[str, list[EmbeddingTable]] = {}
        for table in self.tables.values():
            self._readers.setdefault(native_topic(table.model), []).append(table)
            self._readers.setdefault(hps_topic(table.model, table.name), []).append(table)
        self._prefixes = tuple({hps_topic(table.model, "") for table in self.tables.values()})

    @property
    def names(self) -> Sequence[str]:
        """Those topics; they may not exist yet."""
        return list(self._readers)

    def readers(self, topic: str) -> Sequence[EmbeddingTable]:
        return self._readers.get(topic, ())

    def wanted(self, topic: str) -> bool:
        """Whether ``topic`` is read: those of a table of the models that is not known, too, to be noticed."""
        return topic in self._readers or topic.startswith(self._prefixes)
