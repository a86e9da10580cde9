"""Update streams of a node: the sources that feed its stores, their control and status.

There are two kinds of readers. The node's own reads everything and writes RocksDB and the caches; its group
has no other member. The shared one writes Redis, once for all nodes, so its group is the same everywhere:
`updates.kafka.shared_writer` says whether nodes or `hps ingest` are its members, who share the partitions."""

from __future__ import annotations

import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from hps.config.update_settings import NODE, DirectorySettings, KafkaSettings
from hps.errors import BadRequest, NotFound, Unavailable
from hps.node.stream_lag import arrived_lately, has_caught_up
from hps.node.stream_readers import StreamReaders, UpdateReader, Watermarks
from hps.observability import metric_names as m
from hps.observability.meters import TrainedWith, UpdateMeter
from hps.observability.metrics import Metrics
from hps.periodic import PeriodicThread
from hps.tiers.positions import TopicPartition
from hps.types import EmbeddingTable, KeyArray, VectorArray
from hps.updates.arrival_times import POLL_EVERY_S
from hps.updates.cache_writer import CacheWriter
from hps.updates.direct_writer import DirectWriter
from hps.updates.followed_store import FollowedStore
from hps.updates.freshness import Freshness
from hps.updates.kafka.source import KafkaSource
from hps.updates.source import Reason
from hps.updates.stream_positions import FedStore
from hps.updates.topics import native_topic

Limited = tuple[Freshness, Collection[EmbeddingTable]]
"""The freshness of a served model, and its tables."""


log = logging.getLogger(__name__)
_REPLAY_WAIT_S = 5.0


