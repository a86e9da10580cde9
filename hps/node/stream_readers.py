"""Readers of a node's update streams: started with the node, for the tables of all served versions.

The readers of one feed apply each message to all of its tables. A table that is added gets a feed of its
own, which starts where the table's files end: the others go on and are not read again from there. Once it
has caught up, one feed has all tables again."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

from hps.config.update_settings import DirectorySettings, KafkaSettings
from hps.observability.meters import StreamMeter, TrainedWith, UpdateMeter
from hps.observability.metrics import Metrics
from hps.types import EmbeddingTable
from hps.updates.arrival_times import PendingUpdates
from hps.updates.cache_writer import CacheWriter
from hps.updates.files.applied_files import AppliedFiles
from hps.updates.files.directory import DirectorySource, PendingFiles
from hps.updates.followed_store import FollowedStore
from hps.updates.ingest_thread import IngestThread
from hps.updates.ingestor import Ingestor
from hps.updates.kafka.client import DeadLetterTopic
from hps.updates.kafka.end_offsets import PendingMessages
from hps.updates.kafka.hps_group import HpsProgress, ReaderGroup, hps_group
from hps.updates.kafka.kept_letters import KeptLetters
from hps.updates.kafka.source import KafkaSource
from hps.updates.source import UpdateSource
from hps.updates.stream_positions import FedStore, Readers, StoreStreamPositions, StreamPositions
from hps.updates.topics import ServedTables, TopicTables

# How far back reading starts where HPS feeds the store, which then has no positions: updates that HPS may
# not have written yet when the caches were filled.
_OVERLAP_S = 600.0

Watermarks = Mapping[EmbeddingTable, Mapping[str, Mapping[str, int]]]
"""Stream offsets that each table's files contain (`Manifest.watermark`)."""


@dataclass(frozen=True, slots=True)
class UpdateReader:
    """One reader: its ``group``, source, ingestor and their thread.

    ``pending``: its unapplied updates; ``readers``: tables that a topic may change; ``began_s``: start of
    reading (Unix seconds)."""

    group: str
    kind: str
    source: UpdateSource
    ingestor: Ingestor
    thread: IngestThread
    pending: PendingUpdates
    readers: Readers
    began_s: float = field(default_factory=time.time)

    @property
    def problem(self) -> str | None:
        """Reason why no updates are applied, if there is one."""
        return self.ingestor.problem or self.source.problem

    def status(self) -> dict[str, Any]:
        """Status for JSON. ``lag`` is null while unknown.

        ``state`` is ``starting`` while partitions or their start offsets are unknown."""
        lag = self.source.lag()
        state = "paused" if self.thread.paused else "starting" if lag is None else "running"
        return {
            "group": self.group,
            "source": self.kind,
            "state": state,
            "problem": self.problem,
            "stores": self.ingestor.store_names,
            "caches": self.ingestor.refreshes,
            "lag": None if lag is None else sum(lag.values()),
            "held": [
                {
                    "topic": at[0],
                    "partition": at[1],
                    "offset": rows.offset,
                    "network": rows.dense_version,
                }
                for at, rows in sorted(self.source.held().items())
            ],
            "partitions": [
                {"topic": topic, "partition": partition, "lag": messages}
                for (topic, partition), messages in sorted((lag or {}).items())
            ],
        }


@dataclass(eq=False, slots=True)
class Feed:
    """Readers of the same ``tables``. ``number``: 1 for the first feed; ``caught_up``: it was once."""

    number: int
    tables: list[EmbeddingTable]
    caught_up: bool = True
    streams: list[UpdateReader] = field(default_factory=list)
    resources: ExitStack = field(default_factory=ExitStack)


Begin = Callable[[Feed], None]
"""Starts one reader for a feed's tables."""


