"""Status of a process, its tiers and their tables, for JSON, metrics and the command line."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from hps.errors import TierError
from hps.models.remote.meter import DOWNLOADS
from hps.native import COMPILED
from hps.observability import metric_names as m
from hps.observability.metrics import Metrics
from hps.tiers.base import Tier
from hps.tiers.cpu.cache_reads import CacheReads
from hps.types import EmbeddingTable

Labelled = Iterator[tuple[tuple[str, ...], float]]


@dataclass(slots=True)
class TierStatus:
    """A tier and functions that describe it; none of them waits.

    ``rows`` of a table, and whether that number is ``exact``; ``capacity`` of a table in rows, None if
    unbounded; ``state`` of its circuit breaker; ``size`` of a table in bytes, None if unknown; other
    ``facts``, ready for JSON."""

    tier: Tier
    rows: Callable[[EmbeddingTable], int]
    capacity: Callable[[EmbeddingTable], int | None] = lambda _table: None
    state: Callable[[], str] = lambda: "closed"
    size: Callable[[EmbeddingTable], int | None] = lambda _table: None
    facts: Callable[[], Mapping[str, Any]] = dict
    exact: Callable[[EmbeddingTable], bool] = lambda _table: True

    def known_rows(self, table: EmbeddingTable) -> int | None:
        """``rows``, or None if the tier fails: status is most wanted when one does."""
        try:
            return self.rows(table)
        except TierError:
            return None

    def known_exact(self, table: EmbeddingTable) -> bool:
        """``exact``, for the number of `known_rows`."""
        try:
            return self.exact(table)
        except TierError:
            return True

    def describe(self) -> dict[str, Any]:
        """The tier without its tables, ready for JSON."""
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
    """A table and its state in each of ``tiers``, ready for JSON."""

    def each(read: Callable[[TierStatus], int | None]) -> dict[str, int]:
        answers = {entry.tier.info.name: read(entry) for entry in tiers}
        return {name: answer for name, answer in answers.items() if answer is not None}

    return {
        "name": table.name,
        "dim": table.dim,
        "dtype": table.dtype.name,
        "row_format": table.row_format.name,
        "miss_policy": table.miss.kind,
        "rows": each(lambda entry: entry.known_rows(table)),
        "rows_approximate": [t.tier.info.name for t in tiers if not t.known_exact(table)],
        "capacity_rows": each(lambda entry: entry.capacity(table)),
        "bytes": each(lambda entry: entry.size(table)),
    }


class NamedVersion(Protocol):
    """A model's version."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> int: ...


def publish_process(metrics: Metrics, versions: Callable[[], Iterable[NamedVersion]]) -> None:
    """Register gauges of the build, the uptime and the served ``versions``, read at a scrape."""
    from hps import __version__

    opened = time.monotonic()
    metrics.gauge(m.BUILD_INFO, lambda: 1, __version__, "on" if COMPILED else "off")
    metrics.gauge(m.UPTIME, lambda: time.monotonic() - opened)
    metrics.gauges(m.MODEL_VERSION, lambda: [((each.name,), each.version) for each in versions()])
    metrics.gauges(m.DOWNLOAD_BYTES, DOWNLOADS.bytes)
    metrics.gauges(m.DOWNLOAD_SECONDS, DOWNLOADS.seconds)
    metrics.gauges(m.DOWNLOAD_FAILURES, DOWNLOADS.failures)


def publish_tiers(
    metrics: Metrics,
    tiers: Sequence[TierStatus],
    tables: Callable[[], Iterable[EmbeddingTable]],
) -> None:
    """Register gauges of each tier's tables and facts, which are read at a scrape."""

    def of_tables(read: Callable[[TierStatus, EmbeddingTable], float | None]) -> Labelled:
        for entry in tiers:
            for table in tables():
                if (known := read(entry, table)) is not None:
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
    """Hottest keys of ``table`` in each cache of ``tiers``, with scores from 255 down, ready for JSON.

    Scans whole caches."""
    for entry in tiers:
        if isinstance(entry.tier, CacheReads):
            keys, scores = entry.tier.top_k(table, limit)
            yield {"keys": keys.tolist(), "scores": scores.tolist()}