class UpdateStreams:
    """Update streams of one node. Any thread may call it; ``resources`` closes it."""

    def __init__(
        self,
        tables: Iterable[EmbeddingTable],
        metrics: Metrics,
        resources: ExitStack,
        watermarks: Watermarks | None = None,
        hold_s: float | None = None,
    ) -> None:
        """``hold_s``: how long rows of a network that is not live wait at most; None: they do not."""
        self._resources = resources
        self._meter = UpdateMeter(metrics)
        self._readers = StreamReaders(tables, watermarks or {}, metrics, resources, hold_s)
        self._direct: DirectWriter | None = None
        self._changing = threading.Lock()  # held while readers start and end
        # The instant up to which each table had all updates when the readers last restarted. Some of these
        # tables get no updates any more, but served until other versions are ready.
        self._current_s: dict[EmbeddingTable, float] = {}
        for reason in Reason:
            if reason.fault:  # now: else an alert misses the first increment
                metrics.counter(m.UPDATE_DEAD, reason.name.lower())
        metrics.gauges(m.UPDATE_LAG, self._lags)
        metrics.gauges(m.UPDATE_HELD, self._held)
        metrics.gauges(m.UPDATE_AGE, self._ages)
        metrics.gauges(m.UPDATE_PAUSED, self._each(lambda stream: stream.thread.paused))
        metrics.gauges(m.UPDATE_PROBLEM, self._each(lambda stream: bool(stream.problem)))

    def read_kafka(
        self,
        settings: KafkaSettings,
        stores: Sequence[FedStore],
        caches: CacheWriter | None,
        followed: FollowedStore | None = None,
    ) -> None:
        """Read every partition, for stores of the node; see `StreamReaders.read_kafka`."""
        self._readers.read_kafka(settings, node_group(settings), stores, caches, followed=followed)

    def share_kafka(self, settings: KafkaSettings, stores: Sequence[FedStore]) -> None:
        """Read a share of the partitions, for stores that nodes share, as a member of their group."""
        group, member = settings.shared_group, node_group(settings)
        self._readers.read_kafka(settings, group, stores, None, member=member)

    def read_folder(
        self, settings: DirectorySettings, stores: Sequence[FedStore], caches: CacheWriter
    ) -> None:
        """See `StreamReaders.read_folder`."""
        self._readers.read_folder(settings, stores, caches)

    def replay_files(
        self,
        made_ms: Mapping[EmbeddingTable, int],
        closed: threading.Event | None = None,
        wait_s: float = math.inf,
    ) -> None:
        """Apply the applied update files that tables miss; see `AppliedFiles.replay`."""
        if (applied := self._readers.applied_files) is not None:
            applied.replay(made_ms, closed, wait_s)

    def replay_files_later(self, made_ms: Mapping[EmbeddingTable, int]) -> None:
        """Like `replay_files` at a start; while a store fails, it is tried again on a thread."""
        closed = threading.Event()

        def replay() -> bool:
            try:
                self.replay_files(made_ms, closed, _REPLAY_WAIT_S)
            except Unavailable as error:
                log.warning("applied update files are not replayed yet: %s", error)
                return True
            return False

        if replay():
            thread = PeriodicThread(replay, _REPLAY_WAIT_S, "hps-replay-files", idle_rounds=1)
            self._resources.callback(thread.close)
            self._resources.callback(closed.set)  # runs first
            thread.start()

    def set_tables(self, tables: Iterable[EmbeddingTable], watermarks: Watermarks) -> None:
        """Feed ``tables``, those of all served versions; see `StreamReaders.set_tables`.

        Rows of tables without a reader age from then on."""
        updated = list(tables)
        with self._changing:
            self._note_ages(updated)
            self._readers.set_tables(updated, watermarks)

    def limit_networks(self, limits: Mapping[EmbeddingTable, int]) -> None:
        """Set the highest dense version of the rows that each table may get; see `ServedTables`."""
        self._readers.served.limits = limits

    def trained_with(self, tables: Iterable[EmbeddingTable]) -> TrainedWith:
        """The newest network and step of the rows that ``tables`` got from streams; 0 for none."""
        found = [self._readers.networks.get(table, (0, 0)) for table in tables]
        networks, steps = zip(*found, strict=True) if found else ((0,), (0,))
        return max(networks), max(steps)

    def _note_ages(self, updated: Iterable[EmbeddingTable] = ()) -> None:
        """Record up to when each table has all updates, before its reader ends."""
        now = time.time()
        self._current_s = {
            table: now - self.age_s(table)
            for table in {*self._readers.tables, *updated}
            if table in self._current_s or self._fed(table)
        }

    def behind(
        self,
        tables: Collection[EmbeddingTable],
        beside: Collection[EmbeddingTable] = (),
        max_lag: int = 0,
    ) -> str:
        """Reason why ``tables`` miss updates; empty if nothing is read, or if they miss only the latest: at
        most ``max_lag`` messages of each reader, or those of the last second.

        Readers that also feed tables of ``beside``, the current version, do not count: these miss the same
        updates. Waits while readers restart: tables without a reader at that moment would miss nothing."""
        with self._changing:
            streams = self._readers.streams
        for stream in streams:
            if stream.thread.paused or not self._feeds_any(stream, tables):
                continue
            if self._feeds_any(stream, beside):
                continue
            if stream.ingestor.is_waiting:
                cause = stream.problem or "another process has not written it yet"
                return f"{stream.group} waits for a store: {cause}"
            lag = stream.source.lag()
            if lag is None:
                why = stream.ingestor.problem or stream.source.problem
                suffix = f": {why}" if why else ""
                return f"{stream.group} does not know its partitions or offsets yet{suffix}"
            held = stream.source.held()
            waiting = sum(messages for at, messages in lag.items() if at not in held)
            if waiting > max_lag and not arrived_lately(stream, tables):
                limit = f", and updates.max_lag_at_switch allows {max_lag}" if max_lag else ""
                return f"{stream.group} has {waiting} messages to apply{limit}"
        return ""

    def reached(self, table: EmbeddingTable) -> dict[TopicPartition, int]:
        """Offsets up to which the readers here have the Kafka partitions that change ``table``."""
        return {
            partition: offset
            for stream in self._readers.streams
            if isinstance(stream.source, KafkaSource)
            for partition, offset in stream.source.applied().items()
            if table in stream.readers(partition[0])
        }

    def watch(
        self, served: Callable[[], Iterable[Limited]] = tuple, every_s: float = POLL_EVERY_S
    ) -> None:
        """Keep the freshness of all ``served`` models up to date, on a thread.

        Called once, after the readers were started; without any it does nothing."""
        if not self._readers.streams:
            return

        def poll_ages() -> None:
            self._merge()
            for stream in self._readers.streams:
                with suppress(OSError):  # an unreadable folder is reported by its source
                    stream.pending.poll()
            for freshness, tables in served():
                if ages_s := {table: self.age_s(table) for table in tables}:
                    freshness.judge(ages_s)

        watch = PeriodicThread(poll_ages, every_s, "hps-update-age")
        watch.start(0)
        self._resources.callback(watch.close)

    def write_directly(
        self,
        stores: Sequence[FedStore],
        caches: CacheWriter,
        fixed: Collection[EmbeddingTable] = (),
    ) -> None:
        """Let `write` change the rows of ``stores`` and ``caches``, except in ``fixed`` tables."""
        self._direct = DirectWriter(stores, caches, self._meter, fixed)

    def write(
        self,
        tables: Sequence[EmbeddingTable],
        keys: KeyArray,
        vectors: VectorArray,
        deleted: KeyArray,
    ) -> int:
        """Write rows without a stream; see `hps.updates.direct_writer.DirectWriter.write`."""
        if self._direct is None:
            raise Unavailable("the node is not open")
        return self._direct.write(tables, keys, vectors, deleted)

    def status(self) -> list[dict[str, Any]]:
        return [
            {**stream.status(), "tables": self._ages_in(stream)} for stream in self._readers.streams
        ]

    def pause(self, group: str | None = None, wait_s: float = 10.0) -> None:
        """Pause one group's reader, or all, after the current batch.

        Raises Unavailable when that batch takes longer than ``wait_s``; the pause holds after it."""
        for stream, done in [(each, each.thread.pause()) for each in self._chosen(group)]:
            self._wait("pause", stream, done, wait_s)

    def resume(self, group: str | None = None) -> None:
        for stream in self._chosen(group):
            stream.thread.resume()

    def seek(
        self,
        topic: str,
        partition: int,
        offset: int,
        group: str | None = None,
        wait_s: float = 10.0,
    ) -> None:
        """Continue a partition at ``offset``, backwards or forwards. Newer rows stay.

        Raises NotFound for a partition that is not read here, BadRequest when it ends before ``offset``."""
        if offset < 0 or partition < 0:
            raise BadRequest("partition and offset must be 0 or more")
        found, unknown = False, ""
        for stream in self._chosen(group):
            source = stream.source
            if not isinstance(source, KafkaSource):
                continue
            if (lag := source.lag()) is None:
                unknown = stream.group
            if (topic, partition) not in (lag or ()):
                continue
            found = True
            done = stream.thread.call(partial(source.seek, topic, partition, offset))
            self._wait("seek", stream, done, wait_s)
        if not found and unknown:
            raise Unavailable(f"{unknown} does not know yet which partitions it reads; try again")
        if not found:
            raise NotFound(f"no partition {partition} of topic {topic!r} is read here")

    def age_s(self, table: EmbeddingTable) -> float:
        """Possible age in seconds of the rows of ``table``: that of its first unapplied update.

        Never waits. 0 when everything known is applied. While a reader does not know which messages it
        misses: the age of the newest row that it applied, or the time since it started. Of a table that
        gets no updates any more: the time since it had all updates."""
        now, current_s = time.time(), self._current_s.get(table, 0.0)
        if current_s and table not in self._readers.tables:
            return max(0.0, now - current_s)
        return max((self._age_s(table, each, now) for each in self._readers.streams), default=0.0)

    def _age_s(self, table: EmbeddingTable, stream: UpdateReader, now: float) -> float:
        """`age_s` with respect to one stream."""
        oldest_s = 0.0
        for (topic, _partition), age_s in stream.pending.ages_s().items():
            if table not in stream.readers(topic):
                continue
            if age_s is None:  # waiting messages may be of any age, but are applied in order
                known_s = max(
                    stream.ingestor.newest_s.get(table, 0.0), self._current_s.get(table, 0.0)
                )
                age_s = now - (known_s or stream.began_s)
            oldest_s = max(oldest_s, age_s)
        return oldest_s

    def _ages_in(self, stream: UpdateReader) -> list[dict[str, Any]]:
        """Age of each table that a stream feeds, ready for JSON."""
        now = time.time()
        return [
            {
                "model": t.model,
                "table": t.name,
                "version": t.version,
                "age_s": round(self._age_s(t, stream, now), 3),
            }
            for t in self._readers.tables
            if self._feeds(stream, t)
        ]

    def _merge(self) -> None:
        """Let one reader feed all tables that have caught up."""
        with self._changing:
            if feeds := self._readers.joinable(has_caught_up):
                self._note_ages()
                self._readers.join(feeds)

    def _feeds_any(self, stream: UpdateReader, tables: Iterable[EmbeddingTable]) -> bool:
        return any(self._feeds(stream, table) for table in tables)

    def _fed(self, table: EmbeddingTable) -> bool:
        return any(self._feeds(stream, table) for stream in self._readers.streams)

    def _feeds(self, stream: UpdateReader, table: EmbeddingTable) -> bool:
        return table in stream.readers(native_topic(table.model))

    def _wait(self, what: str, stream: UpdateReader, done: Future[None], wait_s: float) -> None:
        try:
            done.result(wait_s)
        except (TimeoutError, CancelledError):
            done.cancel()
            why = stream.ingestor.problem or "the node is closing, or writes a large batch"
            raise Unavailable(f"{stream.group} did not {what} within {wait_s:g} s: {why}") from None

    def _chosen(self, group: str | None) -> list[UpdateReader]:
        if not self._readers.streams:
            raise NotFound("no updates are read here; set updates.kafka or updates.directory")
        chosen = [s for s in self._readers.streams if group in (None, s.group)]
        if not chosen:
            groups = ", ".join(s.group for s in self._readers.streams)
            raise NotFound(f"no reader is of group {group!r}; there are: {groups}")
        return chosen

    def _lags(self) -> Iterable[tuple[tuple[str, ...], float]]:
        for stream in self._readers.streams:
            for (topic, partition), messages in (stream.source.lag() or {}).items():
                yield (stream.group, topic, str(partition)), messages

    def _held(self) -> Iterable[tuple[tuple[str, ...], float]]:
        for stream in self._readers.streams:
            lag = stream.source.lag() or {}
            for topic, partition in stream.source.held():
                yield (stream.group, topic, str(partition)), lag.get((topic, partition), 0)

    def _each(
        self, read: Callable[[UpdateReader], bool]
    ) -> Callable[[], list[tuple[tuple[str, ...], float]]]:
        """Make a gauge's reader: ``read`` of each stream reader, by group."""
        return lambda: [((each.group,), read(each)) for each in self._readers.streams]

    def _ages(self) -> Iterable[tuple[tuple[str, ...], float]]:
        if self._readers.streams:
            ages: dict[tuple[str, ...], float] = {}
            late = self._readers.catching_up
            for table in self._readers.tables:
                of = table.model, table.name
                if table not in late:
                    ages[of] = max(ages.get(of, 0.0), self.age_s(table))
            yield from ages.items()


def node_group(settings: KafkaSettings) -> str:
    """Group to which a node's own reader commits its offsets; also its member name in the shared group."""
    return f"{NODE}{settings.group or socket.gethostname()}"