class StreamReaders:
    """The readers of one node, which ``resources`` closes.

    The first reader registers them there, so that they end before the stores and caches that they write
    to. One thread at a time starts readers or calls another method; any may read ``streams`` and
    ``tables``."""

    def __init__(
        self,
        tables: Iterable[EmbeddingTable],
        watermarks: Watermarks,
        metrics: Metrics,
        resources: ExitStack,
        hold_s: float | None = None,
    ) -> None:
        """``hold_s``: see `ServedTables`."""
        self.streams: list[UpdateReader] = []
        self.networks: dict[EmbeddingTable, TrainedWith] = {}
        """The newest network and step of the rows that each table got."""
        self.tables = list(dict.fromkeys(tables))
        self._watermarks = watermarks
        self.served = ServedTables(self.tables, hold_s)
        self._metrics = metrics
        self._meter = UpdateMeter(metrics, networks=self.networks)
        self._kept = KeptLetters()
        self._resources = resources
        self.applied_files: AppliedFiles | None = None
        self._kafka: list[Begin] = []
        self._folder: list[Begin] = []
        self._takes: list[Callable[[str], bool]] = []  # models that Kafka updates
        self._follows = False
        self._paused: Collection[str] = ()  # groups whose readers start paused
        self._feeds = [Feed(1, [*self.tables])]
        # Files are moved away once they are applied, so that one reader has all tables.
        self._files = Feed(1, [*self.tables])

    def read_kafka(
        self,
        settings: KafkaSettings,
        group: str,
        stores: Sequence[FedStore],
        caches: CacheWriter | None,
        *,
        followed: FollowedStore | None = None,
        member: str | None = None,
    ) -> None:
        """Start a reader of all partitions or, as ``member`` of the ``group``, of a share of them.

        Without ``stores`` the caches are refreshed once ``followed`` has the updates. Raises
        ConfigError; never because Kafka is unavailable."""
        self._follows |= followed is not None
        self._takes.append(settings.takes)
        begin = partial(self._read_kafka, settings, group, stores, caches, followed, member)
        self._add(begin, self._kafka, self._feeds[0])

    def read_folder(
        self, settings: DirectorySettings, stores: Sequence[FedStore], caches: CacheWriter
    ) -> None:
        """Start a reader of a folder's files. Raises ConfigError."""
        self.applied_files = AppliedFiles(settings, stores, caches)
        self._add(partial(self._read_folder, settings, stores, caches), self._folder, self._files)

    def set_tables(self, tables: Iterable[EmbeddingTable], watermarks: Watermarks) -> None:
        """Feed ``tables``, and no others; those that were not fed before catch up in a feed of their own.

        Readers start at the stores' positions. A paused reader stays paused."""
        self._watermarks = watermarks
        self.tables = list(dict.fromkeys(tables))
        self.served.set(self.tables)
        for table in self.networks.keys() - set(self.tables):
            self.networks.pop(table, None)
        for feed in [*self._feeds]:
            kept = [table for table in feed.tables if table in set(self.tables)]
            if not kept and feed is not self._feeds[0]:
                self._end(feed)
            elif kept != feed.tables:
                self._restart(feed, kept)
        fed = {table for feed in self._feeds for table in feed.tables}
        added = [table for table in self.tables if table not in fed]
        first = self._feeds[0]
        if not first.tables:
            self._join(self.tables)
        else:
            late = [table for table in added if any(takes(table.model) for takes in self._takes)]
            first.tables += [table for table in added if table not in late]
            if late:
                self._add_feed(late)
        if self._files.tables != self.tables:
            self._restart(self._files, self.tables)

    def joinable(self, has_caught_up: Callable[[Feed], bool]) -> list[Feed]:
        """The feeds whose tables the first one can take over, since they have caught up.

        None where readers follow a store: a version that its writer does not feed must not hold up the
        others."""
        first, *later = self._feeds
        ready = [feed for feed in later if feed.caught_up or has_caught_up(feed)]
        for feed in ready:
            feed.caught_up = True
        if not ready or self._follows or not has_caught_up(first):
            return []
        return [feed for feed in ready if self._limits(feed) == self._limits(first, feed)]

    def _limits(self, feed: Feed, of: Feed | None = None) -> set[tuple[str, int]]:
        """Networks whose rows the models of ``of`` (default: of ``feed``) may get in ``feed``.

        Where they differ, one feed cannot have all: its rows wait for the lower limit."""
        models = {table.model for table in (of or feed).tables}
        tables = [table for table in feed.tables if table.model in models]
        return {(table.model, self.served.limit(table)) for table in tables}

    def join(self, feeds: Sequence[Feed]) -> None:
        """Let the first feed have the tables of these, too."""
        joined = (self._feeds[0], *feeds)
        self._join([table for feed in joined for table in feed.tables], feeds)

    @property
    def catching_up(self) -> set[EmbeddingTable]:
        """Tables of feeds that have not caught up yet."""
        late = [feed for feed in self._feeds if not feed.caught_up]
        return {table for feed in late for table in feed.tables}

    # -- feeds -----------------------------------------------------------------------------------

    def _add_feed(self, tables: list[EmbeddingTable]) -> None:
        numbers = {feed.number for feed in self._feeds}
        feed = Feed(next(n for n in count(2) if n not in numbers), tables, caught_up=False)
        self._paused = _paused_groups(self._feeds[0].streams)
        self._feeds.append(feed)
        self._begin(feed)

    def _join(self, tables: Sequence[EmbeddingTable], feeds: Sequence[Feed] | None = None) -> None:
        """Restart the first feed with ``tables``, in place of ``feeds``, all by default."""
        for feed in self._feeds[1:] if feeds is None else feeds:
            self._end(feed)
        self._restart(self._feeds[0], tables)

    def _add(self, begin: Begin, begins: list[Begin], feed: Feed) -> None:
        if not self._kafka and not self._folder:
            self._resources.callback(self._close)
        begins.append(begin)
        begin(feed)
        self._list()

    def _begin(self, feed: Feed) -> None:
        for begin in self._folder if feed is self._files else self._kafka:
            begin(feed)
        self._list()

    def _restart(self, feed: Feed, tables: Sequence[EmbeddingTable]) -> None:
        """Restart the readers of ``feed`` for ``tables``, at the stores' positions."""
        self._paused = _paused_groups(feed.streams)
        feed.streams = []
        self._list()
        feed.resources.close()
        feed.tables = list(tables)
        self._begin(feed)

    def _end(self, feed: Feed) -> None:
        self._feeds.remove(feed)
        self._list()
        feed.resources.close()

    def _list(self) -> None:
        self.streams = [each for feed in (*self._feeds, self._files) for each in feed.streams]

    def _close(self) -> None:
        for feed in (*self._feeds, self._files):
            feed.resources.close()

    # -- readers ---------------------------------------------------------------------------------

    def _read_kafka(
        self,
        settings: KafkaSettings,
        group: str,
        stores: Sequence[FedStore],
        caches: CacheWriter | None,
        followed: FollowedStore | None,
        member: str | None,
        feed: Feed,
    ) -> None:
        is_first = feed.number == 1
        topics = TopicTables(feed.tables, settings.takes, self.served, alone=is_first)
        fed_by = settings.shared_group if followed and followed.info.shared else group
        hps = self._hps_progress(settings, fed_by, followed, feed)
        if followed is None:
            positions: StreamPositions = StoreStreamPositions(
                stores, topics.readers, self._contained
            )
        else:
            other_writer = None if hps is None else hps.applied
            positions = followed.positions(topics.readers, self._contained, other_writer)
        name = group if is_first else "+".join(filter(None, (group, member, str(feed.number))))
        source = KafkaSource(
            settings,
            ReaderGroup(name, hps_group(fed_by), member if is_first else None),
            topics,
            positions,
            StreamMeter(self._metrics, name),
            since_s=None if hps is None else time.time() - _OVERLAP_S,
        )
        dead_letters = DeadLetterTopic(settings, self._kept)
        feed.resources.callback(dead_letters.close)
        meter = self._meter
        if not feed.caught_up:
            meter = UpdateMeter(self._metrics, is_replay=True, networks=self.networks)
        ingestor = Ingestor(source, topics.tables, positions, caches, dead_letters, meter)
        pending = PendingMessages(source.cluster, source, topics.names)
        self._start(feed, name, "kafka", source, ingestor, pending, topics.readers)

    def _hps_progress(
        self, settings: KafkaSettings, group: str, followed: FollowedStore | None, feed: Feed
    ) -> HpsProgress | None:
        """HPS's offsets in the streams, if HPS may feed ``followed`` instead of our ``group``.

        It may if the store has HPS's layout and no node of ours writes it."""
        if followed is None or followed.versioned:
            return None
        if followed.info.shared and settings.shared_writer == "nodes":
            return None
        progress = HpsProgress(settings, hps_group(group))
        feed.resources.callback(progress.close)
        return progress

    def _read_folder(
        self,
        settings: DirectorySettings,
        stores: Sequence[FedStore],
        caches: CacheWriter,
        feed: Feed,
    ) -> None:
        topics = TopicTables(feed.tables, settings.takes)
        source = DirectorySource(settings, topics.tables)
        positions = StoreStreamPositions(stores, topics.readers)
        ingestor = Ingestor(source, topics.tables, positions, caches, source, self._meter)
        tables = [table for some in topics.tables.values() for table in some]
        assert self.applied_files is not None
        source.on_applied = partial(self.applied_files.record, tables)
        pending = PendingFiles(settings.path)
        self._start(
            feed, "directory", "directory", source, ingestor, pending, lambda _folder: tables
        )

    def _start(
        self,
        feed: Feed,
        group: str,
        kind: str,
        source: UpdateSource,
        ingestor: Ingestor,
        pending: PendingUpdates,
        readers: Readers,
    ) -> None:
        thread = IngestThread(ingestor, source, f"hps-ingest-{len(self.streams)}")
        if _base(group) in self._paused:
            thread.pause()
        feed.streams.append(UpdateReader(group, kind, source, ingestor, thread, pending, readers))
        feed.resources.callback(thread.close)
        thread.start()

    def _contained(self, table: EmbeddingTable, topic: str, partition: int) -> int | None:
        return self._watermarks.get(table, {}).get(topic, {}).get(str(partition))


def _paused_groups(streams: Iterable[UpdateReader]) -> set[str]:
    return {_base(stream.group) for stream in streams if stream.thread.paused}


def _base(group: str) -> str:
    """The group of the first feed's reader; those of others have a suffix."""
    return group.partition("+")[0]
