"""Which of Kafka's topics change which tables."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from hps.types import EmbeddingTable
from hps.updates.codec import hps_topic


def native_topic(model: str) -> str:
    """The topic of our format's messages for all tables of ``model``."""
    return f"hps_updates.{model}"


def table_name(table: EmbeddingTable) -> str:
    """What messages and sources call it: updates go to the version that is served."""
    return f"{table.model}/{table.name}"


class Topics:
    """Which topics change which tables."""

    def __init__(self, tables: Iterable[EmbeddingTable], models: Callable[[str], bool]) -> None:
        self.tables = {table_name(each): each for each in tables if models(each.model)}
        self._readers: dict[str, list[EmbeddingTable]] = {}
        for table in self.tables.values():
            self._readers.setdefault(native_topic(table.model), []).append(table)
            self._readers.setdefault(hps_topic(table.model, table.name), []).append(table)

    @property
    def names(self) -> Sequence[str]:
        """Those topics; they may not exist yet."""
        return list(self._readers)

    def readers(self, topic: str) -> Sequence[EmbeddingTable]:
        return self._readers.get(topic, ())

    def patterns(self) -> list[str]:
        """One for each model: its topics may not exist yet, and a table nobody knows is to be noticed."""
        models = sorted({table.model for table in self.tables.values()})
        return [f"^{re.escape(native_topic(m))}$" for m in models] + [
            f"^{re.escape(hps_topic(m, ''))}.+$" for m in models
        ]
