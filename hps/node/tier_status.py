"""What can be said of a node's tiers and their tables, for a status, for metrics and for the command line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hps.errors import TierError
from hps.observability import metric_names as m
from hps.observability.metrics import Metrics
from hps.tiers.base import Tier
from hps.tiers.cpu.cache_reads import CacheReads
from hps.types import EmbeddingTable

Labelled = Iterator[tuple[tuple[str, ...], float]]


@dataclass(slots=True)
class TierStatus:
    """A tier and what can be said of it: its ``rows`` of a table, and whether that is ``exact``; its
    ``capacity`` of a table in rows when it is bounded, the ``state`` of its circuit when it is guarded, the
    ``size`` of a table in bytes where it knows that, and further ``facts``, ready for JSON. None of them
    waits."""

    tier: Tier
    rows: Callable[[EmbeddingTable], int]
    capacity: Callable[[EmbeddingTable], int | None] = lambda _table: None
    state: Callable[[], str] = lambda: "closed"
    size: Callable[[EmbeddingTable], int | None] = lambda _table: None
    facts: Callable[[], Mapping[str, Any]] = dict
    exact: Callable[[EmbeddingTable], bool] = lambda _table: True

    def known_rows(self, table: EmbeddingTable) -> int | None:
        """``rows``, or None when a broken tier cannot say: a status is asked for most when one is."""
        try:
            return self.rows(table)
        except TierError:
            return None

    def known_exact(self, table: EmbeddingTable) -> bool:
        """``exact``, of what `known_rows` says."""
        try:
            return self.exact(table)
        except TierError:
            return True

    def describe(self) -> dict[str, Any]:
        """The tier as a whole, ready for JSON."""
        info = self.tier.info
        return {
            "name": info.name,
            "kind": "cache" if info.cache else "store",
            "volatile": info.volatile,
            "shared": info.shared,
            "circuit": self.state(),
            **self.facts(),
        }


def describe_table(table: EmbeddingTable, tiers: Sequence[TierStatus]) -> dict[str, Any]:
    """A table and what each of ``tiers`` says of it, ready for JSON."""

    def each(said: Callable[[TierStatus], int | None]) -> dict[str, int]:
        answers = {entry.tier.info.name: said(entry) for entry in tiers}
        return {name: answer for name, answer in answers.items() if answer is not None}

    return {
        "name": table.name,
        "dim": table.dim,
        "dtype": table.dtype.name,
        "miss_policy": table.miss.kind,
        "rows": each(lambda entry: entry.known_rows(table)),
        "rows_approximate": [t.tier.info.name for t in tiers if not t.known_exact(table)],
        "capacity_rows": each(lambda entry: entry.capacity(table)),
        "bytes": each(lambda entry: entry.size(table)),
    }


def publish_tiers(
    metrics: Metrics,
    tiers: Sequence[TierStatus],
    tables: Callable[[], Iterable[EmbeddingTable]],
) -> None:
    """Gauges of what each tier holds of each table and of the numbers it states, read when metrics are asked
    for."""

    def of_tables(said: Callable[[TierStatus, EmbeddingTable], float | None]) -> Labelled:
        for entry in tiers:
            for table in tables():
                if (known := said(entry, table)) is not None:
                    labels = entry.tier.info.name, table.model, str(table.version), table.name
                    yield labels, known

    def facts() -> Labelled:
        for entry in tiers:
            for name, value in entry.facts().items():
                if isinstance(value, int | float):
                    yield (entry.tier.info.name, name), float(value)

    def available() -> Labelled:
        for entry in tiers:
            yield (entry.tier.info.name,), entry.state() == "closed"

    metrics.gauges(m.TABLE_ROWS, partial(of_tables, TierStatus.known_rows))
    metrics.gauges(m.TABLE_CAPACITY, partial(of_tables, lambda entry, table: entry.capacity(table)))
    metrics.gauges(m.TABLE_BYTES, partial(of_tables, lambda entry, table: entry.size(table)))
    metrics.gauges(m.TIER_AVAILABLE, available)
    metrics.gauges(m.TIER_FACT, facts)


def hot_keys(
    table: EmbeddingTable, tiers: Sequence[TierStatus], limit: int
) -> Iterator[dict[str, Any]]:
    """Its hottest keys in each of ``tiers`` that ranks them, with their scores from 255 down, ready for JSON.
    Looks through whole caches."""
    for entry in tiers:
        if isinstance(entry.tier, CacheReads):
            keys, scores = entry.tier.top_k(table, limit)
            yield {"keys": keys.tolist(), "scores": scores.tolist()}
